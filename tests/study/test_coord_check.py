"""Coordinate checks: rules that hold are flat, and none are not."""

import json
from dataclasses import dataclass, replace

import pytest
from matplotlib.image import imread

from spheret.cli import main
from spheret.connections.parse import parse_schemes
from spheret.study.coordinates import LOGITS, Coordinates, Setting, is_flat, measure, power, powers, sweep, worst


@dataclass(frozen=True)
class WithHead(Setting):
    head: str = "tied"

    def shape(self, width, layers):
        return replace(super().shape(width, layers), head=self.head)


def found(scheme, parametrization, optimizer="adamw", head="tied"):
    setting = WithHead(parse_schemes(scheme)[0], parametrization, optimizer, 1e-3, 3, 2, 16, 1, 16, 2, head)
    sizes = {"width": [(16, 2), (64, 2)], "layers": [(16, 2), (16, 8)]}
    return {size: powers(sweep(setting, shapes, lambda: None), size) for size, shapes in sizes.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("scheme", ["pre-ln", "proj-spheretnorm", "ngpt"])
def test_completep_makes_updates_of_the_stream_flat_and_standard_does_not(scheme, optimizer):
    for size, ruled in found(scheme, "completep", optimizer).items():
        states = {name: value for name, value in ruled["updates"].items() if name != LOGITS}
        assert max(map(abs, states.values())) < 0.3, (size, states)
    for size, plain in found(scheme, "standard", optimizer).items():
        # the sqrt schedule of a spherical stream does a part of the depth rule by itself
        if size == "width" or scheme != "proj-spheretnorm":
            assert worst(plain)[1] > 0.35, (size, plain)
            assert not is_flat(plain)


@pytest.mark.parametrize("head", ["shifted", "untied"])
@pytest.mark.parametrize("scheme", ["pre-ln", "proj-spheretnorm", "ngpt"])
def test_completep_holds_for_every_head(scheme, head):
    tied = found(scheme, "completep")
    for size, ruled in found(scheme, "completep", head=head).items():
        # at these widths the logits of every head still move less in a wider model
        logits = ruled["updates"].pop(LOGITS)
        assert logits == pytest.approx(tied[size]["updates"][LOGITS], abs=0.2)
        assert max(map(abs, ruled["updates"].values())) < 0.3, (size, ruled["updates"])


def test_the_same_seed_gives_the_same_numbers_and_leaves_the_generator_alone():
    setting = Setting(parse_schemes("pre-ln")[0], "mup", "adamw", 1e-3, 1, 1, 4, 1, 8, 1)
    assert measure(setting, 16, 1, 0) == measure(setting, 16, 1, 0)
    assert measure(setting, 16, 1, 0) != measure(setting, 16, 1, 1)


def test_powers_and_the_worst_of_them():
    assert power([2, 4, 8], [3, 12, 48]) == pytest.approx(2)

    def row(width):
        # shrinking states are allowed; an update that shrinks is not
        return Coordinates(width, 1, {"0%": width**-2.0}, {"0%": width**-0.5, LOGITS: width**0.1})

    ruled = powers([row(8), row(16), row(32), row(64)], "width")
    assert worst(ruled) == ("the update of the state at 0% of the depth", pytest.approx(-0.5))
    assert worst({"states": {"0%": 0.4}, "updates": {LOGITS: -0.3}}) == ("the state at 0% of the depth", 0.4)
    assert worst({"states": {}, "updates": {"0%": 0.4, LOGITS: float("nan")}})[0] == "the update of the logits"


def test_the_command(tmp_path, capsys):
    words = ["--widths", "8,16", "--layers", "2,4", "--steps", "1", "--seeds", "1", "--block", "8"]
    out = tmp_path / "check"
    assert main(["coord-check", "--scheme", "p-spheretnorm:p=0.25", *words, "--out", str(out)]) == 0
    document = json.loads((out / "coord-check.json").read_text())
    said = capsys.readouterr().out
    assert document["verdict"] in said
    assert document["verdict"].startswith("p-spheretnorm:p=0.25 with adamw and the completep parametrization: from")
    assert [row["width"] for row in document["width"]["rows"]] == [8, 16]
    assert [row["layers"] for row in document["layers"]["rows"]] == [2, 4]
    assert document["setting"]["base_layers"] == 2
    assert imread(out / "coord-check.png").shape[2] == 4


def test_numbers_that_are_none_are_no_answer(tmp_path, capsys):
    words = ["--widths", "8,16", "--layers", "2,4", "--steps", "2", "--seeds", "1", "--block", "8", "--lr", "1e30"]
    assert main(["coord-check", *words, "--out", str(tmp_path / "check")]) == 0
    said = capsys.readouterr().out
    assert "no answer for width: at width 8 and 2 layers the numbers are not finite or 0" in said
    assert "take another --lr than 1e+30" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layers", "1,2"), "--layers 1,2 has 1, and a stream is looked at after each quarter"),
        (("--scheme", "pre-ln:prores=4", "--parametrization", "mup"), "leave prores out"),
    ],
)
def test_what_a_check_cannot_say_is_refused(words, message, tmp_path, capsys):
    assert main(["coord-check", *words, "--out", str(tmp_path / "check")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "check").exists()
