"""The one opener of models that transformers has saved.

A model is read by transformers' own `from_pretrained(use_safetensors=True, trust_remote_code=False)`. What that would
follow to a pickle, to another directory or to another model is refused before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from spheret.conversion import convert
from spheret.conversion.attach import NAME
from spheret.data import Data, open_named
from spheret.data.shards import MANIFEST, TOKENIZER, read_tokenizer
from spheret.data.tokenizers import JSONTokenizer, Tokenizer
from spheret.data.tokenizers import load as load_tokenizer
from spheret.hub.tokenizer_files import built_name
from spheret.support.cache import cache_directory
from spheret.support.documents import MOST_BYTES, read_bytes
from spheret.support.errors import need, refusing, shortened
from spheret.support.files import directory_written_whole

CONFIG, WEIGHTS, INDEX, ADAPTER = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json",
)  # fmt: skip
# the model type of an export of spheret, and the entry that a conversion leaves in config.json
OWN = "spheret"
_REMEDY = "save the model again"


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
def written(target: Path) -> Iterator[Path]:
    """A new directory for what transformers writes, which takes the place of `target` at the end.

    The target is complete afterwards, or as it was if something failed.
    """
    with directory_written_whole(target) as partial, quietly():
        try:
            yield partial
        except SafetensorError as error:
            # the error of a full disk is not an OSError
            raise OSError(
                f"{target} cannot be written ({error}): make room, and run the same command again."
            ) from None


def is_saved_model(path: str | Path) -> bool:
    """Whether a directory holds a model of transformers, and is not a run."""
    directory = Path(path).expanduser()
    if any((directory / name).exists() for name in (WEIGHTS, INDEX, ADAPTER)):
        return True
    try:
        return "model_type" in read_json(directory / CONFIG)
    except (OSError, ValueError):
        # open_run says what is wrong with it
        return False


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that transformers has written."""
    with refusing(f"{path} is damaged", _REMEDY):
        document = json.loads(read_bytes(path, MOST_BYTES, _REMEDY, follow=True))
        if not isinstance(document, dict):
            raise TypeError("it holds no JSON object")
    return document


class SavedModel:
    """A directory that transformers has saved, or a name on the hub. Opening it reads JSON only.

    Args:
        source: the directory, or a name on the hub.
    """

    def __init__(self, source: str | Path) -> None:
        self.given, self.path = str(source), _located(source)
        if (self.path / ADAPTER).exists():
            # transformers would load the model that it names, from anywhere
            raise ValueError(
                f"{self.path} holds an adapter of PEFT ({ADAPTER}), which is a part of a model: merge it into its "
                "model (merge_and_unload), and save that."
            )
        if not (self.path / CONFIG).exists():
            raise FileNotFoundError(
                f"{self.path} has no {CONFIG}: give a directory that transformers' save_pretrained has written."
            )
        self.config = read_json(self.path / CONFIG)
        self.kind = str(self.config.get("model_type"))

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def is_converted(self) -> bool:
        return isinstance(self.config.get(OWN), dict)

    @property
    def architecture(self) -> str:
        """The class that was saved, as config.json names it; without that, the model type."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else self.kind

    def parts(self) -> list[Path]:
        """The files that hold the weights: one, or those that the index names, which must lie beside it."""
        if (self.path / WEIGHTS).exists():
            return [self.path / WEIGHTS]
        if not (self.path / INDEX).exists():
            raise FileNotFoundError(
                f"{self.path} has no {WEIGHTS}, and pickles are never read: save the model with save_pretrained, "
                "which writes safetensors."
            )
        with refusing(f"{self.path / INDEX} is damaged", _REMEDY):
            names = {str(name) for name in read_json(self.path / INDEX)["weight_map"].values()}
        for name in names:
            # transformers would unpickle other files, and follow a path
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(
                    f"{self.path / INDEX} names {shortened(repr(name))}: weights are read only from .safetensors "
                    "files beside it."
                )
        return [self.path / name for name in sorted(names)]

    @cached_property
    def tokenizer_file(self) -> bytes | None:
        """The bytes of the tokenizer.json beside the weights."""
        path = self.path / TOKENIZER
        return read_tokenizer(path.resolve()) if path.exists() else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights. One that gives the ids of `bytes` or `gpt2` is that."""
        content = self.tokenizer_file
        if content is None:
            raise FileNotFoundError(
                f"{self.path} has no {TOKENIZER}, so its text is unknown: save the model's tokenizer beside it "
                "(AutoTokenizer.from_pretrained(...).save_pretrained)."
            )
        with refusing(f"{self.path / TOKENIZER} cannot be used", _REMEDY):
            # named ones fit data that was prepared with them
            name = built_name(content)
            return JSONTokenizer(content, TOKENIZER) if name is None else load_tokenizer(name)

    @property
    def tokenizer_spec(self) -> str:
        """The tokenizer as `spheret.data` names it: bytes, gpt2, or the path of the file."""
        return self.tokenizer.name if self.tokenizer.file is None else str(self.path / TOKENIZER)


