"""Finds the classes of this model for transformers: from_pretrained(..., trust_remote_code=True) runs this file.

The model itself is in the package spheret.
"""

try:
    from spheret.hub import SpheretConfig, SpheretForCausalLM
except ImportError as error:
    raise ImportError('This model needs the package spheret. Run: pip install "spheret[hub]"') from error

__all__ = ["SpheretConfig", "SpheretForCausalLM"]
