"""What a conversion refuses, each with its own sentence."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import nn

from spheret.connections import SCHEMES, Spherical
from spheret.connections import scheme as make_scheme
from spheret.conversion.attach import NAME, steps
from spheret.conversion.plan import ConversionError
from spheret.support.errors import unknown

Start = Literal["exact", "calibrated", "plain"]

# options of a spherical scheme that a converted model has no place for, with the only value that is allowed
_FIXED = {
    "inner_norm": (False, "the model keeps the norms before its branches"),
    "final_norm": (True, "the model keeps its own last norm"),
    "entry_norm": (True, "a converted stream needs the radius of the entry's ScaleNorm"),
    "bias": (True, "the model keeps its own norms"),
    "output_init": ("scaled", "the model keeps its weights"),
    "prores": (None, "the model has been trained, with full branches"),
}
# where softplus(a) starts in its interval (0, 1] unless asked otherwise. The unit makes up for it, and the step size
# can both fall and double
_ALPHA_SHARE = 0.5


def spherical_scheme(name: str, start: str, options: dict[str, Any]) -> Spherical:
    """The scheme that a model is converted to. Refuses what has no place in someone else's model."""
    if start not in get_args(Start):
        raise unknown("start", start, get_args(Start))
    if start != "plain" and "alpha" not in options:
        options = {**options, "alpha": _ALPHA_SHARE}
    chosen = make_scheme(name, **({} if not _is_spherical(name) else options))
    if not isinstance(chosen, Spherical):
        spherical = ", ".join(other for other in SCHEMES if _is_spherical(other))
        why = "which {} does not" if chosen.one_stream else "and {} carries more than one"
        raise ValueError(f"convert puts one stream on a sphere, {why.format(name)}: take one of {spherical}.")
    for option, (allowed, why) in _FIXED.items():
        if getattr(chosen, option) != allowed:
            raise ValueError(f"{option} = {getattr(chosen, option)!r} does not fit a conversion: {why}.")
    return chosen


def _is_spherical(name: str) -> bool:
    return name in SCHEMES and isinstance(SCHEMES[name](), Spherical)


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be converted, each with its own sentence."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a torch module, got {type(model).__name__}.")
    if steps(model):
        raise ConversionError(
            "this model is converted already: call spheret.revert(model) before converting it anew."
        )
    if getattr(getattr(model, "config", None), NAME, None) is not None:
        raise ConversionError(
            "this model was saved after a conversion, and transformers has left out its step sizes: load it with "
            "spheret.conversion.load(directory)."
        )
    inference = next((name for name, p in model.named_parameters() if p.is_inference()), None)
    if torch.is_inference_mode_enabled() or inference is not None:
        what = "convert was called" if inference is None else f"{inference} was made"
        raise ConversionError(
            f"{what} under torch.inference_mode(), whose tensors cannot be trained: build and convert the model "
            "outside of it."
        )
    quantised = next((name for name, module in model.named_modules() if _is_quantised(module)), None)
    if getattr(model, "is_quantized", False) or quantised is not None:
        raise ConversionError(
            f"{quantised or 'the model'} is quantised, and no retraction reproduces rounded outputs: convert the "
            "model before it is quantised."
        )
    if not any(p.is_floating_point() for p in model.parameters()):
        raise ConversionError(f"{type(model).__name__} has no parameters, so it has no residual branches.")
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ConversionError(f"{meta} is on the meta device: load the weights before converting the model.")


def _is_quantised(module: nn.Module) -> bool:
    words = f"{type(module).__module__}.{type(module).__name__}".lower()
    if "quantized" in words or "bitsandbytes" in words:
        return True
    return any(not p.is_floating_point() for p in module.parameters(recurse=False))
