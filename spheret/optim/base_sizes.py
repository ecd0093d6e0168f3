"""The names of the parametrizations, the sizes of the base model that each needs, and the schemes that each fits.

`spheret.optim.parametrization` has their rules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from spheret.connections import Connection, Norm
from spheret.model.gpt import GPTConfig
from spheret.support.errors import unknown
from spheret.support.ranges import check_count

PARAMETRIZATIONS: dict[str, tuple[str, ...]] = {
    "standard": (),
    "mup": ("base_width", "base_heads"),
    "completep": ("base_width", "base_layers", "base_heads"),
}
BASE_SIZES = ("base_width", "base_layers", "base_heads")
# norms need two entries, and the steps of a base's depth are added up one by one
LEAST = {"base_width": 2, "base_layers": 1, "base_heads": 1}
MOST = 100_000


def check_base_sizes(parametrization: str, sizes: Mapping[str, int | None]) -> None:
    """Raise unless the parametrization has the sizes that it needs, and no others."""
    if parametrization not in PARAMETRIZATIONS:
        raise unknown("parametrization", parametrization, PARAMETRIZATIONS)
    needed = PARAMETRIZATIONS[parametrization]
    for name, value in sizes.items():
        if value is not None:
            check_count(name, value, LEAST[name], MOST)
            if name not in needed:
                raise ValueError(
                    f"{name} {value} has no meaning with parametrization {parametrization}: leave it out."
                )
        elif name in needed:
            raise ValueError(
                f"parametrization {parametrization} needs {name}: the {name.removeprefix('base_')} of the model "
                f"for which --lr was tuned."
            )
    width, heads = sizes["base_width"], sizes["base_heads"]
    if width is not None and heads is not None and width % heads:
        raise ValueError(
            f"base_width {width} is not divisible by base_heads {heads}: give the heads of the model for which "
            f"--lr was tuned."
        )


def readout_gains(exit_module: nn.Module, last: Connection) -> list[nn.Parameter]:
    """The gain, and the bias if there is one, of the norm that the head reads; empty if there is no such norm.

    exit_module: what the stream leaves through. last: the last connection, whose outer norm is read if `exit_module`
    is not a norm.
    """
    norms = (each for each in (exit_module, getattr(last, "outer_norm", None)) if isinstance(each, Norm))
    norm = next(norms, None)
    return [gain for name in ("weight", "bias", "g") if (gain := getattr(norm, name, None)) is not None]


def check_scheme(parametrization: str, model: GPTConfig) -> None:
    """Raise if the rules have no meaning for a scheme."""
    scheme = model.build_scheme()
    if parametrization == "standard":
        return
    if not scheme.one_stream:
        raise ValueError(
            f"parametrization {parametrization} has rules for schemes with one stream, and {model.scheme} carries "
            "more than one: take parametrization standard, or a different scheme."
        )
    with torch.device("meta"):
        exit_module, (_, last) = (
            scheme.exit(model.width),
            scheme.connect_block(model.width, model.layers, model.layers),
        )
    if not scheme.unit_weights and not readout_gains(exit_module, last):
        raise ValueError(
            f"parametrization {parametrization} needs a norm before the head, to carry the width's factor on the "
            f"logits. {model.scheme} with these options does not have one: take another scheme, or parametrization "
            f"standard."
        )
    if "base_layers" not in PARAMETRIZATIONS[parametrization]:
        return
    if scheme.step_sum(2 * model.layers) is None:
        raise ValueError(
            f"parametrization {parametrization} scales branches by the depth, and {model.scheme} has a rule of its "
            f"own for that: take parametrization mup, or another scheme."
        )
