"""Take the pictures of pages that the docs show, in both themes, with a browser without a window.

NAME.png is light and NAME-dark.png is dark: the site and README show the one of the reader's theme.

python docs/figures/screenshots.py                                     # of the explorer
spheret race
python docs/figures/screenshots.py runs/race/report/report.html        # of a report
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "helpers"))

import headless  # noqa: E402

# name of the picture: width and height of the window
REPORT = {"report-1280": (1280, 845)}
EXPLORER = {"explorer": (1280, 990)}


def compressed(png: bytes) -> bytes:
    """The same picture in the 256 colours that are nearest to its own."""
    small = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, kmeans=4, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    return small.getvalue()


def take(page: Path, shots: dict[str, tuple[int, int]], profile: str) -> None:
    """Take each picture in both themes. A page that does not fit is not shown."""
    browser = headless.Browser(profile)
    try:
        for name, (width, height) in shots.items():
            for scheme, suffix in (("light", ""), ("dark", "-dark")):
                errors, _ = browser.open(page.resolve().as_uri(), width, scheme, height)
                faults = [*errors, *browser.misfits()]
                assert not faults, faults
                (HERE / f"{name}{suffix}.png").write_bytes(compressed(browser.screenshot(whole=False)))
    finally:
        browser.close()


def main(report: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if report is not None:
            take(Path(report), REPORT, folder)
        else:
            take(HERE.parent / "static" / "explorer.html", EXPLORER, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
