"""Decoders that transformers has saved: followed, and differentiated."""
