"""Charts and maps as SVG, made in milliseconds: for pages that are written again while a training goes on.

A chart is drawn from the numbers that its interactive twin has, so that the page is whole without scripts.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import escape

from spheret.lab.page.charts import Chart
from spheret.support.figure_style import GRID, INK, PALETTE, Drawing, spanned, spanned_log

WIDTH, HEIGHT = 460.0, 290.0
# where the plot begins and ends
LEFT, RIGHT, TOP, BOTTOM = 50.0, 448.0, 26.0, 246.0
# matplotlib's cividis at equal distances; between them it is straight to 3% of a channel
CIVIDIS = (
    "00224e", "013271", "2f426d", "49536c", "5e636f", "727374", "878478", "9d9576", "b5a86f", "cebc63", "e7d150",
    "fee838",
)  # fmt: skip
# letters are about so wide
LETTER = 5.6
# names of marks, and labels of ticks, keep such a distance
APART = 46.0


@dataclass(frozen=True)
class Scale:
    """Places of values on one axis, from the place of the lowest to that of the highest."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round numbers, a few of them."""
        if self.log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            stride, digits = max(1, len(exponents) // 6), (1, 2, 5) if self.high < 300 * self.low else (1,)
            every = [digit * 10.0**exponent for exponent in exponents[::stride] for digit in digits]
        else:
            rough = (self.high - self.low) / 6
            unit = 10.0 ** math.floor(math.log10(rough))
            step = next(digit * unit for digit in (1, 2, 5, 10) if digit * unit >= rough * 0.999)
            # a product of an integer, so that 0 is 0
            every = [step * k for k in range(math.floor(self.low / step), math.ceil(self.high / step) + 1)]
        slack = 1e-9 * (self.high - self.low)
        return [value for value in every if self.low - slack <= value <= self.high + slack]


def spread_scale(values: Iterable[float], start: float, end: float, log: bool = False, least: float = 0.01) -> Scale:
    """A scale that holds all values. It spans at least `least` and the share or factor of every figure."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(known), max(known)) if known else (1.0, 1.0) if log else (0.0, 0.0)
    if log:
        low, high = spanned_log(low, high)
        return Scale(low / 1.05, high * 1.05, start, end, log=True)
    low, high = spanned(low, high)
    margin = max(0.05 * (high - low), (least - (high - low)) / 2)
    return Scale(low - margin, high + margin, start, end)


def _number(value: float) -> str:
    return f"{value:.6g}".replace("e+0", "e").replace("e-0", "e-")


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK, size: float = 10) -> str:
    style = f"fill: {colour}; text-anchor: {anchor}; font-size: {size:g}px"
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = GRID, width: float = 0.7, dash: str = "") -> str:
    dashes = f"; stroke-dasharray: {dash}" if dash else ""
    return (
        f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" style="stroke: {colour}; stroke-width: {width:g}{dashes}"/>'
    )


def _whole(name: str, caption: str, parts: Sequence[str], height: float = HEIGHT) -> Drawing:
    """The parts as a figure. It has no PNG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}pt" '
        f'height="{height:g}pt" font-family="sans-serif" fill="none">'
    )
    return Drawing(name, caption, "\n".join([head, *parts, "</svg>\n"]), b"")


def draw_chart(name: str, caption: str, chart: Chart) -> Drawing:
    """The lines of a chart, with ranges shaded, a cross where a run diverged, and marks at their steps."""
    log, every = chart["log"], [line for series in chart["series"] for line in series["lines"]]
    places = [x for xs in chart["xs"] for x in xs]
    across = spread_scale(places[:1], LEFT, RIGHT, least=2)
    if min(places) < max(places):
        across = Scale(min(places), max(places), LEFT, RIGHT)
    if chart["range"]:
        low, high = chart["range"]
        up = Scale(low, high, BOTTOM, TOP)
    else:
        up = spread_scale((y for line in every for y in (*line["y"], *line.get("high", ()))), BOTTOM, TOP, log)
    parts = [*_grid(across, up), *_names(chart["x"], chart["y"])]
    parts.append(
        f'<clipPath id="area"><rect x="{LEFT:g}" y="{TOP:g}" width="{RIGHT - LEFT:g}" height="{BOTTOM - TOP:g}"/>'
        '</clipPath><g clip-path="url(#area)">'
    )
    # the first is drawn last, above the others
    for series in reversed(chart["series"]):
        parts += _series(series, chart["xs"], across, up)
    parts.append("</g>")
    parts += _marks(chart.get("marks", ()), across)
    legend, height = _legend(chart["series"])
    return _whole(name, caption, [*parts, *legend], height)


