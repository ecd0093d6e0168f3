"""The answers in sentences: who wins, what is significant, who failed, and what cannot be said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from spheret.lab.answers import GroupAnswer
from spheret.lab.entries import Entry
from spheret.lab.rows import FINISHED
from spheret.lab.seed_table import Pair

# names in one sentence; the tables name all
MOST_NAMES = 8
SHORT = {"tuning": "not tuned yet", "waiting": "not run"}
ONE_SEED = "no winner from one seed, because a second one would change every loss by an unknown amount"


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
        counts = Counter[str](row.state for row in answer.rows)
        states = ", ".join(f"{counts[each]} {each}" for each in (FINISHED, "collapsed", "diverged"))
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
    best = standing.leaders[0]
    if standing.winner:
        gap = answer.gap(best, standing.behind[0])
        assert gap is not None
        words = (
            f"{losses[best]} wins, {-gap.estimate:.3f} below the next, {standing.behind[0]} ({p_words(gap.adjusted)})"
        )
        others = [label for label in standing.behind[1:] if label == answer.reference]
    else:
        gaps = [gap.adjusted for label in standing.leaders[1:] if (gap := answer.gap(best, label)) is not None]
        names = listed([losses[label] for label in standing.leaders])
        words = f"no winner: no significant difference between {names} ({p_words(min(gaps))} or more)"
        others = [label for label in standing.behind if label == answer.reference] or list(standing.behind[:1])
    for label in others:
        gap = answer.gap(best, label)
        assert gap is not None
        words += f"; {label} is {-gap.estimate:.3f} behind {best} ({p_words(gap.adjusted)})"
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
    part, losses = answer.group.part, sorted(entry.mean for entry in answer.entries if math.isfinite(entry.mean))
    if not losses and not answer.missing:
        return f"{opening}: no winner, because no contestant finished with a loss."
    if len(answer.entries) == 1:
        loss = f" Its loss is {losses[0]:.3f}." if losses else ""
        return f"{opening}: nothing to compare, because {answer.entries[0].label} is the only contestant.{loss}"
    if part.compared_with == 1 and losses:
        span = f"The losses lie between {losses[0]:.3f} and {losses[-1]:.3f}"
        return f"{opening}, {_rates_in_words(answer)}: {ONE_SEED}. {span}."
    if not part.fresh and not answer.missing:
        return f"{opening}: no winner, because fewer than two contestants can be compared. {_not_compared(answer)}"
    tuned = sum(entry.state == "tuned" for entry in answer.entries)
    return f"{opening}: no winner yet. {tuned} of {len(answer.entries)} are tuned, and fewer than two have two seeds."


def failed_sentence(answer: GroupAnswer) -> str:
    """Who collapsed or diverged and at which rates; empty if nobody did."""
    texts = []
    for state, by_label in answer.failures.items():
        names = [f"{label} at {listed([f'{rate:g}' for rate in rates])}" for label, rates in by_label.items()]
        others = f" and {_others(len(names) - MOST_NAMES)}" if len(names) > MOST_NAMES else ""
        texts.append(f"{state.capitalize()}: {'; '.join(names[:MOST_NAMES])}{others}")
    return ". ".join(texts) + "." if texts else ""


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


def verdict_words(gap: Pair, first: str, second: str) -> str:
    if not gap.significant:
        return "no significant difference"
    return f"{first if gap.estimate < 0 else second} is better"
