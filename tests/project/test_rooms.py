"""The house: imports go one way, rooms keep their private names, and the map names every room."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "spheret"

# a room imports only from rooms on lines above its own. A file within a room has a line of its own if it needs more
# than the room: `spheret convert` opens models and texts, and `spheret.convert` needs only torch
FLOORS = [
    ["support"],
    ["retractions", "schedules", "bounds"],
    ["kernels"],
    ["connections"],
    ["conversion"],
    ["model"],
    ["observe"],
    ["optim"],
    ["data"],
    ["runs"],
    ["flags"],
    ["evaluate", "hub"],
    ["conversion/command"],
    ["observe/inspect"],
    ["paper"],
    ["train"],
    ["lab"],
    ["doctor", "catalogue"],
    ["cli"],
]
# what `pip install spheret` alone serves: rooms that need torch and numpy, and of spheret only support and each other
CORE = ["retractions", "schedules", "bounds", "kernels", "connections", "conversion", "model", "observe", "optim"]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path):
    return home_of(path.relative_to(PACKAGE).with_suffix("").parts)


def home_of(parts):
    """The room of a file or a module, by the parts of its path in the package."""
    inner = "/".join(parts[:2])
    return inner if inner in FLOOR else parts[0]


def rooms():
    return {room_of(path) for path in FILES} - {"__init__", "__main__"}


def module_names(path):
    """The names that a file binds to modules or members of spheret, with where they come from."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "spheret":
                    yield alias.asname or alias.name, alias.name, ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "spheret":
            for alias in node.names:
                yield alias.asname or alias.name, node.module, alias.name


def imported_rooms(path):
    for _, module, member in module_names(path):
        room = home_of([*module.split("."), member][1:])
        # `from spheret import kernels` names a room; `from spheret import __version__` names none
        if room in FLOOR:
            yield room


def test_every_room_has_a_floor():
    assert rooms() == FLOOR.keys()
    # so that the core imports no room of the lab
    assert [room for rooms in FLOORS for room in rooms][: len(CORE) + 1] == ["support", *CORE]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    wrong = {other for other in imported_rooms(path) if other != room and FLOOR[other] >= FLOOR[room]}
    assert not wrong, f"{room} must not import {wrong}"


def test_the_core_imports_no_package_of_an_extra():
    # jinja2 and filelock come with torch, which imports them when it needs them: the core does not
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = {re.match(r"[\w-]+", name)[0].replace("-", "_") for names in extras.values() for name in names}
    # triton_rows is written in Triton, and imported where that is installed
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if room_of(path) in CORE and path.stem != "triton_rows"
    ]
    code = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {requirements - {"spheret"}!r}:
            raise ImportError("not here: " + name)
sys.meta_path.insert(0, Refuse())
import spheret
for module in {modules!r}:
    importlib.import_module(module)
for name in spheret.__all__:
    getattr(spheret, name)
spheret.scheme("proj-spheretnorm").connect(4, 1, 2)
"""
    assert len(modules) > len(CORE)
    run(code)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_room_touches_the_private_names_of_another(path):
    room, modules = room_of(path), {}
    for name, module, member in module_names(path):
        home = home_of([*module.split("."), member][1:])
        if home != room:
            assert not re.match(r"_[^_]", member), f"{module}.{member}"
            modules[name] = home
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert not re.match(r"_[^_]", node.attr), f"{node.value.id}.{node.attr}"


def test_the_map_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"^      (\w+)(?:\.py|/)", text, re.MULTILINE))
    assert named == {room.split("/")[0] for room in rooms()} | {"__init__"}


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("words", [["--version"], ["--help"], [], ["trian"]])
def test_the_command_line_answers_without_torch(words):
    code = f"""
import sys
from spheret.cli import main
main({words!r})
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    assert run(code).splitlines()[-1] == "False False"


def test_every_public_name_is_there():
    code = """
import spheret, sys
assert "torch" not in sys.modules
for name in spheret.__all__:
    getattr(spheret, name)
assert set(spheret.__all__) <= set(dir(spheret))
try:
    spheret.nothing
except AttributeError as error:
    print(error)
"""
    assert run(code) == "module 'spheret' has no attribute 'nothing'\n"


@pytest.mark.parametrize("package", ["spheret", "spheret.data"])
def test_type_checkers_see_the_same_names(package):
    source = (PACKAGE.parent / package.replace(".", "/") / "__init__.py").read_text()
    homes = dict(re.findall(r'^    "(\w+)": "([\w.]+)",', source, re.MULTILINE))
    typed = {
        name: module for module, name in re.findall(r"^    from ([\w.]+) import (\w+) as \w+", source, re.MULTILINE)
    }
    assert typed.keys() == homes.keys()
    assert all(homes[name] in (module, f"{module}.{name}") for name, module in typed.items())