def _grid(across: Scale, up: Scale) -> list[str]:
    parts = []
    for tick in up.ticks:
        y = up.place(tick)
        parts += [_line(LEFT, y, RIGHT, y), _text(LEFT - 5, y + 3.5, _number(tick), "end")]
    for tick in across.ticks:
        x = across.place(tick)
        parts += [_line(x, TOP, x, BOTTOM), _text(x, BOTTOM + 14, _number(tick), "middle")]
    return [*parts, _line(LEFT, BOTTOM, RIGHT, BOTTOM, INK, 0.8)]


def _names(x: str, y: str) -> list[str]:
    return [_text(2, 11, y), _text(RIGHT, BOTTOM + 28, x, "end")]


def _series(series: dict[str, Any], xs: Sequence[Sequence[float]], across: Scale, up: Scale) -> list[str]:
    colour, parts = PALETTE[series["colour"]][0], []
    dash = " ".join(f"{1.6 * length:g}" for length in series["dash"])
    for line in series["lines"]:
        columns = [line["y"], line["low"], line["high"]] if "low" in line else [line["y"]]
        known = [
            (across.place(x), [up.place(y) for y in ys])
            for x, *ys in zip(xs[line["x"]], *columns, strict=True)
            if not up.log or min(ys) > 0
        ]
        if not known:
            continue
        if "low" in line:
            upper = [f"{x:.1f} {ys[2]:.1f}" for x, ys in known]
            lower = [f"{x:.1f} {ys[1]:.1f}" for x, ys in reversed(known)]
            area = "L".join([*upper, *lower])
            parts.append(f'<path d="M{area}Z" style="fill: {colour}; fill-opacity: 0.2"/>')
        points = "L".join(f"{x:.1f} {ys[0]:.1f}" for x, ys in known)
        if len(known) == 1:
            parts.append(f'<circle cx="{known[0][0]:.1f}" cy="{known[0][1][0]:.1f}" r="3" style="fill: {colour}"/>')
        else:
            dashes = f"; stroke-dasharray: {dash}" if dash else ""
            parts.append(f'<path d="M{points}" style="stroke: {colour}; stroke-width: 1.6{dashes}"/>')
        if series["diverged"]:
            x, y = known[-1][0], known[-1][1][0]
            cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8M{x - 4:.1f} {y + 4:.1f}l8 -8"
            parts.append(f'<path d="{cross}" style="stroke: {colour}; stroke-width: 2.5"/>')
    return parts


def _marks(marks: Sequence[dict[str, Any]], across: Scale) -> list[str]:
    parts, free = [], LEFT
    for mark in marks:
        x, colour = across.place(mark["x"]), PALETTE[mark["colour"]][0]
        parts.append(_line(x, TOP, x, BOTTOM, colour, 1.0, "4 2"))
        width = LETTER * len(mark["text"])
        # a name that would lie on another one, or beyond the plot, is left out or put to the left
        if x >= free:
            left = x + width > RIGHT
            parts.append(_text(x - 3 if left else x + 3, TOP + 9, mark["text"], "end" if left else "start", colour))
            free = x + width + 6
    return parts


