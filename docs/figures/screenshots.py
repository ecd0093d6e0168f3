"""Take the pictures of a report that docs/report.md shows, with a browser without a window.

spheret race
python docs/figures/screenshots.py runs/race/report/report.html
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "lab"))

import headless  # noqa: E402

# name of the picture: width and height of the window, and the theme
SHOTS = {"report-1280": (1280, 800, "light"), "report-1920": (1920, 1080, "dark"), "report-420": (420, 1060, "light")}


def compressed(png: bytes) -> bytes:
    """The same picture in the 256 colours that are nearest to its own."""
    small = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, kmeans=4, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    return small.getvalue()


def main(page: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        browser = headless.Browser(profile)
        try:
            for name, (width, height, scheme) in SHOTS.items():
                errors, _ = browser.open(page.resolve().as_uri(), width, scheme, height)
                assert not errors, errors
                browser.painted()
                (HERE / f"{name}.png").write_bytes(compressed(browser.screenshot(whole=False)))
        finally:
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
