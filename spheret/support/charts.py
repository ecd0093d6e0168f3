"""Charts: `draw` makes files of them, and pages draw them with uPlot.

A chart is data: lines, points with intervals, panels. The look of every figure is here too: size, fonts, colours of
both themes, place of the legend, and the least span of an axis. Figures have no dates, and labels are plain text.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colour and dashes
Style = tuple[str, Any]
# letters that are as wide as a small panel, as a large one, and as the name of a row
LETTERS, WIDE_LETTERS, ROW_LETTERS = 30, 60, 40
# inches of a figure of full width: a page shows it at its own size, so that letters are as large in every figure
WIDTH = 7.0
# points of the smallest letters, of names in legends, of other text, and of the title above several panels
SMALL, NAMES, TEXT, TITLE = 8, 9, 10, 13
# the ends of an axis differ by this share of the larger one, or on a logarithmic axis by this factor: rounding errors
# of a constant look flat. Differences of losses matter at a smaller share
LEAST_SHARE, LOSS_SHARE, LEAST_FACTOR = 0.1, 0.01, 2.0
# below this, differences are rounding errors of float32
ROUNDING = 1e-6
INK, GRID, PAPER = "#222222", "#d0d0d0", "#ffffff"
# of notes, which stand back behind titles and labels
MUTED = "#5c5c5c"
# one pair per scheme of the paper, (on white, on the dark page), in the order of SCHEMES. They were chosen so that
# protanopes and deuteranopes can distinguish any two as well
PALETTE = (
    ("#023da9", "#8bb8ff"), ("#872e1d", "#ffb4ad"), ("#899a65", "#ece45a"), ("#1d9ba9", "#89e9e6"),
    ("#734064", "#b080ab"), ("#017958", "#0a8d6f"), ("#f73397", "#fd3170"), ("#a56100", "#f57403"),
    ("#8a67fb", "#7f6bfe"),
)  # fmt: skip
# every colour that a dark page replaces by its own: (on white, on the dark page)
THEMES = {
    "ink": (INK, "#e6e6e6"),
    "grid": (GRID, "#3a3f47"),
    "note": (MUTED, "#a9b0ba"),
    "paper": (PAPER, "#15181c"),
    **{f"line-{index}": pair for index, pair in enumerate(PALETTE)},
}
DASHES: tuple[Any, ...] = (
    "-", (0, (5, 2)), (0, (6, 2, 1.5, 2)), (0, (1.5, 1.5)), (0, (10, 3)), (0, (6, 2, 1.5, 2, 1.5, 2)),
)  # fmt: skip
# the SpheretNorms are a family: their dashes differ too, for print without colour
OWN_DASHES = {"cay-spheretnorm": 1, "p-spheretnorm": 2}
STYLE: Any = {
    "svg.hashsalt": "spheret",
    "svg.fonttype": "none",
    # a label from a run is plain text, even if it contains a dollar sign
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    **dict.fromkeys(("font.size", "axes.titlesize"), TEXT),
    "legend.fontsize": NAMES,
    "legend.handlelength": 2.4,
    "legend.frameon": False,
    # a tick is a whole number, not the difference to one that stands elsewhere
    "axes.formatter.useoffset": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "lines.linewidth": 1.6,
    "figure.dpi": 100,
}


@contextmanager
def own_style() -> Iterator[None]:
    """Figures of our look, whatever the user's matplotlibrc says. One in the current directory could start LaTeX."""
    import matplotlib

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        yield


@dataclass(frozen=True)
class Drawing:
    """A figure as SVG and PNG, with its name and caption."""

    name: str
    caption: str
    svg: str
    png: bytes

    @property
    def themed_svg(self) -> str:
        """The SVG as a file of its own, which follows the reader's light or dark setting."""
        return themed(self.svg, THEMES.values())


