"""The tables and the figure of the pages on collapse, from the rows of docs/results/collapse.jsonl only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from collapse import CHANGES, CURVE, GAINS, GROWTH, LOOK, NORMED_SIZES, RATES, Row, Run, read_rows, runs

from spheret.connections import SCHEMES
from spheret.observe.plateau import ENTROPY_MARGIN
from spheret.support.charts import PALETTE, Chart, Drawing, Line, Panel, draw, scheme_styles

Rows = Mapping[Run, Row]
WARMUPS = (20, 100)
SEEDS = (101, 102)
BIASES, STARTS = ("none", "unigram"), ("0.02", "scaled")
HEADS = ("tied", "shifted", "untied")
MAPS = ("tied", "shifted", "permutation", "orthogonal", "flip", "untied")
# above this cosine all tokens have one direction
ALIKE = 0.9


def final_loss(row: Row) -> float:
    """The training loss over the last ten updates; infinity if it is not a number."""
    last = [float("inf") if loss is None else loss for loss in row.curve[-10 // CURVE :]]
    return sum(last) / len(last)


def collapsed(row: Row) -> bool:
    """Whether a run ended at the loss of token frequencies, or above, after all tokens had had one direction.

    The loss of the last ten updates is at least 0.97 times the unigram entropy, and the mean cosine between tokens
    was above 0.9 at one of the last three looks: after 60, 80 and 100 of 100 updates.
    """
    stuck = final_loss(row) >= (1 - ENTROPY_MARGIN) * row.floor
    return stuck and max((cosine or 0.0) for cosine in row.cosines[-3:]) > ALIKE


def _verdict(row: Row | None) -> str:
    return "-" if row is None else "c" if collapsed(row) else f"{final_loss(row):.2f}"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = "|---|" + "---:|" * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def _of(rows: Rows, group: str, **settings: object) -> list[Row]:
    """The rows of a group with these settings, in the order of `runs()`."""
    return [
        rows[run]
        for run in runs()
        if run in rows and run.group == group and all(getattr(run, name) == x for name, x in settings.items())
    ]


def _counted(rows: Sequence[Row]) -> str:
    return f"{sum(map(collapsed, rows))} of {len(rows)}" if rows else "not run"


def map_table(rows: Rows, scheme: str) -> str:
    """One cell of the map per cell of the table: the loss of each seed, or c."""
    columns = list(product(WARMUPS, RATES))
    lines = []
    for head, bias, start in product(HEADS, BIASES, STARTS):
        cells = [
            ", ".join(_verdict(rows.get(Run("map", scheme, head, seed, bias, start, warmup, lr))) for seed in SEEDS)
            for warmup, lr in columns
        ]
        lines.append([f"{head}, {bias}, {start}", *cells])
    return _table(["head, bias, start", *(f"{warmup}: {lr:g}" for warmup, lr in columns)], lines)


def count_table(rows: Rows) -> str:
    """How many runs of the map collapsed, by head, bias and start."""
    schemes = ("proj-spheretnorm", "pre-ln")
    lines = []
    for head, bias, start in product(HEADS, BIASES, STARTS):
        cells = [_of(rows, "map", scheme=scheme, head=head, head_bias=bias, start=start) for scheme in schemes]
        lines.append([head, bias, start, *map(_counted, cells)])
    return _table(["head", "bias", "start", *schemes], lines)


def short_table(rows: Rows) -> str:
    """How many runs of both maps collapsed, by bias and head."""
    lines = []
    for bias, head in product(BIASES, HEADS):
        asked = {"head": head, "head_bias": bias}
        cells = [_of(rows, "map", scheme=scheme, **asked) for scheme in ("proj-spheretnorm", "pre-ln")]
        cells.insert(1, _of(rows, "normed", gain=0.3, **asked))
        lines.append([f"{head}, {bias}", *map(_counted, cells)])
    return _table(["head, bias", "projection", "projection, branch_norm", "Pre-LN"], lines)


def fixed_map_table(rows: Rows) -> str:
    """The validation losses of the fixed maps by seed, and Pre-LN beside them."""
    seeds = (101, 102, 103)
    lines = []
    asked = [("proj-spheretnorm", head, "unigram") for head in MAPS]
    asked += [("proj-spheretnorm", "shifted", "none"), ("pre-ln", "tied", "unigram")]
    for scheme, head, bias in asked:
        found = {row.run.seed: row for row in _of(rows, "maps", scheme=scheme, head=head, head_bias=bias)}
        cells = [_outcome(found.get(seed)) for seed in seeds]
        losses = [row.val_loss for row in found.values() if not collapsed(row) and row.val_loss is not None]
        whole = len(losses) == len(seeds)
        lines.append([f"{scheme}, {head}, {bias}", *cells, f"{sum(losses) / len(losses):.3f}" if whole else "-"])
    return _table(["scheme, head, bias", *(f"seed {seed}" for seed in seeds), "mean"], lines)


def _outcome(row: Row | None) -> str:
    return "not run" if row is None else "collapsed" if collapsed(row) else f"{row.val_loss:.3f}"


def change_table(rows: Rows) -> str:
    """What became of a tied head after one change."""
    lines = []
    for change in CHANGES:
        found = _of(rows, "changes", change=change)
        cosines = ", ".join(f"{row.cosines[-1] or 0:.2f}" for row in found)
        lines.append([change or "none", ", ".join(map(_verdict, found)) or "not run", cosines or "-"])
    return _table(["change", "loss", "cosine at the end"], lines)


def start_table(rows: Rows) -> str:
    """The own logit and the first loss of untrained models, by scheme and head, layers and width."""
    sizes = list(dict.fromkeys((run.layers, run.width) for run in runs() if run.group == "start"))
    schemes = list(dict.fromkeys(run.scheme for run in runs() if run.group == "start"))
    lines = []
    for scheme, head in product(schemes, HEADS):
        found = {(row.run.layers, row.run.width): row for row in _of(rows, "start", scheme=scheme, head=head)}
        lines.append([f"{scheme}, {head}", *(_first(found.get(size)) for size in sizes)])
    return _table(["scheme, head", *(f"{layers} x {width}" for layers, width in sizes)], lines)


def paper_table(rows: Rows) -> str:
    """The own logit and the first loss at the paper's sizes."""
    asked = list(dict.fromkeys((run.scheme, run.head) for run in runs() if run.group == "paper"))
    lines = []
    for scheme, head in asked:
        found = {row.run.size: row for row in _of(rows, "paper", scheme=scheme, head=head)}
        lines.append([f"{scheme}, {head}", *(_first(found.get(size)) for size in "SML")])
    return _table(["scheme, head", *"SML"], lines)


