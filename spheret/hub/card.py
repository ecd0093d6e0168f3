"""The model card of an export: README.md, made from the run's config.json and the checkpoint's state.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import ModelCardData

from spheret import __version__
from spheret.model.gpt import GPT
from spheret.runs.checkpoint import Checkpoint
from spheret.runs.run import Run
from spheret.support.errors import shortened

CARD = "README.md"
# settings that name places on the machine of the run
_PLACES = {"data": ("path",), "train": ("init_from",)}
_LONGEST = 300
_TEXT = """---
{metadata}
---
# {name}

A language model with {parameters:,} parameters, exported by spheret {version}{stock}.
Its layers are joined by {scheme}.

```python
{first}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIR")
tokenizer = AutoTokenizer.from_pretrained("DIR")
```

`DIR` is this directory, or the name of its repository on the hub.

## Loss

{loss}

## Settings of the run

```json
{settings}
```

Add a licence of the weights to the first lines before you publish them.
"""


def code(text: str) -> str:
    """A text as a Markdown code span, in which nothing is markup."""
    return f"`{shortened(' '.join(text.replace('`', chr(39)).split()), _LONGEST)}`"


def write_card(directory: Path, run: Run, saved: Checkpoint, model: GPT, kind: str, parameters: int) -> None:
    """Write README.md of an export.

    kind: "spheret", or "gpt2". parameters: those of the export, which may have an untied head where the run has none.
    """
    stock, scheme = kind == "gpt2", model.config.scheme
    formula = model.scheme.formula.rstrip(".")
    # the hub reads this as YAML. It holds nothing that a user wrote
    tags = ["spheret", scheme, *([] if stock else ["custom_code"])]
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=tags)
    text = _TEXT.format(
        metadata=data.to_yaml().strip(),
        name=code(run.name),
        parameters=parameters,
        version=__version__,
        stock=" as a stock GPT-2" if stock else "",
        scheme=f"{code(scheme)}: {code(formula)} ({code(model.scheme.source)})",
        first="" if stock else 'import spheret.hub  # pip install "spheret[hub]"\n',
        loss=_loss(run, saved),
        settings=_settings(run),
    )
    (directory / CARD).write_bytes(text.encode())


def _loss(run: Run, saved: Checkpoint) -> str:
    """What the validation loss is, and what it was measured on."""
    train, data, loss = run.config.train, run.config.data, saved.state.val_loss
    if train is None:
        source = run.config.environment.imported
        # the last part of a path, or a name on the hub
        place = "" if source is None else f", but imported from {code(Path(source).name)}"
        return f"These weights were not trained by spheret{place}. No loss was measured."
    value = "The loss was not measured" if loss is None else f"The validation loss is {loss:.4f} nats per token"
    unfinished = "" if saved.step == train.steps else " The training was not finished at this step."
    corpus = "text that spheret does not know" if data.corpus is None else code(data.corpus.name)
    licence = "" if data.corpus is None else f" (licence: {code(data.corpus.licence or 'not stated')})"
    counts = "; ".join(f"{count:,} tokens in the split {code(split)}" for split, count in (data.tokens or {}).items())
    return (
        f"{value}, after step {saved.step} of {train.steps}: {saved.step * train.tokens_per_update:,} tokens of "
        f"{corpus}{licence}: {counts}.{unfinished} It comes from one run with one seed. A model that ignores the "
        f"context has about {data.unigram_entropy:.4f}. A loss per token compares only with models that have this "
        f"tokenizer ({code(data.tokenizer.name)}) and this text."
    )


def _settings(run: Run) -> str:
    """Every setting as JSON in ASCII. A line of it begins with a bracket, a blank or a quote, and ends no code."""
    sections: dict[str, Any] = msgspec.to_builtins(run.config.as_dict())
    for section, names in _PLACES.items():
        for name in names:
            sections[section].pop(name, None)
    return json.dumps(sections, indent=1)
