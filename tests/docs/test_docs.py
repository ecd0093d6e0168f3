"""The pages of README and docs: examples run, commands parse, links lead somewhere, the reference is complete."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import shlex
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from textwrap import indent

import pytest
import torch
from documented import shown
from scripts import script

import spheret
from spheret import SCHEMES
from spheret.cli import COMMANDS, parse

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")), *sorted(DOCS.rglob("*.ipynb"))]
BLOCK = re.compile(r"```(python|diff)\n(.*?)```|\]\(\.\./examples/(\w+\.py)\)", re.DOTALL)


def text_of(page):
    """The text of a page. Of a notebook it is that of its Markdown cells: tests/docs/test_tour.py runs the others."""
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def changed(source, diff):
    """A text with the parts of a diff applied. A part begins with @@, and its old lines occur once in the text."""
    for part in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        old, new = (
            "".join(f"{line[1:]}\n" for line in part.splitlines() if line[:1] in marks)
            for marks in ((" ", "-", ""), (" ", "+", ""))
        )
        assert source.count(old) == 1, f"these lines are not once in the example before:\n{old}"
        source = source.replace(old, new)
    return source


def examples(page):
    """Every python block of a page, and every diff block applied to the block or the linked example before it."""
    source = None
    for kind, block, linked in BLOCK.findall(text_of(page)):
        if linked:
            source = (ROOT / "examples" / linked).read_text()
        else:
            source = block if kind == "python" else changed(source, block)
            yield source


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# the scripts of the tutorial train when they are run
SCRIPTS = {name: (ROOT / "examples" / name).read_text() for name in ("llama.py", "nanogpt.py", "vit.py")}
EXAMPLES = SCRIPTS | {
    f"{page.name}-{number}": example for page in PAGES for number, example in enumerate(examples(page))
}
# before and after the diff
LLAMA, NANOGPT = ("llama.py", "tutorial.md-0"), ("nanogpt.py", "tutorial.md-1")


def run(example):
    namespace = {"__name__": "example"}
    exec(compile(example, "example", "exec"), namespace)
    return namespace


MARKS = {name: pytest.mark.slow if name in (*SCRIPTS, *LLAMA, *NANOGPT) else () for name in EXAMPLES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in EXAMPLES])
def test_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    namespace = run(EXAMPLES[name])
    # the tutorial says what its models reach
    if name in (*LLAMA, *NANOGPT):
        assert namespace["loss"] < (3.3 if name in NANOGPT else 2.6)
    if name == "vit.py":
        assert namespace["accuracy"] >= 0.9
    if name == "watch.md-0":
        assert shown("watch.md")[0] in capsys.readouterr().out


def test_the_first_example_keeps_its_promise():
    example = run(EXAMPLES["README.md-0"])
    model, entered = example["model"], []
    model.final_norm.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
    model(example["tokens"][:, :-1])
    lengths = entered[0].norm(dim=-1)
    radius = model.entry_norm.radius.item()
    assert lengths.flatten().tolist() == pytest.approx([radius] * lengths.numel(), rel=1e-5)


def test_what_pages_show_of_examples_is_in_them():
    model = EXAMPLES["README.md-0"].partition("class ")[2].partition("\n\n\ntokens = ")[0]
    assert model in (ROOT / "examples" / "decoder.py").read_text()
    # and the tutorial shows a part of the vision transformer
    (forward,) = re.findall(r"```py\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL)
    assert indent(forward, " " * 8) in SCRIPTS["vit.py"]


def test_the_diff_of_the_tutorial_changes_nothing_but_the_connection():
    before, after = (EXAMPLES[name].replace("loss = train(model)", "loss = 0") for name in LLAMA)
    after = after.replace('scheme("normed-spheretnorm")', 'scheme("pre-ln", norm="rmsnorm")')
    tokens = torch.arange(64)[None]
    llama, again = (run(example)["model"](tokens) for example in (before, after))
    # the two RMSNorms differ in their eps
    assert (llama - again).norm() < 0.01 * llama.norm()


def without_the_cure(example, scheme):
    """The tutorial's nanoGPT after its diff, with nanoGPT's own head, under a scheme."""
    for new, old in (
        ("self.lm_head = spheret.Head(self.wte, counts)", "self.lm_head = lambda h: h @ self.wte.weight.T"),
        # nanoGPT draws a weight for its head before it ties it
        ("        std = 0.02\n", "        std, _ = 0.02, nn.Linear(n_embd, vocab_size, bias=False)\n"),
        ('scheme("normed-spheretnorm")', f'scheme("{scheme}")'),
    ):
        assert example.count(new) == 1
        example = example.replace(new, old)
    return example


def test_the_diff_to_nanogpt_changes_nothing_but_the_connection_and_the_cure():
    before, after = (EXAMPLES[name].replace("loss = train(model, text)", "loss = 0") for name in NANOGPT)
    after = without_the_cure(after, "pre-ln")
    tokens = torch.arange(64)[None]
    plain, again = (run(example)["model"](tokens) for example in (before, after))
    assert torch.allclose(plain, again, atol=1e-5)


@pytest.mark.slow
def test_the_diff_to_nanogpt_is_what_lets_it_train():
    example = EXAMPLES[NANOGPT[1]]
    longer = example.replace("loss = train(model, text)", "loss = train(model, text, steps=200)")
    assert run(longer)["loss"] < 2.6
    plain = without_the_cure(example, "proj-spheretnorm")
    assert run(plain.replace("loss = train(model, text)", "loss = train(model, text, steps=100)"))["loss"] > 3.1


def test_every_scheme_is_documented():
    table = (DOCS / "methods.md").read_text()
    assert [name for name in SCHEMES if f"| `{name}` |" not in table] == []


def commands(program):
    """The commands of all indented blocks, as words, without the program. A line may go on after a backslash."""
    lines = {
        line
        for page in PAGES
        for line in re.findall(rf"^    {program}(.*)", re.sub(r" \\\n\s*", " ", text_of(page)), re.MULTILINE)
    }
    every = (shlex.split(line, comments=True) for line in sorted(lines))
    return [words for words in every if words and "..." not in words]


def test_every_command_parses():
    for name, *words in commands("spheret "):
        assert name in COMMANDS, f"no such command: {name}"
        module, _, function = COMMANDS[name][0].partition(":")
        loaded = importlib.import_module(module)
        # raises if a flag is unknown; what it returns would run the command
        parse(getattr(loaded, function), "spheret", getattr(loaded, "rewrite", list)(words))
        # a config or a run that goes on has them; otherwise a training asks for them
        assert name != "train" or {"--steps", "--resume", "--config"} & {*words}, words


def test_every_benchmark_parses():
    # in a sentence they stand between backticks
    quoted = {
        line for page in PAGES for line in re.findall(r"`(?:\w+=\w+ )*python benchmarks/([^`]+)`", text_of(page))
    }
    for name, *words in [*commands("python benchmarks/"), *map(shlex.split, sorted(quoted))]:
        source = (ROOT / "benchmarks" / name).read_text()
        # the others have no flags, or a parser of their own
        if "    run(main)\n" in source:
            parse(script(f"benchmarks/{name}").main, name, words)


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    # code is not searched for links
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?<!`)(`+)(?!`)[^\n]*?(?<!`)\1(?!`)", "", text)
    pictures = [(target, "") for target in re.findall(r'\b(?:src|srcset)="([^"]+)"', text)]
    for target, anchor in [*re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text), *pictures]:
        if target.startswith("http"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_every_page_is_in_the_navigation():
    entries = re.findall(r"^- \[.*", (DOCS / "index.md").read_text(), re.MULTILINE)
    listed = re.findall(r"\]\(([^)#]+)\)", "\n".join(entries))
    assert len(listed) == len(set(listed))
    # README.md is the front page of the repository, and index.md that of the site
    pages = {*PAGES, ROOT / "CHANGELOG.md"} - {ROOT / "README.md", DOCS / "index.md"}
    assert {(DOCS / page).resolve() for page in listed} == {page.resolve() for page in pages}


def test_every_picture_is_shown():
    shown = {
        (page.parent / path).resolve()
        for page in PAGES
        for found in re.findall(r'!\[[^\]]+\]\(([^)]+)\)|<img alt="[^"]+" src="([^"]+)"', text_of(page))
        for path in filter(None, found)
    }
    pictures = [path for path in DOCS.rglob("figures/**/*") if path.suffix in (".png", ".svg")]
    # the same picture for places that show no SVG
    pictures = [path for path in pictures if path.suffix == ".svg" or not path.with_suffix(".svg").exists()]
    # the same picture for dark pages
    pictures = [path for path in pictures if not path.stem.endswith("-dark")]
    assert [str(path) for path in pictures if path.resolve() not in shown] == []


@cache
def reference():
    """The names that the API page lists."""
    return re.findall(r"^- `([\w.]+)`: ", (DOCS / "api.md").read_text(), re.MULTILINE)


STABLE = {f"spheret.{name}" for name in spheret.__all__} - {"spheret.__version__"}


def named():
    """Every name below spheret that an example imports or calls, or that a sentence names, but for modules."""
    names = set(re.findall(r"`(spheret(?:\.\w+)+)(?=[(`])", "\n".join(map(text_of, PAGES))))
    for node in chain.from_iterable(ast.walk(ast.parse(example)) for example in EXAMPLES.values()):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("spheret."):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"spheret(\.\w+)+", ast.unparse(node)):
            names.add(ast.unparse(node))
    return {name for name in names if not inspect.ismodule(pkgutil.resolve_name(name))}


def test_every_public_name_is_in_the_reference():
    listed = set(reference())
    assert len(listed) == len(reference())
    assert sorted(STABLE - listed) == []
    # or a method of a class that is there
    missing = {name for name in named() if name not in listed and name.rpartition(".")[0] not in listed}
    assert sorted(missing) == ["spheret.__all__", "spheret.__version__"]
    assert [name for name in listed if "._" in name] == []


@pytest.mark.parametrize("name", reference())
def test_the_reference_explains_every_argument(name):
    found = pkgutil.resolve_name(name)
    if not callable(found):
        return
    text = inspect.getdoc(found)
    _, arguments, listed = text.partition("Args:\n")
    assert text.endswith((".", "::")) or arguments
    # beyond the stable names a sentence may do, but no list is cut short
    if name in STABLE or arguments:
        # a setting has its help where it is declared, and docs/settings.md lists it
        every = (
            [each.name for each in fields(found) if "setting" not in each.metadata]
            if is_dataclass(found)
            else [each.name for each in inspect.signature(found).parameters.values() if each.kind not in VARIADIC]
        )
        explained = re.findall(r"^    (\w+): ", listed, re.MULTILINE)
        assert [argument for argument in every if argument not in explained] == []


def test_the_table_of_settings_is_what_their_declarations_say():
    settings = script("docs/settings.py")
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), "run python docs/settings.py"
    assert "| `model.head` | `--head` |" in settings.table()
