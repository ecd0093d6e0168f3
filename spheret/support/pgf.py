"""A matplotlib figure as PGF, the vector graphics of LaTeX, without LaTeX.

matplotlib's own PGF backend starts LaTeX to measure texts. Here the texts are measured with matplotlib's fonts, and
LaTeX sets them in the fonts of the document that inputs the file.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from spheret.support.latex import escape_latex

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = "% \\usepackage{pgf} in the preamble, then \\input{this file}\n"


def to_pgf(figure: Figure) -> str | None:
    """The figure in PGF; None if a part of it is an image. The figure has been drawn before, so it has its layout."""
    if any(artist.get_rasterized() for artist in figure.findobj()):
        return None
    import matplotlib
    from matplotlib.backend_bases import RendererBase
    from matplotlib.backends.backend_pgf import RendererPgf

    class Renderer(RendererPgf):
        def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
            return RendererBase.get_text_width_height_descent(self, s, prop, ismath)

        def draw_text(
            self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
        ) -> None:
            super().draw_text(gc, x, y, escape_latex(s), prop, angle, ismath, mtext)

    file = io.StringIO()
    size = f"{figure.get_figwidth():f}in}}{{{figure.get_figheight():f}in"
    file.write(f"{HEADER}\\begingroup\n\\makeatletter\n\\begin{{pgfpicture}}\n")
    file.write(
        f"\\pgfpathrectangle{{\\pgfpointorigin}}{{\\pgfqpoint{{{size}}}}}\n\\pgfusepath{{use as bounding box}}\n"
    )
    # no font of this machine is named in the file
    with matplotlib.rc_context({"pgf.rcfonts": False}):
        figure.draw(Renderer(figure, file))
    file.write("\\end{pgfpicture}\n\\makeatother\n\\endgroup\n")
    return file.getvalue()
