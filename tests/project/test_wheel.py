"""The wheel outside this tree, with only torch and numpy: complete, the core trains, commands name the lab."""

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from spheret.support.errors import LAB

ROOT = Path(__file__).parents[2]
FILES = """
import pathlib, spheret
package = pathlib.Path(spheret.__file__).parent
assert package.is_relative_to(pathlib.Path({prefix!r})), package
for name in ("py.typed", "lab/executors/stage.sbatch.jinja", "lab/plans/connections.toml"):
    assert (package / name).exists(), name
for name in ("page.html.jinja", "page_parts.html.jinja", "report.css", "report.js", "report_charts.js",
             "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css", "vendor/uPlot.LICENSE"):
    assert (package / "lab" / "page" / name).exists(), name
"""
NATIVE = """
import torch, spheret
from spheret.kernels import chosen, use
h = torch.randn(8, 16, requires_grad=True)
with use("native"):
    spheret.retract(h, torch.randn(8, 16)).sum().backward()
print(chosen(h, h), h.grad.isfinite().all().item())
"""
TRAIN = """
import torch, spheret
torch.manual_seed(0)
config = spheret.GPTConfig(layers=2, heads=2, width=16, block=8, vocab=11, scheme="proj-spheretnorm")
model = spheret.GPT(config)
optimizer = torch.optim.AdamW(spheret.parameter_groups(model, 0.1), lr=1e-2)
x = torch.arange(32).reshape(4, 8) % 11
losses = []
for _ in range(20):
    losses.append(model(x, (x + 1) % 11))
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
assert losses[-1] < losses[0] - 0.5, losses
"""

pytestmark = pytest.mark.slow


def needed(package):
    """A distribution of this environment and all that it needs, without its extras."""
    distributions, waiting = {}, [package]
    while waiting:
        name = waiting.pop()
        if name not in distributions:
            distributions[name] = importlib.metadata.distribution(name)
            requirements = map(Requirement, distributions[name].requires or ())
            waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return distributions.values()


def link(distribution, site):
    """Link the files and folders that a distribution has put into its site-packages."""
    for name in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
        # several distributions may share a folder
        if not (site / name).exists():
            (site / name).symlink_to(distribution.locate_file(name))


class Environment:
    """A Python that has the wheel, torch, numpy and what these two need. Its home is empty at first."""

    def __init__(self, folder, wheel):
        self.home = folder / "home"
        self.home.mkdir()
        venv.create(folder / "env", with_pip=False, symlinks=True)
        (self.site,) = (folder / "env").glob("lib/python*/site-packages")
        pip("install", "--no-deps", "--target", self.site, wheel)
        for package in ("torch", "numpy"):
            for distribution in needed(package):
                link(distribution, self.site)
        self.python = folder / "env" / "bin" / "python"

    def run(self, *words):
        # nothing chooses the cache here, so that it is the system's place below the home
        ours = ("PYTHONPATH", "SPHERET_CACHE", "XDG_CACHE_HOME")
        env = {name: value for name, value in os.environ.items() if name not in ours} | {"HOME": str(self.home)}
        return subprocess.run([self.python, *words], cwd=self.home, env=env, capture_output=True, text=True)


def pip(*words):
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *words], check=True)


def copied(folder):
    """A copy of what git would hand out, so that no build leaves traces in the tree."""
    source = folder / "source"
    subprocess.run(["cp", "-r", ROOT / "spheret", source.mkdir() or source], check=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "-w", folder, copied(folder))
    (wheel,) = folder.glob("spheret-*.whl")
    return Environment(folder, wheel)


def test_the_environment_has_no_package_of_the_lab_that_torch_does_not_bring(core):
    code = f"from importlib.util import find_spec; print(*[name for name in {LAB!r} if find_spec(name)])"
    assert set(core.run("-c", code).stdout.split()) == {"filelock", "jinja2"}


def test_the_wheel_is_complete(core):
    run = core.run("-c", FILES.format(prefix=str(core.site)))
    assert run.returncode == 0, run.stderr


def test_native_backend_from_a_wheel(core):
    run = core.run("-c", NATIVE)
    assert run.stdout.strip() == "native True", run.stderr
    assert list(core.home.rglob("native-*/*.so"))


def examples():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block for block in blocks if "spheret.data" not in block]


def test_the_examples_of_the_layer_are_in_readme():
    assert any("SpheretNorm(" in block for block in examples())


def test_the_core_runs_them_and_trains(core):
    # in one process, because importing torch takes longer than all of them
    run = core.run("-c", f"for code in {[*examples(), TRAIN]!r}: exec(code, {{}})")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("words", [["--version"], ["--help"]])
def test_the_command_line_answers(words, core):
    run = core.run("-m", "spheret", *words)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("spheret ")


@pytest.mark.parametrize("words", [["race"], ["train", "--help"], ["doctor"]])
def test_a_command_names_what_installs_it(words, core):
    run = core.run("-m", "spheret", *words)
    sentence = f'spheret {words[0]}: safetensors is not installed. Run: pip install "spheret[lab]"\n'
    assert (run.returncode, run.stdout, run.stderr) == (2, "", sentence)


@pytest.mark.parametrize(
    ("code", "extra"),
    [("from spheret.data import cached", "lab"), ("import spheret.hub; spheret.hub.load('x')", "hub")],
)
def test_a_library_call_names_what_installs_it(code, extra, core):
    run = core.run("-c", code)
    assert run.stderr.splitlines()[-1].endswith(f'is not installed. Run: pip install "spheret[{extra}]"')
