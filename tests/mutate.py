"""Small faults in the mathematics, one at a time: does a test notice each of them?

    python tests/mutate.py                                       every file of TESTS
    python tests/mutate.py kernels/closed.py --lines 90-120      some lines of one file
    python tests/mutate.py retractions.py --log killed.jsonl     a run that can be stopped and continued

The tests of a file are collected once. Each mutant then runs in a fork, where the faulty functions replace the right
ones, until a test fails. What no test notices there runs once more in a process that imports the faulty file itself,
because a value may have been computed during the collection. A mutant that survives both lacks a test, or its fault
changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib.machinery
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType

# the heavy imports, shared by all mutants; spheret is imported later
import geoopt  # noqa: F401
import hypothesis  # noqa: F401
import pytest
import torch
import torch._decomp.decompositions_for_jvp
import torch._inductor.config
import x_transformers  # noqa: F401

ROOT = Path(__file__).parent.parent
PAPER, KERNELS = "test_paper.py", ["kernels/test_closed.py", "kernels/test_retract.py"]
CONNECTIONS = [
    f"connections/test_{name}.py" for name in ("baselines", "norms", "modules", "retraction_option", "schemes")
]
# the files of spheret/ that hold mathematics, and the tests that should notice a fault in them, the quick ones first
TESTS = {
    "bounds.py": ["test_bounds.py"],
    "connections/bounded.py": ["test_bounds.py"],
    "schedules.py": ["test_schedules.py", PAPER],
    "retractions.py": ["test_retractions.py", PAPER, *KERNELS, "connections/test_retraction_option.py"],
    "connections/base.py": CONNECTIONS,
    "connections/norms.py": [*CONNECTIONS, PAPER],
    "connections/euclidean.py": CONNECTIONS,
    "connections/spherical.py": [*CONNECTIONS, PAPER, "test_bounds.py"],
    "connections/ngpt.py": [*CONNECTIONS, "model/test_inside.py"],
    "kernels/reference.py": KERNELS,
    "kernels/closed.py": [*KERNELS, "connections/test_norms.py"],
}
# left out: compilers and other kernels, and gradient checks that take seconds; --slow runs the latter too
OTHER = "not compile and not inductor and not one_graph and not triton and not native and not no_room"
SLOW = "not everywhere and not second_order and not both_sides and not at_every_step and not extreme and not drift"
# a fault may loop for ever: that is noticed too
SECONDS = 300
UNSURE, CALLS = "?", "calls "

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
# methods whose call is dropped: x.clamp(...) becomes x
DROPPED = {"clamp", "abs", "sign", "to", "detach"}


class Mutator(ast.NodeTransformer):
    """Counts the possible faults of a tree, and applies the one of this number."""

    def __init__(self, number: int = -1):
        self.number, self.count, self.line, self.what = number, 0, 0, ""

    def visit(self, node: ast.AST) -> ast.AST:
        # an error's message and an annotation are no mathematics
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            return node
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = [self.visit(item) if isinstance(item, ast.AST) else item for item in value]
            elif isinstance(value, ast.AST) and name not in ("annotation", "returns"):
                setattr(node, name, self.visit(value))
        fault = self.fault(copy.copy(node))
        if fault is None:
            return node
        self.count += 1
        if self.count - 1 != self.number:
            return node
        self.line, self.what = node.lineno, f"{ast.unparse(node)}  ->  {ast.unparse(fault)}"
        return ast.copy_location(fault, node)

    def fault(self, node: ast.AST) -> ast.AST | None:
        match node:
            case ast.Constant(value=bool(value)):
                node.value = not value
            case ast.Constant(value=int(value) | float(value)):
                node.value = value + 1
            case ast.Compare(ops=[operator]):
                node.ops = [COMPARISONS[type(operator)]()]
            case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OPERATORS:
                node.op = OPERATORS[type(operator)]()
            case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
                return operand
            case ast.IfExp(orelse=other) | ast.Call(func=ast.Attribute(attr="where"), args=[_, _, other]):
                return other
            case ast.Call(func=ast.Attribute(attr=method, value=value)) if method in DROPPED:
                return value
            case _:
                return None
        return node


class Mutant:
    def __init__(self, path: Path, number: int):
        tree, mutator = ast.parse(path.read_text()), Mutator(number)
        mutator.visit(tree)
        self.path, self.number, self.line, self.what = path, number, mutator.line, mutator.what
        self.code = compile(ast.fix_missing_locations(tree), str(path), "exec")
        # the test that noticed it
        self.killer = ""

    def entry(self) -> list[str]:
        """What the log knows it by: as long as the file's code stays the same, so does this."""
        source = sha256(ast.unparse(ast.parse(self.path.read_text())).encode()).hexdigest()
        return [self.path.name, source[:16], str(self.number), self.what]

    def replace(self, functions: list[FunctionType]) -> set[str]:
        """Give the functions of the imported file their faulty code. Returns the names of the faulty ones."""
        codes, replaced = {_name(code): code for code in _inner(self.code)}, set()
        for function in functions:
            right = function.__code__
            code = codes.get(_name(right), right) if right.co_filename == str(self.path) else right
            if code != right and code.co_freevars == right.co_freevars:
                function.__code__ = code
                replaced.add(_name(right))
        return replaced

    def import_instead(self) -> None:
        """Let the file's import give the faulty module."""
        load = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
            return self.code if loader.path == str(self.path) else load(loader, fullname)

        importlib.machinery.SourceFileLoader.get_code = get_code


