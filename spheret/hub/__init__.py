"""A GPT as a transformers model. Importing this module registers it with transformers' Auto classes."""

from __future__ import annotations

from spheret.support.errors import need

need("transformers", "hub")

from spheret.hub.gpt2 import from_gpt2, to_gpt2  # noqa: E402
from spheret.hub.model import SpheretConfig, SpheretForCausalLM  # noqa: E402

__all__ = ["SpheretConfig", "SpheretForCausalLM", "from_gpt2", "to_gpt2"]
