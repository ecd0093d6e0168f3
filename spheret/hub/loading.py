"""Saved models in the classes of transformers, by its own loader.

transformers renames and converts tensors as it loads and saves them, so nothing else reads its files well. But it
would also run code, follow pickles and adapters, and allocate whatever config.json asks for. So all that it reads is
opened by `SavedModel` first, and what it builds is counted while it has no memory yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from spheret.conversion import convert
from spheret.conversion.attach import NAME
from spheret.hub.open import CONFIG, OWN, SavedModel
from spheret.support.documents import MOST_BYTES, read_bytes
from spheret.support.errors import need, refusing, shortened
from spheret.support.machine import check_bytes, memory_bytes

_REMEDY = "save the model again"
# no model in use has more modules; one that asks for more would be built for hours
MOST_MODULES = 200_000
# keys of config.json, at any depth of it, that say how many layers there are, and how many there are of anything
_LAYERS = re.compile(r"(n|num)_(\w+_)?(layers?|blocks?|stages?|groups?)|(\w+_)?layers|depth")
_COUNTS = re.compile(r"(n|num)_\w+|\w+_num")
# a layer has tensors, and a count is the length of one. Some configs count what was not saved: so much costs little
_FEW_LAYERS, _SMALL_COUNT = 1000, 1 << 20


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers' progress bars and its warnings."""
    log = need("transformers", "hub").utils.logging
    shown, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shown:
            log.enable_progress_bar()


