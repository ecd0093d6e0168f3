"""The explorer, docs/static/explorer.html: it holds the library's numbers and makes no request."""

import base64
import hashlib
import json
import math
import re
from pathlib import Path

import pytest
import torch

from spheret import RETRACTIONS, SCHEDULES
from spheret.retractions import angular
from spheret.schedules import factor

PAGE = (Path(__file__).parents[2] / "docs" / "static" / "explorer.html").read_text()
DATA = json.loads(re.search(r'id="data">(.*?)</script>', PAGE)[1])


def test_every_retraction():
    for row in DATA["retractions"]:
        retraction = RETRACTIONS[row["name"]]
        assert (row["formula"], row["cap"]) == (retraction.formula, retraction.cap)
        # a piece has its start, its thirds and its end, which is the start of the next one
        ends = torch.tensor(row["ends"], dtype=torch.float64)
        places = ends[:-1, None] + ends.diff()[:, None] * torch.arange(3, dtype=torch.float64) / 3
        beta = torch.cat([places.flatten(), ends[-1:]])
        values = torch.tensor(row["values"], dtype=torch.float64)
        torch.testing.assert_close(values, retraction.angle(beta), rtol=0, atol=1e-10)
        assert (row["ends"][0], row["ends"][-1]) == (0, DATA["largestBeta"])


def test_the_caps_along_the_slider_of_p():
    for position in range(1, DATA["positions"] + 1):
        p = position / (DATA["positions"] - position) if position < DATA["positions"] else math.inf
        assert [cap for first, cap in DATA["familyCaps"] if first <= position][-1] == angular(p).cap


def test_every_schedule():
    for row in DATA["schedules"]:
        assert row["name"] in SCHEDULES
        for layers, factors in zip(DATA["layers"], row["factors"], strict=True):
            expected = [factor(row["name"], l, 2 * layers) for l in range(1, 2 * layers + 1)]
            assert factors == pytest.approx(expected, rel=1e-11)


def test_the_policy_allows_the_script_and_no_request():
    (script,) = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:" in PAGE
    assert set(re.findall(r"https?://\S+?(?=\")", PAGE)) == {"http://www.w3.org/2000/svg"}
