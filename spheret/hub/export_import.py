"""`spheret export` and `spheret import`: their flags. transformers is imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from spheret.support.errors import need, refusing


def export_command(
    run: str,
    /,
    out: Path,
    kind: Annotated[str, tyro.conf.arg(name="as")] = "spheret",
    step: int | None = None,
) -> int:
    """Write a run's model and tokenizer as safetensors and JSON that transformers loads, with a model card.

    Args:
        run: the run directory.
        out: the directory to write; it must be new or empty.
        kind: spheret (AutoModelForCausalLM loads it after `import spheret.hub`, or with trust_remote_code=True), or
            gpt2, llama or qwen3 (a stock model that transformers loads without spheret; the run's scheme must be
            pre-ln, on that backbone).
        step: the checkpoint's step; the newest by default.
    """
    need("transformers", "hub")
    from spheret.hub.transfer import export
    from spheret.runs.run import open_run

    directory = export(open_run(run), out, kind, step)
    first = "import spheret.hub, then " if kind == "spheret" else ""
    print(f"{directory}: {first}load it with AutoModelForCausalLM.from_pretrained; README.md says more")
    return 0


def import_command(source: str, /, out: Path, tokenizer: str | None = None) -> int:
    """Make a run directory of a model that transformers saved: an export of spheret, or a GPT-2.

    Args:
        source: the directory, its .safetensors file, or a name on the Hugging Face hub.
        out: the run directory to write.
        tokenizer: gpt2, bytes or a path to a tokenizer.json. By default the tokenizer beside the weights, or gpt2 if
            there is none and the vocabulary has GPT-2's size.
    """
    need("transformers", "hub")
    from spheret.hub.transfer import import_

    with refusing(f"{source} cannot be imported", "give another model", whole=True):
        run = import_(source, out, tokenizer)
    config = run.model_config
    print(f"{run.path}: {config.layers} layers, {config.scheme}, tokenizer {run.tokenizer().name}")
    return 0
