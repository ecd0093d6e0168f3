"""Conversion between transformers' GPT-2 and a `pre-ln` GPT: the same weights under other names, bit for bit.

GPT-2 has no bias of the logits. `folded_head` puts one into an untied head and the final norm. It has no shift before
the head either. An untied head with shifted columns computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from spheret.model.gpt import GPT, GPTConfig
from spheret.support.errors import unknown

# activations: transformers' names and ours
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# options of GPT-2 that change the arithmetic, with the only value that is supported
REQUIRED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "layer_norm_epsilon": 1e-5,
}
# the head, beside the names below "transformer."
HEAD = "lm_head.weight"
# a block's modules: transformers' names and ours. transformers stores a weight as (in, out), nn.Linear as (out, in)
LINEARS = {
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.output",
    "mlp.c_fc": "mlp.hidden",
    "mlp.c_proj": "mlp.output",
}
# a fold of the head bias that changes a logit by more than so many rounding errors of the largest one is refused
MOST_ROUNDINGS = 64
# means of c / g that a fold may choose, see `folded_head`
MEANS = (-4.0, -1.0, -0.25, 0.25, 1.0, 4.0)
NORMS = {"ln_1": "attention_connection.inner_norm", "ln_2": "mlp_connection.inner_norm"}


def names(layers: int) -> dict[str, tuple[str, bool]]:
    """transformers' name of every tensor: our name, and whether it is transposed."""
    ours = {"wte.weight": ("tokens.weight", False), "wpe.weight": ("positions.weight", False)}
    ours |= {f"ln_f.{part}": (f"final_norm.{part}", False) for part in ("weight", "bias")}
    for layer in range(layers):
        for gpt2_name, name in (LINEARS | NORMS).items():
            for part in ("weight", "bias"):
                transposed = gpt2_name in LINEARS and part == "weight"
                ours[f"h.{layer}.{gpt2_name}.{part}"] = (f"blocks.{layer}.{name}.{part}", transposed)
    return ours


def config_of(config: GPT2Config) -> GPTConfig:
    for name, value in REQUIRED.items():
        if getattr(config, name) != value:
            raise ValueError(f"this GPT-2 has {name} = {getattr(config, name)}, and only {value} is supported.")
    if config.n_inner not in (None, 4 * config.n_embd):
        raise ValueError(
            f"this GPT-2 has n_inner = {config.n_inner}, and only 4 n_embd = {4 * config.n_embd} is supported."
        )
    if config.activation_function not in ACTIVATIONS:
        raise unknown("activation_function of GPT-2", config.activation_function, ACTIVATIONS)
    dropouts = {config.resid_pdrop, config.embd_pdrop, config.attn_pdrop}
    if len(dropouts) > 1:
        raise ValueError(f"resid_pdrop, embd_pdrop and attn_pdrop must be equal, got {sorted(dropouts)}.")
    return GPTConfig(
        layers=config.n_layer,
        heads=config.n_head,
        width=config.n_embd,
        block=config.n_positions,
        vocab=config.vocab_size,
        dropout=float(dropouts.pop()),
        scheme="pre-ln",
        activation=ACTIVATIONS[config.activation_function],
        head="tied" if config.tie_word_embeddings else "untied",
    )


def _copy(tensor: Tensor, transposed: bool) -> Tensor:
    return (tensor.T if transposed else tensor).detach().clone(memory_format=torch.contiguous_format)


def from_gpt2(model: GPT2LMHeadModel) -> GPT:
    """A `pre-ln` GPT with the weights of transformers' GPT-2, of the same dtype and on the same device."""
    return load(config_of(model.config), {**model.transformer.state_dict(), HEAD: model.lm_head.weight})


def load(config: GPTConfig, state: Mapping[str, Tensor]) -> GPT:
    """A `pre-ln` GPT with tensors under transformers' names. A head that is the token embedding becomes tied."""
    weight = state["wte.weight"]
    own_head = HEAD in state and not torch.equal(state[HEAD], weight)
    if own_head and config.head == "tied":
        raise ValueError(
            "this GPT-2 has a head that is not its token embedding, and its config says that they are tied: set "
            "tie_word_embeddings to false in its config.json."
        )
    ours = names(config.layers) | ({HEAD: ("head.weight", False)} if own_head else {})
    gpt = GPT(replace(config, head="untied" if own_head else "tied")).to(weight.device, weight.dtype)
    gpt.load_state_dict({name: _copy(state[gpt2_name], turned) for gpt2_name, (name, turned) in ours.items()})
    return gpt.eval()


