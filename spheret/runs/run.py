"""A run directory, which is all that the stages share: `config.json` alone rebuilds the model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spheret.support import files
from spheret.data import Data, Tokenizer, open_data, tokenizers
from spheret.data.shards import MANIFEST as DATA_MANIFEST
from spheret.data.shards import TOKENIZER
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs import checkpoint
from spheret.runs.config import RunConfig, from_dict
from spheret.runs.layout import CHECKPOINTS, CONFIG, LOCK, METRICS, MODEL
from spheret.runs.checkpoint import Checkpoint
from spheret.runs.metrics import read_metrics
from spheret.runs.tensors import entry

FORMAT, VERSION = "spheret-run", 1


@dataclass(frozen=True)
class Run:
    """What `spheret train` left in a directory, read and never written."""

    path: Path
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def model_config(self) -> GPTConfig:
        return GPTConfig.from_dict(self.config["model"])

    @property
    def settings(self) -> RunConfig:
        """What was asked of the run, checked."""
        return from_dict({**self.config, "data": {"path": self.config["data"]["path"]}})

    @property
    def steps(self) -> int:
        """How many updates the run was asked for."""
        return int(self.config["train"]["steps"])

    def metrics(self) -> list[dict[str, Any]]:
        """A record a step, in order; a last line that was cut short by a kill is left out."""
        return [record for record, _ in read_metrics(self.path / METRICS)]

    def is_locked(self) -> bool:
        """Whether a process is training in it now."""
        return files.is_locked(self.path / LOCK)

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of a step, or the newest whole one."""
        directory = self.path / CHECKPOINTS
        if step is None:
            found = checkpoint.newest(directory)
            if found is None:
                raise FileNotFoundError(f"{self.path} has no checkpoint yet: train it, or wait for its first.")
            return found
        if step not in checkpoint.steps(directory):
            known = ", ".join(map(str, checkpoint.steps(directory))) or "none"
            raise FileNotFoundError(f"{self.path} has no checkpoint of step {step}: there are {known}.")
        try:
            return checkpoint.verify(directory / f"step-{step}")
        except checkpoint.Damaged as error:
            raise ValueError(f"checkpoint step-{step} of {self.path} is damaged, {error}: take another.") from None

    def model(self, step: int | None = None, device: str | torch.device = "cpu") -> GPT:
        """The model with a checkpoint's weights, for evaluation."""
        found = self.checkpoint(step)
        with torch.random.fork_rng(devices=[]):
            model = GPT(self.model_config)
        checkpoint.check_fit(found, model.state_dict())
        model.load_state_dict(dict(found.model()))
        return model.to(device).eval()

    def data(self) -> Data:
        """The data it was trained on, checked to be the same."""
        described = self.config["data"]
        if described.get("path") is None:
            raise FileNotFoundError(f"{self.path} was not trained here and names no data: give some with --data.")
        data = open_data(described["path"])
        if manifest_sha256(data) != described["manifest_sha256"]:
            raise ValueError(
                f"the data at {described['path']} has changed since {self.path} was trained: prepare it as it was."
            )
        return data

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, with or without the data."""
        return tokenizers.stored(self.path, self.config["data"]["tokenizer"])


def manifest_sha256(data: Data) -> str:
    """What tells two data directories apart."""
    return hashlib.sha256((data.path / DATA_MANIFEST).read_bytes()).hexdigest()


def open_run(path: str | Path) -> Run:
    """Open a run directory; its config is checked, its weights are not read."""
    directory = Path(path).expanduser()
    hint = "make one with spheret train --out RUN"
    if not directory.is_dir():
        raise FileNotFoundError(f"no run directory at {directory}: {hint}.")
    again = "copy it back, or train again"
    try:
        config = files.read_document(directory / CONFIG, FORMAT, VERSION, "train", again)
    except FileNotFoundError:
        raise FileNotFoundError(f"{directory} holds no {CONFIG} and is no run: {hint}.") from None
    missing = [key for key in ("model", "train", "data", "environment") if not isinstance(config.get(key), dict)]
    if not missing:
        missing = [f"data.{key}" for key in ("path", "manifest_sha256", "tokenizer") if key not in config["data"]]
        missing += [] if "steps" in config["train"] else ["train.steps"]
    if missing:
        raise ValueError(f"{directory / CONFIG} is damaged, {missing[0]!r} is missing: {again}.")
    return Run(directory, config)


def describe_data(data: Data | None, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the data; without data, only the tokenizer."""
    if data is None:
        return {"path": None, "manifest_sha256": None, "corpus": None, "tokenizer": tokenizer}
    counts = data.counts().double()
    share = counts[counts > 0] / counts.sum()
    return {
        "path": str(data.path.resolve()),
        "manifest_sha256": manifest_sha256(data),
        "corpus": data.manifest["corpus"],
        "tokenizer": tokenizer,
        "tokens": data.manifest["tokens"],
        "unigram_entropy": float(-(share * share.log()).sum()),
    }


def write_config(path: Path, config: dict[str, Any], tokenizer_file: bytes | None) -> None:
    """Make a directory a run; the tokenizer's file, where it has one, comes before the config that needs it."""
    if tokenizer_file is not None:
        files.write_atomically(path / TOKENIZER, tokenizer_file)
    try:
        files.write_atomically(path / CONFIG, files.dump({"format": FORMAT, "version": VERSION, **config}))
    except OSError:
        # alone it would be a stranger's file
        if tokenizer_file is not None:
            (path / TOKENIZER).unlink(missing_ok=True)
        raise


def create_run(
    path: str | Path,
    model: GPT,
    tokenizer: dict[str, Any],
    tokenizer_file: bytes | None = None,
    environment: dict[str, Any] | None = None,
) -> Run:
    """A run directory of weights from elsewhere: one checkpoint, step-0, and nothing trained."""
    directory = Path(path).expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not empty: give a new directory.")
    directory.mkdir(parents=True, exist_ok=True)
    parts = {MODEL: [entry(name, tensor) for name, tensor in model.state_dict().items()]}
    checkpoint.save(directory / CHECKPOINTS, 0, parts, {"val_loss": None})
    config = {
        "model": model.config.as_dict(),
        "train": {"steps": 0},
        "data": describe_data(None, tokenizer),
        "environment": environment or {},
    }
    write_config(directory, config, tokenizer_file)
    return open_run(directory)
