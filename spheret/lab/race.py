"""`spheret race`: every connection at its own learning rate on the same batches; then one page and one answer.

A race is a plan that the code of a study runs. At the size of RECIPE the studies know the rate of each contestant,
and its seeds decide. For other text and sizes three rates are tried around it, and fresh seeds decide.
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
from spheret.lab.plan import OWN, RECIPE, Plan, named_contestants, parse_plan, rounded
from spheret.lab.study import StudyOptions, run_plan
from spheret.runs.config import SECTIONS, Given, merge, read_config
from spheret.support import files
from spheret.support.ranges import check_above_zero, check_count, counts, whole_number
from spheret.train.recipes import known_rate, rates

FIRST_SEED, MOST_SEEDS = 1337, 10_000
# the paper's eight and Post-LN, the one with normed branches, and the projection with the paper's head
CONTESTANTS = "paper,normed-spheretnorm,proj-spheretnorm:head=tied"
# nats above the lowest loss: seeds differ by a tenth of it
BEHIND = 0.1
# rates to try around the known one, and how often that grows at an edge
FACTORS, EXTEND = (0.5, 1.0, 2.0), 2
# evaluations of a training, which take a fifth of its time if there are ten
EVALUATIONS = 4

ModelFlags = section_flags("model", RECIPE, without=("scheme",))
DataFlags = section_flags("data", RECIPE)
OptimisationFlags = section_flags("train", RECIPE, without=("seed", "lr"))
EvaluationFlags = section_flags("evaluation", RECIPE)


def learning_rates(text: str) -> list[float]:
    """The rates of the flag --lr, a list with commas, ascending."""
    try:
        found = sorted(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--lr must be numbers with commas, such as 2.5e-3,5e-3,1e-2, got {text[:60]!r}.") from None
    for rate in found:
        check_above_zero("each rate of --lr", rate)
    for rate, following in pairwise(found):
        if rate == following:
            raise ValueError(f"--lr has {rate} twice: give each rate once.")
    return found


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


def race_plan(path: Path, schemes: str, seeds: str, given_rates: Sequence[float] | None, shared: Given) -> Plan:
    """A race as a plan. path: where the plan will stand. given_rates: ascending; None for own ones."""
    shared = merge(RECIPE, shared)
    lines = ['title = "Deep connections compared"', 'reference = "pre-ln"']
    for section in SECTIONS:
        # TOML has no null: what is not given is the default
        values = {
            key: value for key, value in shared.get(section, {}).items() if key not in OWN and value is not None
        }
        lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    part = {"name": "race", "title": Path(shared["data"]["path"]).name, "contestants": [schemes]}
    part |= _rates_and_seeds(schemes, seeds, given_rates, shared)
    lines += ["", "[[parts]]", *(f"{key} = {_toml(value)}" for key, value in part.items()), ""]
    return parse_plan(path, "\n".join(lines).encode())


def _rates_and_seeds(schemes: str, seeds: str, given_rates: Sequence[float] | None, shared: Given) -> dict[str, Any]:
    """The keys of the part that say which learning rates and seeds a contestant gets."""
    with_these_seeds = {"fresh": False, "extend": 0, "tuning_seeds": race_seeds(seeds)}
    if given_rates is not None:
        return {"rates": given_rates, **with_these_seeds}
    labels = {each.label: each.given["model"]["scheme"] for each in named_contestants(schemes)}
    if labels.keys() <= rates().keys() and is_known_size(shared):
        return {"rates_of": {label: [rates()[label]] for label in labels}, "behind": BEHIND, **with_these_seeds}
    if "," in seeds:
        raise ValueError(
            f"--seeds {seeds[:60]} are for given rates; the seeds of a search are its own: give a number."
        )
    # an invalid width is refused with all other settings
    width = min(max(1, shared["model"]["width"]), 1 << 20)
    centres = {label: known_rate(label if label in rates() else scheme, width) for label, scheme in labels.items()}
    rates_of = {label: [rounded(factor * rate) for factor in FACTORS] for label, rate in centres.items()}
    return {"rates_of": rates_of, "extend": EXTEND, "seeds": len(race_seeds(seeds)), "behind": BEHIND}


def is_known_size(shared: Given) -> bool:
    """Whether data, model and training are those at which the studies found their rates."""
    sections = {name: dict(shared[name]) for name in ("model", "data", "train")}
    sections["train"].pop("checkpoint_every", None)
    return all(sections[name] == RECIPE[name] for name in sections)


def _toml(value: Any) -> str:
    """A setting as TOML spells it: as JSON does, but for infinity, as in clip = inf."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml(key)} = {_toml(each)}' for key, each in value.items())}}}"
    # TOML knows no pairs of surrogates
    return str(value) if value == math.inf else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class RaceOptions:
    """Who races, and where the race is written.

    Args:
        schemes: "paper" for its eight and Post-LN, "all", or names with commas; scheme:option=value races a variant,
            and scheme:head=tied or scheme:head_bias=none one with a different head.
        seeds: How many seeds; or, with a comma, the seeds: 3,4,9 (one seed: 7,). With one no pair can have a winner.
            Who is 0.1 behind with the first one, or in the search for its rate, gets no more.
        lr: Highest learning rates with commas. Every scheme is trained at each and reported at its best.
        out: The directory of the race: its plan, its runs, results.jsonl and report/.
        config: A TOML or JSON file of settings, by section; flags win over it.
    """

    schemes: str = CONTESTANTS
    seeds: Annotated[str, shown("INT|LIST", "3")] = "3"
    lr: Annotated[str | None, shown("LIST", "what the studies found; else three around it, and fresh seeds")] = None
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
    every = every or max(1, shared["train"]["steps"] // EVALUATIONS)
    shared = merge({"train": {"checkpoint_every": every}}, shared, {"evaluation": {"eval_every": every}})
    one = [shared["train"]["lr"]] if "lr" in shared["train"] else None
    given_rates = one if where.lr is None else learning_rates(where.lr)
    plan = race_plan(directory / PLAN, where.schemes, where.seeds, given_rates, shared)
    return run_plan(plan, directory / PLAN, StudyOptions(out=where.out), place, "race")
