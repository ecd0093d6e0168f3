"""What is published, and the files that publish it."""

import importlib.util
import io
import re
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

import spheret

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def dist():
    spec = importlib.util.spec_from_file_location("dist", ROOT / ".ci" / "dist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sdist(path, when, names):
    """An archive as setuptools writes it, with times and an owner."""
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(f"spheret-1/{name}")
            member.size, member.mtime, member.uid, member.uname = 3, when, when % 1000, f"user{when}"
            member.mode = 0o775 if name == "run" else 0o664
            archive.addfile(member, io.BytesIO(b"abc"))
    return path


def test_an_sdist_has_the_same_bytes_whoever_builds_it_when(tmp_path):
    names = ["pyproject.toml", "run", "spheret/__init__.py"]
    paths = [sdist(tmp_path / f"{when}.tar.gz", when, order) for when, order in ((1000, names), (2000, names[::-1]))]
    assert paths[0].read_bytes() != paths[1].read_bytes()
    for path in paths:
        dist().packed_again(path, 1_700_000_000)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with tarfile.open(paths[0]) as archive:
        assert [member.name.partition("/")[2] for member in archive] == sorted(names)
        assert {member.mtime for member in archive} == {1_700_000_000}
        assert archive.getmember("spheret-1/run").mode == 0o755
        assert archive.extractfile("spheret-1/run").read() == b"abc"


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == spheret.__version__
    assert citation["license"] == PROJECT["license"]
    assert f"## {spheret.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_is_that_of_the_paper():
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    number = re.search(r"arxiv\.org/abs/([\d.]+\d)", (ROOT / "README.md").read_text())[1]
    assert number in paper["journal"]
    assert paper["title"] in (ROOT / "README.md").read_text()
    assert len(paper["authors"]) == 4


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_is_there(path):
    workflow = yaml.safe_load(path.read_text())
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(workflow):
        # an action has a version, and a step does one thing
        assert ("uses" in step) != ("run" in step)
        assert "@" in step.get("uses", "@")
        for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
            assert target in targets
        for word in re.findall(r"(?:^|\s)((?:tests|\.ci)/\S+)", step.get("run", "")):
            assert (ROOT / word).exists(), word
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())
