"""Architectures of transformers, a few or all: each is converted exactly or refused in a sentence, never wrong."""

from collections import Counter
from pathlib import Path

import pytest
import sweep
import transformers
from surroundings import surroundings

CASES = sweep.cases()


def outcomes(tmp_path, cases):
    with surroundings(tmp_path):
        sweep.prepare()
        return {case.name: sweep.in_fork(case) for case in cases}


def test_two_architectures(tmp_path):
    ends = outcomes(tmp_path, [case for case in CASES if case.name in ("LlamaForCausalLM", "AlbertModel")])
    assert ends["LlamaForCausalLM"]["end"] == "exact"
    assert ends["LlamaForCausalLM"]["converted"] == 4
    assert all(ends["LlamaForCausalLM"][use] for use in ("trained", "loaded"))
    assert ends["AlbertModel"]["end"] == "refused"
    assert "more than once in one forward pass" in ends["AlbertModel"]["why"]


def test_what_ends_a_fork_is_an_outcome(tmp_path, monkeypatch):
    case = sweep.Case("causal", "llama", "LlamaForCausalLM")
    monkeypatch.setattr(sweep, "attempt", lambda case: bytearray(3 << 30))
    assert outcomes(tmp_path, [case])[case.name]["end"] != "exact"


def bad(ends):
    return {name: row for name, row in ends.items() if row["end"] in ("crashed", "wrong")}


@pytest.mark.slow
def test_every_architecture(tmp_path):
    ends = outcomes(tmp_path, CASES)
    assert not bad(ends)
    exact = [row for row in ends.values() if row["end"] == "exact"]
    # a use that the original cannot be put to is not in the outcome
    assert all(row.get(use, True) for row in exact for use in ("trained", "loaded"))
    text = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    if f"transformers {transformers.__version__}," in text:
        counts = Counter(row["table"] for row in exact)
        assert f"| **exact** | {counts['causal']} | {counts['bare']} |" in text
