"""The paper's recipe, stated a second time here, and the cells run for real in their smallest form."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from planted import planted

from spheret import flags
from spheret.cli import main
from spheret.lab.runs import read_groups
from spheret.paper import reproduce
from spheret.paper import runs as recipe
from spheret.paper.runs import PaperRun, paper_runs
from spheret.runs.run import open_run
from spheret.train import train_command
from spheret.train.recipes import complete

DOCS = Path(__file__).parents[2] / "docs" / "scale.md"
# Appendix B of the paper, both tables
PAPER = {
    "betas": [0.9, 0.95], "weight_decay": 0.1, "clip": 1.0, "steps": 50_000, "warmup": 2_000,
    "batch_size": 16, "tokens_per_update": 131_072, "precision": "bf16", "compile": False, "seed": 1337,
}  # fmt: skip
# layers, heads, width, lr, min lr
PAPER_SIZES = {"S": (12, 12, 768, 6e-4, 6e-5), "M": (24, 16, 1024, 3e-4, 3e-5), "L": (36, 20, 1280, 2.5e-4, 2.5e-5)}
SPHERICAL = {"geonorm": float("inf"), "proj-spheretnorm": 1.0, "cay-spheretnorm": 2.0, "p-spheretnorm": 0.5}
EUCLIDEAN = {"pre-ln", "pre-dyt", "peri-ln", "keel"}


class TestRecipe:
    def test_there_are_48_cells(self):
        cells = paper_runs()
        assert len(cells) == len({cell.name for cell in cells}) == 48
        assert {cell.scheme for cell in cells} == SPHERICAL.keys() | EUCLIDEAN
        assert {cell.dataset for cell in cells} == {"fineweb-edu", "openwebtext"}

    @pytest.mark.parametrize("cell", paper_runs(), ids=lambda cell: cell.name)
    def test_every_cell_has_the_papers_table(self, cell):
        config = cell.config(None)
        model, train = config.model, config.as_dict()["train"]
        layers, heads, width, lr, min_lr = PAPER_SIZES[cell.size]
        assert {key: train[key] for key in PAPER} == PAPER
        assert (train["lr"], train["min_lr"]) == (lr, min_lr)
        assert (model.layers, model.heads, model.width, model.block) == (layers, heads, width, 1024)
        assert (model.vocab, model.bias, model.dropout) == (50_304, True, 0.0)
        assert (model.head, model.head_bias) == ("tied", "none")
        scheme = model.build_scheme()
        if cell.scheme in SPHERICAL:
            assert scheme.exact_clamp
            assert scheme.p == SPHERICAL[cell.scheme]
            assert scheme.schedule == ("harmonic" if cell.scheme == "geonorm" else "sqrt")
        else:
            assert model.scheme_options == {}

    @pytest.mark.parametrize("cell", paper_runs(), ids=lambda cell: cell.name)
    def test_the_flags_say_all_of_it(self, cell, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(train_command, "_train", lambda world, where, settings: asked.append(settings) or 0)
        assert main(["train", "--out", str(tmp_path), *flags.words(cell.settings(tmp_path))]) == 0
        assert complete(asked[0], "cpu", 1, *recipe.VOCAB_SIZES) == cell.config(tmp_path)

    @pytest.mark.parametrize(("processes", "expected"), [(1, (16, 8)), (2, (16, 4)), (8, (16, 1)), (16, (8, 1))])
    def test_an_update_is_the_same_on_any_number_of_processes(self, processes, expected, tmp_path):
        cell = PaperRun("openwebtext", "L", "keel")
        assert reproduce.batch(cell, processes) == expected
        assert cell.config(tmp_path, expected[0]).accumulation(processes) == expected[1]
        arguments = reproduce.train_words(cell, reproduce.Place(tmp_path, None, processes))
        assert arguments[arguments.index("--batch-size") + 1] == str(expected[0])
        assert ("--parallel" in arguments) == (processes > 1)


class TestDryRun:
    def output(self, capsys, *words):
        assert main(["reproduce", "--dry-run", *words]) == 0
        return capsys.readouterr().out

    def test_says_everything_and_writes_nothing(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
        output = self.output(capsys, "--dataset", "fineweb-edu", "--size", "M", "--scheme", "geonorm", "--nproc", "4")
        for words in (
            "6,553,600,000 in all",
            "50,000, the first 2,000",
            "parameters: 354,773,041",
            "128 per update = 4 x 16 x accumulation 2",
            "Which schedule does GeoNorm use in the paper's tables? Harmonic, 1/l.",
            "spheret prepare fineweb-edu --tokenizer gpt2",
            "torchrun --standalone --nproc-per-node=4",
            "--nnodes=2",
            "#SBATCH --gpus-per-node=4",
        ):
            assert words in output
        start = output.index("{")
        config = json.JSONDecoder().raw_decode(output[start:])[0]
        assert config["model"] == PaperRun("fineweb-edu", "M", "geonorm").config(None).as_dict()["model"]
        assert list(tmp_path.iterdir()) == []

    def test_the_commands_of_the_docs(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        commands = re.findall(r"^    spheret (reproduce [^#\n]*)", DOCS.read_text(), re.MULTILINE)
        assert len(commands) == 6
        for command in commands:
            assert main([*command.split(), "--dry-run", "--nproc", "1"]) == 0
        assert "fineweb-edu-S-proj-spheretnorm" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("scheme", "reading", "words"),
        [
            ("proj-spheretnorm", "inner-norm", ("--set inner_norm=true", "--set exact_clamp=true", "124,475,929")),
            ("pre-ln", "shifted-head", ('"head": "shifted"', "--head shifted")),
            ("pre-ln", None, ("--head tied", "--head-bias none", "--reading shifted-head")),
        ],
    )
    def test_a_reading_is_another_run(self, scheme, reading, words, capsys):
        named = ["--reading", reading] if reading else []
        output = self.output(capsys, "--dataset", "openwebtext", "--size", "S", "--scheme", scheme, *named)
        assert PaperRun("openwebtext", "S", scheme, reading=reading).name in output
        assert [each for each in words if each not in output] == []

    def test_what_a_training_advises_is_passed_on(self, capsys):
        cell = ("--dataset", "openwebtext", "--size", "S", "--scheme", "keel")
        assert "--ignore-memory" not in self.output(capsys, *cell)
        output = self.output(capsys, *cell, "--ignore-memory")
        # here, one node, two nodes, Slurm
        assert output.count(" --ignore-memory") == output.count(" train --out ") == 4

    def test_the_batch_script_is_bash(self, capsys):
        output = self.output(
            capsys, "--dataset", "openwebtext", "--size", "S", "--scheme", "keel", "--data", "a folder"
        )
        script = output[output.index("#!/bin/bash") :]
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        # what srun would be given, with the words of the data's path kept together
        stand_in = 'scontrol() { echo first; }\nsrun() { printf "%s\\n" "$@"; }\n'
        ran = subprocess.run(["bash"], input=stand_in + script, text=True, check=True, capture_output=True,
                             env={"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"})  # fmt: skip
        words = ran.stdout.splitlines()
        assert words[0] == "torchrun"
        assert {"--nnodes=2", "--rdzv-endpoint=first:29500", "--rdzv-id=7"} <= set(words)
        assert "a folder/openwebtext" in words

    def test_all(self, capsys, tmp_path):
        output = self.output(capsys, "--all", "--out", str(tmp_path), "--nproc", "8")
        assert output.count("  not run\n") == 48
        assert "0 of 48 done" in output
        assert output.count("--nproc-per-node=8") == 48


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A cell run in its smallest form, once, in this process. The slow tests start processes."""
    out = tmp_path_factory.mktemp("paper")
    words = ["--dataset", "fineweb-edu", "--size", "S", "--scheme", "geonorm", "--nproc", "1"]
    with planted(out.parent / "corpus"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce, "run_one", lambda run, place: main(reproduce.train_words(run, place)))
        assert main(["reproduce", "--smoke", "--out", str(out), *words]) == 0
    return out


