"""`spheret export` writes a run as files that transformers loads. `spheret import` makes a run of such files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import tyro
from safetensors import SafetensorError

from spheret import __version__
from spheret.data.shards import TOKENIZER
from spheret.data.tokenizers import JSONTokenizer, Tokenizer, describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.hub.gpt2 import from_gpt2, to_gpt2
from spheret.hub.model import SpheretForCausalLM
from spheret.hub.tokenizer_files import is_gpt2, write_tokenizer
from spheret.model.gpt import GPT
from spheret.runs.run import Run, create_run, open_run
from spheret.support.cache import cache_directory
from spheret.support.errors import unknown
from spheret.support.files import check_output_directory, directory_written_whole

KINDS = ("spheret", "gpt2")
WEIGHTS = "model.safetensors"
# old GPT-2 files keep causal masks among the weights
MASKS = re.compile(r"attn\.(masked_)?bias$")


def export_command(
    run: str,
    /,
    out: Path,
    kind: Annotated[str, tyro.conf.arg(name="as")] = "spheret",
    step: int | None = None,
) -> int:
    """Write a run's model and tokenizer as safetensors and JSON that transformers loads.

    Args:
        run: the run directory.
        out: the directory to write; it must be new or empty.
        kind: spheret (AutoModelForCausalLM loads it after `import spheret.hub`), or gpt2 (a stock GPT-2 that
            transformers loads without spheret; the run's scheme must be pre-ln).
        step: the checkpoint's step; the newest by default.
    """
    directory = export(open_run(run), out, kind, step)
    first = "import spheret.hub, then " if kind == "spheret" else ""
    print(f"{directory}: {first}load it with AutoModelForCausalLM.from_pretrained")
    return 0


def export(run: Run, out: str | Path, kind: str = "spheret", step: int | None = None) -> Path:
    """Write a run for transformers. The directory `out` is complete afterwards, or absent if something failed."""
    if kind not in KINDS:
        raise unknown("kind of export", kind, KINDS)
    target = Path(out).expanduser()
    if target.exists() and target.samefile("."):
        raise ValueError("--out is the current directory, and an export makes a new one: give another.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty: give a new directory.")
    model, tokenizer = run.model(step), run.tokenizer()
    described, end = describe(tokenizer), tokenizer.end_of_text
    more = {"bos_token_id": end, "eos_token_id": end, "spheret_tokenizer": described}
    exported: Any = to_gpt2(model, **more) if kind == "gpt2" else SpheretForCausalLM.of(model, **more)
    with directory_written_whole(target) as partial:
        with _quietly():
            exported.save_pretrained(partial)
        write_tokenizer(partial, described, tokenizer.file, model.config.block)
    return target


def import_command(source: str, /, out: Path, tokenizer: str | None = None) -> int:
    """Make a run directory of a model that transformers saved: an export of spheret, or a GPT-2.

    Args:
        source: the directory, its .safetensors file, or a name on the Hugging Face hub.
        out: the run directory to write.
        tokenizer: gpt2, bytes or a path to a tokenizer.json. By default the tokenizer beside the weights, or gpt2 if
            there is none and the vocabulary has GPT-2's size.
    """
    run = import_(source, out, tokenizer)
    config = run.model_config
    print(f"{run.path}: {config.layers} layers, {config.scheme}, tokenizer {run.tokenizer().name}")
    return 0


def import_(source: str | Path, out: str | Path, tokenizer: str | None = None) -> Run:
    """Make a run with one checkpoint, step-0. It holds the source's weights, bit for bit, as float32."""
    check_output_directory("--out", Path(out).expanduser())
    path = Path(source).expanduser()
    if path.is_file() and path.name != WEIGHTS:
        raise ValueError(f"{path} is not named {WEIGHTS}: put it beside its config.json under that name.")
    place = str(path.parent if path.is_file() else path if path.exists() else source)
    loaded = _load(place)
    if loaded.dtype == torch.float64:
        raise ValueError(f"{source} holds float64 weights, and a run holds float32: convert them first.")
    model = loaded.model if isinstance(loaded, SpheretForCausalLM) else from_gpt2(loaded)
    chosen = _tokenizer(place, tokenizer, getattr(loaded.config, "spheret_tokenizer", None), model)
    if chosen.vocab_size > model.config.vocab:
        raise ValueError(
            f"the tokenizer {chosen.name} has {chosen.vocab_size} tokens and the embedding of {source} has "
            f"{model.config.vocab} rows: give the tokenizer that it was trained with by --tokenizer."
        )
    environment = {
        "spheret": __version__,
        "transformers": version("transformers"),
        "imported": str(source),
        "model_type": loaded.config.model_type,
    }
    return create_run(out, model.float(), describe(chosen), chosen.file, environment)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence transformers' progress bars and its warnings about missing tensors, which are errors here."""
    log = transformers.utils.logging
    shown, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shown:
            log.enable_progress_bar()


def _load(place: str) -> Any:
    """Load a model with transformers from a directory, or by its name on the hub. Only safetensors are read."""
    directory = Path(place)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise FileNotFoundError(f"{place} has no config.json: point at a directory that transformers has saved.")
        if not list(directory.glob("*.safetensors")):
            raise FileNotFoundError(f"{place} has no .safetensors, and pickles are never read: convert it first.")
    elif not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", place):
        raise FileNotFoundError(
            f"there is nothing at {place}: give a directory with config.json and model.safetensors."
        )
    where: dict[str, Any] = {"cache_dir": str(cache_directory() / "hub")}
    try:
        with _quietly():
            kind = transformers.PreTrainedConfig.get_config_dict(place, **where)[0].get("model_type")
            if kind not in KINDS:
                raise ValueError(f"{place} is a {kind}, and only spheret and gpt2 can be imported.")
            both: Any = transformers.AutoModelForCausalLM.from_pretrained(
                place, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
                ignore_mismatched_sizes=True, **where,
            )  # fmt: skip
    except (OSError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        failed = "cannot be read"
        if not directory.is_dir():
            failed = "is not a directory on this machine, and could not be loaded from the Hugging Face hub"
        raise OSError(
            f"{place} {failed} ({reason}): give a directory with a complete config.json and {WEIGHTS}."
        ) from None
    loaded, report = both
    _check_complete(place, report)
    return loaded


def _check_complete(place: str, report: dict[str, Any]) -> None:
    """Raise for tensors that are missing, unexpected or of another shape. transformers would only warn."""
    problems = {
        "lacks": report["missing_keys"],
        "has another shape of": [name for name, *_ in report["mismatched_keys"]],
        "has tensors that its config.json does not describe:": [
            name for name in report["unexpected_keys"] if not MASKS.search(name)
        ],
    }
    for problem, names in problems.items():
        if names:
            raise ValueError(
                f"{place} {problem} {', '.join(sorted(names)[:3])} ({len(names)} in all): save the whole model again."
            )


def _tokenizer(place: str, choice: str | None, described: dict[str, Any] | None, model: GPT) -> Tokenizer:
    """The tokenizer of an import: `choice`, or the exported one, or the one beside the weights, or GPT-2's.

    choice: the value of --tokenizer.
    described: the description of the exported tokenizer in the config, if there is one.
    """
    file = Path(place) / TOKENIZER
    if choice is not None:
        return load_tokenizer(choice)
    if described is not None:
        tokenizer = (
            JSONTokenizer(file.read_bytes(), described["name"])
            if described["file"]
            else load_tokenizer(described["name"])
        )
        if describe(tokenizer) != described:
            raise ValueError(
                f"{file} is not the tokenizer that was exported ({json.dumps(described)}): export it again."
            )
        return tokenizer
    if file.is_file():
        return load_tokenizer("gpt2") if is_gpt2(file.read_bytes()) else JSONTokenizer(file.read_bytes(), TOKENIZER)
    if model.config.vocab not in (50257, 50304):
        raise ValueError(
            f"{place} has no {TOKENIZER}, and its {model.config.vocab} tokens are not GPT-2's: give --tokenizer."
        )
    return load_tokenizer("gpt2")
