"""The answers in sentences: who wins, what is significant, who failed, and what cannot be said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from spheret.lab.answers import GroupAnswer
from spheret.lab.curves import Bowl
from spheret.lab.endpoints import EndpointAnswer, PairedComparison
from spheret.lab.entries import Entry
from spheret.lab.rows import FINAL, FINISHED, TUNE
from spheret.lab.seed_table import Pair
from spheret.lab.stages import stage_of

# names in one sentence; the tables name all
MOST_NAMES = 8
SHORT = {"tuning": "still tuning", "waiting": "not run"}
ONE_SEED = "no winner from one seed, because another one would change every loss by an unknown amount"


def listed(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Names in one sentence. What is too many is counted."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {_others(len(names) - most)}"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def p_words(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def place(answer: GroupAnswer) -> str:
    """The size of a group in words."""
    setting = answer.group.setting
    layers = answer.group.value("layers")
    words = [f"{layers} layer{'s' * (layers != 1)}"]
    for name, value in setting.items():
        if name != "layers":
            words.append(f"{value} {name}" if name == "steps" else f"{name} {value}")
    return f"At {', '.join(words)}"


def answer_sentence(answer: GroupAnswer) -> str:
    """The verdict of a group, at any moment: who wins, or that nobody does, and who failed at which rates."""
    part, opening = answer.group.part, place(answer)
    if not answer.rows:
        return f"{opening}: not run."
    if not part.compared_with:
        counts = Counter(row.outcome for row in answer.rows)
        outcomes = ("finished", "finished (stalled)", "collapsed", "diverged")
        states = ", ".join(f"{counts[each]} {each}" for each in outcomes if counts[each] or "stalled" not in each)
        return f"{opening}: of {len(answer.rows)} runs, {states}. The plan asks for no fresh seeds here."
    sentences = [_verdict(answer, opening), failed_sentence(answer), _step_downs(answer), ngram_sentence(answer)]
    return " ".join(filter(None, sentences))


def ngram_sentence(answer: GroupAnswer) -> str:
    """Between which n-gram models the losses stand; empty if there are none."""
    losses = sorted(entry.mean for entry in answer.entries if math.isfinite(entry.mean))
    if not losses or not answer.ngrams:
        return ""
    scale = sorted((loss, f"a {name} model ({loss:.3f})") for name, loss in answer.ngrams.items())
    below = [name for loss, name in scale if loss < losses[0]][-1:]
    above = [name for loss, name in scale if loss > losses[-1]][:1]
    sides = [*(f"above {name}" for name in below), *(f"below {name}" for name in above)]
    where = " and ".join(sides) or f"on both sides of {scale[0][1]}"
    return f"The losses lie {where}; these count the tokens that the models saw."


def _verdict(answer: GroupAnswer, opening: str) -> str:
    standing, table = answer.standing, answer.seed_table
    if standing is None or table is None:
        return _no_verdict(answer, opening)
    noisy = dict.fromkeys(table.noisy, ", noisy")
    losses = {label: f"{label} ({mean:.3f}{noisy.get(label, '')})" for label, mean in table.means.items()}
    opening = f"{opening}, {len(table.seeds)} seeds, {_rates_in_words(answer)}"
    best, alone = standing.leaders[0], answer.dominant
    if standing.winner:
        gap = answer.gap(best, standing.behind[0])
        assert gap is not None
        words = (
            f"{losses[best]} wins, {-gap.estimate:.3f} below the next, {standing.behind[0]} ({p_words(gap.adjusted)})"
        )
        others = [label for label in standing.behind[1:] if label == answer.reference]
    else:
        words = f"no winner. {listed([losses[label] for label in standing.leaders])} are within noise"
        others = [label for label in standing.behind if label == answer.reference] or list(standing.behind[:1])
    for label in others:
        gap = answer.gap(best, label)
        assert gap is not None
        words += f"; {label} is {-gap.estimate:.3f} behind {best} ({p_words(gap.adjusted)})"
    if alone is not None and alone[0] == best:
        words += f"; {alone[1]:.0%} of the pooled noise is that of {best}"
    behind = [f"{e.label} ({min(e.search.losses.values()):.3f})" for e in answer.others if e.behind]
    if behind:
        words += f"; clearly behind, so not trained with more seeds: {listed(behind)}"
    lower = [
        f"{each.label} ({each.mean:.3f}; {each.reason})"
        for each in answer.others
        if each.mean < table.means[best] and not each.behind
    ]
    if lower:
        words += f"; lower, but not compared: {listed(lower)}"
    return f"{opening}: {words}."


def _rates_in_words(answer: GroupAnswer) -> str:
    tuned = any(len(entry.search.losses) > 1 for entry in answer.entries)
    if tuned or answer.group.part.rates_of:
        return "each at its own best learning rate"
    return "at the learning rate that was given"


def _no_verdict(answer: GroupAnswer, opening: str) -> str:
    """Why there is no verdict, and what there is instead."""
    losses = sorted(entry.mean for entry in answer.entries if math.isfinite(entry.mean))
    if not losses and not any(answer.missing.values()):
        return f"{opening}: no winner, because no contestant finished with a loss."
    if len(answer.entries) == 1:
        loss = f" Its loss is {losses[0]:.3f}." if losses else ""
        return f"{opening}: nothing to compare, because {answer.entries[0].label} is the only contestant.{loss}"
    if answer.group.part.compared_with == 1 and losses:
        span = f"The losses lie between {losses[0]:.3f} and {losses[-1]:.3f}" if len(losses) > 1 else ""
        return f"{opening}, {_rates_in_words(answer)}: {ONE_SEED}. {span or f'One has a loss, {losses[0]:.3f}'}."
    if not answer.group.part.fresh and not any(answer.missing.values()):
        return f"{opening}: no winner, because fewer than two contestants can be compared. {_not_compared(answer)}"
    tuned = sum(entry.state == "tuned" for entry in answer.entries)
    return (
        f"{opening}: no winner yet. {tuned} of {len(answer.entries)} contestants are tuned, and fewer than two of "
        "them have the two or more seeds that a comparison needs."
    )


def failed_sentence(answer: GroupAnswer) -> str:
    """Who collapsed or diverged and at which rates, and which compared contestants stalled; empty if nobody did."""
    texts = []
    for state, by_label in answer.failures.items():
        names = [f"{label} at {listed([f'{rate:g}' for rate in rates])}" for label, rates in by_label.items()]
        texts.append(f"{state.capitalize()}: {'; '.join(names[:MOST_NAMES])}" + _and_others(len(names)))
    stalled = [f"{entry.label} {entry.stalled}" for entry in answer.compared if entry.stalled]
    texts += ["; ".join(stalled)] if stalled else []
    return ". ".join(texts) + "." if texts else ""


def _and_others(count: int) -> str:
    return f" and {_others(count - MOST_NAMES)}" if count > MOST_NAMES else ""


def _others(count: int) -> str:
    return f"{count} other{'s' * (count > 1)}"


def _step_downs(answer: GroupAnswer) -> str:
    """Who had to take a lower rate than its best one, and why; empty if nobody had to."""
    names = [entry.label for entry in answer.entries if entry.step_down]
    return f"With some seeds {listed(names)} failed at the best rate: a lower one counts there." if names else ""


def limits(answer: GroupAnswer) -> list[str]:
    """What a reader must know before the numbers of a group, and what cannot be said."""
    texts, table = [], answer.seed_table
    if table is not None and answer.seen is not None:
        texts.append(
            f"A true difference of {answer.seen:.3f} between two contestants would have been seen with a probability "
            f"of 80% or more. Smaller ones may exist where no difference is named."
        )
        if len(table.seeds) < answer.group.part.compared_with:
            texts.append(
                f"The fresh seeds are not all done: the comparison is on the {len(table.seeds)} of "
                f"{answer.group.part.compared_with} seeds that all compared contestants have."
            )
        if table.noisy:
            noise = [f"{label} ({table.deviations[label]:.3f})" for label in table.noisy]
            texts.append(
                f"Noisier than chance explains: {listed(noise)}; the others have {table.deviation:.3f} per run. "
                f"Their pairs are compared by their own noise, which takes more seeds, and the others without them."
            )
        texts.append(_dominated(answer))
    texts.append(_failed_seeds(answer))
    # without fresh seeds the verdict says it, if nobody is compared
    if answer.group.part.fresh or table is not None:
        texts.append(_not_compared(answer))
    return [text for text in texts if text]


def short_reason(answer: GroupAnswer, entry: Entry) -> str:
    """Why a contestant is not compared, in a few words; empty if it is."""
    fresh = answer.group.part.fresh
    # the tables say how far the tuning is, and which rates were tried
    return (SHORT if fresh else {"edge": "its best rate is at an edge of those tried"}).get(entry.state, entry.reason)


def _not_compared(answer: GroupAnswer) -> str:
    if not answer.group.part.compared_with or not answer.others:
        return ""
    by_reason: dict[str, list[str]] = {}
    for entry in (each for each in answer.others if not each.behind):
        by_reason.setdefault(short_reason(answer, entry), []).append(entry.label)
    words = [f"{listed(labels)} ({reason})" for reason, labels in by_reason.items()]
    return f"Not compared: {'; '.join(words)}." if words else ""


def _dominated(answer: GroupAnswer) -> str:
    """Which p-values rest on noise that is mostly one contestant's; empty if none do."""
    found = answer.dominant
    if found is None:
        return ""
    label, share = found
    other = answer.reference if answer.reference != label else answer.compared[0].label
    if other == label:
        other = answer.compared[1].label
    return (
        f"{share:.0%} of the pooled noise is that of {label}. If it is noisier than the others, its p-values are too "
        f"small. By paired tests, which pool nothing, its corrected p against {other} is "
        f"{answer.paired_p(label, other):.2g}."
    )


