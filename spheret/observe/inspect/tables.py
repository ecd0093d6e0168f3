"""What `spheret inspect` prints: one row per sublayer, the Jacobians beside the paper's bounds, and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spheret.observe.inspection import Inspection
from spheret.observe.jacobians import Bounds, Measured, Paper, Sums
from spheret.observe.records import SublayerObservation
from spheret.support.tables import print_in_parts, terminal

# the columns, by their key in a sublayer's record
QUANTITIES = {
    "norm": "|h|",
    "massive": "max/median",
    "sink": "sink",
    "angle_mean": "angle",
    "update_cosine": "cos updates",
    "cosine": "cos tokens",
    "effective_rank": "rank",
    "removal": "loss rise",
    "grad_norm": "|gradient|",
}
# those of schemes with several streams, in a table of their own
STREAMS = {
    "stream_cosine": "cos streams",
    "mix_from_identity": "mix - I",
    "mix_from_uniform": "mix - 1/n",
    "mix_saturation": "saturation",
    "mix_gain": "gain",
}
STREAM_MEANINGS = """\
cos streams: mean cosine between the streams of a token; 1 means that they are alike.
mix - I, mix - 1/n: distance of the mixing matrix from the identity and from the uniform matrix.
saturation: largest entry of a row over the row's sum; 1 where a stream takes only one.
gain: largest singular value of the product of the mixing matrices up to this sublayer."""
MEANINGS = """\
max/median: largest activation over the median activation.
sink: attention to the first token.
cos updates: cosine between an update and the previous one.
cos tokens: mean cosine between tokens; 1 means that they have collapsed into one.
rank: effective rank of the tokens' states.
loss rise: how much the loss rises when the sublayer is removed.
|gradient|: norm of the gradient of the sublayer's weights."""
COLUMNS = (
    "sublayer",
    "branch",
    "alpha",
    "theta",
    "eta",
    "|B|",
    "Delta",
    "q",
    "m",
    "sigma_min",
    "sigma_max",
    "1 + Delta",
)
STACK_COLUMNS = ("sublayers", "S", "A", "criterion", "prod m", "sigma_min", "sigma_max", "exp(S)")
JACOBIAN_MEANINGS = """\
theta: the angle by which the sublayer turns the stream; eta: |z|/|h|, the tangent part of the branch's output.
|B|: norm of the branch's derivative less <h,f>/|h|^2; q: |cos theta|.
sigma_min, sigma_max: the extreme singular values, measured; "<= x" is not resolved by the arithmetic.
m, 1 + Delta: the paper's bounds on them. A lower bound of 0 and an infinite upper bound are vacuous.
S, A: sums of Delta and of theta^2. prod m, exp(S): the paper's bounds on the first sublayers together.
criterion: exp(-(A/2 + S)/m*) with the smallest m, a weaker lower bound."""


def print_sublayers(models: Mapping[str, Inspection]) -> None:
    """Print one row per sublayer; with two models each cell holds both values."""
    titles = [f"{label}, {each.scheme}, {_origin(each)}: loss {each.loss:.4f}" for label, each in models.items()]
    lists = [each.sublayers for each in models.values()]
    _print_quantities(" | ".join(titles), QUANTITIES, lists)
    print(MEANINGS)
    if any(each.mix_gain is not None for sublayers in lists for each in sublayers):
        _print_quantities("Several streams", STREAMS, lists)
        print(STREAM_MEANINGS)


def _print_quantities(title: str, quantities: Mapping[str, str], lists: Sequence[list[SublayerObservation]]) -> None:
    table = list[list[str]]()
    for index in range(max(map(len, lists))):
        rows = [sublayers[index] if index < len(sublayers) else None for sublayers in lists]
        cells = [_cell([_number(row, key) for row in rows]) for key in quantities]
        branches = _cell([str(row.branch) for row in rows if row is not None])
        table.append([str(index + 1), branches, *cells])
    columns = ["sublayer", "branch", *quantities.values()]
    print_in_parts(terminal(), title, columns, table, first=2, left=("branch",))


def _origin(inspection: Inspection) -> str:
    return inspection.model if inspection.checkpoint is None else f"step {inspection.checkpoint}"


def _cell(texts: list[str]) -> str:
    """The texts of both models, or one if it says the same: the kind of a branch, or that there is nothing."""
    same = len(set(texts)) == 1 and not any(character.isdigit() for character in texts[0])
    return texts[0] if same else " | ".join(texts)


def _number(sublayer: SublayerObservation | None, key: str) -> str:
    value = None if sublayer is None else getattr(sublayer, key)
    return "-" if value is None else f"{value:.3g}"


def sentences(inspection: Inspection) -> list[str]:
    """What else there is to say: what does nothing, what the head prefers, and what could not be measured."""
    said = []
    if inactive := inspection.inactive:
        count = len(inspection.sublayers)
        names = "all of them" if len(inactive) == count else ", ".join(map(str, inactive))
        said.append(
            f"{len(inactive)} of {count} sublayers are inactive: their branch moves the stream by less than float32 "
            f"resolves ({names})."
        )
    if inspection.own_logit is not None:
        text, start = f"the logit of the current token is {inspection.own_logit:.2f} above the mean logit", ""
        if (before := inspection.start) is not None and before.loss is not None:
            start = f"; before training it was {before.own_logit:.2f}, the loss {before.loss:.3f}, {before.distance}"
        said.append(f"{text}{start}.")
    if inspection.note:
        said.append(f"{inspection.note}.")
    return said


