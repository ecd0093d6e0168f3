"""GPT-2 as transformers has it is Pre-LN here: the same numbers under other names, in and out to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from spheret.model.gpt import GPT, GPTConfig
from spheret.support.errors import unknown

# transformers' names of what is computed here under ours
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# options of GPT-2 that change what is computed, and the one value that is computed here
REQUIRED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
}
# a block's tensors, theirs and ours; Conv1D keeps a weight (in, out), a Linear (out, in)
LINEARS = {
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.output",
    "mlp.c_fc": "mlp.hidden",
    "mlp.c_proj": "mlp.output",
}
NORMS = {"ln_1": "attention_connection.inner_norm", "ln_2": "mlp_connection.inner_norm"}


def _names(layers: int) -> dict[str, tuple[str, bool]]:
    """Their name of every tensor: ours, and whether it is transposed."""
    names = {"wte.weight": ("tokens.weight", False), "wpe.weight": ("positions.weight", False)}
    names |= {f"ln_f.{part}": (f"final_norm.{part}", False) for part in ("weight", "bias")}
    for layer in range(layers):
        for theirs, ours in (LINEARS | NORMS).items():
            for part in ("weight", "bias"):
                transposed = theirs in LINEARS and part == "weight"
                names[f"h.{layer}.{theirs}.{part}"] = (f"blocks.{layer}.{ours}.{part}", transposed)
    return names


def _config_from(config: GPT2Config) -> GPTConfig:
    for name, value in REQUIRED.items():
        if getattr(config, name) != value:
            raise ValueError(f"this GPT-2 has {name} = {getattr(config, name)}, and only {value} is computed here.")
    if config.n_inner not in (None, 4 * config.n_embd):
        raise ValueError(
            f"this GPT-2 has n_inner = {config.n_inner}, and only 4 n_embd = {4 * config.n_embd} is built."
        )
    if config.activation_function not in ACTIVATIONS:
        raise unknown("activation_function of GPT-2", config.activation_function, ACTIVATIONS)
    dropouts = {config.resid_pdrop, config.embd_pdrop, config.attn_pdrop}
    if len(dropouts) > 1:
        raise ValueError(f"resid_pdrop, embd_pdrop and attn_pdrop must be one number here, got {sorted(dropouts)}.")
    return GPTConfig(
        layers=config.n_layer,
        heads=config.n_head,
        width=config.n_embd,
        block=config.n_positions,
        vocab=config.vocab_size,
        dropout=float(dropouts.pop()),
        scheme="pre-ln",
        activation=ACTIVATIONS[config.activation_function],
    )


def _same(theirs: Tensor, transposed: bool) -> Tensor:
    return (theirs.T if transposed else theirs).detach().clone(memory_format=torch.contiguous_format)


def from_gpt2(model: GPT2LMHeadModel) -> GPT:
    """A `pre-ln` GPT with the weights of transformers' GPT-2."""
    config = _config_from(model.config)
    if not torch.equal(model.lm_head.weight, model.transformer.wte.weight):
        raise ValueError(
            "this GPT-2 has a head that is not its token embedding, and only a tied one is computed here."
        )
    state = model.transformer.state_dict()
    made = GPT(config).to(model.transformer.wte.weight.dtype)
    made.load_state_dict(
        {ours: _same(state[theirs], turned) for theirs, (ours, turned) in _names(config.layers).items()}
    )
    return made.eval()


def why_not_gpt2(config: GPTConfig) -> str | None:
    """What keeps a model from being a stock GPT-2, if anything does."""
    if config.scheme != "pre-ln":
        return f"its scheme is {config.scheme}"
    if changed := {
        k: v for k, v in config.scheme_options.items() if (k, v) not in (("norm", "layernorm"), ("bias", True))
    }:
        return f"its scheme has {changed}"
    if not config.bias:
        return "it has no biases"
    return None if config.head_bias == "none" else f"it has head_bias={config.head_bias!r}"


def to_gpt2(model: GPT, **more: Any) -> GPT2LMHeadModel:
    """transformers' own GPT-2 with the weights of a `pre-ln` GPT, and what else its config shall say."""
    config = model.config
    if reason := why_not_gpt2(config):
        raise ValueError(f"a stock GPT-2 is Pre-LN with biases and LayerNorm, and of this model {reason}.")
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    dropout = config.dropout
    options: dict[str, Any] = {
        "vocab_size": config.vocab, "n_positions": config.block, "n_embd": config.width, "n_layer": config.layers,
        "n_head": config.heads, "activation_function": activation,
        "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout,
        "bos_token_id": None, "eos_token_id": None, **more,
    }  # fmt: skip
    made: Any = GPT2LMHeadModel(GPT2Config(**options))
    made = made.to(model.tokens.weight.dtype)
    state = model.state_dict()
    names = _names(config.layers)
    made.transformer.load_state_dict({theirs: _same(state[ours], turned) for theirs, (ours, turned) in names.items()})
    made.tie_weights()
    return made.eval()