def why_not_gpt2(config: GPTConfig) -> str | None:
    """Returns the reason why a model is not a stock GPT-2, or None if it is one."""
    if config.scheme != "pre-ln":
        return f"its scheme is {config.scheme}"
    if changed := config.backbone_changes():
        return f"it has {', '.join(f'{name}={value!r}' for name, value in changed.items())}"
    if changed := {
        k: v for k, v in config.scheme_options.items() if (k, v) not in (("norm", "layernorm"), ("bias", True))
    }:
        return f"its scheme has {changed}"
    return None if config.bias else "it has no biases"


def has_bias(model: GPT) -> bool:
    """Whether the logits have a bias that is not 0 everywhere."""
    return model.head_bias is not None and bool(model.head_bias.any())


def folded_head(model: GPT) -> tuple[Tensor, Tensor]:
    """The head and the bias of the final norm that make a GPT-2 of this model, whose logits have a bias b.

    The final norm returns y = g * n + c, where the entries of n sum to 0. So v = 1/g gives v . y = sum(c / g) = k,
    the same number for every token. A head W + u v^T adds k u to the logits. Moving c by s g moves k by s times the
    width, and the logits by s W g. So u = (b - s W g) / k gives the bias exactly, for any s with k != 0; s is chosen
    for small rounding errors. All is computed in float64, and the results have the model's dtype.
    """
    assert model.head_bias is not None, "a model without a head bias needs no other head"
    weight, bias = model.plain_head().detach(), model.head_bias.detach().double()
    dtype, weight = weight.dtype, weight.double()
    gain, shift = (model.get_parameter(f"final_norm.{part}").detach().double() for part in ("weight", "bias"))
    refusal = ValueError(
        f"GPT-2 has no bias of the logits, and this model's bias cannot be folded into its weights: a gain of its "
        f"final norm is {float(gain.abs().min()):.1e}, too near 0. Export it as spheret."
    )
    if not gain.all():
        raise refusal
    inverse, product = gain.reciprocal(), weight @ gain
    mean = float((shift * inverse).mean())

    def rounding(step: float) -> float:
        """The rounding errors of the folded bias, in units of the dtype's."""
        total = (1 + (shift * inverse + step).abs()).mean() / abs(mean + step)
        return float(total * (bias - step * product).abs().max() + abs(step) * product.abs().max())

    step = min([*(k - mean for k in MEANS), *([0.0] if mean else [])], key=rounding)
    update = (bias - step * product) / (len(gain) * (mean + step))
    head, moved = torch.addr(weight, update, inverse).to(dtype), (shift + step * gain).to(dtype)
    # the error at streams like those of the model, compared with the largest logit
    generator = torch.Generator(weight.device).manual_seed(0)
    normed = torch.randn(16, len(gain), generator=generator, device=weight.device, dtype=torch.float64)
    normed = (normed - normed.mean(1, keepdim=True)) / normed.std(1, keepdim=True, correction=0)
    logits = (gain * normed + shift) @ weight.T + bias
    folded = (gain.to(dtype) * normed.to(dtype) + moved) @ head.T
    error = (folded - logits).abs().max() / logits.abs().max().clamp(min=1)
    if not error <= MOST_ROUNDINGS * torch.finfo(dtype).eps:
        raise refusal
    return head, moved


def to_gpt2(model: GPT, **more: Any) -> GPT2LMHeadModel:
    """transformers' own GPT-2 with the weights of a `pre-ln` GPT. `more` goes into its GPT2Config.

    A head bias is folded into the weights (`folded_head`), and so is the shift of a shifted head. The GPT-2 then has
    `tie_word_embeddings=False`, as it has for an untied head.
    """
    config = model.config
    if reason := why_not_gpt2(config):
        raise ValueError(f"a stock GPT-2 is pre-ln with biases and LayerNorm. This model is not one: {reason}.")
    folded = has_bias(model)
    tied = config.head == "tied" and not folded
    activation = next(gpt2_name for gpt2_name, name in ACTIVATIONS.items() if name == config.activation)
    dropout = config.dropout
    options: dict[str, Any] = {
        "vocab_size": config.vocab, "n_positions": config.block, "n_embd": config.width, "n_layer": config.layers,
        "n_head": config.heads, "activation_function": activation,
        "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout,
        "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": tied, **more,
    }  # fmt: skip
    gpt2: Any = GPT2LMHeadModel(GPT2Config(**options))
    gpt2 = gpt2.to(model.tokens.weight.device, model.tokens.weight.dtype)
    state = model.state_dict()
    gpt2.transformer.load_state_dict(
        {gpt2_name: _copy(state[name], turned) for gpt2_name, (name, turned) in names(config.layers).items()}
    )
    if tied:
        gpt2.tie_weights()
        return gpt2.eval()
    with torch.no_grad():
        head, norm_bias = folded_head(model) if folded else (model.plain_head(), gpt2.transformer.ln_f.bias)
        gpt2.lm_head.weight.copy_(head)
        gpt2.transformer.ln_f.bias.copy_(norm_bias)
    return gpt2.eval()
