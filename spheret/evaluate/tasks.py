"""The paper's eleven zero-shot tasks: their data sets, the fields of their rows, and evaluation on local rows."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from spheret.evaluate import rows
from spheret.evaluate.eval_json import ROWS, RowsManifest, RowsRecord
from spheret.support.cache import cache_directory
from spheret.support.documents import read_bytes
from spheret.support.errors import need, unknown
from spheret.support.files import check_output_directory, dump, write_atomically


@dataclass(frozen=True)
class Task:
    """A task that lm_eval defines.

    definition: the YAML file, relative to lm_eval/tasks.
    dataset: name and configuration of the data set on the Hugging Face hub.
    split: the split that is evaluated.
    row: the record that every row must fit.
    """

    definition: str
    dataset: tuple[str, str | None]
    split: str
    row: type[msgspec.Struct]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that every row must have."""
        return self.row.__struct_fields__


TASKS: dict[str, Task] = {
    "arc_challenge": Task("arc/arc_challenge.yaml", ("allenai/ai2_arc", "ARC-Challenge"), "test", rows.ArcRow),
    "arc_easy": Task("arc/arc_easy.yaml", ("allenai/ai2_arc", "ARC-Easy"), "test", rows.ArcRow),
    "boolq": Task("super_glue/boolq/default.yaml", ("aps/super_glue", "boolq"), "validation", rows.BoolQRow),
    "hellaswag": Task("hellaswag/hellaswag.yaml", ("Rowan/hellaswag", None), "validation", rows.HellaSwagRow),
    "lambada_openai": Task(
        "lambada/lambada_openai.yaml", ("EleutherAI/lambada_openai", "default"), "test", rows.LambadaRow
    ),
    "openbookqa": Task("openbookqa/openbookqa.yaml", ("allenai/openbookqa", "main"), "test", rows.OpenBookRow),
    "piqa": Task("piqa/piqa.yaml", ("baber/piqa", None), "validation", rows.PiqaRow),
    "sciq": Task("sciq/sciq.yaml", ("allenai/sciq", None), "test", rows.SciqRow),
    "social_iqa": Task("siqa/siqa.yaml", ("lighteval/siqa", None), "validation", rows.SocialRow),
    "winogrande": Task(
        "winogrande/default.yaml", ("allenai/winogrande", "winogrande_xl"), "validation", rows.WinograndeRow
    ),
    "wikitext": Task(
        "wikitext/wikitext.yaml",
        ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"),
        "test",
        rows.WikitextRow,
    ),
}

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

# the directory that --prefetch writes and --data reads: one file of rows per task, and this file
MANIFEST = "manifest.json"
# the rows of the largest task of the paper have some 12 MB
MOST_OF_ROWS = 1 << 28


def row_file(directory: Path, name: str) -> Path:
    """The file with the rows of a task, in a directory of local data."""
    return directory / f"{name}.jsonl"


def _read(path: Path) -> bytes:
    """The bytes of a file of rows."""
    return read_bytes(path, MOST_OF_ROWS, "fetch the rows again with spheret eval --prefetch DIR")


def check_rows(path: Path, content: bytes, task: Task) -> int:
    """Compare every row of a file with the task's record. Returns their number, or raises at the first misfit."""
    decoder, count = msgspec.json.Decoder(task.row), 0
    # str.splitlines would also split at the line separators inside a text
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            decoder.decode(line)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"line {number} of {path}: {error}. A row holds {', '.join(task.fields)}: mend it or remove it."
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {path} is not JSON ({error}): every line must be one row.") from None
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
        hashes[name] = _sha256(content)
    return hashes


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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


def check_include_path(include_path: Path | None, data: Path | None) -> None:
    """Raise unless the directory of own definitions exists and may be used with `--data`."""
    if include_path is None:
        return
    if not include_path.is_dir():
        raise FileNotFoundError(
            f"--include-path {include_path} is not a directory: give one that holds task definitions."
        )
    if data is not None:
        raise ValueError(
            "--include-path and --data do not go together, because --data holds the rows of the paper's tasks: "
            "evaluate your own tasks in a second command, which adds them to the results."
        )


def set_examples(name: str, task: Any, count: int | None) -> None:
    """Set how many examples precede each question of a task: `count`, or the task's own number for None."""
    own = task.get_config("num_fewshot")
    task.set_config(key="num_fewshot", value=count if count is not None else own or 0)
    task.set_fewshot_seed(seed=1234)
    if not count:
        return
    # lm_eval would ignore the count in both cases, and only warn
    if own == 0 or task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise ValueError(
            f"--num-fewshot {count} is not for {name}, which has no examples: leave it out of --tasks, or evaluate "
            f"it without --num-fewshot."
        )
    # the question itself is no example
    if (most := len(list(task.fewshot_docs())) - 1) < count:
        raise ValueError(f"--num-fewshot {count} is too many for {name}: its rows hold at most {most} examples.")


def load_tasks(
    names: list[str], data: Path | None, scratch: Path, include_path: Path | None = None
) -> dict[str, Any]:
    """lm_eval's tasks of these names, on the local rows in `data` if it is given.

    scratch: an empty directory for the definitions of tasks on local rows.
    include_path: a directory of further definitions.
    """
    manager = need("lm_eval.tasks", "eval").TaskManager
    if data is not None:
        write_definitions(data, names, scratch)
        return manager(include_path=str(scratch), include_defaults=False).load(names)
    if include_path is not None:
        # reading lm_eval's thousands of definitions takes seconds, and own tasks need none of them
        own = manager(include_path=str(include_path), include_defaults=False)
        known = own if set(names) <= set(own.all_subtasks) else manager(include_path=str(include_path))
    else:
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


def prefetch(
    directory: Path, names: Iterable[str], sources: Mapping[str, tuple[str, str | None]] | None = None
) -> dict[str, int]:
    """Fetch the rows of these tasks into a directory for `--data`. Returns the number of rows per task.

    A task whose rows are already there is not fetched again.

    sources: data set and configuration per task, as `datasets.load_dataset` takes them, instead of the hub's.
    """
    datasets = need("datasets", "eval")
    check_output_directory("--prefetch", directory)
    path = directory / MANIFEST
    try:
        entries = ROWS.read(path).tasks
    except FileNotFoundError:
        entries = {}
    for name in names:
        if name not in TASKS:
            raise unknown("task to fetch", name, TASKS)
        task = TASKS[name]
        source, configuration = (sources or {}).get(name, task.dataset)
        file = row_file(directory, name)
        with contextlib.suppress(FileNotFoundError):
            if name in entries and _sha256(_read(file)) == entries[name].sha256:
                continue
        try:
            fetched = datasets.load_dataset(
                source, configuration, split=task.split, cache_dir=str(cache_directory() / "datasets")
            )
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise OSError(
                f"{source}, the data of {name}, could not be fetched ({reason}): is there internet?"
            ) from None
        lines = [json.dumps({key: row[key] for key in task.fields}, ensure_ascii=False) for row in fetched]
        content = "".join(line + "\n" for line in lines).encode()
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
        entries[name] = RowsRecord(
            dataset=source, configuration=configuration, split=task.split, rows=len(lines), sha256=_sha256(content)
        )
        ROWS.write(path, RowsManifest(tasks=entries))
    return {name: entries[name].rows for name in names}
