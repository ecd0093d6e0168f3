"""A GPT that transformers can load, save, train and generate with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple

from spheret.connections import State
from spheret.hub.config import SpheretConfig
from spheret.model.gpt import GPT


class SpheretForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT as transformers' AutoModelForCausalLM, with its masks, caches and outputs. `model` is the GPT itself."""

    config_class = SpheretConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: SpheretConfig, model: GPT | None = None):
        super().__init__(config)
        self.model = GPT(config.model()) if model is None else model
        self.post_init()

    @classmethod
    def of(cls, model: GPT, **more: Any) -> Self:
        """Wrap this model. Its parameters are shared, not copied. `more` goes into the SpheretConfig."""
        return cls(SpheretConfig.of(model.config, **more), model)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing. `SpheretConfig.save_pretrained` writes the file that finds this class."""

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: the GPT has initialised its own weights."""

    def _initialize_missing_keys(self, is_quantized: bool) -> None:
        # a parameter that the checkpoint lacks would keep uninitialised memory
        lost = [name for name, p in self.named_parameters() if not getattr(p, "_is_hf_initialized", False)]
        if lost and not is_quantized:
            raise ValueError(f"the checkpoint has no {', '.join(lost[:3])} ({len(lost)} missing): export it again.")

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

    def get_output_embeddings(self) -> nn.Module | None:
        """The untied head, or None: transformers then knows that no other weight follows the embedding."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As in transformers. An untied head grows as the embedding does.

        A head bias is extended by zeros. The gains of the logits are extended by their initial values.
        """
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = len(embeddings.weight)
        self.model.config = replace(self.model.config, vocab=size)
        if (gain := self.model.logit_norm) is not None:
            grown_gain = self.model.scheme.logit_gain(self.config.width, size)
            assert grown_gain is not None, "the scheme has a gain for every vocabulary or for none"
            with torch.no_grad():
                for new, old in zip(grown_gain.parameters(), gain.parameters(), strict=True):
                    new[: len(old)].copy_(old[: len(new)])
            self.model.logit_norm = grown_gain.to(embeddings.weight.device, embeddings.weight.dtype)
        if (bias := self.model.head_bias) is not None:
            grown = torch.cat([bias.detach(), bias.new_zeros(max(0, size - len(bias)))])[:size]
            self.model.head_bias = nn.Parameter(grown.clone())
        return embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Returns logits (batch, time, vocab), the mean loss if labels are given, and what else is asked for.

        attention_mask: (batch, keys), 0 at padding. Rows may be padded on either side.
        inputs_embeds: (batch, time, width), instead of input_ids.
        labels: (batch, time), the input ids themselves; they are shifted here. Labels of -100 are left out.
        output_hidden_states: the stream before the first block, after each block but the last, and after the exit.
        options: `num_items_in_batch`, by which the summed loss is then divided. Attention weights are not returned.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            given = "neither" if tokens is None else "both"
            raise ValueError(f"the model takes input_ids or inputs_embeds, got {given}: give one of them.")
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if isinstance(past, int) and past + tokens.shape[1] > self.config.block:
            raise ValueError(f"{past + tokens.shape[1]} tokens do not fit the context of {self.config.block}.")
        if position_ids is None:
            position_ids = _positions(tokens, attention_mask, past)
        mask: Any = create_causal_mask(
            config=self.config,
            # only its shape, dtype and device are used
            inputs_embeds=self.model.tokens.weight.new_empty(()).expand(*tokens.shape[:2], self.config.width),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[State] | None = [] if hidden else None
        h = self.model.stream(tokens, past_key_values, position_ids, mask, states)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(h[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab, **options)
        outputs: Any = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past_key_values if use_cache else None
        )
        if states is not None:
            pairs = zip(self.model.each_block(), states, strict=True)
            # the last is the stream after the exit, as in transformers' language models
            outputs.hidden_states = (*(block.attention_connection.stream(state) for block, state in pairs), h)
        return outputs


def _positions(tokens: Tensor, mask: Tensor | None, past: int | Tensor) -> Tensor:
    """Positions (batch or 1, time), counted from the first token that is not padding."""
    if mask is None or mask.dim() != 2:
        return torch.arange(tokens.shape[1], device=tokens.device)[None] + past
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]


AutoConfig.register("spheret", SpheretConfig)
AutoModelForCausalLM.register(SpheretConfig, SpheretForCausalLM)
