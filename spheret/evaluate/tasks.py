"""The paper's eleven zero-shot tasks: their data sets, the types of their rows, and evaluation on local rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from spheret.support.cache import cache_directory
from spheret.support.documents import read_bytes
from spheret.support.errors import need, unknown
from spheret.support.files import check_output_directory, dump, write_atomically

# a text with at least one character that is not white space
Text = Annotated[str, Meta(pattern=r"\S")]
TwoTexts = Annotated[list[Text], Meta(min_length=2)]


class Choices(msgspec.Struct):
    """The answers of a question and their labels."""

    text: TwoTexts
    label: TwoTexts


@dataclass(frozen=True)
class Task:
    """A task that lm_eval defines.

    definition: the YAML file, relative to lm_eval/tasks.
    dataset: name and configuration of the data set on the Hugging Face hub.
    split: the split that is evaluated.
    row: the fields that every row must have, with their types. lm_eval would read a text in the place of a list
        letter by letter, and count a label that names no answer as a wrong answer.
    """

    definition: str
    dataset: tuple[str, str | None]
    split: str
    row: dict[str, Any]


_LETTER = Annotated[str, Meta(pattern="^[A-E1-5]$")]
_ARC = {"question": Text, "choices": Choices, "answerKey": _LETTER}
TASKS: dict[str, Task] = {
    "arc_challenge": Task("arc/arc_challenge.yaml", ("allenai/ai2_arc", "ARC-Challenge"), "test", _ARC),
    "arc_easy": Task("arc/arc_easy.yaml", ("allenai/ai2_arc", "ARC-Easy"), "test", _ARC),
    "boolq": Task(
        "super_glue/boolq/default.yaml", ("aps/super_glue", "boolq"), "validation",
        {"question": Text, "passage": str, "label": Literal[0, 1]},
    ),
    "hellaswag": Task(
        "hellaswag/hellaswag.yaml", ("Rowan/hellaswag", None), "validation",
        {
            "ctx_a": Text, "ctx_b": str, "activity_label": str, "endings": TwoTexts,
            "label": Literal["0", "1", "2", "3"],
        },
    ),
    "lambada_openai": Task(
        "lambada/lambada_openai.yaml", ("EleutherAI/lambada_openai", "default"), "test",
        # a last word and something before it
        {"text": Annotated[str, Meta(pattern=r"\S\s+\S")]},
    ),
    "openbookqa": Task(
        "openbookqa/openbookqa.yaml", ("allenai/openbookqa", "main"), "test",
        {"question_stem": Text, "choices": Choices, "answerKey": _LETTER},
    ),
    "piqa": Task(
        "piqa/piqa.yaml", ("baber/piqa", None), "validation",
        {"goal": Text, "sol1": Text, "sol2": Text, "label": Literal[0, 1]},
    ),
    "sciq": Task(
        "sciq/sciq.yaml", ("allenai/sciq", None), "test",
        {
            "question": Text, "support": str, "distractor1": Text, "distractor2": Text, "distractor3": Text,
            "correct_answer": Text,
        },
    ),
    "social_iqa": Task(
        "siqa/siqa.yaml", ("lighteval/siqa", None), "validation",
        {
            "question": Text, "context": str, "answerA": Text, "answerB": Text, "answerC": Text,
            "label": Literal["1", "2", "3"],
        },
    ),
    "winogrande": Task(
        "winogrande/default.yaml", ("allenai/winogrande", "winogrande_xl"), "validation",
        {
            "sentence": Annotated[str, Meta(pattern="_")], "option1": Text, "option2": Text,
            "answer": Literal["1", "2"],
        },
    ),
    "wikitext": Task(
        "wikitext/wikitext.yaml", ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"), "test", {"page": Text}
    ),
}  # fmt: skip

# metrics that are shares of right answers; every other metric of the paper is a perplexity
ACCURACIES = ("acc", "acc_norm")
_SHORT_METRICS = {"acc": "acc", "acc_norm": "acc_n", "perplexity": "ppl", "word_perplexity": "ppl"}


class Column(NamedTuple):
    """A column of the paper's zero-shot tables: the paper's name of the task, and lm_eval's task and metric."""

    name: str
    task: str
    metric: str

    @property
    def heading(self) -> str:
        """The name with the metric, as in "ARC-C acc_n". Two columns are named "LMB."; their headings differ."""
        return f"{self.name} {_SHORT_METRICS[self.metric]}"

    @property
    def higher_is_better(self) -> bool:
        return self.metric in ACCURACIES


# the twelve columns of the paper's tables, in their order. the paper names neither the variant of LAMBADA nor the
# metric of WikiText: lambada_openai and word perplexity are the usual ones
PAPER_COLUMNS = (
    Column("ARC-C", "arc_challenge", "acc_norm"),
    Column("ARC-E", "arc_easy", "acc_norm"),
    Column("BoolQ", "boolq", "acc"),
    Column("HellaSwag", "hellaswag", "acc_norm"),
    Column("LMB.", "lambada_openai", "acc"),
    Column("OBQA", "openbookqa", "acc_norm"),
    Column("PIQA", "piqa", "acc_norm"),
    Column("SciQ", "sciq", "acc"),
    Column("SocialIQa", "social_iqa", "acc"),
    Column("WinoGrande", "winogrande", "acc"),
    Column("LMB.", "lambada_openai", "perplexity"),
    Column("Wiki.", "wikitext", "word_perplexity"),
)