def print_jacobians(title: str, kinds: Sequence[str | None], measured: Measured, paper: Paper | None) -> None:
    """Print the measured singular values beside the bounds."""
    console, rows = terminal(), sublayer_rows(kinds, measured, paper)
    print_in_parts(console, title, COLUMNS, rows, first=2, left=("branch",))
    print_in_parts(console, "The first sublayers together", STACK_COLUMNS, stack_rows(measured, paper), first=1)
    print(JACOBIAN_MEANINGS)


def sublayer_rows(kinds: Sequence[str | None], measured: Measured, paper: Paper | None) -> list[list[str]]:
    """One row of text per sublayer, in the order of COLUMNS. kinds: of their branches."""
    rows = []
    for i, (theta, eta, B, sigma_min, unresolved, sigma_max, *_) in enumerate(zip(*measured, strict=True)):
        alpha, Delta, q, m, above = ["-"] * 5
        if paper is not None:
            b = Bounds(*(x[i] for x in paper.bounds))
            alpha, Delta, q = _text(paper.steps[i].alpha), _text(b.Delta.max()), _text(b.q.min())
            m, above = _bound(b.m.min()), _bound(b.largest.max())
        free = map(_text, (theta.max(), eta.max(), B.max()))
        values = _smallest(sigma_min, unresolved), _text(sigma_max.max())
        rows.append([str(i + 1), str(kinds[i]), alpha, *free, Delta, q, m, *values, above])
    return rows


def stack_rows(measured: Measured, paper: Paper | None) -> list[list[str]]:
    """One row of text per product of the first sublayers, in the order of STACK_COLUMNS."""
    rows = []
    for i, (*_, sigma_min, unresolved, sigma_max) in enumerate(zip(*measured, strict=True)):
        S, A, criterion, product, above = ["-"] * 5
        if paper is not None:
            now = Sums(*(x[i] for x in paper.sums))
            S, A, above = _text(now.S.max()), _text(now.A.max()), _bound(now.S.max().exp())
            criterion, product = _bound(now.criterion.min()), _bound(now.product_m.min())
        values = _smallest(sigma_min, unresolved), _text(sigma_max.max())
        rows.append([str(i + 1), S, A, criterion, product, *values, above])
    return rows


def _text(x: Tensor) -> str:
    return f"{float(x):.4g}"


def _bound(x: Tensor) -> str:
    """A bound, which says nothing if it is 0 from below or infinite from above."""
    return _text(x) if 0 < x < torch.inf else f"{_text(x)} (vacuous)"


def _smallest(values: Tensor, unresolved: Tensor) -> str:
    """The smallest of the tokens' values; if rounding hides it, the number that it does not exceed."""
    hidden = values < unresolved
    return f"<= {float(unresolved[hidden].max()):.1g}" if hidden.any() else _text(values.min())


def bound_sentences(measured: Measured, paper: Paper | None) -> list[str]:
    """Where the lower bound is vacuous, and the sums S and A beside what the schedule bounds them by."""
    if paper is None:
        return ["the updates are not retractions of the sphere, so the paper's bounds do not apply."]
    steps, b, total, eta_bounds = paper
    vacuous = [str(i) for i, m in enumerate(b.m, start=1) if (m == 0).any()]
    first = "m > 0 at every sublayer: no lower bound on a sublayer is vacuous."
    if vacuous:
        first = (
            f"m = 0 at {len(vacuous)} of {len(steps)} sublayers ({', '.join(vacuous)}), so there the lower bound is "
            f"vacuous; that on the product is vacuous from sublayer {vacuous[0]} on."
        )
    alpha = torch.tensor([float(step.alpha) for step in steps], dtype=torch.float64)
    factors = torch.tensor([step.factor for step in steps], dtype=torch.float64)
    # a step of 0 adds nothing to the sums
    tiny = torch.finfo(torch.float64).tiny
    K = float((b.Delta.amax(1).cpu() / alpha.clamp(min=tiny)).max())
    H = float((alpha / factors.clamp(min=tiny) * measured.eta.amax(1).cpu()).max())
    S, A = float(total.S[-1].max()), float(total.A[-1].max())
    normed = []
    if eta_bounds:
        normed = [
            f"branch_norm: eta = {float(measured.eta.max()):.4g} <= max|gain| sqrt(width)/|h| = "
            f"{max(eta_bounds):.4g}, whatever the weights are."
        ]
    return [
        first,
        *normed,
        f"schedule {steps[0].schedule}: S = {S:.4g} <= K sum lambda = {K * float(factors.sum()):.4g}, K = {K:.4g}; "
        f"A = {A:.4g} <= H^2 sum lambda^2 = {H**2 * float(factors.square().sum()):.4g}, H = {H:.4g}.",
    ]
