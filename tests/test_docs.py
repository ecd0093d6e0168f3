"""Every python example in README and docs runs, in its own process-like namespace, and prints what it likes."""

import re
from pathlib import Path

import pytest

from spheret import SCHEMES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    exec(compile(example, "example", "exec"), {"__name__": "example"})


def test_the_first_example_keeps_its_promise():
    namespace = {}
    exec(EXAMPLES[0].values[0], namespace)
    lengths = namespace["h"].norm(dim=-1)
    assert lengths.tolist() == pytest.approx([8.0] * 8, rel=1e-5)


def test_every_scheme_is_documented():
    table = (ROOT / "docs" / "methods.md").read_text()
    assert [name for name in SCHEMES if f"| `{name}` |" not in table] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()] == []
