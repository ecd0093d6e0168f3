"""The table of claims on docs/results/README.md: the paper's and ours, each judged by the committed rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from inside import PRE, PROJ, InsideRow, Measured, deep_removal, deep_share, massive, mean_sink, paired
from scipy import stats

from spheret.lab.answers import GroupAnswer
from spheret.lab.endpoints import ALPHA, PairedComparison, comparison
from spheret.lab.rows import sound

# the answers of a study by the name of the group
Studies = Mapping[str, Mapping[str, GroupAnswer]]

POST, NORMED = "post-ln", "normed-spheretnorm"
TIED = ", head=tied, head_bias=none"
CONSTANT, HARMONIC = "proj-spheretnorm (schedule=constant)", "proj-spheretnorm (schedule=harmonic)"
THREE = ("p-spheretnorm", PROJ, "cay-spheretnorm")
UNCAPPED = ("p-spheretnorm", PROJ, "cay-spheretnorm (max_angle=none)")
EXPONENTIAL, EXPONENTIAL_UNCAPPED = "geonorm (schedule=sqrt)", "geonorm (schedule=sqrt, max_angle=none)"

DEPTH_12, DEPTH_24, DEPTH_36 = ("depth", "depth"), ("depth", "depth-layers24"), ("depth", "depth-layers36")
DEPTHS = (DEPTH_12, DEPTH_24, DEPTH_36)
SHORT, MIDDLE, LONG = (
    ("length", "length"),
    ("length", "length-steps1200-warmup60"),
    ("length", "length-steps4800-warmup240"),
)
DEEP, DEEP_LONG = ("length-deep", "deep"), ("length-deep", "deep-steps4800-warmup240")
FAMILY = ("family", "family")

PAPER, OURS = "the paper", "ours"


@dataclass(frozen=True)
class Claim:
    """One claim that the first of two contestants has the lower loss, or that all of several are alike.

    asked: sets of groups. A set counts once all of its groups have all their seeds.
    margin: by how much they may differ at most, if the claim is that they are alike.
    """

    words: str
    who: str
    contestants: tuple[str, ...]
    asked: tuple[tuple[tuple[str, str], ...], ...]
    margin: float | None = None


CLAIMS = (
    Claim(
        "SpheretNorm has a lower loss than Pre-LN at 24 and 36 layers.",
        PAPER, (PROJ, PRE), ((DEPTH_24, DEPTH_36), (DEEP,), (DEEP_LONG,)),
    ),
    Claim("At 12 layers Pre-LN has the lower loss.", PAPER, (PRE, PROJ), ((DEPTH_12,), (MIDDLE,), (LONG,))),
    Claim("SpheretNorm has a lower loss than KEEL.", PAPER, (PROJ, "keel"), (DEPTHS,)),
    Claim("SpheretNorm has a lower loss than Peri-LN at 24 and 36 layers.", PAPER, (PROJ, "peri-ln"), (DEPTHS[1:],)),
    Claim("Peri-LN is the strongest baseline at 24 and 36 layers.", PAPER, ("peri-ln", PRE), (DEPTHS[1:],)),
    Claim("SpheretNorm has a lower loss than GeoNorm as published.", PAPER, (PROJ, "geonorm"), (DEPTHS, (FAMILY,))),
    Claim(
        "A finite p has a lower loss than the exponential map, everything else equal.",
        PAPER, (PROJ, EXPONENTIAL), ((FAMILY,),),
    ),
    Claim("p = 0.5, 1 and 2 are within 0.04 of one another.", PAPER, THREE, (DEPTHS,), 0.04),
    Claim("The same without a cap on the angle.", PAPER, UNCAPPED, ((FAMILY,),), 0.04),
    Claim(
        "Steps that shrink as 1/sqrt(l) are better than constant ones.",
        PAPER, (PROJ, CONSTANT), (DEPTHS, (FAMILY,)),
    ),
    Claim("They are better than steps that shrink as 1/l.", PAPER, (PROJ, HARMONIC), ((FAMILY,),)),
    Claim(
        "Cayley needs the cap of pi/4 on the angle.",
        PAPER, ("cay-spheretnorm", "cay-spheretnorm (max_angle=none)"), ((FAMILY,),),
    ),
    Claim("So does the exponential map.", PAPER, (EXPONENTIAL, EXPONENTIAL_UNCAPPED), ((FAMILY,),)),
    Claim(
        "A ScaleNorm where the stream enters lowers the loss.",
        PAPER, (PROJ, "proj-spheretnorm (entry_norm=false)"), ((FAMILY,),),
    ),
    Claim("The projection is ahead of Pre-LN after 300 updates.", OURS, (PROJ, PRE), (DEPTHS, (SHORT,))),
    Claim("It is still ahead after 1,200 updates.", OURS, (PROJ, PRE), ((MIDDLE,), (DEEP,))),
    Claim("It is still ahead after 4,800 updates.", OURS, (PROJ, PRE), ((LONG,), (DEEP_LONG,))),
    Claim("The normed branch is ahead of Pre-LN after 4,800 updates.", OURS, (NORMED, PRE), ((LONG,), (DEEP_LONG,))),
    Claim(
        "So it is with a tied head and no bias, which both then have.", OURS, (NORMED + TIED, PRE + TIED), ((LONG,),)
    ),
    Claim("The projection is ahead of Post-LN.", OURS, (PROJ, POST), (DEPTHS, (SHORT,), (MIDDLE,), (LONG,))),
    Claim(
        "On a Llama-like backbone it is ahead of Pre-LN with AdamW.",
        OURS, (PROJ, PRE), ((("modern", "adamw-shifted"),),),
    ),
    Claim("And with Muon.", OURS, (PROJ, PRE), ((("modern", "muon-shifted"),),)),
    Claim(
        "Four streams on one sphere have a lower loss than one stream.",
        OURS, ("spherical-hyper", PROJ), ((("streams", "streams"), ("streams", "streams-layers36")),),
    ),
    Claim(
        "mHC has a lower loss than Pre-LN.",
        "its authors", ("mhc", PRE), ((("streams", "streams"), ("streams", "streams-layers36")),),
    ),
)  # fmt: skip

# what the paper says of trained models: each measure, and whether it is said to be higher in the projection
INSIDE_CLAIMS: dict[str, dict[str, tuple[Measured, bool]]] = {
    "SpheretNorm has fewer spikes in training.": {"spikes in a run": (lambda row: row.spikes, False)},
    "Deep layers are used more.": {
        "loss rise without a sublayer of the deeper half": (deep_removal, True),
        "the share of the deeper half in all such rises": (deep_share, True),
    },
    "There are fewer attention sinks.": {"mean attention to the first token": (mean_sink, False)},
    "There are fewer massive activations.": {
        "log10(largest / median activation) in the deeper half": (massive, False)
    },
}


def judged(claim: Claim, studies: Studies) -> tuple[str, str]:
    """The verdict on a claim, and its numbers."""
    verdicts: set[str] = set()
    numbers = []
    for groups in claim.asked:
        every = [
            _compared(studies[study][group], *pair, claim.margin)
            for pair in combinations(claim.contestants, 2)
            for study, group in groups
            if study in studies and group in studies[study]
        ]
        if every and all(each.verdict != "not run" for each in every):
            verdicts |= {"outside" if _outside(each) else each.verdict for each in every}
            pairs = len(claim.contestants) > 2
            numbers += [f"{f'{each.first} - {each.second}, ' if pairs else ''}{number(each)}" for each in every]
    return _verdict(verdicts), "; ".join(numbers) or "-"


def _compared(answer: GroupAnswer, first: str, second: str, margin: float | None) -> PairedComparison:
    return comparison(answer, first, second, where(answer), margin)


def where(answer: GroupAnswer) -> str:
    """The size and the length of a group, in words."""
    return f"{answer.group.value('layers')} layers, {answer.group.value('steps'):,} updates"


def _verdict(found: set[str]) -> str:
    if not found:
        return "not run"
    if found & {"higher", "outside"}:
        return "does not hold"
    return "holds" if found <= {"lower", "equivalent"} else "not decided"


def _outside(each: PairedComparison) -> bool:
    """Whether the interval of a comparison with a margin lies beyond it."""
    if each.margin is None or each.interval is None or each.verdict != "not shown":
        return False
    return each.interval.low > each.margin or each.interval.high < -each.margin


def number(each: PairedComparison) -> str:
    """The difference of a comparison with its interval and its seeds, or why there is none."""
    if each.interval is None or each.trouble:
        return f"{each.where}: {each.trouble or each.verdict}"
    low, high = each.interval.low, each.interval.high
    return f"{each.where}: {each.interval.estimate:+.3f} ({low:+.3f} to {high:+.3f}, {each.seeds} seeds)"


def _order(studies: Studies) -> tuple[str, str]:
    """Whether Pre-LN is first at 12 layers and the projection at 24 and 36, as in the paper."""
    every = [_compared(studies[study][group], PROJ, PRE, None) for study, group in DEPTHS]
    found = [each.verdict for each in every]
    numbers = "; ".join(number(each) for each in every)
    if "not run" in found:
        return "not run", "-"
    if found == ["higher", "lower", "lower"]:
        return "holds", numbers
    decided = {"higher", "lower"}
    return ("does not hold" if decided >= set(found) else "not decided"), numbers


def _keel(studies: Studies) -> tuple[str, str]:
    """Whether every other contestant that was run is below KEEL."""
    rivals = (PRE, POST)
    every = [_compared(studies[study][group], rival, "keel", None) for rival in rivals for study, group in DEPTHS]
    if any(each.verdict == "not run" for each in every):
        return "not run", "-"
    numbers = "; ".join(f"{each.first} - keel, {number(each)}" for each in every)
    # two of the paper's six other baselines cannot show that it is among the weakest, only that it is not below them
    higher = {rival for rival in rivals for each in every if each.first == rival and each.verdict == "higher"}
    words = f"{numbers}; Peri-LN, Pre-DyT and GeoNorm were not run to the end"
    return ("does not hold" if higher >= set(rivals) else "not decided"), words


def _failures(studies: Studies, labels: Sequence[str], groups: Iterable[tuple[str, str]]) -> list[tuple[int, int]]:
    """How many of the runs of each failed, at the rates that all of them had, and how many there were."""
    rows = {
        label: [row for study, group in groups for row in studies[study][group].by_label[label].rows]
        for label in labels
    }
    shared = set.intersection(*({(row.group, row.rate, row.seed) for row in found} for found in rows.values()))
    kept = {
        label: [row for row in found if (row.group, row.rate, row.seed) in shared] for label, found in rows.items()
    }
    return [(sum(not sound(row) for row in found), len(found)) for found in kept.values()]


def _less_stable(studies: Studies, label: str, other: str) -> tuple[str, str]:
    """Whether a contestant fails more often than the other, at the rates and seeds that both have."""
    (failed, runs), (less, others) = _failures(studies, (label, other), DEPTHS)
    counts = f"{label} {failed} of {runs}, {other} {less} of {others}"
    words = f"failed at the same rates and seeds, 12 to 36 layers, 300 updates: {counts}"
    if stats.fisher_exact([[failed, runs - failed], [less, others - less]]).pvalue >= ALPHA:
        return "not decided", words
    return ("holds" if failed > less else "does not hold"), words


def inside_claim(rows: Sequence[InsideRow], measures: Mapping[str, tuple[Measured, bool]]) -> tuple[str, str]:
    """Whether all measures of trained models lie on the side that the claim says, the projection minus Pre-LN."""
    verdicts, numbers = set[str](), []
    for name, (measured, higher) in measures.items():
        for each in paired(rows, measured):
            mirrored = {"lower": "higher", "higher": "lower"} if higher else {}
            verdicts.add(mirrored.get(each.verdict, each.verdict))
            numbers.append(f"{name}, {number(each)}")
    return _verdict(verdicts), "; ".join(numbers) or "-"


def claims_table(studies: Studies, collapse: Mapping[str, tuple[int, int]], rows: Sequence[InsideRow]) -> str:
    """Every claim, who makes it, whether it holds here, and by which numbers.

    collapse: how many runs collapsed of how many, for "normed" and "plain", at the same cells of the map.
    rows: what is inside trained models.
    """
    lines = ["| claim | whose | here | by which numbers | plan |", "|---|---|---|---|---|"]

    def add(words: str, who: str, verdict: str, numbers: str, plans: str) -> None:
        lines.append(f"| {words} | {who} | **{verdict}** | {numbers} | {plans} |")

    for claim in CLAIMS:
        plans = ", ".join(dict.fromkeys(study for groups in claim.asked for study, _ in groups))
        add(claim.words, claim.who, *judged(claim, studies), plans)
        if claim.words.startswith("At 12 layers"):
            add("The order of the two changes between 12 and 24 layers.", PAPER, *_order(studies), "depth")
        if claim.words.endswith("lower loss than KEEL."):
            add("KEEL is among the weakest.", PAPER, *_keel(studies), "depth")
    add("Post-LN is less stable than Pre-LN.", PAPER, *_less_stable(studies, POST, PRE), "depth")
    add("Pre-LN is less stable than SpheretNorm.", PAPER, *_less_stable(studies, PRE, PROJ), "depth")
    add("KEEL is less stable than SpheretNorm.", PAPER, *_less_stable(studies, "keel", PROJ), "depth")
    for words, measures in INSIDE_CLAIMS.items():
        add(words, PAPER, *inside_claim(rows, measures), "length, length-deep")
    zero_shot = "SpheretNorm has the best zero-shot scores, and is ahead of GeoNorm in all twelve."
    add(zero_shot, PAPER, "not testable here", "these models are far too small for the tasks", "-")
    (normed, runs), (plain, others) = collapse["normed"], collapse["plain"]
    add(
        "The normed branch trains where the plain projection collapses.", OURS,
        "holds" if stats.fisher_exact([[normed, runs - normed], [plain, others - plain]]).pvalue < ALPHA
        and normed * others < plain * runs else "not decided",
        f"6 layers, 100 updates: collapsed {normed} of {runs} runs with `branch_norm`, {plain} of {others} without",
        "collapse",
    )  # fmt: skip
    return "\n".join(lines) + "\n"
