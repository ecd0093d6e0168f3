"""The one opener of models that transformers has saved.

Only regular files of one directory are read: JSON of a bounded size, and safetensors. A name in an index is a file
beside it, and a link does not lead out. `spheret.hub.loading` gives what was opened here to transformers' own loader.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spheret.data.shards import TOKENIZER, read_tokenizer
from spheret.data.tokenizers import JSONTokenizer, Tokenizer
from spheret.data.tokenizers import load as load_tokenizer
from spheret.hub.tokenizer_files import built_name
from spheret.runs import tensors
from spheret.support.cache import cache_directory
from spheret.support.documents import MOST_BYTES, DamagedDocument, check_regular, read_bytes
from spheret.support.errors import refusing, shortened

CONFIG, WEIGHTS, INDEX, ADAPTER = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json",
)  # fmt: skip
# the model type of an export of spheret, and the entry that a conversion leaves in config.json
OWN = "spheret"
# what else belongs to a tokenizer that transformers has saved
BESIDE_TOKENIZER = (
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
# a name on the hub: a repository, or an owner and a repository
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# a file of a model that is split: no path
_PART = re.compile(r"\w[\w.-]*\.safetensors")
# old GPT-2 files keep causal masks among the weights, as bytes or as floats
_MASKS = re.compile(r"(^|\.)attn\.(masked_)?bias$")
# float32 holds every number of these
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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
        raise ValueError(f"{path} is damaged ({shortened(str(error))}): {_REMEDY}.") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} is damaged, it holds no JSON object: {_REMEDY}.")
    return document


def open_decoder(path: str | Path) -> SavedModel:
    """A saved decoder to be analysed. What cannot be is refused by its config.json and its files' names."""
    saved = SavedModel(path)
    saved.refuse_adapter()
    saved.parts()
    if saved.kind == OWN:
        raise ValueError(f"{saved.path} is an export of spheret: make a run of it with spheret import.")
    if saved.config.get("is_encoder_decoder"):
        raise ValueError(
            f"{saved.path} is an encoder with a decoder ({shortened(saved.kind)}), and this takes decoders alone."
        )
    return saved


def _fetched(name: str) -> Path:
    """The directory of a model on the hub, as huggingface_hub keeps it in our cache. No other file is fetched."""
    from huggingface_hub import snapshot_download

    wanted = [CONFIG, TOKENIZER, WEIGHTS, INDEX, "model-*-of-*.safetensors"]
    try:
        return Path(snapshot_download(name, cache_dir=cache_directory() / "hub", allow_patterns=wanted))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(
            f"{name} is not a directory on this machine, and could not be loaded from the Hugging Face hub "
            f"({reason}): give a directory with {CONFIG} and {WEIGHTS}."
        ) from None