@contextmanager
def _bounded(what: str) -> Iterator[None]:
    """Raise while a model is built in this block, if it gets too many modules or tensors for this machine's memory.

    transformers builds a model on the meta device, where tensors have no memory, and then loads it.
    """
    modules = size = 0
    cpu = torch.device("cpu")
    most = memory_bytes(cpu)

    def count_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > MOST_MODULES:
            raise ValueError(f"its {CONFIG} asks for more than {MOST_MODULES:,} modules")

    def count_tensor(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal size
        if tensor is not None and tensor.is_meta:
            size += tensor.numel() * tensor.element_size()
            if most is not None and size > most:
                check_bytes(size, cpu, what, "take a smaller model")

    handles = [
        torch_modules.register_module_module_registration_hook(count_module),
        torch_modules.register_module_parameter_registration_hook(count_tensor),
        torch_modules.register_module_buffer_registration_hook(count_tensor),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_counts(saved: SavedModel) -> None:
    """Refuse layers that no tensors are for, and counts beyond any tensor, before transformers makes lists of it."""
    layers = max(len(saved.forms), _FEW_LAYERS)
    longest = max([len(saved.forms), _SMALL_COUNT, *(max(shape, default=1) for _, shape in saved.forms.values())])
    for key, value, listed in _numbers(saved.config):
        is_layers = _LAYERS.fullmatch(key) is not None
        most = layers if is_layers and not listed else longest
        if value > most and (listed or is_layers or _COUNTS.fullmatch(key)):
            raise ValueError(
                f"{saved.path / CONFIG} has {key} = {shortened(str(value))}, and the weights are {len(saved.forms)} "
                f"tensors, none longer than {longest:,}: save the model again."
            )


def _numbers(part: Any, key: str = "", listed: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Every whole number at any depth of a config: the key it stands under, and whether it stands in a list there."""
    if isinstance(part, dict):
        for name, value in part.items():
            yield from _numbers(value, name, False)
    elif isinstance(part, list):
        for value in part:
            yield from _numbers(value, key, True)
    elif isinstance(part, int):
        yield key, part, listed


def config_of(saved: SavedModel) -> Any:
    """transformers' config of a saved model, after all files that its loader would read were looked at."""
    transformers = need("transformers", "hub")
    saved.refuse_adapter()
    _check_counts(saved)
    for path in saved.path.glob("*config*.json"):
        if (file := saved.file(path.name)) is not None:
            read_bytes(file, MOST_BYTES, "save the model again", follow=True)
    if saved.kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{saved.path} is a {shortened(repr(saved.kind))}, which transformers {transformers.__version__} does "
            "not know. Code of a model's own is never run."
        )
    with quietly(), refusing(f"transformers cannot load {saved.given}", _REMEDY):
        config = transformers.AutoConfig.from_pretrained(saved.path, local_files_only=True, trust_remote_code=False)
        # a file does not choose the kernels of this machine
        config._attn_implementation = config._experts_implementation = None
    return config


def load_as(saved: SavedModel, kind: Any, config: Any, **options: Any) -> Any:
    """The model in a class of transformers. A tensor that is missing is an error, and no code of the directory runs.

    options: what transformers' `from_pretrained` takes, e.g. dtype or device_map.
    """
    words = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    what = f"transformers cannot load {saved.given}"
    with quietly(), refusing(what, _REMEDY), _bounded(saved.given):
        model, info = kind.from_pretrained(
            saved.path, config=config, output_loading_info=True, **{**options, **words}
        )
    # transformers only warns, and goes on with random numbers
    if wrong := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
        raise ValueError(
            f"{saved.given} lacks {shortened(wrong[0])}, or has it in another shape ({len(wrong)} in all), so that "
            "it would be random numbers: save the whole model again."
        )
    return model


def load_decoder(
    saved: SavedModel, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> nn.Module:
    """A decoder, converted or not, in evaluation mode, with attention in plain torch operations."""
    transformers = need("transformers", "hub")
    config = config_of(saved)
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    # BERT and its kin have a causal head too, which their saved encoders do not use
    if saved.kind not in kinds or "ForMaskedLM" in saved.architecture or "ForSequence" in saved.architecture:
        raise ValueError(
            f"{saved.path} is a {shortened(saved.architecture)}, which does not predict the next token: this takes "
            "decoders with a language model's head (ForCausalLM, LMHeadModel)."
        )
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    if saved.is_converted:
        model = _load_converted(saved, None, options)
    else:
        _without_dropout(config)
        model = load_as(saved, transformers.AutoModelForCausalLM, config, **options)
    for name, x in model.state_dict().items():
        if not x.isfinite().all():
            raise ValueError(
                f"{saved.path} has NaN or infinity in {name}, so it cannot be analysed: give another model."
            )
    return model.to(device, dtype).eval().requires_grad_(False)


def _without_dropout(config: Any) -> None:
    """Dropout is off in evaluation mode, but a call of its function would hide where a branch ends."""
    for name, value in list(vars(config).items()):
        if ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def load(directory: str | Path, example_inputs: Any = None, **options: Any) -> nn.Module:
    """The converted model in a directory that its `save_pretrained` has written, at the same position t.

    Args:
        directory: also a name on the Hugging Face hub.
        example_inputs: as in `spheret.convert`, for models that need it there.
        options: what transformers' `from_pretrained` takes, e.g. dtype or device_map.
    """
    return _load_converted(SavedModel(directory), example_inputs, options)


def _load_converted(saved: SavedModel, example_inputs: Any, options: dict[str, Any]) -> Any:
    transformers = need("transformers", "hub")
    if not saved.is_converted:
        raise ValueError(
            f"the model in {saved.given} was not saved as a converted one: load it with transformers, and convert it."
        )
    config = config_of(saved)
    entry = getattr(config, OWN)
    delattr(config, OWN)
    name = saved.architecture
    # a class of transformers, or one that was registered, as that of our runs
    registered = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind = getattr(transformers, name, registered)
    if not _is_model(kind) or kind.__name__ != name:
        raise ValueError(f"transformers has no class {shortened(name)}, which the config in {saved.given} names.")
    model = load_as(saved, kind, config, **options)
    scheme, chosen = entry.get("scheme"), entry.get("options")
    if not isinstance(scheme, str) or not isinstance(chosen, dict):
        raise ValueError(f"{saved.path / CONFIG} does not say how the model was converted: save it again.")
    # the start only says how the step sizes were found; they are read from the file
    convert(model, scheme, start="plain", example_inputs=example_inputs, **chosen)
    model.config.spheret = entry
    _load_steps(saved, model)
    return model


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, need("transformers", "hub").PreTrainedModel)


def _load_steps(saved: SavedModel, model: Any) -> None:
    """Read what the conversion has added. transformers may have renamed it, as it does with weights."""
    wanted = {name: x for name, x in model.state_dict().items() if f".{NAME}." in f".{name}"}
    homes: dict[str, str] = {}
    for names in _saved_names(model, list(wanted)):
        homes |= {saved_name: name for saved_name, name in names.items() if saved_name in saved.forms}
    if missing := sorted(wanted.keys() - homes.values()):
        raise ValueError(f"the model in {saved.given} lacks {missing[0]} ({len(missing)} missing): save it again.")
    found = {homes[name]: tensor for _, name, tensor in saved.tensors() if name in homes}
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"the model in {saved.given} has another shape of {name}: save it again.")
    model.load_state_dict(found, strict=False)


def _saved_names(model: Any, names: list[str]) -> Iterator[dict[str, str]]:
    """The names in a file that the model's own names may have there: as they are, or as transformers saves them."""
    yield {name: name for name in names}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        # it renames nothing
        return
    kept = model.__dict__.pop("_weight_conversions", None)
    try:
        # a model that was not loaded is saved by other rules than one that was
        for conversions in (None, kept):
            if conversions is not None:
                model._weight_conversions = conversions
            renamed = revert_weight_conversion(
                model, {name: torch.tensor(number) for number, name in enumerate(names)}
            )
            yield {name: names[int(number)] for name, number in renamed.items()}
    finally:
        if kept is not None:
            model._weight_conversions = kept
