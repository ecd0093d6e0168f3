"""The 48 runs of the paper's tables, each as the settings of a training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from spheret.connections import PAPER_SCHEMES, scheme
from spheret.data.corpora import resolve
from spheret.data.preparation import cache_path
from spheret.model.gpt import PRESETS
from spheret.runs.config import RunConfig, complete, merge
from spheret.runs.recipes import LEARNING_RATES, PAPER

DATASETS = ("fineweb-edu", "openwebtext")
SIZES = tuple(PRESETS)
# the paper discusses Post-LN, but none of its tables has it
TABLE_SCHEMES = tuple(name for name in PAPER_SCHEMES if name != "post-ln")
TOKENIZER, VOCAB_SIZES = "gpt2", (50_257, 50_304)

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

ASSUMPTIONS = (
    "Initialisation: nanoGPT's, N(0, 0.02); projections that write to the stream start smaller by sqrt(2N).",
    "Validation: every 500 updates, on 512 fixed windows. The paper reports the final loss and not on which text.",
    "Data: the sample-10BT of FineWeb-Edu, the trainer's own order of windows, documents split by their hash.",
    "Seeds: one, as in the paper. A difference within the spread of seeds is not a difference.",
)
GEONORM_SCHEDULE = "GeoNorm's schedule: harmonic, 1/l, as in its own paper. This paper's tables do not name it."


@dataclass(frozen=True)
class PaperRun:
    """One run of the paper's tables. With `smoke` it is a tiny run of the same kind, whose numbers mean nothing."""

    dataset: str
    size: str
    scheme: str
    smoke: bool = False

    @property
    def name(self) -> str:
        return ("smoke-" if self.smoke else "") + f"{self.dataset}-{self.size}-{self.scheme}"

    @property
    def assumptions(self) -> list[str]:
        """What the paper leaves open and this run settles."""
        return [*([GEONORM_SCHEDULE] if self.scheme == "geonorm" else []), *ASSUMPTIONS]

    def data(self, root: Path | None) -> str:
        """Where its data is: below `root`, or in the cache, where `spheret prepare` writes it."""
        if self.smoke:
            return "sotu"
        if root is not None:
            return str(root / self.dataset)
        corpus = resolve(self.dataset)
        return str(cache_path(corpus, TOKENIZER, corpus.val_fraction))

    def settings(self, root: Path | None, batch_size: int | None = None) -> dict[str, Any]:
        """What to ask of the trainer. With more processes each takes a smaller batch: an update stays the same."""
        lr = LEARNING_RATES[self.size]
        # a tenth, as the table prints it: 6e-05 and not the float below it
        own: dict[str, Any] = {
            "size": self.size,
            "model": {"scheme": self.scheme},
            "data": {"path": self.data(root)},
            "train": {"lr": lr, "min_lr": float(f"{lr / 10:g}")},
        }
        if hasattr(scheme(self.scheme), "exact_clamp"):
            # the paper's torch.clamp for the bounded scalars
            own["model"]["scheme_options"] = {"exact_clamp": True}
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
        return complete(self.settings(root, batch_size), "cpu", 1, *vocab_sizes)


def paper_runs(dataset: str | None = None, size: str | None = None, scheme: str | None = None) -> list[PaperRun]:
    """Those of the 48 that are named; a name that is not given means all of its kind."""
    datasets, sizes = (dataset,) if dataset else DATASETS, (size,) if size else SIZES
    schemes = (scheme,) if scheme else TABLE_SCHEMES
    return [PaperRun(*names) for names in product(datasets, sizes, schemes)]