def _failed_seeds(answer: GroupAnswer) -> str:
    """The failures of a group, counted by seed; empty with fewer than two."""
    if not answer.group.part.compared_with:
        return ""
    rows = [row for row in answer.rows if stage_of(row.key, answer.group.part.fresh) in (TUNE, FINAL)]
    failed = [row for row in rows if row.state != FINISHED]
    seeds = sorted({row.seed for row in failed})
    if len(failed) < 2:
        return ""
    return (
        f"The {len(failed)} runs that collapsed or diverged are those of {len(seeds)} of "
        f"{len({row.seed for row in rows})} seeds ({listed([str(seed) for seed in seeds])}). Runs of one seed have "
        "the same batches and nearly the same start: they are not independent events."
    )


def verdict_words(gap: Pair, first: str, second: str) -> str:
    if not gap.significant:
        return "no significant difference"
    return f"{first if gap.estimate < 0 else second} is better"


def width_words(bowl: Bowl) -> str:
    """The width of a bowl as a factor between learning rates."""
    return f"{bowl.factor:.2f}" if bowl.factor is not None else f"{bowl.at_least:.2f} or more"


def endpoint_sentence(answer: EndpointAnswer) -> str:
    """The answer of an endpoint, as far as it is known."""
    if answer.endpoint.kind == "stress":
        return _stress_sentence(answer)
    if answer.endpoint.kind == "equivalence":
        counts = Counter(each.verdict for each in answer.comparisons)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return (
            f"{listed(answer.endpoint.contestants)}, within {answer.endpoint.margin:g} of each other: of "
            f"{len(answer.comparisons)} pairs and sizes, {verdicts}."
        )
    first, second = answer.endpoint.contestants
    words = [_gap_words(each) for each in answer.comparisons]
    return f"{first} against {second}: {'; '.join(words)}{_slope_words(answer.slope)}."


