"""Every module can be imported where Python lacks the modules of POSIX, as on Windows."""

import subprocess
import sys

import pytest

from spheret.support.child import python_environment

# what Windows lacks and spheret might want; torch and the other packages have ways of their own
PROGRAM = """
import importlib, pkgutil, sys
for name in (
    "torch.distributed.fsdp", "matplotlib.figure", "rich.progress", "scipy.stats", "tyro",
    "transformers.models.gpt2.modeling_gpt2",
):
    importlib.import_module(name)
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
import spheret
names = [found.name for found in pkgutil.walk_packages(spheret.__path__, "spheret.")]
for name in names:
    # triton is for Linux
    if not name.endswith(("__main__", "triton_rows")):
        importlib.import_module(name)
assert len(names) > 100
"""


@pytest.mark.slow
def test_every_module_is_imported_without_fcntl():
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=python_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
