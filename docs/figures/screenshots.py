"""Take the pictures of pages that the docs show, with a browser without a window.

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

from spheret.lab.explore import explorer_page  # noqa: E402

# name of the picture: width and height of the window, and the theme
REPORT = {
    "report-1280": (1280, 800, "light"),
    "report-1920": (1920, 1080, "dark"),
    "report-420": (420, 1060, "light"),
}
EXPLORER = {"explorer": (1280, 990, "light")}


def compressed(png: bytes) -> bytes:
    """The same picture in the 256 colours that are nearest to its own."""
    small = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, kmeans=4, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    return small.getvalue()


def take(page: Path, shots: dict[str, tuple[int, int, str]], profile: str) -> None:
    browser = headless.Browser(profile)
    try:
        for name, (width, height, scheme) in shots.items():
            errors, _ = browser.open(page.resolve().as_uri(), width, scheme, height)
            assert not errors, errors
            browser.painted()
            (HERE / f"{name}.png").write_bytes(compressed(browser.screenshot(whole=False)))
    finally:
        browser.close()


def main(report: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if report is not None:
            take(Path(report), REPORT, folder)
            return
        page = Path(folder) / "explorer.html"
        page.write_bytes(explorer_page())
        take(page, EXPLORER, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
