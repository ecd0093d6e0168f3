"""How well colours can be distinguished: CIEDE2000 between them as all and as dichromats see them, and contrast."""

from itertools import combinations

import numpy as np

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
VISION = {
    "trichromat": np.eye(3),
    "deuteranope": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanope": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
# of linear sRGB, with the white point D65
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
# palettes of nine colours, and the first nine of palettes of ten, in their published order
PUBLISHED = {
    "Tol muted": "#cc6677 #332288 #ddcc77 #117733 #88ccee #882255 #44aa99 #999933 #aa4499",
    "Tol light": "#77aadd #ee8866 #eedd88 #ffaabb #99ddff #44bb99 #bbcc33 #aaaa00 #dddddd",
    "ColorBrewer Set1": "#e41a1c #377eb8 #4daf4a #984ea3 #ff7f00 #ffff33 #a65628 #f781bf #999999",
    "ColorBrewer Pastel1": "#fbb4ae #b3cde3 #ccebc5 #decbe4 #fed9a6 #ffffcc #e5d8bd #fddaec #f2f2f2",
    "Okabe-Ito with grey": "#000000 #e69f00 #56b4e9 #009e73 #f0e442 #0072b2 #d55e00 #cc79a7 #999999",
    "Tableau 10": "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22",
    "Petroff 10": "#3f90da #ffa90e #bd1f01 #94a4a2 #832db6 #a96b59 #e76300 #b9ac70 #717581",
}


def linear_rgb(colour):
    """Linear RGB from 0 to 1 of a colour such as "#1f77b4"."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIELAB of linear RGB (..., 3)."""
    f = np.clip(rgb, 0, 1) @ XYZ.T / XYZ.sum(1)
    f = np.where(f > (6 / 29) ** 3, np.cbrt(f), f / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


def ciede2000(first, second):
    """CIEDE2000 between CIELAB colours (..., 3), with all weights 1.

    The names are those of Sharma, Wu and Dalal 2005, "The CIEDE2000 color-difference formula".
    """
    L1, a1, b1 = np.moveaxis(np.asarray(first, float), -1, 0)
    L2, a2, b2 = np.moveaxis(np.asarray(second, float), -1, 0)
    C_mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    G = 0.5 * (1 - np.sqrt(C_mean**7 / (C_mean**7 + 25.0**7)))
    a1, a2 = (1 + G) * a1, (1 + G) * a2
    C1, C2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = np.degrees(np.arctan2(b1, a1)) % 360, np.degrees(np.arctan2(b2, a2)) % 360
    grey = C1 * C2 == 0
    turn = np.where(grey, 0, (h2 - h1 + 180) % 360 - 180)
    # a turn of exactly half a circle keeps its sign
    turn = np.where(h2 - h1 == 180, 180.0, turn)
    dL, dC = L2 - L1, C2 - C1
    dH = 2 * np.sqrt(C1 * C2) * np.sin(np.radians(turn / 2))
    L, C = (L1 + L2) / 2, (C1 + C2) / 2
    apart = np.abs(h1 - h2) > 180
    h = np.where(grey, h1 + h2, np.where(apart, (h1 + h2 + np.where(h1 + h2 < 360, 360, -360)) / 2, (h1 + h2) / 2))
    T = (
        1 - 0.17 * np.cos(np.radians(h - 30)) + 0.24 * np.cos(np.radians(2 * h))
        + 0.32 * np.cos(np.radians(3 * h + 6)) - 0.20 * np.cos(np.radians(4 * h - 63))
    )  # fmt: skip
    S_L = 1 + 0.015 * (L - 50) ** 2 / np.sqrt(20 + (L - 50) ** 2)
    S_C, S_H = 1 + 0.045 * C, 1 + 0.015 * C * T
    R_C = 2 * np.sqrt(C**7 / (C**7 + 25.0**7))
    R_T = -np.sin(np.radians(60 * np.exp(-(((h - 275) / 25) ** 2)))) * R_C
    l, c, h = dL / S_L, dC / S_C, dH / S_H
    return np.sqrt(np.maximum(l**2 + c**2 + h**2 + R_T * c * h, 0))


def least_difference(colours, eye="trichromat"):
    """The least CIEDE2000 between any two of the colours, for one row of VISION."""
    seen = lab(np.array([linear_rgb(colour) for colour in colours]) @ VISION[eye].T)
    first, second = zip(*combinations(seen, 2), strict=True)
    return ciede2000(np.array(first), np.array(second)).min()


def contrast(first, second):
    """The contrast ratio of WCAG 2."""
    low, high = sorted(XYZ[1] @ linear_rgb(colour) for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


def lightness(colour):
    """L* of CIELAB: what is left of the colour in print without colour."""
    return lab(linear_rgb(colour))[0]
