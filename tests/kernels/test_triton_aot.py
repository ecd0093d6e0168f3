import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WIDTHS = (768, 1280, 4096, 8192, 16384)
# a large one; the slow suite compiles for all of them
SOME = (8192,)


@pytest.fixture(scope="module", params=[SOME, pytest.param(WIDTHS, marks=pytest.mark.slow)], ids=["some", "all"])
def widths(request):
    return request.param


@pytest.fixture(scope="module")
def reports(widths, tmp_path_factory):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, str(Path(__file__).with_name("aot.py")), *map(str, widths)]
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def test_every_kernel_compiles_ahead_of_time_without_spills(widths, reports):
    assert len(reports) == 6 * len(widths) * 2 * 3
    assert [r for r in reports if r["spills"]] == []
