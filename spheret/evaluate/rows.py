"""The rows of the paper's tasks, each a typed record: what lm_eval would read without a look is checked here.

A label that names no answer would count as a wrong answer, and a text in the place of a list would be read letter by
letter. Rows may have more fields than these.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

# a text with at least one character that is not white space
Text = Annotated[str, msgspec.Meta(pattern=r"\S")]


class Choices(msgspec.Struct):
    """The answers of a question and their labels."""

    text: list[Text]
    label: list[Text]

    def __post_init__(self) -> None:
        if len(self.text) < 2 or len(self.text) != len(self.label) or len(set(self.label)) != len(self.label):
            raise ValueError(
                f"'text' and 'label' must be lists of one length with different labels, got {len(self.text)} texts "
                f"and the labels {', '.join(self.label)}"
            )

    def check(self, key: str) -> None:
        if key not in self.label:
            raise ValueError(f"'answerKey' is {key!r}, and the labels are {', '.join(self.label)}")


class ArcRow(msgspec.Struct):
    question: Text
    choices: Choices
    answerKey: str

    def __post_init__(self) -> None:
        self.choices.check(self.answerKey)


class OpenBookRow(msgspec.Struct):
    question_stem: Text
    choices: Choices
    answerKey: str

    def __post_init__(self) -> None:
        self.choices.check(self.answerKey)


class BoolQRow(msgspec.Struct):
    question: Text
    passage: str
    label: Literal[0, 1]


class HellaSwagRow(msgspec.Struct):
    ctx_a: Text
    ctx_b: str
    activity_label: str
    endings: list[Text]
    # the number of the right ending, as text
    label: str

    def __post_init__(self) -> None:
        if self.label not in map(str, range(len(self.endings))):
            raise ValueError(f"'label' is {self.label!r}, and there are {len(self.endings)} endings, counted from 0")


class LambadaRow(msgspec.Struct):
    text: Text

    def __post_init__(self) -> None:
        if len(self.text.split()) < 2:
            raise ValueError("'text' must have a last word and something before it")


class PiqaRow(msgspec.Struct):
    goal: Text
    sol1: Text
    sol2: Text
    label: Literal[0, 1]


class SciqRow(msgspec.Struct):
    question: Text
    # may be empty
    support: str
    distractor1: Text
    distractor2: Text
    distractor3: Text
    correct_answer: Text


class SocialRow(msgspec.Struct):
    question: Text
    context: str
    answerA: Text
    answerB: Text
    answerC: Text
    label: Literal["1", "2", "3"]


class WinograndeRow(msgspec.Struct):
    sentence: Annotated[str, msgspec.Meta(pattern="_")]
    option1: Text
    option2: Text
    answer: Literal["1", "2"]


class WikitextRow(msgspec.Struct):
    page: Text