# the rows of the largest task of the paper have some 12 MB
MOST_OF_ROWS = 1 << 28


def row_file(directory: Path, name: str) -> Path:
    """The file with the rows of a task, in a directory that --prefetch writes and --data reads."""
    return directory / f"{name}.jsonl"


def _read(path: Path) -> bytes:
    """The bytes of a file of rows."""
    return read_bytes(path, MOST_OF_ROWS, "fetch the rows again with spheret eval --prefetch DIR")


def check_rows(path: Path, content: bytes, task: Task) -> int:
    """Compare every row of a file with the task's types. Returns their number, or raises at the first misfit."""
    decoder, count = msgspec.json.Decoder(msgspec.defstruct("Row", list(task.row.items()))), 0
    # str.splitlines would also split at the line separators inside a text
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            decoder.decode(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"line {number} of {path}: {error}. A row holds {', '.join(task.row)}: fix it or remove it."
            ) from None
        count = number
    return count


def check_data(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Check every row of these tasks. Returns the SHA-256 of each task's file."""
    hashes = {}
    for name in names:
        if name not in TASKS:
            raise unknown_task(name, TASKS)
        path = row_file(directory, name)
        try:
            content = _read(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no rows of {name} at {path}: fetch them with spheret eval --prefetch {directory}."
            ) from None
        if not check_rows(path, content, TASKS[name]):
            raise ValueError(f"{path} holds no rows: fetch them with spheret eval --prefetch DIR.")
        hashes[name] = hashlib.sha256(content).hexdigest()
    return hashes


def write_definitions(directory: Path, names: Iterable[str], out: Path) -> None:
    """Write one definition per task: lm_eval's own, except that the rows come from `directory`."""
    bundled = Path(need("lm_eval.tasks", "eval").__file__ or "").parent
    for name in names:
        task = TASKS[name]
        # JSON is valid YAML. the other splits only supply few-shot examples, which then come from the same rows
        definition = {
            "include": str(bundled / task.definition),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {task.split: str(row_file(directory, name).resolve())},
                "cache_dir": str(cache_directory() / "datasets"),
            },
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{task.split}_split": task.split,
        }
        write_atomically(out / f"{name}.yaml", dump(definition))


def parse_tasks(text: str) -> list[str]:
    """The task names of `--tasks`: names separated by commas, or "paper" for all eleven."""
    names = list(TASKS) if text == "paper" else [name.strip() for name in text.split(",")]
    if not any(names):
        raise ValueError(f'--tasks {text!r} names no task: give "paper", or names separated by commas.')
    return list(dict.fromkeys(filter(None, names)))


def load_tasks(names: list[str], data: Path | None, scratch: Path) -> dict[str, Any]:
    """lm_eval's tasks of these names, on the local rows in `data` if it is given.

    scratch: an empty directory for the definitions of tasks on local rows.
    """
    manager = need("lm_eval.tasks", "eval").TaskManager
    if data is not None:
        write_definitions(data, names, scratch)
        return manager(include_path=str(scratch), include_defaults=False).load(names)
    known = manager()
    for name in names:
        if name not in known.all_tasks:
            raise unknown_task(name, known.all_tasks)
    try:
        return known.load(names)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise OSError(
            f"the data of {', '.join(names)} is not on this machine and the Hugging Face hub cannot be reached "
            f"({reason}): run spheret eval --prefetch DIR where there is internet, copy DIR here and give --data DIR."
        ) from None


def unknown_task(name: str, known: Iterable[str]) -> ValueError:
    """The error for an unknown task. lm_eval has thousands of tasks, so the message names only the nearest ones."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return ValueError(f"unknown task {name!r}. {hint}The paper's are {', '.join(TASKS)}.")


def prefetch(directory: Path, names: Iterable[str]) -> dict[str, int]:
    """Fetch the rows of these tasks into a directory for `--data`. Returns the number of rows per task.

    A task whose rows are already there is not fetched again.
    """
    datasets = need("datasets", "eval")
    check_output_directory("--prefetch", directory)
    counts = {}
    for name in names:
        if name not in TASKS:
            raise unknown("task to fetch", name, TASKS)
        task, file = TASKS[name], row_file(directory, name)
        if not os.path.lexists(file):
            source, configuration = task.dataset
            try:
                fetched = datasets.load_dataset(
                    source, configuration, split=task.split, cache_dir=str(cache_directory() / "datasets")
                )
            except OSError as error:
                reason = str(error).splitlines()[0]
                raise OSError(
                    f"{source}, the data of {name}, could not be fetched ({reason}): is there internet?"
                ) from None
            lines = [json.dumps({key: row[key] for key in task.row}, ensure_ascii=False) for row in fetched]
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(file, "".join(line + "\n" for line in lines).encode())
        counts[name] = check_rows(file, _read(file), task)
    return counts
