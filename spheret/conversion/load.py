"""Load a converted transformers model that `save_pretrained` has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from spheret.conversion.attach import NAME
from spheret.conversion.model import convert
from spheret.support.errors import need

_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def load(directory: str | Path, example_inputs: Any = None, **options: Any) -> nn.Module:
    """The converted model in a directory that its `save_pretrained` has written, at the same position t.

    example_inputs: as in `convert`, for models that need it there.
    options: what transformers' `from_pretrained` takes, e.g. dtype or device_map.
    """
    transformers = need("transformers", "hub")
    config = transformers.AutoConfig.from_pretrained(directory)
    entry = getattr(config, NAME, None)
    if entry is None:
        raise ValueError(
            f"the model in {directory} was not saved as a converted one: load it with transformers, and convert it."
        )
    delattr(config, NAME)
    name = (config.architectures or ["?"])[0]
    # a class of its own, or one that was registered: `import spheret.hub` registers that of our runs
    registered = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    architecture = getattr(transformers, name, registered)
    if architecture is None or architecture.__name__ != name:
        raise ValueError(f"transformers has no class {name}, which the config in {directory} names.")
    # transformers would report the step sizes as unexpected
    quiet: Any = type(
        architecture.__name__, (architecture,), {"_keys_to_ignore_on_load_unexpected": [rf"\b{NAME}\."]}
    )
    model: nn.Module = quiet.from_pretrained(directory, config=config, **options)
    model.__class__ = architecture
    # the start only says how the step sizes were found; they are read from the file
    convert(model, entry["scheme"], start="plain", example_inputs=example_inputs, **entry["options"])
    model.config.spheret = entry  # type: ignore[union-attr]
    wanted = {name for name in model.state_dict() if f".{NAME}." in f".{name}"}
    saved = {name: tensor for name, tensor in _tensors(Path(directory), wanted).items() if name in wanted}
    if missing := sorted(wanted - saved.keys()):
        raise ValueError(f"the model in {directory} lacks {missing[0]} ({len(missing)} missing): save it again.")
    model.load_state_dict(saved, strict=False)
    return model


def _tensors(directory: Path, wanted: set[str]) -> dict[str, Tensor]:
    from safetensors import safe_open

    files = {_WEIGHTS}
    if (directory / _INDEX).exists():
        files = set(json.loads((directory / _INDEX).read_text())["weight_map"].values())
    tensors = {}
    for file in sorted(files):
        with safe_open(directory / file, "pt") as reader:
            tensors.update({name: reader.get_tensor(name) for name in reader.keys() if name in wanted})  # noqa: SIM118
    return tensors
