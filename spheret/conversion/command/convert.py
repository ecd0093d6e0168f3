"""`spheret convert`: from a saved model to a converted one, measured against the same fine-tuning of the original."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import torch
import tyro

from spheret.connections.parse import json_options, options_from_json, parse_options
from spheret.conversion import ConversionReport, convert, revert, steps
from spheret.conversion.checks import Start, spherical_scheme
from spheret.conversion.command.convert_json import (
    CONTROL,
    CONVERSIONS,
    CONVERT,
    CONVERTED,
    Arm,
    ConvertRecord,
    ResidualRecord,
    Settings,
    Starts,
)
from spheret.conversion.command.report import outcome, write_report
from spheret.conversion.command.subject import Subject, open_subject, open_text
from spheret.conversion.command.training import FineTuning, calibration, validation_loss
from spheret.conversion.report import ConvertedSublayer
from spheret.data import Data
from spheret.flags import shown
from spheret.hub.loading import quietly
from spheret.hub.open import SavedModel
from spheret.runs.directory import claimed, explained
from spheret.runs.layout import CHECKPOINTS, CONFIG, LOCK
from spheret.runs.records import Environment
from spheret.runs.run import manifest_sha256
from spheret.support import files, machine
from spheret.support.allocator import keep_freed_memory
from spheret.support.documents import DamagedDocument
from spheret.support.errors import refusing, shortened, unknown
from spheret.support.meter import Meter
from spheret.support.ranges import check_above_zero, check_count, check_counts
from spheret.support.threads import check_threads, most_threads

# the share of the steps over which t moves from 0 to 1
ANNEAL = 0.3
# the rate of step sizes and radius, by that of the weights: they are few, and start where a fit has put them
ALPHA_RATE = 30.0
# batches on which radius and step sizes are fitted
FITTED = 4
# weights, gradients and two moments in float32
BYTES_PER_PARAMETER = 16
LARGEST_SEED = 2**31
# where the model is written before its files get their places
_UNSAVED = ".model"


@tyro.conf.configure(tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction)
def convert_command(
    model: str,
    /,
    data: str,
    out: str,
    steps: int = 300,
    anneal: Annotated[int | None, shown("INT", "0.3 of the steps; 0 unless the start is exact")] = None,
    scheme: str = "proj-spheretnorm",
    start: str = "exact",
    lr: float = 3e-4,
    alpha_lr: Annotated[float | None, shown("FLOAT", "30 times --lr")] = None,
    batch_size: int = 8,
    block: Annotated[int | None, shown("INT", "256, or the model's limit if that is lower")] = None,
    seed: int = 0,
    eval_every: Annotated[int | None, shown("INT", "a tenth of the steps")] = None,
    eval_windows: int = 64,
    tokenizer: Annotated[str | None, shown("STR", "the model's own")] = None,
    device: Annotated[str | None, shown("STR", "the first of cuda, mps, cpu that this machine has")] = None,
    threads: Annotated[int | None, shown("INT", "torch's own")] = None,
    quiet: bool = False,
    set: tuple[str, ...] = (),
) -> int:
    """Convert a trained language model to a spherical scheme, and measure what that costs.

    The model is converted so that it computes the same as before. While it is fine-tuned, the step sizes move from
    each token's own to one per sublayer. The original is fine-tuned on the same batches: that is the control. After a
    kill at any moment, the same command continues bit for bit.

    Args:
        model: a directory that transformers' save_pretrained has written, a run directory, or a name on the Hugging
            Face hub.
        data: text for the fine-tuning: a corpus by name, a file, folder or glob of text, or a prepared directory.
        out: the directory for the converted model, convert.json and the report.
        steps: updates of each fine-tuning.
        anneal: updates over which the step sizes move. The rest is trained under the scheme itself.
        scheme: a spherical scheme.
        start: exact, calibrated or plain.
        lr: the peak of the learning rate, for both fine-tunings.
        alpha_lr: the peak for step sizes and radius.
        batch_size: sequences per update.
        block: tokens per sequence.
        seed: of the order of the batches, and of dropout.
        eval_every: updates between two validation losses. There is a checkpoint after each.
        eval_windows: windows of the validation split that are measured.
        tokenizer: bytes, gpt2 or a path to a tokenizer.json, for a model without its own.
        device: cuda, mps or cpu.
        threads: CPU threads. A continued conversion keeps its number, because it decides the last bits.
        quiet: Print no progress and no table.
        set: An option of the scheme, as option=value.
    """
    check_counts(steps=steps, batch_size=batch_size, block=block, eval_every=eval_every, eval_windows=eval_windows)
    check_counts(0, anneal=anneal)
    check_count("--seed", seed, 0, LARGEST_SEED)
    check_above_zero("--lr", lr, 1.0)
    if alpha_lr is not None:
        check_above_zero("--alpha-lr", alpha_lr, 1.0)
    if start not in get_args(Start):
        raise unknown("start", start, get_args(Start))
    if threads is not None:
        torch.set_num_threads(check_threads("--threads", threads))
    options = parse_options(set)
    spherical_scheme(scheme, start, options)
    place = machine.resolve_device(device)
    path = Path(out).expanduser()
    files.check_output_directory("--out", path)
    # a directory of somebody else's is refused before anything is read
    _existing(path)
    with refusing(f"{model} cannot be converted", "give another model", whole=True):
        subject = open_subject(model, tokenizer)
        text = open_text(data, subject, path, quiet)
    asked = Settings(
        model=model,
        model_sha256=subject.sha256,
        data=data,
        manifest_sha256=manifest_sha256(text),
        scheme=scheme,
        options=json_options(options),
        start=start,  # type: ignore[arg-type]
        steps=steps,
        anneal=_anneal(anneal, steps, start),
        lr=lr,
        alpha_lr=min(1.0, ALPHA_RATE * lr) if alpha_lr is None else alpha_lr,
        batch_size=batch_size,
        block=_block(block, subject),
        seed=seed,
        eval_every=max(1, steps // 10) if eval_every is None else eval_every,
        eval_windows=eval_windows,
    )
    # wrong sizes are errors before any work
    text.loader(asked.block, asked.batch_size, asked.seed)
    text.validation(asked.block, asked.batch_size, asked.eval_windows)
    keep_freed_memory()
    with claimed(path, force=False), explained(path), Meter("spheret convert", quiet) as meter:
        # asked once nobody else can write: another process may have begun a conversion meanwhile, or ended it
        record = _existing(path)
        if record is not None:
            _check_same(path, record.settings, asked)
            if threads is None and record.environment.threads is not None:
                torch.set_num_threads(min(record.environment.threads, most_threads()))
        if record is None or not record.finished:
            with refusing(f"{model} cannot be converted", "give another model", whole=True):
                record = _work(path, subject, text, asked, place, meter, record)
        _check_whole(path)
        _remove_checkpoints(path)
        page = write_report(record, path)
    if not quiet:
        print(outcome(record))
        print(f"{path}: the converted model (spheret.hub.load), {CONVERT} and {page.relative_to(path)}")
    return 0


def _anneal(given: int | None, steps: int, start: str) -> int:
    if start != "exact":
        if given:
            raise ValueError(
                f"--anneal leads from the exact start to the scheme, and --start {start} is there already."
            )
        return 0
    anneal = max(1, round(ANNEAL * steps)) if given is None else given
    if not 1 <= anneal <= steps:
        raise ValueError(f"--anneal must lie between 1 and the {steps} steps, got {anneal}.")
    return anneal


def _block(given: int | None, subject: Subject) -> int:
    if given is not None and subject.most is not None and given > subject.most:
        raise ValueError(f"--block {given} is more than {subject.name} takes: at most {subject.most}.")
    return given if given is not None else min(256, subject.most or 256)


def _existing(path: Path) -> ConvertRecord | None:
    """The conversion to continue, or None for a new one. Raises if the directory holds anything else."""
    if not path.is_dir():
        return None
    names = {entry.name for entry in path.iterdir() if not files.is_temporary(entry)} - {LOCK}
    if not names:
        return None
    if CONVERT not in names:
        raise FileExistsError(
            f"--out {path} is not empty and holds no {CONVERT} (it holds {sorted(names)[0]!r}): give another."
        )
    return CONVERSIONS.read(path / CONVERT)


def _check_whole(path: Path) -> None:
    """Raise if a finished conversion has lost its model. Its training is over, so it cannot be saved again."""
    try:
        saved = SavedModel(path)
        whole = saved.is_converted and bool(saved.forms)
        reason = f"{CONFIG} is not that of a converted model"
    except (OSError, ValueError) as error:
        whole, reason = False, str(error)
    if not whole:
        raise ValueError(
            f"{path} is a finished conversion that has lost its model ({reason.rstrip('.')}): put the files back, or "
            "delete the directory and convert again."
        )


def _remove_checkpoints(path: Path) -> None:
    """Remove what only an unfinished conversion needs. A kill after its end leaves it."""
    for name in (CONTROL, CONVERTED, _UNSAVED):
        shutil.rmtree(path / CHECKPOINTS / name, ignore_errors=True)
    files.remove_empty(path / CHECKPOINTS, path / CHECKPOINTS)


def _check_same(path: Path, saved: Settings, asked: Settings) -> None:
    before, now = msgspec.to_builtins(saved), msgspec.to_builtins(asked)
    changed = [
        f"{name} ({shortened(repr(before[name]))} there, {shortened(repr(now[name]))} asked)"
        for name in now
        if before[name] != now[name]
    ]
    if changed:
        raise ValueError(
            f"--out {path} is another conversion; these differ: {', '.join(changed[:5])}. Give another --out, or the "
            "settings that it has."
        )


def _work(
    path: Path,
    subject: Subject,
    data: Data,
    settings: Settings,
    device: torch.device,
    meter: Meter,
    record: ConvertRecord | None,
) -> ConvertRecord:
    """Measure the starts, train both models, and save the converted one. record: what is known already."""
    if record is not None:
        _check_sublayers(record, subject, data, settings, device)
    else:
        meter.show("the losses right after the conversion", 0.0, now=True)
        record = _measured_starts(subject, data, settings, device)
        CONVERSIONS.write(path / CONVERT, record)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        meter.show(f"step {done:,} of {2 * settings.steps:,}", done / (2 * settings.steps))

    trained: Any = None
    for name in (CONTROL, CONVERTED):
        trained = None
        trained = subject.load().to(device)
        if name == CONVERTED:
            _convert(trained, settings, data, device, settings.start)

        def write(arm: Arm, name: str = name) -> None:
            setattr(record, name, arm)
            CONVERSIONS.write(path / CONVERT, record)

        tuning = FineTuning(
            trained, settings, data, device, path / CHECKPOINTS / name, getattr(record, name), meter.say
        )
        done += tuning.done
        tuning.run(tick, write)
    for row, step in zip(record.sublayers, steps(trained), strict=True):
        row.alpha_after, row.radius_after = float(step.alpha.detach()), float(step.radius.detach())
    _save_model(trained.eval(), subject, path)
    record.finished = True
    CONVERSIONS.write(path / CONVERT, record)
    return record


def _check_sublayers(
    record: ConvertRecord, subject: Subject, data: Data, settings: Settings, device: torch.device
) -> None:
    """Raise unless convert.json has the sublayers of this model. Their rows are filled in after all training."""
    found = _convert(subject.load().to(device), settings, data, device, "plain").converted
    if [row.name for row in found] != [row.name for row in record.sublayers]:
        raise DamagedDocument(
            f"{CONVERT} is damaged, its {len(record.sublayers)} sublayers are not the {len(found)} of "
            f"{subject.name}: {CONVERSIONS.remedy}."
        )


def _convert(model: Any, settings: Settings, data: Data, device: torch.device, start: Start) -> ConversionReport:
    batches = calibration(data, settings, device, FITTED)
    options = options_from_json(settings.options)
    _, report = convert(model, settings.scheme, start, example_inputs=batches[0], batches=batches, **options)
    return report


def _measured_starts(subject: Subject, data: Data, settings: Settings, device: torch.device) -> ConvertRecord:
    model = subject.load()
    parameters = sum(p.numel() for p in model.parameters())
    machine.check_bytes(
        BYTES_PER_PARAMETER * parameters, device, f"the training of {subject.name}", "take a smaller model"
    )
    model = model.to(device)
    losses = {"original": validation_loss(model, data, settings, device)}
    if not math.isfinite(losses["original"]):
        raise ValueError(f"the loss of {subject.name} is not finite: the model is broken, give another.")
    _try_training(model, data, settings, device)
    reports = {}
    for start in get_args(Start):
        reports[start] = _convert(model, settings, data, device, start)
        losses[start] = validation_loss(model, data, settings, device)
        revert(model)
    report = reports[settings.start]
    return ConvertRecord(
        settings=settings,
        architecture=report.model,
        parameters=parameters,
        added_parameters=report.added_parameters,
        starts=Starts(**losses),
        difference=report.difference,
        sublayers=[_untrained(row) for row in report.converted],
        left=list(report.left),
        control=Arm([], []),
        converted=Arm([], []),
        finished=False,
        environment=Environment(**machine.machine(), device=device.type),
    )


@torch.no_grad()
def _try_training(model: Any, data: Data, settings: Settings, device: torch.device) -> None:
    """Run the model as it is trained. One that cannot be, by its dropout, is found before anything is written."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.train()(**calibration(data, settings, device, 1)[0])
    model.eval()


def _untrained(row: ConvertedSublayer) -> ResidualRecord:
    fields = asdict(row)
    del fields["readers"]
    return ResidualRecord(**fields, alpha_after=None, radius_after=None)


def _save_model(model: Any, subject: Subject, path: Path) -> None:
    """Write the model and its tokenizer. Its config.json comes last: an unfinished model does not open."""
    temporary = path / CHECKPOINTS / _UNSAVED
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with quietly():
        model.save_pretrained(temporary)
    subject.write_tokenizer(temporary)
    for file in sorted(temporary.iterdir(), key=lambda file: file.name == CONFIG):
        files.rename(file, path / file.name)
    files.sync_directory(path)
