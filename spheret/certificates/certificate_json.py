"""What certificate.json holds. `certificate` computes it and explains it."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from spheret.analysis.achievement import AchievementRecord
from spheret.model.probes import BranchKind
from spheret.support.documents import Count, Document, NonNegative, Number, Positive, Record, Text

Verdict = Literal["proven", "at most", "measured only", "inactive", "violated"]
PaperVerdict = Literal["holds", "trivial", "does not apply"]
# of the paper's sums over all sublayers: whether they are bounds or only estimates
BoundsStanding = Literal["proven", "estimated", "none"]


# null at the upper end is infinity
Interval = tuple[NonNegative, NonNegative | None]


class ProvenRecord(Record):
    """The intervals that hold the worst token's numbers."""

    sigma_max: tuple[NonNegative, NonNegative]
    sigma_min: Interval
    condition: Interval

    def __post_init__(self) -> None:
        for name in ("sigma_max", "sigma_min", "condition"):
            low, high = getattr(self, name)
            if high is not None and low > high:
                raise ValueError(f"{name}: the lower end {low:g} exceeds the upper end {high:g}")


def _together(record: Record, names: tuple[str, ...]) -> bool:
    """Whether the record has these keys. Raises if it has some of them only."""
    present = {getattr(record, name) not in (UNSET, None) for name in names}
    if len(present) > 1:
        raise ValueError(f"{', '.join(names)} belong together: all or none is absent")
    return present == {True}


class CertifiedSublayer(Record, omit_defaults=True):
    """One sublayer, each quantity at its worst token. Keys that do not apply are absent."""

    sublayer: Positive
    branch: BranchKind
    angle_median: float
    angle_max: float
    # how far the branch moves the stream, as a share of its length
    moved: float
    inactive: bool
    B_max: float
    sigma_max: NonNegative
    sigma_min: NonNegative
    proven: ProvenRecord | None
    violations: Count
    verdict: Verdict
    why: str
    paper: PaperVerdict
    paper_why: str
    # how many times larger the paper's bound on sigma_max is than the value
    loose: Number
    # of a retraction
    alpha: Number | UnsetType = UNSET
    lambda_: Number | UnsetType = msgspec.field(name="lambda", default=UNSET)
    # of the paper's bounds
    Delta_max: float | None = None
    delta_max: float | None = None
    m_min: float | None = None
    m_exact_min: float | None = None
    tokens_with_m: Count | None = None
    # of the numerics
    error_max: Number | UnsetType = UNSET
    residual_max_max: Number | UnsetType = UNSET
    radius_max: Number | UnsetType = UNSET
    # in someone else's model, the name of the module that ends the branch
    module: str | None = None
    # measured, where nothing is proven; null is infinity
    condition: NonNegative | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        _together(self, ("Delta_max", "delta_max", "m_min", "m_exact_min", "tokens_with_m"))


class DepthRecord(Record, omit_defaults=True):
    """The product of the Jacobians of the first `sublayer` sublayers, where it was computed, and its bounds."""

    sublayer: Positive
    sigma_max: NonNegative | UnsetType | None = UNSET
    sigma_min: NonNegative | UnsetType | None = UNSET
    sigma_min_is_upper_bound: bool | None = None
    condition: NonNegative | UnsetType | None = UNSET
    proven: ProvenRecord | UnsetType | None = UNSET
    S_max: float | None = None
    S_mean: float | None = None
    A_max: float | None = None
    A_mean: float | None = None
    product_m_min: float | None = None
    criterion_min: float | None = None
    violations: Count | None = None

    def __post_init__(self) -> None:
        measured = self.is_measured()
        self.is_bounded()
        if measured and self.proven and (self.sigma_max is None or self.sigma_min is None):
            raise ValueError("sigma_max and sigma_min are numbers where something is proven")

    def is_measured(self) -> bool:
        # null is a value of the first four
        absent = {value is UNSET for value in (self.sigma_max, self.sigma_min, self.condition, self.proven)}
        if len(absent | {self.sigma_min_is_upper_bound is None}) > 1:
            names = "sigma_max, sigma_min, sigma_min_is_upper_bound, condition, proven"
            raise ValueError(f"{names} belong together: all or none is absent")
        return absent == {False}

    def is_bounded(self) -> bool:
        return _together(self, ("S_max", "S_mean", "A_max", "A_mean", "product_m_min", "criterion_min"))


class FitRecord(Record):
    """A sum as a multiple of what a schedule gives, and the share of variance that this explains."""

    factor: Number
    r2: Number


class FitsRecord(Record):
    """The sums S and A against one schedule."""

    S_order: str
    A_order: str
    S: FitRecord
    A: FitRecord


class GrowthRecord(Record):
    """The sums S and A of all sublayers, with the bounds of the run's own schedule and a fit to each schedule."""

    schedule: Text
    K: Number
    H: Number
    S: Number
    S_envelope: Number
    A: Number
    A_envelope: Number
    fits: dict[str, FitsRecord]
    S_grows_as: Text
    A_grows_as: Text


class DyadicRecord(Record):
    """The squared angle in the sublayers from m to 2m - 1."""

    m: Positive
    squared_angle: Number
    lambda_squared: Number
    ratio: Number


class LostRecord(Record):
    """Three sublayers by number; null if there is no such sublayer."""

    paper: Positive | None
    conditioning: Positive | None
    worst: Positive


class PartRecord(Record, omit_defaults=True):
    """Tokens on their own paths, or, with `tokens`, that many together as one sequence."""

    norm_of_B: Text
    singular_values: Text
    sublayers: list[CertifiedSublayer]
    depth: list[DepthRecord]
    verdicts: dict[Verdict, Positive]
    paper: dict[PaperVerdict, Positive]
    bounds: BoundsStanding
    lost: LostRecord
    tokens: Positive | None = None
    # of retractions
    growth: GrowthRecord | None = None
    dyadic: list[DyadicRecord] | None = None

    def __post_init__(self) -> None:
        if not self.sublayers or len(self.sublayers) != len(self.depth):
            raise ValueError("sublayers and depth have one row per sublayer, and at least one")
        if not self.depth[-1].is_measured():
            raise ValueError("the last row of depth has its singular values")
        if self.bounds == "proven" and not self.depth[-1].is_bounded():
            raise ValueError("the last row of depth has its bounds, because bounds is 'proven'")


class CertificateRecord(Record):
    """certificate.json. The last keys are absent if the model does not come from a file.

    run: the name of the run, or of the directory of someone else's model, which has no `checkpoint`.
    model: of someone else's model, its class in transformers.
    """

    scope: Text
    scheme: Text
    achieves: AchievementRecord
    tokens: Positive
    own_path: PartRecord
    sequence: PartRecord | None
    run: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    checkpoint: Count | UnsetType = UNSET
    data: str | UnsetType = UNSET
    seconds: NonNegative | UnsetType = UNSET
    machine: dict[str, str | Count | None] | UnsetType = UNSET
    format: str = "spheret-certificate"
    version: int = 2

    def __post_init__(self) -> None:
        if self.sequence is not None and self.sequence.tokens is None:
            raise ValueError("sequence.tokens is missing")

    @property
    def parts(self) -> dict[str, PartRecord]:
        """The parts that it has, by the names of their keys."""
        return {"own_path": self.own_path, **({} if self.sequence is None else {"sequence": self.sequence})}


CERTIFICATES = Document(CertificateRecord, "certify", "run spheret certify again")
