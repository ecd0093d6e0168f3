"""What `spheret convert` starts from: a causal language model that transformers has saved, or a run."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spheret.data import Data, open_named
from spheret.data.shards import MANIFEST, TOKENIZER, read_tokenizer
from spheret.data.tokenizers import JSONTokenizer, Tokenizer, describe, load
from spheret.foreign.saved import quietly
from spheret.hub.model import SpheretForCausalLM
from spheret.hub.source import CONFIG, Source
from spheret.hub.tokenizer_files import built_name, write_tokenizer
from spheret.runs import layout
from spheret.runs.records import RUNS
from spheret.runs.run import open_run
from spheret.support.documents import MOST_BYTES, read_bytes
from spheret.support.errors import need, shortened

# what else belongs to a tokenizer that transformers has saved
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class Subject:
    """A model to convert.

    load: makes the model anew, in float32.
    spec: its tokenizer as `spheret.data` names it: bytes, gpt2, or a path to a tokenizer.json.
    most: the most tokens of a window; None without a limit.
    write_tokenizer: writes the tokenizer's files for transformers into a directory.
    """

    name: str
    sha256: str
    load: Callable[[], Any]
    tokenizer: Tokenizer
    spec: str
    most: int | None
    write_tokenizer: Callable[[Path], None]


def open_subject(given: str, tokenizer: str | None) -> Subject:
    """The model in a directory, or of a name on the Hugging Face hub."""
    path = Path(given).expanduser()
    config = path / CONFIG
    if config.is_file() and RUNS.format_of(config) == RUNS.format:
        return _of_a_run(path, tokenizer)
    return _of_transformers(Source(given, kinds=None), given, tokenizer)


def _of_a_run(path: Path, choice: str | None) -> Subject:
    run = open_run(path)
    if choice is not None:
        raise ValueError(f"{path} is a run, which has its own tokenizer: leave --tokenizer out.")
    tokenizer, step = run.tokenizer(), run.checkpoint().step
    manifest = path / layout.CHECKPOINTS / f"step-{step}" / layout.MANIFEST
    described, end, block = describe(tokenizer), tokenizer.end_of_text, run.model_config.block

    def model() -> Any:
        return SpheretForCausalLM.of(run.model(step), bos_token_id=end, eos_token_id=end)

    return Subject(
        name=f"{run.name}, step {step}",
        sha256=hashlib.sha256(manifest.read_bytes()).hexdigest(),
        load=model,
        tokenizer=tokenizer,
        spec=tokenizer.name if tokenizer.file is None else str(path / TOKENIZER),
        most=block,
        write_tokenizer=lambda out: write_tokenizer(out, described, tokenizer.file, block),
    )


def _of_transformers(source: Source, given: str, choice: str | None) -> Subject:
    transformers = need("transformers", "hub")
    if source.config.get("spheret") is not None:
        raise ValueError(
            f"{given} is converted already: give the model that it was made of, or go on with its training in Python "
            "(spheret.conversion.load)."
        )
    if (source.path / "adapter_config.json").exists():
        raise ValueError(f"{given} is an adapter of PEFT: merge it into its model, save that, and convert it.")
    # transformers' loader takes these files, of any name and size; here they are checked
    parts = source.parts()
    for name in ("generation_config.json", *_BESIDE):
        if (path := source.file(name)) is not None:
            read_bytes(path, MOST_BYTES, "save the model again", follow=True)
    try:
        config = transformers.AutoConfig.from_pretrained(source.path, local_files_only=True, trust_remote_code=False)
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except Exception as error:
        raise _unusable(given, error) from None
    architectures = config.architectures or [kind.__name__]
    if kind.__name__ not in architectures:
        raise ValueError(
            f"{given} is a {architectures[0]}, and spheret convert measures the loss of the next token: give a "
            "causal language model, or convert this one in Python (spheret.convert)."
        )
    tokenizer, spec = _tokenizer(source, given, choice)
    text = config.get_text_config()
    if tokenizer.vocab_size > text.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and the embedding of {given} has "
            f"{text.vocab_size} rows: give the tokenizer that it was trained with by --tokenizer."
        )

    def model() -> Any:
        words = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        try:
            with quietly():
                made, info = kind.from_pretrained(source.path, dtype=torch.float32, output_loading_info=True, **words)
        except Exception as error:
            raise _unusable(given, error) from None
        # transformers only warns, and goes on with random numbers
        if wrong := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
            raise ValueError(
                f"{given} lacks {shortened(wrong[0])}, or has it in another shape ({len(wrong)} in all): save the "
                "whole model again."
            )
        return made

    return Subject(
        name=given,
        sha256=_digest([source.path / CONFIG, *parts]),
        load=model,
        tokenizer=tokenizer,
        spec=spec,
        most=getattr(text, "max_position_embeddings", None),
        write_tokenizer=lambda out: _copy_tokenizer(source, tokenizer, out),
    )


def _unusable(given: str, error: Exception) -> ValueError:
    reason = shortened((str(error).strip() or type(error).__name__).splitlines()[0], 300).rstrip(".")
    return ValueError(
        f"transformers does not load {given} as a causal language model ({reason}): give another model."
    )


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _tokenizer(source: Source, given: str, choice: str | None) -> tuple[Tokenizer, str]:
    """The tokenizer and its name for `spheret.data`."""
    if choice is not None:
        return load(choice), choice
    path = source.file(TOKENIZER)
    if path is None:
        raise FileNotFoundError(
            f"{given} has no {TOKENIZER}, so its text is unknown: save its tokenizer into it, or give --tokenizer "
            "bytes, gpt2 or a path to a tokenizer.json."
        )
    content = read_tokenizer(path.resolve())
    # named ones are prepared faster, and fit data that was prepared with them
    if (name := built_name(content)) is not None:
        return load(name), name
    return JSONTokenizer(content, TOKENIZER), str(path)


def _copy_tokenizer(source: Source, tokenizer: Tokenizer, out: Path) -> None:
    if source.file(TOKENIZER) is None:
        if tokenizer.file is not None:
            (out / TOKENIZER).write_bytes(tokenizer.file)
        return
    for name in (TOKENIZER, *_BESIDE):
        if (path := source.file(name)) is not None:
            shutil.copyfile(path, out / name)


def open_text(name: str, subject: Subject, quiet: bool) -> Data:
    """The data, in the ids of the model's tokenizer. Prepared data must have been prepared with it."""
    prepared = (Path(name).expanduser() / MANIFEST).exists()
    data = open_named(name, None if prepared else subject.spec, quiet)
    if data.manifest.tokenizer.sha256 != subject.tokenizer.sha256:
        raise ValueError(
            f"--data {name} was prepared with the tokenizer {data.manifest.tokenizer.name!r}, which is not that of "
            f"{subject.name}: give text, or prepare it with --tokenizer {subject.spec}."
        )
    return data
