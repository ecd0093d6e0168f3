"""Training: one run, in one directory, that can be killed at any moment and goes on to the bit."""

from spheret.train.run import Run, create_run, open_run

__all__ = ["Run", "create_run", "open_run"]
