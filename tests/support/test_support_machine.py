"""What a run records about where it ran."""

import subprocess
from pathlib import Path

from spheret.support import machine

ROOT = Path(__file__).parents[2]


def test_the_commit_is_that_of_this_tree():
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    # an unpacked archive has no commit
    assert machine.commit() == (head.stdout.strip() if (ROOT / ".git").exists() else None)
