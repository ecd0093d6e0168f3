"""Scripts of docs and benchmarks, which are not part of the package, as modules."""

import importlib.util
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def script(path):
    """The module in this file of the project. It may import from its own folder, as a script does."""
    file = PROJECT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module
