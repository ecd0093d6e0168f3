"""Small faults in the mathematics, one at a time: does a test notice each of them?

    python tests/mutate.py                                       every file of TESTS
    python tests/mutate.py kernels/closed.py --lines 90-120      some lines of one file

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
import signal
import sys
import time
from collections.abc import Callable, Iterator
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
    "schedules.py": ["test_schedules.py", PAPER],
    "retractions.py": ["test_retractions.py", PAPER, *KERNELS, "connections/test_retraction_option.py"],
    "connections/base.py": CONNECTIONS,
    "connections/norms.py": [*CONNECTIONS, PAPER],
    "connections/euclidean.py": CONNECTIONS,
    "connections/spherical.py": [*CONNECTIONS, PAPER],
    "kernels/reference.py": KERNELS,
    "kernels/closed.py": [*KERNELS, "connections/test_norms.py"],
}
# left out: compilers and other kernels, and gradient checks that take seconds; --slow runs the latter too
OTHER = "not compile and not inductor and not one_graph and not triton and not native and not no_room"
SLOW = "not everywhere and not second_order and not both_sides and not at_every_step and not extreme and not drift"
# a fault may loop for ever: that is noticed too
SECONDS = 600
# the processes that run tests are silent; the progress goes here
TERMINAL = os.dup(2)

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

    def replace(self, functions: list[FunctionType]) -> bool:
        """Give the functions of the imported file their faulty code; whether there is a fault in one of them."""
        codes, faulty = {(code.co_qualname, code.co_firstlineno): code for code in _inner(self.code)}, False
        for function in functions:
            if function.__code__.co_filename == str(self.path):
                code = codes.get((function.__code__.co_qualname, function.__code__.co_firstlineno), function.__code__)
                if code != function.__code__ and len(code.co_freevars) == len(function.__code__.co_freevars):
                    function.__code__, faulty = code, True
        return faulty

    def import_instead(self) -> None:
        """Let the file's import give the faulty module."""
        load = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
            return self.code if loader.path == str(self.path) else load(loader, fullname)

        importlib.machinery.SourceFileLoader.get_code = get_code


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)


class Forks:
    """A pytest plugin: after the collection, one fork per mutant runs the tests, until one fails."""

    def __init__(self, mutants: list[Mutant]):
        self.mutants, self.survivors, self.report_to = mutants, [], -1

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        functions = [thing for thing in gc.get_objects() if isinstance(thing, FunctionType)]
        # the forks share the memory of these objects as long as no garbage collection touches it
        gc.freeze()
        for mutant in self.mutants:
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                signal.alarm(SECONDS)
                self.report_to = writing
                # a fault outside of all functions shows only when the file is imported
                if not mutant.replace(functions) and mutant.what:
                    os._exit(0)
                # pytest goes on with its own loop
                return None
            os.close(writing)
            with os.fdopen(reading) as pipe:
                failed = pipe.read()
            if os.waitpid(child, 0)[1] == 0:
                self.survivors.append(mutant.number)
            # the test that noticed this fault is likely to notice the next
            session.items.sort(key=lambda item: item.nodeid != failed)
            self.log(mutant, failed)
        return True

    def log(self, mutant: Mutant, failed: str) -> None:
        os.write(TERMINAL, b"." if failed else b"s")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.report_to >= 0:
            os.write(self.report_to, report.nodeid.encode())


def run_pytest(tests: list[str], slow: bool, *plugins: object) -> bool:
    chosen = OTHER if slow else f"{OTHER} and {SLOW}"
    paths = [path for test in tests if os.path.exists(path := f"tests/{test}")]
    arguments = ["-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, *paths]
    return pytest.main(arguments, list(plugins)) == 0


def in_a_fork(job: Callable[[], object]) -> object:
    """The result of the job in a silent child process; None if the child failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            os.write(writing, json.dumps(job()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return json.loads(result) if result else None


def survivors_of(mutants: list[Mutant], tests: list[str], slow: bool) -> list[Mutant]:
    def with_functions_replaced() -> list[int]:
        forks = Forks(mutants)
        passed = run_pytest(tests, slow, forks)
        if forks.report_to >= 0:
            os._exit(not passed)
        return forks.survivors

    def with_the_file_imported(mutant: Mutant) -> bool:
        signal.alarm(SECONDS)
        mutant.import_instead()
        return run_pytest(tests, slow)

    numbers = in_a_fork(with_functions_replaced)
    # without a fault every test passes
    if not isinstance(numbers, list) or -1 not in numbers:
        sys.exit(f"the tests fail without a fault: {' '.join(tests)}")
    first = [mutant for mutant in mutants if mutant.number in numbers and mutant.number != -1]
    return [mutant for mutant in first if in_a_fork(lambda mutant=mutant: with_the_file_imported(mutant))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="FILE", help=", ".join(TESTS))
    parser.add_argument("--lines", default="1-100000", help="only faults in these lines")
    parser.add_argument("--slow", action="store_true", help="run the slow gradient checks too")
    options = parser.parse_args()
    first, last = map(int, options.lines.split("-"))
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in options.files:
        path, start, counter = ROOT / "spheret" / name, time.monotonic(), Mutator()
        counter.visit(ast.parse(path.read_text()))
        mutants = [Mutant(path, number) for number in range(counter.count)]
        mutants = [mutant for mutant in mutants if first <= mutant.line <= last]
        survivors = survivors_of([Mutant(path, -1), *mutants], TESTS[name], options.slow)
        for mutant in survivors:
            print(f"survived: {name}:{mutant.line}  {mutant.what}")
        killed, seconds = len(mutants) - len(survivors), time.monotonic() - start
        print(
            f"{name}: {len(mutants)} mutants, {killed} killed, {len(survivors)} survived, {seconds:.0f} s", flush=True
        )


if __name__ == "__main__":
    main()
