"""How much a few updates change a model, sublayer by sublayer, for models of several widths and depths.

Under a parametrization whose learning rate carries over, these numbers do not depend on the size. Under any other one
they grow or shrink as a power of it. (The coordinate check of arXiv 2203.03466, with the depth of arXiv 2505.01618.)
"""

import functools

import numpy as np
import torch

from spheret.model.config import default_heads
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.probes import probe
from spheret.optim.base_sizes import PARAMETRIZATIONS
from spheret.optim.build import build_optimizer, set_learning_rate
from spheret.optim.parametrization import parametrize
from spheret.runs.config import TrainConfig

# where along the depth a model is looked at, as shares of its sublayers
PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
LOGITS = "logits"
WIDTH, LAYERS = 16, 2
STEPS, BATCH, BLOCK, VOCAB = 3, 2, 16, 64


def text(seed):
    """Tokens in which each follows from the one before it, up to one of four."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(VOCAB, (BATCH,), generator=generator)]
    for _ in range(BLOCK):
        rows.append((5 * rows[-1] + torch.randint(4, (BATCH,), generator=generator)) % VOCAB)
    return torch.stack(rows, 1)


def size_of(x):
    return float(x.double().square().mean().sqrt())


@torch.no_grad()
def look(model, tokens):
    """The state that enters the stack, and by place the state there, and the logits."""
    seen = []
    with probe(model, seen.append):
        logits = model(tokens)
    stream = [seen[0].h, *(sublayer.out for sublayer in seen)]
    states = {f"{place:.0%}": stream[round(place * len(seen))] for place in PLACES}
    return stream[0], {**states, LOGITS: logits}


@functools.cache
def measure(scheme, parametrization, optimizer, head, width, layers):
    """Train a new model for a few updates on one batch, and compare it with itself before them.

    Returns the size of the state at each place, over that of the state that enters, and how far the updates moved
    each place, over its size before; logits as they are.
    """
    torch.manual_seed(0)
    shape = {"layers": layers, "heads": default_heads(width), "width": width, "block": BLOCK, "vocab": VOCAB}
    model = GPT(GPTConfig(**shape, scheme=scheme, head=head, head_bias="none"))
    base = {"base_width": WIDTH, "base_layers": LAYERS, "base_heads": default_heads(WIDTH)}
    needed = {name: base[name] for name in PARAMETRIZATIONS.get(parametrization, ())}
    settings = TrainConfig(1, 1, 1, 1e-3, 0.0, 0, 1, optimizer=optimizer, parametrization=parametrization, **needed)
    factors = parametrize(model, settings)
    chosen = build_optimizer(
        model, optimizer, settings.lr, settings.weight_decay, settings.betas, torch.device("cpu"), factors
    )
    set_learning_rate(chosen, settings.lr)
    batch = text(0)
    _, before = look(model, batch[:, :-1])
    for _ in range(STEPS):
        model(batch[:, :-1], batch[:, 1:]).backward()
        chosen.step()
        chosen.zero_grad(set_to_none=True)
    entered, after = look(model, batch[:, :-1])
    moved = {name: size_of(after[name] - before[name]) for name in after}
    states = {name: size_of(state) / size_of(entered) for name, state in after.items() if name != LOGITS}
    return states, {name: moved[name] / (1.0 if name == LOGITS else size_of(before[name])) for name in moved}


@functools.cache
def powers(scheme, parametrization, optimizer="adamw", head="tied"):
    """By size, "width" or "layers": the powers of the size with which every state and every update changes."""
    found = {}
    for size, (width, layers) in {"width": (4 * WIDTH, LAYERS), "layers": (WIDTH, 4 * LAYERS)}.items():
        measured = [
            measure(scheme, parametrization, optimizer, head, *shape) for shape in ((WIDTH, LAYERS), (width, layers))
        ]
        found[size] = tuple(
            {name: float(np.log(large[name] / small[name]) / np.log(4)) for name in small}
            for small, large in zip(*measured, strict=True)
        )
    return found
