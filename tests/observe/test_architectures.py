"""Architectures that nothing here lists by name: watched training stays bitwise the same, nothing is left behind."""

from pathlib import Path

import pytest
import seen_architectures
import timm_process
from seen_architectures import sweep
from surroundings import surroundings

# every tenth of the sweep's table; about half of them can be built small and take inputs that are made up
TENTH = sweep.cases()[::10]
# timm's own models for tests are small, and of many kinds
SCRIPT = """
import timm
from seen_architectures import compare

results = {}
for name in timm.list_models("test_*"):
    torch.manual_seed(0)
    model = timm.create_model(name)
    results[name] = compare(model, torch.randn(2, *model.pretrained_cfg["input_size"]))
print(json.dumps(results))
"""


# all of them take a minute or two
FAST = ("roberta-prelayernorm", "olmo3", "gpt_neo", "openai-gpt")


def outcomes(cases, tmp_path):
    with surroundings(tmp_path):
        sweep.prepare()
        return [sweep.in_fork(case, seen_architectures.attempt) for case in cases]


def test_a_few_architectures_of_transformers(tmp_path):
    cases = [case for case in TENTH if case.table == "causal" and case[1] in FAST]
    assert [row["end"] for row in outcomes(cases, tmp_path)] == ["found"] * 4


@pytest.mark.slow
def test_architectures_of_transformers(tmp_path):
    rows = outcomes(TENTH, tmp_path)
    assert [row for row in rows if row["end"] in ("crashed", "wrong")] == []
    assert sum(row["end"] == "found" for row in rows) >= 32
    assert [row["name"] for row in rows if row["end"] == "parameters only" and not row["why"]] == []


@pytest.mark.slow
def test_architectures_of_timm():
    results = timm_process.run(SCRIPT, Path(__file__).parent)
    assert [(name, row) for name, row in results.items() if row["end"] not in ("found", "parameters only")] == []
    assert sum(row["end"] == "found" for row in results.values()) >= 9
