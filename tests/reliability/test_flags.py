"""Values of flags that cannot be meant: exit code 2, one sentence that names the flag, and nothing written."""

import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from spheret.cli import COMMANDS, main
from spheret.kernels import dispatch
from spheret.model.gpt import GPTConfig
from spheret.runs.config import EvaluationConfig, TrainConfig
from spheret.support import machine

# more than 64 bits hold
HUGE = "9" * 23
# commands whose own arguments are their flags, with words that each needs; their numbers are checked before a run is
# opened, a model is built or a corpus is read
PLAIN = {
    "sample": ["nowhere"],
    "certify": ["nowhere"],
    "inspect": ["nowhere"],
    "explore": ["nowhere"],
    "convert": ["nowhere", "--data", "nowhere", "--out", "out"],
    "plan": [],
    "coord-check": [],
    "doctor": [],
}
# any whole number is a seed
ANY = ("seed",)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run a command that must be refused, in an empty directory; returns its sentence."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())

    def run(*words):
        assert main([str(word) for word in words]) == 2, words
        sentence = capsys.readouterr().err
        assert len(sentence.strip().splitlines()) == 1, sentence
        assert "internal error" not in sentence
        assert sorted(tmp_path.iterdir()) == before
        return sentence

    return run


def whole_numbers(name):
    """The flags of a command that take a whole number."""
    module, _, function = COMMANDS[name][0].partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    return [each for each, parameter in parameters.items() if "int" in str(parameter.annotation) and each not in ANY]


@pytest.mark.parametrize("name", PLAIN)
def test_counts_out_of_range(name, refused):
    for flag in whole_numbers(name):
        for value in ("-1", HUGE):
            sentence = refused(name, *PLAIN[name], "--" + flag.replace("_", "-"), value)
            assert flag in sentence.replace("-", "_"), sentence


@pytest.mark.parametrize("command", ["train", "race"])
def test_settings_out_of_range(command, refused):
    words = ["--scheme", "pre-ln", "--out", "run"] if command == "train" else ["--schemes", "pre-ln", "--out", "run"]
    for section in (GPTConfig, TrainConfig, EvaluationConfig):
        for field in fields(section):
            if field.type == "int" and not (command == "race" and field.name == "seed"):
                flag = "--" + field.name.replace("_", "-")
                given = [] if flag == "--steps" else ["--steps", "6"]
                sentence = refused(command, *words, *given, "--data", "nowhere", flag, HUGE)
                assert field.name in sentence.replace("-", "_"), sentence


