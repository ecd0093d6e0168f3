"""The paper's eleven tasks: where their data comes from, what a row holds, and how local rows take its place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spheret.support.cache import cache_directory
from spheret.support.errors import need, unknown
from spheret.support.files import dump, write_atomically


@dataclass(frozen=True)
class Task:
    """One bundled task definition of lm_eval."""

    # under lm_eval/tasks
    definition: str
    # of the hugging face hub: name and configuration
    dataset: tuple[str, str | None]
    split: str
    # what a row must hold; the first must not be empty
    fields: tuple[str, ...]


_ARC = ("question", "choices", "answerKey")
_SOCIAL = ("question", "context", "answerA", "answerB", "answerC", "label")
_SCIQ = ("question", "support", "distractor1", "distractor2", "distractor3", "correct_answer")

CHOICES = {"text", "label"}

TASKS: dict[str, Task] = {
    "arc_challenge": Task("arc/arc_challenge.yaml", ("allenai/ai2_arc", "ARC-Challenge"), "test", _ARC),
    "arc_easy": Task("arc/arc_easy.yaml", ("allenai/ai2_arc", "ARC-Easy"), "test", _ARC),
    "boolq": Task(
        "super_glue/boolq/default.yaml", ("aps/super_glue", "boolq"), "validation", ("question", "passage", "label")
    ),
    "hellaswag": Task(
        "hellaswag/hellaswag.yaml",
        ("Rowan/hellaswag", None),
        "validation",
        ("ctx_a", "ctx_b", "activity_label", "endings", "label"),
    ),
    "lambada_openai": Task(
        "lambada/lambada_openai.yaml", ("EleutherAI/lambada_openai", "default"), "test", ("text",)
    ),
    "openbookqa": Task(
        "openbookqa/openbookqa.yaml",
        ("allenai/openbookqa", "main"),
        "test",
        ("question_stem", "choices", "answerKey"),
    ),
    "piqa": Task("piqa/piqa.yaml", ("baber/piqa", None), "validation", ("goal", "sol1", "sol2", "label")),
    "sciq": Task("sciq/sciq.yaml", ("allenai/sciq", None), "test", _SCIQ),
    "social_iqa": Task("siqa/siqa.yaml", ("lighteval/siqa", None), "validation", _SOCIAL),
    "winogrande": Task(
        "winogrande/default.yaml",
        ("allenai/winogrande", "winogrande_xl"),
        "validation",
        ("sentence", "option1", "option2", "answer"),
    ),
    "wikitext": Task(
        "wikitext/wikitext.yaml", ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"), "test", ("page",)
    ),
}

# the twelve columns of the paper's tables, in their order: heading, task and metric. It names neither the variant of
# LAMBADA nor the metric of WikiText: these are lambada_openai and word perplexity
PAPER_TASKS: tuple[tuple[str, str, str], ...] = (
    ("ARC-C", "arc_challenge", "acc_norm"),
    ("ARC-E", "arc_easy", "acc_norm"),
    ("BoolQ", "boolq", "acc"),
    ("HellaSwag", "hellaswag", "acc_norm"),
    ("LMB.", "lambada_openai", "acc"),
    ("OBQA", "openbookqa", "acc_norm"),
    ("PIQA", "piqa", "acc_norm"),
    ("SciQ", "sciq", "acc"),
    ("SocialIQa", "social_iqa", "acc"),
    ("WinoGrande", "winogrande", "acc"),
    ("LMB.", "lambada_openai", "perplexity"),
    ("Wiki.", "wikitext", "word_perplexity"),
)

MANIFEST = "manifest.json"


def row_file(directory: Path, name: str) -> Path:
    """Where the rows of a task lie in a directory of local data."""
    return directory / f"{name}.jsonl"


def read_rows(path: Path, task: Task) -> Iterator[dict[str, Any]]:
    """The rows of a file, each checked to have what the task asks of it."""
    # as bytes: a string would also be cut at line separators inside a text
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is no JSON ({error}): one row a line.") from None
        for name in task.fields:
            if not isinstance(row, dict) or row.get(name) is None:
                raise ValueError(f"line {number} of {path} has no {name!r}: a row holds {', '.join(task.fields)}.")
        if "choices" in task.fields and not (isinstance(row["choices"], dict) and set(row["choices"]) >= CHOICES):
            raise ValueError(f"line {number} of {path} has 'choices' without 'text' and 'label', a list each.")
        if not str(row[task.fields[0]]).strip():
            raise ValueError(f"line {number} of {path} has an empty {task.fields[0]!r}: remove the row, or fill it.")
        yield row


def check_data(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of every task's file, after all of its rows have been looked at."""
    found = {}
    for name in names:
        if name not in TASKS:
            raise ValueError(f"{name} has no local rows: --data serves {', '.join(TASKS)}.")
        path = row_file(directory, name)
        if not path.is_file():
            raise FileNotFoundError(
                f"no rows of {name} at {path}: fetch them with spheret eval --prefetch {directory}."
            )
        if not sum(1 for _ in read_rows(path, TASKS[name])):
            raise ValueError(f"{path} holds no rows: fetch them with spheret eval --prefetch DIR.")
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def write_definitions(directory: Path, names: Iterable[str], out: Path) -> None:
    """For each task a definition that is lm_eval's own but for where its rows lie."""
    bundled = Path(need("lm_eval.tasks", "eval").__file__ or "").parent
    for name in names:
        task = TASKS[name]
        # JSON is YAML; rows of other splits serve examples in the prompt alone, and there are none
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