def themed(svg: str, pairs: Iterable[tuple[str, str]]) -> str:
    """An SVG whose colours, each given as (on white, on the dark page), follow the reader's light or dark setting."""
    numbered = list(enumerate(pairs))
    names = {light: f"--c{index}" for index, (light, _) in numbered}
    light = ";".join(f"--c{index}:{white}" for index, (white, _) in numbered)
    dark = ";".join(f"--c{index}:{black}" for index, (_, black) in numbered)

    def variable(found: re.Match[str]) -> str:
        colour = found.group()
        # a viewer without variables shows the light colour
        return f"var({names[colour]}, {colour})" if colour in names else colour

    svg = re.sub(r'\bstyle="[^"]*"', lambda style: re.sub(r"(?<=: )#[0-9a-f]{6}\b", variable, style.group()), svg)
    # a figure has a ground of its own: a reader may choose a theme that the SVG cannot see
    ground = f"background:var({names[PAPER]})"
    rule = f"<style>:root{{{light};{ground}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    return re.sub(r"<svg[^>]*>", lambda head: f"{head.group()}\n {rule}", svg, count=1)


def spanned(low: float, high: float, share: float = LEAST_SHARE) -> tuple[float, float]:
    """The limits of an axis, moved apart to differ by at least a share of the larger one."""
    missing = max(share * max(abs(low), abs(high)), ROUNDING) - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def finish(figure: Figure) -> None:
    """Give every vertical axis its least span, unless a figure has set its limits, and plain ticks."""
    for axes in figure.axes:
        log, (low, high) = axes.get_yscale() == "log", axes.get_ylim()
        if axes.lines and axes.get_autoscaley_on():
            widen = max(1.0, math.sqrt(LEAST_FACTOR * low / high)) if log else 1.0
            axes.set_ylim(*((low / widen, high * widen) if log else spanned(low, high)))
        if log:
            plain_log(axes.yaxis)


def png(figure: Figure, dpi: int = 110) -> bytes:
    """The bytes of a figure, the same for the same figure."""
    finish(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def render(name: str, caption: str, figure: Figure, with_png: bool = True) -> Drawing:
    """The figure in both formats. The PNG takes as long as the SVG, so that it can be left out."""
    svg = io.StringIO()
    finish(figure)
    # no date and no version: the same runs give the same bytes
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Title": caption})
    # the layout takes most of the time, so it is computed once
    figure.set_layout_engine("none")
    text = svg.getvalue()
    return Drawing(name, caption, text[text.index("<svg") :], png(figure, dpi=150) if with_png else b"")


def axes_grid(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (WIDTH, 4.8), **shared: Any
) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """The legend below all panels, where it covers no point. Names beside each other, as many as fit."""
    columns = int(figure.get_figwidth() / (0.5 + 0.0082 * NAMES * max(map(len, labels))))
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(len(labels), columns)))


# a function with a name: figures are drawn by other processes, and a lambda cannot be sent there
def plain_tick(value: float, _: int | None = None) -> str:
    """A number in as few letters as it needs: 6e-5 rather than 6e-05."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:g}")


def plain_log(axis: Any) -> None:
    """Put ticks at 1, 2 and 5 of each decade, in plain digits: powers need math text, which is off for labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = sorted(map(abs, axis.get_view_interval()))
    # over many decades the powers of ten are enough
    wide = low <= 0 or high / low > 1e4
    # over less than one, 1, 2 and 5 may be a single tick
    narrow = not wide and high / low < 5
    axis.set_major_locator(
        MaxNLocator(5, steps=[1, 2, 5, 10]) if narrow else LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0))
    )
    axis.set_major_formatter(FuncFormatter(plain_tick))
    axis.set_minor_formatter(NullFormatter())


def scheme_styles(schemes: Mapping[str, str], order: Iterable[str]) -> dict[str, tuple[str, Any]]:
    """The colour and dashes of each label, by its scheme, which has the same ones in every figure.

    The schemes that are not the paper's share its colours and have other dashes. So have variants of one scheme: the
    first has the scheme's dashes, the others take the next that are free.

    Args:
        schemes: the scheme of each label.
        order: all schemes.
    """
    names = list(order)
    places = {label: _place(scheme, names) for label, scheme in schemes.items()}
    taken = set(places.values())
    styles, first = {}, set()
    for label, (colour, dash) in places.items():
        if (colour, dash) in first:
            choices = [(dash + more) % len(DASHES) for more in range(1, len(DASHES))]
            dash = next((each for each in choices if (colour, each) not in taken), dash)
            taken.add((colour, dash))
        first.add((colour, dash))
        styles[label] = PALETTE[colour][0], DASHES[dash]
    return styles


