"""The numbers of every scheme and of the trainer are those of an earlier tree: values.json holds them.

    python tests/values/test_values.py     # adds what is missing; remove an entry to measure it anew

On the machine that wrote the file every number is bitwise the same. Elsewhere other instructions round otherwise.
"""

import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spheret import GPT, SCHEMES, GPTConfig, parameter_groups, retract
from spheret.kernels import use
from spheret.kernels.native import _processor

FILE = Path(__file__).with_name("values.json")
RETRACTIONS = ("projection", "cayley", "angular", "exponential", 3.0)
TRAINED = ("pre-ln", "proj-spheretnorm")


def machine() -> str:
    """What decides the last bits: the processor's instructions and torch."""
    return hashlib.sha256(f"{torch.__version__} {platform.machine()} {_processor()}".encode()).hexdigest()[:16]


def scheme_values(name: str) -> list[float]:
    """The losses of four updates and the size of the logits after them."""
    torch.manual_seed(7)
    sizes = {"layers": 2, "heads": 2, "width": 32, "block": 16, "vocab": 64}
    config = GPTConfig(**sizes, scheme=name, head="tied", head_bias="none")
    model = GPT(config)
    tokens = torch.randint(64, (4, 17))
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    return [*losses, logits.double().square().sum().item()]


def retraction_values(retraction: str | float, backend: str) -> list[float]:
    """Sums of the next state and of all gradients."""
    torch.manual_seed(7)
    h, f = (torch.randn(9, 40, requires_grad=True) for _ in range(2))
    alpha = torch.tensor([0.7], requires_grad=True)
    with use(backend):
        out = retract(h, f, alpha, retraction, max_angle=1.0)
    out.backward(torch.randn(9, 40))
    return [float(x.double().square().sum()) for x in (out.detach(), h.grad, f.grad, alpha.grad)]


def train_values(name: str, folder: Path) -> list[float]:
    """The training losses of `spheret train`."""
    text = folder / "text.txt"
    text.write_text("the state of the union is strong and the union of the states is stronger. " * 200)
    arguments = f"--scheme {name} --layers 2 --width 32 --heads 2 --block 32 --batch-size 4 --steps 8 --lr 1e-2"
    more = f"--quiet --head tied --head-bias none --threads 1 --device cpu --data {text} --out {folder / 'run'}"
    subprocess.run([sys.executable, "-m", "spheret", "train", *arguments.split(), *more.split()], check=True)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def cases() -> dict[str, object]:
    found = {f"scheme {name}": lambda folder, name=name: scheme_values(name) for name in SCHEMES}
    found |= {
        f"retraction {row} {backend}": lambda folder, row=row, backend=backend: retraction_values(row, backend)
        for row in RETRACTIONS
        for backend in ("reference", "closed", "native", "triton")
    }
    return found | {f"train {name}": lambda folder, name=name: train_values(name, folder) for name in TRAINED}


CASES = cases()


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_an_earlier_tree(case, tmp_path):
    saved = json.loads(FILE.read_text())
    if case not in saved["values"]:
        pytest.fail(f"values.json lacks {case!r}: run {Path(__file__).name} as a script, once")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values = CASES[case](tmp_path)
    finally:
        torch.set_num_threads(before)
    expected = [float.fromhex(x) for x in saved["values"][case]]
    assert len(expected) > 2
    if saved["machine"] == machine():
        assert values == expected
    assert values == pytest.approx(expected, rel=2e-5)


def main() -> None:
    import os
    import tempfile

    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    saved = json.loads(FILE.read_text()) if FILE.exists() else {"machine": machine(), "values": {}}
    assert saved["machine"] == machine(), "values.json was written on a different machine: start a new file there"
    for case, compute in CASES.items():
        if case not in saved["values"]:
            with tempfile.TemporaryDirectory() as folder:
                saved["values"][case] = [x.hex() for x in compute(Path(folder))]
    FILE.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
