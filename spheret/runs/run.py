"""A run directory, opened. Its `config.json` is enough to rebuild the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from spheret.data import Data, Tokenizer, open_data, tokenizers
from spheret.data.manifest import MANIFESTS, TokenizerRecord
from spheret.data.shards import MANIFEST as DATA_MANIFEST
from spheret.data.shards import TOKENIZER
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs import checkpoint
from spheret.runs.checkpoint import Checkpoint
from spheret.runs.config import DataConfig, RunConfig, build_section, changed_settings, section_as_dict
from spheret.runs.cost import check_model
from spheret.runs.layout import CHECKPOINTS, CONFIG, LOCK, METRICS, MODEL
from spheret.runs.metrics import MetricsRecord, whole_metrics
from spheret.runs.records import RUNS, DataRecord, Environment, RunRecord, StateRecord
from spheret.runs.tensors import form, lazy_tensor
from spheret.support import files

# so many settings that differ fit into a sentence
MOST_CHANGES = 5


@dataclass(frozen=True)
class Run:
    """A run directory that `spheret train` wrote. It is only read here. `open_run` makes one.

    Args:
        path: the directory.
        config: what its config.json holds.
    """

    path: Path
    config: RunRecord

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def model_config(self) -> GPTConfig:
        return self.config.model

    @property
    def settings(self) -> RunConfig:
        """What was asked of the run."""
        config = self.config
        if config.train is None or config.evaluation is None or config.data.path is None:
            raise ValueError(
                f"{self.path} was not trained here: start a run of its weights with "
                f"--set train.init_from={self.path}."
            )
        return RunConfig(config.model, DataConfig(config.data.path), config.train, config.evaluation)

    @property
    def steps(self) -> int:
        """How many updates the run was asked for."""
        return 0 if self.config.train is None else self.config.train.steps

    def metrics(self) -> list[MetricsRecord]:
        """One record per step, in order. A last line that a kill cut short is left out; a gap is an error."""
        # asked first: while a run trains, its metrics are never behind its checkpoints
        saved = checkpoint.steps(self.path / CHECKPOINTS)
        return whole_metrics(self.path / METRICS, max(saved, default=0))

    def is_locked(self) -> bool:
        """Whether a process is training in this directory now."""
        return files.is_locked(self.path / LOCK)

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of a step, or the newest whole one. Its tensors are not compared with the model."""
        return self._find(step, self.check_unedited)

    def _find(self, step: int | None, check: Callable[[Checkpoint], object]) -> Checkpoint:
        directory = self.path / CHECKPOINTS
        if step is None:
            newest = checkpoint.newest(directory, check=check)
            if newest is None:
                raise FileNotFoundError(f"{self.path} has no checkpoint yet: train it, or wait for its first.")
            return newest
        if step not in checkpoint.steps(directory):
            known = ", ".join(map(str, checkpoint.steps(directory))) or "none"
            raise FileNotFoundError(f"{self.path} has no checkpoint of step {step}: there are {known}.")
        try:
            saved = checkpoint.verify(directory / f"step-{step}")
            check(saved)
            return saved
        except checkpoint.Damaged as error:
            raise ValueError(f"checkpoint step-{step} of {self.path} is damaged, {error}: take another.") from None

    def check_unedited(self, saved: Checkpoint | None = None) -> None:
        """Raise unless the config is the checkpoint's; without one, the newest checkpoint's whose state is whole."""
        sections = ("model", "train", "evaluation")
        saved = checkpoint.newest_state(self.path / CHECKPOINTS) if saved is None else saved
        if saved is not None:
            check_config(saved, self.path, {section: self.config.settings(section) for section in sections})

    def load(self, step: int | None = None, device: str | torch.device = "cpu") -> tuple[GPT, Checkpoint]:
        """The model with a checkpoint's weights, for evaluation, and the checkpoint.

        Args:
            step: the checkpoint's; None takes the newest whose weights fit the model.
            device: where the model goes.
        """
        # before anything is built from the config
        check_model(self.model_config, torch.device(device), f"the model of {self.path}")

        def check(saved: Checkpoint) -> None:
            self.check_unedited(saved)
            with torch.device("meta"):
                wanted = {name: form(tensor) for name, tensor in GPT(self.model_config).state_dict().items()}
            checkpoint.check_tensors(saved, {MODEL: wanted})

        saved = self._find(step, check)
        with torch.random.fork_rng(devices=[]):
            model = GPT(self.model_config)
        model.load_state_dict(dict(saved.model()))
        return model.to(device).eval(), saved

    def model(self, step: int | None = None, device: str | torch.device = "cpu") -> GPT:
        """The model with a checkpoint's weights, for evaluation."""
        return self.load(step, device)[0]

    def data(self) -> Data:
        """The data that the run was trained on, checked to be the same."""
        described = self.config.data
        if described.path is None:
            raise FileNotFoundError(f"{self.path} was not trained here and names no data: give some with --data.")
        data = open_data(described.path)
        if manifest_sha256(data) != described.manifest_sha256:
            raise ValueError(
                f"the data at {described.path} has changed since {self.path} was trained: prepare it as it was."
            )
        return data

    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer. The data is not needed."""
        return tokenizers.stored(self.path, self.config.data.tokenizer)


def manifest_sha256(data: Data) -> str:
    """The hash of the manifest, which identifies the data."""
    return hashlib.sha256(MANIFESTS.read_bytes(data.path / DATA_MANIFEST)).hexdigest()


def is_run(directory: Path) -> bool:
    """Whether a directory holds a run: models of transformers have a config.json too."""
    config = directory / CONFIG
    return config.is_file() and RUNS.format_of(config) == RUNS.format


def open_run(path: str | Path) -> Run:
    """Open a run directory and check its config. Weights are not read.

    Args:
        path: the directory.
    """
    directory = Path(path).expanduser()
    hint = "make one with spheret train --out RUN"
    if not directory.is_dir():
        raise FileNotFoundError(f"no run directory at {directory}: {hint}.")
    path = directory / CONFIG
    try:
        record = RUNS.read(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{directory} holds no {CONFIG} and is not a run: {hint}.") from None
    sections = {name: build_section(path, name, values) for name, values in record.sections().items()}
    return Run(directory, msgspec.structs.replace(record, **sections))


def check_config(saved: Checkpoint, path: Path, settings: dict[str, Any]) -> None:
    """Raise unless a checkpoint was trained with these settings, which the config of the run at `path` has now."""
    if saved.state.training is None:
        return
    changes = [
        f"{name} (step-{saved.step} was trained with {before!r}, {CONFIG} has {after!r})"
        for name, before, after in changed_settings(saved.state.training.config, settings)
    ]
    if changes:
        more = f", and {len(changes) - MOST_CHANGES} more" if len(changes) > MOST_CHANGES else ""
        raise ValueError(
            f"{path / CONFIG} has changed since its checkpoint was saved; these differ: "
            f"{', '.join(changes[:MOST_CHANGES])}{more}. Put them back."
        )


def describe_data(data: Data) -> DataRecord:
    """The data section of config.json."""
    return DataRecord(
        path=str(data.path.resolve()),
        manifest_sha256=manifest_sha256(data),
        corpus=data.manifest.corpus,
        tokenizer=data.manifest.tokenizer,
        tokens=data.manifest.tokens,
        val_fraction=data.manifest.val_fraction,
        unigram_entropy=data.unigram_entropy(),
    )


def write_config(path: Path, config: RunRecord, tokenizer_file: bytes | None) -> None:
    """Write config.json, and before it the tokenizer's file if there is one."""
    if tokenizer_file is not None:
        files.write_atomically(path / TOKENIZER, tokenizer_file)
    try:
        plain = {name: section_as_dict(section) for name, section in config.sections().items()}
        RUNS.write(path / CONFIG, msgspec.structs.replace(config, **plain))
    except OSError:
        # without a config the directory would not be recognised as a run
        if tokenizer_file is not None:
            (path / TOKENIZER).unlink(missing_ok=True)
        raise


def create_run(
    path: str | Path,
    model: GPT,
    tokenizer: TokenizerRecord,
    tokenizer_file: bytes | None = None,
    environment: dict[str, Any] | None = None,
) -> Run:
    """Write a run directory for weights from elsewhere: one checkpoint, step-0, and no training."""
    directory = Path(path).expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not empty: give a new directory.")
    directory.mkdir(parents=True, exist_ok=True)
    parts = {MODEL: [lazy_tensor(name, tensor) for name, tensor in model.state_dict().items()]}
    checkpoint.save(directory / CHECKPOINTS, parts, StateRecord(step=0, val_loss=None, training=None))
    config = RunRecord(
        model=model.config,
        train=None,
        evaluation=None,
        data=DataRecord(None, None, None, tokenizer, None, None, None),
        environment=Environment(**(environment or {})),
    )
    write_config(directory, config, tokenizer_file)
    return open_run(directory)
