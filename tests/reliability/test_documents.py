"""Every document has one reader. Whatever is in its place: one sentence that names the file and the place in it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import damage
import msgspec
import pytest
from watched_helpers import event, header, observations, write_watch

import spheret
from spheret.cli import main
from spheret.data.manifest import MANIFESTS as DATA_MANIFESTS
from spheret.data.manifest import (
    PROGRESSES,
    HubCursor,
    Progress,
    ResumePoint,
    SettingsRecord,
)
from spheret.data.tokenizers import describe, load
from spheret.evaluate.eval_json import (
    EVALS,
    SAMPLES,
    EvalRecord,
    MetricRecord,
    SampleRecord,
    TaskRecord,
)
from spheret.lab.executors.slurm import STAGES, StageRecord, SubmittedJob
from spheret.lab.ngrams import NGRAMS, NgramRecord, NgramsRecord
from spheret.lab.rows import STUDY_ROWS, Row, write_rows
from spheret.lab.watch_file import HEADERS, OBSERVATIONS
from spheret.observe.inspect.command import INSPECTIONS, InspectRecord
from spheret.observe.inspection import Inspection
from spheret.observe.records import SublayerObservation
from spheret.runs.metrics import LINES
from spheret.runs.records import MANIFESTS, RUN_SAMPLES, STATES, RunSample
from spheret.runs.run import open_run, section_as_dict
from spheret.support.documents import DamagedDocument

HASH = "ab" * 32


class Case(NamedTuple):
    """A document: its file, its reader as a command uses it, and its plain data if it is accepted."""

    path: Path
    read: Any


@pytest.fixture(scope="module")
def run(prepared, tmp_path_factory):
    """A run with two checkpoints and two evaluations."""
    out = tmp_path_factory.mktemp("documents") / "run"
    words = ["--scheme", "proj-spheretnorm", "--layers", "1", "--heads", "2", "--width", "16", "--block", "32"]
    words += ["--batch-size", "2", "--set", "evaluation.eval_windows=2", "--steps", "2", "--threads", "1"]
    words += ["--set", "train.clip=inf"]
    words += ["--data", str(prepared), "--out", str(out), "--quiet"]
    assert main(["train", *words]) == 0
    return out


def plain(record):
    return json.loads(msgspec.json.encode(record))


def read_run(path):
    document = open_run(path.parent).config
    sections = {name: section_as_dict(getattr(document, name)) for name in ("model", "train", "evaluation")}
    head = {"format": "spheret-run", "version": 3, "data": plain(document.data)}
    return {**sections, **head, "environment": plain(document.environment)}


# documents in which a key that may be absent is absent when it is null
OMITTING = ("config", "metrics")
# documents in which a key is absent if something was not measured
MEASURED = ("watch", "watched step", "inspect")


def without_nulls(value):
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return value


def read_line(lines):
    return lambda path: plain(next(lines.read(path))[0])


def records():
    """The documents that no command of a quick test writes."""
    tokenizer = describe(load("bytes"))
    cursors = {"progress": (1, 7), "progress of a stream": HubCursor(documents=7, state={"row": 3})}
    settings = SettingsRecord(
        corpus="texts", revision="local files", tokenizer="bytes", val_fraction=0.1, shard_tokens=100, files="",
        tokenizer_sha256=HASH,
    )  # fmt: skip
    for name, cursor in cursors.items():
        position = ResumePoint(
            tokenizer=tokenizer, counts={"train": 3, "val": 2}, digest=HASH, cursor=cursor,
            tokens={"train": 105, "val": 5},
        )  # fmt: skip
        yield name, PROGRESSES, Progress(settings=settings, position=position)
    task = TaskRecord(
        requests=4, truncated=1, documents=2, version=1.0, hash=HASH, data_sha256=HASH,
        metrics={"acc": MetricRecord(value=0.5, stderr=0.1)},
    )  # fmt: skip
    yield "eval", EVALS, EvalRecord(
        run="run", step=2, limit=2, precision="float32", device="cpu", batch_size=4, seconds=1.5,
        versions={"torch": "2"}, tasks={"piqa": task},
    )  # fmt: skip
    sublayer = SublayerObservation(1, branch="mlp", norm=1.0, sink_heads=[0.5])
    inspected = Inspection(
        "GPT", 3.0, 1.0, [sublayer], [], name="run", scheme="pre-ln", checkpoint=2,
    )  # fmt: skip
    yield "inspect", INSPECTIONS, InspectRecord(runs=[inspected])
    yield "run sample", RUN_SAMPLES, RunSample("a text", "", 1337, 0.8, 128, 40)
    jobs = [SubmittedJob(name="keel-1337", step=40)]
    ngrams = NgramRecord("race", HASH, 128, 8, 300, 128, {"bigram": 2.3})
    yield "n-grams", NGRAMS, NgramsRecord(tables=[ngrams])
    yield "slurm stage", STAGES, StageRecord(stage=1, array="17", next="18", jobs=jobs, given_up=False)


@pytest.fixture(scope="module")
def cases(run, prepared, tmp_path_factory):
    """Every document, each in a directory of its own that may be damaged."""
    folder = tmp_path_factory.mktemp("cases")
    saved = run / "checkpoints" / "step-2"
    result = {
        "config": Case(run / "config.json", read_run),
        "state": Case(saved / "state.json", lambda path: plain(STATES.read(path))),
        "checkpoint": Case(saved / "manifest.json", lambda path: plain(MANIFESTS.read(path))),
        "metrics": Case(run / "metrics.jsonl", read_line(LINES)),
        "data": Case(prepared / "manifest.json", lambda path: plain(DATA_MANIFESTS.read(path))),
    }
    for name, document, record in records():
        path = folder / name / "document.json"
        path.parent.mkdir()
        document.write(path, record)
        result[name] = Case(path, lambda path, document=document: plain(document.read(path)))
    sample = SampleRecord(task="piqa", document=0, hash="h0", metrics={"acc": 1.0}, responses=[["a"]])
    (folder / "samples").mkdir()
    (folder / "samples" / "document.json").write_bytes(SAMPLES.encode(sample))
    result["samples"] = Case(folder / "samples" / "document.json", read_line(SAMPLES))
    row = Row(
        group="nine", contestant="keel", rate=0.005, seed=101, state="finished", reason="", val_loss=2.3,
        train_loss=2.4, steps=300, tokens=307200, flops=10**12, seconds=40.0, curve=[(60, 2.9), (300, None)],
        run="keel-1", commit="abc", torch="2.13", processor="x", threads=1, step_seconds=0.1, unigram_entropy=3.0,
    )  # fmt: skip
    write_rows(folder / "rows.jsonl", [row])
    result["study rows"] = Case(folder / "rows.jsonl", read_line(STUDY_ROWS))
    watch = write_watch(folder / "watch.jsonl", header(1), observations(1, 2, 2, events={1: [event(2)]}, places=1))
    result["watched step"] = Case(watch, read_line(OBSERVATIONS))
    (folder / "watch.json").write_bytes(watch.read_bytes().splitlines()[0])
    result["watch"] = Case(folder / "watch.json", lambda path: plain(HEADERS.read(path)))
    for name, case in result.items():
        copy = folder / "copies" / name / case.path.name
        copy.parent.mkdir(parents=True)
        # of lines the last one, which has the most keys
        data = case.path.read_bytes()
        copy.write_bytes(data if copy.suffix == ".json" else data.split(b"\n")[-2] + b"\n")
        result[name] = Case(copy, case.read)
    return result


NAMES = (
    "config", "state", "checkpoint", "metrics", "data", "progress", "progress of a stream", "eval",
    "samples", "inspect", "run sample",
    "n-grams", "slurm stage", "study rows", "watch", "watched step",
)  # fmt: skip


def test_every_document_has_a_case(cases):
    assert tuple(sorted(cases)) == tuple(sorted(NAMES))
    sources = "".join(path.read_text() for path in Path(spheret.__file__).parent.rglob("*.py"))
    known = {"RUNS", "STATES", "MANIFESTS", "LINES", "PROGRESSES", "EVALS", "SAMPLES", "INSPECTIONS"}
    known |= {"STAGES", "STUDY_ROWS", "RUN_SAMPLES", "NGRAMS"}
    known |= {"HEADERS", "OBSERVATIONS"}
    assert set(re.findall(r"^(\w+) = (?:Document|Lines)\(", sources, re.MULTILINE)) == known


def one_sentence(error, path):
    text = str(error)
    assert "\n" not in text
    assert str(path) in text
    assert text.endswith(".")
    assert len(text) < 600 + len(str(path))
    return text


@pytest.mark.parametrize("name", NAMES)
def test_every_key(name, cases):
    case = cases[name]
    whole = case.path.read_bytes()
    document = json.loads(whole)
    assert case.read(case.path) == document
    wrong = []
    for what, place, damaged in damage.damages(document):
        damage.overwrite(case.path, damage.dump(damaged).encode() + b"\n")
        try:
            accepted = case.read(case.path)
        except ValueError as error:
            # an error of JSON itself names a byte instead of a key
            text = one_sentence(error, case.path)
            keys = [key for key in place if isinstance(key, str)]
            named = what in ("NaN", "infinity", "unknown key") or place == ("format",) or "its SHA-256" in text
            if not named and not any(key in text for key in keys):
                wrong.append((what, place, text))
        else:
            same = without_nulls if name in OMITTING else lambda value: value
            if same(accepted) != same(damaged) and not (what == "missing" and name in MEASURED):
                wrong.append((what, place, "was read as something else"))
    case.path.write_bytes(whole)
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("name", NAMES)
def test_every_file(name, cases, tmp_path):
    case = cases[name]
    for what, act in damage.FILES.items():
        path = tmp_path / what / case.path.name
        path.parent.mkdir()
        shutil.copy(case.path, path)
        act(path)
        if name in ("metrics", "samples", "study rows", "watched step"):
            if what == "twice":
                continue
            # a line that has no end is one that a kill cut short
            if path.is_file() and not path.is_symlink():
                with path.open("ab") as file:
                    file.write(b"\n")
        with pytest.raises((DamagedDocument, FileNotFoundError)) as caught:
            case.read(path)
        if what != "missing":
            one_sentence(caught.value, path)
