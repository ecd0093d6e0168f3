"""The settings of a run as flags, made from the dataclasses of `spheret.runs.config`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

import tyro

from spheret.connections.parse import parse_options
from spheret.runs.config import SECTIONS

# one line per setting
HELP: dict[str, dict[str, str]] = {
    "model": {
        "scheme": "How branches join the stream: pre-ln, proj-spheretnorm, ... (`spheret schemes` lists all).",
        "layers": "Blocks.",
        "heads": "Attention heads.",
        "width": "Width of the stream.",
        "block": "Tokens per sequence.",
        "vocab": "Rows of the embedding.",
        "bias": "Biases in linear layers and norms.",
        "dropout": "Dropout of branches, embedding and attention.",
        "activation": "gelu, or gelu_tanh as in transformers' GPT-2.",
        "head_bias": "Bias of the output head: none (the paper's), zero, or unigram (log token frequencies).",
        "recompute": "Keep one tensor per block and compute the rest again in the backward pass.",
        "positions": "learned embeddings (the paper's), or rope.",
        "rope_base": "Base of the angles of rope.",
        "mlp": "gelu (the paper's), swiglu, or relu2.",
        "norm": "What the scheme's norms are, where its definition leaves it open: layernorm or rmsnorm.",
        "qk_norm": "RMSNorm of queries and keys, per head.",
        "kv_heads": "Heads of keys and values. Each serves heads/kv-heads heads of queries.",
        "head": "How logits read the stream: tied (the paper's), shifted (docs/collapse.md), or untied.",
    },
    "data": {
        "path": "Text: a file, a folder, a glob or the name of a corpus. Or a directory made by spheret prepare.",
        "tokenizer": "Tokenizer for text: bytes, gpt2, bpe:N or a tokenizer.json.",
    },
    "train": {
        "steps": "Updates.",
        "batch_size": "Sequences per process and micro-batch.",
        "tokens_per_update": "Tokens per update, over all micro-batches and processes.",
        "lr": "Highest learning rate.",
        "min_lr": "Learning rate at the end of the schedule.",
        "warmup": "Updates of linear warm-up.",
        "checkpoint_every": "Updates between checkpoints.",
        "lr_schedule": "Shape after the warm-up: cosine, or wsd (stable, then a decay over --decay-steps).",
        "decay_steps": "Updates of the decay at the end, with --lr-schedule wsd.",
        "optimizer": "adamw, or muon for the hidden matrices and AdamW for the rest.",
        "matrix_lr": "Highest learning rate of the hidden matrices.",
        "embedding_lr": "Highest learning rate of the embeddings and of the head.",
        "parametrization": "Rules that carry --lr over from a base model: standard (none), mup or completep.",
        "base_width": "Width of the model for which --lr was tuned, with mup and completep.",
        "base_layers": "Blocks of the model for which --lr was tuned, with completep.",
        "base_heads": "Heads of the model for which --lr was tuned.",
        "weight_decay": "Weight decay of matrices; scalars, gains and biases do not decay.",
        "betas": "AdamW's betas.",
        "clip": "Largest gradient norm; inf never clips.",
        "seed": "Seed of weights, batches and dropout.",
        "precision": "float32, or bf16 arithmetic with float32 weights.",
        "compile": "Compile the model with torch.compile.",
        "keep": "Checkpoints that are kept, besides the best one.",
        "init_from": "Start from the weights of this run.",
    },
    "evaluation": {
        "eval_every": "Updates between validations; 0 for none.",
        "eval_windows": "Validation windows.",
        "certify_every": "Updates between live certificates; 0 for none.",
        "on_divergence": "When the loss diverges: alarm (the run goes on) or stop.",
    },
}

# defaults that follow from other settings
DERIVED = {
    "heads": "one per 64 columns, at least 4",
    "vocab": "the data's vocabulary, rounded up to a multiple of 64",
    "norm": "the scheme's own",
    "kv_heads": "as many as --heads",
    "tokens_per_update": "batch-size x block x processes",
    "min_lr": "a tenth of --lr; 0 with wsd",
    "matrix_lr": "--lr",
    "embedding_lr": "--lr",
    "decay_steps": "a fifth of --steps with wsd",
    "base_width": "none: needed by mup and completep",
    "base_layers": "none: needed by completep",
    "base_heads": "one per 64 columns of --base-width, at least 4",
    "warmup": "a tenth of --steps, at most 2000",
    "checkpoint_every": "a tenth of --steps",
    "precision": "bf16 on CUDA, else float32",
    "eval_every": "a tenth of --steps",
    "tokenizer": "the corpus's own",
    "init_from": "none: from the seed",
    "scheme": "required",
    "path": "required",
    "steps": "required",
}
SIZE_HELP = "The paper's model and recipe: S, M or L. It changes the defaults that name it; give no --layers with it."


def shown(metavar: str, default: str) -> Any:
    """How `--help` shows a flag whose default is None: its value, and what happens without it."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def _default(section: str, name: str, recipe: Mapping[str, Mapping[str, Any]], with_size: Mapping[str, str]) -> str:
    """The default of a setting, in words."""
    field = next(field for field in fields(SECTIONS[section]) if field.name == name)
    if name in recipe.get(section, {}):
        text = str(recipe[section][name])
    elif name in DERIVED:
        text = DERIVED[name]
    elif field.default is not MISSING:
        text = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
    else:
        text = "none"
    if text == "required":
        return "(required)"
    return f"(default: {text}" + (f"; with --size {with_size[name]})" if name in with_size else ")")


