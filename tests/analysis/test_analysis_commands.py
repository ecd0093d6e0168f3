"""certify, inspect and train --certify-every on real run directories."""

import json
import math
import shutil

import pytest
import torch
from trained_models import config

from spheret import GPT
from spheret.analysis import figures
from spheret.analysis.inspect import QUANTITIES
from spheret.certificates import certificate
from spheret.certificates.certificate_json import CERTIFICATES
from spheret.certificates.certify import certify_run
from spheret.cli import main
from spheret.data import cached
from spheret.runs.layout import CERTIFICATE
from spheret.runs.run import create_run, open_run

SIZE = ["--layers", "2", "--heads", "4", "--width", "32", "--block", "64", "--batch-size", "4"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three short runs: one observed, the same unobserved, and one without a sphere."""
    folder = tmp_path_factory.mktemp("runs")
    for name, scheme, more in (
        ("ball", "proj-spheretnorm", ["--certify-every", "5"]),
        ("unseen", "proj-spheretnorm", []),
        ("flat", "pre-ln", ["--certify-every", "10"]),
    ):
        words = ["train", "--scheme", scheme, *SIZE, "--data", "sotu", "--steps", "10", "--eval-every", "5"]
        assert main([*words, *more, "--quiet", "--out", str(folder / name)]) == 0
    return folder


def test_certify(runs, capsys):
    # ten steps are not enough to learn more than token frequencies, so the exit code is 1
    assert main(["certify", str(runs / "ball"), "--tokens", "16", "--sequence", "4"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("The model predicts no better than token frequencies: its loss is ")
    assert "16 tokens: 4 sublayers, of which 4 proven" in printed
    assert "The condition number of every sublayer is proven to" in printed
    assert "exact arithmetic" in " ".join(printed.split())
    document = json.loads((runs / "ball" / "certificate.json").read_text())
    assert document["checkpoint"] == 10
    assert document["tokens"] == 16
    assert certificate.verify(certificate.read_certificate(runs / "ball")) == []
    assert (runs / "ball" / "certificate.png").read_bytes().startswith(b"\x89PNG")


def test_certify_a_flat_run_says_why_the_paper_does_not_apply(runs, capsys):
    assert main(["certify", str(runs / "flat"), "--tokens", "8", "--sequence", "0"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 sublayers, of which 4 proven" in printed
    assert "does not apply at 4 (its update is no retraction" in printed


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """A run at a learning rate of 100: within a few updates its step sizes are about 1e-40."""
    run = tmp_path_factory.mktemp("dead") / "run"
    size = ["--layers", "2", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "4"]
    words = ["train", "--scheme", "proj-spheretnorm", *size, "--data", "sotu", "--steps", "4", "--lr", "100"]
    main([*words, "--warmup", "0", "--eval-windows", "2", "--checkpoint-every", "1", "--quiet", "--out", str(run)])
    return run


def test_a_dead_model_is_no_success(dead, capsys):
    assert main(["certify", str(dead), "--tokens", "8", "--sequence", "2"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("The model predicts no better than token frequencies: its loss is ")
    assert "sublayers are inactive" in printed
    document = json.loads((dead / "certificate.json").read_text(), parse_constant=pytest.fail)
    rows = document["own_path"]["sublayers"]
    assert min(row["alpha"] for row in rows) < 1e-20
    for row in rows:
        assert (row["verdict"] == "inactive") == (row["alpha"] < 1e-20)
        assert row["paper"] != "holds"
    assert document["achieves"]["learned"] is False
    assert document["achieves"]["loss"] > 3 * document["achieves"]["unigram_entropy"]
    record = certificate.read_certificate(dead)
    assert not certificate.is_success(record)
    assert record.own_path.verdicts["inactive"] == len(document["achieves"]["inactive"]) > 0


def test_inspect_names_dead_sublayers(dead, runs, capsys):
    assert main(["inspect", str(dead), "--windows", "1"]) == 0
    assert "sublayers are inactive: their branch moves the stream by less than" in capsys.readouterr().out
    (record,) = json.loads((dead / "inspect.json").read_text())["runs"]
    assert record["inactive"] == [row["sublayer"] for row in record["sublayers"] if row["moved"] < 1e-7] != []
    assert main(["inspect", str(runs / "ball"), "--windows", "1", "--out", str(dead / "alive")]) == 0
    assert "inactive" not in capsys.readouterr().out


def test_a_model_that_has_learned_is_a_success(tmp_path, capsys):
    words = ["train", "--scheme", "pre-ln", *SIZE, "--data", "sotu", "--steps", "60", "--lr", "1e-2", "--quiet"]
    assert main([*words, "--eval-windows", "2", "--out", str(tmp_path / "run")]) == 0
    assert main(["certify", str(tmp_path / "run"), "--tokens", "4", "--sequence", "0"]) == 0
    assert capsys.readouterr().out.startswith("The model has learned: its loss is 2.")


def test_a_table_has_a_row_per_sublayer(runs):
    main(["certify", str(runs / "ball"), "--tokens", "8", "--sequence", "2"])
    record = certificate.read_certificate(runs / "ball")
    assert list(record.parts) == ["own_path", "sequence"]
    for part in record.parts.values():
        rows = certificate.table(part)
        assert [row[0] for row in rows] == ["1", "2", "3", "4"]
        assert all(len(row) == len(certificate.COLUMNS) for row in rows)
        assert sum(part.verdicts.values()) == 4
        assert "violated" not in part.verdicts


def test_a_forged_certificate_is_recognised(runs, tmp_path):
    document = certify_run(open_run(runs / "ball"), tokens=4, sequence=0)
    document.own_path.sublayers[0].sigma_max = 1e3
    CERTIFICATES.write(tmp_path / CERTIFICATE, document)
    assert "sigma_max 1000" in certificate.verify(certificate.read_certificate(tmp_path))[0]


def test_a_violation_ends_with_code_1(runs, capsys, monkeypatch):
    from spheret import SpheretNorm

    honest = SpheretNorm.forward
    monkeypatch.setattr(SpheretNorm, "forward", lambda self, h, f: honest(self, h, 3 * f))
    assert (
        main(["certify", str(runs / "ball"), "--tokens", "4", "--sequence", "0", "--out", str(runs / "forged")]) == 1
    )
    assert "contradiction" in capsys.readouterr().err


def test_the_live_version(runs):
    lines = open_run(runs / "ball").metrics()
    assert [line.step for line in lines if line.certificate] == [5, 10]
    record = lines[-1].certificate
    assert record.tokens == 16
    assert sum(record.verdicts.values()) == 4
    assert record.seconds > 0
    assert open_run(runs / "flat").metrics()[-1].certificate.verdicts == {"proven": 4}


def test_an_observed_run_is_the_same_run(runs):
    observed, unseen = (open_run(runs / name).model().state_dict() for name in ("ball", "unseen"))
    assert all(torch.equal(observed[key], unseen[key]) for key in unseen)


def test_inspect_one(runs, capsys):
    assert main(["inspect", str(runs / "flat"), "--windows", "2"]) == 0
    assert "loss rise" in " ".join(capsys.readouterr().out.split())
    document = json.loads((runs / "flat" / "inspect.json").read_text())
    assert (document["format"], document["version"]) == ("spheret-inspect", 1)
    (record,) = document["runs"]
    assert [line["step"] for line in record["training"]] == [5, 10]
    assert all(row["initial_gradient"] > 0 for row in record["sublayers"])
    assert (runs / "flat" / "inspect.png").read_bytes().startswith(b"\x89PNG")


COMMANDS = {
    "certify": (["--tokens", "8"], certificate.COLUMNS),
    "inspect": (["--windows", "2"], QUANTITIES.values()),
    "inspect two": (["--windows", "2"], QUANTITIES.values()),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_of_80_columns_shows_every_cell(name, runs, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words, columns = COMMANDS[name]
    paths = [str(runs / "ball"), *([str(runs / "flat")] if "two" in name else [])]
    main([name.split()[0], *paths, *words, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    tables = [line for line in printed.splitlines() if "\u2502" in line or "\u2503" in line]
    assert tables
    assert max(map(len, tables)) <= 80
    assert "\u2026" not in printed
    headings = {cell.strip() for line in tables if "\u2503" in line for cell in line.split("\u2503")}
    assert headings == {*columns, "sublayer", "branch"}
    if name == "certify":
        (part, *_) = certificate.read_certificate(tmp_path).parts.values()
        cells = {cell.strip() for line in tables for cell in line.split("\u2502")}
        assert {text for row in certificate.table(part) for text in row} <= cells
        # what is proven comes first, and every column that its name does not explain has a sentence
        assert printed.index("of which") < printed.index(tables[0])
        assert all(f"\n{column}: " in printed for column, meaning in certificate.COLUMNS.items() if meaning)


def test_inspect_two_side_by_side(runs, capsys, tmp_path):
    words = ["inspect", str(runs / "ball"), str(runs / "flat"), "--windows", "2", "--out", str(tmp_path / "both")]
    assert main(words) == 0
    assert "ball, proj-spheretnorm" in capsys.readouterr().out
    records = json.loads((tmp_path / "both" / "inspect.json").read_text())["runs"]
    assert [record["scheme"] for record in records] == ["proj-spheretnorm", "pre-ln"]


def test_gradients_before_training_are_those_of_the_first_step(runs):
    """The initial model is drawn again from the seed: its first loss is the run's first loss."""
    from spheret.analysis.inspect import initial

    run = open_run(runs / "ball")
    loader = run.data().loader(64, run.config.train.batch_size, run.config.train.seed)
    assert float(initial(run, run.data())(*loader.batch(0)).detach()) == pytest.approx(
        run.metrics()[0].loss, rel=1e-5
    )


def test_the_model_before_training_follows_its_rules_and_its_warm_up(tmp_path):
    from spheret.analysis.inspect import initial

    words = [
        "train",
        "--scheme",
        "pre-ln",
        *SIZE,
        "--data",
        "sotu",
        "--steps",
        "12",
        "--quiet",
        "--out",
        str(tmp_path),
    ]
    assert (
        main([*words, "--parametrization", "mup", "--base-width", "8", "--base-heads", "2", "--set", "prores=4"]) == 0
    )
    run = open_run(tmp_path)
    loader = run.data().loader(64, run.config.train.batch_size, run.config.train.seed)
    first = float(initial(run, run.data())(*loader.batch(0)).detach())
    assert first == pytest.approx(run.metrics()[0].loss, rel=1e-5)


def test_a_run_that_started_from_other_weights_has_no_gradient_before_training(runs, tmp_path, capsys):
    begun = str(tmp_path / "begun")
    words = ["train", "--scheme", "proj-spheretnorm", *SIZE, "--data", "sotu", "--steps", "2", "--quiet"]
    assert main([*words, "--init-from", str(runs / "unseen"), "--out", begun]) == 0
    create_run(tmp_path / "alien", GPT(config("proj-spheretnorm")), cached("sotu", "bytes").manifest.tokenizer)
    for run in (begun, str(tmp_path / "alien")):
        assert main(["inspect", run, "--windows", "1", "--data", "sotu"]) == 0
        (record,) = json.loads((open_run(run).path / "inspect.json").read_text())["runs"]
        assert [row["initial_gradient"] for row in record["sublayers"]] == [None] * 4
        assert all(row["gradient"] > 0 for row in record["sublayers"])


def test_inspect_a_run_with_a_gradient_that_was_not_finite(runs, tmp_path):
    shutil.copytree(runs / "flat", tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    next(line for line in lines if "sublayers" in line)["sublayers"][0]["grad_norm"] = None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["inspect", str(tmp_path / "run"), "--windows", "1"]) == 0


class TestBadInput:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["RUN", "--step", "3"], "no checkpoint of step 3"),
            (["RUN", "--tokens", "9999999"], "9,999,999 tokens were asked for"),
            (["RUN", "--tokens", "0"], "at least 1"),
            (["RUN", "--data", "nowhere"], "neither a file nor a directory nor a corpus"),
            (["RUN", "--schemes", "pre-ln"], "one of the two"),
            ([], "one of the two"),
            (["nowhere"], "no run directory"),
            (["--schemes", "preln"], "Did you mean 'pre-ln'"),
            (
                ["--schemes", "pre-ln", "--layers", "deep"],
                "--layers must be a whole number of at least 1, got 'deep'",
            ),
            (["RUN", "--device", "tpu"], "--device tpu is not available"),
        ],
    )
    def test_certify(self, runs, words, message, capsys):
        assert main(["certify", *(str(runs / "ball") if word == "RUN" else word for word in words)]) == 2
        assert message in capsys.readouterr().err

    def test_a_device_without_float64(self, runs, monkeypatch, capsys):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        for name in ("certify", "inspect"):
            assert main([name, str(runs / "ball"), "--device", "mps"]) == 2
            assert "use --device cpu" in capsys.readouterr().err

    def test_inspect(self, runs, capsys):
        assert main(["inspect", str(runs / "ball"), "--windows", "0"]) == 2
        assert main(["inspect", str(runs / "nowhere")]) == 2
        assert main(["inspect", str(runs / "ball"), "--device", "tpu"]) == 2
        message = capsys.readouterr().err
        assert "at least 1" in message
        assert "--device tpu is not available" in message

    @pytest.mark.parametrize("name", ["certify", "inspect"])
    def test_a_checkpoint_with_nan(self, tmp_path, name, capsys):
        model = GPT(config("proj-spheretnorm"))
        with torch.no_grad():
            model.blocks[0].attention.qkv.weight[3, 3] = math.nan
        create_run(tmp_path / "bad", model, cached("sotu", "bytes").manifest.tokenizer)
        assert main([name, str(tmp_path / "bad"), "--data", "sotu"]) == 2
        printed = capsys.readouterr().err
        assert "checkpoint step-0" in printed
        assert "blocks.0.attention.qkv.weight" in printed
        assert not (tmp_path / "bad" / "certificate.json").exists()

    def test_weights_from_elsewhere_need_data(self, tmp_path, capsys):
        create_run(tmp_path / "alien", GPT(config("proj-spheretnorm")), cached("sotu", "bytes").manifest.tokenizer)
        assert main(["certify", str(tmp_path / "alien")]) == 2
        assert "--data" in capsys.readouterr().err
        # it is untrained, and says so
        assert main(["certify", str(tmp_path / "alien"), "--data", "sotu", "--tokens", "4", "--sequence", "0"]) == 1
        assert "no better than token frequencies" in capsys.readouterr().out

    def test_data_in_other_tokens(self, runs, tmp_path, capsys):
        text = tmp_path / "text.txt"
        text.write_text("a few words of no importance, again and again. " * 400)
        words = ["prepare", str(text), "--tokenizer", "bpe:300", "--val-fraction", "0"]
        assert main([*words, "--out", str(tmp_path / "bpe")]) == 0
        assert main(["certify", str(runs / "ball"), "--data", str(tmp_path / "bpe")]) == 2
        assert "bpe:300" in capsys.readouterr().err

    def test_less_data_than_a_window(self, runs, tmp_path, capsys):
        for number in range(4):
            (tmp_path / "texts").mkdir(exist_ok=True)
            (tmp_path / "texts" / f"{number}.txt").write_text("short text " * (4 + number))
        words = ["prepare", str(tmp_path / "texts"), "--tokenizer", "bytes", "--val-fraction", "0.3"]
        assert main([*words, "--out", str(tmp_path / "little")]) == 0
        words = ["certify", str(runs / "ball"), "--data", str(tmp_path / "little"), "--sequence", "0"]
        assert main([*words, "--tokens", "10", "--out", str(tmp_path / "out")]) == 1
        assert main([*words, "--tokens", "1000", "--out", str(tmp_path / "out")]) == 2
        assert "ask for fewer" in capsys.readouterr().err


