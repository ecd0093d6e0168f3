"""GPT-2 with any scheme: the model, its loss, sampling, and probes of its sublayers."""
