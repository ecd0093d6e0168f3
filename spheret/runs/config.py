"""The config of a run: four nested dataclasses, the same from a file, the command line, config.json and a race.

What someone asks for is a nested dictionary of the settings that were given, such as
`{"model": {"width": 128}, "train": {"steps": 500}}`. `complete` fills in the rest, once, and checks all of it.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from spheret.connections import PAPER_SCHEMES
from spheret.model.gpt import GPTConfig
from spheret.runs.recipes import defaults, paper_model
from spheret.support.errors import unknown
from spheret.support.files import read_short_text
from spheret.support.ranges import check_count

PRECISIONS = ("float32", "bf16")
# what to do when the loss diverges without becoming NaN
ON_DIVERGENCE = ("alarm", "stop")
# settings that may change when a run continues: they change no update, except for its last bits
FREE = frozenset({
    "batch_size", "eval_every", "checkpoint_every", "keep", "certify_every", "on_divergence", "compile",
    "init_from",
})  # fmt: skip
# settings that may differ between runs of one contestant: the seed, and how a run is watched and kept
BOOKKEEPING = frozenset({
    "seed", "eval_every", "eval_windows", "checkpoint_every", "keep", "certify_every", "on_divergence",
})  # fmt: skip

# what was given, by section; "size" chooses the recipe
Given = Mapping[str, Any]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_least(config: Any, least: int, names: tuple[str, ...]) -> None:
    for name in names:
        check_count(_flag(name), getattr(config, name), least)


@dataclass(frozen=True)
class DataConfig:
    """Which data: a directory that `spheret prepare` wrote, or the name of a corpus with a tokenizer."""

    path: str
    tokenizer: str | None = None


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation. With a GPTConfig and the data it determines every update.

    An update sees `tokens_per_update` tokens: batch_size x block x accumulation x processes.
    """

    steps: int
    batch_size: int
    tokens_per_update: int
    lr: float
    min_lr: float
    warmup: int
    checkpoint_every: int
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 1337
    precision: str = "float32"
    compile: bool = False
    keep: int = 2
    init_from: str | None = None

    def __post_init__(self) -> None:
        _check_least(self, 1, ("steps", "batch_size", "tokens_per_update", "checkpoint_every", "keep"))
        _check_least(self, 0, ("warmup",))
        if not (0 < self.lr < math.inf):
            raise ValueError(f"--lr must be above 0, got {self.lr}.")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"--min-lr must lie between 0 and --lr {self.lr}, got {self.min_lr}.")
        if self.warmup > self.steps:
            raise ValueError(f"--warmup {self.warmup} lies beyond --steps {self.steps}: take at most {self.steps}.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"--weight-decay must be at least 0 and finite, got {self.weight_decay}.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"--betas must lie in [0, 1), got {self.betas[0]} and {self.betas[1]}.")
        if not self.clip > 0:
            raise ValueError(f"--clip must be above 0 (inf never clips), got {self.clip}.")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"--seed must lie between 0 and 2^63 - 1, got {self.seed}.")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)

    def accumulation(self, block: int, world_size: int = 1) -> int:
        """How many micro-batches make an update, on each of `world_size` processes."""
        unit = self.batch_size * block * world_size
        if self.tokens_per_update % unit:
            below = self.tokens_per_update // unit * unit
            works = f"{below:,} or {below + unit:,}" if below else f"{unit:,} or {2 * unit:,}"
            processes = f" x {world_size} processes" if world_size > 1 else ""
            raise ValueError(
                f"--tokens-per-update {self.tokens_per_update:,} is no multiple of batch {self.batch_size} x block "
                f"{block}{processes} = {unit:,}: {works} would work."
            )
        return self.tokens_per_update // unit

    def lr_at(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1: linear warm-up, then a cosine to min_lr (nanoGPT's)."""
        done = step - 1
        if done < self.warmup:
            return self.lr * step / (self.warmup + 1)
        ratio = (done - self.warmup) / max(1, self.steps - self.warmup)
        return self.min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (self.lr - self.min_lr)


@dataclass(frozen=True)
class EvaluationConfig:
    """How a run is watched: validation on fixed windows of `block` tokens, live certificates, and divergence.

    An interval of 0 means never.
    """

    eval_every: int
    eval_windows: int
    certify_every: int = 0
    on_divergence: str = "alarm"

    def __post_init__(self) -> None:
        _check_least(self, 1, ("eval_windows",))
        _check_least(self, 0, ("eval_every", "certify_every"))
        if self.on_divergence not in ON_DIVERGENCE:
            raise unknown("on_divergence", self.on_divergence, ON_DIVERGENCE)


@dataclass(frozen=True)
class RunConfig:
    """Everything that was asked of a run, every setting with its value."""

    model: GPTConfig
    data: DataConfig
    train: TrainConfig
    evaluation: EvaluationConfig

    def accumulation(self, world_size: int = 1) -> int:
        """How many micro-batches make an update, on each of `world_size` processes."""
        return self.train.accumulation(self.model.block, world_size)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as config.json and config files have it."""
        sections = {"data": asdict(self.data), "train": asdict(self.train), "evaluation": asdict(self.evaluation)}
        return json.loads(json.dumps({"model": self.model.as_dict(), **sections}))


SECTIONS: dict[str, type] = {
    "model": GPTConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "evaluation": EvaluationConfig,
}


def merge(*layers: Given) -> dict[str, Any]:
    """Given settings laid over each other, section by section; the last one wins."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            merged[key] = {**merged.get(key, {}), **value} if key in SECTIONS else value
    return merged


def read_config(path: Path) -> dict[str, Any]:
    """The settings that a config file gives: TOML, or JSON with the same sections."""
    try:
        text = read_short_text(path)
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise FileNotFoundError(f"no config file at {path}: give a TOML file of settings, or flags.") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not {'JSON' if path.suffix == '.json' else 'TOML'} ({error}).") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold the sections {', '.join(SECTIONS)}, got {type(values).__name__}.")
    for key, value in values.items():
        if key not in SECTIONS and key != "size":
            raise unknown(f"section in {path}:", key, [*SECTIONS, "size"])
        if key in SECTIONS:
            _check_section(path, key, value)
    return values


def _check_section(path: Path, section: str, values: Any) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{section} in {path} must be a table of settings, got {values!r}.")
    types = {field.name: field for field in fields(SECTIONS[section])}
    for name, value in values.items():
        if name not in types:
            raise unknown(f"setting in {path}, [{section}]:", name, types)
        try:
            msgspec.convert(value, _annotation(SECTIONS[section], name))
        except msgspec.ValidationError as error:
            raise ValueError(f"{section}.{name} in {path} is {value!r}: {error}.") from None
    for option, value in values.get("scheme_options", {}).items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise ValueError(
                f"the scheme's option {option} in {path} must be a number, a word, true or false, got {value}."
            )


def _annotation(section: type, name: str) -> Any:
    from typing import get_type_hints

    return get_type_hints(section)[name]


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The config that `RunConfig.as_dict` wrote, every value checked.

    Every setting must be there, except those that change no update and have a default: a run may be older than they.
    """
    for section in SECTIONS.keys() - {"data"}:
        for field in fields(SECTIONS[section]):
            optional = field.name in FREE and field.default is not MISSING
            if field.name not in values.get(section, {}) and not optional:
                raise ValueError(
                    f"the config of this run is damaged, {section}.{field.name} is missing: copy it back."
                )
    try:
        return msgspec.convert(values, RunConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"the config of this run is damaged ({error}): copy it back.") from None


def complete(
    given: Given, device: str, world_size: int = 1, vocab_size: int | None = None, padded_vocab_size: int = 64
) -> RunConfig:
    """Every setting with its value: what was given, and for the rest the recipe that `size` chooses.

    Without `vocab_size` the data is not known yet: the result is good for finding wrong settings early.
    """
    size = given.get("size")
    recipe = defaults(size)
    asked_model = given.get("model", {})
    if size is not None:
        clash = [name for name, value in paper_model(size).items() if asked_model.get(name, value) != value]
        if clash:
            raise ValueError(f"--size {size} sets {_flag(clash[0])}: give --size, or --layers, --heads and --width.")
    everything = merge(recipe, given)
    model, train = dict(everything["model"]), dict(everything.get("train", {}))
    evaluation, data = dict(everything["evaluation"]), everything.get("data", {})
    if "scheme" not in model:
        raise ValueError(f"--scheme is needed: one of {', '.join(PAPER_SCHEMES)} or another row of docs/methods.md.")
    if "steps" not in train:
        raise ValueError("--steps is needed: the number of updates.")
    if "path" not in data:
        from spheret.data import CORPORA

        raise ValueError(f"--data is needed: a directory made by spheret prepare, or one of {', '.join(CORPORA)}.")
    steps, tenth = train["steps"], max(1, train["steps"] // 10)
    model.setdefault("heads", max(4, model["width"] // 64))
    model.setdefault("vocab", padded_vocab_size)
    if vocab_size is not None and model["vocab"] < vocab_size:
        raise ValueError(
            f"--vocab {model['vocab']} is smaller than the data's vocabulary of {vocab_size}: take at least "
            f"{vocab_size}."
        )
    train.setdefault("tokens_per_update", train["batch_size"] * model["block"] * world_size)
    train.setdefault("min_lr", train["lr"] / 10)
    # the paper's 2,000 belong to its 50,000 steps; a shorter trial warms up for a tenth
    train.setdefault("warmup", 2000 if size is not None and steps > 2000 else min(2000, steps // 10))
    train.setdefault("checkpoint_every", tenth if size is None else min(tenth, 1000))
    train.setdefault("precision", "bf16" if device == "cuda" else "float32")
    evaluation.setdefault("eval_every", tenth if size is None else min(tenth, 500))
    train["betas"] = tuple(train.get("betas", TrainConfig.betas))
    config = RunConfig(
        GPTConfig.from_dict(model), DataConfig(**data), TrainConfig(**train), EvaluationConfig(**evaluation)
    )
    config.accumulation(world_size)
    return config


def differences(saved: RunConfig, asked: RunConfig) -> list[str]:
    """How two configs differ in what decides an update; where the data lies is not compared."""
    before, after = saved.as_dict(), asked.as_dict()
    return [
        f"{name} (the run has {before[section][name]!r}, asked for {value!r})"
        for section in SECTIONS
        if section != "data"
        for name, value in after[section].items()
        if name not in FREE and before[section][name] != value
    ]
