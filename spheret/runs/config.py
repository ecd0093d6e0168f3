"""What a run is asked to be: flags and a TOML file, resolved into numbers once, checked before any work."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from spheret.connections import PAPER_SCHEMES
from spheret.support.errors import unknown
from spheret.model.gpt import PRESETS, GPTConfig

PRECISIONS = ("float32", "bf16")
# the paper's learning rates by size
LEARNING_RATES = {"S": 6e-4, "M": 3e-4, "L": 2.5e-4}
# what may change when a run goes on: none of it changes an update, but for the last bits
FREE = ("batch_size", "eval_every", "checkpoint_every", "keep", "certify_every", "compile", "init_from")

# what tells runs of one contestant apart, or only how they were watched and kept
BOOKKEEPING = frozenset({"seed", "size", "eval_every", "eval_windows", "checkpoint_every", "keep", "certify_every"})

@dataclass(frozen=True)
class TrainConfig:
    """Everything that shapes the training; with a GPTConfig and the data it determines every update.

    tokens_per_update: batch_size x block x accumulation x processes. eval_every 0: no validation.
    eval_windows: fixed validation windows of `block` tokens, spread over the split.
    """

    steps: int
    batch_size: int
    tokens_per_update: int
    block: int
    lr: float
    min_lr: float
    warmup: int
    eval_every: int
    eval_windows: int
    checkpoint_every: int
    keep: int = 2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 1337
    precision: str = "float32"
    compile: bool = False
    certify_every: int = 0
    size: str | None = None
    init_from: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "tokens_per_update", "block", "eval_windows", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{_flag(name)} must be at least 1, got {getattr(self, name)}.")
        for name in ("eval_every", "warmup", "certify_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{_flag(name)} must be at least 0, got {getattr(self, name)}.")
        if not (0 < self.lr < math.inf):
            raise ValueError(f"--lr must be above 0, got {self.lr}.")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"--min-lr must lie between 0 and --lr {self.lr}, got {self.min_lr}.")
        if self.warmup > self.steps:
            raise ValueError(f"--warmup {self.warmup} lies beyond --steps {self.steps}: take at most {self.steps}.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"--weight-decay must be at least 0 and finite, got {self.weight_decay}.")
        if not self.clip > 0:
            raise ValueError(f"--clip must be above 0 (inf never clips), got {self.clip}.")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"--seed must lie between 0 and 2^63 - 1, got {self.seed}.")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        self.accumulation()

    def accumulation(self, world_size: int = 1) -> int:
        """How many micro-batches make an update, on each of `world_size` processes."""
        unit = self.batch_size * self.block * world_size
        if self.tokens_per_update % unit:
            below = self.tokens_per_update // unit * unit
            works = f"{below:,} or {below + unit:,}" if below else f"{unit:,} or {2 * unit:,}"
            processes = f" x {world_size} processes" if world_size > 1 else ""
            raise ValueError(
                f"--tokens-per-update {self.tokens_per_update:,} is no multiple of batch {self.batch_size} x block "
                f"{self.block}{processes} = {unit:,}: {works} would work."
            )
        return self.tokens_per_update // unit

    def lr_at(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1: linear warm-up, then a cosine to min_lr (nanoGPT's)."""
        done = step - 1
        if done < self.warmup:
            return self.lr * step / (self.warmup + 1)
        ratio = (done - self.warmup) / max(1, self.steps - self.warmup)
        return self.min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (self.lr - self.min_lr)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        known = {f.name for f in fields(cls)}
        missing = sorted(known - values.keys())
        if missing:
            raise ValueError(f"the config of this run is damaged, train.{missing[0]} is missing: copy it back.")
        chosen: dict[str, Any] = {name: value for name, value in values.items() if name in known}
        return cls(**chosen | {"betas": tuple(values["betas"])})


def _flag(name: str) -> str:
    return name.replace("_", "-")


