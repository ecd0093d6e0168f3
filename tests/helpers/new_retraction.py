"""Add the row of CONTRIBUTING.md at run time, as if it had been pasted at the end of spheret/retractions.py.

`python -m pytest -p new_retraction ...` runs tests with the row. `python tests/helpers/new_retraction.py train ...`
runs a command of spheret with it.
"""

import re
import sys
from pathlib import Path

from spheret import retractions
from spheret.cli import main

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
NAME = "orthographic"


def register():
    (code,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), vars(retractions))


def pytest_configure(config):
    register()


if __name__ == "__main__":
    register()
    sys.exit(main(sys.argv[1:]))
