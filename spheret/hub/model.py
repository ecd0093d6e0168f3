"""`SpheretConfig` and `SpheretForCausalLM`: a GPT that transformers can load, save, train and generate with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.output_capturing import capture_outputs

from spheret.model.gpt import GPT, Block, GPTConfig

OPTIONS = [f.name for f in fields(GPTConfig)]


class SpheretConfig(PreTrainedConfig):
    """The options of a GPT under the names that `GPTConfig` gives them, readable under transformers' too.

    spheret_tokenizer: how the tokenizer of the run described itself, for `spheret import`.
    """

    model_type = "spheret"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "hidden_size": "width",
        "max_position_embeddings": "block",
        "vocab_size": "vocab",
    }

    layers: int = 12
    heads: int = 12
    width: int = 768
    block: int = 1024
    vocab: int = 50304
    bias: bool = True
    dropout: float = 0.0
    scheme: str = "proj-spheretnorm"
    scheme_options: dict[str, Any] | None = None
    activation: str = "gelu"
    head_bias: str = "none"
    recompute: bool = False
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    spheret_tokenizer: dict[str, Any] | None = None

    def model(self) -> GPTConfig:
        """The same for `spheret.GPT`."""
        values = {name: getattr(self, name) for name in OPTIONS}
        return GPTConfig(**{**values, "scheme_options": values["scheme_options"] or {}})

    @classmethod
    def of(cls, config: GPTConfig, **more: Any) -> SpheretConfig:
        """From the options of a `spheret.GPT`, and what transformers wants besides."""
        return cls(**config.as_dict(), **more)


class SpheretForCausalLM(PreTrainedModel, GenerationMixin):
    """`model` is the GPT itself; this adds masks, caches and outputs of transformers, and no parameter."""

    config_class = SpheretConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012

    def __init__(self, config: SpheretConfig, model: GPT | None = None):
        super().__init__(config)
        self.model = GPT(config.model()) if model is None else model
        self.post_init()

    @classmethod
    def of(cls, model: GPT, **more: Any) -> SpheretForCausalLM:
        """A face for this very model: its parameters are shared, not copied."""
        return cls(SpheretConfig.of(model.config, **more), model)

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the GPT has drawn its own weights."""

    def _initialize_missing_keys(self, is_quantized: bool) -> None:
        # what a checkpoint lacks would stay whatever was in memory
        missing = [name for name, p in self.named_parameters() if not getattr(p, "_is_hf_initialized", False)]
        if missing and not is_quantized:
            raise ValueError(
                f"the checkpoint has no {', '.join(missing[:3])} ({len(missing)} missing): export it again."
            )

    @property
    def gradient_checkpointing(self) -> bool:
        return self.model.recompute

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.model.recompute = value

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.tokens = value

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As in transformers; the head is tied, and its bias, where there is one, grows by zeros."""
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = len(embeddings.weight)
        self.model.config = replace(self.model.config, vocab=size)
        if (bias := self.model.head_bias) is not None:
            grown = torch.cat([bias.detach(), bias.new_zeros(max(0, size - len(bias)))])[:size]
            self.model.head_bias = nn.Parameter(grown.clone())
        return embeddings

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids (batch, time) to logits (batch, time, vocab); with labels, which it shifts, their mean loss too.

        Rows may be padded on either side where `attention_mask` (batch, keys) is 0. Hidden states, where they are
        asked for, are the stream's: before the first block and after each of them.
        """
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if isinstance(past, int) and past + input_ids.shape[1] > self.config.block:
            raise ValueError(f"{past + input_ids.shape[1]} tokens do not fit the context of {self.config.block}.")
        if position_ids is None:
            position_ids = _positions(input_ids, attention_mask, past)
        mask = create_causal_mask(
            config=self.config,
            # asked only for its shape, dtype and device
            inputs_embeds=self.model.tokens.weight.new_empty(()).expand(*input_ids.shape, self.config.width),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        h = self.model.stream(input_ids, past_key_values, position_ids, mask)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(h[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab, **options)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past_key_values if use_cache else None
        )


def _positions(tokens: Tensor, mask: Tensor | None, past: int | Tensor) -> Tensor:
    """Positions (batch or 1, time) counted from the first token that is no padding."""
    if mask is None or mask.dim() != 2:
        return torch.arange(tokens.shape[1], device=tokens.device)[None] + past
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]


AutoConfig.register("spheret", SpheretConfig)
AutoModelForCausalLM.register(SpheretConfig, SpheretForCausalLM)