def _name(code: CodeType) -> str:
    return f"{code.co_qualname}:{code.co_firstlineno}"


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)


class Watch:
    """A pytest plugin: runs the tests `first` before all others, and keeps the name of the first that failed."""

    def __init__(self, first: list[str]):
        self.first, self.failed = first, ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        rank = {name: number for number, name in enumerate(self.first)}
        items.sort(key=lambda item: rank.get(item.nodeid, len(rank)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"import of {report.nodeid}"


class Forks:
    """A pytest plugin: after the collection, one fork per mutant goes on to run the tests, until one fails.

    The first fork has no fault. It notes which functions of the file each test calls, so that a mutant need run only
    the tests that call the faulty function.
    """

    def __init__(self, mutants: list[Mutant], tell: Callable[[Mutant, str], None]):
        self.mutants, self.tell, self.pipe, self.survives = mutants, tell, -1, ""
        # names of functions: called by the collection, and by each test
        self.calls: dict[str, set[str]] = {}
        self.note("")

    def note(self, caller: str) -> None:
        called, path = self.calls.setdefault(caller, set()), str(self.mutants[0].path)
        sys.setprofile(lambda frame, *_: called.add(_name(frame.f_code)) if frame.f_code.co_filename == path else None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # a fixture may serve all the tests of a file
        if self.survives == CALLS:
            self.note(item.nodeid.split("::")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        if self.survives == CALLS:
            self.note(item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        sys.setprofile(None)
        functions = [thing for thing in gc.get_objects() if isinstance(thing, FunctionType)]
        # the forks share the memory of these objects as long as no garbage collection touches it
        gc.freeze()
        for mutant in self.mutants:
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                signal.alarm(SECONDS)
                self.pipe = writing
                if not mutant.what:
                    self.survives = CALLS
                    return None
                replaced = mutant.replace(functions)
                # a fault outside of all functions, or in one that ran already, may show when the file is imported
                self.survives = "" if replaced and replaced.isdisjoint(self.calls[""]) else UNSURE
                session.items[:] = [item for item in session.items if self.called(item.nodeid) & replaced]
                return None
            os.close(writing)
            with os.fdopen(reading) as pipe:
                failed = pipe.read()
            status = os.waitpid(child, 0)[1]
            if failed.startswith(CALLS):
                self.calls |= {test: set(names) for test, names in json.loads(failed[len(CALLS) :]).items() if test}
                failed = ""
            failed = failed or (f"status {status}" if status else "")
            # the test that noticed this fault is likely to notice the next
            session.items.sort(key=lambda item: item.nodeid != failed)
            self.tell(mutant, failed)
        return True

    def called(self, test: str) -> set[str]:
        return self.calls.get(test, set()) | self.calls.get(test.split("::")[0], set())

    def result(self, failed: str) -> str:
        sys.setprofile(None)
        if self.survives == CALLS and not failed:
            return CALLS + json.dumps({test: sorted(names) for test, names in self.calls.items()})
        return failed or self.survives


def run_pytest(tests: list[str], slow: bool, first: list[str], *plugins: object) -> str:
    """The first test that fails, "" if none does."""
    chosen, watch = OTHER if slow else f"{OTHER} and {SLOW}", Watch(first)
    paths = [path for test in tests if os.path.exists(path := f"tests/{test}")]
    arguments = ["-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, *paths]
    status = pytest.main(arguments, [watch, *plugins])
    return watch.failed or (f"pytest {status}" if status else "")


def in_a_fork(job: Callable[[Callable[[Mutant, str], None]], None]) -> Iterator[tuple[int, str]]:
    """What the job tells in a silent child process, (number of the mutant, the test that failed)."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            job(lambda mutant, failed: os.write(writing, f"{json.dumps((mutant.number, failed))}\n".encode()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        yield from (json.loads(line) for line in pipe)
    os.waitpid(child, 0)


def try_all(mutants: list[Mutant], tests: list[str], slow: bool) -> Iterator[Mutant]:
    """The mutants, as soon as it is known which test kills them. A survivor has no killer."""

    def with_functions_replaced(tell: Callable[[Mutant, str], None]) -> None:
        forks = Forks([Mutant(mutants[0].path, -1), *mutants], tell)
        failed = run_pytest(tests, slow, [], forks)
        if forks.pipe >= 0:
            with os.fdopen(forks.pipe, "w") as pipe:
                pipe.write(forks.result(failed))
            os._exit(0)

    def with_the_file_imported(tell: Callable[[Mutant, str], None], mutant: Mutant) -> None:
        signal.alarm(SECONDS)
        mutant.import_instead()
        tell(mutant, run_pytest(tests, slow, killers))

    numbers, killers = {mutant.number: mutant for mutant in mutants}, []
    results = in_a_fork(with_functions_replaced)
    # without a fault every test passes
    if next(results, None) != [-1, ""]:
        sys.exit(f"the tests fail without a fault: {' '.join(tests)}")
    for number, failed in results:
        numbers[number].killer = failed
        if failed not in ("", UNSURE):
            killers = [failed, *(name for name in killers if name != failed)]
        if failed != UNSURE:
            yield numbers[number]
    for mutant in mutants:
        if mutant.killer == UNSURE:
            [(_, mutant.killer)] = list(in_a_fork(lambda tell, m=mutant: with_the_file_imported(tell, m))) or [
                (mutant.number, "no answer")
            ]
            yield mutant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="FILE", help=", ".join(TESTS))
    parser.add_argument("--lines", default="1-100000", help="only faults in these lines")
    parser.add_argument("--sample", type=int, default=100000, help="at most so many faults per file, chosen by a seed")
    parser.add_argument("--slow", action="store_true", help="run the slow gradient checks too")
    parser.add_argument("--log", type=Path, help="a file of killed mutants, which are not tried again")
    options = parser.parse_args()
    first, last = map(int, options.lines.split("-"))
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    log = options.log.absolute() if options.log else Path(os.devnull)
    known = [json.loads(line)["mutant"] for line in log.read_text().splitlines()] if log.exists() else []
    for name in options.files:
        path, start, counter = ROOT / "spheret" / name, time.monotonic(), Mutator()
        counter.visit(ast.parse(path.read_text()))
        mutants = [Mutant(path, number) for number in range(counter.count)]
        mutants = [mutant for mutant in mutants if first <= mutant.line <= last]
        mutants = random.Random(0).sample(mutants, min(options.sample, len(mutants)))
        new, survived = [mutant for mutant in mutants if mutant.entry() not in known], 0
        for mutant in try_all(new, TESTS[name], options.slow) if new else ():
            if mutant.killer:
                with log.open("a") as lines:
                    print(json.dumps({"mutant": mutant.entry(), "killer": mutant.killer}), file=lines)
            else:
                survived += 1
                print(f"survived: {name}:{mutant.line}  {mutant.what}", flush=True)
        print(
            f"{name}: {counter.count} mutants, {len(mutants)} tried, {len(mutants) - survived} killed, "
            f"{survived} survived, {time.monotonic() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
