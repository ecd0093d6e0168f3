"""`spheret certify`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from spheret.analysis import certificate, figures
from spheret.analysis.source import data_of, validation_windows
from spheret.analysis.threads import few_threads
from spheret.runs.layout import CERTIFICATE, CERTIFICATE_FIGURE
from spheret.runs.run import Run, open_run
from spheret.support import files
from spheret.support.machine import machine
from spheret.support.meter import Meter


def certify_command(
    run: str | None = None,
    /,
    step: int | None = None,
    tokens: int = 64,
    sequence: int = 8,
    data: str | None = None,
    scheme: str | None = None,
    layers: str = "4..512",
    width: int = 64,
    out: str | None = None,
) -> int:
    """Certify the stability of a run's checkpoint; or, with --scheme, look at schemes before any training.

    Args:
        run: a run directory; certificate.json and certificate.png are written into it.
        step: the step of the checkpoint; the newest without it.
        tokens: how many tokens of the validation split are looked at.
        sequence: how many tokens are looked at as one whole sequence; 0 for none.
        data: other data: a prepared directory, or the name of a corpus.
        scheme: no run: this scheme at initialisation, "all", or names separated by commas.
        layers: with --scheme, the depths in blocks: 4..512 doubles from 4 to 512, 4,6,8 is a list.
        width: with --scheme, the width of the stream.
        out: another directory to write to; without a run, runs/initialisation.
    """
    if (run is None) == (scheme is None):
        raise ValueError("give a run directory, or --scheme NAME to look at initialisation: one of the two.")
    if run is None:
        from spheret.analysis.initialisation import compare

        return compare(str(scheme), layers, width, Path(out or "runs/initialisation").expanduser())
    opened = open_run(run)
    found = certify_run(opened, step, tokens, sequence, data, quiet=False)
    directory = Path(out).expanduser() if out else opened.path
    directory.mkdir(parents=True, exist_ok=True)
    files.write_atomically(directory / CERTIFICATE, files.dump(found))
    files.write_atomically(directory / CERTIFICATE_FIGURE, figures.certificate(found))
    show(found)
    print(f"{directory / CERTIFICATE} and {CERTIFICATE_FIGURE}: {found['seconds']:.1f} s")
    wrong = certificate.verify(found)
    for sentence in wrong:
        print(f"contradiction: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def certify_run(
    run: Run,
    step: int | None = None,
    tokens: int = 64,
    sequence: int = 8,
    data: str | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """The certificate of a run's checkpoint, with what it was made from."""
    begun = time.perf_counter()
    model = run.model(step)
    found_step = run.checkpoint(step).step
    certificate.check_finite(model, f"checkpoint step-{found_step} of {run.path}")
    chosen = data_of(run, data)
    ids, _ = validation_windows(chosen, model.config.block, tokens)
    sublayers = 2 * model.config.layers
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        meter.show(f"{done // sublayers} of {tokens} tokens", done / (sublayers * tokens))

    with few_threads(model.config.width), Meter("certify", quiet) as meter:
        found = certificate.certify(model, ids, tokens, sequence, tick=tick)
    return {
        **found,
        "run": run.name,
        "checkpoint": found_step,
        "data": str(chosen.path),
        "seconds": time.perf_counter() - begun,
        "machine": machine(),
    }


def show(found: dict[str, Any]) -> None:
    """The tables and what they come to."""
    from rich.console import Console
    from rich.table import Table

    # in a file a table is as wide as it must be
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name, title in (
        ("own_path", f"{found['tokens']} tokens on their own paths"),
        ("sequence", "one whole sequence"),
    ):
        part = found[name]
        if part is None:
            continue
        table = Table(
            title=f"{found['run']}, step {found['checkpoint']}: {title}; the worst of each", title_justify="left"
        )
        for column in certificate.COLUMNS:
            table.add_column(column, justify="left" if column in ("branch", "verdict") else "right")
        for row in certificate.table(part):
            table.add_row(*row)
        console.print(table)
    for sentence in certificate.summary(found):
        console.print(sentence, highlight=False)
    console.print(f"Proven means: {found['scope']}.", highlight=False)
