"""The tour in docs/tour.ipynb: every cell runs in a real kernel, and what it holds is what comes out."""

import ast
import base64
import json
import re
import struct
from pathlib import Path

import pytest
from scripts import script

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOK = DOCS / "tour.ipynb"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell):
    """What a cell prints, on either stream."""
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def pictures(cell):
    """Every picture of a cell: its bytes and its alternative text."""
    return [
        (base64.b64decode("".join(output["data"]["image/png"])), output["metadata"]["image/png"]["alt"])
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]


def size(png):
    return struct.unpack(">II", png[16:24])


def agree(old, new):
    """Whether two texts have the same words, and numbers that differ by no more than training on another CPU does."""
    if NUMBER.sub("#", old).split() != NUMBER.sub("#", new).split():
        return False
    first, second = ([float(number.replace(",", "")) for number in NUMBER.findall(text)] for text in (old, new))
    return first == pytest.approx(second, rel=0.01, abs=0.02)


@pytest.fixture(scope="module")
def held():
    return json.loads(NOTEBOOK.read_text())


@pytest.fixture(scope="module")
def fresh():
    # raises if a cell fails
    return script("docs/build_tour.py").executed()


def test_what_it_imports_exists(held):
    lines = "".join("".join(cell["source"]) + "\n" for cell in code_cells(held))
    imports = [node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    for node in imports:
        exec(ast.unparse(node), {})


@pytest.mark.slow
def test_the_notebook_holds_what_comes_out(held, fresh):
    for old, new in zip(code_cells(held), code_cells(fresh), strict=True):
        assert agree(printed(old), printed(new)), f"{old['id']}: run make tour\n{printed(old)}\n{printed(new)}"
        shapes = [[(size(png), alt) for png, alt in pictures(cell)] for cell in (old, new)]
        assert shapes[0] == shapes[1], f"{old['id']}: run make tour"
        assert old["execution_count"] == new["execution_count"], f"{old['id']}: run make tour"


@pytest.mark.slow
def test_a_run_leaves_no_trace_of_its_machine(held, fresh):
    metadata = script("docs/build_tour.py").METADATA
    for notebook in (held, fresh):
        assert notebook["metadata"] == metadata
        for cell in notebook["cells"]:
            assert cell["metadata"] == {}
        for cell in code_cells(notebook):
            assert [output.get("name") for output in cell["outputs"] if output.get("name") == "stderr"] == []
            assert not re.search(r"(?:/[\w.-]+){2}", printed(cell)), printed(cell)


@pytest.mark.slow
def test_the_converted_llama_keeps_its_logits(fresh):
    text = {cell["id"]: printed(cell) for cell in code_cells(fresh)}
    assert "the same logits: True" in text["convert"]
    assert "bitwise equal: True" in text["revert"]


def test_the_site_shows_the_whole_notebook(held):
    page = script("docs/conf.py").notebook_page("tour.ipynb", NOTEBOOK.read_text())
    for cell in held["cells"]:
        assert "".join(cell["source"]).partition("\n")[2].strip() in page
    for cell in code_cells(held):
        assert printed(cell).strip() in page
        for png, alt in pictures(cell):
            assert f"![{alt}](data:image/png;base64,{base64.b64encode(png).decode()})" in page
