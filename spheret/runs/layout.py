"""The name of every file in a run directory, each written down once."""

from __future__ import annotations

from spheret.data.shards import TOKENIZER

CONFIG = "config.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
LOCK = "run.lock"
# written when the training has ended
SAMPLE = "sample.json"

# in checkpoints/step-N/
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"

# what later stages add
EVAL = "eval.json"
EVAL_SAMPLES = "eval_samples.jsonl"
INSPECT = "inspect.json"

# everything a run may hold; `--force` removes these and nothing else, the config last: without it this is not a run
RUN_FILES = (
    METRICS, CHECKPOINTS, TOKENIZER, EVAL, EVAL_SAMPLES, INSPECT, SAMPLE, CONFIG,
)  # fmt: skip
