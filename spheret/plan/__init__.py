"""What a training run will hold, compute and send before it is started: `spheret plan`."""
