"""sample.json: a short text that the model of a run wrote when its training had ended."""

from __future__ import annotations

from pathlib import Path

from spheret.runs.layout import SAMPLE
from spheret.support.documents import Count, Document, NonNegative, Record


class RunSample(Record):
    """A text, and what it takes to have the same text again with `spheret sample`.

    text: what the model wrote after the prompt. prompt: "" begins a new document.
    step: the step of the weights. tokens: how many were drawn.
    """

    text: str
    prompt: str
    seed: Count
    temperature: NonNegative
    tokens: Count
    step: Count
    format: str = "spheret-sample"
    version: int = 1

    def write(self, run: Path) -> None:
        RUN_SAMPLES.write(run / SAMPLE, self)


RUN_SAMPLES = Document(RunSample, "train", "delete it, and run the same spheret train again to have a new one")
