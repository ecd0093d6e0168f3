"""`inspect` of models that transformers has saved, and what `certify` opens them with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spheret.analysis.dynamics import dynamics
from spheret.analysis.foreign.decoder import ForeignDecoder
from spheret.analysis.foreign.text import open_text, with_first_tokens
from spheret.analysis.inputs import float64_device, validation_windows
from spheret.analysis.inspect_json import InspectedRun, inspected_sublayers
from spheret.data import Data
from spheret.runs.run import Run, is_run, open_run
from spheret.support.errors import refusing
from spheret.support.meter import Meter

if TYPE_CHECKING:
    # importing the hub imports transformers, which takes seconds: a run does not need it
    from spheret.hub.open import SavedModel

# the windows of a model are no longer than this, whatever it can take
BLOCK = 256


def is_saved_model(path: str | Path) -> bool:
    """Whether a directory holds a model of transformers, or one in another format, and is not a run."""
    directory = Path(path).expanduser()
    if not directory.is_dir() or is_run(directory):
        return False
    from spheret.hub import open as hub

    return hub.is_saved_model(directory)


def open_run_or_model(path: str) -> Run | SavedModel:
    """A run directory, or a directory that transformers has saved."""
    if not is_saved_model(path):
        return open_run(path)
    from spheret.hub.open import open_decoder

    return open_decoder(path)


def boundary(what: str, *opened: Run | SavedModel) -> AbstractContextManager[None]:
    """A block in which whatever goes wrong with someone else's model is said of that model. A run is ours."""
    foreign = [one.name for one in opened if not isinstance(one, Run)]
    return refusing(f"{foreign[0]} {what}", "give another model", whole=True) if foreign else nullcontext()


def output_directory(command: str, opened: Run | SavedModel, out: str | None) -> Path:
    """Where a command writes: what was asked for, the run, or for someone else's model a directory below runs/."""
    if out:
        return Path(out).expanduser()
    return opened.path if isinstance(opened, Run) else Path("runs") / f"{command}-{opened.name}"


def block_of(decoder: ForeignDecoder) -> int:
    """The tokens per window: BLOCK, or fewer if the model takes no more."""
    config: Any = decoder.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text, "max_position_embeddings", None)
    return min(BLOCK, longest) if isinstance(longest, int) and longest > 0 else BLOCK


def open_saved(
    saved: SavedModel, data: str | None, dtype: torch.dtype, device: str, quiet: bool
) -> tuple[ForeignDecoder, Data]:
    """The saved model, and data in its tokens."""
    from spheret.hub.loading import load_decoder

    tokenizer = saved.tokenizer
    decoder = ForeignDecoder(load_decoder(saved, dtype, float64_device(device)))
    rows = decoder.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"the tokenizer of {saved.path} has {tokenizer.vocab_size:,} tokens and the model's embedding has "
            f"{rows:,} rows: put the tokenizer there that the model was trained with."
        )
    return decoder, open_text(saved, data, quiet)


def inspect_saved(
    saved: SavedModel, windows: int = 8, data: str | None = None, device: str = "cpu", quiet: bool = True
) -> InspectedRun:
    """The dynamics of a saved model, in the form of `inspect_run`."""
    decoder, source = open_saved(saved, data, torch.float32, device, quiet)
    block = block_of(decoder)
    span = max(1, min(block, source.tokens("val") - 1))
    x, y = on_device(saved, decoder, *validation_windows(source, block, windows * span))
    with Meter(f"inspect {saved.name}", quiet) as meter:
        measured = dynamics(decoder, x, y, meter.counter(len(decoder.kinds), "sublayers"))
    sublayers = inspected_sublayers(measured, [None] * len(decoder.kinds))
    for record, name in zip(sublayers, decoder.names, strict=True):
        record.module = name
    return InspectedRun(
        run=saved.name,
        model=type(decoder.model).__name__,
        scheme=decoder.scheme,
        checkpoint=None,
        windows=windows,
        loss=measured.loss,
        entry_norm=measured.entry_norm,
        sublayers=sublayers,
        inactive=measured.inactive,
        angular_distance=measured.angular_distance,
        training=[],
    )


def on_device(saved: SavedModel, decoder: ForeignDecoder, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets where the model is, each window begun as the model expects it."""
    place = next(decoder.parameters()).device
    return with_first_tokens(saved, x.to(place), y.to(place))
