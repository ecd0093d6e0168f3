"""Saved models: the one opener, export and import, and a GPT as a transformers model.

Importing this module registers the classes with transformers' Auto classes.

Without transformers the import works, so that `spheret export --help` does. Every name is an error with the pip
command then.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from spheret.support.errors import need

__all__ = ["SpheretConfig", "SpheretForCausalLM", "from_gpt2", "load", "to_gpt2"]

if find_spec("transformers") is None:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            need("transformers", "hub")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

else:
    need("transformers", "hub")
    from spheret.hub.config import SpheretConfig
    from spheret.hub.gpt2 import from_gpt2, to_gpt2
    from spheret.hub.model import SpheretForCausalLM
    from spheret.hub.open import load
