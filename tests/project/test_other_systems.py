"""Windows, macOS and a Linux without a compiler: what they lack is taken away here, and every job must go on."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import other_systems
import pytest

from spheret.support.child import python_environment

ROOT = Path(__file__).parents[2]
# modules that Windows lacks
POSIX = {*other_systems.MODULES, "crypt", "nis", "posix", "readline", "spwd"}
# names of os and signal that are gone there, each with the files that look before they use it or serve Linux alone
GONE = {
    **dict.fromkeys([*other_systems.FUNCTIONS, *other_systems.SIGNALS], frozenset[str]()),
    "geteuid": {"kernels/native.py"}, "getuid": {"lab/executors/slurm.py"},
    "sched_getaffinity": {"support/machine.py"}, "sysconf": {"support/machine.py"},
    "O_NOFOLLOW": {"kernels/native.py", "support/files.py"},
    "O_NONBLOCK": {"kernels/native.py", "support/files.py"},
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str | None]:
    """What went wrong with each job on each system."""
    command = [sys.executable, "-X", "warn_default_encoding", "-W", "ignore::EncodingWarning", other_systems.__file__]
    done = subprocess.run(
        [*command, str(prepared), str(tmp_path_factory.mktemp("systems"))],
        env=python_environment(), capture_output=True, encoding="utf-8",
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert rows, done.stderr
    return {(system, job): wrong for system, job, wrong in rows}


@pytest.mark.skipif(sys.platform != "linux", reason="what is open is read from /proc")
@pytest.mark.parametrize("job", other_systems.JOBS)
@pytest.mark.parametrize("system", other_systems.SYSTEMS)
def test_a_job_goes_on(system: str, job: str, outcomes: dict[tuple[str, str], str | None]) -> None:
    assert outcomes[system, job] is None, outcomes[system, job]


def guarded(tree: ast.AST) -> set[ast.AST]:
    """What stands in a function, or in a `try` that takes an ImportError."""
    blocks = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try)
    found = [
        block
        for block in ast.walk(tree)
        if isinstance(block, blocks)
        and (not isinstance(block, ast.Try) or "ImportError" in "".join(map(ast.dump, block.handlers)))
    ]
    return {node for block in found for node in ast.walk(block)}


def imported(tree: ast.AST) -> Iterator[str]:
    inside = guarded(tree)
    for node in ast.walk(tree):
        if node not in inside and isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif node not in inside and isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def unnamed(tree: ast.AST) -> Iterator[str]:
    """Calls that read or write text in the encoding of the system, or write files with its ends of lines."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        named = {word.arg: word.value for word in node.keywords}
        modes = [each.value for each in [*node.args, *named.values()] if isinstance(each, ast.Constant)]
        binary = any(isinstance(mode, str) and len(mode) < 4 and "b" in mode for mode in modes)
        owner = ast.unparse(node.func)
        if (
            (called == "read_text" and "encoding" not in named)
            or called == "write_text"
            or (called in ("open", "fdopen") and owner != "os.open" and not binary and "encoding" not in named)
            or (owner.startswith("subprocess.") and {"text", "universal_newlines"} & named.keys())
        ):
            yield f"line {node.lineno}: {owner}"


def wrong_of(name: str, tree: ast.AST) -> Iterator[str]:
    yield from POSIX & set(imported(tree))
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    yield from (each for each in GONE if used & {f"os.{each}", f"signal.{each}"} and name not in GONE[each])
    yield from unnamed(tree)


def test_no_module_asks_for_what_a_system_lacks() -> None:
    found = {}
    for path in (ROOT / "spheret").rglob("*.py"):
        name = path.relative_to(ROOT / "spheret").as_posix()
        found[name] = list(wrong_of(name, ast.parse(path.read_text(encoding="utf-8"))))
    assert len(found) > 100
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_the_rules_find_what_they_are_for() -> None:
    wrong = """
import fcntl
path.read_text(), path.write_text(text, encoding="utf-8"), path.open("w"), open(path)
subprocess.run(words, text=True), os.fork(), signal.SIGKILL
"""
    right = """
try:
    import fcntl
except ImportError:
    fcntl = None
path.read_text(encoding="utf-8"), path.open("xb"), open(path, "rb"), os.open(path, 0)
subprocess.run(words, encoding="utf-8"), bar.add(text=text), os.getpid(), signal.SIGTERM
"""
    assert len(list(wrong_of("cli.py", ast.parse(wrong)))) == 8
    assert not list(wrong_of("cli.py", ast.parse(right)))
