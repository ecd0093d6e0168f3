"""Conversion between transformers' GPT-2 and a `pre-ln` GPT: the same weights under other names, bit for bit.

GPT-2 has no shift before the head. An untied head with shifted columns computes the same.
"""

from __future__ import annotations

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
# a block's modules: transformers' names and ours. transformers stores a weight as (in, out), nn.Linear as (out, in)
LINEARS = {
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.output",
    "mlp.c_fc": "mlp.hidden",
    "mlp.c_proj": "mlp.output",
}
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
        head="tied",
        head_bias="none",
    )


def _copy(tensor: Tensor, transposed: bool) -> Tensor:
    return (tensor.T if transposed else tensor).detach().clone(memory_format=torch.contiguous_format)


def from_gpt2(model: GPT2LMHeadModel) -> GPT:
    """A `pre-ln` GPT with the weights of transformers' GPT-2, of the same dtype and on the same device."""
    state, head = model.transformer.state_dict(), model.lm_head.weight
    weight, config = state["wte.weight"], config_of(model.config)
    own_head = not torch.equal(head, weight)
    gpt = GPT(replace(config, head="untied") if own_head else config).to(weight.device, weight.dtype)
    ours = {name: _copy(state[theirs], turned) for theirs, (name, turned) in names(config.layers).items()}
    gpt.load_state_dict(ours | ({"head.weight": _copy(head, False)} if own_head else {}))
    return gpt.eval()


def why_not_gpt2(config: GPTConfig) -> str | None:
    """Returns the reason why a model is not a stock GPT-2, or None if it is one."""
    if config.head_bias != "none":
        return f"its logits have a bias (head_bias={config.head_bias!r})"
    if config.scheme != "pre-ln":
        return f"its scheme is {config.scheme}"
    if changed := config.backbone_changes():
        return f"it has {', '.join(f'{name}={value!r}' for name, value in changed.items())}"
    if changed := {
        k: v for k, v in config.scheme_options.items() if (k, v) not in (("norm", "layernorm"), ("bias", True))
    }:
        return f"its scheme has {changed}"
    return None if config.bias else "it has no biases"


def to_gpt2(model: GPT, **more: Any) -> GPT2LMHeadModel:
    """transformers' own GPT-2 with the weights of a `pre-ln` GPT. `more` goes into its GPT2Config.

    A shifted head becomes an untied one with shifted columns.
    """
    config = model.config
    if reason := why_not_gpt2(config):
        raise ValueError(
            f"a stock GPT-2 is pre-ln with biases and LayerNorm. This model is not one: {reason}. Export it as "
            "spheret."
        )
    tied = config.head == "tied"
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
    else:
        with torch.no_grad():
            gpt2.lm_head.weight.copy_(model.plain_head())
    return gpt2.eval()
