"""The section with a text of every contestant: the sample.json that each run ends with."""

from __future__ import annotations

import re

from spheret.lab.runs import RunGroup
from spheret.lab.sections.section import Quote, Section
from spheret.runs.layout import SAMPLE
from spheret.runs.run_sample import read_run_sample

# a young model of bytes writes any of them; a page shows those that have a picture, and ends of lines
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff]")


def samples_section(group: RunGroup) -> Section | None:
    """What the first seed of every contestant wrote when its training had ended."""
    quotes, settings = [], set()
    for label, runs in group.contestants.items():
        sample = read_run_sample(runs[0].run.path)
        # that of an earlier end says nothing about a run that went on
        if sample is not None and sample.step == runs[0].step:
            text = _CONTROL.sub("\ufffd", sample.text)
            quotes.append(Quote(label, text, f"{runs[0].name}/{SAMPLE}[text]"))
            settings.add((sample.prompt, sample.tokens, sample.temperature, sample.seed))
    if not quotes:
        return None
    how = "; ".join(
        f"{repr(prompt) if prompt else 'no'} prompt, {tokens} tokens, temperature {temperature:g}, seed {seed}"
        for prompt, tokens, temperature, seed in sorted(settings)
    )
    words = (
        f"What each model writes at the end of its training, as the beginning of a new document: {how}. One short "
        "text shows what a loss means. It ranks nothing."
    )
    return Section("samples", "A sample of text", [words], quotes=quotes)
