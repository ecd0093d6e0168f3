"""Search nine colours that are told apart on white, on the dark page and by dichromats; prints rows for PALETTE.

    python tests/lab/search_palette.py --seed 0 --steps 60000

A colour is a lightness, a chroma and a hue of CIELAB. Each contestant has one colour for white and one for the dark
page, of about the same hue. The search moves one colour at a time and anneals the worst ratio of a difference to
its target. The rows that it prints were put into the order of the schemes by hand.
"""

import argparse
import math

import numpy as np
from colour_difference import VISION, XYZ, ciede2000, lab, least_difference, linear_rgb

COUNT = 9
# the differences that a ratio of 1 stands for
TARGETS = {"trichromat": 21.0, "deuteranope": 15.0, "protanope": 12.5}
# lightness: from not near black to a contrast of 3 with white; from a contrast of 3 with the dark page to not white
LIGHTNESS = ((30.0, 61.0), (52.0, 89.0))
CHROMA = (30.0, 85.0)
# degrees between the two colours of a contestant
HUE_APART = 20.0
# lightness between any two colours of one page, which is all that print in greys keeps
GREY_TARGET = 2.0


def to_rgb(lch):
    """Linear RGB of lightness, chroma and hue. Outside 0 to 1 no screen shows it."""
    L, C, h = np.moveaxis(lch, -1, 0)
    fy = (L + 16) / 116
    f = np.stack([fy + C * np.cos(np.radians(h)) / 500, fy, fy - C * np.sin(np.radians(h)) / 200], -1)
    xyz = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * XYZ.sum(1)
    return xyz @ np.linalg.inv(XYZ).T


def to_hex(lch):
    rgb = np.clip(to_rgb(lch), 0, 1)
    rgb = np.where(rgb <= 0.0031308, 12.92 * rgb, 1.055 * rgb ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * float(part)):02x}" for part in rgb)


def allowed(colour, page):
    low, high = LIGHTNESS[page]
    rgb = to_rgb(colour)
    return low <= colour[0] <= high and CHROMA[0] <= colour[1] <= CHROMA[1] and rgb.min() >= 0 and rgb.max() <= 1


def seen(colours):
    """How each row of VISION sees the colours: (eyes, colours, 3)."""
    return np.stack([lab(to_rgb(colours) @ VISION[eye].T) for eye in TARGETS])


def ratios(views, index):
    """Differences of one colour to the others over their targets: (eyes, colours)."""
    result = ciede2000(views, views[:, index : index + 1]) / np.array(list(TARGETS.values()))[:, None]
    grey = np.abs(views[0, :, 0] - views[0, index, 0]) / GREY_TARGET
    result = np.concatenate([result, grey[None]])
    result[:, index] = np.inf
    return result


def soft_least(values):
    """A smooth least value: it also rewards the second worst pair."""
    return -np.log(np.exp(-25 * values).sum()) / 25


def search(seed, steps):
    generator = np.random.default_rng(seed)
    colours = np.zeros((2, COUNT, 3))
    for index in range(COUNT):
        hue = 360 * (index + generator.random()) / COUNT
        for page in (0, 1):
            tries = 0
            while not allowed(colours[page, index], page):
                # some hues have too little chroma at every allowed lightness
                tries += 1
                spread = 9 if tries < 1000 else 40
                L = generator.uniform(*LIGHTNESS[page])
                colours[page, index] = L, generator.uniform(CHROMA[0], 80), hue + generator.uniform(-spread, spread)
    pairs = np.triu_indices(COUNT, 1)
    tables, views = [], []
    for page in (0, 1):
        views.append(seen(colours[page]))
        tables.append(np.stack([ratios(views[page], index) for index in range(COUNT)], 1))
    scores = [soft_least(table[:, pairs[0], pairs[1]]) for table in tables]
    best, kept = -math.inf, colours.copy()
    for step in range(steps):
        heat = 1 - step / steps
        page, index = generator.integers(2), generator.integers(COUNT)
        moved = colours[page].copy()
        moved[index] += generator.normal(size=3) * np.array([6, 12, 15]) * (0.05 + heat)
        moved[index, 2] %= 360
        other = colours[1 - page, index, 2]
        if not allowed(moved[index], page) or abs((moved[index, 2] - other + 180) % 360 - 180) > HUE_APART:
            continue
        view = views[page].copy()
        view[:, index] = seen(moved[index][None])[:, 0]
        row = ratios(view, index)
        table = tables[page].copy()
        table[:, index], table[:, :, index] = row, row
        score = soft_least(table[:, pairs[0], pairs[1]])
        if score > scores[page] or generator.random() < math.exp((score - scores[page]) / (0.02 * heat**2 + 1e-6)):
            colours[page], views[page], tables[page], scores[page] = moved, view, table, score
            if min(scores) > best:
                best, kept = min(scores), colours.copy()
    return best, kept


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60000)
    arguments = parser.parse_args()
    _, colours = search(arguments.seed, arguments.steps)
    order = np.argsort(colours[0, :, 2])
    rows = [(to_hex(colours[0, index]), to_hex(colours[1, index])) for index in order]
    for row in rows:
        print(row, *(f"L {lab(linear_rgb(colour))[0]:.0f}" for colour in row))
    for page, name in enumerate(("white", "dark")):
        least = {eye: least_difference([row[page] for row in rows], eye) for eye in VISION}
        print(name, ", ".join(f"{eye} {value:.1f}" for eye, value in least.items()))


if __name__ == "__main__":
    main()
