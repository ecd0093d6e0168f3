"""Write the table of settings into docs/settings.md, from their declarations: python docs/settings.py"""

import re
from pathlib import Path

from spheret.flags import default_words, with_size_words
from spheret.runs.config import SECTIONS
from spheret.support.settings import declared
from spheret.train.recipes import SMALL

PAGE = Path(__file__).with_name("settings.md")
MARKED = re.compile(r"(?<=<!-- settings -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table() -> str:
    """One row per setting."""
    rows = [("setting", "flag", "default", "default with `--size`", "meaning"), ("---",) * 5]
    for section, kind in SECTIONS.items():
        for name, said in declared(kind).items():
            flag = said.flag_of(name)
            default, sized = default_words(section, name, SMALL.sections), with_size_words(section, name)
            rows.append((f"`{section}.{name}`", f"`--{flag}`" if flag else "", default, sized, said.help))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page() -> str:
    """docs/settings.md with the table written anew."""
    return MARKED.sub(lambda _: table(), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_bytes(page().encode())
