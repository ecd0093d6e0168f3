"""The names of the parametrizations, and the sizes of the base model that each needs.

`spheret.train.parametrization` has their rules.
"""

from __future__ import annotations

from collections.abc import Mapping

from spheret.support.errors import unknown
from spheret.support.ranges import check_count

PARAMETRIZATIONS: dict[str, tuple[str, ...]] = {
    "standard": (),
    "mup": ("base_width", "base_heads"),
    "completep": ("base_width", "base_layers", "base_heads"),
}
BASE_SIZES = ("base_width", "base_layers", "base_heads")


def check_base_sizes(parametrization: str, sizes: Mapping[str, int | None]) -> None:
    """Raise unless the parametrization has the sizes that it needs, and no others."""
    if parametrization not in PARAMETRIZATIONS:
        raise unknown("parametrization", parametrization, PARAMETRIZATIONS)
    needed = PARAMETRIZATIONS[parametrization]
    for name, value in sizes.items():
        flag = "--" + name.replace("_", "-")
        if value is None and name in needed:
            raise ValueError(
                f"--parametrization {parametrization} needs {flag}: the {name.removeprefix('base_')} of the model "
                f"for which --lr was tuned."
            )
        if value is not None and name not in needed:
            # a number of any length is named
            check_count(flag, value)
            raise ValueError(f"{flag} {value} has no meaning with --parametrization {parametrization}: leave it out.")
        if value is not None:
            check_count(flag, value)
    width, heads = sizes["base_width"], sizes["base_heads"]
    if width is not None and heads is not None and width % heads:
        raise ValueError(
            f"--base-width {width} is not divisible by --base-heads {heads}: give the heads of the model for which "
            f"--lr was tuned."
        )