def _place(scheme: str, order: list[str]) -> tuple[int, int]:
    """The indices of a scheme in PALETTE and DASHES."""
    # a scheme of the user's own comes after ours
    index = order.index(scheme) if scheme in order else len(order)
    lap, colour = divmod(index, len(PALETTE))
    return colour, (OWN_DASHES.get(order[colour], 0) + lap) % len(DASHES)


@dataclass(frozen=True)
class Line:
    """Points of one name.

    low, high: the ends of an interval at each point. mark: a marker of matplotlib for the points, or "ring". joined:
    whether a line joins them. faint: whether they stand back. failed: whether a cross marks the last one.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    mark: str = ""
    joined: bool = True
    faint: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at a place of the horizontal axis. colour: a number of the palette."""

    x: float
    text: str
    colour: int


@dataclass(frozen=True)
class Panel:
    """Lines with their axes. x, y: the names of the axes.

    limits: of the vertical axis. ticks: the names of places on the horizontal axis. rows: whether these places stand
    below each other, and the values run from left to right. level: a value that a thin line shows, and its name.
    failures: places with their markers, at the upper edge.
    """

    lines: Sequence[Line]
    x: str
    y: str
    title: str = ""
    log: bool = False
    log_x: bool = False
    limits: tuple[float, float] | None = None
    ticks: Mapping[float, str] = field(default_factory=dict)
    rows: bool = False
    level: tuple[float, str] | None = None
    marks: Sequence[Mark] = ()
    failures: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Chart:
    """Panels under one name and caption.

    shared: whether the panels have the same axes, and show each other's first lines in grey. window: over how many
    points a line is averaged at first; 0 if its points do not follow each other in time.
    """

    name: str
    caption: str
    panels: Sequence[Panel]
    title: str = ""
    shared: bool = False
    window: int = 0


def draw(chart: Chart, with_png: bool = True) -> Drawing:
    """The chart as files. The same chart gives the same bytes."""
    with own_style():
        return render(chart.name, chart.caption, figure(chart), with_png)


def figure(chart: Chart) -> Figure:
    """The chart as a figure of matplotlib, in the style that is set."""
    panels, count = chart.panels, len(chart.panels)
    columns = 2 if count == 4 and not chart.shared else min(3, count)
    rows = -(-count // columns)
    drawn, grid = axes_grid(rows, columns, _size(chart, rows, columns), sharex=chart.shared, sharey=chart.shared)
    every = list(grid.flat)
    for axes in every[count:]:
        axes.remove()
    for axes, panel in zip(every, panels, strict=False):
        if chart.shared:
            for other in panels:
                if other is not panel and other.lines:
                    axes.plot(other.lines[0].x, other.lines[0].y, color=GRID, lw=0.9, zorder=1)
        _draw_panel(axes, panel, chart.window)
        if chart.shared:
            axes.set_title(_wrapped(panel.title, LETTERS), loc="left", fontsize=SMALL)
            axes.tick_params(labelsize=SMALL)
        else:
            axes.set_title(_wrapped(panel.title, WIDE_LETTERS), loc="left", weight="bold")
            axes.set_xlabel(panel.x)
            axes.set_ylabel(panel.y)
    if chart.shared:
        # the last panel of a column has the labels of its axis
        for axes in every[max(0, count - columns) : count]:
            axes.tick_params(labelbottom=True)
        drawn.supxlabel(panels[0].x, fontsize=TEXT)
        drawn.supylabel(panels[0].y, fontsize=TEXT)
    elif not panels[0].rows:
        _legend(drawn, every[:count])
    if chart.title:
        drawn.suptitle(chart.title, fontsize=TITLE, weight="bold")
    return drawn


def _size(chart: Chart, rows: int, columns: int) -> tuple[float, float]:
    first = chart.panels[0]
    if first.rows:
        # every row has room for the longest name
        longest = max(1 + _row(name).count("\n") for name in first.ticks.values())
        return WIDTH, 1.0 + len(first.ticks) * (0.17 + 0.14 * longest)
    if chart.shared:
        title = max(_wrapped(panel.title, LETTERS).count("\n") for panel in chart.panels)
        return max(3.2, WIDTH * columns / 3), 0.7 + (1.75 + 0.12 * title) * rows
    return WIDTH, 4.8 if columns == 1 else 3.5 * rows


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))


