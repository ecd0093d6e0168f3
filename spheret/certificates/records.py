"""What certificate.json holds. `certificate` computes it and explains it."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from spheret.analysis.dynamics import BranchKind
from spheret.support.documents import Count, Document, NonNegative, Positive, Record, Text

# null stands for NaN and infinity, which JSON does not have
Number = float | None
Verdict = Literal["proven", "at most", "measured only", "inactive", "violated"]
PaperVerdict = Literal["holds", "trivial", "does not apply"]


class ProvenRecord(Record):
    """The intervals that hold the worst token's numbers. Null at the upper end is infinity."""

    sigma_max: tuple[NonNegative, NonNegative]
    sigma_min: tuple[NonNegative, NonNegative | None]
    condition: tuple[NonNegative, NonNegative | None]

    def __post_init__(self) -> None:
        for name in ("sigma_max", "sigma_min", "condition"):
            low, high = getattr(self, name)
            if high is not None and low > high:
                raise ValueError(f"{name}: the lower end {low:g} exceeds the upper end {high:g}")


def _together(record: Record, names: tuple[str, ...]) -> bool:
    """Whether the record has these keys. Raises if it has some of them only."""
    present = {getattr(record, name) is not UNSET for name in names}
    if len(present) > 1:
        raise ValueError(f"{', '.join(names)} belong together: all or none is absent")
    return present == {True}


class SublayerRecord(Record):
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
    Delta_max: float | UnsetType = UNSET
    delta_max: float | UnsetType = UNSET
    m_min: float | UnsetType = UNSET
    m_exact_min: float | UnsetType = UNSET
    tokens_with_m: Count | UnsetType = UNSET
    # of the numerics
    error_max: Number | UnsetType = UNSET
    residual_max_max: Number | UnsetType = UNSET
    radius_max: Number | UnsetType = UNSET
    # in someone else's model, the name of the module that ends the branch
    module: str | UnsetType = UNSET
    # measured, where nothing is proven; null is infinity
    condition: NonNegative | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        _together(self, ("Delta_max", "delta_max", "m_min", "m_exact_min", "tokens_with_m"))


class DepthRecord(Record):
    """The product of the Jacobians of the first `sublayer` sublayers, where it was computed, and its bounds."""

    sublayer: Positive
    sigma_max: NonNegative | UnsetType | None = UNSET
    sigma_min: NonNegative | UnsetType | None = UNSET
    sigma_min_is_upper_bound: bool | UnsetType = UNSET
    condition: NonNegative | UnsetType | None = UNSET
    proven: ProvenRecord | UnsetType | None = UNSET
    S_max: float | UnsetType = UNSET
    S_mean: float | UnsetType = UNSET
    A_max: float | UnsetType = UNSET
    A_mean: float | UnsetType = UNSET
    product_m_min: float | UnsetType = UNSET
    criterion_min: float | UnsetType = UNSET
    violations: Count | UnsetType = UNSET

    def __post_init__(self) -> None:
        measured = self.is_measured()
        self.is_bounded()
        if measured and self.proven and (self.sigma_max is None or self.sigma_min is None):
            raise ValueError("sigma_max and sigma_min are numbers where something is proven")

    def is_measured(self) -> bool:
        return _together(self, ("sigma_max", "sigma_min", "sigma_min_is_upper_bound", "condition", "proven"))

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


class PartRecord(Record):
    """Tokens on their own paths, or, with `tokens`, that many together as one sequence."""

    norm_of_B: Text
    singular_values: Text
    sublayers: list[SublayerRecord]
    depth: list[DepthRecord]
    verdicts: dict[Verdict, Positive]
    paper: dict[PaperVerdict, Positive]
    bounds: Literal["proven", "estimated", "none"]
    lost: LostRecord
    tokens: Positive | UnsetType = UNSET
    # of retractions
    growth: GrowthRecord | UnsetType = UNSET
    dyadic: list[DyadicRecord] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if not self.sublayers or len(self.sublayers) != len(self.depth):
            raise ValueError("sublayers and depth have one row per sublayer, and at least one")
        if not self.depth[-1].is_measured():
            raise ValueError("the last row of depth has its singular values")
        if self.bounds == "proven" and not self.depth[-1].is_bounded():
            raise ValueError("the last row of depth has its bounds, because bounds is 'proven'")


class AchievedSublayer(Record):
    """What one sublayer does to the stream."""

    sublayer: Positive
    angle: float
    moved: Number
    inactive: bool


class AchievementRecord(Record):
    """What the model achieves. `learned` is null if the loss of token frequencies alone is not known."""

    loss: Number
    tokens: Positive
    unigram_entropy: float | None
    learned: bool | None
    token_cosine: float
    sublayers: list[AchievedSublayer]
    # by number
    inactive: list[Positive]

    def __post_init__(self) -> None:
        if not self.sublayers:
            raise ValueError("sublayers has at least one row")
        if (self.learned is None) != (self.unigram_entropy is None):
            raise ValueError("learned and unigram_entropy belong together: both or none is null")


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
        if self.sequence is not None and self.sequence.tokens is UNSET:
            raise ValueError("sequence.tokens is missing")


CERTIFICATES = Document(CertificateRecord, "certify", "run spheret certify again")
