"""Text for LaTeX: every special character is escaped, so that a label of a user is only text."""

from __future__ import annotations

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "\u00b1": r"$\pm$", "\u2212": r"$-$", "|": r"\textbar{}",
}  # fmt: skip


def escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