def _gap_words(each: PairedComparison) -> str:
    if each.verdict in ("not run", "failed") or each.interval is None:
        return f"{each.where}: {_without_verdict(each)}"
    if each.verdict == "no significant difference":
        return f"{each.where}: no significant difference ({each.interval.estimate:+.3f})"
    side = "below" if each.verdict == "lower" else "above"
    return f"{each.where}: {abs(each.interval.estimate):.3f} {side}"


def _slope_words(slope: PairedComparison | None) -> str:
    if slope is None:
        return ""
    if slope.verdict in ("not run", "failed") or slope.interval is None:
        return f"; {slope.where}: {_without_verdict(slope)}"
    change = f"{slope.interval.estimate:+.3f} {slope.where}"
    if slope.verdict == "no significant difference":
        return f"; no significant change with size ({change})"
    return f"; the difference changes by {change} ({p_words(slope.p or 0.0)})"


def _without_verdict(each: PairedComparison) -> str:
    return f"no mean, {each.trouble}" if each.verdict == "failed" else f"not run ({each.trouble})"


def _stress_sentence(answer: EndpointAnswer) -> str:
    begun = [each for each in answer.stresses if each.runs]
    opening = f"At {answer.factor:g} times the best rate"
    if not begun:
        return f"{opening}: not run."
    by_rung: dict[str, list[str]] = {}
    for each in begun:
        some = "" if len(each.runs) == each.planned else f", {each.planned} planned"
        words = f"{each.label} in {len(each.failed)} of {len(each.runs)} seeds{some}"
        by_rung.setdefault(each.where, []).append(words)
    rungs = [f"{where}: {listed(names)}" for where, names in by_rung.items()]
    return f"{opening}, collapsed or diverged: {'; '.join(rungs)}."
