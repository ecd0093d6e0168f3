"""An export writes a run as files that transformers loads. An import makes a run of such files."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import GPT2Config

from spheret import __version__
from spheret.data.shards import TOKENIZER
from spheret.data.tokenizers import JSONTokenizer, Tokenizer, describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.hub import gpt2, llama
from spheret.hub.card import write_card
from spheret.hub.config import SpheretConfig
from spheret.hub.loading import quietly
from spheret.hub.model import SpheretForCausalLM
from spheret.hub.open import CONFIG, SavedModel
from spheret.hub.tokenizer_files import BUILT, write_tokenizer
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs.run import Run, create_run
from spheret.support.errors import shortened, unknown
from spheret.support.files import check_output_directory, directory_written_whole

# what an import takes
KINDS = ("spheret", "gpt2")
EXPORTS = (*KINDS, *llama.KINDS)


def export(run: Run, out: str | Path, kind: str = "spheret", step: int | None = None) -> Path:
    """Write a run for transformers. The directory `out` is complete afterwards, or absent if something failed."""
    if kind not in EXPORTS:
        raise unknown("kind of export", kind, EXPORTS)
    target = Path(out).expanduser()
    if target.exists() and target.samefile("."):
        raise ValueError("--out is the current directory, and an export makes a new one: give another.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty: give a new directory.")
    (model, saved), tokenizer = run.load(step), run.tokenizer()
    described, end = describe(tokenizer), tokenizer.end_of_text
    # the tokenizer pads with the end of text
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    more = {**ids, "spheret_tokenizer": msgspec.to_builtins(described)}
    exported = _exported(model, kind, more)
    with directory_written_whole(target) as partial:
        with quietly():
            exported.save_pretrained(partial)
        write_tokenizer(partial, described, tokenizer.file, model.config.block)
        write_card(partial, run, saved, model, kind, exported.num_parameters())
    return target


def _exported(model: GPT, kind: str, more: dict[str, Any]) -> Any:
    """The model as transformers' class of that kind, with `more` in its config."""
    if kind in llama.KINDS:
        return llama.to_transformers(model, kind, **more)
    return gpt2.to_gpt2(model, **more) if kind == "gpt2" else SpheretForCausalLM.of(model, **more)


def import_(source: str | Path, out: str | Path, tokenizer: str | None = None) -> Run:
    """Make a run with one checkpoint, step-0. It holds the source's weights, bit for bit, as float32."""
    check_output_directory("--out", Path(out).expanduser())
    opened = SavedModel(source, KINDS)
    model = _gpt2(opened) if opened.kind == "gpt2" else _spheret(opened)
    chosen = _tokenizer(opened, tokenizer, model)
    if chosen.vocab_size > model.config.vocab:
        raise ValueError(
            f"the tokenizer {chosen.name} has {chosen.vocab_size} tokens and the embedding of {source} has "
            f"{model.config.vocab} rows: give the tokenizer that it was trained with by --tokenizer."
        )
    environment = {
        "spheret": __version__,
        "transformers": version("transformers"),
        "imported": str(source),
        "model_type": opened.kind,
    }
    return create_run(out, model, describe(chosen), chosen.file, environment)


def _config(
    source: SavedModel, kind: Callable[[dict[str, Any]], Any], convert: Callable[[Any], GPTConfig]
) -> GPTConfig:
    """The model that a config.json describes, by transformers' class for it."""
    try:
        return convert(kind(dict(source.config)))
    except ValueError as error:
        raise ValueError(f"{source.path / CONFIG}: {shortened(str(error), 400)}") from None
    # transformers' classes look at some values without a check, so that any exception may come
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        reason = shortened(reason, 200)
        raise ValueError(f"{source.path / CONFIG} does not describe a model ({reason}): save it again.") from None


def _skeleton(source: SavedModel, config: GPTConfig, found: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors by name, without their memory: a config.json may ask for any size."""
    if config.layers > len(found):
        raise ValueError(
            f"{source.path / CONFIG} has {config.layers} layers, and the weights are {len(found)} tensors: save the "
            f"whole model again."
        )
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in GPT(config).state_dict().items()}


def _spheret(source: SavedModel) -> GPT:
    config, found = _config(source, SpheretConfig.from_dict, SpheretConfig.model), source.weights("model.")
    source.check(found, _skeleton(source, config, found))
    model = GPT(config)
    model.load_state_dict(found)
    return model.eval()


def _gpt2(source: SavedModel) -> GPT:
    config, found = _config(source, GPT2Config.from_dict, gpt2.config_of), source.weights("transformer.")
    shapes, names = _skeleton(source, config, found), gpt2.names(config.layers).items()
    expected = {name: shapes[ours][:: -1 if turned else 1] for name, (ours, turned) in names}
    # a file may hold a tied head too
    if config.head == "untied" or gpt2.HEAD in found:
        expected[gpt2.HEAD] = shapes["tokens.weight"]
    source.check(found, expected)
    return gpt2.load(config, found)


def _tokenizer(source: SavedModel, choice: str | None, model: GPT) -> Tokenizer:
    """The tokenizer of an import: `choice`, or the exported one, or the one beside the weights, or GPT-2's.

    choice: the value of --tokenizer.
    """
    if choice is not None:
        return load_tokenizer(choice)
    described = source.config.get("spheret_tokenizer")
    if described is not None:
        tokenizer = _exported_tokenizer(described, source.tokenizer_file)
        if tokenizer is None or msgspec.to_builtins(describe(tokenizer)) != described:
            raise ValueError(
                f"{source.path / TOKENIZER} is not the tokenizer that was exported ({json.dumps(described)}): export "
                f"it again."
            )
        return tokenizer
    if source.tokenizer_file is not None:
        return source.tokenizer
    vocab = model.config.vocab
    if vocab not in (50257, 50304):
        raise ValueError(
            f"{source.path} has no {TOKENIZER}, and its {vocab} tokens are not GPT-2's: give --tokenizer."
        )
    return load_tokenizer("gpt2")


def _exported_tokenizer(described: Any, content: bytes | None) -> Tokenizer | None:
    """The tokenizer that an export describes: the file beside the weights, or one that needs no file."""
    name = described.get("name") if isinstance(described, dict) else None
    if not isinstance(name, str):
        return None
    if described.get("file"):
        return None if content is None else JSONTokenizer(content, name)
    # another name could be a path
    return load_tokenizer(name) if name in BUILT else None
