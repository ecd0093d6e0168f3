"""Build dist/*.tar.gz and dist/*.whl, twice the same bytes from the same files: `make dist`.

The archives carry the time of the last commit. Setuptools writes the times and the owner of the files into an
sdist, so that it is packed again without them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


def git(*words: str) -> str | None:
    """What git prints; None outside of a repository."""
    found = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, encoding="utf-8", check=False)
    return found.stdout if found.returncode == 0 else None


def epoch() -> int:
    """The time of the last commit; that of pyproject.toml outside of a repository."""
    found = git("log", "-1", "--format=%ct")
    return int((ROOT / "pyproject.toml").stat().st_mtime) if found is None else int(found)


def left_out(path: Path) -> set[str]:
    """The files of the repository that an sdist lacks, apart from git's own."""
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    return {*(git("ls-files") or "").splitlines()} - {".gitattributes", ".gitignore"} - held


def packed_again(path: Path, when: int) -> None:
    """Rewrite an sdist in the order of its names, with one time and no owner."""
    content = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = when, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() or member.mode & 0o100 else 0o644, {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=when) as packed:
        packed.write(content.getvalue())


def build() -> dict[str, str]:
    """Build into an empty dist/. Returns the sha256 of each file."""
    shutil.rmtree(DIST, ignore_errors=True)
    for left in (ROOT / "build" / "lib", ROOT / "spheret.egg-info"):
        shutil.rmtree(left, ignore_errors=True)
    when = epoch()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(when)}
    asked = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST), str(ROOT)]
    subprocess.run(asked, check=True, env=environment, stdout=subprocess.DEVNULL)
    for path in DIST.glob("*.tar.gz"):
        packed_again(path, when)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(DIST.iterdir())}


def main() -> None:
    first = build()
    again = build()
    if first != again:
        raise SystemExit(f"two builds of the same files differ: {first} and {again}")
    for path in DIST.glob("*.tar.gz"):
        if lacks := sorted(left_out(path)):
            raise SystemExit(f"{path.name} lacks {', '.join(lacks)}: name them in MANIFEST.in")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, DIST.iterdir())], check=True)
    for name, digest in again.items():
        print(f"{digest}  dist/{name}")


if __name__ == "__main__":
    main()