BAD = [
    (["race", "--threads", HUGE], "--threads must lie between 1 and"),
    (["race", "--config", "/dev/zero"], "/dev/zero is a device, not a file: give a TOML file of settings"),
    (["train", "--config", "/dev/zero"], "/dev/zero is a device, not a file: give a TOML file of settings"),
    (["race", "--jobs", "0"], "--jobs must be at least 1"),
    (["race", "--seeds", HUGE], "--seeds must be at most 10,000"),
    (["race", "--eval-every", "0"], "--eval-every of a race must be at least 1, got 0"),
    (["race", "--device", "cuda:nine"], "--device cuda:nine is"),
    (["train", "--device", "cpu:x"], "--device cpu:x"),
    (["train", "--device", "cpu:7"], "this machine has 1 cpu, counted from 0"),
    (["train", "--set", "name=x"], "unknown option of pre-dyt 'name'"),
    (["train", "--set", "slope=abc"], "slope of pre-dyt must be a number or none, got 'abc'"),
    (["train", "--set", "bias=1"], "bias of pre-dyt must be true or false, got 1"),
    (["train", "--scheme", "p-spheretnorm", "--set", "p=1e308"], "p must lie between 1e-06 and 1e+06"),
    (["train", "--scheme", "p-spheretnorm", "--set", "p=1e-308"], "p must lie between 1e-06 and 1e+06"),
    (["train", "--scheme", "p-spheretnorm", "--set", "p=1e-9", "--set", "learnable_p=true"], "p must lie between"),
    (
        ["train", "--scheme", "p-spheretnorm", "--set", "p=NaN"],
        "p of p-spheretnorm must be a number or none, got nan",
    ),
    (["train", "--width", "10000000001", "--heads", "4"], "heads may be 1"),
    (["train", "--width", "1000000000000"], "needs at least"),
    (["train", "--layers", "1000000000000"], "needs at least"),
    (["train", "--vocab", "1000000000000"], "needs at least"),
    (["train", "--batch-size", "1000000000"], "or give --ignore-memory"),
    (["race", "--batch-size", "1000000000"], "or give --ignore-memory"),
    (["certify", "--schemes", "pre-ln", "--width", "1000000000"], "needs at least"),
    (["certify", "--schemes", "pre-ln", "--layers", HUGE], "--layers must be at most"),
    (["train", "--optimizer", "adam"], "unknown optimizer 'adam'"),
    (["train", "--lr-schedule", "wds"], "unknown lr_schedule 'wds'"),
    (["train", "--decay-steps", "2"], "--decay-steps 2 belongs to --lr-schedule wsd"),
    (["train", "--lr-schedule", "wsd", "--warmup", "4", "--decay-steps", "3"], "between 1 and 2, the updates after"),
    (["train", "--matrix-lr", "nan"], "--matrix-lr must be above 0, got nan"),
    (["train", "--parametrization", "mup"], "mup needs --base-width: the width of the model for which --lr"),
    (["train", "--parametrization", "completep", "--base-width", "64"], "completep needs --base-layers"),
    (["train", "--base-width", "64"], "--base-width 64 has no meaning with --parametrization standard"),
    (
        ["train", "--parametrization", "mup", "--base-width", "50"],
        "--base-width 50 is not divisible by --base-heads 4",
    ),
    (
        ["train", "--scheme", "keel", "--parametrization", "completep", "--base-width", "64", "--base-layers", "2"],
        "keel has a rule of its own for that",
    ),
    (
        ["train", "--scheme", "rezero", "--parametrization", "mup", "--base-width", "64"],
        "needs a norm before the head",
    ),
    (
        ["train", "--parametrization", "mup", "--base-width", "1"],
        "--base-width must lie between 2 and 100,000, got 1",
    ),
    (
        ["train", "--parametrization", "completep", "--base-width", "64", "--base-layers", "999999999"],
        "--base-layers must lie between 1 and 100,000, got 999999999",
    ),
    (["train", "--size", "modern-S"], "give --size S with --positions rope --mlp swiglu --norm rmsnorm --qk-norm"),
    (
        ["train", "--qk-norm", "--heads", "16", "--width", "16"],
        "a head of one entry has only a sign: take fewer heads",
    ),
    (["train", "--set", "prores=nan"], "must be a number or none, got 'nan'."),
    (["plan", "--size", "modern-S", "--scheme", "ngpt"], "set kv_heads to 12"),
    (["plan", "--size", "modern-S", "--scheme", "hybridnorm"], "(--no-qk-norm)"),
    (["coord-check", "--widths", "32"], "--widths must be at least two different positive numbers"),
    (["coord-check", "--widths", "32,3200000000"], "needs at least"),
    (["coord-check", "--scheme", "pre-ln,post-ln"], "--scheme takes one scheme, got 2"),
    (["coord-check", "--scheme", "rezero"], "needs a norm before the head"),
    (["coord-check", "--scheme", "keel"], "keel has a rule of its own for that"),
    (["plan", "--network-gbit", "nan"], "--network-gbit must be above 0 and at most 1e+09, got nan"),
    (["plan", "--network-gbit", "inf"], "--network-gbit must be above 0"),
    (["plan", "--gpus", "7"], "divides over 1, 2, 4, 8"),
    (["train", "--timeout", HUGE], "--timeout must be at most"),
    (["prepare", "sotu", "--verify", "--workers=-1"], "--workers must be at least 1"),
    (["prepare", "sotu", "--verify", "--val-fraction", "nan"], "--val-fraction must be at least 0 and below 1"),
    (["prepare", "sotu", "--workers", "100000"], "--workers must be at most"),
    (["prepare", "sotu", "--shard-tokens", HUGE], "--shard-tokens must be at most"),
    (
        ["prepare", "sotu", "--tokenizer", "bpe:99999999999999999999", "--out", "d"],
        "at most 10,000,000",
    ),
]


