"""The model card of an export, made from the documents of real runs."""

import json
import re

import pytest
import yaml
from hub_helpers import tiny
from huggingface_hub import ModelCard
from test_hub_transfer import make_run

from spheret.cli import main
from spheret.hub.card import CARD, code
from spheret.hub.transfer import export, import_
from spheret.runs.run import open_run


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A pre-ln run as `spheret train` makes it."""
    path = tmp_path_factory.mktemp("trained") / "run"
    words = ["--layers", "1", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "4", "--steps", "4"]
    words += ["--set", "evaluation.eval_windows=8", "--eval-every", "2", "--quiet"]
    words += ["--set", "train.checkpoint_every=2", "--set", "model.head_bias=none"]
    assert main(["train", "--out", str(path), "--scheme", "pre-ln", "--data", str(prepared), *words]) == 0
    return open_run(path)


@pytest.fixture(scope="module")
def cards(trained, tmp_path_factory):
    """The text of the card of each kind, and of an earlier step."""
    path = tmp_path_factory.mktemp("cards")
    export(trained, path / "spheret")
    export(trained, path / "gpt2", "gpt2")
    export(trained, path / "early", step=2)
    return {each.name: (each / CARD).read_text() for each in path.iterdir()}


class TestCard:
    @pytest.mark.parametrize("kind", ["spheret", "gpt2"])
    def test_the_hub_reads_its_first_lines(self, cards, kind):
        data = ModelCard(cards[kind]).data.to_dict()
        assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
        assert data["tags"][:2] == ["spheret", "pre-ln"]
        assert yaml.safe_load(cards[kind].split("---\n")[1]) == data

    def test_the_loss_and_what_it_does_not_say(self, cards, trained):
        card, state = cards["spheret"], trained.checkpoint().state
        assert f"{state.val_loss:.4f} nats per token, after step 4 of 4" in card
        assert f"{trained.config.data.unigram_entropy:.4f}" in card
        assert "not finished" not in card
        assert "after step 2 of 4" in cards["early"]
        assert "not finished" in cards["early"]

    def test_data_and_settings(self, cards, trained):
        card = cards["spheret"]
        settings = json.loads(re.search(r"```json\n(.*?)\n```", card, re.DOTALL)[1])
        expected = trained.config.as_dict()
        assert settings["model"] == expected["model"]
        assert "path" not in settings["data"]
        assert str(trained.path.parent) not in card
        assert str(trained.config.data.path) not in card
        assert f"{4 * trained.config.train.tokens_per_update:,} tokens" in card
        assert f"{trained.config.data.tokens['train']:,} tokens" in card

    def test_its_snippet_loads_it(self, trained, tmp_path):
        for kind in ("spheret", "gpt2"):
            exported = export(trained, tmp_path / kind, kind)
            (snippet,) = re.findall(r"```python\n(.*?)```", (exported / CARD).read_text(), re.DOTALL)
            namespace = {}
            exec(snippet.replace('"DIR"', repr(str(exported))), namespace)
            assert namespace["tokenizer"].decode(namespace["model"].generate(max_new_tokens=2, do_sample=False)[0])

    def test_weights_from_elsewhere(self, tmp_path):
        run = make_run(tmp_path / "run", tiny("proj-spheretnorm", vocab=320))
        exported = export(run, tmp_path / "hub")
        card = (exported / CARD).read_text()
        assert "not trained by spheret" in card
        again = export(import_(exported, tmp_path / "again"), tmp_path / "hub2")
        assert "`hub`" in (again / CARD).read_text()


def test_text_of_users_stays_a_code_span():
    for text in ("plain", "a`b``c", "", "x\n---\n# y", "x" * 999):
        span = code(text)
        assert span[0] == span[-1] == "`"
        assert not {"`", "\n"} & set(span[1:-1])
