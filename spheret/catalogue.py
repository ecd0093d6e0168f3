"""`spheret schemes` and `spheret retractions`: the tables, printed."""

from __future__ import annotations

import inspect
from dataclasses import fields

from spheret.connections import SCHEMES, scheme
from spheret.retractions import RETRACTIONS


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
    """List every retraction: its p, its cubic coefficient and its largest angle."""
    for name, row in RETRACTIONS.items():
        series = f"theta = beta {row.cubic:+.4g} beta^3 + ..."
        print(f"{name}: p = {row.p:g}, {series}, largest angle {row.largest_angle:.4g}")
    return 0