def _first(row: Row | None) -> str:
    # what rounds to 0 has no sign
    return "not run" if row is None else f"{round(row.own_logit, 1) + 0.0:.1f}, {row.first_loss:.2f}"


def growth_table(rows: Rows) -> str:
    """The common direction of the branches' outputs in the first updates, and what the formula says."""
    lines = []
    for row, (kind, first) in product(_of(rows, "growth"), (("attention", 0), ("MLP", 1))):
        run = row.run
        for part in ("measured", "predicted"):
            cells = [_range(getattr(growth, part)[first::2]) for growth in row.growth]
            lines.append([f"{run.scheme}, {run.head}, {run.optimizer}: {kind}", part, *cells])
    return _table(["run", "", *(f"after {updates}" for updates in GROWTH)], lines)


def share_table(rows: Rows) -> str:
    """The share of the common part in the gradients of the writing matrices."""
    lines = []
    for row, (kind, first) in product(_of(rows, "growth"), (("attention", 0), ("MLP", 1))):
        run = row.run
        cells = [_range(growth.share[first::2]) for growth in row.growth]
        lines.append([f"{run.scheme}, {run.head}, {run.optimizer}: {kind}", *cells])
    return _table(["run", *(f"at {updates}" for updates in GROWTH)], lines)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def later_table(rows: Rows) -> str:
    """The loss and the cosine of cells of the map after 100, 200 and 300 updates."""
    marks = (100, 200, 300)
    lines = []
    for run in (run for run in runs() if run.group == "later"):
        row = rows.get(run)
        cells = ["not run"] * len(marks)
        if row is not None:
            ends = [(row.curve[mark // CURVE - 2 : mark // CURVE], row.cosines[mark // LOOK - 1]) for mark in marks]
            cells = [f"{sum(loss or 0.0 for loss in losses) / 2:.2f}, {cosine or 0.0:.2f}" for losses, cosine in ends]
        lines.append([f"{run.scheme}, {run.head}, {run.head_bias}, {run.start}", *cells])
    return _table(["scheme, head, bias, start", *(f"after {mark}" for mark in marks)], lines)


def larger_table(rows: Rows) -> str:
    """The recommended cell and its neighbours at other sizes."""
    asked = [run for run in runs() if run.group == "larger"]
    sizes = list(dict.fromkeys((run.layers, run.width) for run in asked))
    lines = []
    for cell in dict.fromkeys((run.head, run.head_bias, run.warmup, run.lr) for run in asked):
        head, bias, warmup, lr = cell
        cells = []
        for layers, width in sizes:
            found = _of(rows, "larger", head=head, head_bias=bias, warmup=warmup, lr=lr, layers=layers, width=width)
            cells.append(_verdict(found[0]) if found else "not run")
        lines.append([f"{head}, {bias}, {warmup}, {lr:g}", *cells])
    return _table(["head, bias, warm-up, rate", *(f"{layers} x {width}" for layers, width in sizes)], lines)


def normed_count_table(rows: Rows) -> str:
    """How many runs of the normed map collapsed, by head, bias and start, for each start of the gain."""
    lines = []
    for head, bias, start in product(HEADS, BIASES, STARTS):
        cells = [_of(rows, "normed", head=head, head_bias=bias, start=start, gain=gain) for gain in GAINS]
        plain = _of(rows, "map", scheme="proj-spheretnorm", head=head, head_bias=bias, start=start, warmup=20)
        lines.append([head, bias, start, *map(_counted, [*cells, plain])])
    return _table(["head", "bias", "start", *(f"gain from {gain:g}" for gain in GAINS), "without the norm"], lines)


def normed_map_table(rows: Rows) -> str:
    """One cell of the normed map per cell of the table."""
    lines = []
    for head, bias, start in product(HEADS, BIASES, STARTS):
        cells = [_of(rows, "normed", head=head, head_bias=bias, start=start, gain=0.3, lr=lr) for lr in RATES]
        lines.append([f"{head}, {bias}, {start}", *(", ".join(map(_verdict, found)) or "not run" for found in cells)])
    return _table(["head, bias, start", *(f"{lr:g}" for lr in RATES)], lines)


def normed_size_table(rows: Rows) -> str:
    """How many runs of the normed branch collapsed at other sizes, and the range of the losses of the others."""
    lines = []
    for head, bias in product(HEADS, BIASES):
        cells = []
        for size in NORMED_SIZES.values():
            found = _of(rows, "normed-sizes", head=head, head_bias=bias, **(SIZE | size))
            sound = [final_loss(row) for row in found if not collapsed(row)]
            cells.append(f"{_counted(found)}; {min(sound):.2f} to {max(sound):.2f}" if sound else _counted(found))
        lines.append([f"{head}, {bias}", *cells])
    return _table(["head, bias", *NORMED_SIZES], lines)


# what tells the sizes of the normed map apart
SIZE: dict[str, object] = {"layers": 6, "width": 64, "backbone": "", "tokenizer": "bytes"}


def gain_table(rows: Rows) -> str:
    """Validation losses by the start of the gain, and of Pre-LN and the plain projection."""
    asked = [run for run in runs() if run.group == "gain"]
    columns = list(dict.fromkeys((run.scheme, run.gain) for run in asked))
    lines = []
    for cell in dict.fromkeys((run.width, run.head, run.head_bias, run.updates) for run in asked):
        width, head, bias, updates = cell
        shared = {"width": width, "head": head, "head_bias": bias, "updates": updates}
        found = [_of(rows, "gain", scheme=scheme, gain=gain, **shared) for scheme, gain in columns]
        words = [", ".join(map(_outcome, each)) or "not run" for each in found]
        lines.append([f"{width}, {head}, {bias}, {updates} updates", *words])
    names = [scheme if gain is None else f"gain from {gain:g}" for scheme, gain in columns]
    return _table(["width, head, bias", *names], lines)


def normed_sentence(rows: Rows) -> str:
    """How often the normed branch collapsed, in all runs, beside the plain projection."""
    every = [row for group in ("normed", "normed-sizes") for row in _of(rows, group)]
    plain = _of(rows, "map", scheme="proj-spheretnorm", warmup=20)
    return (
        f"In all, {_counted(every)} runs with a normed branch collapsed, and {_counted(plain)} of the plain "
        "projection at the same rates and this warm-up (6 layers of width 64).\n"
    )


def same_cells(rows: Rows) -> dict[str, tuple[int, int]]:
    """How many runs collapsed of how many, with the normed branch and without, in the cells that both have."""
    normed, plain = _of(rows, "normed", gain=0.3), _of(rows, "map", scheme="proj-spheretnorm", warmup=20)

    def cell(row: Row) -> tuple[object, ...]:
        run = row.run
        return run.head, run.head_bias, run.start, run.lr, run.seed

    shared = {cell(row) for row in normed} & {cell(row) for row in plain}
    return {
        name: (sum(collapsed(row) for row in found if cell(row) in shared), sum(cell(row) in shared for row in found))
        for name, found in (("normed", normed), ("plain", plain))
    }


def receipt(rows: Rows) -> str:
    left = sum(run not in rows for run in runs())
    hours = sum(row.seconds for row in rows.values()) / 3600
    more = f"{left} of {len(runs())} rows are not there yet" if left else "all rows are there"
    trained = sum(bool(row.curve) for row in rows.values())
    counts = f"{trained} trainings and {len(rows) - trained} untrained models"
    return f"{counts}, {hours:.1f} hours on one busy core; {more}.\n"


def parts(rows: Rows | None = None) -> dict[tuple[str, str], str]:
    """The marked parts of docs/collapse.md and docs/results/collapse.md."""
    rows = read_rows() if rows is None else rows
    return {
        ("table", "collapse.map"): map_table(rows, "proj-spheretnorm"),
        ("table", "collapse.pre-ln"): map_table(rows, "pre-ln"),
        ("table", "collapse.counts"): count_table(rows),
        ("table", "collapse.short"): short_table(rows),
        ("table", "collapse.maps"): fixed_map_table(rows),
        ("table", "collapse.changes"): change_table(rows),
        ("table", "collapse.start"): start_table(rows),
        ("table", "collapse.paper"): paper_table(rows),
        ("table", "collapse.growth"): growth_table(rows),
        ("table", "collapse.share"): share_table(rows),
        ("table", "collapse.later"): later_table(rows),
        ("table", "collapse.larger"): larger_table(rows),
        ("table", "collapse.normed-counts"): normed_count_table(rows),
        ("table", "collapse.normed"): normed_map_table(rows),
        ("table", "collapse.normed-sizes"): normed_size_table(rows),
        ("table", "collapse.gain"): gain_table(rows),
        ("sentence", "collapse.normed"): normed_sentence(rows),
        ("receipt", "collapse"): receipt(rows),
    }


def figure(rows: Rows | None = None) -> Drawing:
    """Loss and token cosine of the projection with both heads, by seed, and Pre-LN beside them."""
    rows = read_rows() if rows is None else rows
    styles = scheme_styles({"proj-spheretnorm": "proj-spheretnorm", "pre-ln": "pre-ln"}, SCHEMES)
    contestants = (
        ("proj-spheretnorm", "tied", "projection, tied head", (PALETTE[7][0], (0, (5, 2)))),
        ("pre-ln", "tied", "Pre-LN, tied head", (styles["pre-ln"][0], (0, (1.5, 1.5)))),
        ("proj-spheretnorm", "shifted", "projection, shifted head", (styles["proj-spheretnorm"][0], "-")),
    )
    losses, cosines = list[Line](), list[Line]()
    for scheme, head, label, style in contestants:
        for row in _of(rows, "maps", scheme=scheme, head=head, head_bias="unigram"):
            losses.append(Line(label, [CURVE * (i + 0.5) for i in range(len(row.curve))], row.curve, style))
            cosines.append(Line(label, [LOOK * (i + 1) for i in range(len(row.cosines))], row.cosines, style))
    floor = next(row.floor for row in rows.values() if not row.run.size)
    panels = [
        Panel(
            losses,
            "updates",
            "training loss (nats per byte)",
            limits=(2.0, 4.0),
            level=(floor, "token frequencies only"),
        ),
        Panel(cosines, "updates", "mean cosine between tokens", limits=(-0.02, 1.04)),
    ]
    caption = (
        "Training loss and mean token cosine, 12 layers of width 64, bytes, one line per seed, learning rate "
        "7e-3 (Pre-LN 5e-3), warm-up 30. With a tied head all tokens of the spherical stream get one direction"
    )
    return draw(Chart("collapse", caption, panels), with_png=False)
