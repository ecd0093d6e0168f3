"""An estimate of the memory, computation and traffic of a training run, before it starts: `spheret plan`."""
