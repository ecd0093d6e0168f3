"""What a run records about where it ran."""

import subprocess
from pathlib import Path

import pytest

from spheret.support import machine

ROOT = Path(__file__).parents[2]


def test_the_commit_is_that_of_this_tree():
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    # an unpacked archive has no commit
    assert machine.commit() == (head.stdout.strip() if (ROOT / ".git").exists() else None)


def test_a_device_that_is_not_available_is_named():
    assert machine.resolve_device("cpu").type == "cpu"
    with pytest.raises(ValueError, match=r"--device abacus is not available: this machine has .*cpu"):
        machine.resolve_device("abacus")
