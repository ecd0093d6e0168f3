import pytest
from scripts import script
from torch.utils._python_dispatch import TorchDispatchMode

from spheret import SCHEMES

bench = script("benchmarks/scale.py")


@pytest.mark.slow
def test_one_process_and_two():
    rows = bench.processes(4, 1, 32)
    assert [(row["processes"], row["threads"]) for row in rows] == [(1, 1), (1, 2), (2, 1)]
    assert all(row["tokens/s"] > 0 for row in rows)


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_block_adds_the_same_number_of_operations_to_a_step(scheme, monkeypatch):
    monkeypatch.setattr(bench, "BLOCK", 8)
    monkeypatch.setattr(bench, "BATCH", 2)
    # counts, not times: a time also measures what else the machine does
    counts = []
    for layers in (4, 8, 12):
        run = bench.new_step(scheme, layers, 32)
        # the optimiser creates its state in the first step
        run()
        with Operations() as operations:
            run()
        counts.append(operations.count)
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    # a state may hold more tensors after every block
    assert second == first > 0 if SCHEMES[scheme]().one_stream else second >= first > 0
