"""Time a whole training step under every scheme, and of transformers' models of the same shape.

python benchmarks/step.py --size modern-S
"""

from __future__ import annotations

import json as jsons
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import (
    Comparison,
    adamw,
    begin,
    conditions,
    counter,
    medians,
    next_token_loss,
    print_table,
    run,
    share_parameters,
    training_step,
    write,
)
from torch import Tensor, nn

from spheret.connections.parse import parse_schemes
from spheret.kernels import use
from spheret.model.config import MODERN_KV_HEADS, PRESETS
from spheret.model.gpt import GPT, GPTConfig
from spheret.model.loss import has_bfloat16
from spheret.support.child import python_command, python_environment
from spheret.support.errors import need, unknown
from spheret.support.meter import Meter

RIVAL = "transformers GPT-2"
# rivals of the modern sizes, and their kind of export. Llama has no norms of queries and keys
MODERN_RIVALS = {"transformers Llama": "Llama", "transformers Qwen3": "Qwen3"}
# proj-spheretnorm with the reference backend, the paper's arithmetic, instead of our kernels
PAPERS_CODE = "proj-spheretnorm, the paper's code"
# a modern size without the norms that Llama lacks
WITHOUT_NORMS = "pre-ln, no norms of q and k"
SHORT = ("--tokens", "256", "--block", "256", "--schemes", "proj-spheretnorm", "--repeats", "1", "--no-memory")


def precisions(device: torch.device) -> tuple[str, ...]:
    """float32, and bf16 if the device computes it in hardware: emulated on a CPU, a step takes minutes."""
    if device.type == "cpu":
        bf16 = has_bfloat16()
    else:
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return ("float32", "bf16") if bf16 else ("float32",)


def build_model(name: str, size: str, block: int, shared: GPT | None) -> GPT:
    """A model of a scheme, `scheme` or `scheme:option=value:...`.

    shared: a model whose parameters are reused, because nine models would not fit into memory.
    """
    (choice,) = parse_schemes({PAPERS_CODE: "proj-spheretnorm", WITHOUT_NORMS: "pre-ln"}.get(name, name))
    options: dict[str, Any] = {"scheme": choice.name, "scheme_options": choice.options, "block": block}
    if name == WITHOUT_NORMS:
        options["qk_norm"] = False
    model = GPT(GPTConfig.preset(size, **options))
    if shared is not None:
        share_parameters(model, shared)
    return model


def rivals(size: str) -> tuple[str, ...]:
    """The models of transformers that a size is compared with."""
    return tuple(MODERN_RIVALS) if size in MODERN_KV_HEADS else (RIVAL,)


