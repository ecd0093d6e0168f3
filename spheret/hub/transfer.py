"""`spheret export` and `spheret import`: a run as files that transformers loads, and a run of such files.

transformers is imported when a command runs.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import tyro

from spheret import __version__
from spheret.data.shards import TOKENIZER
from spheret.data.tokenizers import Tokenizer, describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.hub.tokenizer_files import write_tokenizer
from spheret.model.gpt import GPT
from spheret.runs.run import Run, create_run, open_run
from spheret.support.errors import need, refusing, shortened, unknown
from spheret.support.files import check_output_directory, directory_written_whole

if TYPE_CHECKING:
    from spheret.hub.open import SavedModel

KINDS = ("spheret", "gpt2")


def export(run: Run, out: str | Path, kind: str = "spheret", step: int | None = None) -> Path:
    """Write a run for transformers. The directory `out` is complete afterwards, or absent if something failed."""
    from spheret.hub.gpt2 import to_gpt2
    from spheret.hub.model import SpheretForCausalLM
    from spheret.hub.open import written

    if kind not in KINDS:
        raise unknown("kind of export", kind, KINDS)
    target = _new(out)
    model, tokenizer = run.model(step=step), run.tokenizer()
    # the tokenizer pads with the end of text
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.end_of_text)
    exported = to_gpt2(model, **ids) if kind == "gpt2" else SpheretForCausalLM.of(model, **ids)
    with written(target) as partial:
        exported.save_pretrained(partial)
        write_tokenizer(partial, describe(tokenizer), tokenizer.file, model.config.block)
    return target


def import_(source: str | Path, out: str | Path, tokenizer: str | None = None) -> Run:
    """Make a run with one checkpoint, step-0. It holds the source's weights as float32."""
    from spheret.hub.gpt2 import from_gpt2
    from spheret.hub.open import SavedModel, check_vocabulary, config_of, load_causal

    target = _new(out)
    saved = SavedModel(source)
    if saved.kind not in KINDS:
        raise ValueError(
            f"{saved.path} is a {shortened(saved.kind)}, and only {' and '.join(KINDS)} can be imported."
        )
    loaded = load_causal(saved, config_of(saved), dtype=torch.float32)
    model: GPT = from_gpt2(loaded) if saved.kind == "gpt2" else loaded.model.eval()
    chosen = _tokenizer(saved, model) if tokenizer is None else load_tokenizer(tokenizer)
    check_vocabulary(chosen, model.config.vocab, source)
    environment = {
        "spheret": __version__,
        "transformers": version("transformers"),
        "imported": str(source),
        "model_type": saved.kind,
    }
    with directory_written_whole(target) as partial:
        create_run(partial, model, describe(chosen), chosen.file, environment)
    return open_run(target)


def _new(out: str | Path) -> Path:
    """The directory to write, which must be new or empty."""
    target = Path(out).expanduser()
    check_output_directory("--out", target)
    if target.exists() and target.samefile("."):
        raise ValueError("--out is the current directory, and this makes a new one: give another.")
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} exists and is not empty: give a new directory.")
    return target


def _tokenizer(saved: SavedModel, model: GPT) -> Tokenizer:
    """The tokenizer beside the weights, or GPT-2's."""
    if saved.tokenizer_file is not None:
        return saved.tokenizer
    vocab = model.config.vocab
    if vocab not in (50257, 50304):
        raise ValueError(
            f"{saved.path} has no {TOKENIZER}, and its {vocab} tokens are not GPT-2's: give --tokenizer."
        )
    return load_tokenizer("gpt2")


def export_command(
    run: str, /, out: Path, kind: Annotated[str, tyro.conf.arg(name="as")] = "spheret", step: int | None = None
) -> int:
    """Write a run's model and tokenizer as safetensors and JSON that transformers loads.

    Args:
        run: the run directory.
        out: the directory to write; it must be new or empty.
        kind: spheret (AutoModelForCausalLM loads it after `import spheret.hub`, or with trust_remote_code=True), or
            gpt2 (a stock model that transformers loads without spheret; the run's scheme must be pre-ln).
        step: the checkpoint's step; the newest by default.
    """
    need("transformers", "hub")
    directory = export(open_run(run), out, kind, step)
    first = "import spheret.hub, then " if kind == "spheret" else ""
    print(f"{directory}: {first}load it with AutoModelForCausalLM.from_pretrained")
    return 0


def import_command(source: str, /, out: Path, tokenizer: str | None = None) -> int:
    """Make a run directory of a model that transformers saved: an export of spheret, or a GPT-2.

    Args:
        source: the directory, or a name on the Hugging Face hub.
        out: the run directory to write.
        tokenizer: gpt2, bytes or a path to a tokenizer.json. By default the tokenizer beside the weights, or gpt2 if
            there is none and the vocabulary has GPT-2's size.
    """
    need("transformers", "hub")
    with refusing(f"{source} cannot be imported", "give another model", whole=True):
        run = import_(source, out, tokenizer)
    config = run.model_config
    print(f"{run.path}: {config.layers} layers, {config.scheme}, tokenizer {run.tokenizer().name}")
    return 0
