"""`spheret coord-check`: its picture, its sentence, and what it refuses."""

import json

import pytest
from matplotlib.image import imread

from spheret.cli import main


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


def test_numbers_that_are_not_finite_are_no_answer(tmp_path, capsys):
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
