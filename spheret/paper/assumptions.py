"""What the paper leaves open and the runs of `spheret reproduce` settle. docs/methods.md has the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spheret.connections import PAPER_SCHEMES

DATASETS = ("fineweb-edu", "openwebtext")
# the paper discusses Post-LN, but none of its tables has it
TABLE_SCHEMES = tuple(name for name in PAPER_SCHEMES if name != "post-ln")
SPHERICAL = ("geonorm", "proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm")


@dataclass(frozen=True)
class Assumption:
    """One question that the paper leaves open.

    answer: what the runs do.
    schemes, datasets: the runs that the question concerns.
    reading: the name of a different answer, for `spheret reproduce --reading`.
    options, model: the options of the scheme, and the settings of the model, that make this other answer.
    other: the other answer in words.
    """

    question: str
    answer: str
    schemes: tuple[str, ...] = TABLE_SCHEMES
    datasets: tuple[str, ...] = DATASETS
    reading: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    other: str = ""

    def concerns(self, dataset: str, scheme: str) -> bool:
        return dataset in self.datasets and scheme in self.schemes

    def in_words(self, reading: str | None = None) -> str:
        """The question with the answer of a run that follows this reading."""
        if self.reading is None:
            return f"{self.question} {self.answer}"
        if self.reading == reading:
            return f"{self.question} {self.other} This is the reading {reading}. The default: {self.answer}"
        return f"{self.question} {self.answer} Another reading: --reading {self.reading}."


ASSUMPTIONS = (
    Assumption(
        "Does a branch F contain a LayerNorm of its own?",
        "No. `inner_norm=True` adds one.",
        SPHERICAL,
        reading="inner-norm",
        options={"inner_norm": True},
        other="Yes, one before each branch (`inner_norm=True`).",
    ),
    Assumption(
        "Is there a norm before the head?",
        "Yes, nanoGPT's final LayerNorm. `final_norm=False` removes it.",
        SPHERICAL,
        reading="no-final-norm",
        options={"final_norm": False},
        other="No (`final_norm=False`).",
    ),
    Assumption(
        "Does l count sublayers or blocks?",
        'Sublayers. `index="block"` counts blocks.',
        SPHERICAL,
        reading="block-index",
        options={"index": "block"},
        other='Blocks (`index="block"`).',
    ),
    Assumption(
        "How are the step sizes and the radius kept in their intervals?",
        "By torch.clamp (`exact_clamp=True`), in `spheret reproduce`. By default every gradient passes, and each "
        "step ends in the interval.",
        SPHERICAL,
    ),
    Assumption(
        "Which schedule does GeoNorm use in the paper's tables?",
        'Harmonic, 1/l. `schedule="sqrt"` gives the schedule of the SpheretNorms.',
        ("geonorm",),
        reading="sqrt-schedule",
        options={"schedule": "sqrt"},
        other='The schedule of the SpheretNorms, 1/sqrt(l) (`schedule="sqrt"`).',
    ),
    Assumption(
        "Does GeoNorm's stream start with the ScaleNorm of the SpheretNorms?",
        "Yes. `entry_norm=False` removes it.",
        ("geonorm",),
        reading="no-entry-norm",
        options={"entry_norm": False},
        other="No (`entry_norm=False`).",
    ),
    Assumption(
        "What is the largest angle of a GeoNorm update?", "pi/4. `max_angle` sets a different one.", ("geonorm",)
    ),
    Assumption(
        "Which norms does Keel use?",
        'RMSNorm, with a gain and no bias. `norm="layernorm"` takes LayerNorm.',
        ("keel",),
        reading="layernorm",
        options={"norm": "layernorm"},
        other='LayerNorm (`norm="layernorm"`).',
    ),
    Assumption("Which norms does Peri-LN use?", "LayerNorm, and none after the embedding.", ("peri-ln",)),
    Assumption(
        "How does Pre-DyT start?",
        "The embeddings are multiplied by a learned scalar that starts at sqrt(d). The slopes start at 1 for S and "
        "M. For L they start at 1 before attention and at 0.5 elsewhere.",
        ("pre-dyt",),
    ),
    Assumption(
        "Which parameters decay?", "Those with two or more dimensions. Scalars, gains and biases do not decay."
    ),
    Assumption(
        "How are the weights initialised?",
        "As in nanoGPT: N(0, 0.02), and projections that write to the stream are divided by sqrt(2N).",
    ),
    Assumption(
        "Does the head read the stream through a fixed map?",
        "No, it is tied to the token embedding as in nanoGPT. "
        '`head="shifted"` puts a shift of the channels before it.',
        reading="shifted-head",
        model={"head": "shifted"},
        other='Yes, a shift of the channels by half of the width (`head="shifted"`).',
    ),
    Assumption(
        "On which text is the validation loss measured?",
        "On 512 fixed windows of the validation split, every 500 updates and at the end.",
    ),
    Assumption(
        "In which order are the texts read, and which are held out?",
        "In the trainer's own order of windows. Documents are held out by their hash.",
    ),
    Assumption(
        "Which part of FineWeb-Edu is used?", "The sample of 10 B tokens, sample-10BT.", datasets=("fineweb-edu",)
    ),
)
# the other answers that `spheret reproduce` can train, by name
READINGS: dict[str, Assumption] = {each.reading: each for each in ASSUMPTIONS if each.reading is not None}
