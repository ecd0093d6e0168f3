"""The model card of an export: README.md, made from the run's config.json and the checkpoint's state.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import ModelCardData

from spheret import __version__
from spheret.hub.config import CODE
from spheret.model.gpt import GPT
from spheret.runs.checkpoint import Checkpoint
from spheret.runs.run import Run
from spheret.support.errors import shortened
from spheret.support.templates import environment

CARD = "README.md"
TEMPLATE = "card.md.jinja"
# settings that name places on the machine of the run
_PLACES = {"data": ("path",), "train": ("init_from",)}
_LONGEST = 300


def code(text: str) -> str:
    """A text as a Markdown code span, in which nothing is markup."""
    text = shortened(" ".join(text.replace("`", "'").split()), _LONGEST)
    return f"`{text}`"


def write_card(directory: Path, run: Run, saved: Checkpoint, model: GPT, kind: str, parameters: int) -> None:
    """Write README.md of an export.

    kind: "spheret", or "gpt2". parameters: those of the export, which may have an untied head where the run has none.
    """
    config, scheme = run.config, model.scheme
    # Markdown: the filter `code` takes the place of HTML's escapes
    templates = environment(Path(__file__).parent, autoescape=False)
    templates.filters["code"] = code
    training = saved.state.training
    text = templates.get_template(TEMPLATE).render(
        metadata=_metadata(kind, model.config.scheme),
        name=run.name,
        stock=kind == "gpt2",
        code_file=CODE.name,
        spheret=__version__,
        parameters=parameters,
        model=model.config,
        formula=scheme.formula.rstrip("."),
        source=scheme.source,
        trained=config.train is not None,
        imported=_place(config.environment.imported),
        train=config.train,
        evaluation=config.evaluation,
        step=saved.step,
        val_loss=saved.state.val_loss,
        best=None if training is None else training.best,
        corpus=config.data.corpus,
        tokens=config.data.tokens,
        unigram_entropy=config.data.unigram_entropy,
        tokenizer=config.data.tokenizer,
        settings=_settings(run),
    )
    (directory / CARD).write_bytes(text.encode())


def _metadata(kind: str, scheme: str) -> str:
    """The YAML that the hub reads. It holds nothing that a user wrote."""
    own = [] if kind == "gpt2" else ["custom_code"]
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["spheret", scheme, *own])
    return data.to_yaml().strip()


def _place(imported: str | None) -> str | None:
    """The source of an import: a name on the hub, or the last part of a path."""
    return imported if imported is None or not Path(imported).is_absolute() else Path(imported).name


def _settings(run: Run) -> str:
    """Every setting as JSON in ASCII. A line of it begins with a bracket, a blank or a quote, and ends no code."""
    sections: dict[str, Any] = msgspec.to_builtins(run.config.as_dict())
    for section, names in _PLACES.items():
        for name in names:
            sections[section].pop(name, None)
    return json.dumps(sections, indent=1)
