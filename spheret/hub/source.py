"""What `spheret import` reads: config.json, tokenizer.json and safetensors of one directory, and nothing else.

transformers' own loader is not used. It follows the names in an index and in adapter_config.json, also to pickles and
to other directories, and it casts weights to the dtype that config.json names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spheret.data.shards import TOKENIZER
from spheret.foreign.saved import read_json
from spheret.runs import tensors
from spheret.support.cache import cache_directory
from spheret.support.documents import check_regular

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
KINDS = ("spheret", "gpt2")
# a name on the hub: a repository, or an owner and a repository
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# a file of a model that is split: no path
_PART = re.compile(r"\w[\w.-]*\.safetensors")
# old GPT-2 files keep causal masks among the weights, as bytes or as floats
_MASKS = re.compile(r"(^|\.)attn\.(masked_)?bias$")
# float32 holds every number of these
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_REMEDY = "save the model again"


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


class Source:
    """A directory that transformers has saved, or a name on the hub. Opening it reads its config.json alone."""

    def __init__(self, source: str | Path, kinds: Collection[str] | None = KINDS) -> None:
        """kinds: the model types that are taken; None takes any."""
        path = Path(source).expanduser()
        if path.is_file():
            if path.name != WEIGHTS:
                raise ValueError(f"{path} is not named {WEIGHTS}: put it beside its {CONFIG} under that name.")
            path = path.parent
        elif not path.exists():
            if not _NAME.fullmatch(str(source)):
                raise FileNotFoundError(
                    f"there is nothing at {source}: give a directory with {CONFIG} and {WEIGHTS}."
                )
            path = _fetched(str(source))
        self.path = path
        self.config = self._json(CONFIG)
        self.kind = self.config.get("model_type")
        if kinds is not None and self.kind not in kinds:
            raise ValueError(f"{path} is a {self.kind}, and only {' and '.join(kinds)} can be imported.")
        if self.config.get("quantization_config") is not None:
            raise ValueError(f"{path} holds quantised weights: save the model in float32, float16 or bfloat16.")

    def file(self, name: str) -> Path | None:
        """A file of this name in the directory, or None. A link that leads out of the directory is an error."""
        path = self.path / name
        if not path.exists() and not path.is_symlink():
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

    def _json(self, name: str) -> dict[str, Any]:
        path = self.file(name)
        if path is None:
            raise FileNotFoundError(f"{self.path} has no {name}: point at a directory that transformers has saved.")
        return read_json(path)

    def parts(self) -> list[Path]:
        """The files that hold the weights: one, or those that the index names."""
        whole = self.file(WEIGHTS)
        if whole is not None:
            return [whole]
        if self.file(INDEX) is None:
            raise FileNotFoundError(
                f"{self.path} has no {WEIGHTS}, and pickles are never read: save the model as safetensors first."
            )
        names = self._json(INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{self.path / INDEX} is damaged, it has no weight_map: save the model again.")
        parts = []
        for name in dict.fromkeys(names.values()):
            if not isinstance(name, str) or not _PART.fullmatch(name):
                raise ValueError(
                    f"{self.path / INDEX} names {name!r}: weights are read only from .safetensors files beside it. "
                    f"Pickles and other directories are never read."
                )
            part = self.file(name)
            if part is None:
                raise FileNotFoundError(f"{self.path} has no {name}, which its {INDEX} names: copy the whole model.")
            parts.append(part)
        return parts

    def _tensors(self) -> Iterator[tuple[Path, str, Tensor]]:
        for path in self.parts():
            # the links were judged where the file was found
            for name, tensor in tensors.each(path.resolve()):
                if not _MASKS.search(name):
                    yield path, name, tensor

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Every tensor as float32, which is exact, under its name without the prefix.

        A tensor of another dtype, and one with NaN or infinity, is an error.
        """
        found: dict[str, Tensor] = {}
        for path, name, tensor in self._tensors():
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
