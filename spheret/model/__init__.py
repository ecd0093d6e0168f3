"""GPT-2 under any scheme: the model, its loss, sampling, and probes that look inside."""
