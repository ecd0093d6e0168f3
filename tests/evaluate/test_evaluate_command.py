"""`spheret eval`: the files it writes, the results it keeps, and its messages for bad input."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spheret import GPT, GPTConfig
from spheret.cli import main
from spheret.data.tokenizers import describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.evaluate import PAPER_COLUMNS, TASKS, average, number, read
from spheret.evaluate.tasks import check_data, prefetch
from spheret.runs.run import create_run

ROWS = Path(__file__).parent / "rows"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make_run(path, seed=0, block=512):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(layers=1, heads=2, width=16, block=block, vocab=320, scheme="proj-spheretnorm"))
    return create_run(path, model, describe(load_tokenizer("bytes")))


def evaluated(run, *words):
    assert main(["eval", str(run.path), "--data", str(ROWS), *words]) == 0
    return read(run.path)


def test_the_papers_tasks(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    results = evaluated(run, "--batch-size", "4")
    assert set(results.tasks) == set(TASKS)
    assert (results.step, results.precision, results.batch_size) == (0, "float32", 4)
    assert (results.count("requests"), results.count("truncated")) == (96, 0)
    assert set(results.versions) == {"spheret", "lm_eval", "datasets", "torch"}
    for name, task in results.tasks.items():
        assert task.documents == len((ROWS / f"{name}.jsonl").read_text().splitlines())
        assert len(task.hash) == len(task.data_sha256) == 64
        assert all(cell.value is not None and cell.stderr is not None for cell in task.metrics.values())
    printed = capsys.readouterr()
    assert f"{average(read(run.path)).value:.2f}" in printed.out
    assert "93 of 93" in printed.err
    # nothing but the results and the cache
    assert {p.name for p in tmp_path.iterdir()} == {"run", "cache"}
    assert {p.name for p in run.path.iterdir()} == {"config.json", "checkpoints", "eval.json", "eval_samples.jsonl"}
    accuracies = [number(results, column).value for column in PAPER_COLUMNS[:10]]
    assert average(results).value == pytest.approx(sum(accuracies) / 10)


def test_tasks_one_after_another(tmp_path):
    run = make_run(tmp_path / "run")
    evaluated(run, "--tasks", "piqa")
    assert set(evaluated(run, "--tasks", "sciq,arc_easy").tasks) == {"piqa", "sciq", "arc_easy"}
    lines = [json.loads(line) for line in (run.path / "eval_samples.jsonl").read_text().splitlines()]
    assert sorted({line["task"] for line in lines}) == ["arc_easy", "piqa", "sciq"]
    again = evaluated(run, "--tasks", "piqa")
    assert len((run.path / "eval_samples.jsonl").read_text().splitlines()) == len(lines)
    # other settings do not mix
    assert set(evaluated(run, "--tasks", "piqa", "--limit", "2").tasks) == {"piqa"}
    assert read(run.path).tasks["piqa"].documents == 2
    assert again.tasks["piqa"].documents == 3
    assert average(read(run.path)) is None
    assert [c.task for c in PAPER_COLUMNS if number(read(run.path), c).value is not None] == ["piqa"]


def test_torn_lines_cost_the_earlier_tasks(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    evaluated(run, "--tasks", "piqa,sciq")
    path = run.path / "eval_samples.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    capsys.readouterr()
    assert set(evaluated(run, "--tasks", "arc_easy").tasks) == {"arc_easy"}
    assert path.name in capsys.readouterr().err


def test_long_documents_are_cut_and_counted(tmp_path, capsys):
    run = make_run(tmp_path / "run", block=96)
    first = evaluated(run, "--tasks", "boolq")
    cut, asked = first.count("truncated"), first.count("requests")
    assert 0 < cut < asked + 1
    assert f"{cut} of {asked}" in capsys.readouterr().out
    both = evaluated(run, "--tasks", "openbookqa")
    assert both.tasks["openbookqa"].truncated == 0
    assert both.count("truncated") == cut
    assert both.count("requests") == asked + both.tasks["openbookqa"].requests


def test_prefetch_writes_what_data_reads(tmp_path, monkeypatch):
    """From local copies in place of the hub: rows in, only their fields out, and nothing twice."""
    for name, task in list(TASKS.items()):
        (tmp_path / name).mkdir()
        shutil.copy(ROWS / f"{name}.jsonl", tmp_path / name / f"{task.split}.jsonl")
        monkeypatch.setitem(TASKS, name, replace(task, dataset=(str(tmp_path / name), None)))
    counts = prefetch(tmp_path / "data", TASKS)
    assert counts == {name: 4 if name == "arc_challenge" else 3 for name in TASKS}
    for name, task in TASKS.items():
        for fetched, original in zip(
            (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines(),
            (ROWS / f"{name}.jsonl").read_text().splitlines(),
            strict=True,
        ):
            assert json.loads(fetched) == {key: json.loads(original)[key] for key in task.row}
    shutil.rmtree(tmp_path / "piqa")
    assert prefetch(tmp_path / "data", ["piqa"]) == {"piqa": 3}
    run = make_run(tmp_path / "run")
    assert main(["eval", str(run.path), "--data", str(tmp_path / "data"), "--tasks", "hellaswag"]) == 0
    metrics = read(run.path).tasks["hellaswag"].metrics
    assert metrics == evaluated(run, "--tasks", "hellaswag").tasks["hellaswag"].metrics


# a task, a change to its first row, and what is wrong with it; lm_eval took every one of them
WRONG = {
    "an unknown label": ("boolq", {"label": 7}, "label"),
    "text for a number": ("piqa", {"label": "0"}, "label"),
    "an ending beyond the last": ("hellaswag", {"label": "4"}, "label"),
    "text for a list": ("hellaswag", {"endings": "abcd"}, "endings"),
    "an unknown key": ("arc_easy", {"answerKey": "F"}, "answerKey"),
    "choices as text": ("openbookqa", {"choices": {"text": "abcd", "label": "ABCD"}}, "choices"),
    "one answer": ("arc_challenge", {"choices": {"text": ["a"], "label": ["A"]}}, "choices"),
    "option three": ("winogrande", {"answer": "3"}, "answer"),
    "no gap": ("winogrande", {"sentence": "nothing to fill"}, "sentence"),
    "answer zero": ("social_iqa", {"label": "0"}, "label"),
    "a number for text": ("sciq", {"correct_answer": 4}, "correct_answer"),
    "one word": ("lambada_openai", {"text": "word"}, "text"),
    "a list for text": ("wikitext", {"page": ["a"]}, "page"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_row_that_does_not_fit_its_task(kind, tmp_path):
    name, change, field = WRONG[kind]
    first, *others = (ROWS / f"{name}.jsonl").read_text().splitlines()
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join([*others, json.dumps(json.loads(first) | change)]) + "\n")
    with pytest.raises(ValueError, match=rf"line {len(others) + 1} of .*\$\.{field}"):
        check_data(tmp_path, [name])


@pytest.mark.parametrize("content", [b"", b"{...\n", b"\xff\n", b"[1]\n"])
def test_files_that_are_not_rows(content, tmp_path):
    (tmp_path / "boolq.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"boolq\.jsonl"):
        check_data(tmp_path, ["boolq"])


@pytest.mark.slow
def test_no_internet_and_no_rows(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    for words in (["eval", str(run.path), "--tasks", "piqa"], ["eval", "--prefetch", str(tmp_path / "data")]):
        assert main(words) == 2
        assert "internet" in capsys.readouterr().err.splitlines()[-1]
    assert main(["eval", str(run.path), "--tasks", "hellaswagg"]) == 2
    assert "hellaswag" in capsys.readouterr().err
