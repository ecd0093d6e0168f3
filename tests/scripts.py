"""Scripts of docs and benchmarks, which are no part of the package, as modules."""

import importlib.util
from pathlib import Path

PROJECT = Path(__file__).parent.parent


def script(path):
    """The module in this file of the project."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, PROJECT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
