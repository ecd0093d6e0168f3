"""What a run finds when it continues: gaps, an edited config, another backend, tensors that do not fit."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from drill import timeless
from train_helpers import train, weights

from spheret import kernels
from spheret.cli import main
from spheret.lab.runs import read_groups
from spheret.runs import tensors
from spheret.runs.layout import MANIFEST, MODEL, OPTIMIZER, STATE
from spheret.runs.records import MANIFESTS, CheckpointRecord, FileRecord
from spheret.runs.run import open_run
from spheret.runs.tensors import lazy_tensor

WORDS = ("--set", "train.checkpoint_every=2", "--eval-every", "2", "--set", "train.keep=3")


@pytest.fixture(scope="module")
def finished(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("resume") / "run"
    assert train(out, prepared, *WORDS, steps=6) == 0
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A copy that was killed after step 4: its metrics are ahead of its checkpoints."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints" / "step-6")
    return out


def resume(out):
    return main(["train", "--resume", "--out", str(out), "--quiet"])


def error(capsys):
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_metrics_ahead_of_the_checkpoint_are_right(run, finished):
    assert resume(run) == 0
    assert weights(run) == weights(finished)
    first, second = (timeless(open_run(path).metrics()) for path in (run, finished))
    assert first == second
    # the backend stands in the first line, and no second time if it is the same
    assert [line["step"] for line in first if "backend" in line] == [1]


@pytest.mark.parametrize("scheme", ["proj-spheretnorm", "ngpt"])
def test_muon_and_its_schedule_continue_bit_for_bit(scheme, prepared, tmp_path):
    words = (
        "--set", "train.optimizer=muon", "--set", "train.lr_schedule=wsd", "--set", "train.matrix_lr=2e-3",
        "--set", "train.parametrization=completep",
        "--set", "train.base_width=8", "--set", "train.base_layers=1", "--lr", "1e-3",
    )  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(whole, prepared, *WORDS, *words, scheme=scheme, steps=6) == 0
    shutil.copytree(whole, broken)
    for step in (4, 6):
        shutil.rmtree(broken / "checkpoints" / f"step-{step}")
    assert resume(broken) == 0
    for name in (MODEL, OPTIMIZER):
        first, second = (open_run(out).checkpoint().path / name for out in (whole, broken))
        assert first.read_bytes() == second.read_bytes()
    saved = dict(open_run(whole).checkpoint().optimizer())
    kept = {name.rpartition(".")[2] for name in saved if ".mlp.output.weight." in name}
    assert kept == {"momentum_buffer"}
    assert {name.rpartition(".")[2] for name in saved if name.startswith("tokens.")} == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    # warm-up 0, stable to step 5, and the one update of decay begins at the full rate
    assert {line.lr for line in open_run(whole).metrics()} == {1e-3}


def test_a_gap_in_the_metrics_is_refused(run, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "whole")
    for out in (run, tmp_path / "whole"):
        lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (out / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
        kept = weights(out)
        assert resume(out) == 2
        assert "metrics.jsonl has a gap" in error(capsys)
        with pytest.raises(ValueError, match=r"metrics\.jsonl has a gap"):
            read_groups([out])
        assert weights(out) == kept


def edit(path, section, key, value):
    config = json.loads((path / "config.json").read_text())
    config[section][key] = value
    (path / "config.json").write_text(json.dumps(config))


EDITS = [
    ("train", "lr", 0.5),
    ("train", "seed", 7),
    ("train", "betas", [0.8, 0.9]),
    ("model", "scheme", "cay-spheretnorm"),
]


@pytest.mark.parametrize(("section", "key", "value"), EDITS, ids=[key for _, key, _ in EDITS])
def test_an_edited_config_is_named(section, key, value, run, capsys):
    edit(run, section, key, value)
    for command in (["train", "--resume", "--out"], ["sample", "--count", "1"]):
        assert main([*command, str(run)]) == 2
        text = error(capsys)
        assert re.search(rf"config\.json .*\b{key}\b.*step-4", text)
    with pytest.raises(ValueError, match=rf"config\.json .*\b{key}\b"):
        read_groups([run])


def test_what_may_change_may_be_edited(run, finished):
    edit(run, "train", "keep", 1)
    edit(run, "evaluation", "eval_every", 3)
    assert resume(run) == 0
    assert weights(run) == weights(finished)


def test_a_changed_backend_is_said_and_noted(run, capsys):
    # native where there is a compiler
    before = open_run(run).metrics()[0].backend
    with kernels.use("reference"):
        assert resume(run) == 0
    assert f"the backend was {before} and is reference from step 5 on" in error(capsys)
    lines = open_run(run).metrics()
    assert {line.step: line.backend for line in lines if line.backend} == {1: before, 5: "reference"}
    assert open_run(run).checkpoint().state.training.backend == "reference"


def rewrite(saved, name, change):
    """Change the tensors of a file, with right hashes in the manifest."""
    entries = change({key: value.clone() for key, value in tensors.each(saved / name)})
    digest = tensors.write(saved / name, [lazy_tensor(key, value) for key, value in entries.items()])
    record = MANIFESTS.read(saved / MANIFEST)
    entry = FileRecord(bytes=(saved / name).stat().st_size, sha256=digest)
    MANIFESTS.write(saved / MANIFEST, CheckpointRecord.of({**record.files(), name: entry}))


CHANGES = {
    "transposed": lambda value: value.mT.contiguous(),
    "cut": lambda value: value[:1].clone(),
    "flat": lambda value: value.flatten(),
    "grown": lambda value: torch.cat([value, value]),
    "bf16": lambda value: value.bfloat16(),
    "float64": lambda value: value.double(),
    "int64": lambda value: value.long(),
    "missing": None,
}


@pytest.mark.parametrize(
    ("name", "change"), [*((MODEL, change) for change in CHANGES), (OPTIMIZER, "flat"), (OPTIMIZER, "missing")]
)
def test_tensors_that_do_not_fit_fall_back(name, change, run, finished, capsys):
    def act(entries):
        key = "blocks.0.attention.qkv.weight" + (".exp_avg" if name == OPTIMIZER else "")
        if CHANGES[change] is None:
            return {each: value for each, value in entries.items() if each != key}
        return entries | {key: CHANGES[change](entries[key])}

    saved = run / "checkpoints" / "step-4"
    rewrite(saved, name, act)
    # other commands need the weights alone
    assert open_run(run).load()[1].step == (2 if name == MODEL else 4)
    capsys.readouterr()
    assert resume(run) == 0
    text = error(capsys)
    assert (
        f"checkpoint step-4 is damaged, {name} does not fit the model; these differ: blocks.0.attention.qkv" in text
    )
    assert text.count("falling back to the one before.") == 1
    assert weights(run) == weights(finished)


def test_a_damaged_random_state_falls_back(run, finished, capsys):
    path = run / "checkpoints" / "step-4" / STATE
    state = json.loads(path.read_text())
    state["training"]["rng"] = ["00ff"]
    path.write_text(json.dumps(state))
    record = MANIFESTS.read(path.with_name(MANIFEST))
    entry = FileRecord(bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    MANIFESTS.write(path.with_name(MANIFEST), CheckpointRecord.of({**record.files(), STATE: entry}))
    assert resume(run) == 0
    assert "checkpoint step-4 is damaged, the saved state of the random generator cannot be used" in error(capsys)
    assert weights(run) == weights(finished)


def test_infinity_survives(prepared, tmp_path):
    """Infinity is a word there, because JSON does not have it."""
    out = tmp_path / "run"
    words = ("--set", "train.clip=inf", "--set", "p=inf")
    assert train(out, prepared, *words, scheme="p-spheretnorm", steps=2) == 0
    config = json.loads((out / "config.json").read_text(), parse_constant=pytest.fail)
    assert (config["train"]["clip"], config["model"]["scheme_options"]) == ("inf", {"p": "inf"})
    opened = open_run(out)
    assert (opened.settings.train.clip, opened.model_config.scheme_options) == (float("inf"), {"p": float("inf")})
    assert train(out, prepared, *words, scheme="p-spheretnorm", steps=2) == 0
    assert resume(out) == 0
