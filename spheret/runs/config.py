"""The config of a run: four nested dataclasses, the same from a file, the command line, config.json and a race.

What someone asks for is a nested dictionary of the settings that were given, such as
`{"model": {"width": 128}, "train": {"steps": 500}}`. `complete_by` a recipe fills in the rest, once, and checks all
of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from spheret.connections import PAPER_SCHEMES
from spheret.connections.parse import INFINITY
from spheret.model.config import default_heads
from spheret.model.gpt import GPTConfig
from spheret.optim import OPTIMIZERS
from spheret.optim.base_sizes import BASE_SIZES, PARAMETRIZATIONS, check_base_sizes, check_scheme
from spheret.optim.lr_schedules import Course, check_schedule, learning_rate
from spheret.support import files
from spheret.support.documents import DECODE_ERRORS, MOST_BYTES, explain, read_toml
from spheret.support.errors import shortened, unknown
from spheret.support.ranges import check_above_zero, check_count
from spheret.support.settings import declared, setting

if TYPE_CHECKING:
    from spheret.data import Data

PRECISIONS = ("float32", "bf16")
# what to do when the loss diverges without becoming NaN
ON_DIVERGENCE = ("alarm", "stop")
# settings that may change when a run continues: they change no update, except for its last bits
FREE = frozenset({
    "batch_size", "eval_every", "checkpoint_every", "keep", "on_divergence", "compile", "init_from",
})  # fmt: skip
# settings that may differ between runs of one contestant: the seed, and how a run is watched and kept
BOOKKEEPING = frozenset({
    "seed", "eval_every", "eval_windows", "checkpoint_every", "keep", "on_divergence",
})  # fmt: skip

# what was given, by section; "size" chooses the recipe
Given = Mapping[str, Any]


def _check_least(config: Any, least: int, names: tuple[str, ...]) -> None:
    for name in names:
        check_count(_called(config, name), getattr(config, name), least)


def _called(config: Any, name: str) -> str:
    """A setting as messages call it: its flag, or its key."""
    section = next(section for section, kind in SECTIONS.items() if kind is type(config))
    flag = declared(type(config))[name].flag_of(name)
    return f"{section}.{name}" if flag is None else f"--{flag}"


@dataclass(frozen=True)
class DataConfig:
    """Which data: a directory that `spheret prepare` wrote; or a corpus by its name or own text, with a tokenizer."""

    path: str = setting(
        help="Text: a file, a folder, a glob or the name of a corpus. Or a directory made by spheret prepare.",
        flag="data", follows="required",
    )  # fmt: skip
    tokenizer: str | None = setting(
        None, help="Tokenizer for text: bytes, gpt2, bpe:N or a tokenizer.json.", flag=True,
        follows="the corpus's own",
    )  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation. With a GPTConfig and the data it determines every update.

    An update sees `tokens_per_update` tokens: batch_size x block x accumulation x processes.
    A learning rate of None is `lr`. base_width, base_layers, base_heads: the shape for which the settings were tuned.
    """

    steps: int = setting(help="Updates.", flag=True, follows="required", paper=50_000)
    batch_size: int = setting(
        help="Sequences per process and micro-batch.", flag=True, small=8, paper=16, with_size="{}"
    )
    tokens_per_update: int = setting(
        help="Tokens per update, over all micro-batches and processes.",
        follows="batch_size x block x processes", paper=131_072, with_size="{}",
    )  # fmt: skip
    lr: float = setting(
        help="Highest learning rate.", flag=True, follows="the scheme's own, which the studies found",
        paper=(6e-4, 3e-4, 2.5e-4), with_size="{}",
    )  # fmt: skip
    min_lr: float = setting(help="Learning rate at the end of the schedule.", follows="a tenth of lr; 0 with wsd")
    warmup: int = setting(
        help="Updates of linear warm-up.", flag=True, follows="a tenth of steps, at most 2000", paper=2000,
        with_size="{} from 2001 steps on",
    )  # fmt: skip
    checkpoint_every: int = setting(
        help="Updates between checkpoints.", follows="a tenth of steps", paper=1000,
        with_size="at most {}",
    )  # fmt: skip
    weight_decay: float = setting(
        0.1, help="Weight decay of matrices; scalars, gains and biases do not decay.",
        paper=0.1,
    )  # fmt: skip
    betas: tuple[float, float] = setting((0.9, 0.95), help="AdamW's betas.")
    clip: float = setting(1.0, help="Largest gradient norm; inf never clips.", paper=1.0)
    seed: int = setting(1337, help="Seed of weights, batches and dropout.", flag=True, paper=1337)
    precision: str = setting(
        "float32", help="float32, or bf16 arithmetic with float32 weights and moments.", flag=True,
        follows="bf16 on CUDA, else float32", paper="bf16",
    )  # fmt: skip
    compile: bool = setting(False, help="Compile the model with torch.compile.")
    keep: int = setting(2, help="Checkpoints that are kept, besides the best one.")
    init_from: str | None = setting(
        None, help="Start from the weights of this run, or of its checkpoints/step-N.", follows="none: from the seed"
    )
    optimizer: str = setting("adamw", help="adamw, or muon for the hidden matrices and AdamW for the rest.")
    matrix_lr: float | None = setting(None, help="Highest learning rate of the hidden matrices.", follows="as lr")
    embedding_lr: float | None = setting(
        None, help="Highest learning rate of the embeddings and of the head.", follows="as lr"
    )
    lr_schedule: str = setting(
        "cosine", help="Shape after the warm-up: cosine, or wsd (stable, then a decay over decay_steps)."
    )
    decay_steps: int = setting(
        0, help="Updates of the decay at the end, with lr_schedule wsd.", follows="a fifth of steps with wsd"
    )
    parametrization: str = setting(
        "standard", help="Rules that carry lr over from a base model: standard (none), mup or completep."
    )
    base_width: int | None = setting(
        None, help="Width of the model for which lr was tuned.", follows="none: needed by mup and completep"
    )
    base_layers: int | None = setting(
        None, help="Blocks of the model for which lr was tuned.", follows="none: needed by completep"
    )
    base_heads: int | None = setting(
        None, help="Heads of the model for which lr was tuned.",
        follows="one per 64 columns of base_width, at least 4",
    )  # fmt: skip

    def __post_init__(self) -> None:
        _check_least(self, 1, ("steps", "batch_size", "tokens_per_update", "checkpoint_every", "keep"))
        _check_least(self, 0, ("warmup", "decay_steps"))
        for name in ("lr", "matrix_lr", "embedding_lr"):
            value = getattr(self, name)
            if value is not None:
                check_above_zero(_called(self, name), value)
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"train.min_lr must lie between 0 and --lr {self.lr}, got {self.min_lr}.")
        if self.warmup > self.steps:
            raise ValueError(f"--warmup {self.warmup} lies beyond --steps {self.steps}: take at most {self.steps}.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"train.weight_decay must be at least 0 and finite, got {self.weight_decay}.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas must lie in [0, 1), got {self.betas[0]} and {self.betas[1]}.")
        if not self.clip > 0:
            raise ValueError(f"train.clip must be above 0 (inf never clips), got {self.clip}.")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"--seed must lie between 0 and 2^63 - 1, got {self.seed}.")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        check_schedule(self.lr_schedule, self._course())
        check_base_sizes(self.parametrization, {name: getattr(self, name) for name in BASE_SIZES})

    def accumulation(self, block: int, world_size: int = 1) -> int:
        """How many micro-batches make an update, on each of `world_size` processes."""
        unit = self.batch_size * block * world_size
        if self.tokens_per_update % unit:
            below = self.tokens_per_update // unit * unit
            works = f"{below:,} or {below + unit:,}" if below else f"{unit:,} or {2 * unit:,}"
            processes = f" x {world_size} processes" if world_size > 1 else ""
            raise ValueError(
                f"train.tokens_per_update {self.tokens_per_update:,} is not a multiple of batch {self.batch_size} x "
                f"block {block}{processes} = {unit:,}: {works} would work."
            )
        return self.tokens_per_update // unit

    def lr_at(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1."""
        return learning_rate(self.lr_schedule, self._course(), step)

    def _course(self) -> Course:
        return Course(self.lr, self.min_lr, self.warmup, self.steps, self.decay_steps)


@dataclass(frozen=True)
class EvaluationConfig:
    """How a run is watched: validation on fixed windows, never if `eval_every` is 0, and divergence."""

    eval_every: int = setting(
        help="Updates between validations; 0 for none.", flag=True, follows="a tenth of steps", paper=500,
        with_size="at most {}",
    )  # fmt: skip
    # the paper does not say how it validates
    eval_windows: int = setting(help="Validation windows.", small=64, paper=512, with_size="{}")
    on_divergence: str = setting("alarm", help="When the loss diverges: alarm (the run continues) or stop.")

    def __post_init__(self) -> None:
        _check_least(self, 1, ("eval_windows",))
        _check_least(self, 0, ("eval_every",))
        if self.on_divergence not in ON_DIVERGENCE:
            raise unknown("on_divergence", self.on_divergence, ON_DIVERGENCE)


@dataclass(frozen=True)
class RunConfig:
    """Everything that was asked of a run, every setting with its value."""

    model: GPTConfig
    data: DataConfig
    train: TrainConfig
    evaluation: EvaluationConfig

    def __post_init__(self) -> None:
        check_scheme(self.train.parametrization, self.model)

    def accumulation(self, world_size: int = 1) -> int:
        """How many micro-batches make an update, on each of `world_size` processes."""
        return self.train.accumulation(self.model.block, world_size)

    def reading(self, data: Data) -> RunConfig:
        """The same, with the place of the prepared data for text of the user's own, which may change meanwhile."""
        from spheret.data import CORPORA

        return self if self.data.path in CORPORA else replace(self, data=DataConfig(str(data.path.absolute())))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as config.json and config files have it: lists for tuples, and the word inf for infinity."""
        return {section: section_as_dict(getattr(self, section)) for section in SECTIONS}


def section_as_dict(section: Any) -> dict[str, Any]:
    """The settings of one section as plain data for JSON."""
    values = section.as_dict() if isinstance(section, GPTConfig) else asdict(section)
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return INFINITY if value == math.inf else value


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
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        # the file is the user's own, and may be a link
        data = files.read_regular(path, MOST_BYTES, follow=True)
        values = msgspec.json.decode(data) if kind == "JSON" else read_toml(data)
    except FileNotFoundError:
        raise FileNotFoundError(f"no config file at {path}: give a TOML file of settings, or flags.") from None
    except files.NotRegular as error:
        raise ValueError(f"{error}: give a TOML file of settings, or flags.") from None
    except DECODE_ERRORS as error:
        raise ValueError(f"{path} is not {kind} ({explain(error)}).") from None
    # TOML that is wrong, and numbers of thousands of digits
    except ValueError as error:
        raise ValueError(f"{path} is not {kind} ({error}).") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold the sections {', '.join(SECTIONS)}, got {type(values).__name__}.")
    for key in values:
        if key not in SECTIONS and key != "size":
            raise unknown(f"section in {path}:", key, [*SECTIONS, "size"])
    size = values.get("size")
    if not isinstance(size, (str, type(None))):
        raise ValueError(f"size in {path} must be S, M or L, got {_shown(size)}.")
    return {key: value if key == "size" else check_section(path, key, value) for key, value in values.items()}


@cache
def _types(section: str) -> dict[str, Any]:
    return get_type_hints(SECTIONS[section])


def check_section(path: Path, section: str, values: Any, whole: bool = False) -> dict[str, Any]:
    """The settings of a section in a file, each of its type; the word inf is infinity where a number belongs.

    whole: whether every setting must be there.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{section} in {path} must be a table of settings, got {_shown(values)}.")
    types = _types(section)
    for name in values:
        if name not in types:
            raise unknown(f"setting in {path}, [{section}]:", name, types)
    missing = [name for name in types if name not in values] if whole else []
    if missing:
        raise ValueError(
            f"{section}.{missing[0]} in {path} is missing, as in an older format: use the spheret that wrote it, or "
            "train again."
        )
    settings = {name: _setting(path, f"{section}.{name}", value, types[name]) for name, value in values.items()}
    for option, value in settings.get("scheme_options", {}).items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise ValueError(
                f"the scheme's option {option} in {path} must be a number, a word, true or false, got "
                f"{_shown(value)}."
            )
    return settings


def _setting(path: Path, place: str, value: Any, kind: Any) -> Any:
    if kind is float and value == INFINITY:
        return math.inf
    try:
        setting = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{place} in {path} is {_shown(value)}: {error}.") from None
    # Python's integers have no end, and torch's have
    if isinstance(setting, int) and abs(setting) >= 1 << 63:
        raise ValueError(f"{place} in {path} is {_shown(value)}: expected less than 2^63.")
    return setting


def _shown(value: Any) -> str:
    """A value for a message, which may be of any length and depth."""
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    return shortened(repr(value))


def build_section(path: Path, section: str, values: Any) -> Any:
    """The config of a section from a file that has every setting, each checked."""
    settings = check_section(path, section, values, whole=True)
    try:
        return SECTIONS[section](**settings)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{section} in {path} is damaged: {error}") from None


# a warm-up that nobody asked for has at most so many updates
MOST_WARMUP = 2000


@dataclass(frozen=True)
class Recipe:
    """The settings that a run takes where nothing else is given.

    sections: by section; steps, heads, vocabulary and precision may be left out.
    size: the word of `--size` that chooses it, which sets layers, heads and width for good.
    warmup: its updates of warm-up. A run that is not longer warms up for a tenth, as any does if this is None.
    checkpoint_every, eval_every: the most updates between two of them; a tenth of all if this is fewer.
    """

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    size: str | None = None
    warmup: int | None = None
    checkpoint_every: float = math.inf
    eval_every: float = math.inf


def complete_by(
    recipe: Recipe,
    given: Given,
    device: str,
    world_size: int = 1,
    vocab_size: int | None = None,
    padded_vocab_size: int = 64,
) -> RunConfig:
    """Every setting with its value: what was given, and for the rest the recipe's.

    Without `vocab_size` the data is not known yet: the result is good for finding wrong settings early.
    """
    asked_model = given.get("model", {})
    if recipe.size is not None:
        shape = {name: recipe.sections["model"][name] for name in ("layers", "heads", "width")}
        clash = [name for name, value in shape.items() if asked_model.get(name, value) != value]
        if clash:
            raise ValueError(
                f"--size {recipe.size} sets --{clash[0]}: give --size, or --layers, --heads and --width."
            )
    everything = merge(recipe.sections, given)
    model, train = dict(everything["model"]), dict(everything.get("train", {}))
    evaluation, data = dict(everything["evaluation"]), everything.get("data", {})
    if "scheme" not in model:
        raise ValueError(f"--scheme is needed: one of {', '.join(PAPER_SCHEMES)} or another row of docs/methods.md.")
    if "steps" not in train:
        raise ValueError("--steps is needed: the number of updates.")
    if "path" not in data:
        from spheret.data import CORPORA

        raise ValueError(
            f"--data is needed: text, a directory made by spheret prepare, or one of {', '.join(CORPORA)}."
        )
    steps, tenth = train["steps"], max(1, train["steps"] // 10)
    model.setdefault("heads", default_heads(model["width"]))
    model.setdefault("vocab", padded_vocab_size)
    if vocab_size is not None and model["vocab"] < vocab_size:
        raise ValueError(
            f"model.vocab {model['vocab']} is smaller than the data's vocabulary of {vocab_size}: take at least "
            f"{vocab_size}."
        )
    train.setdefault("tokens_per_update", train["batch_size"] * model["block"] * world_size)
    warm_stable_decay = train.get("lr_schedule") == "wsd"
    # the schedule's source decays to 0
    train.setdefault("min_lr", 0.0 if warm_stable_decay else train["lr"] / 10)
    full = recipe.warmup is not None and steps > recipe.warmup
    train.setdefault("warmup", recipe.warmup if full else min(MOST_WARMUP, steps // 10))
    if warm_stable_decay:
        train.setdefault("decay_steps", max(1, min(steps // 5, steps - train["warmup"])))
    needed = PARAMETRIZATIONS.get(train.get("parametrization", ""), ())
    if train.get("base_width") is not None and "base_heads" in needed:
        same = train["base_width"] == model["width"]
        train.setdefault("base_heads", model["heads"] if same else default_heads(train["base_width"]))
    train.setdefault("checkpoint_every", min(tenth, recipe.checkpoint_every))
    train.setdefault("precision", "bf16" if device == "cuda" else "float32")
    evaluation.setdefault("eval_every", min(tenth, recipe.eval_every))
    train["betas"] = tuple(train.get("betas", TrainConfig.betas))
    # a run that continues gives the settings of its config, where infinity is a word
    train = {name: math.inf if value == INFINITY else value for name, value in train.items()}
    config = RunConfig(GPTConfig(**model), DataConfig(**data), TrainConfig(**train), EvaluationConfig(**evaluation))
    config.accumulation(world_size)
    return config


def differences(saved: RunConfig, asked: RunConfig) -> list[str]:
    """How two configs differ in what decides an update; where the data lies is not compared."""
    pairs = changed_settings(saved.as_dict(), asked.as_dict())
    return [f"{name} (the run has {before!r}, asked for {after!r})" for name, before, after in pairs]


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    """Name and both values of every setting that differs and may not, in what `RunConfig.as_dict` returned."""
    for section in SECTIONS:
        if section == "data":
            continue
        old, new = before.get(section) or {}, after.get(section) or {}
        for name in dict.fromkeys([*new, *old]):
            if name not in FREE and old.get(name) != new.get(name):
                yield name, old.get(name), new.get(name)