@dataclass(frozen=True)
class Options:
    """What was asked for; None is "not said", and takes a default, or what the resumed run has.

    Args:
        scheme: how branches join the stream: pre-ln, proj-spheretnorm, ... (docs/methods.md).
        data: a directory made by spheret prepare, or the name of a corpus, which is prepared into the cache.
        steps: updates.
        size: S, M or L of the paper, with its recipe; or give --layers, --heads, --width.
        layers: blocks.
        heads: attention heads.
        width: of the stream.
        tokenizer: for a corpus named in --data: bytes, gpt2, bpe:N or a tokenizer.json.
        vocab: rows of the embedding; by default the data's vocabulary up to a multiple of 64.
        batch_size: windows in a micro-batch, on each process.
        block: tokens in a window.
        tokens_per_update: from which accumulation is derived.
        lr: the highest learning rate.
        min_lr: where the cosine ends; by default a tenth.
        warmup: updates of linear warm-up.
        weight_decay: for matrices alone.
        clip: the largest gradient norm.
        seed: of weights, batches and dropout.
        precision: float32 or bf16; by default bf16 on CUDA.
        eval_every: updates between validations; 0 for none.
        eval_windows: validation windows.
        checkpoint_every: updates between checkpoints.
        keep: how many checkpoints stay, beside the best.
        dropout: of branches, embedding and attention.
        head_bias: none (the paper's), zero or unigram.
        activation: gelu, or gelu_tanh as in transformers' GPT-2.
        no_bias: no biases anywhere.
        recompute: keep one tensor a block and compute the rest again in the backward.
        compile: torch.compile the model.
        init_from: start from the weights of that run, and nothing else of it.
        set: an option of the scheme as option=value; may be given again and again.
        certify_every: updates between live certificates; 0 for none.
    """

    scheme: str | None = None
    data: str | None = None
    steps: int | None = None
    size: str | None = None
    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    tokenizer: str | None = None
    vocab: int | None = None
    batch_size: int | None = None
    block: int | None = None
    tokens_per_update: int | None = None
    lr: float | None = None
    min_lr: float | None = None
    warmup: int | None = None
    weight_decay: float | None = None
    clip: float | None = None
    seed: int | None = None
    precision: str | None = None
    eval_every: int | None = None
    eval_windows: int | None = None
    checkpoint_every: int | None = None
    keep: int | None = None
    dropout: float | None = None
    head_bias: str | None = None
    activation: str | None = None
    no_bias: bool = False
    recompute: bool = False
    compile: bool = False
    init_from: str | None = None
    set: tuple[str, ...] = ()
    certify_every: int | None = None

    def given(self) -> dict[str, Any]:
        """What was said, by name."""
        # 0 is said, though it equals False
        unsaid = (None, False, ())
        return {k: v for k, v in asdict(self).items() if not any(v is u for u in unsaid)}


def from_toml(path: Path) -> dict[str, Any]:
    """The options of a TOML file; a key that is none of them is an error."""
    import sys

    if sys.version_info < (3, 11):
        raise RuntimeError("--config needs Python 3.11 or later, which reads TOML: give flags instead.")
    import tomllib

    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"no config file at {path}: give a TOML file of options, or flags.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML ({error}).") from None
    known = {f.name: f for f in fields(Options)}
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise unknown(f"option in {path}:", key, known)
        if name == "set":
            if not isinstance(value, dict):
                raise ValueError(f"set in {path} must be a table of scheme options, got {value!r}.")
            # what JSON has no form for, a date, is refused as text like any other
            value = tuple(f"{option}={json.dumps(setting, default=str)}" for option, setting in value.items())
        else:
            value = _typed(path, key, value, str(known[name].type))
        result[name] = value
    return result


def _typed(path: Path, key: str, value: Any, wanted: str) -> Any:
    """A TOML value as the option's type, or an error."""
    kind = wanted.split(" ")[0]
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value).__name__ != kind:
        raise ValueError(f"{key} in {path} must be of type {kind}, got {value!r}.")
    return value


def scheme_options(settings: tuple[str, ...]) -> dict[str, Any]:
    """`option=value` pairs as a dictionary; values are JSON, or inf, none, or plain words."""
    options: dict[str, Any] = {}
    for setting in settings:
        option, equals, text = setting.partition("=")
        if not (option and equals and text):
            raise ValueError(f"--set takes option=value, got {setting!r}.")
        plain = {"none": None, "None": None, "True": True, "False": False, "inf": math.inf}
        try:
            options[option] = plain[text] if text in plain else json.loads(text)
        except json.JSONDecodeError:
            options[option] = text
        if isinstance(options[option], (list, dict)):
            raise ValueError(f"--set takes a number, a word, true, false or none for {option}, got {text}.")
    return options


