import json

import pytest

from spheret.cli import main
from spheret.support.timing import exponent


def test_exponent():
    assert exponent([1, 2, 4], [3.0, 6.0, 12.0]) == pytest.approx(1)
    assert exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)


def test_command(tmp_path, capsys):
    out = tmp_path / "certify.json"
    words = ["--width", "8", "--layers", "1", "2", "--tokens", "4", "8", "--repeats", "1", "--json", str(out)]
    assert main(["bench", "certify", *words]) == 0
    assert "to the power" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert set(result["exponents"]) == {"layers", "tokens"}
    assert set(result["seconds"]["layers"]) == {"1", "2"}


@pytest.mark.parametrize(
    ("words", "message"), [(["--scheme", "preln"], "Did you mean"), (["--layers", "3"], "two or more")]
)
def test_bad_input(words, message, capsys):
    assert main(["bench", "certify", *words]) == 2
    assert message in capsys.readouterr().err