def section_flags(
    section: str,
    recipe: Mapping[str, Mapping[str, Any]],
    with_size: Mapping[str, str] | None = None,
    without: tuple[str, ...] = (),
) -> Any:
    """A type that tyro turns into the flags of a section. Parsed, it holds the settings that were given.

    recipe: the defaults that `--help` shows, by section. with_size: the defaults that `--size` changes, in words;
    None for a command that does not take it.
    """
    entries: dict[str, Any] = {}
    hints = get_type_hints(SECTIONS[section])
    for name, text in HELP[section].items():
        if name in without:
            continue
        # None stands for a setting that is not given
        kind = next((part for part in get_args(hints[name]) if hints[name] == (part | None)), hints[name])
        hint = _default(section, name, recipe, with_size or {})
        flag = "data" if name == "path" else name.replace("_", "-")
        entries[name] = Annotated[kind, tyro.conf.arg(name=flag, help=text, help_behavior_hint=hint)]
    if section == "model" and with_size is not None:
        entries["size"] = Annotated[str, tyro.conf.arg(help=SIZE_HELP, help_behavior_hint="(default: none)")]
    return TypedDict(section, entries, total=False)  # type: ignore[operator]


def given(set: Iterable[str] = (), **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Parsed flags as the settings that were given, by section; `set` holds option=value words for the scheme."""
    settings = {name: dict(values) for name, values in sections.items()}
    options = parse_options(set)
    if options:
        settings.setdefault("model", {})["scheme_options"] = options
    size = settings.get("model", {}).pop("size", None)
    return {**{name: values for name, values in settings.items() if values}, **({"size": size} if size else {})}


def words(settings: Mapping[str, Any]) -> list[str]:
    """Given settings as the words of a command line."""
    result = ["--size", str(settings["size"])] if "size" in settings else []
    for section in SECTIONS:
        for name, value in settings.get(section, {}).items():
            flag = "data" if name == "path" else name.replace("_", "-")
            if name == "scheme_options":
                result += [
                    word for option, each in value.items() for word in ("--set", f"{option}={json.dumps(each)}")
                ]
            elif isinstance(value, bool):
                result.append(f"--{flag}" if value else f"--no-{flag}")
            elif isinstance(value, (list, tuple)):
                result += [f"--{flag}", *map(str, value)]
            elif value is not None:
                result += [f"--{flag}", str(value)]
    return result
