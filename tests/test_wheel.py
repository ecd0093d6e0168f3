"""What is installed from a wheel, outside this tree, is complete: the C file is in it and builds."""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = """
import pathlib, torch, spheret
from spheret.kernels import chosen, use
assert pathlib.Path(spheret.__file__).is_relative_to(pathlib.Path({prefix!r})), spheret.__file__
assert (pathlib.Path(spheret.__file__).parent / "py.typed").exists()
for name in ("page.html.jinja", "page_parts.html.jinja", "report.css", "report.js", "report_charts.js",
             "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css", "vendor/uPlot.LICENSE", "explorer.html.jinja",
             "explorer.css", "explorer.js"):
    assert (pathlib.Path(spheret.__file__).parent / "report" / name).exists(), name
assert (pathlib.Path(spheret.__file__).parent / "race" / "stage.sbatch.jinja").exists()
assert (pathlib.Path(spheret.__file__).parent / "hub" / "card.md.jinja").exists()
assert (pathlib.Path(spheret.__file__).parent / "study" / "connections.toml").exists()
h = torch.randn(8, 16, requires_grad=True)
with use("native"):
    spheret.retract(h, torch.randn(8, 16)).sum().backward()
print(chosen(h, h), h.grad.isfinite().all().item())
"""


def test_native_backend_from_a_wheel(tmp_path):
    # a copy of what git would hand out, so that no build leaves traces in the tree
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", ROOT / "spheret", source.mkdir() or source], check=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("spheret-*.whl")
    home = tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    # torch is borrowed from this environment; spheret is not
    borrowed = {str(Path(p)) for p in sys.path if p.endswith("site-packages")}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"SPHERET_CACHE": str(tmp_path / "cache")}
    code = SCRIPT.format(prefix=str(site))
    run = subprocess.run(
        [home / "bin" / "python", "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    )
    assert run.stdout.strip() == "native True"
