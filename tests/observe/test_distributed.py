"""Two processes, DDP and FSDP2: training stays bitwise the same, and what is seen is what one process sees."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import together
import torch
import torchrun

# two processes train for many seconds
pytestmark = pytest.mark.slow
GRADIENTS = ("grad_norm", "update")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Everything that one launch of two processes did. What the processes assert for themselves has held."""
    path = tmp_path_factory.mktemp("together")
    torchrun.run(Path(together.__file__), path)
    return path


def read(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def alone():
    """The same in one process, with a micro-batch in the place of each process."""
    found = {}
    for name, make in together.MODELS.items():
        model = make()
        found[name] = together.train(model, [0, 1]), together.state(model)
    return found


@pytest.mark.parametrize("name", together.MODELS)
@pytest.mark.parametrize("parallel", together.PARALLEL)
def test_numbers_are_those_of_one_process(parallel, name, out, alone):
    ours = read(out / f"{parallel}-{name}" / "rank-0.json")["observations"]
    watch, weights = alone[name]
    theirs = [asdict(each) for each in watch.observations]
    assert [each["step"] for each in ours] == [1, 2, 4]
    for a, b in zip(ours, theirs, strict=True):
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        for one, other in zip(a["sublayers"], b["sublayers"], strict=True):
            assert set(GRADIENTS) <= {key for key, value in one.items() if value is not None}
            assert one == {
                # the difference of two lengths has few digits
                key: value if value is None else pytest.approx(value, rel=1e-3, abs=1e-6 if key == "shrunk" else None)
                for key, value in other.items()
            }
        for one, other in zip(a["places"], b["places"], strict=True):
            assert one["name"] == other["name"]
            for key in ("grad_norm", "update"):
                assert one[key] == pytest.approx(other[key], rel=1e-3)
    end = torch.load(out / f"{parallel}-{name}" / "state.pt")
    for key, x in weights.items():
        assert torch.allclose(x, end[key], atol=1e-6), key


@pytest.mark.parametrize("name", together.MODELS)
@pytest.mark.parametrize("parallel", together.PARALLEL)
def test_all_processes_know_the_same_and_one_writes(parallel, name, out):
    path = out / f"{parallel}-{name}"
    first, second = (read(path / f"rank-{rank}.json") for rank in (0, 1))
    assert first == second
    lines = [json.loads(line) for line in (path / "watch" / "watch.jsonl").read_text().splitlines()]
    assert lines[0]["format"] == "spheret-watch"
    assert [{**line, "seconds": None} for line in lines[1:]] == first["observations"]


@pytest.mark.parametrize("name", together.MODELS)
@pytest.mark.parametrize("parallel", [*together.PARALLEL, "weight"])
def test_a_bad_value_of_one_process_is_known_to_all(parallel, name, out):
    first, second = (read(out / f"bad-{parallel}-{name}-{rank}.json") for rank in (0, 1))
    assert first == second
    assert (first["events"][0]["kind"], first["events"][0]["step"]) == ("not finite", 2)
    if parallel == "weight":
        assert first["events"][0]["where"] == together.PLANTED[name][1]


@pytest.mark.parametrize("average", [True, False])
def test_the_loss_is_that_of_the_trainer(average, out):
    written = read(out / f"trainer-{average}-0.json")
    assert len(written["seen"]) == 4
    # the Trainer rounds
    assert written["seen"] == pytest.approx(written["logged"], abs=2e-4)
