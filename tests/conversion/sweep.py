"""Which architectures of transformers `spheret.convert` converts exactly: each is built small, at random, and tried.

Each runs in a fork with little memory and little time.
A class that is converted exactly is also trained for a step at t = 0, 0.3 and 1, saved, and loaded.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import random
import re
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import spheret
from spheret.conversion import ConversionError, anneal
from spheret.conversion.trace import returned_tensors
from spheret.hub import load

MEMORY, COMPUTING, WAITING = 2 << 30, 60, 400
SEED, VOCAB, WIDTH = 0, 97, 32
# more than this is not small: some size was not recognised
MOST_PARAMETERS = 10_000_000
# how far an output may be from the original's on inputs that the conversion has not seen, by the largest output
TOLERANCE = 1e-3
# and a gradient at t = 0: it crosses all layers twice
GRADIENT_TOLERANCE = 1e-2
# and an output after the model was saved and loaded
RELOADED = 1e-5

# the sizes of a config by the names of its attributes, first match first. None is made larger than it is
SIZES = [
    (r".*codebook_size", 64),
    (r".*vocab_size.*|.*vocabulary_size|n_tokens|num_embeddings|type_vocab_size", VOCAB),
    (r".*experts_per_tok(en)?|.*top_?k(_experts)?|index_kpool|moe_k|num_selected_experts|num_experts_per_layer", 2),
    (r"n_groups?|topk_group|num_expert_groups?|mamba_n_groups|first_k_dense_replace|num_nextn_predict_layers", 1),
    (r".*(num|n)_(\w+_)?experts|.*n_routed_experts|.*num_experts\w*|moe_num_experts", 4),
    (r".*(key_value|kv)_heads|n_head_kv|multi_query_group_num|num_key_value_groups", 2),
    (r"qk_head_dim", 16),
    (r".*rotary_dim", 4),
    (r".*head_dim|.*d_kv|.*d_head|.*kv_channels|.*head_size|.*head_channels|.*_head_dims?", 8),
    (r".*head_v_dim|.*head_k_dim|.*(key|value)_head_dim", 8),
    (r".*(num|n)_(\w+_)?heads?|.*attention_heads|.*_heads|linear_num_\w+_heads", 4),
    (r".*lora_rank|.*_rank|.*low_rank_dim\w*", 8),
    (r".*state_size|.*d_state|ssm_state\w*|conv_kernel|.*d_conv|.*time_step_rank", 4),
    (r".*(intermediate|ffn|inner|mlp|feed_?forward)_?(size|dim|hidden\w*)|.*d_ff|.*ffn_dim|n_inner|.*fc_size", 48),
    (r".*(num|n)_(\w+_)?layers?|.*_layers|.*depth|.*num_blocks|.*_block_count|layers|num_stages_\w*", 2),
    (r"max_source_positions", 32),
    (r".*max_(position|source|target|sequence|seq)\w*|n_positions|n_ctx|.*max_position\w*|max_length", 64),
    (r".*sliding_window|.*local_attn\w*|.*attention_window\w*|.*chunk_size", 8),
    (r".*window_size", 2),
    (r".*(image|img|input|crop)_size", 32),
    (r".*patch_size", 8),
    (r".*num_frames", 2),
    (r".*(hidden|embedding|embed|projection|proj|model|entity_emb|output|bottleneck)_?(size|dim)", WIDTH),
    (r".*d_model|.*d_embed|.*n_embd|.*d_out|dim|dims|.*hidden_channels|.*_hidden_size\w*|.*hidden_size\w*", WIDTH),
    (r".*(size|dim|dims|channels|features|width)", WIDTH),
]  # fmt: skip
# what some classes do not work without, but their configs leave open
MISSING = {
    "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "default_language": "en_XX", "pad_token_id": 0,
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}  # fmt: skip
# what names layers that a small model does not have
DROPPED = {"per_layer_config", "indexer_types", "out_features", "out_indices", "stage_names"}
KEPT = {
    "num_channels", "num_feat_extract_layers", "in_channels", "in_chans", "conv_kernel", "kernel_size",
    "num_mel_bins", "tubelet_size",
}  # fmt: skip
# lists that have an entry per stage
STAGES = [
    (r".*depths|.*num_blocks|.*blocks|.*(num|n)_layers", (1, 2, 1, 1, 1)),
    (r".*heads", (2, 2, 4, 4, 4)),
    (r".*(hidden_sizes|embed_dims?|dims|channels|widths?|neck_hidden_sizes)", (16, 32, 32, 32, 32)),
    (r"conv_dim", (32,)),
]


class Case(NamedTuple):
    """An architecture: transformers' table, the type in its config, and the class."""

    table: str
    model_type: str
    name: str


