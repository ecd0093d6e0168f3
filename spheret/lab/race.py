"""`spheret race`: every contestant on the same batches, at the same few learning rates; then one page and a verdict.

A race is a plan with fixed rates whose contestants are compared on the seeds of the search. The code of a study runs
it. `spheret study` tunes every rate and has fresh seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

# tyro reads annotations from the module
import tyro

from spheret.flags import given, section_flags, shown
from spheret.lab.laboratory import PLAN, Place
from spheret.lab.plan import OWN, RECIPE, Plan, parse_plan
from spheret.lab.study import StudyOptions, run_plan
from spheret.runs.config import SECTIONS, Given, merge, read_config
from spheret.support import files
from spheret.support.ranges import check_above_zero, check_count, counts, whole_number

FIRST_SEED, MOST_SEEDS = 1337, 10_000
RATES = (2.5e-3, 5e-3, 1e-2)
# the nine with the head of the recipe, and the projection with the paper's own
CONTESTANTS = "paper,proj-spheretnorm:head=tied"

ModelFlags = section_flags("model", RECIPE, without=("scheme",))
DataFlags = section_flags("data", RECIPE)
OptimisationFlags = section_flags("train", RECIPE, without=("seed", "lr"))
EvaluationFlags = section_flags("evaluation", RECIPE)


def learning_rates(text: str) -> list[float]:
    """The rates of the flag --lr, a list with commas, ascending."""
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--lr must be numbers with commas, such as 2.5e-3,5e-3,1e-2, got {text[:60]!r}.") from None
    for rate in rates:
        check_above_zero("each rate of --lr", rate)
    rates.sort()
    for rate, following in pairwise(rates):
        if rate == following:
            raise ValueError(f"--lr has {rate} twice: give each rate once.")
    return rates


def race_seeds(text: str) -> list[int]:
    """The seeds of the flag --seeds: a number is how many, and numbers with commas are the seeds themselves."""
    if "," not in text:
        return [FIRST_SEED + k for k in range(whole_number("--seeds", text.strip(), most=MOST_SEEDS))]
    # a comma at the end makes a list of one seed
    numbers = counts("--seeds", text.strip().removesuffix(","), least=0)
    check_count("the number of --seeds", len(numbers), most=MOST_SEEDS)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"--seeds {text[:60]} has a seed twice: give each once.")
    return numbers


def race_plan(path: Path, schemes: str, seeds: Sequence[int], rates: Sequence[float], shared: Given) -> Plan:
    """A race as a plan. path: where the plan will stand. rates: ascending."""
    shared = merge(RECIPE, shared)
    lines = ['title = "Deep connections compared"', 'reference = "pre-ln"']
    for section in SECTIONS:
        # TOML has no null: what is not given is the default
        values = {
            key: value for key, value in shared.get(section, {}).items() if key not in OWN and value is not None
        }
        lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    lines += [
        "",
        "[[parts]]",
        'name = "race"',
        f"title = {_toml(Path(shared['data']['path']).name)}",
        f"contestants = {_toml([schemes])}",
        f"rates = {_toml(rates)}",
        f"tuning_seeds = {_toml(seeds)}",
        "fresh = false",
        "extend = 0",
        "",
    ]
    return parse_plan(path, "\n".join(lines).encode())


def _toml(value: Any) -> str:
    """A setting as TOML spells it: as JSON does, but for infinity, as in clip = inf."""
    # TOML knows no pairs of surrogates
    return str(value) if value == math.inf else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class RaceOptions:
    """Who races, and where the race is written.

    Args:
        schemes: "paper" for its nine, "all", or names with commas; scheme:option=value races a variant, and
            scheme:head=tied or scheme:head_bias=none one with another head.
        seeds: How many seeds; or, with a comma, the seeds: 3,4,9 (one seed: 7,). With one no pair can have a winner.
        lr: Highest learning rates with commas. Every scheme is trained at each and reported at its best.
        out: The directory of the race: its plan, its runs, results.jsonl and report/.
        config: A TOML or JSON file of settings, by section; flags win over it.
    """

    schemes: str = CONTESTANTS
    seeds: Annotated[str, shown("INT|LIST", "1")] = "1"
    lr: Annotated[str | None, shown("LIST", ",".join(map(str, RATES)))] = None
    out: str = "runs/race"
    config: Annotated[Path | None, shown("PATH", "none")] = None


@tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.UseAppendAction)
def race(
    where: Annotated[RaceOptions, tyro.conf.FlagCreatePairsOff],
    place: Annotated[Place, tyro.conf.FlagCreatePairsOff],
    model: ModelFlags,  # type: ignore[valid-type]
    data: DataFlags,  # type: ignore[valid-type]
    optimisation: OptimisationFlags,  # type: ignore[valid-type]
    evaluation: EvaluationFlags,  # type: ignore[valid-type]
    set: tuple[str, ...] = (),
) -> int:
    """Train every scheme on the same batches, then say who wins. Run the same command again to continue.

    Args:
        set: Any other setting of docs/settings.md, as section.key=value.
    """
    place.check()
    directory = Path(where.out).expanduser()
    files.check_output_directory("--out", directory)
    shared = merge(
        RECIPE,
        {} if where.config is None else read_config(where.config),
        given(set, model=model, data=data, train=optimisation, evaluation=evaluation),
    )
    if "scheme_options" in shared["model"]:
        raise ValueError("an option of a scheme belongs to a contestant: give it as --schemes scheme:option=value.")
    every = shared["evaluation"].get("eval_every")
    if every is not None:
        check_count("--eval-every of a race", every)
        # what is validated is saved
        shared["train"].setdefault("checkpoint_every", every)
    rates = list(RATES) if "lr" not in shared["train"] else [shared["train"]["lr"]]
    rates = rates if where.lr is None else learning_rates(where.lr)
    plan = race_plan(directory / PLAN, where.schemes, race_seeds(where.seeds), rates, shared)
    return run_plan(plan, directory / PLAN, StudyOptions(out=where.out), place, "race")
