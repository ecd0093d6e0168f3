"""The rules of parametrization: what changes with width and depth so that the best learning rate does not.

A model of the base size is not changed at all. For any other size a rule changes how weights start, and the learning
rate, weight decay and epsilon of each parameter. No rule changes the forward pass: where a source multiplies
activations by a fixed factor c, the factor goes into the weights W that make them. With AdamW and Muon, c W x with
learning rate lr, decay and epsilon is the same training as W x for weights that start c times as large, with c lr,
decay/c and epsilon/c. So a trained model is an ordinary one, for every other command.

docs/model.md has the table of the rules and their sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spheret.connections import HeadNorm
from spheret.model.config import ROPE_BASE
from spheret.model.gpt import GPT, initial_std
from spheret.optim.base_sizes import check_scheme, readout_gains
from spheret.optim.groups import Factors, hidden_matrices
from spheret.support.precision import wide


@dataclass
class Rule:
    """What happens to one parameter.

    start: a factor on its starting values. lr, epsilon: factors on the learning rate and on AdamW's epsilon.
    carried: the factor c of the activations that the parameter carries.
    """

    start: float = 1.0
    lr: float = 1.0
    epsilon: float = 1.0
    carried: float = 1.0

    def factors(self) -> Factors:
        # decay times learning rate is the same at every size
        lr = self.lr * self.carried
        return Factors(lr, 1 / lr, self.epsilon / self.carried)


class Rules:
    """The rules of every parameter of a model, by the identity of the parameter."""

    def __init__(self, model: GPT, settings: Any) -> None:
        check_scheme(settings.parametrization, model.config)
        self.model, self.settings = model, settings
        self.named = dict(model.named_parameters())
        self.of: dict[Tensor, Rule] = {parameter: Rule() for parameter in self.named.values()}
        self.base_width, self.base_heads = _base(settings)
        self._width(model.config.width / self.base_width)
        self._heads(self.base_width // self.base_heads)
        if settings.base_layers is not None:
            self._depth(settings.base_layers)

    def _width(self, ratio: float) -> None:
        model, shape = self.model, self.model.config
        hidden, unit = hidden_matrices(model), model.scheme.unit_weights
        drawn = initial_std(self.base_width) / initial_std(shape.width)
        base = _vectors_of(model, self.settings)
        for name, parameter in self.named.items():
            rule = self.of[parameter]
            rule.epsilon = 1 / ratio
            if parameter in hidden:
                rule.start = drawn / math.sqrt(ratio)
                rule.lr = 1 / math.sqrt(ratio) if self.settings.optimizer == "muon" else 1 / ratio
            elif parameter.dim() >= 2:
                # a unit vector's entries are as large as 1/sqrt(width), and move in proportion
                rule.start = drawn / math.sqrt(ratio) if unit else drawn
                rule.lr = 1 / math.sqrt(ratio) if unit else 1.0
            else:
                # a scalar or a gain moves in proportion to its start, which some schemes set by the width
                here, there = _size(parameter), base.get(name, 0.0)
                rule.lr = here / there if here and there else 1.0
        if not unit:
            last = list(model.each_block())[-1].mlp_connection
            for parameter in readout_gains(model.final_norm, last):
                self.of[parameter].carried /= ratio

    def _heads(self, base_dim: int) -> None:
        """Attention scores divided by the width of a head instead of its square root.

        Queries, keys and values carry the factor's root each, because they share one weight. The output projection
        takes it from the values again. Norms of queries and keys have gains, which carry it in place of the weight.
        """
        root = (base_dim / self.model.config.shape.head_dim) ** 0.25
        for block in self.model.each_block():
            inside = block.attention.qkv_norm
            if isinstance(inside, HeadNorm):
                for parameter in (*inside.q_norm.parameters(), *inside.k_norm.parameters()):
                    self.of[parameter].carried *= root
            # nGPT's queries and keys carry nothing
            elif inside is None and not self.model.scheme.unit_weights:
                for parameter in block.attention.qkv.parameters():
                    self.of[parameter].carried *= root
                self.of[block.attention.output.weight].carried /= root

    def _depth(self, base_layers: int) -> None:
        """Every branch times the base depth's sum of steps over the sum of this depth: base_layers / layers."""
        scheme, layers = self.model.scheme, self.model.config.layers
        sums = scheme.step_sum(2 * base_layers), scheme.step_sum(2 * layers)
        # `check_scheme` has refused schemes without them
        assert sums[0] is not None
        assert sums[1] is not None
        factor = sums[0] / sums[1]
        start = scheme.initialisation(2 * base_layers).output / scheme.initialisation(2 * layers).output
        for block in self.model.each_block():
            for branch, connection in (
                (block.attention, block.attention_connection),
                (block.mlp, block.mlp_connection),
            ):
                self.of[branch.output.weight].start *= start
                for parameter in connection.branch_gains() or list(branch.output.parameters()):
                    self.of[parameter].carried *= factor
                # gradients inside a branch shrink with its factor
                for parameter in (*branch.parameters(), *connection.parameters()):
                    self.of[parameter].epsilon *= factor


def _base(settings: Any) -> tuple[int, int]:
    """The width and the heads of the base model, which every parametrization but the standard one has."""
    if settings.base_width is None or settings.base_heads is None:
        raise ValueError(f"parametrization {settings.parametrization} needs base_width and base_heads.")
    return settings.base_width, settings.base_heads


def _size(vector: Tensor) -> float:
    return float(wide(vector.detach()).square().mean().sqrt())


def _vectors_of(model: GPT, settings: Any) -> dict[str, float]:
    """How large the scalars, gains and biases of the same model start at the base width, by name."""
    width, heads = _base(settings)
    # these options change no start, and rotary positions and grouped heads may not fit the base's heads
    free: dict[str, Any] = {
        "vocab": 2,
        "block": 1,
        "head_bias": "none",
        "positions": "learned",
        "rope_base": ROPE_BASE,
    }
    try:
        shape = replace(model.config, width=width, heads=heads, kv_heads=None, **free)
    except ValueError as error:
        raise ValueError(f"the base model, of base_width {width} and base_heads {heads}: {error}") from None
    with torch.random.fork_rng(devices=[]):
        base = GPT(shape)
    return {name: _size(parameter) for name, parameter in base.named_parameters() if parameter.dim() < 2}


@torch.no_grad()
def parametrize(model: GPT, settings: Any) -> dict[str, Factors]:
    """Let a new model start as the parametrization of the settings says. Returns the optimiser's factors by name.

    settings: a TrainConfig, of which the settings of the optimiser and of its parametrization are read.

    The rules come first; then `matrix_lr` and `embedding_lr`, which belong to the base model.
    """
    factors: dict[str, Factors] = {}
    if settings.parametrization != "standard":
        rules = Rules(model, settings)
        scaled = {parameter: rule.start * rule.carried for parameter, rule in rules.of.items()}
        for parameter, factor in scaled.items():
            parameter.mul_(factor)
        # a base model keeps every bit
        if any(factor != 1 for factor in scaled.values()):
            model.constrain()
        factors = {name: rules.of[parameter].factors() for name, parameter in rules.named.items()}
    hidden = hidden_matrices(model)
    for name, parameter in model.named_parameters():
        own = settings.matrix_lr if parameter in hidden else settings.embedding_lr if parameter.dim() >= 2 else None
        if own is not None:
            before = factors.get(name, Factors())
            factors[name] = replace(before, lr=before.lr * own / settings.lr)
    return factors