def _located(source: str | Path) -> Path:
    """The directory of a model, given that, its weights, or its name on the hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        if path.name != WEIGHTS:
            raise ValueError(f"{path} is not named {WEIGHTS}: put it beside its {CONFIG} under that name.")
        return path.parent
    if not _NAME.fullmatch(str(source)):
        raise FileNotFoundError(f"there is nothing at {source}: give a directory with {CONFIG} and {WEIGHTS}.")
    return _fetched(str(source))


class SavedModel:
    """A directory that transformers has saved, or a name on the hub. Opening it reads its config.json alone.

    Args:
        source: the directory, its model.safetensors, or a name on the hub.
        kinds: the model types that are taken; None takes any.
    """

    def __init__(self, source: str | Path, kinds: Collection[str] | None = None) -> None:
        self.given, self.path = str(source), _located(source)
        if not os.path.lexists(self.path / CONFIG):
            self.refuse_adapter()
            other = _first(self.path, ("*.gguf", "*.safetensors", *_PICKLES))
            raise FileNotFoundError(
                f"{self.path} has no {CONFIG}{f', only {other.name}' if other else ''}: give a directory that "
                "transformers' save_pretrained has written."
            )
        self.config = self.json(CONFIG)
        self.kind = str(self.config.get("model_type"))
        if kinds is not None and self.kind not in kinds:
            raise ValueError(
                f"{self.path} is a {shortened(self.kind)}, and only {' and '.join(kinds)} can be imported."
            )
        if self.config.get("quantization_config") is not None:
            raise ValueError(
                f"{self.path} holds quantised weights, whose rounding hides what they were: save the model in "
                "float32, float16 or bfloat16."
            )

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

    def refuse_adapter(self) -> None:
        """Raise if this is an adapter. transformers would load the model that it names, from anywhere."""
        if os.path.lexists(self.path / ADAPTER):
            raise ValueError(
                f"{self.path} holds an adapter of PEFT ({ADAPTER}), which is a part of a model: merge it into its "
                "model (merge_and_unload), and save that."
            )

    def file(self, name: str) -> Path | None:
        """A regular file of this name in the directory, or None. A link out of the directory is an error."""
        path = self.path / name
        if not os.path.lexists(path):
            return None
        # in huggingface_hub's cache, the files are links to blobs/ of the same model
        cached = self.path.resolve().parent.name == "snapshots"
        room = self.path.resolve().parents[1] if cached else self.path.resolve()
        # unlike Path.resolve, this takes a link to itself
        if not Path(os.path.realpath(path)).is_relative_to(room):
            raise ValueError(f"{path} is a link out of its directory: put the file itself there.")
        try:
            check_regular(path, _REMEDY, follow=True)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is a link to nothing: put the file itself there.") from None
        return path

    def json(self, name: str) -> dict[str, Any]:
        path = self.file(name)
        if path is None:
            raise FileNotFoundError(f"{self.path} has no {name}: copy the whole model.")
        return read_json(path)

    def parts(self) -> list[Path]:
        """The files that hold the weights: one, or those that the index names."""
        whole = self.file(WEIGHTS)
        if whole is not None:
            return [whole]
        if self.file(INDEX) is None:
            raise self._without_weights()
        names = self.json(INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{self.path / INDEX} is damaged, it has no weight_map: {_REMEDY}.")
        parts: dict[str, Path] = {}
        for name in names.values():
            if not isinstance(name, str) or not _PART.fullmatch(name):
                raise ValueError(
                    f"{self.path / INDEX} names {shortened(repr(name))}: weights are read only from .safetensors "
                    "files beside it. Pickles and other directories are never read."
                )
            if name not in parts:
                part = self.file(name)
                if part is None:
                    raise FileNotFoundError(
                        f"{self.path} has no {name}, which its {INDEX} names: copy the whole model."
                    )
                parts[name] = part
        return list(parts.values())

    def _without_weights(self) -> Exception:
        if (quantised := _first(self.path, ("*.gguf",))) is not None:
            return ValueError(
                f"{self.path} holds GGUF ({quantised.name}), whose weights are quantised: give the model's directory "
                "of safetensors."
            )
        other = _first(self.path, _PICKLES)
        return FileNotFoundError(
            f"{self.path} has no {WEIGHTS}{f', only {other.name}' if other else ''}, and pickles are never read: "
            "save the model with save_pretrained, which writes safetensors."
        )

    @cached_property
    def forms(self) -> dict[str, tensors.Form]:
        """The dtype and the shape of every tensor, by name. The numbers are not read."""
        # the links were judged where the file was found
        return {name: form for path in self.parts() for name, form in tensors.forms(path.resolve()).items()}

    def tensors(self) -> Iterator[tuple[Path, str, Tensor]]:
        """The tensors one at a time, each with its file and its name."""
        for path in self.parts():
            for name, tensor in tensors.each(path.resolve()):
                yield path, name, tensor

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Every tensor but GPT-2's masks as float32, which is exact, under its name without the prefix.

        A tensor of another dtype, and one with NaN or infinity, is an error.
        """
        found: dict[str, Tensor] = {}
        for path, name, tensor in self.tensors():
            if _MASKS.search(name):
                continue
            if tensor.dtype not in _DTYPES:
                given = str(tensor.dtype).removeprefix("torch.")
                raise ValueError(
                    f"{path} holds {name} as {given}, and a run holds float32: convert it to float32, float16 or "
                    f"bfloat16 first."
                )
            if not tensor.isfinite().all():
                raise ValueError(f"{path} holds NaN or infinity in {name}: the model is broken, give another.")
            if (short := name.removeprefix(prefix)) in found:
                raise ValueError(f"{path} holds {name}, which another tensor holds too: save the model again.")
            found[short] = tensor.float()
        return found

    def check(self, found: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
        """Raise for tensors that are missing, unexpected or of another shape."""
        problems = {
            "lacks": expected.keys() - found.keys(),
            "has tensors that its config.json does not describe:": found.keys() - expected.keys(),
            "has another shape of": {
                name for name in found.keys() & expected.keys() if tuple(found[name].shape) != expected[name]
            },
        }
        for problem, names in problems.items():
            if names:
                some = ", ".join(sorted(names)[:3])
                raise ValueError(f"{self.path} {problem} {some} ({len(names)} in all): save the whole model again.")

    def sha256(self) -> str:
        """A hash of config.json and of the weights."""
        digest = hashlib.sha256()
        for path in (self.path / CONFIG, *self.parts()):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    @cached_property
    def tokenizer_file(self) -> bytes | None:
        """The bytes of the tokenizer.json beside the weights."""
        path = self.file(TOKENIZER)
        return None if path is None else read_tokenizer(path.resolve())

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
            # named ones are prepared faster, and fit data that was prepared with them
            name = built_name(content)
            return JSONTokenizer(content, TOKENIZER) if name is None else load_tokenizer(name)

    @property
    def tokenizer_spec(self) -> str:
        """The tokenizer as `spheret.data` names it: bytes, gpt2, or the path of the file."""
        return self.tokenizer.name if self.tokenizer.file is None else str(self.path / TOKENIZER)
