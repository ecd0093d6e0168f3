"""The model card of an export, made from the documents of real runs, and the stock GPT-2 of a race's pre-ln run."""

import json
import re
import shutil

import pytest
import torch
import yaml
from hub_helpers import tiny, tokens
from huggingface_hub import ModelCard
from test_hub_transfer import make_run
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from spheret.cli import main
from spheret.hub import to_gpt2
from spheret.hub.card import CARD, code
from spheret.hub.transfer import export, import_
from spheret.model.head import HEADS
from spheret.runs.run import open_run

HOSTILE = (
    "a`b``c|d <script>alert(1)</script>\n---\n# [x](javascript:1) {{ 7*7 }} \u202e \x1b[31m ~~~ ``` " + "x" * 999
)


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A pre-ln run as `spheret train` and a race make it, with the head bias of their recipe."""
    path = tmp_path_factory.mktemp("trained") / "run"
    words = ["--layers", "1", "--heads", "2", "--width", "16", "--block", "32", "--batch-size", "4", "--steps", "4"]
    words += [
        "--eval-windows",
        "8",
        "--eval-every",
        "2",
        "--checkpoint-every",
        "2",
        "--head-bias",
        "unigram",
        "--quiet",
    ]
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

    def test_what_to_install_and_import(self, cards):
        assert 'pip install "spheret[hub]"' in cards["spheret"]
        assert "import spheret.hub\n" in cards["spheret"]
        assert "trust_remote_code=True" in cards["spheret"]
        assert "    pip install transformers\n" in cards["gpt2"]
        assert "import spheret" not in cards["gpt2"]
        assert "folded into the head" in cards["gpt2"]
        assert "folded" not in cards["spheret"]

    def test_the_loss_and_what_it_does_not_say(self, cards, trained):
        card, state = cards["spheret"], trained.checkpoint().state
        assert f"The validation loss is {state.val_loss:.4f} nats per token, after step 4 of 4." in card
        assert "on 8 windows of at most 32 tokens" in card
        assert f"one seed ({trained.config.train.seed})" in card
        assert f"about {trained.config.data.unigram_entropy:.4f}, the entropy of the single tokens" in card
        assert "not finished" not in card
        assert "after step 2 of 4" in cards["early"]
        assert "The training was not finished at this step" in cards["early"]

    def test_data_and_settings(self, cards, trained):
        card = cards["spheret"]
        settings = json.loads(re.search(r"```json\n(.*?)\n```", card, re.DOTALL)[1])
        expected = trained.config.as_dict()
        assert settings["model"] == expected["model"]
        assert "path" not in settings["data"]
        assert str(trained.path.parent) not in card
        assert str(trained.config.data.path) not in card
        seen = 4 * trained.config.train.tokens_per_update
        assert f"saw {seen:,} tokens" in card
        assert f"{trained.config.data.tokens['train']:,} tokens in the split `train` and" in card

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
        assert "were not trained by spheret. No loss was measured." in card
        assert "The training text is not known" in card
        again = export(import_(exported, tmp_path / "again"), tmp_path / "hub2")
        assert "they were imported from `hub`" in (again / CARD).read_text()


HEAD_WORDS = {
    "tied": None,
    "shifted": "reads the channels of the stream shifted by half of the width",
    "untied": "The head has a weight of its own.",
}


@pytest.mark.parametrize("kind", ["spheret", "gpt2"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("head_bias", ["none", "zero"])
def test_what_it_says_of_the_head(kind, head, head_bias, tmp_path):
    model = tiny("pre-ln", vocab=320, head=head, head_bias=head_bias)
    card = (export(make_run(tmp_path / "run", model), tmp_path / "hub", kind) / CARD).read_text()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert [each for each, words in HEAD_WORDS.items() if words and words in card] == [head] * (head != "tied")
    stock, folded = kind == "gpt2", kind == "gpt2" and head_bias == "zero"
    assert ("has no bias of the logits" in card) == folded
    assert ("has no such shift" in card) == (stock and head == "shifted")
    assert ("not tied to the embedding" in card) == (not exported.config.tie_word_embeddings)
    assert f"with {sum(p.numel() for p in exported.parameters()):,} parameters" in card


class TestHostileStrings:
    def test_a_code_span_holds_any_text(self):
        for text in (HOSTILE, "", "`", "``", " a ", "\n", "a`", "`a"):
            span = code(text)
            fence = re.match("`+", span)[0]
            assert span.endswith(fence)
            assert fence not in span[len(fence) : -len(fence)]
            assert span.isprintable()
        assert code("plain") == "`plain`"
        assert code("a`b") == "`` a`b ``"

    def test_a_card_of_hostile_documents(self, trained, tmp_path):
        name = "x` # <b>|--- [a](b)\n---\n{{ 7*7 }}"
        shutil.copytree(trained.path, tmp_path / name)
        path = tmp_path / name / "config.json"
        document = json.loads(path.read_bytes())
        document["data"]["corpus"] |= {"name": HOSTILE, "revision": HOSTILE, "licence": HOSTILE}
        document["environment"]["command"] = HOSTILE
        path.write_text(json.dumps(document))
        card = (export(open_run(tmp_path / name), tmp_path / "hub") / CARD).read_text()
        assert "{{ 7*7 }}" in card
        assert "\u202e" not in card
        assert "\x1b" not in card
        # the first lines end where they should, and the fences are those of the template
        assert ModelCard(card).data.to_dict()["tags"][:2] == ["spheret", "pre-ln"]
        lines = card.splitlines()
        assert [n for n, line in enumerate(lines) if line == "---"] == [
            0,
            lines.index("# `` " + code(name)[3:-3] + " ``") - 1,
        ]
        assert [line for line in lines if line.startswith("```")] == ["```python", "```", "```json", "```"]
        assert len([line for line in lines if line.startswith("#")]) == 5
        # outside code there is nothing of theirs
        outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", re.sub(r"```json\n.*?\n```", "", card, flags=re.DOTALL))
        assert "script" not in outside
        assert "javascript" not in outside


class TestStockGPT2:
    def test_a_races_run_keeps_its_logits(self, trained, tmp_path):
        model = trained.model()
        assert model.config.head_bias == "unigram"
        assert model.head_bias.abs().max() > 5
        stock = AutoModelForCausalLM.from_pretrained(export(trained, tmp_path / "gpt2", "gpt2"))
        assert type(stock) is GPT2LMHeadModel
        assert not stock.config.tie_word_embeddings
        ids = tokens(4, 32, vocab=257)
        torch.testing.assert_close(stock(ids).logits, model(ids), rtol=0, atol=1e-5)

    def test_it_is_imported_with_an_untied_head(self, trained, tmp_path):
        run = import_(export(trained, tmp_path / "gpt2", "gpt2"), tmp_path / "back")
        assert (run.model_config.head, run.model_config.head_bias) == ("untied", "none")
        ids = tokens(4, 32, vocab=257)
        torch.testing.assert_close(run.model()(ids), trained.model()(ids), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("head", HEADS)
    def test_the_fold_is_exact(self, head):
        """In float64 only rounding remains, also for small gains and whatever the norm's bias is."""
        for gain, shift in ((1.0, 0.0), (1e-3, 0.3), (1e-6, 0.0), (-0.5, -1.0)):
            model = tiny("pre-ln", head_bias="zero", head=head).double()
            with torch.no_grad():
                model.final_norm.weight[0], model.final_norm.bias[0] = gain, shift
                model.head_bias.mul_(50)
            logits = model(tokens())
            torch.testing.assert_close(to_gpt2(model)(tokens()).logits, logits, rtol=0, atol=1e-12)

    def test_a_bias_of_zero_stays_tied(self):
        model = tiny("pre-ln", head_bias="zero")
        torch.nn.init.zeros_(model.head_bias)
        stock = to_gpt2(model)
        assert stock.config.tie_word_embeddings
        assert stock.lm_head.weight is stock.transformer.wte.weight

    def test_a_gain_of_zero_is_refused(self):
        model = tiny("pre-ln", head_bias="zero")
        with torch.no_grad():
            model.final_norm.weight[3] = 0
        with pytest.raises(ValueError, match=r"gain .*norm.* 0\.0e\+00"):
            to_gpt2(model)
