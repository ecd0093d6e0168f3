"""The run directory, which is all that the stages share: its files, its config, its checkpoints, its metrics."""

from spheret.runs.run import Run, create_run, open_run

__all__ = ["Run", "create_run", "open_run"]
