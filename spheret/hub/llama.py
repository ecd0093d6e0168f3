"""Exports a `pre-ln` GPT on the backbone of Llama or Qwen3 as transformers' own model: the same weights, by name.

Llama is `positions="rope"`, `mlp="swiglu"` and `norm="rmsnorm"`, with or without biases. Qwen3 also has `qk_norm`,
and no biases. A head that is not tied becomes an untied one, a shift its columns' order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from spheret.model.gpt import GPT, GPTConfig

# by kind: transformers' config and model, and whether queries and keys are normed
KINDS: dict[str, tuple[Any, Any, bool]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, False),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, True),
}
# the options of the scheme that change nothing in the export
FREE = ("norm", "bias", "prores")


def why_not(config: GPTConfig, kind: str) -> str | None:
    """Returns the reason why a model is not a Llama or a Qwen3, or None if it is one."""
    if config.scheme != "pre-ln":
        return f"its scheme is {config.scheme}"
    for name, wanted in (
        ("positions", "rope"),
        ("mlp", "swiglu"),
        ("qk_norm", KINDS[kind][2]),
        ("head_bias", "none"),
    ):
        if getattr(config, name) != wanted:
            return f"it has {name}={getattr(config, name)!r} in place of {wanted!r}"
    if getattr(config.build_scheme(), "norm", None) != "rmsnorm":
        return "its norms are not RMSNorms"
    if changed := {name: value for name, value in config.scheme_options.items() if name not in FREE}:
        return f"its scheme has {changed}"
    return "it has biases" if kind == "qwen3" and config.bias else None


def fresh(config: GPTConfig, kind: str, **more: Any) -> Any:
    """transformers' own Llama or Qwen3 of the shape of a GPT, with weights of its own. `more` goes into its config.

    Llama has dropout in attention only, so that of the embeddings and branches is left out.
    """
    if reason := why_not(config, kind):
        raise ValueError(
            f"a {kind} is pre-ln with rotary positions, SwiGLU and RMSNorm. This model is not one: {reason}. "
            "Export it as spheret."
        )
    config_class, model_class, _ = KINDS[kind]
    shape = config.shape
    options: dict[str, Any] = {
        "vocab_size": config.vocab, "max_position_embeddings": config.block, "hidden_size": config.width,
        "num_hidden_layers": config.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.hidden, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "attention_bias": config.bias, "attention_dropout": config.dropout,
        "tie_word_embeddings": config.head == "tied", "bos_token_id": None, "eos_token_id": None,
        **({"mlp_bias": config.bias} if kind == "llama" else {}), **more,
    }  # fmt: skip
    return model_class(config_class(**options))


def to_transformers(model: GPT, kind: str, **more: Any) -> Any:
    """transformers' own Llama or Qwen3 with the weights of a GPT. `more` goes into its config."""
    exported = fresh(model.config, kind, **more).to(model.tokens.weight.device, model.tokens.weight.dtype)
    waiting = [c for b in model.each_block() for c in (b.attention_connection, b.mlp_connection) if not _is_warm(c)]
    if waiting:
        raise ValueError(
            f"the branches of {len(waiting)} sublayers are still multiplied by less than 1 (prores), and {kind} has "
            "no such factor: export a later checkpoint, or export it as spheret."
        )
    with torch.no_grad():
        exported.model.load_state_dict({name: x.detach() for name, x in tensors(model)})
        if model.config.head == "tied":
            exported.tie_weights()
        else:
            exported.lm_head.weight.copy_(model.plain_head())
    return exported.eval()


def _is_warm(connection: Any) -> bool:
    return connection.warmup is None or bool((connection.warmup.factor == 1).all())


def tensors(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """The weights of a GPT under transformers' names, as views."""
    shape = model.config.shape
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "embed_tokens.weight", model.tokens.weight
    yield "norm.weight", model.get_parameter("final_norm.weight")
    for layer, block in enumerate(model.each_block()):
        attention, mlp, start = block.attention, block.mlp, f"layers.{layer}"
        norms = {
            "input_layernorm": block.attention_connection.get_parameter("inner_norm.weight"),
            "post_attention_layernorm": block.mlp_connection.get_parameter("inner_norm.weight"),
        }
        if attention.qkv_norm is not None:
            norms["self_attn.q_norm"] = attention.qkv_norm.get_parameter("q_norm.weight")
            norms["self_attn.k_norm"] = attention.qkv_norm.get_parameter("k_norm.weight")
        for name, gain in norms.items():
            yield f"{start}.{name}.weight", gain
        for part in ("weight", "bias") if model.config.bias else ("weight",):
            q, k, v = getattr(attention.qkv, part).split([queries, keys, keys])
            gate, up = getattr(mlp.hidden, part).chunk(2)
            for name, tensor in {
                "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
                "self_attn.o_proj": getattr(attention.output, part),
                "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": getattr(mlp.output, part),
            }.items():  # fmt: skip
                yield f"{start}.{name}.{part}", tensor
