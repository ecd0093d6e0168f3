"""The colour and dashes of each scheme's lines, the same in every figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spheret.support.figure_style import DASHES, PALETTE

# the SpheretNorms are a family: their dashes differ too, for print without colour
OWN_DASHES = {"cay-spheretnorm": 1, "p-spheretnorm": 2}


def scheme_styles(schemes: Mapping[str, str], order: Iterable[str]) -> dict[str, tuple[str, Any]]:
    """The colour and dashes of each label, by its scheme, which has the same ones in every figure.

    The schemes that are not the paper's share its colours and have other dashes. So have variants of one scheme: the
    first has the scheme's dashes, the others take the next that are free.

    Args:
        schemes: the scheme of each label.
        order: all schemes.
    """
    names = list(order)
    places = {label: _place(scheme, names) for label, scheme in schemes.items()}
    taken = set(places.values())
    styles, first = {}, set()
    for label, (colour, dash) in places.items():
        if (colour, dash) in first:
            choices = [(dash + more) % len(DASHES) for more in range(1, len(DASHES))]
            dash = next((each for each in choices if (colour, each) not in taken), dash)
            taken.add((colour, dash))
        first.add((colour, dash))
        styles[label] = PALETTE[colour][0], DASHES[dash]
    return styles


def _place(scheme: str, order: list[str]) -> tuple[int, int]:
    """The indices of a scheme in PALETTE and DASHES."""
    # a scheme of the user's own comes after ours
    index = order.index(scheme) if scheme in order else len(order)
    lap, colour = divmod(index, len(PALETTE))
    return colour, (OWN_DASHES.get(order[colour], 0) + lap) % len(DASHES)
