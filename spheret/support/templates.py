"""Pages from templates. The policy of an HTML page allows only its own scripts, by their hashes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def environment(folder: Path, autoescape: bool = True) -> Environment:
    """The templates of a folder. A name that a template asks for and does not get is an error."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def script_hashes(scripts: Sequence[str]) -> Markup:
    """What the policy of a page allows."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return Markup(" ".join(f"'sha256-{digest}'" for digest in digests))
