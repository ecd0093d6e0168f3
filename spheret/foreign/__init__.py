"""Models that transformers has saved: opened without running anything of theirs, followed, and differentiated."""
