"""Small faults in the mathematics, one at a time: does a test notice each of them?

    python tests/mutation/mutate.py                             every file of TESTS
    python tests/mutation/mutate.py retractions.py --log F      a run that can be stopped and continued

The tests of a file are collected once. Each mutant then runs in a fork, where the faulty functions replace the right
ones, until a test fails. Only the tests that call a faulty function run there. A fault that shows only when the file
is imported runs in a process that imports the faulty file. A survivor lacks a test, or its fault changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import TextIO

# the heavy imports, shared by all mutants; spheret is imported later
import geoopt  # noqa: F401
import hypothesis  # noqa: F401
import pytest
import torch
import torch._decomp.decompositions_for_jvp
import torch._inductor.config
import x_transformers  # noqa: F401
from mutants import Mutant, Mutator, function_name

ROOT = Path(__file__).parents[2]
PAPER, BOUNDS, REFUSALS = "paper/test_paper_propositions.py", "test_bounds.py", "reliability/test_refusals.py"
KERNELS = ["kernels/test_closed.py", "kernels/test_retract.py"]
ROOM = [
    *(f"connections/test_{name}.py" for name in ("baselines", "rivals", "norms", "modules", "options", "schemes")),
    REFUSALS,
]
# the files of spheret/ that hold mathematics, and the tests that should notice a fault in them, the quick ones first
TESTS = {
    "bounds.py": [BOUNDS],
    "schedules.py": ["test_schedules.py", PAPER, REFUSALS],
    "retractions.py": ["test_retractions.py", PAPER, *KERNELS, "connections/test_options.py", REFUSALS],
    "connections/base.py": ROOM,
    "connections/bounded.py": [BOUNDS],
    "connections/earlier_states.py": [*ROOM, "connections/test_many_streams.py"],
    "connections/euclidean.py": ROOM,
    "connections/geonorm_affine.py": ROOM,
    "connections/many_streams.py": [*ROOM, "connections/test_many_streams.py"],
    "connections/ngpt.py": [*ROOM, "model/test_inside.py", "model/test_backbone.py"],
    "connections/norms.py": [*ROOM, PAPER],
    "connections/spherical.py": [*ROOM, PAPER, BOUNDS],
    "model/branches.py": ["model/test_backbone.py", "model/test_inside.py"],
    "kernels/closed.py": [*KERNELS, "connections/test_norms.py"],
    "kernels/streams.py": ["kernels/test_streams.py", "connections/test_many_streams.py"],
    "kernels/reference.py": KERNELS,
}
# left out: compilers and other kernels, and gradient checks that take seconds; --slow runs the latter too
OTHER = "not compile and not inductor and not one_graph and not triton and not native and not no_room"
# commands: they take seconds
OTHER += " and not what_is_refused"
SLOW = "not everywhere and not second_order and not both_sides and not at_every_step and not extreme and not drift"
SLOW += " and not gets_its_gradient"
# a fault may loop for ever: that is noticed too
SECONDS = 300
# what a fork answers if no test fails: a mutant that may show later, and the functions that each test calls
UNSURE, CALLS = "unsure", "calls "


def fork() -> tuple[int, TextIO]:
    """The child's id and its answers; in the child 0 and where to write them."""
    reading, writing = os.pipe()
    child = os.fork()
    os.close(writing if child else reading)
    return child, os.fdopen(reading) if child else os.fdopen(writing, "w", buffering=1)


