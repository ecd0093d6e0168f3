"""What `spheret train` takes where nothing is given trains every scheme of the table."""

import json

import pytest

from spheret.cli import main
from spheret.connections import SCHEMES
from spheret.runs.run import open_run


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_default(scheme, tmp_path):
    out = tmp_path / "run"
    asked = ["train", "--scheme", scheme, "--data", "sotu", "--steps", "300", "--out", str(out), "--quiet"]
    assert main(asked) == 0
    run = open_run(out)
    entropy = json.loads((out / "config.json").read_text())["data"]["unigram_entropy"]
    last = run.metrics()[-1]
    assert last.val_loss < entropy - 0.4, (last.val_loss, entropy)
    assert not [record for record in run.metrics() if any(event.kind == "collapsed" for event in record.events or ())]
