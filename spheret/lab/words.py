"""The answers of a study in sentences: who has the lowest loss, what is significant, and what cannot be said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from spheret.lab.answers import Gap, GroupAnswer, failures, setting_of
from spheret.lab.curves import Bowl, ComputeGain
from spheret.lab.rows import FINAL, FINISHED, TUNE
from spheret.lab.stages import stage_of

# names in one sentence; the tables name all
MOST_NAMES = 8
SHORT = {"tuning": "still tuning", "waiting": "not run"}
ONE_SEED = "One seed: another one would change every number by an unknown amount, so that there is no verdict"


def listed(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Names in one sentence. What is too many is counted."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} others"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def p_words(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def place(answer: GroupAnswer) -> str:
    """The size of a group in words."""
    setting = answer.group.setting
    layers = setting_of(answer.group, "layers")
    words = [f"{layers} layer{'s' * (layers != 1)}"]
    for name, value in setting.items():
        if name != "layers":
            words.append(f"{value} {name}" if name == "steps" else f"{name} {value}")
    return f"At {', '.join(words)}"


def answer_sentence(answer: GroupAnswer) -> str:
    """The answer of a group in one sentence, at any moment of a study."""
    part, opening = answer.group.part, place(answer)
    if not answer.rows:
        return f"{opening}: not run."
    if not part.seeds:
        counts = Counter(row.outcome for row in answer.rows)
        outcomes = ("finished", "finished (stalled)", "collapsed", "diverged")
        states = ", ".join(f"{counts[each]} {each}" for each in outcomes if counts[each] or "stalled" not in each)
        return f"{opening}: of {len(answer.rows)} runs, {states}. The plan asks for no fresh seeds here."
    if answer.layout is None:
        return _no_layout(answer, opening)
    best = answer.compared[0].label
    seeds = len(answer.layout.seeds)
    parts = [
        f"{opening}, {seeds} seeds, each at its own best learning rate: {best} has the lowest loss, "
        f"{answer.layout.means[best]:.3f}{_below_reference(answer, best)}"
    ]
    gaps = {entry.label: answer.gap(best, entry.label) for entry in answer.compared[1:]}
    near = [label for label, gap in gaps.items() if gap and not gap.significant and label != answer.reference]
    if near:
        parts.append(f"no significant difference to {listed(near)}")
    elif all(gap is not None and gap.significant for gap in gaps.values()) and len(gaps) > 1:
        parts.append(f"the difference to all {len(gaps)} others that are compared is significant")
    return "; ".join([*parts, *_failed(answer)]) + "." + _step_downs(answer)


def _failed(answer: GroupAnswer) -> list[str]:
    """Who failed with which seeds at the rate that counts, and who stalled there."""
    failed = [f"{entry.label} {entry.failure}" for entry in answer.others if entry.failed]
    stalled = [f"{entry.label} {entry.stalled}" for entry in answer.compared if entry.stalled]
    return [*failed, *stalled]


def _step_downs(answer: GroupAnswer) -> str:
    """Who had to take a lower rate than its best one, and why; empty if nobody had to."""
    names = [entry.label for entry in answer.entries if entry.step_down]
    return f" With some seeds {listed(names)} failed at the best rate: a lower one counts there." if names else ""


def _below_reference(answer: GroupAnswer, best: str) -> str:
    """How far the best lies below the reference; or below the next one, if it is the reference."""
    other = answer.reference if answer.reference != best else answer.compared[1].label
    gap = answer.gap(best, other)
    if gap is None:
        return ""
    words = f", {-gap.estimate:.3f} below {other} ({p_words(gap.p)})"
    return words if gap.significant or other != answer.reference else f"{words}, which is not significant"


def _no_layout(answer: GroupAnswer, opening: str) -> str:
    sound = [entry for entry in answer.entries if entry.finals and not entry.failed]
    failed = _failed(answer)
    ending = f" {'; '.join(failed)}." if failed else ""
    if answer.group.part.seeds == 1 and len(sound) > 1:
        first = min(sound, key=lambda entry: entry.mean)
        return (
            f"{opening}, each at its own best learning rate: {first.label} has the lowest loss, {first.mean:.3f}. "
            f"{ONE_SEED}.{ending}"
        )
    tuned = sum(entry.state == "tuned" for entry in answer.entries)
    return (
        f"{opening}: no answer yet. {tuned} of {len(answer.entries)} contestants are tuned, and fewer than two of "
        f"them have the two or more fresh seeds that a comparison needs.{ending}"
    )


def floor_sentence(answer: GroupAnswer) -> str:
    """What chance alone does; empty if the plan asks for no noise floor here."""
    floor = answer.floor
    if floor is None:
        return ""
    if floor.interval is None:
        bad = failures([*answer.by_label[floor.label].finals.values(), *floor.rows])
        return f"Noise floor: {f'no number, {floor.label} {bad}' if bad else 'not run yet'}."
    interval = floor.interval
    bounds = "no interval from one seed"
    if math.isfinite(interval.high):
        bounds = f"95% interval {interval.low:+.3f} to {interval.high:+.3f}"
    return (
        f"Noise floor: {floor.label} on {len(floor.rows)} other seeds differs from itself by "
        f"{interval.estimate:+.3f} ({bounds}). The true difference is 0."
    )


def limits(answer: GroupAnswer) -> list[str]:
    """What a reader must know before the numbers of a group, and what cannot be said."""
    texts = [floor_sentence(answer)]
    layout = answer.layout
    if layout is not None and answer.seen is not None:
        texts.append(
            f"A true difference of {answer.seen:.3f} between two contestants would have been seen with a probability "
            f"of 80% or more. Smaller ones may exist where no difference is named."
        )
        if len(layout.seeds) < answer.group.part.seeds:
            texts.append(
                f"The fresh seeds are not all done: the comparison is on the {len(layout.seeds)} of "
                f"{answer.group.part.seeds} seeds that all compared contestants have."
            )
        if layout.noisy:
            noise = [f"{label} ({layout.deviations[label]:.3f})" for label in layout.noisy]
            texts.append(
                f"Noisier than chance explains: {listed(noise)}; the others have {layout.deviation:.3f} per run. "
                f"Their pairs are compared by their own noise, which takes more seeds, and the others without them."
            )
        texts.append(_dominated(answer))
    texts.append(_failed_seeds(answer))
    if answer.group.part.seeds:
        by_reason: dict[str, list[str]] = {}
        for entry in answer.others:
            # the table says how far the tuning is
            by_reason.setdefault(SHORT.get(entry.state, entry.reason), []).append(entry.label)
        if by_reason:
            words = [f"{listed(labels)} ({reason})" for reason, labels in by_reason.items()]
            texts.append(f"Not compared: {'; '.join(words)}.")
    return [text for text in texts if text]


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
    if not answer.group.part.seeds:
        return ""
    rows = [row for row in answer.rows if stage_of(row.key) in (TUNE, FINAL)]
    failed = [row for row in rows if row.state != FINISHED]
    seeds = sorted({row.seed for row in failed})
    if len(failed) < 2:
        return ""
    return (
        f"The {len(failed)} runs that collapsed or diverged are those of {len(seeds)} of "
        f"{len({row.seed for row in rows})} seeds ({listed([str(seed) for seed in seeds])}). Runs of one seed have "
        "the same batches and nearly the same start: they are not independent events."
    )


def verdict_words(gap: Gap, first: str, second: str) -> str:
    if not gap.significant:
        return "no significant difference"
    return f"{first if gap.estimate < 0 else second} is better"


def width_words(bowl: Bowl) -> str:
    """The width of a bowl as a factor between learning rates."""
    return f"{bowl.factor:.2f}" if bowl.factor is not None else f"{bowl.at_least:.2f} or more"


def gain_words(gain: ComputeGain | None) -> str:
    if gain is None:
        return "-"
    if gain.factor is not None:
        return f"{gain.factor:.2f}"
    return {"below": "better than all", "above": "worse than all", None: "no single one"}[gain.beyond]