class Watch:
    """A pytest plugin: the tests `first` run before all others. `failed` is the first test that fails."""

    def __init__(self, first: list[str]):
        self.first, self.failed = first, ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.first.index(item.nodeid) if item.nodeid in self.first else len(self.first))

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    pytest_collectreport = pytest_runtest_logreport

    def run(self, tests: list[str], slow: bool) -> str:
        chosen = OTHER if slow else f"{OTHER} and {SLOW}"
        arguments = ["-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen]
        status = pytest.main([*arguments, *(f"tests/{test}" for test in tests)], [self])
        return self.failed or (f"pytest's status {status}" if status else "")


class Forks(Watch):
    """After the collection, one fork per mutant goes on to run the tests. The first fork has no fault: it notes which
    functions of the file each test calls.
    """

    def __init__(self, mutants: list[Mutant], answers: TextIO):
        super().__init__([])
        self.mutants, self.answers, self.pipe, self.survives = mutants, answers, None, ""
        # caller -> names of functions; "" is the collection
        self.calls: dict[str, set[str]] = {}
        self.note("")

    def note(self, caller: str) -> None:
        called, path = self.calls.setdefault(caller, set()), str(self.mutants[0].path)
        sys.setprofile(
            lambda frame, *_: called.add(function_name(frame.f_code)) if frame.f_code.co_filename == path else None
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # until the call: a fixture may serve all the tests of a file
        if self.survives == CALLS:
            self.note(nodeid.split("::")[0])

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
            child, pipe = fork()
            if not child:
                signal.alarm(SECONDS)
                self.pipe, self.survives = pipe, CALLS
                if mutant.what:
                    faulty = mutant.replace(functions)
                    # a fault outside of all functions, or in one that ran already, may show at the import
                    self.survives = "" if faulty and faulty.isdisjoint(self.calls[""]) else UNSURE
                    session.items[:] = [item for item in session.items if faulty & self.called(item.nodeid)]
                return None
            with pipe:
                answer = pipe.read()
            status = os.waitpid(child, 0)[1]
            if answer.startswith(CALLS):
                self.calls |= {test: set(names) for test, names in json.loads(answer.removeprefix(CALLS)).items()}
                answer = ""
            # the test that noticed this fault is likely to notice the next
            session.items.sort(key=lambda item: item.nodeid != answer)
            print(json.dumps([mutant.number, answer or (f"status {status}" if status else "")]), file=self.answers)
        return True

    def called(self, test: str) -> set[str]:
        return self.calls.get(test, set()) | self.calls.get(test.split("::")[0], set())

    def run(self, tests: list[str], slow: bool) -> str:
        failed = super().run(tests, slow)
        if self.pipe:
            calls = json.dumps({caller: list(names) for caller, names in self.calls.items()})
            self.pipe.write(failed or (CALLS + calls if self.survives == CALLS else self.survives))
            self.pipe.flush()
            os._exit(0)
        return failed


def in_a_fork(job: Callable[[TextIO], object]) -> Iterator[list]:
    """What the job prints as JSON, in a silent child process that shares the heavy imports only."""
    child, pipe = fork()
    if not child:
        try:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            job(pipe)
        finally:
            os._exit(0)
    with pipe:
        yield from map(json.loads, pipe)
    os.waitpid(child, 0)


def try_all(mutants: list[Mutant], tests: list[str], slow: bool) -> Iterator[Mutant]:
    """The mutants, as soon as their killer is known. A survivor has none."""

    def import_and_run(mutant: Mutant, answers: TextIO) -> None:
        signal.alarm(SECONDS)
        mutant.import_instead()
        print(json.dumps(Watch(killers).run(tests, slow)), file=answers)

    numbers, killers = {mutant.number: mutant for mutant in mutants}, []
    right = Mutant(mutants[0].path, -1)
    results = in_a_fork(lambda answers: Forks([right, *mutants], answers).run(tests, slow))
    if next(results, None) != [-1, ""]:
        sys.exit(f"the tests fail without a fault: {' '.join(tests)}")
    for number, answer in results:
        numbers[number].killer = answer
        if answer != UNSURE:
            killers = [answer, *killers] if answer and answer not in killers else killers
            yield numbers[number]
    for mutant in mutants:
        if mutant.killer == UNSURE:
            mutant.killer = next(in_a_fork(lambda answers, m=mutant: import_and_run(m, answers)), "no answer")
            yield mutant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="FILE", help=", ".join(TESTS))
    parser.add_argument(
        "--sample", type=int, default=10**6, help="at most so many mutants per file, chosen by a seed"
    )
    parser.add_argument("--slow", action="store_true", help="run the slow gradient checks too")
    parser.add_argument("--log", type=Path, default=os.devnull, help="killed mutants, which are not tried again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    log = options.log.absolute()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    killed = {json.loads(line)["digest"] for line in log.read_text().splitlines()} if log.exists() else set()
    for name in options.files:
        path, start, counter = ROOT / "spheret" / name, time.monotonic(), Mutator()
        counter.visit(ast.parse(path.read_text()))
        chosen = random.Random(0).sample(range(counter.count), min(options.sample, counter.count))
        mutants = [mutant for number in sorted(chosen) if (mutant := Mutant(path, number)).digest not in killed]
        survived = 0
        for mutant in try_all(mutants, TESTS[name], options.slow) if mutants else ():
            if not mutant.killer:
                survived += 1
                print(f"survived: {name}:{mutant.line}  {mutant.what}", flush=True)
                continue
            with log.open("a") as lines:
                place = f"{name}:{mutant.line}  {mutant.what}"
                print(json.dumps({"digest": mutant.digest, "mutant": place, "killer": mutant.killer}), file=lines)
        print(
            f"{name}: {counter.count} mutants, {len(chosen)} tried, {len(chosen) - survived} killed, "
            f"{survived} survived, {time.monotonic() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