def _rival(name: str, size: str, block: int) -> nn.Module:
    transformers = need("transformers", "hub")
    if name in MODERN_RIVALS:
        kind = MODERN_RIVALS[name]
        ours = GPTConfig.preset(size, scheme="pre-ln", block=block, qk_norm=kind == "Qwen3")
        modern = getattr(transformers, f"{kind}Config")(
            vocab_size=ours.vocab, max_position_embeddings=block, hidden_size=ours.width,
            num_hidden_layers=ours.layers, num_attention_heads=ours.shape.heads,
            num_key_value_heads=ours.shape.kv_heads, head_dim=ours.shape.head_dim,
            intermediate_size=ours.shape.hidden, rms_norm_eps=1e-5, attention_bias=ours.bias,
            rope_parameters={"rope_type": "default", "rope_theta": ours.rope_base}, use_cache=False,
            tie_word_embeddings=ours.head == "tied",
        )  # fmt: skip
        rival: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(modern).train()
        return rival
    layers, heads, width = PRESETS[size]
    config = transformers.GPT2Config(
        vocab_size=50304, n_positions=block, n_embd=width, n_layer=layers, n_head=heads, activation_function="gelu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def compute_loss(name: str, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if not isinstance(model, GPT):
        return next_token_loss(model, x, y)
    with use("reference" if name == PAPERS_CODE else None):
        return model(x, y)


def random_batch(tokens: int, block: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(50257, (tokens // block, block + 1), generator=generator)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def peak_bytes(name: str, size: str, tokens: int, block: int, precision: str, device: str = "cpu") -> int:
    """The most memory that this process ever held, after two steps of one model. Run it in a process of its own.

    On a GPU this is the memory of the tensors. On a CPU it is the memory of the process, which only Linux reports.
    """
    model = (_rival(name, size, block) if name in rivals(size) else build_model(name, size, block, None)).to(device)
    x, y = (part.to(device) for part in random_batch(tokens, block))
    step = training_step(model, partial(compute_loss, name, model), adamw(model), [(x, y)], precision)
    step()
    step()
    if x.is_cuda:
        return torch.cuda.max_memory_allocated(x.device)
    # getrusage would count what the parent held when it forked
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _peak_in_a_child(*arguments: Any) -> int:
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from step import peak_bytes; "
        "print(peak_bytes(*json.loads(sys.argv[2])))"
    )
    command = python_command("-c", code, str(Path(__file__).parent), jsons.dumps(arguments))
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=python_environment()).stdout
    return int(output.split()[-1])


def main(
    size: str = "S",
    tokens: int = 1024,
    block: int = 512,
    schemes: str = "paper",
    repeats: int = 5,
    memory: bool = True,
    device: str | None = None,
    json: Path | None = None,
) -> None:
    """Time a full training step (forward, backward, clip, AdamW) of every scheme, interleaved in one process.

    Args:
        size: S, M or L, against transformers' GPT-2; or modern-S, modern-M or modern-L, against its Llama and Qwen3.
        tokens: tokens per step.
        block: tokens per sequence.
        schemes: paper (the paper's nine), all, or names separated by commas; scheme:option=value sets an option.
        repeats: rounds; the median is printed.
        memory: also measure the peak memory of each scheme, in a process of its own.
        device: cpu, cuda or mps; by default cuda if there is one, else mps, else cpu.
        json: also write the table to this file.
    """
    if size not in PRESETS and size not in MODERN_KV_HEADS:
        raise SystemExit(str(unknown("size", size, [*PRESETS, *MODERN_KV_HEADS])))
    place = begin(json, device, block=block, tokens=tokens, repeats=repeats)
    if tokens < block or tokens % block:
        raise SystemExit(f"--tokens must be a multiple of --block, got {tokens} and {block}.")
    chosen = [":".join([choice.name, *choice.settings]) for choice in parse_schemes(schemes)]
    modern = [WITHOUT_NORMS] if size in MODERN_KV_HEADS else []
    names = [*dict.fromkeys(["pre-ln", *chosen]), PAPERS_CODE, *modern, *rivals(size)]
    measured = precisions(place)
    shared = build_model("pre-ln", size, block, None).to(place)
    models: dict[str, nn.Module] = {"pre-ln": shared}
    models |= {
        name: build_model(name, size, block, shared).to(place)
        for name in names
        if name not in ("pre-ln", *rivals(size))
    }
    models |= {name: _rival(name, size, block).to(place) for name in rivals(size)}
    # one optimiser for all models: it skips parameters that have no gradient
    optimizer = adamw(nn.ModuleList(models.values()))
    x, y = (part.to(place) for part in random_batch(tokens, block))
    seconds = {}
    for precision in measured:
        steps = {
            name: training_step(model, partial(compute_loss, name, model), optimizer, [(x, y)], precision)
            for name, model in models.items()
        }
        seconds[precision] = medians(f"step, {precision}", steps, repeats)
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            **{
                precision: {"tokens/s": tokens / took[name], "x pre-ln": took[name] / took["pre-ln"], "GB": None}
                for precision, took in seconds.items()
            },
        }
        for name in names
    ]
    if memory:
        with Meter("step, memory") as meter:
            tick = counter(meter, len(names) * len(measured), "models")
            for row in rows:
                for precision in measured:
                    peak = _peak_in_a_child(row["name"], size, tokens, block, precision, str(place))
                    row[precision]["GB"] = peak / 1e9
                    tick()
    formats = {"tokens/s": ".0f", "x pre-ln": ".3f"} | ({"GB": ".2f"} if memory else {})
    print_table(
        f"nanoGPT {size}, {tokens} tokens in sequences of {block}, {conditions(place)}",
        ["", *(column for precision in measured for column in (f"{precision} tok/s", *list(formats)[1:]))],
        [
            [
                row["name"],
                *(format(row[precision][key], form) for precision in measured for key, form in formats.items()),
            ]
            for row in rows
        ],
    )
    print("x pre-ln: the time of a step divided by pre-ln's. Medians of interleaved steps.")
    if "bf16" not in measured:
        print(f"bf16 was not measured: this {place.type} has no bfloat16 arithmetic.")
    settings = {"size": size, "tokens": tokens, "block": block, "repeats": repeats, "device": str(place)}
    write(json, {**settings, "table": rows})


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """proj-spheretnorm in float32, against pre-ln, the paper's code and the models of transformers."""
    seconds = {row["name"]: result["tokens"] / row["float32"]["tokens/s"] for row in result["table"]}
    names = ["pre-ln", PAPERS_CODE, *rivals(result["size"])]
    what = f"a step of {result['size']}, {result['tokens']} tokens, against"
    return [Comparison(f"{what} {name}", seconds["proj-spheretnorm"], seconds[name]) for name in names]


if __name__ == "__main__":
    run(main)
