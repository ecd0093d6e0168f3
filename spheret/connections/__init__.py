"""Deep connections: the SCHEMES table, and `scheme(name, **options)`, which builds a row of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spheret.connections import earlier_states as earlier
from spheret.connections import euclidean as flat
from spheret.connections import many_streams as many
from spheret.connections.base import (
    BranchShape,
    Connection,
    Initialisation,
    Scheme,
    State,
    angle_between,
)
from spheret.connections.bounded import Bounded, BoundedScalar, float32_scalars
from spheret.connections.geonorm_affine import GeoNormAffine
from spheret.connections.ngpt import NGPT
from spheret.connections.norms import NORMS, HeadNorm, LayerNorm, Norm, RMSNorm, ScaleNorm
from spheret.connections.spherical import GeoNorm, NormedSpheret, SpheretNorm, Spherical, SphericalConnection
from spheret.retractions import Retraction
from spheret.support.errors import unknown

__all__ = [
    "NORMS",
    "OTHER_NAMES",
    "PAPER_SCHEMES",
    "SCHEMES",
    "Bounded",
    "BoundedScalar",
    "BranchShape",
    "Connection",
    "HeadNorm",
    "Initialisation",
    "LayerNorm",
    "Norm",
    "RMSNorm",
    "ScaleNorm",
    "Scheme",
    "SpheretNorm",
    "Spherical",
    "SphericalConnection",
    "State",
    "angle_between",
    "float32_scalars",
    "list_schemes",
    "scheme",
]

# each row is a Scheme class, or a Scheme class with other defaults; the first nine are the paper's and Post-LN
SCHEMES: dict[str, Callable[..., Scheme]] = {
    "pre-ln": flat.PreLN,
    "post-ln": flat.PostLN,
    "pre-dyt": flat.PreDyT,
    "peri-ln": flat.PeriLN,
    "keel": flat.Keel,
    "geonorm": GeoNorm,
    "proj-spheretnorm": partial(Spherical, default_p=1.0),
    "cay-spheretnorm": partial(Spherical, default_p=2.0),
    "p-spheretnorm": partial(Spherical, default_p=0.5),
    "normed-spheretnorm": NormedSpheret,
    "residual": flat.ResidualScheme,
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
    "beam": flat.Beam,
    "vp-gate": flat.VPGate,
    "res-post": flat.ResPost,
    "hybridnorm": flat.HybridNorm,
    "residual-multiplier": flat.ResidualMultiplier,
    "geonorm-affine": GeoNormAffine,
    # those with more than one stream
    "x0": earlier.X0,
    "denseformer": earlier.DenseFormer,
    "attn-res": earlier.AttnRes,
    "hyper": many.Hyper,
    "mhc": many.ManifoldHyper,
    "spherical-hyper": many.SphericalHyper,
}
PAPER_SCHEMES: tuple[str, ...] = tuple(SCHEMES)[:9]
# what else the schemes are called, in lowercase letters and digits only. An error suggests the scheme that is meant
OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(("preln", "prenorm", "prelayernorm", "layernorm", "ln", "gpt", "gpt2"), "pre-ln"),
    **dict.fromkeys(("rmsnorm", "prermsnorm", "prerms", "llama"), "pre-ln"),
    **dict.fromkeys(("postln", "postnorm", "postlayernorm", "bert", "vanilla"), "post-ln"),
    **dict.fromkeys(("dyt", "predyt", "dynamictanh", "tanh"), "pre-dyt"),
    **dict.fromkeys(("periln", "perinorm", "sandwich", "sandwichln", "sandwichnorm"), "peri-ln"),
    **dict.fromkeys(("geodesic", "exp", "exponential", "exponentialmap", "expmap"), "geonorm"),
    **dict.fromkeys(("spheret", "spheretnorm", "projspheret", "proj", "projection", "sphere"), "proj-spheretnorm"),
    **dict.fromkeys(("cay", "cayley", "cayspheret", "cayleyspheretnorm"), "cay-spheretnorm"),
    **dict.fromkeys(("p", "pspheret"), "p-spheretnorm"),
    **dict.fromkeys(("normed", "normedspheret", "normedbranch", "branchnorm"), "normed-spheretnorm"),
    **dict.fromkeys(("resnet", "skip", "skipconnection", "identity", "none", "nonorm"), "residual"),
    **dict.fromkeys(("erf", "prederf", "dynamicerf"), "derf"),
    **dict.fromkeys(("isru", "predyisru"), "dyisru"),
    **dict.fromkeys(("layernormscaling", "lnscaling", "curseofdepth"), "lns"),
    **dict.fromkeys(("mixln", "mixnorm"), "mix-ln"),
    **dict.fromkeys(("deepnet", "deepln"), "deepnorm"),
    **dict.fromkeys(("skipinit", "zeroinit"), "rezero"),
    **dict.fromkeys(("cait", "lscale"), "layerscale"),
    **dict.fromkeys(("normalizedgpt", "normalisedgpt", "normalizedtransformer", "hypersphere"), "ngpt"),
    **dict.fromkeys(("orthogonalresidual", "orthogonalupdate", "ortho"), "orthogonal"),
    **dict.fromkeys(("prescalenorm", "l2norm"), "scalenorm"),
    **dict.fromkeys(("musespark", "variancegate", "variancepreserving"), "vp-gate"),
    **dict.fromkeys(("depthscaledresidual", "beamnorm"), "beam"),
    **dict.fromkeys(("respost", "respostnorm", "olmo2", "olmo3", "exaone4", "swinv2", "outputnorm"), "res-post"),
    **dict.fromkeys(("hybrid", "qkvnorm", "hybridln"), "hybridnorm"),
    **dict.fromkeys(("granite", "residualscale", "branchmultiplier"), "residual-multiplier"),
    **dict.fromkeys(("geonormports", "geonormport", "affinegeonorm"), "geonorm-affine"),
    **dict.fromkeys(("nanochat", "embeddingresidual", "embeddingskip"), "x0"),
    **dict.fromkeys(("dwa", "depthweightedaverage", "dense", "densenet"), "denseformer"),
    **dict.fromkeys(("attentionresidual", "attentionresiduals", "blockattnres", "kimi"), "attn-res"),
    **dict.fromkeys(("hyperconnection", "hyperconnections", "hc", "dhc", "shc"), "hyper"),
    **dict.fromkeys(("manifoldhyper", "manifoldhyperconnections", "deepseek", "deepseekv4", "sinkhorn"), "mhc"),
    **dict.fromkeys(("identityhyper", "hyv4"), "mhc"),
    **dict.fromkeys(("sphericalhyperconnections", "spherehyper", "hypersphericalstreams"), "spherical-hyper"),
}


def list_schemes() -> list[str]:
    """The names of all schemes; the paper's eight and Post-LN come first."""
    return list(SCHEMES)


