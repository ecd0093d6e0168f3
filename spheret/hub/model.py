"""`SpheretConfig` and `SpheretForCausalLM`: a GPT that transformers can load, save, train and generate with."""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass, replace
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.output_capturing import capture_outputs

from spheret.model.gpt import GPT, Block, GPTConfig

OPTIONS = [option.name for option in fields(GPTConfig)]
_TYPES = get_type_hints(GPTConfig)
# a dataclass with every field of GPTConfig and its default. GPTConfig itself cannot be a base class: it is frozen,
# and transformers sets the attributes of a config
_Options: Any = make_dataclass(
    "_Options",
    [
        (option.name, _TYPES[option.name], field(default=option.default, default_factory=option.default_factory))
        for option in fields(GPTConfig)
    ],
)


class SpheretConfig(PreTrainedConfig, _Options):
    """The options of `GPTConfig` as a transformers config. `attribute_map` gives some of them a second name.

    spheret_tokenizer: the description of the run's tokenizer, which `spheret import` reads.
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

    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    spheret_tokenizer: dict[str, Any] | None = None

    def model(self) -> GPTConfig:
        """The config of the `spheret.GPT` inside."""
        return GPTConfig(**{name: getattr(self, name) for name in OPTIONS})

    @classmethod
    def of(cls, config: GPTConfig, **more: Any) -> SpheretConfig:
        """From the config of a `spheret.GPT`, and further attributes of a transformers config."""
        return cls(**config.as_dict(), **more)


class SpheretForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT with the masks, caches and outputs of transformers. It adds no parameter; `model` is the GPT itself."""

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
        """Wrap this model. Its parameters are shared, not copied."""
        return cls(SpheretConfig.of(model.config, **more), model)

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: the GPT has initialised its own weights."""

    def _initialize_missing_keys(self, is_quantized: bool) -> None:
        # a parameter that the checkpoint lacks would keep uninitialised memory
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
        """As in transformers. The head is tied to the embedding.

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
        """input_ids (batch, time) to logits (batch, time, vocab), and the mean loss if labels are given.

        attention_mask: (batch, keys), 0 at padding. Rows may be padded on either side.
        labels: (batch, time), the input ids themselves; they are shifted here.
        output_hidden_states: return the stream before the first block and after each block.
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
            # only its shape, dtype and device are used
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
    """Positions (batch or 1, time), counted from the first token that is not padding."""
    if mask is None or mask.dim() != 2:
        return torch.arange(tokens.shape[1], device=tokens.device)[None] + past
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]


AutoConfig.register("spheret", SpheretConfig)
AutoModelForCausalLM.register(SpheretConfig, SpheretForCausalLM)
