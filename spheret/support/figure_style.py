"""The look of every figure: size, fonts, colours of both themes, place of the legend, and the least span of an axis.

No dates, and labels shown as plain text. `render` and `png` finish a figure, so that no figure goes without these.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
STYLE: Any = {
    "svg.hashsalt": "spheret",
    "svg.fonttype": "none",
    # a label from a run is plain text, even if it contains a dollar sign
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": TEXT,
    "axes.titlesize": TEXT,
    "legend.fontsize": NAMES,
    "legend.handlelength": 2.4,
    # a tick is a whole number, not the difference to one that stands elsewhere
    "axes.formatter.useoffset": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
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


def spanned_log(low: float, high: float, factor: float = LEAST_FACTOR) -> tuple[float, float]:
    """The limits of a logarithmic axis, moved apart to differ by at least a factor."""
    widen = max(1.0, math.sqrt(factor * low / high))
    return low / widen, high * widen


def finish(figure: Figure) -> None:
    """Give every vertical axis its least span, unless a figure has set its limits, and plain ticks."""
    for axes in figure.axes:
        log = axes.get_yscale() == "log"
        if axes.lines and axes.get_autoscaley_on():
            axes.set_ylim(*(spanned_log if log else spanned)(*axes.get_ylim()))
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


def legend_columns(labels: Sequence[str], width: float, points: float = NAMES) -> int:
    """How many of the labels, each with its line, stand beside each other in so many inches."""
    return max(1, min(len(labels), int(width / (0.5 + 0.0082 * points * max(map(len, labels))))))


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """The legend below all panels, where it covers no point."""
    columns = legend_columns(labels, figure.get_figwidth())
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


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
