"""The judge of losses and sublayers: what is an alarm, what is not, and that its state is all that it remembers."""

import math

import msgspec
import pytest
import torch

from spheret.observe.judge import FEW, PATIENCE, Item, Judge, JudgeState, is_spike
from spheret.observe.plateau import PLATEAU_WINDOW, on_plateau
from spheret.observe.records import Observation, SublayerObservation

ENTROPY, VOCAB, WARMUP = 3.04, 320, 30
ITEMS = [Item(f"layer {number}", "layer", number) for number in range(1, 9)]


def judge_of(entropy=ENTROPY, steps=1000, losses=()):
    level = math.log(VOCAB) if entropy is None else entropy
    judge = Judge(ITEMS, entropy, (level, "level"), WARMUP, steps)
    for step, loss in enumerate(losses, start=1):
        judge.loss(step, loss)
    return judge


def reloaded(judge, entropy, steps):
    """The same judge after a checkpoint."""
    again = judge_of(entropy, steps)
    again.state = msgspec.json.decode(msgspec.json.encode(judge.state), type=JudgeState)
    assert again.state == judge.state
    return again


def seen(step=1, **measures):
    """What the sublayers show: a value for all of them, or a function of their numbers."""
    usual = {"norm": 9.0, "angle_mean": 0.1, "cosine": 0.1, "grad_norm": 1.0, **measures}
    return Observation(
        step,
        sublayers=[
            SublayerObservation(n, **{key: x(n) if callable(x) else x for key, x in usual.items()})
            for n in range(1, 9)
        ],
    )


def noisy(*pieces):
    """Losses from pieces of (updates, first, last), straight lines with noise."""
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.linspace(first, last, updates) for updates, first, last in pieces])
    return (values + 0.1 * torch.randn(len(values), generator=generator)).tolist()


def test_spikes_are_counted():
    judge = judge_of(losses=noisy((200, 3, 3)))
    assert judge.state.spikes == 0
    for step, value in enumerate((5.0, 3.0, 6.0), start=201):
        judge.loss(step, value)
    assert judge.state.spikes == 2


def test_the_plateau_is_a_median_near_the_entropy():
    assert not on_plateau([3.0] * (PLATEAU_WINDOW - 1), 3.0)
    assert on_plateau([3.0] * (PLATEAU_WINDOW - 2) + [9.0, 1.0], 3.0)
    found = [on_plateau([9.0] * 50 + [loss] * PLATEAU_WINDOW, 3.0) for loss in (3.089, 3.091, 2.911, 2.909)]
    assert found == [True, False, True, False]


# the distance between tokens, 1 - cosine, and the loss at a step; what is said first
PLATEAUS = {
    "one direction": (lambda step: 1e-9 * (1 + step * step % 7), lambda step: 3.02, ("collapsed", 50)),
    "leaving exponentially": (lambda step: 1e-8 * math.exp(step / 20), lambda step: 3.02, ("plateau", 50)),
    "apart": (lambda step: 0.04 * math.exp(-step / 200), lambda step: 3.02, ("plateau", 50)),
    "still falling": (lambda step: 1e-9, lambda step: 3.08 - step / 400, ("plateau", 50)),
    "far apart": (lambda step: 0.5, lambda step: 3.02, None),
    "no plateau": (lambda step: 1e-9, lambda step: 2.5, None),
}


@pytest.mark.parametrize("every", [1, 7, 10, 1000])
@pytest.mark.parametrize("name", PLATEAUS)
def test_a_collapse_is_told_from_a_plateau_whatever_the_looks(name, every):
    apart, loss, first = PLATEAUS[name]
    judge, events = judge_of(3.0), []
    for step in range(1, 101):
        judge.loss(step, loss(step))
        if step % every == 0 or judge.wants_a_look(step):
            events += judge.observed(seen(step, cosine=lambda n, step=step: 1 - apart(step) if n == 2 else 0.5))
        judge = reloaded(judge, 3.0, 1000)
    assert [(event.kind, event.step) for event in events][:1] == ([] if first is None else [first])
    if first == ("collapsed", 50):
        (event,) = events
        assert (event.sublayer, event.where, event.measured) == (2, "layer 2", "cosine")


SKEWED = {
    "a bad batch": ([2.0 + 0.1 * math.sin(7 * k) for k in range(64)], 3.2, True),
    "near zero": ([2.0] * 5 + [1e-4 * (1 + 50 * (k % 9 == 0)) for k in range(59)], 0.05, False),
    "heavy tails": ([math.tan(1.5 * math.sin(k)) ** 2 for k in range(1, 65)], 900.0, False),
    "below zero": ([-2.0 + 0.1 * math.sin(7 * k) for k in range(64)], -0.5, True),
    "all equal": ([0.0] * 64, 0.05, False),
    "too few": ([2.0 + 0.1 * math.sin(7 * k) for k in range(20)], 9.0, False),
}


@pytest.mark.parametrize("name", SKEWED)
def test_a_spike_is_judged_by_the_tail_of_the_losses(name):
    losses, value, spike = SKEWED[name]
    assert is_spike(losses, value, losses[0]) == spike


@pytest.mark.parametrize(("rate", "said"), [(None, [("rate", 40)]), (1e-3, [])])
def test_updates_that_rise_alike_are_a_rate_where_no_optimiser_is_known(rate, said):
    judge, events = judge_of(), []
    for step, update in ((10, 1e-3), (20, 2e-3), (30, 1e-3), (40, 0.03), (50, 0.03)):
        observation = seen(step, update=update)
        observation.rate = rate
        events += judge.updated(observation, set())
    assert [(event.kind, event.step) for event in events] == said


