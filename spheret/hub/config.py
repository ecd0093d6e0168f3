"""`SpheretConfig`: the options of a GPT as a transformers config, saved beside the file that finds its classes."""

from __future__ import annotations

import os
import shutil
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from transformers import PreTrainedConfig

from spheret.model.gpt import GPTConfig

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

# the file that transformers runs for trust_remote_code=True. It imports spheret.hub and holds no model of its own
CODE = Path(__file__).with_name("modeling_spheret.py")
# transformers' Auto classes, and ours for each
CLASSES = {"AutoConfig": "SpheretConfig", "AutoModelForCausalLM": "SpheretForCausalLM"}


class SpheretConfig(PreTrainedConfig, _Options):
    """The options of `GPTConfig` as a transformers config. `attribute_map` gives some of them a second name."""

    model_type = "spheret"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "hidden_size": "width",
        "max_position_embeddings": "block",
        "vocab_size": "vocab",
    }

    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **more: Any) -> None:
        super().__post_init__(**more)
        # a shifted head has the weight of the embedding too
        self.tie_word_embeddings = self.head != "untied"

    def model(self) -> GPTConfig:
        """The config of the `spheret.GPT` inside."""
        return GPTConfig(**{name: getattr(self, name) for name in OPTIONS})

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds: every option, so that a default that changes later changes no saved model."""
        return {**super().to_diff_dict(), **self.model().as_dict()}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **more: Any) -> Any:
        """The config of what a file holds. A file without one of the options was written by an older version."""
        names = {name: other for other, name in cls.attribute_map.items()}
        for name in OPTIONS:
            if name not in config_dict and names.get(name) not in config_dict:
                raise ValueError(f"{name} is missing in config.json, as in an older format: save the model again.")
        return super().from_dict(config_dict, **more)

    @classmethod
    def of(cls, config: GPTConfig, **more: Any) -> SpheretConfig:
        """From the config of a `spheret.GPT`, and further attributes of a transformers config."""
        return cls(**config.as_dict(), **more)

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **more: Any) -> None:
        """Write config.json, and beside it the file that `trust_remote_code=True` runs."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(CODE, Path(save_directory) / CODE.name)
        # a saved model names its own copy of the file, wherever it was loaded from
        self.auto_map = {auto: f"{CODE.stem}.{ours}" for auto, ours in CLASSES.items()}
        super().save_pretrained(save_directory, push_to_hub, **more)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing. transformers would save the source of this class instead of the small file."""
