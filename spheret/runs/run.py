"""A run directory, opened. Its `config.json` alone rebuilds the model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spheret.data import Data, Tokenizer, open_data, tokenizers
from spheret.data.shards import MANIFEST as DATA_MANIFEST
from spheret.data.shards import TOKENIZER
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs import checkpoint
from spheret.runs.checkpoint import Checkpoint
from spheret.runs.config import RunConfig, from_dict
from spheret.runs.layout import CHECKPOINTS, CONFIG, LOCK, METRICS, MODEL
from spheret.runs.metrics import read_metrics
from spheret.runs.tensors import lazy_tensor
from spheret.support import files

FORMAT, VERSION = "spheret-run", 2


@dataclass(frozen=True)
class Run:
    """A run directory that `spheret train` wrote. It is only read here."""

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
        """One record per step, in order. A last line that a kill cut short is left out."""
        return [record for record, _ in read_metrics(self.path / METRICS)]

    def is_locked(self) -> bool:
        """Whether a process is training in this directory now."""
        return files.is_locked(self.path / LOCK)

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of a step, or the newest whole one."""
        directory = self.path / CHECKPOINTS
        if step is None:
            newest = checkpoint.newest(directory)
            if newest is None:
                raise FileNotFoundError(f"{self.path} has no checkpoint yet: train it, or wait for its first.")
            return newest
        if step not in checkpoint.steps(directory):
            known = ", ".join(map(str, checkpoint.steps(directory))) or "none"
            raise FileNotFoundError(f"{self.path} has no checkpoint of step {step}: there are {known}.")
        try:
            return checkpoint.verify(directory / f"step-{step}")
        except checkpoint.Damaged as error:
            raise ValueError(f"checkpoint step-{step} of {self.path} is damaged, {error}: take another.") from None

    def model(self, step: int | None = None, device: str | torch.device = "cpu") -> GPT:
        """The model with a checkpoint's weights, for evaluation."""
        saved = self.checkpoint(step)
        with torch.random.fork_rng(devices=[]):
            model = GPT(self.model_config)
        checkpoint.check_fit(saved, model.state_dict())
        model.load_state_dict(dict(saved.model()))
        return model.to(device).eval()

    def data(self) -> Data:
        """The data that the run was trained on, checked to be the same."""
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
        """The run's tokenizer. The data is not needed."""
        return tokenizers.stored(self.path, self.config["data"]["tokenizer"])


def manifest_sha256(data: Data) -> str:
    """The hash of the manifest, which identifies the data."""
    return hashlib.sha256((data.path / DATA_MANIFEST).read_bytes()).hexdigest()


def open_run(path: str | Path) -> Run:
    """Open a run directory and check its config. Weights are not read."""
    directory = Path(path).expanduser()
    hint = "make one with spheret train --out RUN"
    if not directory.is_dir():
        raise FileNotFoundError(f"no run directory at {directory}: {hint}.")
    again = "copy it back, or train again"
    try:
        config = files.read_document(directory / CONFIG, FORMAT, VERSION, "train", again)
    except FileNotFoundError:
        raise FileNotFoundError(f"{directory} holds no {CONFIG} and is not a run: {hint}.") from None
    missing = [key for key in ("model", "train", "data", "environment") if not isinstance(config.get(key), dict)]
    if not missing:
        missing = [f"data.{key}" for key in ("path", "manifest_sha256", "tokenizer") if key not in config["data"]]
        missing += [] if "steps" in config["train"] else ["train.steps"]
    if missing:
        raise ValueError(f"{directory / CONFIG} is damaged, {missing[0]!r} is missing: {again}.")
    return Run(directory, config)


def describe_data(data: Data | None, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The data section of config.json. Without data it names the tokenizer alone."""
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
        "val_fraction": data.manifest["val_fraction"],
        "unigram_entropy": float(-(share * share.log()).sum()),
    }


def write_config(path: Path, config: dict[str, Any], tokenizer_file: bytes | None) -> None:
    """Write config.json, and before it the tokenizer's file if there is one."""
    if tokenizer_file is not None:
        files.write_atomically(path / TOKENIZER, tokenizer_file)
    try:
        files.write_atomically(path / CONFIG, files.dump({"format": FORMAT, "version": VERSION, **config}))
    except OSError:
        # without a config the directory would not be recognised as a run
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
    """Write a run directory for weights from elsewhere: one checkpoint, step-0, and no training."""
    directory = Path(path).expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not empty: give a new directory.")
    directory.mkdir(parents=True, exist_ok=True)
    parts = {MODEL: [lazy_tensor(name, tensor) for name, tensor in model.state_dict().items()]}
    checkpoint.save(directory / CHECKPOINTS, 0, parts, {"val_loss": None})
    config = {
        "model": model.config.as_dict(),
        "train": {"steps": 0},
        "data": describe_data(None, tokenizer),
        "environment": environment or {},
    }
    write_config(directory, config, tokenizer_file)
    return open_run(directory)