def steps_of_divergence(values, entropy=ENTROPY, steps=1000, reload=False):
    """The steps at which the judge finds a divergence."""
    judge, found = judge_of(entropy, steps), []
    for step, value in enumerate(values, start=1):
        before = judge.state.diverged
        judge.loss(step, value)
        found += [step] if judge.state.diverged != before else []
        judge = reloaded(judge, entropy, steps) if reload else judge
    return found


LEARNS = (200, 5.8, 2.4)
NORMAL = {
    "a run that learns": noisy(LEARNS, (600, 2.4, 2.0)),
    "spikes that recover": noisy(
        LEARNS, (3, 400.0, 9.0), (80, 9.0, 2.4), (100, 2.3, 2.3), (60, 5.0, 4.0), (50, 2, 2)
    ),
    "a collapse": noisy((100, 5.8, 3.1), (700, 3.1, 3.1)),
    "learning too slowly to see": noisy((800, 5.8, 5.8)),
    "learning slowly": noisy((800, 5.8, 4.5)),
    "falling fast": noisy((20, 5.8, 5.7), (25, 5.7, 3.4)),
    "a start far above a uniform guess": noisy((800, 24.0, 6.0)),
}
DIVERGED = {
    "high for long": (noisy(LEARNS, (600, 3.6, 3.6)), 200 + WARMUP + PATIENCE),
    "a learning rate far too high": (noisy((10, 5.8, 3.5), (500, 12.0, 29.9)), WARMUP + 20 + PATIENCE),
    "high after learning for a few updates": (
        noisy((8, 5.8, 5.5), (8, 3.6, 3.5), (500, 4.5, 4.5)),
        WARMUP + PATIENCE + 1,
    ),
    "orders of magnitude": (noisy(LEARNS, (100, 7e6, 7e6)), 200 + FEW),
    "orders of magnitude in the warm-up": (noisy((3, 5.8, 5.6), (20, 7e6, 7e6)), 3 + FEW),
}


class TestDivergence:
    @pytest.mark.parametrize("entropy", [ENTROPY, None])
    @pytest.mark.parametrize("name", NORMAL)
    def test_a_normal_run_is_not_called_diverged(self, name, entropy):
        assert steps_of_divergence(NORMAL[name], entropy) == []
        # nor is it at its last step
        assert steps_of_divergence(NORMAL[name], entropy, steps=len(NORMAL[name])) == []

    @pytest.mark.parametrize("name", DIVERGED)
    def test_it_is_found_once_and_in_time(self, name):
        values, latest = DIVERGED[name]
        (step,) = steps_of_divergence(values)
        assert latest - 30 <= step <= latest
        assert steps_of_divergence(values, reload=True) == [step]

    @pytest.mark.parametrize(
        ("values", "entropy", "steps", "found"),
        [
            # without an entropy a uniform guess is the measure
            (noisy(LEARNS, (300, 5.5, 5.5)), None, 1000, 0),
            (noisy(LEARNS, (300, 7.0, 7.0)), None, 1000, 1),
            # a run that ends too high has diverged
            (noisy(LEARNS, (40, 29.9, 29.9)), ENTROPY, 1000, 0),
            (noisy(LEARNS, (40, 29.9, 29.9)), ENTROPY, 240, 1),
            # a long run has more time to recover
            (noisy(LEARNS, (500, 3.6, 3.6), (300, 2.4, 2.4)), ENTROPY, 50_000, 0),
        ],
    )
    def test_what_it_depends_on(self, values, entropy, steps, found):
        assert len(steps_of_divergence(values, entropy, steps)) == found

    def diverging(self, now, healthy=True):
        """The event of a run that was normal at step 1, then shows `now`."""
        judge = judge_of(losses=[5.8])
        assert judge.observed(seen() if healthy else Observation(1)) == []
        # what is seen at a bad moment is no baseline
        judge.loss(2, 90.0)
        judge.loss(3, 90.0)
        assert judge.observed(seen(3, norm=1.0)) == []
        for step in range(4, 7):
            judge.loss(step, 90.0)
        assert judge.wants_a_look(6)
        (event,) = judge.observed(now)
        assert (event.kind, event.step) == ("diverged", 6)
        assert not judge.wants_a_look(7)
        return event

    @pytest.mark.parametrize(
        ("change", "measured", "before", "now"),
        [
            ({"angle_mean": lambda n: 1.4 if n == 5 else 0.1}, "angle", 0.1, 1.4),
            ({"grad_norm": lambda n: 40.0 if n == 5 else 1.0}, "gradient share", 8**-0.5, 40 * 1607**-0.5),
            # later sublayers inherit the norm
            ({"norm": lambda n: 900.0 if n >= 5 else 9.0}, "norm factor", 1.0, 100.0),
        ],
    )  # fmt: skip
    def test_the_sublayer_that_moved_is_named(self, change, measured, before, now):
        event = self.diverging(seen(6, **change))
        assert (event.sublayer, event.where, event.measured, event.since) == (5, "layer 5", measured, 1)
        assert (event.before, event.now) == pytest.approx((before, now))

    def test_none_is_named_if_none_moved_or_none_was_seen(self):
        assert (self.diverging(seen(6)).sublayer, self.diverging(seen(6)).since) == (None, 1)
        assert self.diverging(seen(6), healthy=False).since is None
