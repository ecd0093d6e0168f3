"""Deep connections: the SCHEMES table, and `scheme(name, **options)`, which builds a row of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from spheret.connections import euclidean as flat
from spheret.connections.base import Connection, Initialisation, RetractionStep, Scheme, angle_between
from spheret.connections.bounded import Bounded, BoundedScalar
from spheret.connections.ngpt import NGPT
from spheret.connections.norms import LayerNorm, RMSNorm, ScaleNorm
from spheret.connections.spherical import SpheretNorm, Spherical, SphericalConnection
from spheret.support.errors import unknown

__all__ = [
    "PAPER_SCHEMES",
    "SCHEMES",
    "Bounded",
    "BoundedScalar",
    "Connection",
    "Initialisation",
    "LayerNorm",
    "RMSNorm",
    "RetractionStep",
    "ScaleNorm",
    "Scheme",
    "SpheretNorm",
    "Spherical",
    "SphericalConnection",
    "angle_between",
    "scheme",
]

# each row is a Scheme class, or a Scheme class with other defaults; the first nine are the paper's
SCHEMES: dict[str, Callable[..., Scheme]] = {
    "pre-ln": flat.PreLN,
    "post-ln": flat.PostLN,
    "pre-dyt": flat.PreDyT,
    "peri-ln": flat.PeriLN,
    "keel": flat.Keel,
    # the SpheretNorm paper does not name GeoNorm's schedule; harmonic is that of GeoNorm's own paper
    "geonorm": partial(Spherical, default_p=math.inf, schedule="harmonic"),
    "proj-spheretnorm": partial(Spherical, default_p=1.0),
    "cay-spheretnorm": partial(Spherical, default_p=2.0),
    "p-spheretnorm": partial(Spherical, default_p=0.5),
    "residual": flat.Residual,
    "derf": flat.PreDerf,
    "dyisru": flat.PreDyISRU,
    "lns": flat.LNScaling,
    "mix-ln": flat.MixLN,
    "deepnorm": flat.DeepNorm,
    "rezero": flat.ReZero,
    "layerscale": flat.LayerScale,
    "ngpt": NGPT,
    "orthogonal": flat.Orthogonal,
    "scalenorm": flat.PreScaleNorm,
}
PAPER_SCHEMES: tuple[str, ...] = tuple(SCHEMES)[:9]


def scheme(name: str, **options: Any) -> Scheme:
    """The scheme of that name with these options: `scheme("p-spheretnorm", p=0.3, schedule="constant")`."""
    if name not in SCHEMES:
        raise unknown("scheme", name, SCHEMES)
    row = SCHEMES[name]
    scheme_class = row.func if isinstance(row, partial) else row
    kinds = {f.name: f.type for f in fields(scheme_class) if f.name != "name"}  # type: ignore[arg-type]
    for option, value in options.items():
        if option not in kinds:
            raise unknown(f"option of {name}", option, kinds)
        # without this check "no" would count as true, and true as 1
        if isinstance(value, bool) != (kinds[option] in ("bool", bool)):
            allowed = "a number or a word" if isinstance(value, bool) else "true or false"
            raise ValueError(f"{option} of {name} must be {allowed}, got {value!r}.")
    return row(name=name, **options)