@pytest.mark.parametrize(
    ("words", "message"), BAD, ids=lambda part: " ".join(part)[:60] if type(part) is list else ""
)
def test_bad_values(words, message, refused, prepared):
    given = list(words)
    if given[0] == "train":
        # argparse lets the last of two equal flags win
        given[1:1] = ["--scheme", "pre-dyt", "--steps", "6", "--data", str(prepared), "--out", "run"]
    if given[0] == "race":
        given[1:1] = ["--schemes", "pre-ln", "--data", str(prepared), "--out", "race"]
    assert message in refused(*given)


def test_a_place_for_the_numbers_is_looked_at_first(refused, tmp_path):
    assert f"--json {tmp_path}" in refused("plan", "--json", tmp_path)
    assert __file__ in refused("plan", "--json", __file__ + "/below/it.json")


@pytest.mark.parametrize("what", ["text", "json", "link", "device", "pipe"])
def test_numbers_are_written_over_numbers_alone(what, tmp_path, capsys):
    notes, path = tmp_path / "notes", tmp_path / "numbers.json"
    notes.write_text("[1]" if what == "json" else "mine")
    if what == "link":
        path.symlink_to(notes)
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path = Path("/dev/full") if what == "device" else notes
    assert main(["plan", "--size", "S", "--json", str(path)]) == 2
    captured = capsys.readouterr()
    assert "--json" in captured.err
    assert captured.out == ""
    assert notes.read_text() in ("mine", "[1]")
    assert what != "link" or path.is_symlink()


def test_numbers_are_written_over_earlier_numbers(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    path.touch()
    for size in ("S", "M"):
        assert main(["plan", "--size", size, "--json", str(path)]) == 0
        assert json.loads(path.read_text())["size"] == size
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "words",
    [
        ["certify", "nowhere"],
        ["certify", "--schemes", "pre-ln"],
        ["inspect", "nowhere"],
        ["race"],
        ["report", "nowhere"],
        ["reproduce", "--all"],
    ],
)
def test_a_place_for_the_results_is_looked_at_first(words, refused):
    assert f"--out {__file__} " in refused(*words, "--out", __file__)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_race_on_a_device_that_is_not_there_writes_nothing(refused, prepared):
    assert "--device cuda is not available" in refused(
        "race", "--data", prepared, "--out", "race", "--device", "cuda"
    )


def test_a_race_needs_validation_and_says_so_at_once(refused, prepared):
    # its first line says what it is about to do
    words = ("--block", "100000", "--batch-size", "1", "--quiet")
    sentence = refused("race", "--data", prepared, "--out", "race", *words)
    assert "split of" in sentence
    assert "--eval-every" not in sentence


def test_memory_is_compared_and_can_be_ignored(prepared, tmp_path, monkeypatch, refused):
    tiny = ["--layers", "1", "--heads", "1", "--width", "8", "--block", "8", "--batch-size", "1", "--steps", "1"]
    words = ["train", "--scheme", "pre-ln", "--data", prepared, "--out", tmp_path / "run", *tiny, "--quiet"]
    monkeypatch.setattr(machine, "memory_bytes", lambda device: 50_000)
    sentence = refused(*words)
    assert re.search(r"1 layers of width 8, and 8 tokens .* kB, .* 50 kB", sentence)
    assert main([*map(str, words), "--ignore-memory", "--no-tensorboard"]) == 0


def test_the_memory_of_this_machine():
    have = machine.memory_bytes(torch.device("cpu"))
    assert have is None or 1 << 28 < have < 1 << 50


def test_an_unknown_backend_in_the_environment(monkeypatch):
    monkeypatch.setattr(dispatch, "_forced", "nope")
    with pytest.raises(ValueError, match="SPHERET_BACKEND: 'nope'"):
        GPTConfig()
    with pytest.raises(ValueError, match="SPHERET_BACKEND"):
        dispatch.retract(torch.ones(1, 2), torch.ones(1, 2))


def test_help_answers_whatever_the_environment_says(monkeypatch, capsys):
    monkeypatch.setenv("SPHERET_BACKEND", "nope")
    # a process of its own, because the variable is read at import
    done = subprocess.run([sys.executable, "-m", "spheret", "train", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--ignore-memory" in done.stdout


def test_output_to_a_full_disk_is_one_sentence():
    done = subprocess.run(
        f"{sys.executable} -m spheret retractions > /dev/full", shell=True, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_children_of_the_tests_can_be_interrupted():
    assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN
