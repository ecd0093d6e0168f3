import math

import numpy as np
import torch
from torch import nn

import spheret
from spheret import (
    GPT,
    SCHEMES,
    GPTConfig,
    Retraction,
    ScaleNorm,
    Shift,
    SpheretNorm,
    angular,
    convert,
    retract,
    scheme,
)
from spheret.connections import norms
from spheret.connections.norms import Norm
from spheret.optim import build_optimizer
from spheret.retractions import as_retraction
from spheret.schedules import factor

ROWS = []

D = 8
X, WIDE, IMAGES = torch.ones(3, D), torch.ones(5, 4, D), torch.ones(2, 6, 4, 5)
TINY = {"layers": 2, "heads": 2, "width": 16, "block": 24, "vocab": 50}
IDS = torch.ones(2, 3, dtype=torch.long)
ROPE = {"positions": "rope"}


def config(**changes):
    return lambda: GPTConfig(**{**TINY, **changes})


def built(name, **options):
    return lambda: scheme(name, **options)


def connect(name, dim=D, sublayer=1):
    return lambda: scheme(name).connect(dim, sublayer, 4)


def p_spheret(**options):
    return built("p-spheretnorm", **options)


def norm(*arguments, **options):
    return lambda: SpheretNorm(D, *arguments, **options)


def gpt(**changes):
    return GPT(GPTConfig(**{**TINY, "head_bias": "none", **changes}))


def generate(tokens=IDS, **options):
    return lambda: gpt().generate(tokens, **{"new": 2, **options})


def angle(theta):
    return lambda: Retraction.from_angle(theta)


CALLS = [
    # retract
    (lambda: retract(torch.ones(3, 1), torch.ones(3, 1)), ValueError, "wide"),
    (lambda: retract(torch.ones(()), torch.ones(())), ValueError, "wide"),
    (lambda: retract(X, torch.ones(3, 5)), ValueError, "shape"),
    (lambda: retract(X, X[0]), ValueError, "shape"),
    (lambda: retract(X.long(), X), TypeError, "h"),
    (lambda: retract(X, X.int()), TypeError, "f"),
    (lambda: retract([1.0, 2.0], torch.ones(2)), TypeError, "tensor"),
    (lambda: retract(X, X, 1.0, "cayly"), ValueError, "'cayley'"),
    (lambda: retract(X, X, 1.0, -1.0), ValueError, "p"),
    *((lambda cap=cap: retract(X, X, 1.0, 1.0, cap), ValueError, "max_angle") for cap in (0.0, 4.0, math.nan)),
    *(
        (lambda shape=shape: retract(WIDE, WIDE, torch.ones(shape)), ValueError, "alpha")
        for shape in ((4,), (5, 4), (5, 4, D), (3, 4, 1), (1, 5, 4, 1))
    ),
    *((lambda alpha=alpha: retract(X, X, alpha), ValueError, "alpha") for alpha in (math.nan, math.inf, 10**400)),
    (lambda: retract(X, X, torch.ones(1).long()), TypeError, "alpha"),
    *(
        (lambda shape=shape: retract(WIDE, WIDE, 1.0, torch.ones(shape)), ValueError, "p")
        for shape in ((8,), (5, 1), (3, 5, 4, 1))
    ),
    *(
        (lambda gain=gain: retract(X, X, gain=gain), ValueError, "gain")
        for gain in (torch.ones(7), torch.ones(1, D), torch.ones(D).long(), 0.3)
    ),
    (lambda: spheret.kernels.use("close"), ValueError, "'closed'"),
    # retractions
    *((lambda p=p: angular(p), ValueError, "greater") for p in (0, -1.0, math.nan, -math.inf)),
    *((lambda p=p: angular(p), ValueError, "1e+06") for p in (1e-308, 5e-7, 2e6, 1e308, 10**400)),
    (lambda: angular(torch.tensor([1])), TypeError, "floating-point"),
    (lambda: as_retraction("projektion"), ValueError, "'projection'"),
    (lambda: as_retraction(None), TypeError, "name"),
    (angle(torch.cos), ValueError, "odd"),
    (angle(lambda b: 1), TypeError, "tensor"),
    (angle(lambda b: 2 * torch.tanh(b)), ValueError, "slope"),
    (angle(lambda b: b + b * b), ValueError, "odd"),
    (angle(torch.sqrt), ValueError, "smooth"),
    (angle(lambda b: b * (1 + 1e-5)), ValueError, "slope"),
    (angle(lambda b: -b), ValueError, "slope"),
    (angle(lambda b: b + 1e-8), ValueError, "theta(0)"),
    (angle(lambda b: b + 1e-5 * b * b), ValueError, "odd"),
    (angle(torch.ones_like), ValueError, "theta(0)"),
    # schedules
    (lambda: factor("sqr", 1), ValueError, "'sqrt'"),
    (lambda: factor("sqrt", 0), ValueError, "counts"),
    (lambda: factor("sqrt", 1.0), ValueError, "counts"),
    (lambda: factor("sqrt", 5, 4), ValueError, "num_sublayers"),
    (lambda: factor("linear", 1), ValueError, "num_sublayers"),
    # modules
    *((lambda wrong=wrong: ScaleNorm(wrong), ValueError, "dim") for wrong in (1, 0, "8", 6.0)),
    (lambda: Norm(D)(torch.ones(D)), NotImplementedError, "apply_wide"),
    (lambda: ScaleNorm(D, radius="root"), ValueError, "radius"),
    (lambda: ScaleNorm(D, radius=True), ValueError, "radius"),
    (lambda: SpheretNorm(np.float64(6), 1), ValueError, "dim"),
    (norm(1, alpha=True), ValueError, "alpha"),
    (norm(1, alpha="1"), ValueError, "alpha"),
    (norm(1, retraction=torch.ones(1)), TypeError, "learnable_p"),
    *((norm(1, branch_norm=wrong), ValueError, "branch_norm") for wrong in (0.0, -1.0, math.inf, math.nan, "no")),
    (lambda: SpheretNorm(D, 1)(X, None), TypeError, "tensor"),
    (lambda: SpheretNorm(D, 1).angle(torch.ones(3, 9), torch.ones(3, 9)), ValueError, "width"),
    (lambda: SpheretNorm(6, 1)(IMAGES, IMAGES), ValueError, "channel_dim=1"),
    (lambda: scheme("pre-ln").connect(6, 1, 2).write(IMAGES, IMAGES), ValueError, "channel_dim=1"),
    *(
        (lambda module=module, x=x: module(x), ValueError, "dimension 1")
        for module in (lambda x: SpheretNorm(D, 1, channel_dim=1)(x, x), ScaleNorm(D, channel_dim=1))
        for x in (torch.ones(2, 3, D), torch.ones(D))
    ),
    (lambda: Shift(16)(torch.zeros(3, 8)), ValueError, "dimension"),
    (lambda: Shift(16).fold(torch.zeros(16, 8)), ValueError, "columns"),
    (lambda: Shift(1), ValueError, "dim"),
    (lambda: spheret.residual_stack([nn.Linear(16, 16), nn.Linear(8, 8)]), ValueError, "dim"),
    *(
        (lambda wrong=wrong: norms.LayerNorm(D)(torch.ones(wrong)), ValueError, "width")
        for wrong in ((3, 9), (D, 3), ())
    ),
    (lambda: norms.LayerNorm(D)(X.long()), TypeError, "torch.int64"),
    (lambda: torch.fx.symbolic_trace(SpheretNorm(D, 1)), TypeError, "torch.fx"),
    # schemes
    *((connect(name, sublayer=wrong), ValueError, "sublayer") for name in SCHEMES for wrong in (0, 5, True)),
    *((connect("pre-ln", sublayer=wrong), ValueError, "sublayer") for wrong in (-1, 1.0)),
    *((connect(name, dim=wrong), ValueError, "dim") for name in SCHEMES for wrong in (1, 2.0)),
    *((connect("pre-ln", dim=wrong), ValueError, "dim") for wrong in (0, -4)),
    (built("proj-sphretnorm"), ValueError, "'proj-spheretnorm'"),
    (built("pre-ln", channel_dim=1), ValueError, "channel_dim"),
    (p_spheret(p=0.3, retraction="cayley"), ValueError, "retraction"),
    (p_spheret(p="orthographic"), ValueError, "retraction"),
    (p_spheret(retraction="cayly"), ValueError, "'cayley'"),
    (p_spheret(retraction=-1.0), ValueError, "greater"),
    (p_spheret(retraction=True), ValueError, "retraction"),
    (p_spheret(retraction=Retraction.from_angle(torch.tanh), learnable_p=True), ValueError, "finite"),
    (p_spheret(p=math.inf, learnable_p=True), ValueError, "finite"),
    (p_spheret(default_p=3.0), ValueError, "default_p"),
    (p_spheret(p=0.0), ValueError, "greater"),
    (p_spheret(p=math.nan), ValueError, "p"),
    (p_spheret(schedule="square"), ValueError, "schedule"),
    (p_spheret(index="layer"), ValueError, "index"),
    *((p_spheret(max_angle=wrong), ValueError, "max_angle") for wrong in ("aut", -1.0)),
    (p_spheret(output_init="half"), ValueError, "output_init"),
    *((p_spheret(radius=wrong), ValueError, "radius") for wrong in ("sqr", True, 0.5, 0, math.inf)),
    (p_spheret(radius=2.0, entry_norm=False), ValueError, "entry_norm"),
    (p_spheret(learnable_alpha=0), ValueError, "learnable_alpha"),
    *((p_spheret(alpha=wrong), ValueError, "alpha") for wrong in (0.0, 1.5, "one", True)),
    (lambda: type(scheme("geonorm"))(output_init="fall"), ValueError, "'full'"),
    (lambda: scheme("proj-spheretnorm", radius=4.1).enter(16), ValueError, "radius"),
    *((built("residual-multiplier", multiplier=wrong), ValueError, "multiplier") for wrong in (0.0, -1.0, math.inf)),
    *((built("spherical-hyper", pace=wrong), ValueError, "pace") for wrong in (0.0, 1.5)),
    # models
    (config(width=15), ValueError, "heads"),
    (config(layers=0), ValueError, "layers"),
    (config(dropout=1.0), ValueError, "dropout"),
    (config(activation="relu"), ValueError, "activation"),
    (config(head_bias="unigrams"), ValueError, "'unigram'"),
    (config(scheme="preln"), ValueError, "'pre-ln'"),
    (config(scheme_options={"schedul": 1}), ValueError, "'schedule'"),
    (config(scheme="proj-spheretnorm", scheme_options={"radius": 100}), ValueError, "radius"),
    (config(positions="rotary"), ValueError, "positions"),
    (config(mlp="swishglu"), ValueError, "'swiglu'"),
    (config(norm="rms"), ValueError, "'rmsnorm'"),
    (config(kv_heads=3, heads=4), ValueError, "kv_heads"),
    (config(kv_heads=0), ValueError, "kv_heads"),
    (config(kv_heads=2.0), ValueError, "kv_heads"),
    (config(**ROPE, width=6), ValueError, "width"),
    (config(rope_base=500.0), ValueError, "rope_base"),
    (config(**ROPE, rope_base=0.0), ValueError, "rope_base"),
    (config(mlp="swiglu", activation="gelu_tanh"), ValueError, "activation"),
    (config(scheme="ngpt", qk_norm=True), ValueError, "qk_norm"),
    (config(scheme="hybridnorm", qk_norm=True), ValueError, "qk_norm"),
    (config(scheme="ngpt", kv_heads=1), ValueError, "kv_heads"),
    (config(head="shift"), ValueError, "head"),
    (config(head="shifted", width=1, heads=1), ValueError, "untied"),
    (lambda: GPTConfig.from_dict({"widht": 3}), ValueError, "'width'"),
    (lambda: GPTConfig.preset("XL"), ValueError, "size"),
    *(
        (lambda x=x: gpt()(x), ValueError, noun)
        for x, noun in (
            (torch.ones(1, 25).long(), "block"),
            (IDS[:, :0], "block"),
            (50 * IDS, "vocabulary"),
            (-IDS, "vocabulary"),
            (IDS[0], "integers"),
            (IDS.float(), "integers"),
        )
    ),
    (lambda: gpt().stream(torch.ones(2, 12, 3)), ValueError, "embeddings"),
    (lambda: gpt().stream(IDS, positions=torch.full((2, 3), 24)), ValueError, "positions"),
    (lambda: GPT(GPTConfig(**TINY, head_bias="none"), torch.ones(3)), ValueError, "counts"),
    (lambda: gpt()(IDS, IDS.T), ValueError, "shape"),
    (lambda: gpt().token_losses(IDS, IDS[:1]), ValueError, "shape"),
    (lambda: GPT(GPTConfig(**TINY, head_bias="unigram"), torch.ones(51)), ValueError, "50"),
    (generate(IDS[:, :0]), ValueError, "token"),
    (generate(50 * IDS), ValueError, "vocabulary"),
    *((generate(temperature=wrong), ValueError, "temperature") for wrong in (-1.0, math.nan, math.inf, 1e-308)),
    (generate(top_k=0), ValueError, "top_k"),
    (generate(top_p=0.0), ValueError, "top_p"),
    (generate(new=-1), ValueError, "new"),
    (generate(vocab=0), ValueError, "vocab"),
    # optimisers
    (lambda: spheret.parameter_groups(nn.Linear(2, 2).parameters(), 0.1), TypeError, ".parameters()"),
    (lambda: spheret.parameter_groups(nn.Linear(2, 2), -1), ValueError, "weight_decay"),
    (lambda: build_optimizer(gpt(), "adam", 0.1, 0.1, (0.9, 0.9), torch.device("cpu")), ValueError, "optimizer"),
    (lambda: convert(nn.Linear(2, 2), scheme="x0"), ValueError, "stream"),
]
