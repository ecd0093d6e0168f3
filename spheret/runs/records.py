"""What the JSON files of a run directory hold: config.json, and in each checkpoint state.json and manifest.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from spheret.data.manifest import CorpusRecord, TokenizerRecord
from spheret.observe.judge import JudgeState
from spheret.runs.config import section_as_dict
from spheret.runs.layout import MODEL, OPTIMIZER, STATE
from spheret.support.documents import Count, Document, Fraction, NonNegative, Positive, Record, Sha256, Text


class DataRecord(Record):
    """The data that a run was trained on. A run that was not trained here has a tokenizer and nothing else."""

    path: Text | None
    manifest_sha256: Sha256 | None
    corpus: CorpusRecord | None
    tokenizer: TokenizerRecord
    # per split
    tokens: dict[str, Count] | None
    val_fraction: Fraction | None
    unigram_entropy: NonNegative | None

    def __post_init__(self) -> None:
        together = ("path", "manifest_sha256", "corpus", "tokens", "val_fraction", "unigram_entropy")
        if len({getattr(self, name) is None for name in together}) > 1:
            raise ValueError(f"{', '.join(together)} belong together: all or none is null")


class Environment(Record, omit_defaults=True):
    """Where a run was started, for people: nothing is computed from it."""

    spheret: str | None = None
    torch: str | None = None
    python: str | None = None
    processor: str | None = None
    threads: Positive | None = None
    gpu: str | None = None
    device: str | None = None
    processes: Positive | None = None
    parallel: str | None = None
    commit: str | None = None
    command: str | None = None
    started: str | None = None
    # of weights that were trained elsewhere
    transformers: str | None = None
    imported: str | None = None
    model_type: str | None = None


class RunRecord(Record):
    """config.json. In memory the sections of settings are configs; in the file each is a table, which `build_section`
    checks as it checks config files.
    """

    # GPTConfig, TrainConfig and EvaluationConfig; the last two are null in a run that was not trained here
    model: Any
    train: Any
    evaluation: Any
    data: DataRecord
    environment: Environment
    format: str = "spheret-run"
    version: int = 3

    def __post_init__(self) -> None:
        if len({part is None for part in (self.train, self.evaluation, self.data.path)}) > 1:
            raise ValueError("train, evaluation and data.path belong together: all or none is null")

    def sections(self) -> dict[str, Any]:
        """The sections of settings that there are."""
        names = ("model",) if self.train is None else ("model", "train", "evaluation")
        return {name: getattr(self, name) for name in names}

    def settings(self, section: str) -> dict[str, Any]:
        """The settings of a section as plain data; empty for a section that the run does not have."""
        values = getattr(self, section)
        return {} if values is None else section_as_dict(values)

    def as_dict(self) -> dict[str, Any]:
        """Every section but the environment, as plain data."""
        sections = {name: self.settings(name) for name in ("model", "train", "evaluation")}
        return {**sections, "data": msgspec.to_builtins(self.data)}


class BestRecord(Record):
    """The lowest validation loss of a checkpoint, and its step."""

    step: Positive
    val_loss: float


class TrainingRecord(Record):
    """What a training needs besides weights and moments to continue bit for bit."""

    last_val_loss: float | None
    best: BestRecord | None
    seconds: NonNegative
    # what the judge of losses and sublayers remembers
    judge: JudgeState
    # one per process: the states of its random generators. None at all would look like a world of a different size
    rng: Annotated[list[Annotated[str, Meta(pattern="^([0-9a-f]{2})+(,([0-9a-f]{2})+)*$")]], Meta(min_length=1)]
    threads: Annotated[int, Meta(ge=1, le=4096)]
    # what computed the updates: native, closed, triton, ...
    backend: Text
    # the settings that led here: they must not have changed when the run continues
    config: dict[str, dict[str, Any]]
    manifest_sha256: Sha256


class StateRecord(Record):
    """state.json of a checkpoint. Weights that were not trained here have no `training`."""

    step: Count
    val_loss: float | None
    training: TrainingRecord | None


class FileRecord(Record):
    """A file of a checkpoint."""

    bytes: Count
    sha256: Sha256


class CheckpointRecord(Record, omit_defaults=True):
    """manifest.json of a checkpoint: every other file in it. Weights that were not trained here have no moments."""

    model: FileRecord = msgspec.field(name=MODEL)
    state: FileRecord = msgspec.field(name=STATE)
    optimizer: FileRecord | UnsetType = msgspec.field(name=OPTIMIZER, default=UNSET)

    @classmethod
    def of(cls, entries: dict[str, FileRecord]) -> CheckpointRecord:
        return cls(model=entries[MODEL], state=entries[STATE], optimizer=entries.get(OPTIMIZER, UNSET))

    def files(self) -> dict[str, FileRecord]:
        """The entry of each file, by its name."""
        entries = {MODEL: self.model, STATE: self.state}
        return entries if self.optimizer is UNSET else {**entries, OPTIMIZER: self.optimizer}


class RunSample(Record):
    """A text, and what it takes to have the same text again with `spheret sample`.

    text: what the model wrote after the prompt. prompt: "" begins a new document.
    step: the step of the weights. tokens: how many were drawn.
    """

    text: str
    prompt: str
    seed: Count
    temperature: NonNegative
    tokens: Count
    step: Count
    format: str = "spheret-sample"
    version: int = 1


def corpus_name(config: Mapping[str, Any]) -> str | None:
    """The corpus of a run, from its config as plain data."""
    corpus = config["data"]["corpus"]
    return None if corpus is None else corpus["name"]


RUNS = Document(RunRecord, "train", "copy it back, or train again")
STATES = Document(StateRecord, "train", "take another checkpoint")
MANIFESTS = Document(CheckpointRecord, "train", "take another checkpoint")
RUN_SAMPLES = Document(RunSample, "train", "delete it, and run the same spheret train again to have a new one")
