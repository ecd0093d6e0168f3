"""What the paper leaves open and the runs of `spheret reproduce` settle. docs/methods.md lists the same table."""

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

    answer, reason: what the runs do, and why.
    schemes, datasets: the runs that the question concerns. Without schemes it concerns no run of the tables.
    reading: the name of another answer, for `spheret reproduce --reading`.
    options, model: the options of the scheme, and the settings of the model, that make this other answer.
    other: the other answer in words.
    """

    question: str
    answer: str
    reason: str
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
            return f"{self.question} {self.answer} {self.reason}"
        if self.reading == reading:
            return f"{self.question} {self.other} This is the reading {reading}. The default: {self.answer}"
        return f"{self.question} {self.answer} {self.reason} Another reading: --reading {self.reading}."


ASSUMPTIONS = (
    Assumption(
        "Does a branch F contain a LayerNorm of its own?",
        "No. `inner_norm=True` adds one.",
        "The equations apply F to h_l directly. This is the main open risk. The paper says that all variants have "
        "identical parameter counts (Appendix B). With `inner_norm` a spherical model of size S has 124,475,929 "
        "parameters, 25 more than Pre-LN. Without it, it has 36,839 fewer. No reading makes the sentence exact: "
        "Peri-LN has 36,864 more.",
        SPHERICAL,
        reading="inner-norm",
        options={"inner_norm": True},
        other="Yes, one before each branch (`inner_norm=True`).",
    ),
    Assumption(
        "Is there a norm before the head?",
        "Yes, nanoGPT's final LayerNorm. `final_norm=False` removes it.",
        "The paper declares only two changes to nanoGPT.",
        SPHERICAL,
        reading="no-final-norm",
        options={"final_norm": False},
        other="No (`final_norm=False`).",
    ),
    Assumption(
        "Does l count sublayers or blocks?",
        'Sublayers. `index="block"` counts blocks.',
        'The paper writes "the l-th (non-)linear mapping".',
        SPHERICAL,
        reading="block-index",
        options={"index": "block"},
        other='Blocks (`index="block"`).',
    ),
    Assumption(
        "How are the step sizes and the radius kept in their intervals?",
        "By torch.clamp (`exact_clamp=True`), in `spheret reproduce`. By default every gradient passes, and each "
        "step ends in the interval.",
        "The paper's listings use torch.clamp. See the clamp trap in mathematics.md.",
        SPHERICAL,
    ),
    Assumption(
        "Which schedule does GeoNorm use in the paper's tables?",
        'Harmonic, 1/l. `schedule="sqrt"` gives the schedule of the SpheretNorms.',
        "GeoNorm's own paper uses harmonic.",
        ("geonorm",),
        reading="sqrt-schedule",
        options={"schedule": "sqrt"},
        other='The schedule of the SpheretNorms, 1/sqrt(l) (`schedule="sqrt"`).',
    ),
    Assumption(
        "Does GeoNorm's stream start with the ScaleNorm of the SpheretNorms?",
        "Yes. `entry_norm=False` removes it.",
        "The paper names it for the SpheretNorms only. One entry for all spherical schemes leaves the retraction and "
        "the schedule as the only differences.",
        ("geonorm",),
        reading="no-entry-norm",
        options={"entry_norm": False},
        other="No (`entry_norm=False`).",
    ),
    Assumption(
        "What is the largest angle of a GeoNorm update?",
        "pi/4. `max_angle` sets a different one.",
        "The listing has a bound without a value. The paper reports that pi/4 is better than pi/2.",
        ("geonorm",),
    ),
    Assumption(
        "Which norms does Keel use?",
        'RMSNorm, with a gain and no bias. `norm="layernorm"` takes LayerNorm.',
        "Keel's own paper uses RMSNorm. This paper says that Keel applies LayerNorm twice.",
        ("keel",),
        reading="layernorm",
        options={"norm": "layernorm"},
        other='LayerNorm (`norm="layernorm"`).',
    ),
    Assumption(
        "Which norms does Peri-LN use?",
        "LayerNorm, and none after the embedding.",
        "This paper says that Peri-LN applies LayerNorm twice. In its own source the norm of the embeddings is "
        "optional.",
        ("peri-ln",),
    ),
    Assumption(
        "How does Pre-DyT start?",
        "The embeddings are multiplied by a learned scalar that starts at sqrt(d). The slopes start at 1 for S and "
        "M. For L they start at 1 before attention and at 0.5 elsewhere.",
        "This is the language-model recipe of DyT's own paper, whose table of slopes goes by width.",
        ("pre-dyt",),
    ),
    Assumption(
        "Which parameters decay?",
        "Those with two or more dimensions. Scalars, gains and biases do not decay.",
        "nanoGPT's rule. The paper names the weight decay only.",
    ),
    Assumption(
        "How are the weights initialised?",
        "As in nanoGPT: N(0, 0.02), and projections that write to the stream are divided by sqrt(2N).",
        "The paper does not say. Its models are built on nanoGPT.",
    ),
    Assumption(
        "Does the head read the stream through a fixed map?",
        "No, it is tied to the token embedding as in nanoGPT. "
        '`head="shifted"` puts a shift of the channels before it.',
        "The paper does not discuss it. With a tied head a spherical stream starts by predicting the current token. "
        "See collapse.md.",
        reading="shifted-head",
        model={"head": "shifted"},
        other='Yes, a shift of the channels by half of the width (`head="shifted"`).',
    ),
    Assumption(
        "On which text is the validation loss measured?",
        "On 512 fixed windows of the validation split, every 500 updates and at the end.",
        "The paper reports the final loss and does not say on which text.",
    ),
    Assumption(
        "In which order are the texts read, and which are held out?",
        "In the trainer's own order of windows. Documents are held out by their hash.",
        "The paper does not say.",
    ),
    Assumption(
        "Which part of FineWeb-Edu is used?",
        "The sample of 10 B tokens, sample-10BT.",
        "The paper trains on 6.55 B tokens and names no sample.",
        datasets=("fineweb-edu",),
    ),
    Assumption(
        "Which schedule does the row sqrt(l) of the schedule table mean?",
        "1/l",
        "The appendix states it.",
        (),
    ),
)
# the other answers that `spheret reproduce` can train, by name
READINGS: dict[str, Assumption] = {each.reading: each for each in ASSUMPTIONS if each.reading is not None}
