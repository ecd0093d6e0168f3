"""Where a report writes its files. Nothing that a report did not write is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from spheret.support.documents import MOST_BYTES
from spheret.support.files import NotRegular, output_path, read_regular, write_atomically

PAGE, TABLES = "report.html", "tables.md"
FIGURES = "figures"
# the names of the files that a report has written, by which it knows its own
LISTING = "files.txt"
HEAD = "written by spheret, which replaces and removes these files of the directory, and no others"


def refuse_other_files(directory: Path, names: Iterable[str] = (PAGE, TABLES)) -> None:
    """Raise if the directory holds a file of one of these names that no earlier report has written."""
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--out {directory} is a file: give a directory.")
    own = _written_before(directory)
    for name in (LISTING, *names):
        path = directory / name
        if name not in own and (path.exists() or path.is_symlink()):
            raise FileExistsError(
                f"--out {directory} holds {name}, which spheret did not write: give another directory."
            )


def _written_before(directory: Path) -> list[str]:
    """The names in the listing of an earlier report, its own included; empty if there is none."""
    try:
        head, *names = read_regular(directory / LISTING, MOST_BYTES).decode().splitlines()
    except (FileNotFoundError, NotRegular, UnicodeDecodeError, ValueError):
        return []
    return [LISTING, *names] if head == HEAD else []


def write_files(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files of a report, and remove what an earlier one had besides. Returns the path of the page."""
    refuse_other_files(directory, files)
    for name in {*_written_before(directory)} - {*files, LISTING}:
        # a name that a stranger put into the listing stays inside
        if (directory / name).resolve().is_relative_to(directory.resolve()):
            (directory / name).unlink(missing_ok=True)
    # before the first file: a report that is killed half-way is known as one
    listing = "\n".join([HEAD, *sorted(files)]).encode() + b"\n"
    for name, data in {LISTING: listing, **files}.items():
        write_atomically(output_path(directory, name), data)
    return directory / PAGE
