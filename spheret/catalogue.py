"""`spheret schemes`: the tables of schemes and of retractions, printed."""

from __future__ import annotations

import math
from dataclasses import fields

from spheret.connections import SCHEMES, scheme
from spheret.kernels import BACKENDS
from spheret.retractions import RETRACTIONS, P


def schemes() -> int:
    """List every scheme with its formula, options and source, and every retraction with its angle and backends."""
    for name in SCHEMES:
        row = scheme(name)
        options = [f"{f.name}={getattr(row, f.name)}" for f in fields(row) if f.name != "name"]
        print(f"{name}\n    {row.formula}")
        if options:
            print(f"    options: {', '.join(options)}")
        print(f"    source: {row.source}")
    print('\nspheret train --scheme NAME --set option=value; in Python: spheret.scheme("NAME", option=value)\n')
    _print_retractions()
    return 0


def _print_retractions() -> None:
    table = [("retraction", "theta(beta)", "p", "cubic", "largest angle", "cap", "backends")]
    for name, retraction in RETRACTIONS.items():
        backends = ", ".join(backend for backend, code in BACKENDS.items() if code.knows(retraction))
        numbers = (
            _number(retraction.p),
            _number(retraction.cubic),
            _number(retraction.largest_angle),
            _number(retraction.cap),
        )
        table.append((name, retraction.formula, *numbers, backends))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
    print("\nA step of length beta turns by theta(beta) = beta + cubic beta^3 + ... radians, at most by the cap.")
    print("spheret train --scheme NAME --set retraction=NAME; in Python: spheret.retract(h, f, alpha, NAME)")


def _number(x: P | None) -> str:
    """A number in four digits; "none" for None, "-" for NaN, which is the p of a retraction that has none."""
    if x is None:
        return "none"
    return "-" if math.isnan(x) else f"{float(x):.4g}"
