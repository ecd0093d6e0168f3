"""What a conversion saw of each sublayer on a few batches: the fit of radius and step sizes, and the report.

The fit is least squares in closed form. The turn of a row answers to log alpha with the slope s = beta theta'(beta).
To first order, the one step size of a sublayer whose turns differ least from the rows' own, in squared angle, is the
mean of the rows' log alpha with the weights s^2. The radius is the geometric mean of the rows' lengths, moved into
ScaleNorm's interval.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spheret.bounds import inverse_softplus
from spheret.conversion import formulas
from spheret.conversion.attach import read_points
from spheret.conversion.plan import ConversionError, ConversionPlan
from spheret.conversion.steps import Step, StepRecord
from spheret.support.precision import widest


class Observations:
    """Sums over the rows of each step, filled by the steps while a model runs at t = 0."""

    def __init__(self) -> None:
        # by the id of a step, then by what is summed
        self.sums: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def mean(self, step: Step, name: str) -> float:
        """A sum divided by the number of rows."""
        sums = self.sums[id(step)]
        return sums[name] / max(sums["rows"], 1)

    @torch.no_grad()
    def add(self, step: Step, record: StepRecord) -> None:
        wide = widest(record.stream.device)
        radius = step.radius.detach().to(record.stream.device, wide)
        assert record.ratio is not None
        assert record.next_ratio is not None
        given = record.stream, record.ratio, record.branch, record.next_ratio
        u, ratio, f, next_ratio = (x.detach().to(wide) for x in given)
        # u may have been rounded to the dtype of the stream
        u, _ = formulas.on_sphere(u, radius)
        live = (ratio > 0).squeeze(-1)
        u, ratio, f, next_ratio = u[live], ratio[live], f[live], next_ratio[live]
        scheme_step = step.connection.retraction_step()
        assert scheme_step is not None
        retraction, p = scheme_step.retraction, scheme_step.p
        p = p.detach().to(wide) if isinstance(p, Tensor) else p
        turned = formulas.turn(u, f, ratio, radius)
        own = formulas.own_step(turned, radius, retraction, p, scheme_step.max_angle)
        weights = formulas.slope(retraction, p, own.beta).square()
        terms = {
            "rows": torch.ones_like(ratio),
            "weights": weights,
            "weighted log alpha": weights * own.log_alpha,
            "log length": (ratio * radius).log(),
            "log next length": (next_ratio * radius).clamp(min=torch.finfo(wide).tiny).log(),
            "angle": turned.angle,
            "beyond half turn": turned.along <= 0,
            "beyond reach": own.excess > 0,
        }
        for name, values in terms.items():
            self.sums[id(step)][name] += float(values.sum())

    @torch.no_grad()
    def fit(self, model: nn.Module, stacks: dict[str, list[Step]], fit_radius: bool) -> None:
        """Set the radii of a converted model, and the units and lengths of its points."""
        last: dict[int, Step] = {}
        for members in stacks.values():
            enter = members[0].entry_norm
            observed = radius = enter.radius_value()
            if fit_radius:
                rows, logs = (sum(self.sums[id(step)][name] for step in members) for name in ("rows", "log length"))
                radius = min(max(math.exp(logs / max(rows, 1)), 1.0), math.sqrt(enter.dim))
                nn.init.constant_(enter.gamma, inverse_softplus(radius))
            for step in members:
                alpha = step.connection.alpha
                assert alpha is not None
                if float(alpha) == 0:
                    raise ConversionError(f"alpha = 0 in {alpha.dtype}: give a larger one.")
                step.unit.fill_(self._alpha(step, radius, observed) / float(alpha))
                step.length.fill_(math.exp(self.mean(step, "log length")) / radius)
                last[id(step.stream)] = step
        for point in read_points(model):
            if not isinstance(point, Step):
                step = last[id(point.stream)]
                point.length.fill_(math.exp(self.mean(step, "log next length")) / float(step.radius))

    def _alpha(self, step: Step, radius: float, observed_radius: float) -> float:
        """The fitted step size at a radius, from rows that were observed at a different one."""
        sums = self.sums[id(step)]
        if sums["weights"] == 0:
            # branches that return zeros turn nothing: a step of the stream's own scale
            return radius * math.exp(-self.mean(step, "log length"))
        return math.exp(sums["weighted log alpha"] / sums["weights"]) * radius / observed_radius

    def sublayers(self, plan: ConversionPlan, stacks: dict[str, list[Step]]) -> Iterator[ConvertedSublayer]:
        """The rows of the report."""
        for stack, residuals in plan.stacks().items():
            for number, (residual, step) in enumerate(zip(residuals, stacks[stack], strict=True), start=1):
                yield ConvertedSublayer(
                    name=residual.name,
                    readers=tuple(reader.module for reader in residual.readers),
                    kind=residual.kind,
                    stack=stack,
                    sublayer=number,
                    alpha=float(step.alpha.detach()),
                    radius=float(step.radius.detach()),
                    mean_angle=self.mean(step, "angle"),
                    rows=int(self.sums[id(step)]["rows"]),
                    beyond_half_turn=int(self.sums[id(step)]["beyond half turn"]),
                    beyond_reach=int(self.sums[id(step)]["beyond reach"]),
                )


@dataclass(frozen=True)
class ConvertedSublayer:
    """One residual that is now a step on the sphere.

    Args:
        name: the module that ends the branch.
        readers: the modules that read the stream.
        kind: where the norms stand: pre-norm, post-norm, norms around, norm behind or no norm.
        stack: the list of layers that it is in.
        sublayer: its number in that stack, from 1 on.
        alpha: the learned step size, where it starts.
        radius: the radius of the sphere, where it starts.
        mean_angle: the mean of the rows' own turns on the examples, in radians.
        rows: how many rows the examples had.
        beyond_half_turn: rows that turn by more than pi/2, because 1 + c <= 0.
        beyond_reach: rows that turn further than the scheme's retraction and its cap can.
    """

    name: str
    readers: tuple[str, ...]
    kind: str
    stack: str
    sublayer: int
    alpha: float
    radius: float
    mean_angle: float
    rows: int
    beyond_half_turn: int
    beyond_reach: int

    def cells(self) -> tuple[str, ...]:
        """Its row in the table of the report."""
        readers = ", ".join(name.rsplit(".", 1)[-1] for name in self.readers)
        shares = [f"{count / max(self.rows, 1):.2%}" for count in (self.beyond_half_turn, self.beyond_reach)]
        numbers = f"{self.alpha:.4g}", f"{self.mean_angle:.3f}"
        return str(self.sublayer), self.name, readers, self.kind, *numbers, *shares


@dataclass(frozen=True)
class ConversionReport:
    """What was converted, what was left and why. `str()` gives a table.

    Args:
        model: the name of its class.
        scheme: the scheme at t = 1.
        start: "exact", "calibrated" or "plain".
        converted: the residuals that are now steps on the sphere.
        left: the names of those that are not, each with the reason.
        difference: the largest difference of an output from the original's in the check, by the largest output.
        examples: what the step sizes were fitted on.
        added_parameters: how many parameters the model has more.
    """

    model: str
    scheme: str
    start: str
    converted: tuple[ConvertedSublayer, ...]
    left: tuple[tuple[str, str], ...]
    difference: float
    examples: str
    added_parameters: int

    def __str__(self) -> str:
        radii = {row.stack: f"{row.radius:.4g}" for row in self.converted}
        spheres = ", ".join(f"{radius} ({stack or 'the model'})" for stack, radius in radii.items())
        head = ("sublayer", "end of the branch", "reads the stream", "kind", "alpha", "angle", "> pi/2", "> reach")
        rows = [head, *(row.cells() for row in self.converted)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{self.model}: {len(self.converted)} residuals converted to {self.scheme}, start {self.start}; "
            f"{len(self.left)} left",
            f"radius {spheres}; {self.added_parameters} parameters added; in the check the outputs differed from the "
            f"original's by {self.difference:.1e} of the largest",
            f"step sizes fitted on {self.examples}",
            "",
            *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
            *(f"left: {name}: {why}." for name, why in self.left),
        ]
        return "\n".join(lines)
