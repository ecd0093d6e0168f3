"""`spheret eval`: the files it writes, the results it keeps, and its messages for bad input."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from test_evaluate_lm import own_task

from spheret import GPT, GPTConfig
from spheret.cli import main
from spheret.data.tokenizers import describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.evaluate import PAPER_COLUMNS, TASKS, compare, read, table
from spheret.evaluate.results import samples
from spheret.evaluate.tasks import MANIFEST, check_data, prefetch
from spheret.runs.layout import RUN_FILES
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
    assert (results.step, results.precision, results.batch_size, results.truncated) == (
        0,
        "float32",
        4,
        0,
    )
    assert set(results.versions) == {"spheret", "lm_eval", "datasets", "torch"}
    for name, task in results.tasks.items():
        assert task.documents == len((ROWS / f"{name}.jsonl").read_text().splitlines())
        assert len(task.hash) == len(task.data_sha256) == 64
        assert all(cell.value is not None and cell.stderr is not None for cell in task.metrics.values())
    printed = capsys.readouterr()
    assert "average zero-shot accuracy" in printed.out
    assert "loglikelihood: 93 of 93" in printed.err
    # nothing but the results and the cache
    assert {p.name for p in tmp_path.iterdir()} == {"run", "cache"}
    assert {p.name for p in run.path.iterdir()} == {"config.json", "checkpoints", "eval.json", "eval_samples.jsonl"}
    (row,) = table([run.path])
    assert [cell.column for cell in row.cells] == list(PAPER_COLUMNS)
    accuracies = [cell.value for cell in row.cells[:10]]
    assert row.average.value == pytest.approx(sum(accuracies) / 10)


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
    (row,) = table([run.path])
    assert row.average is None
    assert [cell.column.task for cell in row.cells if cell.value is not None] == ["piqa"]


def test_a_torn_line_costs_its_own_task_alone(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    evaluated(run, "--tasks", "piqa,sciq")
    path = run.path / "eval_samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert b'"sciq"' in lines[-1]
    path.write_bytes(b"".join(lines)[:-20])
    capsys.readouterr()
    assert set(evaluated(run, "--tasks", "arc_easy").tasks) == {"piqa", "arc_easy"}
    assert re.search(r"eval_samples\.jsonl .*\bsciq\b", capsys.readouterr().err)
    assert set(samples(run.path)) == {"piqa", "arc_easy"}


def test_two_runs_on_the_same_documents(tmp_path):
    first, second = make_run(tmp_path / "a", 1), make_run(tmp_path / "b", 2)
    for run in (first, second):
        evaluated(run)
    rows = compare(first.path, second.path)
    assert [row.column for row in rows] == list(PAPER_COLUMNS)
    cells = [{cell.column: cell.value for cell in row.cells} for row in table([first.path, second.path])]
    for row in rows:
        expected = cells[0][row.column] - cells[1][row.column]
        assert row.difference == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert row.wins + row.losses <= row.documents
        assert 0 <= row.p <= 1
    evaluated(second, "--limit", "2")
    with pytest.raises(ValueError, match="arc_challenge"):
        compare(first.path, second.path)


class TestExamples:
    """`--num-fewshot` and `--include-path`."""

    def test_they_have_files_of_their_own(self, tmp_path, capsys):
        run = make_run(tmp_path / "run")
        zero = evaluated(run, "--tasks", "piqa")
        capsys.readouterr()
        assert evaluated(run, "--tasks", "piqa", "--num-fewshot", "2") == zero
        assert "run, step 0, 2 examples" in capsys.readouterr().out
        few = read(run.path, fewshot=True)
        assert few.num_fewshot == 2
        assert not zero.num_fewshot
        assert few.tasks["piqa"].requests == zero.tasks["piqa"].requests
        # the prompts differ
        assert few.tasks["piqa"].hash != zero.tasks["piqa"].hash
        # tasks are added under the same number of examples, and another number replaces them
        evaluated(run, "--tasks", "sciq", "--num-fewshot", "2")
        assert set(read(run.path, fewshot=True).tasks) == {"piqa", "sciq"}
        assert evaluated(run, "--tasks", "sciq", "--num-fewshot", "1") == zero
        assert set(read(run.path, fewshot=True).tasks) == {"sciq"}
        assert {path.name for path in run.path.iterdir() if path.is_file()} <= set(RUN_FILES)

    def test_a_task_of_ones_own(self, tmp_path):
        run = make_run(tmp_path / "run")
        rows = own_task(tmp_path)
        words = ["eval", str(run.path), "--tasks", "openings", "--include-path", str(tmp_path / "tasks")]
        assert main(words) == 0
        assert read(run.path).tasks["openings"].documents == len(rows)
        assert main([*words, "--num-fewshot", "2"]) == 0
        assert read(run.path, fewshot=True).tasks["openings"].requests == 2 * len(rows)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--num-fewshot", "3", "--tasks", "sciq"], "is too many for sciq: its rows hold at most 2 examples"),
            (["--num-fewshot", "1", "--tasks", "sciq,wikitext"], "not for wikitext, which has no examples"),
            (["--num-fewshot", "-1"], "--num-fewshot must be at least 0, got -1"),
            (["--include-path", "{}/none"], "--include-path {}/none is not a directory"),
            (["--include-path", "{}"], "--include-path and --data do not go together"),
        ],
    )
    def test_bad_input(self, words, message, tmp_path, capsys):
        run = make_run(tmp_path / "run")
        given = [word.format(tmp_path) for word in words]
        assert main(["eval", str(run.path), "--data", str(ROWS), *given]) == 2
        error = capsys.readouterr().err
        assert message.format(tmp_path) in error
        assert error.count("\n") == 1
        assert not (run.path / "eval_fewshot.json").exists()

    def test_nothing_was_evaluated(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"spheret eval .*--num-fewshot"):
            read(make_run(tmp_path / "run").path, fewshot=True)


def test_long_documents_are_cut_and_counted(tmp_path, capsys):
    results = evaluated(make_run(tmp_path / "run", block=96), "--tasks", "boolq,piqa")
    assert 0 < results.truncated < results.requests
    assert f"{results.truncated} of {results.requests} requests were longer" in " ".join(
        capsys.readouterr().out.split()
    )


def test_what_was_cut_stays_counted(tmp_path):
    run = make_run(tmp_path / "run", block=96)
    first = evaluated(run, "--tasks", "boolq")
    assert first.truncated > 0
    both = evaluated(run, "--tasks", "openbookqa")
    assert both.tasks["openbookqa"].truncated == 0
    assert both.truncated == both.tasks["boolq"].truncated == first.truncated
    assert both.requests == first.requests + both.tasks["openbookqa"].requests


def test_line_separators_inside_a_text(tmp_path):
    """U+2028 and U+0085 end no row: JSON leaves them as they are."""
    run = make_run(tmp_path / "run")
    shutil.copytree(ROWS, tmp_path / "rows")
    path = tmp_path / "rows" / "piqa.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["goal"] += "\u2028\x85again"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert main(["eval", str(run.path), "--tasks", " piqa, ", "--data", str(path.parent)]) == 0
    assert read(run.path).tasks["piqa"].documents == 3


def test_prefetch_writes_what_data_reads(tmp_path, capsys):
    """From local copies in place of the hub: rows in, only their fields out, and nothing twice."""
    sources = {}
    for name, task in TASKS.items():
        (tmp_path / name).mkdir()
        shutil.copy(ROWS / f"{name}.jsonl", tmp_path / name / f"{task.split}.jsonl")
        sources[name] = (str(tmp_path / name), None)
    counts = prefetch(tmp_path / "data", TASKS, sources)
    assert counts == {name: 4 if name == "arc_challenge" else 3 for name in TASKS}
    for name, task in TASKS.items():
        for fetched, original in zip(
            (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines(),
            (ROWS / f"{name}.jsonl").read_text().splitlines(),
            strict=True,
        ):
            assert json.loads(fetched) == {key: json.loads(original)[key] for key in task.fields}
    manifest = json.loads((tmp_path / "data" / MANIFEST).read_bytes())
    assert manifest["tasks"]["piqa"]["rows"] == 3
    shutil.rmtree(tmp_path / "piqa")
    assert prefetch(tmp_path / "data", ["piqa"], sources) == {"piqa": 3}
    other = tmp_path / "other"
    other.mkdir()
    (other / MANIFEST).write_text('{"piqa": {}}')
    with pytest.raises(ValueError, match="spheret eval --prefetch"):
        prefetch(other, ["piqa"], sources)
    run = make_run(tmp_path / "run")
    assert main(["eval", str(run.path), "--data", str(tmp_path / "data"), "--tasks", "hellaswag"]) == 0
    metrics = read(run.path).tasks["hellaswag"].metrics
    assert metrics == evaluated(run, "--tasks", "hellaswag").tasks["hellaswag"].metrics


CHANGES = {
    "missing": ("piqa", lambda text: text.replace('"sol1"', '"solution1"', 1)),
    "empty": ("lambada_openai", lambda text: '{"text": "  "}\n' + text),
    "null": ("piqa", lambda text: text.replace('"sol1": ', '"sol1": null, "was": ', 1)),
    "choices": ("openbookqa", lambda text: text.replace('"label"', '"labels"', 1)),
    "no-text": ("sciq", lambda text: "\udcff" + text),
    "no-json": ("sciq", lambda text: text + "{...\n"),
    "no-rows": ("boolq", lambda text: ""),
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "piqqa", "--data", str(ROWS)], "unknown task 'piqqa'. Did you mean piqa"),
        (["--data", "{}/nowhere"], "no rows of arc_challenge at"),
        (
            ["--data", "{}/missing"],
            "line 1 of {}/missing/piqa.jsonl: Object missing required field `sol1`. A row holds goal, sol1",
        ),
        (["--data", "{}/null"], "line 1 of {}/null/piqa.jsonl: Expected `str`, got `null` - at `$.sol1`"),
        (
            ["--data", "{}/choices"],
            "line 1 of {}/choices/openbookqa.jsonl: Object missing required field `label` - at `$.choices`",
        ),
        (["--data", "{}/no-text"], "line 1 of {}/no-text/sciq.jsonl is not JSON"),
        (["--tasks", " ,", "--data", str(ROWS)], "--tasks ' ,' names no task"),
        (["--data", "{}/empty"], "line 1 of {}/empty/lambada_openai.jsonl: Expected `str` matching regex"),
        (["--data", "{}/no-json"], "line 4 of {}/no-json/sciq.jsonl is not JSON"),
        (["--data", "{}/no-rows"], "holds no rows"),
        (["--limit", "0", "--data", str(ROWS)], "limit must be at least 1"),
        (["--batch-size", "0", "--data", str(ROWS)], '"auto"'),
        (["--device", "gpu", "--data", str(ROWS)], "--device gpu is not available: this machine has"),
        (["--precision", "int8", "--data", str(ROWS)], "unknown precision 'int8'"),
        (["--step", "5", "--data", str(ROWS)], "no checkpoint of step 5: there are 0"),
    ],
)
def test_bad_input(words, message, tmp_path, capsys):
    run = make_run(tmp_path / "run")
    for name, (task, change) in CHANGES.items():
        shutil.copytree(ROWS, tmp_path / name)
        path = tmp_path / name / f"{task}.jsonl"
        path.write_text(change(path.read_text()), errors="surrogateescape")
    assert main(["eval", str(run.path), *(word.format(tmp_path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message.format(*[tmp_path] * message.count("{}")) in error
    assert error.count("\n") == 1
    assert not (run.path / "eval.json").exists()


# a task, a change to its first row, and what is wrong with it; lm_eval took every one of them
WRONG = {
    "an unknown label": ("boolq", {"label": 7}, "Invalid enum value 7"),
    "a hidden label": ("boolq", {"label": -1}, "Invalid enum value -1"),
    "text for a number": ("piqa", {"label": "0"}, "Expected `int`, got `str`"),
    "true for a number": ("piqa", {"label": True}, "Expected `int`, got `bool`"),
    "an ending beyond the last": ("hellaswag", {"label": "4"}, "'label' is '4', and there are 4 endings"),
    "an empty label": ("hellaswag", {"label": ""}, "'label' is ''"),
    "text for a list": ("hellaswag", {"endings": "abcd"}, "Expected `array`, got `str`"),
    "an unknown key": ("arc_easy", {"answerKey": "E"}, "'answerKey' is 'E', and the labels are A, B, C, D"),
    "choices as text": ("openbookqa", {"choices": {"text": "abcd", "label": "ABCD"}}, "Expected `array`, got `str`"),
    "fewer labels": ("arc_challenge", {"choices": {"text": ["a", "b"], "label": ["A"]}}, "2 texts and the labels A"),
    "labels twice": ("arc_challenge", {"choices": {"text": ["a", "b"], "label": ["A", "A"]}}, "the labels A, A"),
    "option three": ("winogrande", {"answer": "3"}, "Invalid enum value '3'"),
    "no gap": ("winogrande", {"sentence": "nothing to fill"}, "matching regex"),
    "answer zero": ("social_iqa", {"label": "0"}, "Invalid enum value '0'"),
    "a number for text": ("sciq", {"correct_answer": 4}, "Expected `str`, got `int`"),
    "one word": ("lambada_openai", {"text": "word"}, "must have a last word"),
    "a list for text": ("wikitext", {"page": ["a"]}, "Expected `str`, got `array`"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_row_that_does_not_fit_its_task(kind, tmp_path):
    name, change, message = WRONG[kind]
    first, *others = (ROWS / f"{name}.jsonl").read_text().splitlines()
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join([*others, json.dumps(json.loads(first) | change)]) + "\n")
    with pytest.raises(ValueError, match=f"line {len(others) + 1} of .*{re.escape(message)}"):
        check_data(tmp_path, [name])


def test_every_field_of_every_task_is_needed_and_has_a_type(tmp_path):
    for name, task in TASKS.items():
        row = json.loads((ROWS / f"{name}.jsonl").read_text().splitlines()[0])
        for field in task.fields:
            for value in (None, 3.5, [], {}):
                (tmp_path / f"{name}.jsonl").write_text(json.dumps(row | {field: value}) + "\n")
                with pytest.raises(ValueError, match=f"line 1 of .*{name}"):
                    check_data(tmp_path, [name])
    assert {task for task, *_ in WRONG.values()} == set(TASKS)


def test_a_directory_that_is_not_a_run(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    shutil.rmtree(run.path / "checkpoints")
    for words, message in (
        (["eval", str(run.path), "--data", str(ROWS)], "has no checkpoint yet"),
        (["eval", str(tmp_path / "none"), "--data", str(ROWS)], "no run directory at"),
        (["eval"], "no run is given"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="spheret eval"):
        read(run.path)


@pytest.mark.slow
def test_no_internet_and_no_rows(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    for words in (["eval", str(run.path), "--tasks", "piqa"], ["eval", "--prefetch", str(tmp_path / "data")]):
        assert main(words) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "spheret eval --prefetch DIR where there is internet" in error or "is there internet?" in error
    assert main(["eval", str(run.path), "--tasks", "hellaswagg"]) == 2
    assert "Did you mean hellaswag" in capsys.readouterr().err