def options_of(model: GPTConfig, training: TrainConfig) -> Options:
    """The options that would be resolved to these: what a resumed run takes where nothing is said."""
    values = {**model.as_dict(), **training.as_dict()}
    values |= {"no_bias": not model.bias, "recompute": model.recompute}
    values["set"] = tuple(f"{option}={json.dumps(value)}" for option, value in model.scheme_options.items())
    if training.size is not None:
        values |= dict.fromkeys(("layers", "heads", "width"))
    return Options(**{f.name: values[f.name] for f in fields(Options) if f.name in values})


def resolve_model(options: Options, vocab_size: int, padded_vocab_size: int) -> GPTConfig:
    """The model that was asked for, on data with so many ids."""
    if options.scheme is None:
        raise ValueError(f"--scheme is needed: one of {', '.join(PAPER_SCHEMES)} or another row of docs/methods.md.")
    sizes = {name: getattr(options, name) for name in ("layers", "heads", "width")}
    if options.size is not None:
        if options.size not in PRESETS:
            raise unknown("size", options.size, PRESETS)
        if any(value is not None for value in sizes.values()):
            raise ValueError("give --size, or --layers, --heads and --width, not both.")
        sizes = dict(zip(("layers", "heads", "width"), PRESETS[options.size], strict=True))
    width = _said(sizes["width"], 64)
    vocab = _said(options.vocab, padded_vocab_size)
    if vocab < vocab_size:
        raise ValueError(
            f"--vocab {vocab} is smaller than the data's vocabulary of {vocab_size}: take at least {vocab_size}."
        )
    return GPTConfig(
        layers=_said(sizes["layers"], 12),
        heads=_said(sizes["heads"], max(4, width // 64)),
        width=width,
        block=_block(options),
        vocab=vocab,
        bias=not options.no_bias,
        dropout=_said(options.dropout, 0.0),
        scheme=options.scheme,
        scheme_options=scheme_options(options.set),
        activation=_said(options.activation, "gelu"),
        head_bias=_said(options.head_bias, "none"),
        recompute=options.recompute,
    )


def _said(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _block(options: Options) -> int:
    return _said(options.block, 128 if options.size is None else 1024)


def resolve_training(options: Options, device: str, world_size: int = 1) -> TrainConfig:
    """The training that was asked for: the paper's recipe with a size, a small one without."""
    if options.steps is None:
        raise ValueError("--steps is needed: the number of updates.")
    paper = options.size is not None
    if options.size is not None and options.size not in PRESETS:
        raise unknown("size", options.size, PRESETS)

    def said(name: str, otherwise: Any) -> Any:
        return _said(getattr(options, name), otherwise)

    steps, block = options.steps, _block(options)
    batch_size = said("batch_size", 16 if paper else 8)
    lr = said("lr", LEARNING_RATES[options.size or "S"] if paper else 1e-3)
    # the paper's 2,000 belong to its 50,000; a shorter trial keeps a tenth
    warmup = 2000 if paper and steps > 2000 else min(2000, steps // 10)
    every = max(1, steps // 10)
    config = TrainConfig(
        steps=steps,
        batch_size=batch_size,
        tokens_per_update=said("tokens_per_update", 131_072 if paper else batch_size * block * world_size),
        block=block,
        lr=lr,
        min_lr=said("min_lr", lr / 10),
        warmup=said("warmup", warmup),
        eval_every=said("eval_every", min(every, 500) if paper else every),
        eval_windows=said("eval_windows", 512 if paper else 64),
        checkpoint_every=said("checkpoint_every", min(every, 1000) if paper else every),
        keep=said("keep", 2),
        weight_decay=said("weight_decay", 0.1),
        clip=said("clip", 1.0),
        seed=said("seed", 1337),
        precision=said("precision", "bf16" if device == "cuda" else "float32"),
        compile=options.compile,
        certify_every=said("certify_every", 0),
        size=options.size,
        init_from=options.init_from,
    )
    config.accumulation(world_size)
    return config