def _row(name: str) -> str:
    return _wrapped(name, ROW_LETTERS)


def _draw_panel(axes: Axes, panel: Panel, window: int) -> None:
    # the first line is the most important one: it is drawn last, above the others
    for place, line in enumerate(panel.lines):
        _draw_line(axes, line, panel.rows, max(1, window), 3 - place / len(panel.lines))
    if panel.level is not None:
        value, name = panel.level
        (axes.axvline if panel.rows else axes.axhline)(value, color=INK, lw=0.9, ls=(0, (4, 3)), zorder=1)
        if name and not panel.rows:
            at: Any = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            axes.annotate(name, (0.99, value), (0, -8), ha="right", va="top", fontsize=NAMES, **at)
    for mark in panel.marks:
        axes.axvline(mark.x, color=PALETTE[mark.colour][0], lw=1, ls=(0, (4, 2)))
        top = axes.get_xaxis_transform()
        axes.text(mark.x, 0.99, mark.text, transform=top, rotation=90, ha="right", va="top", fontsize=SMALL)
    for x, marker in panel.failures:
        colour, height = panel.lines[0].style[0], 0.93 if marker == "v" else 0.82
        axes.plot(x, height, marker, color=colour, transform=axes.get_xaxis_transform(), ms=6, mew=1.8, zorder=5)
    _scale(axes, panel)


def _draw_line(axes: Axes, line: Line, swapped: bool, window: int, order: float) -> None:
    colour, dash = line.style
    x, y, low, high = line.x, *(_smoothed(values, window) for values in (line.y, line.low, line.high))
    look: dict[str, Any] = {"color": colour, "ls": dash if line.joined else "none", "marker": line.mark, "ms": 4}
    if line.mark == "ring":
        look |= {"marker": "o", "mfc": "none", "ms": 10, "mew": 1.6}
    elif not line.joined and low:
        look |= {"ms": 7.5}
    name = f"{line.label} (x: diverged)" if line.failed else line.label
    # a name that begins with _ is not shown
    look |= {"alpha": 0.35 if line.faint else 1, "zorder": order, "label": name or "_"}
    axes.plot(*((y, x) if swapped else (x, y)), **look)
    if low and line.joined:
        axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    elif low:
        (axes.hlines if swapped else axes.vlines)(x, low, high, color=colour, lw=2.4, zorder=order)
    if line.failed:
        axes.plot(x[-1:], y[-1:], "x", color=colour, ms=9, mew=2.5, zorder=5)


def _smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last points of a window, or of all that there are so far."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _scale(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

    if panel.log and any(value > 0 for line in panel.lines for value in line.y):
        axes.set_yscale("log")
    if panel.limits is not None:
        (axes.set_xlim if panel.rows else axes.set_ylim)(*panel.limits)
    places = list(panel.ticks)
    if panel.rows:
        axes.set_yticks(places, [_row(name) for name in panel.ticks.values()], fontsize=NAMES)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(places) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        return
    if panel.log_x:
        axes.set_xscale("log")
    if places:
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_major_formatter(FixedFormatter(list(panel.ticks.values())))
        axes.xaxis.set_minor_locator(NullLocator())
    elif panel.x.startswith("sublayer"):
        # there is no half sublayer
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _legend(drawn: Figure, every: Sequence[Axes]) -> None:
    found = [pair for axes in every for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in reversed(found)}
    labels = list(dict.fromkeys(label for _, label in found))
    if len(labels) > 1:
        legend_below(drawn, [handles[label] for label in labels], labels)