def _located(source: str | Path) -> Path:
    """The directory of a model, or of its name on the hub. No code and no pickle is fetched."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.jinja", "*.safetensors"]
        return Path(snapshot_download(str(source), cache_dir=cache_directory() / "hub", allow_patterns=wanted))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(
            f"{source} is not a directory on this machine, and could not be loaded from the Hugging Face hub "
            f"({reason}): give a directory with {CONFIG} and {WEIGHTS}."
        ) from None


def check_vocabulary(tokenizer: Tokenizer, rows: int, source: str | Path) -> None:
    """Raise if a tokenizer has more tokens than the embedding of a model has rows."""
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} tokens and the embedding of {source} has "
            f"{rows:,} rows: give --tokenizer, or put the tokenizer there that the model was trained with."
        )


def open_text(name: str, tokenizer: Tokenizer, spec: str, quiet: bool, out: Path | None = None) -> Data:
    """A corpus by name, a text, or a prepared directory, in the tokens of a model. spec: how the data names them."""
    prepared = (Path(name).expanduser() / MANIFEST).exists()
    data = open_named(name, None if prepared else spec, quiet, out)
    if data.manifest.tokenizer.sha256 != tokenizer.sha256:
        raise ValueError(
            f"--data {name} was prepared with the tokenizer {data.manifest.tokenizer.name!r}, which is not the "
            f"model's: give text, or prepare it with --tokenizer {spec}."
        )
    return data


def open_decoder(path: str | Path) -> SavedModel:
    """A saved decoder to be analysed. What cannot be is refused by its config.json."""
    saved = SavedModel(path)
    if saved.kind == OWN:
        raise ValueError(f"{saved.path} is an export of spheret: make a run of it with spheret import.")
    if saved.config.get("is_encoder_decoder"):
        raise ValueError(
            f"{saved.path} is an encoder with a decoder ({shortened(saved.kind)}), and this takes decoders only."
        )
    return saved


def config_of(saved: SavedModel) -> Any:
    """transformers' config of a saved model."""
    with quietly(), refusing(f"transformers cannot load {saved.given}", _REMEDY):
        config = need("transformers", "hub").AutoConfig.from_pretrained(
            saved.path, local_files_only=True, trust_remote_code=False
        )
        # these may name kernels on the hub, which are code
        config._attn_implementation = config._experts_implementation = None
    return config


def _from_pretrained(saved: SavedModel, kind: Any, config: Any, options: dict[str, Any]) -> Any:
    """The model in a class of transformers. A tensor that is missing is an error.

    options: what transformers' `from_pretrained` takes, e.g. dtype or device_map.
    """
    # an index is judged before transformers follows it, and a size before memory is taken for it
    held, parts = 0, saved.parts()
    with refusing(f"{saved.path} is damaged", _REMEDY):
        for path in parts:
            with safe_open(path, "pt") as file:
                held += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    with quietly(), refusing(f"transformers cannot load {saved.given}", _REMEDY), torch.device("meta"):
        wanted = sum(parameter.numel() for parameter in kind(config).parameters())
    # a file that lacks some tensors gets the sentence that names one
    if wanted > 2 * held:
        raise ValueError(
            f"the {CONFIG} of {saved.given} describes {wanted:,} parameters, and its files hold {held:,} numbers: "
            f"{_REMEDY}."
        )
    words = {**options, "config": config, "local_files_only": True}
    words |= {"use_safetensors": True, "trust_remote_code": False}
    with quietly(), refusing(f"transformers cannot load {saved.given}", _REMEDY):
        model, info = kind.from_pretrained(
            saved.path, ignore_mismatched_sizes=True, output_loading_info=True, **words
        )
    # transformers only warns, and continues with random numbers
    if wrong := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
        raise ValueError(
            f"{saved.given} lacks {shortened(wrong[0])}, or has it in a wrong shape ({len(wrong)} in all), so that "
            "it would be random numbers: save the whole model again."
        )
    return model


