"""Inputs for the trial forward pass, made up from what a model says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spheret.conversion.plan import ConversionError

_BATCH, _TOKENS, _SEED = 2, 16, 0


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on these inputs: a tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def example_inputs(model: nn.Module) -> Any:
    """Random inputs that fit the model. Raises ConversionError if it does not say what it takes."""
    generator = torch.Generator().manual_seed(_SEED)
    parameter = next(model.parameters())

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(parameter.device, parameter.dtype)

    def tokens(vocab: int, most: int | None) -> Tensor:
        length = min(_TOKENS, most or _TOKENS)
        return torch.randint(vocab, (_BATCH, length), generator=generator).to(parameter.device)

    inputs: Any = _transformers(model, rows, tokens)
    inputs = _torch_layers(model, rows) if inputs is None else inputs
    if inputs is None and isinstance(cfg := getattr(model, "pretrained_cfg", None), Mapping) and "input_size" in cfg:
        # timm
        inputs = (rows(_BATCH, *cfg["input_size"]),)
    config: Any = getattr(model, "config", None)
    if inputs is None and hasattr(config, "vocab") and hasattr(config, "block"):
        # spheret.GPT
        inputs = (tokens(config.vocab, config.block),)
    if inputs is None:
        raise ConversionError(
            f"{type(model).__name__} does not say what it takes, and convert needs one trial forward pass: give "
            "example_inputs, a tensor, a tuple of arguments or a dict of keyword arguments."
        )
    return inputs


def _transformers(model: nn.Module, rows: Any, tokens: Any) -> dict[str, Tensor] | None:
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if name is None or config is None:
        return None
    if name == "pixel_values":
        size = getattr(config, "image_size", None)
        if size is None:
            return None
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return {name: rows(_BATCH, getattr(config, "num_channels", 3), height, width)}
    if name != "input_ids":
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids = tokens(text.vocab_size, getattr(text, "max_position_embeddings", None))
    return {name: ids, "decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {name: ids}


def _torch_layers(model: nn.Module, rows: Any) -> tuple[Tensor, ...] | None:
    attention = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
    kinds = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer)
    if attention is None or not isinstance(model, (*kinds, nn.Transformer)):
        return None
    shape = (_BATCH, _TOKENS) if attention.batch_first else (_TOKENS, _BATCH)
    one = rows(*shape, attention.embed_dim)
    return (one,) if isinstance(model, kinds[:2]) else (one, rows(*shape, attention.embed_dim))