def test_an_older_checkpoint(runs):
    steps = sorted(int(path.name.split("-")[1]) for path in (runs / "ball" / "checkpoints").iterdir())
    document = certify_run(open_run(runs / "ball"), steps[0], tokens=4, sequence=0)
    assert document.checkpoint == steps[0]


def test_nothing_but_its_files_is_written(runs, tmp_path):
    shutil.copytree(runs / "ball", tmp_path / "copy")
    before = {path.relative_to(tmp_path): path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    out = tmp_path / "elsewhere"
    assert main(["certify", str(tmp_path / "copy"), "--tokens", "4", "--sequence", "0", "--out", str(out)]) == 1
    assert sorted(path.name for path in out.iterdir()) == ["certificate.json", "certificate.png"]
    after = {
        path.relative_to(tmp_path): path.stat().st_mtime_ns
        for path in tmp_path.rglob("*")
        if path.is_file() and out not in path.parents
    }
    assert after == before


def test_no_matplotlibrc_decides_how_a_figure_is_drawn():
    """One in the current directory could ask for LaTeX, which would run with the preamble that it gives."""
    import matplotlib

    panels = [figures.Panel("a", "x", "y", "a rise.", {"b": ([1.0, 2.0], [1.0, 2.0])})]
    plain = figures.lines("title", panels, {"b": "pre-ln"})
    with matplotlib.rc_context({"text.usetex": True, "text.latex.preamble": r"\undefined", "font.size": 20}):
        assert figures.lines("title", panels, {"b": "pre-ln"}) == plain


def test_panels_say_what_to_look_for():
    """Whole numbers as ticks, one sentence per panel, no panel without a number, the colour of the scheme."""
    from spheret.analysis.inspect import PANELS
    from spheret.analysis.line_styles import scheme_styles
    from spheret.support.figure_style import own_style

    assert PANELS.keys() == QUANTITIES.keys()
    known = {"a": ([1, 2, 3, 4], [1.0, 2.0, None, 8.0]), "b": ([1, 2], [3.0, 5.0])}
    panels = [figures.Panel(title, "sublayer", y, look, known, log) for title, y, look, log in PANELS.values()]
    panels.append(figures.Panel("empty", "sublayer", "y", "nothing.", {"a": ([], []), "b": ([1], [None])}))
    schemes = {"a": "pre-ln", "b": "proj-spheretnorm"}
    with own_style():
        figure = figures.lines_figure("title", panels, schemes)
        assert len(figure.axes) == len(PANELS)
        for axes, (title, _, look_for, log) in zip(figure.axes, PANELS.values(), strict=True):
            assert axes.get_title(loc="left").replace("\n", " ") == title
            (note,) = axes.texts
            assert note.get_text().replace("\n", " ") == f"Look for: {look_for}"
            low, high = axes.get_xlim()
            assert {tick for tick in axes.get_xticks() if low <= tick <= high} == {1, 2, 3, 4}
            assert axes.get_yscale() == ("log" if log else "linear")
            colours = [line.get_color() for line in axes.lines]
            assert colours == [colour for colour, _ in scheme_styles(schemes).values()]