def _legend(series: Sequence[dict[str, Any]]) -> tuple[list[str], float]:
    """A line and a name per series, in rows below the plot; and the height of the whole figure."""
    if len(series) < 2:
        return [], HEIGHT
    parts, x, y = list[str](), LEFT, HEIGHT
    for each in series:
        label = each["label"] + (" (x: diverged)" if each["diverged"] else "")
        width = 34 + LETTER * len(label)
        if x > LEFT and x + width > RIGHT:
            x, y = LEFT, y + 15
        dash = " ".join(f"{1.6 * length:g}" for length in each["dash"])
        parts.append(_line(x, y - 3.5, x + 20, y - 3.5, PALETTE[each["colour"]][0], 2, dash))
        parts.append(_text(x + 25, y, label))
        x += width
    return parts, y + 8


@dataclass(frozen=True)
class Ring:
    """A cell of a map that stands out. colour: a number of the palette."""

    row: int
    column: int
    colour: int


def draw_map(
    name: str,
    caption: str,
    values: np.ndarray,
    columns: Sequence[int],
    x: str,
    y: str,
    ends: tuple[float, float] | None = None,
    log: bool = False,
    rings: Sequence[Ring] = (),
) -> Drawing:
    """A map of values by row, the first at the bottom, and column, whose names are numbers. NaN is left empty.

    ends: the range of the colours; by default that of the values.
    """
    right, bar = RIGHT - 56, RIGHT - 44
    flat = [float(value) for value in values[np.isfinite(values)]]
    colours = Scale(*ends, BOTTOM, TOP) if ends else spread_scale(flat, BOTTOM, TOP, log)
    rows, width = values.shape
    parts = [
        _image(_shares(values, colours)[::-1], LEFT, TOP, right - LEFT, BOTTOM - TOP),
        _image(np.linspace(1, 0, 64)[:, None], bar, TOP, 10, BOTTOM - TOP),
    ]
    for tick in colours.ticks:
        parts.append(_text(bar + 14, colours.place(tick) + 3.5, _number(tick)))
    high = (BOTTOM - TOP) / rows
    for row in sorted({0, *(k for k in range(rows) if (k + 1) % max(1, -(-rows // 6)) == 0)}):
        parts.append(_text(LEFT - 5, BOTTOM - (row + 0.5) * high + 3.5, str(row + 1), "end"))
    wide, free = (right - LEFT) / width, -math.inf
    for index, number in enumerate(columns):
        place = LEFT + (index + 0.5) * wide
        if place >= free:
            parts.append(_text(place, BOTTOM + 14, _number(number), "middle"))
            free = place + APART
    for ring in rings:
        at = f'cx="{LEFT + (ring.column + 0.5) * wide:.1f}" cy="{BOTTOM - (ring.row + 0.5) * high:.1f}"'
        # a white rim keeps it apart from any colour below
        parts.append(f'<circle {at} r="5" style="stroke: #fff; stroke-width: 3.4"/>')
        parts.append(f'<circle {at} r="5" style="stroke: {PALETTE[ring.colour][0]}; stroke-width: 1.8"/>')
    return _whole(name, caption, [*parts, _text(2, 11, y), _text(right, BOTTOM + 28, x, "end")])


def _shares(values: np.ndarray, scale: Scale) -> np.ndarray:
    """From 0 for the lowest to 1 for the highest value of a scale. On a log scale 0 is the lowest."""
    low, high = scale.low, scale.high
    if scale.log:
        values, low, high = np.log10(np.maximum(values, low)), math.log10(low), math.log10(high)
    return np.clip((values - low) / (high - low), 0, 1)


def _image(shares: np.ndarray, x: float, y: float, width: float, height: float) -> str:
    """One pixel per value, in the colours of cividis."""
    anchors = np.array([list(bytes.fromhex(colour)) for colour in CIVIDIS])
    places = np.linspace(0, 1, len(CIVIDIS))
    known = np.isfinite(shares)
    channels = [np.interp(np.where(known, shares, 0), places, anchors[:, channel]) for channel in range(3)]
    pixels = np.stack([*channels, np.where(known, 255, 0)], axis=-1).round().astype(np.uint8)
    data = base64.b64encode(_png(pixels)).decode()
    return (
        f'<image x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering: pixelated" href="data:image/png;base64,{data}"/>'
    )


def _png(pixels: np.ndarray) -> bytes:
    """A PNG of pixels with red, green, blue and opacity."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
