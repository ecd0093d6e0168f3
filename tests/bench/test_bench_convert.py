import json

import pytest

from spheret.bench.convert import ORIGINAL, POSITIONS
from spheret.cli import main

TINY = ["--layers", "1", "--heads", "1", "--width", "8", "--block", "8", "--batch-size", "1", "--repeats", "1"]


def test_command(tmp_path, capsys):
    out = tmp_path / "convert.json"
    assert main(["bench", "convert", *TINY, "--json", str(out)]) == 0
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert set(result["seconds"]) == {ORIGINAL, *POSITIONS}
    assert all(name in printed for name in result["seconds"])
    assert result["over_original"][ORIGINAL] == 1


@pytest.mark.parametrize(
    ("words", "message"), [(["--scheme", "pre-ln"], "which pre-ln does not"), (["--width", "9"], "--width")]
)
def test_bad_input(words, message, capsys):
    assert main(["bench", "convert", *TINY, *words]) == 2
    assert message in capsys.readouterr().err
