"""`spheret certify --schemes`: models before any training."""

import json

import pytest
import torch

from spheret import GPT, SCHEMES
from spheret.analysis.sublayers import float64_twin, states
from spheret.certificates import initialisation as i
from spheret.certificates.initialisation import at_start, goes_deep, parse_depths
from spheret.cli import main


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name]().one_stream])
def test_every_scheme(name):
    row = at_start(name, 4, 16)
    assert row.condition >= 1
    assert row.norm > 0
    assert row.gradient > 0
    if name.endswith("spheretnorm") or name == "geonorm":
        assert row.norm == pytest.approx(1)
        assert row.removed == 0
        assert goes_deep(row)


def test_norms_after_the_sum_remove_directions():
    assert at_start("post-ln", 4, 16).removed == 2
    assert at_start("ngpt", 4, 16).removed == 1


def test_it_agrees_with_a_brute_force_jacobian():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    row = at_start("pre-ln", 1, 16)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    model = GPT(i.GPTConfig(layers=1, heads=4, width=16, block=i.TIME, vocab=i.VOCAB, scheme="pre-ln"))
    ids = torch.randint(i.VOCAB, (1, i.TIME + 1))
    twin = float64_twin(model)
    h = states(twin, ids[:, :-1])[0].h
    worst = 0.0
    for t in (7, 15, 23, 31):
        G = torch.autograd.functional.jacobian(lambda x, t=t: twin.blocks[0](x)[0, t], h)[:, 0, t]
        values = torch.linalg.svdvals(G)
        worst = max(worst, float(values[0] / values[-1]))
    assert row.condition == pytest.approx(worst, rel=1e-8)


def test_command(tmp_path, capsys):
    words = ["--schemes", "pre-ln,geonorm", "--layers", "1..4", "--width", "16", "--out", str(tmp_path)]
    assert main(["certify", *words]) == 0
    assert "or more" in capsys.readouterr().out
    rows = json.loads((tmp_path / "initialisation.json").read_text())["rows"]
    assert [(row["scheme"], row["layers"]) for row in rows][:3] == [("pre-ln", 1), ("pre-ln", 2), ("pre-ln", 4)]
    assert (tmp_path / "initialisation.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_says_what_its_condition_leaves_out(tmp_path, capsys):
    words = ["--schemes", "post-ln,geonorm", "--layers", "2", "--width", "16", "--out", str(tmp_path)]
    assert main(["certify", *words]) == 0
    printed = capsys.readouterr().out
    column = next(line for line in printed.splitlines() if "removed" in line).split("\u2503").index(" removed ")
    rows = [line.split("\u2502") for line in printed.splitlines() if "\u2502" in line]
    assert [(row[0].strip(), int(row[column])) for row in rows] == [("post-ln", 2), ("geonorm", 0)]


def test_a_variant_of_a_scheme(tmp_path, capsys):
    words = ["--schemes", "geonorm,geonorm:schedule=constant", "--layers", "2", "--width", "16"]
    assert main(["certify", *words, "--out", str(tmp_path)]) == 0
    assert "geonorm:schedule=constant" in capsys.readouterr().out
    plain, variant = json.loads((tmp_path / "initialisation.json").read_text())["rows"]
    assert variant["condition"] > plain["condition"]


def test_depths():
    assert parse_depths("4..512") == [4, 8, 16, 32, 64, 128, 256, 512]
    assert parse_depths("3,5") == [3, 5]
    assert parse_depths("7") == [7]
