"""Where trainings run: on this machine, or on a cluster."""