def names_of(asked: str) -> list[str]:
    """The tasks that `--tasks` means: "paper" is all eleven."""
    names = list(TASKS) if asked == "paper" else [name.strip() for name in asked.split(",")]
    if not any(names):
        raise ValueError(f'no task is named by {asked!r}: give "paper", or names separated by commas.')
    return list(dict.fromkeys(filter(None, names)))


def load(names: list[str], data: Path | None, scratch: Path) -> dict[str, Any]:
    """lm_eval's tasks by these names, on local rows where there is a directory of them."""
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
            f"the data of {', '.join(names)} is not here and the Hugging Face hub not in reach ({reason}): run "
            "spheret eval --prefetch DIR where there is internet, bring DIR here and give --data DIR."
        ) from None


def unknown_task(name: str, known: Iterable[str]) -> ValueError:
    """The error for a task that lm_eval does not have: it has thousands, so only the nearest are named."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return ValueError(f"unknown task {name!r}. {hint}The paper's are {', '.join(TASKS)}.")


def prefetch(
    directory: Path, names: Iterable[str], sources: Mapping[str, tuple[str, str | None]] | None = None
) -> dict[str, int]:
    """Write the rows of these tasks for `--data`, and how many there are of each; what is there is not fetched again.

    sources: other places than the hub's, as `datasets.load_dataset` takes them.
    """
    datasets = need("datasets", "eval")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / MANIFEST
    manifest = json.loads(path.read_bytes()) if path.exists() else {}
    for name in names:
        if name not in TASKS:
            raise unknown("task to fetch", name, TASKS)
        task = TASKS[name]
        source, configuration = (sources or {}).get(name, task.dataset)
        file = row_file(directory, name)
        if (
            name in manifest
            and file.exists()
            and hashlib.sha256(file.read_bytes()).hexdigest() == manifest[name]["sha256"]
        ):
            continue
        try:
            rows = datasets.load_dataset(
                source, configuration, split=task.split, cache_dir=str(cache_directory() / "datasets")
            )
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise OSError(
                f"{source}, the data of {name}, could not be fetched ({reason}): is there internet?"
            ) from None
        lines = [json.dumps({key: row[key] for key in task.fields}, ensure_ascii=False) for row in rows]
        content = "".join(line + "\n" for line in lines).encode()
        write_atomically(file, content)
        manifest[name] = {
            "dataset": source,
            "configuration": configuration,
            "split": task.split,
            "rows": len(lines),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        write_atomically(path, dump(manifest))
    return {name: manifest[name]["rows"] for name in names}
