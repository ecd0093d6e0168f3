"""`spheret schemes` and `spheret retractions`: the tables, printed."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields

from spheret.connections import SCHEMES, scheme
from spheret.kernels import BACKENDS
from spheret.retractions import RETRACTIONS, P


def schemes() -> int:
    """List every scheme with its formula, its options and their defaults, and its source."""
    for name in SCHEMES:
        row = scheme(name)
        formula = inspect.getdoc(type(row)) or ""
        options = [f"{f.name}={getattr(row, f.name)}" for f in fields(row) if f.name != "name"]
        print(f"{name}\n    {formula.splitlines()[0]}")
        if options:
            print(f"    options: {', '.join(options)}")
        print(f"    source: {row.source}")
    print('\nspheret train --scheme NAME --set option=value; in Python: spheret.scheme("NAME", option=value)')
    return 0


def retractions() -> int:
    """List every retraction: its angle, p, cubic coefficient, largest angle, automatic cap and backends."""
    table = [("name", "theta(beta)", "p", "cubic", "largest angle", "cap", "backends")]
    for name, row in RETRACTIONS.items():
        backends = ", ".join(backend for backend, code in BACKENDS.items() if code.knows(row))
        numbers = (_number(row.p), _number(row.cubic), _number(row.largest_angle), _number(row.cap))
        table.append((name, row.formula, *numbers, backends))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
    print("\nA step of length beta turns by theta(beta) = beta + cubic beta^3 + ... radians, at most by the cap.")
    print("spheret train --scheme NAME --set retraction=NAME; in Python: spheret.retract(h, f, alpha, NAME)")
    return 0


def _number(x: P | None) -> str:
    """A number in four digits; "none" for None, "-" for NaN, which is the p of a retraction that has none."""
    if x is None:
        return "none"
    return "-" if math.isnan(x) else f"{float(x):.4g}"