def scheme(name: str, /, **options: Any) -> Scheme:
    """The scheme of that name with these options: `scheme("p-spheretnorm", p=0.3, schedule="constant")`.

    An option must have the type that the scheme's class declares for it.

    Args:
        name: a row of SCHEMES.
        options: the options of that scheme; `spheret schemes` lists them.
    """
    if name not in SCHEMES:
        raise unknown("scheme", name, SCHEMES, OTHER_NAMES)
    row = SCHEMES[name]
    scheme_class = row.func if isinstance(row, partial) else row
    kinds = _option_types(scheme_class)
    for option, value in options.items():
        if option == "channel_dim":
            raise ValueError(
                "channel_dim is not a scheme's option: give it to residual_stack, Residual, SpheretNorm or ScaleNorm."
            )
        if option not in kinds:
            raise unknown(f"option of {name}", option, kinds)
        if not any(accepts(value) for accepts in kinds[option].values()):
            # a name of a retraction is often given as p
            words = [other for other in kinds if isinstance(value, str) and "a word" in kinds[other]]
            hint = f": a word goes into {_either(words)}" if words and option == "p" else ""
            raise ValueError(f"{option} of {name} must be {_either(list(kinds[option]))}, got {value!r}{hint}.")
    return row(name=name, **options)


# what an option's type is called, and whether a value has it. Without this "no" would count as true, and true as 1
_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool) and value == value),
    str: ("a word", lambda value: isinstance(value, str)),
    NoneType: ("none", lambda value: value is None),
    Retraction: ("a Retraction", lambda value: isinstance(value, Retraction)),
}


@cache
def _option_types(scheme_class: type[Scheme]) -> dict[str, dict[str, Callable[[Any], bool]]]:
    """The options of a scheme, with the types that its dataclass declares for each."""
    hints = get_type_hints(scheme_class)
    names = [field.name for field in fields(scheme_class) if field.name != "name"]
    return {name: dict(map(_type, _members(hints[name]))) for name in names}


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _type(hint: Any) -> tuple[str, Callable[[Any], bool]]:
    if get_origin(hint) is Literal:
        return _either(list(get_args(hint))), lambda value: isinstance(value, str) and value in get_args(hint)
    return _TYPES[hint]


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
