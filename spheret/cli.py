"""The command line: one row a command, each a plain function that tyro turns into flags."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from spheret.errors import unknown
from spheret.version import __version__

# what it is called: (module:function, what it is for); modules are imported when their command runs
COMMANDS: dict[str, tuple[str, str]] = {
    "prepare": ("spheret.data.command:command", "turn any text into checked, resumable shards of token ids"),
    "train": ("spheret.train.command:train", "train a GPT under any scheme, resumable to the bit"),
    "sample": ("spheret.train.sample:sample", "text from a run"),
    "doctor": ("spheret.doctor:doctor", "versions, device, backends with a self-check; --crash-drill"),
    "certify": ("spheret.analysis.command:command", "what is proven of a run's stability, and what is only measured"),
    "inspect": ("spheret.analysis.inspection:command", "what the stream of a run does, or those of two side by side"),
    "race": ("spheret.study.race:race", "every scheme on the same batches, then one report; resumable"),
    "report": ("spheret.study.report:command", "compare runs: a page, tables and figures, every number traced"),
    "plan": ("spheret.plan.command:command", "memory, FLOPs, traffic and hours of a run before it is started"),
    "reproduce": (
        "spheret.study.reproduce:reproduce",
        "the paper's runs with its hyperparameters, one cell or all 48",
    ),
    "eval": ("spheret.evaluate.command:command", "evaluate a run zero-shot on the paper's tasks through lm_eval"),
    "export": ("spheret.hub.transfer:export_command", "write a run as files that transformers loads"),
    "import": ("spheret.hub.transfer:import_command", "make a run of a model that transformers has saved"),
    "bench connection": ("spheret.bench.connection:connection", "time one update of the stream on every backend"),
    "bench step": ("spheret.bench.step:step", "time a whole training step under every scheme"),
    "bench scale": ("spheret.bench.scale:scale", "time a training step against depth and width"),
    "bench generate": ("spheret.bench.generate:generate", "time generation against transformers' GPT-2"),
    "bench eval": ("spheret.bench.evaluate:evaluate", "time multiple-choice requests against lm_eval's hf model"),
    "bench train": ("spheret.bench.train:train", "time the trainer's update against the bare step"),
    "bench data": ("spheret.bench.data:command", "time prepare and the loader against the plain ways"),
    "bench certify": ("spheret.bench.certify:command", "how the cost of a certificate grows with layers and tokens"),
}

USAGE_ERROR = 2
# 128 + SIGINT, as shells have it
INTERRUPTED = 130


def _help() -> str:
    width = max(map(len, COMMANDS), default=0)
    rows = "\n".join(f"  spheret {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items())
    return f"spheret {__version__}: deep connections for PyTorch\n\n{rows}\n\nspheret COMMAND --help lists its flags."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; bad input ends with one sentence on stderr and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"spheret {__version__}")
        return 0
    # a command is one word or two: `prepare`, `bench connection`
    size = next((n for n in (2, 1) if " ".join(words[:n]) in COMMANDS), 0)
    if not size:
        group = [name for name in COMMANDS if name.startswith(words[0] + " ")]
        print(unknown("command", " ".join(words[:2] if group else words[:1]), group or COMMANDS), file=sys.stderr)
        return USAGE_ERROR
    name = " ".join(words[:size])
    module, _, function = COMMANDS[name][0].partition(":")
    import tyro

    try:
        loaded = importlib.import_module(module)
        # a module may take words that tyro has no form for
        arguments = getattr(loaded, "rewrite", list)(words[size:])
        return tyro.cli(getattr(loaded, function), prog=f"spheret {name}", args=arguments) or 0
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"spheret {name}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"spheret {name}: stopped", file=sys.stderr)
        return INTERRUPTED
