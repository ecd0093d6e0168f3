"""What a user sees who never imports spheret: the remote-code file of an export; and the commands' help."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hub_helpers import tiny
from test_hub_transfer import make_run
from transformers import AutoModelForCausalLM

from spheret.hub.config import CLASSES, CODE
from spheret.hub.transfer import export

# one process for all: importing transformers takes seconds. A module that is None in sys.modules is not installed
SCRIPT = """
import json, sys
import transformers, torch

folder, said = sys.argv[1], {}


def tried(load, *options, **more):
    try:
        return load(folder, *options, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


sys.modules["spheret"] = None
said["absent"] = tried(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=True)
del sys.modules["spheret"]
said["refused"] = tried(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=False)
assert not [name for name in sys.modules if name.startswith("spheret")]
for name in CLASSES:
    loaded = tried(getattr(transformers, name).from_pretrained, trust_remote_code=True)
    said[name] = type(loaded).__name__
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer(["We the People", "Fellow"], padding=True, return_tensors="pt")
said["text"] = tokenizer.batch_decode(model.generate(**ids, max_new_tokens=5, do_sample=False))
model.save_pretrained(folder + "/again")
writer = transformers.pipeline("text-generation", model=folder, trust_remote_code=True)
said["pipeline"] = writer("Fellow", max_new_tokens=5, do_sample=False)[0]["generated_text"]
json.dump(said, open(sys.argv[2], "w"))
"""


# it starts a process that imports transformers twice
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The export, and what a process that loads it says."""
    path = tmp_path_factory.mktemp("remote")
    model = tiny("proj-spheretnorm", vocab=320, block=64, head_bias="unigram")
    exported = export(make_run(path / "run", model), path / "hub")
    script = SCRIPT.replace("CLASSES", repr(list(CLASSES)))
    done = subprocess.run(
        [sys.executable, "-c", script, str(exported), str(path / "said.json")],
        capture_output=True, text=True, check=False, timeout=300, stdin=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(path / "modules")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return exported, json.loads((path / "said.json").read_text())


class TestWithoutAnImport:
    def test_every_auto_class(self, outcome):
        assert {name: outcome[1][name] for name in CLASSES} == CLASSES

    def test_spheret_is_not_installed(self, outcome):
        assert outcome[1]["absent"] == (
            'ImportError: This model needs the package spheret. Run: pip install "spheret[hub]"'
        )

    def test_nobody_trusts_it(self, outcome):
        assert "contains custom code" in outcome[1]["refused"]
        assert "trust_remote_code=True" in outcome[1]["refused"]

    def test_text(self, outcome):
        from transformers import AutoTokenizer

        exported, said = outcome
        tokenizer, model = (each.from_pretrained(exported) for each in (AutoTokenizer, AutoModelForCausalLM))
        ids = tokenizer(["We the People", "Fellow"], padding=True, return_tensors="pt")
        assert said["text"] == tokenizer.batch_decode(model.generate(**ids, max_new_tokens=5, do_sample=False))
        alone = tokenizer("Fellow", return_tensors="pt")
        generated = model.generate(**alone, max_new_tokens=5, do_sample=False)[0]
        assert said["pipeline"] == tokenizer.decode(generated, skip_special_tokens=True)

    def test_a_model_that_was_saved_again(self, outcome):
        """It has the same small file, and not a copy of spheret's source."""
        again = outcome[0] / "again"
        assert [path.read_bytes() for path in again.glob("*.py")] == [CODE.read_bytes()]
        assert json.loads((again / "config.json").read_bytes())["auto_map"] == {
            auto: f"{CODE.stem}.{ours}" for auto, ours in CLASSES.items()
        }
        first, second = (AutoModelForCausalLM.from_pretrained(path) for path in (outcome[0], again))
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
