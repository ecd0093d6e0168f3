"""Plans: what they mean, and a sentence for everything that is wrong with one."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from study_helpers import TWO, plan_of

from spheret.cli import main
from spheret.connections import PAPER_SCHEMES
from spheret.lab.laboratory import Laboratory
from spheret.lab.plan import PLANS, EndpointRecord, PartRecord, read_plan
from spheret.model.head import HEADS


def endpoint(kind, contestants, more="", part="two"):
    return f'[[endpoints]]\nkind = "{kind}"\npart = "{part}"\ncontestants = [{contestants}]\n{more}\n'


def test_products_are_contestants(tmp_path):
    plan = plan_of(
        tmp_path,
        """
        [[parts]]
        name = "schedules"
        rates = [1e-3, 2e-3]
        contestants = [
            "paper",
            {schemes = ["residual", "ngpt"]},
            {schemes = ["proj-spheretnorm"], options = {schedule = ["constant", "sqrt"], p = [1, 2.5]}},
            {schemes = ["pre-ln"], settings = {warmup = [3, 9], head_bias = "none"}},
        ]
        """,
    )
    labels = [contestant.label for contestant in plan.groups[0].contestants]
    assert labels == [
        *PAPER_SCHEMES,
        "residual",
        "ngpt",
        "proj-spheretnorm (schedule=constant, p=1)",
        "proj-spheretnorm (schedule=constant, p=2.5)",
        "proj-spheretnorm (schedule=sqrt, p=1)",
        "proj-spheretnorm (schedule=sqrt, p=2.5)",
        "pre-ln, warmup=3, head_bias=none",
        "pre-ln, warmup=9, head_bias=none",
    ]
    last = plan.groups[0].contestants[-1].given
    assert last["train"] == {"warmup": 9}
    assert last["model"] == {"head_bias": "none", "scheme": "pre-ln", "scheme_options": {}}


def test_every_part_comes_before_any_ladder(tmp_path):
    part = TWO + "ladder = [{layers = 24}, {layers = 36, width = 128}]\n"
    plan = plan_of(tmp_path, part + part.replace('"two"', '"more"'))
    names = ["two", "more", "two-layers24", "more-layers24", "two-layers36-width128", "more-layers36-width128"]
    assert [group.name for group in plan.groups] == names
    assert plan.groups[4].given["model"] == {"layers": 36, "width": 128}
    assert plan.rung(plan.groups[4], 1) == plan.groups[2]
    assert plan.rung(plan.groups[0], -1) is None


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_that_comes_with_the_library_can_be_run_by_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = read_plan(Path(name))
    assert plan == read_plan(PLANS[name])
    Laboratory(plan, tmp_path / "study").check()
    # the head decides more than most settings, and the rows of docs/results must not follow a default
    assert tomllib.loads(PLANS[name].read_text())["model"]["head"] in HEADS
    # a file of that name comes first
    Path(name).write_text("")
    with pytest.raises(ValueError):
        read_plan(Path(name))


def test_the_plans_of_the_docs(tmp_path):
    page = (Path(__file__).parent.parent.parent / "docs" / "compare.md").read_text()
    whole, contestants, endpoints = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "plan.toml"
    path.write_text(whole + endpoints)
    assert [each.kind for each in read_plan(path).endpoints] == ["gap", "equivalence"]
    assert [group.name for group in read_plan(path).groups] == ["two", "two-layers24", "two-layers36"]
    part = TWO.replace('contestants = ["pre-ln", "post-ln"]', contestants)
    assert len(plan_of(tmp_path, part).groups[0].contestants) == 4
    # every key of a part is in the table
    for key in (*msgspec.structs.fields(PartRecord), *msgspec.structs.fields(EndpointRecord)):
        assert f"`{key.name}`" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "parts"),
        ("surprise = 1" + TWO, "surprise"),
        # no number has so many digits, and nothing is nested so deeply
        ("[model]\nlayers = " + "9" * 10_000 + TWO, "plan.toml"),
        ("[model]\nlayers = " + "[" * 3000 + "]" * 3000 + TWO, "plan.toml"),
        (TWO + 'rates_of = {"post-lm" = [1e-3, 2e-3]}', "'post-lm'"),
        (TWO.replace("rates = [1e-3, 2e-3, 4e-3]", 'rates_of = {"pre-ln" = [1e-3, 2e-3]}'), "two or more"),
        (TWO + TWO, "'two'"),
        (TWO.replace("post-ln", "post-lm"), "post-ln"),
        (TWO.replace('"pre-ln", "post-ln"', '"pre-ln", {schemes = ["pre-ln"]}'), "'pre-ln' twice"),
        (TWO.replace('"pre-ln", "post-ln"', ""), "contestants"),
        (TWO.replace("[1e-3, 2e-3, 4e-3]", "[1e-3]"), "two or more"),
        (TWO.replace("[1e-3, 2e-3, 4e-3]", "[1e-3, 2e-3, 8e-3]"), "ratios"),
        (TWO.replace("[1e-3, 2e-3, 4e-3]", "[-1e-3, 2e-3]"), "rates"),
        (TWO + "seeds = -1", "seeds"),
        (TWO + "fresh = false", "extend"),
        (TWO.replace("1e-3, 2e-3, 4e-3", "1e-3, 1e-3") + "fresh = false\nextend = 0", "ratios"),
        (
            TWO.replace("1e-3, 2e-3, 4e-3", "1e-3") + "fresh = false\nextend = 0\nladder = [{layers = 2}]",
            "two or more",
        ),
        (TWO + "tuning_seeds = [1, 1]", "tuning_seeds"),
        (TWO + "ladder = [{}]", "rung"),
        (TWO + "ladder = [{depth = 3}]", "unknown setting in part 'two'"),
        (TWO + "[parts.train]\nlr = 1e-3", "lr"),
        ("[train]\nseed = 1\n" + TWO, "seed"),
        ("[model]\nlayer = 1\n" + TWO, "unknown setting"),
        (TWO.replace('name = "two"', 'name = "../two"'), "name"),
        (TWO + endpoint("gap", '"pre-ln", "post-ln"', part="tow"), "unknown part in endpoint 1 .*'two'"),
        (TWO + endpoint("gap", '"pre-ln", "post-lm"'), "unknown contestant in endpoint 1 .*'post-ln'"),
        (TWO + endpoint("gap", '"pre-ln", "pre-ln"'), "'pre-ln' twice"),
        (TWO + endpoint("gap", '"pre-ln"'), "gap"),
        (TWO + "seeds = 1\n" + endpoint("gap", '"pre-ln", "post-ln"'), "seeds"),
        (TWO + endpoint("equivalence", '"pre-ln"', "margin = 0.1"), "equivalence"),
        (TWO + endpoint("equivalence", '"pre-ln", "post-ln"'), "margin"),
        (TWO + endpoint("stress", ""), "stress"),
    ],
)
def test_a_wrong_plan_is_a_sentence(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        plan_of(tmp_path, text)


def test_seeds_of_ones_own_and_any_rates_without_fresh_seeds(tmp_path):
    text = TWO.replace("1e-3, 2e-3, 4e-3", "1e-3, 5e-3, 6e-3") + "fresh = false\nextend = 0\ntuning_seeds = [1337, 7]"
    part = plan_of(tmp_path, text).groups[0].part
    assert (part.rates, part.tuned_with, part.compared_with) == ([1e-3, 5e-3, 6e-3], [1337, 7], 2)
    assert plan_of(tmp_path, TWO + "tuning_seeds = 2").groups[0].part.tuned_with == range(1, 3)


def test_an_error_of_a_study_names_the_key_and_the_file(tmp_path, capsys):
    plan = tmp_path / "plan.toml"
    plan.write_text(f'title = "A trial"\n[train]\nsteps = 0\n{TWO}')
    assert main(["study", str(plan), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "train.steps" in error
    assert "--steps" not in error
    # a file that can be opened, and not read
    assert main(["study", "/proc/self/mem", "--out", str(tmp_path / "out")]) == 2
    assert "/proc/self/mem" in capsys.readouterr().err
