"""`spheret inspect`: a run, or a model that transformers has saved, on windows of text in its tokens."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spheret.conversion import position, steps
from spheret.data import Data, open_named, refuse_output_among_text
from spheret.model.gpt import GPT
from spheret.observe.inspect.tables import bound_sentences, print_jacobians, print_sublayers, sentences
from spheret.observe.inspection import Inspection, Tick, call, inspect
from spheret.observe.jacobians import float64_twin, measure_jacobians
from spheret.observe.observer import own_logit_and_loss
from spheret.observe.records import Event, EventKind
from spheret.runs.layout import INSPECT
from spheret.runs.run import Run, is_run, open_run
from spheret.support import files
from spheret.support.documents import Document, Record
from spheret.support.errors import need, refusing
from spheret.support.machine import few_threads, resolve_device
from spheret.support.meter import Meter
from spheret.support.ranges import check_counts

if TYPE_CHECKING:
    # importing the hub imports transformers, which takes seconds: a run does not need it
    from spheret.hub.open import SavedModel

# the windows of a saved model are no longer than this, whatever it can take
BLOCK = 256
# the Jacobians are taken at so many tokens of the first window, in which of other people's models there are fewer:
# their branches run once per token and direction
TOKENS, FEW = 8, 32


class InspectRecord(Record):
    """inspect.json: one model, or two."""

    runs: list[Inspection]
    format: str = "spheret-inspect"
    version: int = 2


INSPECTIONS = Document(InspectRecord, "inspect", "inspect the run again")


class Subject:
    """A model with the text that it is inspected on.

    Args:
        opened: a run or a saved model.
        step: the step of a run's checkpoint.
        windows: how many windows of text.
        data: other data than the run's.
        device: where the model goes.
    """

    def __init__(
        self, opened: Run | SavedModel, step: int | None, windows: int, data: str | None, device: str
    ) -> None:
        self.run = opened if isinstance(opened, Run) else None
        self.name, self.step, place = opened.name, step, resolve_device(device)
        if place.type == "mps":
            raise ValueError("--device mps has no float64 arithmetic, which this command needs: use --device cpu.")
        self.model: nn.Module
        if isinstance(opened, Run):
            self.model, saved = opened.load(step, place)
            self.step = saved.step
            for name, x in self.model.state_dict().items():
                if not x.isfinite().all():
                    raise ValueError(
                        f"checkpoint step-{saved.step} of {opened.path} has NaN or infinity in {name}, so it cannot "
                        "be inspected: take an earlier checkpoint."
                    )
            self.data, block = data_of(opened, data), self.model.config.block
        else:
            from spheret.hub import open as hub

            self.model = open_model(opened, place)
            self.data = hub.open_text(data or "sotu", opened.tokenizer, opened.tokenizer_spec, quiet=False)
            config: Any = self.model.config
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            longest = getattr(text, "max_position_embeddings", None)
            block = min(BLOCK, longest) if isinstance(longest, int) and longest > 0 else BLOCK
        x, y = (ids.to(place) for ids in validation_windows(self.data, block, windows))
        self.x, self.y = (x, y) if isinstance(opened, Run) else with_first_tokens(opened, x, y)

    def inspect(self, quiet: bool = True) -> Inspection:
        """One observation of the model."""
        with Meter(f"inspect {self.name}", quiet) as meter:
            found = inspect(self.model, self.x, self.y, _counter(meter))
        found.name, found.checkpoint = self.name, self.step
        if self.run is None:
            if steps(self.model):
                config: Any = self.model.config
                found.scheme = f"{config.spheret['scheme']}, t = {position(self.model):g}"
            return found
        assert isinstance(self.model, GPT)
        found.scheme = self.model.config.scheme
        found.own_logit = own_logit_and_loss(self.model, self.x, self.y)[0]
        # of a run that began with weights of its own, at its first update
        first = next(iter(self.run.metrics()), None)
        found.start = None if first is None else first.start
        return found

    def print_jacobians(self, label: str) -> None:
        """Print the Jacobians at tokens that are spread over the first window, or why there are none."""
        tokens = self.x[:1] if self.run is not None else self.x[:1, :FEW]
        positions = torch.linspace(0, tokens.shape[1] - 1, TOKENS, device=tokens.device).long().unique()
        model: Any = self.model
        width = model.config.width if isinstance(model, GPT) else model.get_input_embeddings().embedding_dim
        try:
            twin = float64_twin(model)
            with few_threads(width), Meter(f"Jacobians of {label}") as meter:
                kinds, measured, paper = measure_jacobians(twin, tokens, positions, _counter(meter))
        except ValueError as error:
            if self.run is not None:
                raise
            print(f"{label}: --jacobians: {error}")
            return
        origin = "" if self.step is None else f", step {self.step}"
        title = f"{label}{origin}: Jacobians at {len(positions)} tokens; each number is the worst token's"
        print_jacobians(title, kinds, measured, paper)
        for sentence in bound_sentences(measured, paper):
            print(f"{label}: {sentence}")


def _counter(meter: Meter) -> Tick:
    return lambda done, total: meter.show(f"{done} of {total} sublayers", done / total)


def inspect_command(
    run: str,
    other: str | None = None,
    /,
    step: int | None = None,
    windows: int = 8,
    data: str | None = None,
    device: str = "cpu",
    out: str | None = None,
    jacobians: bool = False,
) -> int:
    """Print the dynamics of a model's stream, or of two models side by side.

    Args:
        run: a run directory, into which inspect.json is written, or a saved transformers decoder.
        other: a second run or saved model to compare with the first.
        step: the step of a run's checkpoint; by default the newest.
        windows: how many windows of the validation split are examined.
        data: other data: a prepared directory, the name of a corpus, or text; for a saved model the default is sotu.
        device: cpu or cuda; cpu is the default because norms, ranks and angles are taken in float64.
        out: another directory to write to; for a saved model the default is runs/inspect-NAME.
        jacobians: also print the singular values of every sublayer's Jacobian at a few tokens, and the paper's
            bounds on them.
    """
    check_counts(windows=windows)
    check_counts(0, step=step)
    if out:
        files.check_output_directory("--out", Path(out).expanduser())
    opened = [open_run_or_model(path) for path in (run, other) if path is not None]
    runs = [one for one in opened if isinstance(one, Run)]
    if step is not None and not runs:
        raise ValueError(f"--step is a checkpoint of a run, and {run} holds one model: leave --step out.")
    for own in runs if jacobians else ():
        if not (scheme := own.model_config.build_scheme()).one_stream:
            raise ValueError(
                f"--jacobians is for schemes with one stream, and {scheme.name} carries more than one: leave it out. "
                "spheret inspect measures the rest of any scheme."
            )
    directory = opened[0].path if isinstance(opened[0], Run) else Path("runs") / f"inspect-{opened[0].name}"
    directory = Path(out).expanduser() if out else directory
    files.check_results("--out" if out else "the output", directory, INSPECT)
    if data is not None:
        refuse_output_among_text(data, directory)
    # whatever goes wrong with someone else's model is said of that model. A run is ours
    foreign = next((one.name for one in opened if not isinstance(one, Run)), None)
    remedy = "give another model"
    with refusing(f"{foreign} cannot be inspected", remedy, whole=True) if foreign is not None else nullcontext():
        subjects = [Subject(one, step, windows, data, device) for one in opened]
        found = [subject.inspect(quiet=False) for subject in subjects]
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        names = [f"{name} ({i})" for i, name in enumerate(names, start=1)]
    models = dict(zip(names, found, strict=True))
    directory.mkdir(parents=True, exist_ok=True)
    INSPECTIONS.write(directory / INSPECT, InspectRecord(runs=found))
    print_sublayers(models)
    for label, inspection in models.items():
        for sentence in sentences(inspection):
            print(f"{label}: {sentence}")
    for label, one in zip(models, opened, strict=True):
        event = failure_of(one) if isinstance(one, Run) else None
        if event is not None:
            print(f"{label}: {event.kind} at step {event.step}: {event.sentence}. What helps: {event.remedy}.")
    for label, subject in zip(models, subjects, strict=True) if jacobians else ():
        subject.print_jacobians(label)
    print(f"Wrote {directory / INSPECT}.")
    return 0


def failure_of(run: Run) -> Event | None:
    """The event of a run that diverged, met a value that is not finite, or collapsed: the first of the worst kind."""
    lines = run.metrics()
    kinds: tuple[EventKind, ...] = ("diverged", "not finite", "collapsed")
    events = (line.event(kind) for kind in kinds for line in lines)
    return next((event for event in events if event is not None), None)


def open_run_or_model(path: str) -> Run | SavedModel:
    """A run directory, or a directory that transformers has saved."""
    directory = Path(path).expanduser()
    if directory.is_dir() and not is_run(directory):
        from spheret.hub import open as hub

        if hub.is_saved_model(directory):
            return hub.open_decoder(directory)
    return open_run(path)


def data_of(run: Run, name: str | None) -> Data:
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


def open_model(saved: SavedModel, place: torch.device) -> nn.Module:
    """A saved decoder in float32. One that does not predict the next token is an error."""
    from spheret.hub.open import check_vocabulary, load_decoder

    model = load_decoder(saved, torch.float32, place)
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