class TestRunning:
    cell = PaperRun("fineweb-edu", "S", "geonorm", smoke=True)

    @pytest.fixture
    def out(self, finished, tmp_path):
        shutil.copytree(finished, tmp_path / "paper")
        return tmp_path / "paper"

    def words(self, out, *more):
        named = ("--dataset", "fineweb-edu", "--size", "S", "--scheme", "geonorm")
        return ["reproduce", *named, "--smoke", "--nproc", "1", "--out", str(out), *more]

    def test_the_run_is_what_was_resolved(self, out):
        run = open_run(out / self.cell.name)
        config = self.cell.config(None).as_dict()
        assert {section: run.config.settings(section) for section in config if section != "data"} == {
            section: values for section, values in config.items() if section != "data"
        }
        assert run.config.model.scheme_options == {"exact_clamp": True}
        # a report compares it with the paper's recipe
        assert run.config.data.val_fraction == 0.05
        assert run.metrics()[-1].step == config["train"]["steps"]

    def test_what_is_done_is_not_run_again(self, out, capfd):
        assert main(self.words(out)) == 0
        output = capfd.readouterr()
        assert "is done" in output.out
        assert "NOT the paper's recipe" in output.err

    @pytest.mark.slow
    def test_all_goes_on_where_it_was_and_runs_the_rest(self, out, capfd):
        # as a kill after step 17 leaves it
        path = out / self.cell.name
        whole = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (path / "metrics.jsonl").write_bytes(b"".join(whole[:17]))
        shutil.rmtree(path / "checkpoints" / "step-20")
        words = ["reproduce", "--all", "--size", "S", "--scheme", "geonorm", "--smoke", "--nproc", "1"]
        assert main([*words, "--out", str(out)]) == 0
        output = capfd.readouterr().out
        assert f"{self.cell.name}  at 17 of 20" in output
        assert "smoke-openwebtext-S-geonorm  not run" in output
        assert "0 of 2 done" in output
        again = [json.loads(line) for line in (path / "metrics.jsonl").read_bytes().splitlines()]
        assert [record["loss"] for record in again] == [json.loads(line)["loss"] for line in whole]
        assert main([*words, "--out", str(out)]) == 0
        assert "2 of 2 done" in capfd.readouterr().out
        # the two runs have different data, and one report shows both
        groups = {group.name: list(group.contestants) for group in read_groups([out])}
        assert groups == {
            "sotu, bytes": ["geonorm (exact_clamp=true)"],
            "stdlib, bytes": ["geonorm (exact_clamp=true)"],
        }

    def test_a_run_that_diverged_is_shown_and_left(self, out, capsys):
        path = out / self.cell.name / "metrics.jsonl"
        lines = path.read_text().splitlines()[:19]
        path.write_text("\n".join([*lines, json.dumps({"step": 20, "loss": None, "stopped": "layer 1"})]) + "\n")
        words = ["reproduce", "--all", "--dataset", "fineweb-edu", "--size", "S", "--scheme", "geonorm", "--smoke"]
        assert main([*words, "--out", str(out), "--nproc", "1"]) == 0
        assert "stopped at 20" in capsys.readouterr().out

    def test_another_run_in_its_place_is_refused(self, out, capsys):
        path = out / self.cell.name / "config.json"
        config = json.loads(path.read_text())
        config["train"]["seed"] = 1
        path.write_text(json.dumps(config))
        assert main(self.words(out)) == 2
        assert "seed (the run has 1, asked for 1337)" in capsys.readouterr().err
