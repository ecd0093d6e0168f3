"""`spheret convert`: a saved model goes onto a sphere, with its loss before and after."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from spheret.connections.parse import json_options, parse_options
from spheret.conversion import anneal, convert
from spheret.conversion.checks import Start, spherical_scheme
from spheret.data.shards import TOKENIZER
from spheret.data.tokenizers import Tokenizer, describe, load
from spheret.flags import shown
from spheret.runs.run import is_run, open_run
from spheret.support import files, machine
from spheret.support.errors import need, refusing
from spheret.support.machine import check_threads
from spheret.support.ranges import check_counts

RECORD = "convert.json"
# batches on which radius and step sizes are fitted
FITTED = 4
# the files of a tokenizer that transformers has saved
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.json", "merges.txt")


@tyro.conf.configure(tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction)
def convert_command(
    model: str,
    /,
    data: str,
    out: str,
    scheme: str = "proj-spheretnorm",
    start: Start = "exact",
    batch_size: int = 8,
    block: Annotated[int | None, shown("INT", "256, or the model's limit if that is lower")] = None,
    eval_windows: int = 64,
    tokenizer: Annotated[str | None, shown("STR", "the model's own")] = None,
    device: Annotated[str | None, shown("STR", "the first of cuda, mps, cpu that this machine has")] = None,
    threads: Annotated[int | None, shown("INT", "torch's own")] = None,
    quiet: bool = False,
    set: tuple[str, ...] = (),
) -> int:
    """Convert a trained language model to a spherical scheme, check it, and measure its loss before and after.

    Args:
        model: a directory that transformers' save_pretrained has written, a run directory, or a name on the Hugging
            Face hub.
        data: text on which step sizes are fitted and the loss is measured: a corpus by name, a file, folder or glob
            of text, or a prepared directory.
        out: the directory for the converted model and convert.json; it must be new or empty.
        scheme: a spherical scheme.
        start: what is saved: the exact start, or the scheme with fitted step sizes, or the plain scheme.
        batch_size: sequences per batch.
        block: tokens per sequence.
        eval_windows: windows of the validation split that are measured.
        tokenizer: bytes, gpt2 or a path to a tokenizer.json, for a model without its own.
        device: cuda, mps or cpu.
        threads: CPU threads.
        quiet: Print no table.
        set: An option of the scheme, as option=value.
    """
    need("transformers", "hub")
    from spheret.hub.open import open_text, written

    check_counts(batch_size=batch_size, block=block, eval_windows=eval_windows)
    if threads is not None:
        torch.set_num_threads(check_threads("--threads", threads))
    options = parse_options(set)
    spherical_scheme(scheme, start, options)
    place, path = machine.resolve_device(device), Path(out).expanduser()
    files.check_output_directory("--out", path)
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"--out {path} is not empty: give a new directory.")
    with refusing(f"{model} cannot be converted", "give another model", whole=True):
        opened, own, spec, saved = _open(model, tokenizer)
        text = open_text(data, own, spec, quiet, path)
        opened, length = opened.to(place).eval(), _length(model, opened, block)
        loader = text.loader(length, batch_size)
        windows = [(x.to(place), y.to(place)) for x, y, _ in text.validation(length, batch_size, eval_windows)]
        batches = [{"input_ids": loader.batch(n)[0].to(place), "use_cache": False} for n in range(FITTED)]
        losses = {"original": _loss(opened, windows)}
        if not math.isfinite(losses["original"]):
            raise ValueError(f"the loss of {model} is not finite: the model is broken, give another.")
        # it compares every module's inputs with the original's, and raises if they differ
        _, report = convert(opened, scheme, start, example_inputs=batches[0], batches=batches, **options)
        losses["converted"] = _loss(opened, windows)
        if start == "exact":
            anneal(opened, 1.0)
            losses["at t = 1"] = _loss(opened, windows)
            anneal(opened, 0.0)
        record = {
            "model": model,
            "data": data,
            "options": json_options(options),
            "block": length,
            "eval_windows": eval_windows,
            "losses": losses,
            "report": asdict(report),
            "environment": machine.machine(),
        }
        with written(path) as partial:
            _save(opened, own, saved, partial, length)
            (partial / RECORD).write_bytes(files.dump(record))
    if not quiet:
        print(report)
        print("validation loss in nats per token, untrained")
        print("\n".join(f"  {name:<10} {loss:.4f}" for name, loss in losses.items()))
        print(f"{path}: the converted model (spheret.hub.load) and {RECORD}")
    return 0


def _open(given: str, choice: str | None) -> tuple[Any, Tokenizer, str, Path | None]:
    """A run or a saved causal language model in float32, and its tokenizer.

    Then how `spheret.data` names that tokenizer, and where transformers has saved it.
    """
    from spheret.hub import SpheretForCausalLM
    from spheret.hub.open import SavedModel, check_vocabulary, config_of, load_causal

    path = Path(given).expanduser()
    if is_run(path):
        if choice is not None:
            raise ValueError(f"{path} is a run, which has its own tokenizer: leave --tokenizer out.")
        run = open_run(path)
        tokenizer = run.tokenizer()
        end, spec = tokenizer.end_of_text, tokenizer.name if tokenizer.file is None else str(path / TOKENIZER)
        return SpheretForCausalLM.of(run.model(), bos_token_id=end, eos_token_id=end), tokenizer, spec, None
    saved = SavedModel(given)
    tokenizer, spec = (saved.tokenizer, saved.tokenizer_spec) if choice is None else (load(choice), choice)
    model = load_causal(saved, config_of(saved), dtype=torch.float32)
    check_vocabulary(tokenizer, len(model.get_input_embeddings().weight), given)
    return model, tokenizer, spec, saved.path if choice is None else None


def _length(name: str, model: Any, block: int | None) -> int:
    """The tokens of a window: `block`, or 256, or the model's limit."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if block is not None and most and block > most:
        raise ValueError(f"--block {block} is more than {name} takes: at most {most}.")
    return block or min(256, most or 256)


@torch.no_grad()
def _loss(model: Any, windows: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The mean loss of the next token."""
    total, count = 0.0, 0
    for x, y in windows:
        logits = model(input_ids=x, use_cache=False).logits
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum"))
        count += y.numel()
    return total / count


def _save(model: Any, tokenizer: Tokenizer, source: Path | None, out: Path, block: int) -> None:
    """Write the model and its tokenizer. source: where transformers has saved the tokenizer's files."""
    from spheret.hub.tokenizer_files import write_tokenizer

    model.save_pretrained(out)
    if source is None:
        write_tokenizer(out, describe(tokenizer), tokenizer.file, block)
    else:
        for path in (path for pattern in TOKENIZER_FILES for path in source.glob(pattern)):
            shutil.copyfile(path, out / path.name)
