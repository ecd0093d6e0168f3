"""What `spheret convert` starts from: a causal language model that transformers has saved, or a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spheret.data import Data, open_named
from spheret.data.shards import MANIFEST, TOKENIZER
from spheret.data.tokenizers import Tokenizer, describe, load
from spheret.hub.loading import config_of, load_as
from spheret.hub.model import SpheretForCausalLM
from spheret.hub.open import BESIDE_TOKENIZER, SavedModel
from spheret.hub.tokenizer_files import write_tokenizer
from spheret.runs import layout
from spheret.runs.run import is_run, open_run
from spheret.support.documents import MOST_BYTES, read_bytes
from spheret.support.errors import need, refusing, shortened


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
    if is_run(path):
        return _of_a_run(path, tokenizer)
    return _of_transformers(SavedModel(given), tokenizer)


def _changed(given: str) -> ValueError:
    return ValueError(
        f"{given} has changed since this conversion began: put the old model back, or convert the new one into "
        "another --out."
    )


def _of_a_run(path: Path, choice: str | None) -> Subject:
    run = open_run(path)
    if choice is not None:
        raise ValueError(f"{path} is a run, which has its own tokenizer: leave --tokenizer out.")
    tokenizer, step = run.tokenizer(), run.checkpoint().step
    manifest = path / layout.CHECKPOINTS / f"step-{step}" / layout.MANIFEST
    described, end, block = describe(tokenizer), tokenizer.end_of_text, run.model_config.block
    sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest()

    def model() -> Any:
        loaded = run.model(step)
        # the manifest has the hashes of the weights, which were just compared with it
        if hashlib.sha256(manifest.read_bytes()).hexdigest() != sha256:
            raise _changed(str(path))
        return SpheretForCausalLM.of(loaded, bos_token_id=end, eos_token_id=end)

    return Subject(
        name=f"{run.name}, step {step}",
        sha256=sha256,
        load=model,
        tokenizer=tokenizer,
        spec=tokenizer.name if tokenizer.file is None else str(path / TOKENIZER),
        most=block,
        write_tokenizer=lambda out: write_tokenizer(out, described, tokenizer.file, block),
    )


def _of_transformers(saved: SavedModel, choice: str | None) -> Subject:
    transformers = need("transformers", "hub")
    given = saved.given
    if saved.is_converted:
        raise ValueError(
            f"{given} is converted already: give the model that it was made of, or go on with its training in Python "
            "(spheret.hub.load)."
        )
    config = config_of(saved)
    with refusing(f"transformers does not load {given} as a causal language model", "give another model"):
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        text = config.get_text_config()
        rows, most = int(text.vocab_size), getattr(text, "max_position_embeddings", None)
        most = int(most) if most else None
    if saved.architecture not in (kind.__name__, saved.kind):
        raise ValueError(
            f"{given} is a {shortened(saved.architecture)}, and spheret convert measures the loss of the next token: "
            "give a causal language model, or convert this one in Python (spheret.convert)."
        )
    tokenizer = saved.tokenizer if choice is None else load(choice)
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and the embedding of {given} has "
            f"{rows} rows: give the tokenizer that it was trained with by --tokenizer."
        )
    sha256 = saved.sha256()

    def model() -> Any:
        # each fine-tuning opens the files again, perhaps hours later
        again = SavedModel(saved.path)
        if again.sha256() != sha256:
            raise _changed(given)
        return load_as(again, kind, config_of(again), dtype=torch.float32)

    return Subject(
        name=given,
        sha256=sha256,
        load=model,
        tokenizer=tokenizer,
        spec=saved.tokenizer_spec if choice is None else choice,
        most=most,
        write_tokenizer=lambda out: _copy_tokenizer(saved, tokenizer, out),
    )


def _copy_tokenizer(saved: SavedModel, tokenizer: Tokenizer, out: Path) -> None:
    if saved.tokenizer_file is None:
        if tokenizer.file is not None:
            (out / TOKENIZER).write_bytes(tokenizer.file)
        return
    (out / TOKENIZER).write_bytes(saved.tokenizer_file)
    for name in BESIDE_TOKENIZER:
        if (path := saved.file(name)) is not None:
            (out / name).write_bytes(read_bytes(path, MOST_BYTES, "save the model again", follow=True))


def open_text(name: str, subject: Subject, out: Path, quiet: bool) -> Data:
    """The data, in the ids of the model's tokenizer. Prepared data must have been prepared with it.

    out: where the command writes, which may not lie among the text.
    """
    prepared = (Path(name).expanduser() / MANIFEST).exists()
    data = open_named(name, None if prepared else subject.spec, quiet, out)
    if data.manifest.tokenizer.sha256 != subject.tokenizer.sha256:
        raise ValueError(
            f"--data {name} was prepared with the tokenizer {data.manifest.tokenizer.name!r}, which is not that of "
            f"{subject.name}: give text, or prepare it with --tokenizer {subject.spec}."
        )
    return data
