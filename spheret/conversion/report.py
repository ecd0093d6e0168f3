"""What a conversion did, as a record that prints as a table."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ConvertedSublayer:
    """One residual that is now a step on the sphere.

    Args:
        name: the module that ends the branch.
        readers: the modules that read the stream.
        kind: attention, mlp, or what else the branch is.
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


@dataclass(frozen=True)
class ConversionReport:
    """What was converted, what was left and why. `str()` gives a table.

    Args:
        model: the name of its class.
        scheme: the scheme at t = 1.
        start: "exact", "calibrated" or "plain".
        converted: the residuals that are now steps on the sphere.
        left: the names of those that are not, each with the reason.
        difference: the largest difference of an output from the original's at t = 0, by the largest output.
        examples: what the step sizes were fitted on.
        added_parameters: how many parameters the model has more.
        notes: what else a reader should know.
    """

    model: str
    scheme: str
    start: str
    converted: tuple[ConvertedSublayer, ...]
    left: tuple[tuple[str, str], ...]
    difference: float
    examples: str
    added_parameters: int = 0
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        radii = {row.stack: f"{row.radius:.4g}" for row in self.converted}
        spheres = ", ".join(f"{radius} ({stack or 'the model'})" for stack, radius in radii.items())
        lines = [
            f"{self.model}: {len(self.converted)} residuals converted to {self.scheme}, start {self.start}; "
            f"{len(self.left)} left",
            f"radius {spheres}; {self.added_parameters} parameters added; at t = 0 the outputs differ from the "
            f"original's by {self.difference:.1e} of the largest",
            f"step sizes fitted on {self.examples}",
            "",
        ]
        head = ("sublayer", "end of the branch", "reads the stream", "kind", "alpha", "angle", "> pi/2", "> reach")
        rows: list[tuple[str, ...]] = [head]
        for row in self.converted:
            shares = [f"{count / max(row.rows, 1):.2%}" for count in (row.beyond_half_turn, row.beyond_reach)]
            readers = ", ".join(name.rsplit(".", 1)[-1] for name in row.readers)
            rows.append(
                (str(row.sublayer), row.name, readers, row.kind, f"{row.alpha:.4g}", f"{row.mean_angle:.3f}", *shares)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += [f"left: {name}: {why}." for name, why in self.left]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)