def cases() -> list[Case]:
    """Every causal language model, then the bare model of every other type, in an order that a seed has shuffled."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    bare = {kind: name for kind, name in modeling_auto.MODEL_MAPPING_NAMES.items() if kind not in causal}
    found, known = [], set()
    for table, names in (("causal", causal), ("bare", bare)):
        listed = sorted((kind, name if isinstance(name, str) else name[0]) for kind, name in names.items())
        random.Random(SEED).shuffle(listed)
        for kind, name in listed:
            if name not in known:
                known.add(name)
                found.append(Case(table, kind, name))
    return found


def shrink(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a config with every size small, those of the configs inside of it too."""
    small, special = {}, iter(range(VOCAB - 1, 64, -1))
    for name, value in options.items():
        if name in DROPPED:
            continue
        value = MISSING.get(name) if value is None else value
        if not isinstance(name, str) or name in KEPT or isinstance(value, bool):
            pass
        elif isinstance(value, dict):
            value = shrink(value)
        elif re.fullmatch(r".*token(_id|_index)?|.*_(id|index)", name) and isinstance(value, int):
            value = value if value < VOCAB - 32 else next(special, VOCAB - 32)
        elif isinstance(value, int):
            value = min(value, next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value))
        elif isinstance(value, (list, tuple)):
            value = _short(name, list(value))
        small[name] = value
    if isinstance(rope := small.get("rope_parameters"), dict) and "rope_type" in rope:
        # the sections of the angles of text, height and width fill half of a head's rotated part
        half = int(8 * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    if "depths" in small and isinstance(small.get("image_size"), int):
        # each stage halves the image
        small["image_size"] = 64
    heads, groups = "num_attention_heads", "num_key_value_heads"
    if groups in options and options[groups] == options.get(heads):
        small[groups] = small[heads]
    return small


def _short(name: str, values: list[Any]) -> list[Any]:
    if values and all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        for pattern, stages in STAGES:
            if re.fullmatch(pattern, name):
                return [min(value, stage) for value, stage in zip(values, [*stages, *stages[-1:] * 99], strict=False)]
        if re.fullmatch(r".*(image|img|input)_size", name):
            return [min(value, 32) for value in values]
        if re.fullmatch(r".*patch_size", name):
            return [min(value, 8) for value in values]
    if len(values) < 6 or not re.search(r"layer|type|pattern|ratio", name):
        return values
    # one entry per layer: two of different kinds, the second of which is the last, if there are
    return [next((value for value in values if value != values[-1]), values[0]), values[-1]]


def small_config(case: Case) -> Any:
    kind = getattr(transformers, case.name).config_class or CONFIG_MAPPING[case.model_type]
    options = shrink(kind().to_dict()) | {"use_cache": False}
    if case.table == "causal" and "is_decoder" in options:
        options["is_decoder"] = True
    if {"state_size", "expand"} <= options.keys() and "head_dim" in options:
        # Mamba-2: heads times head_dim is the inner width
        options["head_dim"] = options["expand"] * WIDTH // options["num_heads"]
    if {"mamba_d_head", "mamba_n_heads"} <= options.keys():
        options["mamba_d_head"] = int(options.get("mamba_expand", 2) * WIDTH) // options["mamba_n_heads"]
        if "mamba_d_ssm" in options:
            options["mamba_d_ssm"] = options["mamba_d_head"] * options["mamba_n_heads"]
    return kind.from_dict(options)


def _find(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of these attributes that the config, or a config inside of it, has."""
    for name in names:
        for part in (config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))):
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return default


def inputs(model: torch.nn.Module, seed: int) -> Iterator[dict[str, Any]]:
    """Inputs that the model may take, most likely first."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 64, (2, 12), generator=generator)
    size = _find(config, ("image_size", "img_size", "input_size"), 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels, mel = (
        _find(config, ("num_channels", "in_channels", "in_chans"), 3),
        _find(config, ("num_mel_bins",), 80),
    )

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    frames = 2 * _find(config, ("max_source_positions",), 32)
    known = {
        "input_ids": [tokens],
        "pixel_values": [rows(2, channels, height, width), rows(2, 2, channels, height, width)],
        "input_features": [rows(2, mel, frames), rows(2, frames, mel)],
        "input_values": [rows(2, 4000), rows(2, 1, 4000), rows(2, frames, mel)],
        "pixel_values_videos": [rows(2, 2, channels, height, width)],
    }
    main = model.main_input_name if isinstance(model.main_input_name, str) else model.main_input_name[0]
    takes = inspect.signature(model.forward).parameters
    for value in known.get(main, []):
        yield {main: value}
        for name in ("decoder_input_ids", "input_ids"):
            if name in takes and name != main:
                yield {main: value, name: tokens}
        if main == "input_ids" and "pixel_values" in takes:
            for pixels in known["pixel_values"]:
                yield {main: value, "pixel_values": pixels}


def _run(model: torch.nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [x.clone() for x in returned_tensors(model(**given))]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _gap(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    pairs = zip(first, second, strict=True)
    return max(
        (float((x - y).abs().max() / x.abs().max().clamp(min=1e-30)) for x, y in pairs if x.numel()), default=0
    )


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}"


def build(case: Case) -> torch.nn.Module:
    """A small model with weights and gains that are not trivial, in eval mode."""
    kind = getattr(transformers, case.name)
    config = small_config(case)
    with torch.device("meta"):
        number = sum(parameter.numel() for parameter in kind(config).parameters())
    if number > MOST_PARAMETERS:
        raise ValueError(f"the small config has {number:,} parameters")
    torch.manual_seed(SEED)
    model = kind(small_config(case)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(0.5 + 2 * torch.rand(())).add_(0.05 * torch.randn_like(parameter))
    return model


Gradients = dict[str, torch.Tensor]


def gradients(model: torch.nn.Module, given: dict[str, Any]) -> Gradients:
    """The gradients of the mean square of all outputs, with the same draws of dropout at every call."""
    torch.manual_seed(3)
    # transformers draws masks of audio from numpy's global state
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    model.zero_grad()
    returned = [x for x in returned_tensors(model(**given)) if x.requires_grad]
    sum(x.square().mean() for x in returned).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _apart(first: Gradients, second: Gradients) -> float:
    """The largest difference of two gradients, by the largest gradient. What only one of them has counts as 0."""
    scale = max((float(x.abs().max()) for x in first.values() if x.numel()), default=0.0)
    gaps = [
        float((first.get(name, zero) - second.get(name, zero)).abs().max())
        for name, zero in ((name, torch.zeros_like(x)) for name, x in {**first, **second}.items())
        if zero.numel()
    ]
    return max(gaps, default=0.0) / max(scale, 1e-30)


def reloaded(model: torch.nn.Module, opened: Any) -> torch.nn.Module:
    """The model after it was saved and opened again."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return opened(directory).eval()


def _works(trial: Any) -> bool:
    """Whether the unconverted model can do this at all."""
    try:
        return bool(trial())
    except Exception:
        return False


class Uses(NamedTuple):
    """What the original can do, to which the converted model is held."""

    gradients: Gradients | None
    saving: bool


def uses(model: torch.nn.Module, given: dict[str, Any], before: list[torch.Tensor]) -> Uses:
    try:
        truth = gradients(model, given)
        if not truth or not all(x.isfinite().all() for x in truth.values()) or _apart(truth, gradients(model, given)):
            truth = None
    except Exception:
        truth = None
    return Uses(
        truth,
        # memory that is laid out otherwise may round otherwise
        _works(lambda: _gap(before, _run(reloaded(model, type(model).from_pretrained), given)) <= RELOADED),
    )


def use(model: torch.nn.Module, given: dict[str, Any], able: Uses) -> dict[str, Any]:
    """Train and load the converted model as far as the original could. A `why` says what is wrong."""
    outcome: dict[str, Any] = {}
    if able.gradients is not None:
        outcome["trained"] = True
        for t in (0.0, 0.3, 1.0):
            anneal(model, t)
            found = gradients(model, given)
            if not all(x.isfinite().all() for x in found.values()):
                return {"why": f"gradients that are not finite at t = {t}"}
            own = {name: x for name, x in found.items() if ".spheret." not in f".{name}"}
            if t == 0 and not (gap := _apart(able.gradients, own)) <= GRADIENT_TOLERANCE:
                return {"why": f"gradients at t = 0 differ by {gap:.1e}"}
    if able.saving:
        anneal(model, 0.3)
        try:
            again = reloaded(model, lambda directory: load(directory, example_inputs=given))
        except ValueError as error:
            return {**outcome, "loaded": False, "load_refused": _said(error)}
        state = again.state_dict()
        if any(not torch.equal(x, state[name]) for name, x in model.state_dict().items() if ".spheret." in name):
            return {"why": "a loaded model has other step sizes"}
        # memory that is laid out otherwise may round otherwise
        if not (gap := _gap(_run(model, given), _run(again, given))) <= RELOADED:
            return {"why": f"a loaded model computes something else, by {gap:.1e}"}
        outcome["loaded"] = True
    return outcome


def attempt(case: Case) -> dict[str, Any]:
    """Build, convert, compare, use and revert. The outcome has an `end` and, unless it is exact, a reason."""
    try:
        model = build(case)
    except Exception as error:
        return {"end": "not built", "why": _said(error)}
    before, why = [], f"no inputs are made for {model.main_input_name}"
    for number, given in enumerate(inputs(model, 1)):
        try:
            before = _run(model, given)
        except Exception as error:
            why = _said(error) if number == 0 else why
            continue
        if before:
            break
    if not before:
        return {"end": "not run", "why": why}
    if not _same(before, _run(model, given)) or not all(x.isfinite().all() for x in before):
        return {"end": "not run", "why": "its outputs are random, or not finite"}
    others = next(other for place, other in enumerate(inputs(model, 2)) if place == number)
    unseen, state = _run(model, others), model.state_dict().keys()
    able = uses(model, given, before)
    try:
        report = spheret.convert(model, start="exact", example_inputs=given)[1]
    except ConversionError as error:
        if not _same(before, _run(model, given)) or model.state_dict().keys() != state:
            return {"end": "wrong", "why": "a refusal has changed the model"}
        return {"end": "refused", "why": str(error)}
    except Exception as error:
        return {"end": "crashed", "why": _said(error), "trace": traceback.format_exc()[-2000:]}
    try:
        gap = _gap(unseen, _run(model, others))
        used = use(model, given, able)
        spheret.revert(model)
    except Exception as error:
        return {"end": "crashed", "why": _said(error), "trace": traceback.format_exc()[-2000:]}
    if not _same(before, _run(model, given)) or model.state_dict().keys() != state:
        return {"end": "wrong", "why": "revert does not give the original back"}
    if not gap <= TOLERANCE:
        return {"end": "wrong", "why": f"other inputs differ by {gap:.1e}"}
    if "why" in used:
        return {"end": "wrong", **used}
    sums = [len(report.converted), len(report.left)]
    return {"end": "exact", "gap": max(gap, report.difference), "converted": sums[0], "left": sums[1], **used}


def in_fork(case: Case, trial: Callable[[Case], dict[str, Any]] | None = None) -> dict[str, Any]:
    """The outcome of one case, in a fork with limits. What ends the fork is an outcome, too.

    trial: what is tried there; by default a conversion.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            # beyond what the process that forked holds, which may have run other tests before
            limit = MEMORY + int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            signal.setitimer(signal.ITIMER_PROF, COMPUTING)
            signal.alarm(WAITING)
            try:
                outcome = (trial or attempt)(case)
            except Exception:
                # an error of this file, or of the model where it has worked before
                outcome = {"end": "crashed", "why": "outside of the trial", "trace": traceback.format_exc()[-2000:]}
            os.write(writes, json.dumps(outcome).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        text = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcome = json.loads(text) if text else {"end": "not run", "why": f"took too long or too much (exit code {code})"}
    return {**case._asdict(), **outcome}


def prepare() -> None:
    """What every fork needs, imported once."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in ("modeling_utils", "models.llama.modeling_llama", "models.mixtral.modeling_mixtral"):
        importlib.import_module(f"transformers.{name}")