def load_causal(saved: SavedModel, config: Any, **options: Any) -> Any:
    """A causal language model in transformers' class for it, or in ours for an export."""
    if saved.is_converted:
        raise ValueError(
            f"{saved.given} is converted already: give the model that it was made of, or load it in Python "
            "(spheret.hub.load)."
        )
    kind = need("transformers", "hub").MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None or saved.architecture not in (kind.__name__, saved.kind):
        raise ValueError(
            f"{saved.given} is a {shortened(saved.architecture)}, which does not predict the next token: give a "
            "causal language model (ForCausalLM, LMHeadModel)."
        )
    return _from_pretrained(saved, kind, config, options)


def load_decoder(
    saved: SavedModel, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> nn.Module:
    """A decoder, converted or not, in evaluation mode, with attention in plain torch operations."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    if saved.is_converted:
        model = _load_converted(saved, None, options)
    else:
        config = config_of(saved)
        # dropout is off in evaluation mode, but a call of its function would hide where a branch ends
        for name, value in list(vars(config).items()):
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        model = load_causal(saved, config, **options)
    return model.to(device, dtype).eval().requires_grad_(False)


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
    with refusing(f"{saved.path / CONFIG} does not say how the model was converted", _REMEDY):
        scheme, chosen = str(entry["scheme"]), dict(entry["options"])
    # a class of transformers, or one that was registered, as our runs' class is
    registered = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind = getattr(transformers, saved.architecture, registered)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model or kind.__name__ != saved.architecture:
        raise ValueError(
            f"transformers has no model {shortened(saved.architecture)}, which the config in {saved.given} names."
        )
    model = _from_pretrained(saved, kind, config, options)
    # the start only says how the step sizes were found; they are read from the file
    convert(model, scheme, start="plain", example_inputs=example_inputs, **chosen)
    model.config.spheret = entry
    _load_steps(saved, model)
    return model


def _load_steps(saved: SavedModel, model: Any) -> None:
    """Read what the conversion has added."""
    wanted = {name: x for name, x in model.state_dict().items() if f".{NAME}." in f".{name}"}
    own_names = _saved_names(model, list(wanted))
    found: dict[str, Tensor] = {}
    for path in saved.parts():
        with safe_open(path, "pt") as file:
            found |= {own_names[name]: file.get_tensor(name) for name in file.keys() if name in own_names}  # noqa: SIM118
    if wrong := sorted(name for name, x in wanted.items() if name not in found or found[name].shape != x.shape):
        raise ValueError(
            f"the model in {saved.given} lacks {wrong[0]}, or has it in a wrong shape ({len(wrong)} in all): "
            f"{_REMEDY}."
        )
    model.load_state_dict(found, strict=False)


def _saved_names(model: Any, names: list[str]) -> dict[str, str]:
    """The model's own names by those that they may have in a file. transformers renames some when it saves them."""
    from transformers.core_model_loading import revert_weight_conversion

    own_names = {name: name for name in names}
    numbers = {name: torch.tensor(number) for number, name in enumerate(names)}
    # a model that was not loaded is saved by other rules than one that was
    for rules in (None, model.__dict__.pop("_weight_conversions", None)):
        if rules is not None:
            model._weight_conversions = rules
        own_names |= {name: names[int(number)] for name, number in revert_weight_conversion(model, numbers).items()}
    return own_names
