"""Files that a user gives: something else in the place of one, or one that is too large, is one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import damage
import pytest
from small_models import TINY

from spheret.data import open_data, prepare, tokenizers
from spheret.data.tokenizers import describe
from spheret.evaluate import tasks
from spheret.evaluate.eval_json import ROWS, RowsManifest, RowsRecord
from spheret.hub.transfer import export, import_
from spheret.model.gpt import GPT, GPTConfig
from spheret.runs.config import read_config
from spheret.runs.run import create_run, manifest_sha256, open_run

LOCAL_ROWS = Path(__file__).parents[1] / "evaluate" / "rows"
TASK = "sciq"
# what stands in the place of a file
KINDS = ("grown", "directory", "pipe", "device", "link", "link to itself")


class Reader(NamedTuple):
    """A file below the stage, and a function of the stage that reads it.

    links: whether the file may be reached by a link that stays in its directory.
    bounded: whether spheret reads the whole file at once, so that its size has a bound.
    """

    file: str
    read: Callable[[Path], object]
    links: bool = False
    bounded: bool = True


def _import(kind: str) -> Callable[[Path], object]:
    return lambda stage: import_(stage / kind, stage / "imported")


def _counts(stage: Path) -> Any:
    data = open_data(stage / "data")
    return data.counts()


READERS: dict[str, Reader] = {
    "the config of an import": Reader("whole/config.json", _import("whole"), links=True),
    "the tokenizer of an import": Reader("whole/tokenizer.json", _import("whole"), links=True),
    "the weights of an import": Reader("whole/model.safetensors", _import("whole"), links=True, bounded=False),
    "the index of an import": Reader("split/model.safetensors.index.json", _import("split"), links=True),
    "a part of an import": Reader("split/part.safetensors", _import("split"), links=True, bounded=False),
    "the tokenizer that an import is given": Reader(
        "whole/tokenizer.json",
        lambda stage: import_(stage / "whole", stage / "imported", str(stage / "whole" / "tokenizer.json")),
        links=True,
    ),
    "the tokenizer of an export": Reader(
        "run/tokenizer.json", lambda stage: export(open_run(stage / "run"), stage / "exported"), links=True
    ),
    "the rows of eval": Reader(f"rows/{TASK}.jsonl", lambda stage: tasks.check_data(stage / "rows", [TASK])),
    "the rows of eval --prefetch": Reader(
        f"rows/{TASK}.jsonl", lambda stage: tasks.prefetch(stage / "rows", [TASK], {TASK: ("nowhere", None)})
    ),
    "--config, TOML": Reader("config.toml", lambda stage: read_config(stage / "config.toml"), links=True),
    "--config, JSON": Reader("config.json", lambda stage: read_config(stage / "config.json"), links=True),
    "--tokenizer": Reader("tokenizer.json", lambda stage: tokenizers.load(str(stage / "tokenizer.json")), links=True),
    "the counts of data": Reader("data/counts.bin", _counts, links=True),
    "the manifest of data": Reader("data/manifest.json", lambda stage: manifest_sha256(open_data(stage / "data"))),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stage on which every reader succeeds."""
    stage = tmp_path_factory.mktemp("stage")
    (stage / "texts").mkdir()
    for number in range(9):
        (stage / "texts" / f"{number}.txt").write_text(f"some text number {number}, and more of it. " * 9)
    data = prepare(str(stage / "texts"), "bpe:300", stage / "data", val_fraction=0.3)
    tokenizer = data.tokenizer()
    run = create_run(stage / "run", GPT(GPTConfig(**{**TINY, "vocab": 320})), describe(tokenizer), tokenizer.file)
    export(run, stage / "whole")
    shutil.copytree(stage / "whole", stage / "split")
    (stage / "split" / "model.safetensors").rename(stage / "split" / "part.safetensors")
    (stage / "split" / "model.safetensors.index.json").write_text('{"weight_map": {"all": "part.safetensors"}}')
    shutil.copytree(LOCAL_ROWS, stage / "rows")
    hashes = tasks.check_data(stage / "rows", [TASK])
    record = RowsRecord(dataset="a", configuration=None, split="test", rows=1, sha256=hashes[TASK])
    ROWS.write(stage / "rows" / "manifest.json", RowsManifest(tasks={TASK: record}))
    shutil.copy(stage / "data" / "tokenizer.json", stage)
    (stage / "config.toml").write_text("[train]\nsteps = 3\n")
    (stage / "config.json").write_text('{"train": {"steps": 3}}')
    return stage


@pytest.mark.parametrize("name", READERS)
def test_what_stands_in_the_place_of_a_file(name: str, whole: Path, tmp_path: Path) -> None:
    reader, stage = READERS[name], tmp_path / "stage"
    # the folder of the file is enough, or the file alone
    top = Path(reader.file).parts[0]
    for kind in ("whole", *KINDS):
        stage.mkdir()
        (shutil.copytree if (whole / top).is_dir() else shutil.copy)(whole / top, stage / top)
        path = stage / reader.file
        if kind in damage.FILES:
            damage.FILES[kind](path)
        if kind == "whole" or (kind == "link" and reader.links):
            reader.read(stage)
        else:
            with pytest.raises((ValueError, OSError)) as caught:
                reader.read(stage)
            said = str(caught.value)
            # the path, what is wrong with it, and what to do
            assert str(path) in said, (kind, said)
            assert ": " in said, (kind, said)
            assert said.endswith("."), (kind, said)
            assert "\n" not in said, (kind, said)
            assert "Errno" not in said, (kind, said)
            if kind == "grown" and reader.bounded:
                assert "4,294,967,296 bytes" in said, said
        shutil.rmtree(stage)
