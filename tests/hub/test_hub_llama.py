"""Exports as transformers' own Llama and Qwen3, and of the modern backbone as spheret."""

import pytest
import torch
from hub_helpers import tiny, tokens
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    Qwen3ForCausalLM,
)

from spheret.cli import main
from spheret.data.tokenizers import describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.hub import SpheretForCausalLM
from spheret.hub.llama import to_transformers
from spheret.hub.transfer import export, import_
from spheret.runs.run import create_run

BACKBONE = {"positions": "rope", "mlp": "swiglu", "norm": "rmsnorm", "heads": 4, "kv_heads": 2, "vocab": 320}
CLASSES = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}


def make_run(path, **changes):
    tokenizer = load_tokenizer("bytes", ())
    model = tiny(**{"scheme": "pre-ln", **BACKBONE, **changes})
    return create_run(path, model, describe(tokenizer), tokenizer.file), model


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"bias": True, "rope_base": 500.0}),
        ("qwen3", {"bias": False, "qk_norm": True}),
        ("spheret", {"qk_norm": True, "scheme_options": {"prores": 10.0}}),
    ],
)
def test_an_export_computes_what_the_run_does(kind, changes, tmp_path, capsys):
    run, model = make_run(tmp_path / "run", **changes)
    assert main(["export", str(run.path), "--out", str(tmp_path / "hub"), "--as", kind]) == 0
    assert "AutoModelForCausalLM" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert isinstance(loaded, CLASSES.get(kind, torch.nn.Module))
    card = (tmp_path / "hub" / "README.md").read_text()
    assert ("spheret[hub]" in card, f"as a stock {kind.capitalize()}" in card) == (kind == "spheret", kind in CLASSES)
    truth = model(tokens())
    assert (loaded(tokens()).logits - truth).abs().max() <= 1e-5 * truth.abs().max()
    prompt = tokens(2, 5)
    generated = loaded.generate(prompt, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(prompt))
    ours = model.generate(prompt, 8, temperature=0)
    # bytes have an end of text, after which transformers goes on with padding
    assert torch.equal(generated[:, :6], ours[:, :6])
    if kind == "spheret":
        back = import_(tmp_path / "hub", tmp_path / "back")
        assert back.config.model == model.config
        assert torch.equal(back.model()(tokens()), truth)
    else:
        assert loaded.config.rope_parameters["rope_theta"] == model.config.rope_base


@pytest.mark.parametrize("head", ["shifted", "untied"])
@pytest.mark.parametrize(
    ("kind", "changes"), [("llama", {"bias": True}), ("qwen3", {"bias": False, "qk_norm": True})]
)
def test_every_head(kind, changes, head, tmp_path):
    run, model = make_run(tmp_path / "run", head=head, **changes)
    stock = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "hub", kind))
    assert type(stock) is CLASSES[kind]
    assert not stock.config.tie_word_embeddings
    truth = model(tokens())
    assert (stock(tokens()).logits - truth).abs().max() <= 2e-6 * truth.abs().max()
    double = model.double()
    # transformers computes the rotation and the norms in float32 in any case
    stock, truth = to_transformers(double, kind), double(tokens())
    head_alone = torch.nn.functional.linear(double.stream(tokens()), stock.lm_head.weight)
    torch.testing.assert_close(head_alone, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "changes", "fact"),
    [
        ("llama", {"qk_norm": True}, "qk_norm=True .*False"),
        ("qwen3", {}, "qk_norm=False .*True"),
        ("qwen3", {"qk_norm": True}, "biases"),
        ("llama", {"positions": "learned"}, "positions='learned' .*'rope'"),
        ("llama", {"mlp": "relu2"}, "mlp='relu2'"),
        ("llama", {"norm": None}, "RMSNorm"),
        ("llama", {"head_bias": "zero"}, "head_bias='zero'"),
        ("llama", {"scheme": "peri-ln"}, "peri-ln"),
        ("gpt2", {"bias": True}, "positions='rope', mlp='swiglu', norm='rmsnorm', kv_heads=2"),
    ],
)
def test_what_is_not_theirs_is_refused(kind, changes, fact, tmp_path):
    run, _ = make_run(tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=fact):
        export(run, tmp_path / "hub", kind)
    assert not (tmp_path / "hub").exists()


def test_a_branch_that_is_still_warming_up_is_refused():
    model = tiny("pre-ln", **BACKBONE, scheme_options={"prores": 10.0})
    model.at_update(20)
    assert to_transformers(model, "llama").config.num_key_value_heads == 2
    model.at_update(19)
    with pytest.raises(ValueError, match="2 sublayers"):
        to_transformers(model, "llama")


@pytest.fixture(scope="module")
def pair():
    """A model of Qwen3's backbone, and transformers' own with the same weights, in float64."""
    model = tiny("pre-ln", **BACKBONE, qk_norm=True, bias=False).double()
    theirs = to_transformers(model, "qwen3")
    return SpheretForCausalLM.of(model).eval(), theirs


def padded_on_the_left(time=8):
    mask = torch.ones(2, time, dtype=torch.long)
    mask[0, :3] = 0
    return tokens(2, time), mask


def test_hidden_states_and_attentions_are_theirs(pair):
    ids, mask = padded_on_the_left()
    pair[1].set_attn_implementation("eager")
    options = {"output_attentions": True, "output_hidden_states": True}
    ours = pair[0](ids, attention_mask=mask, **options)
    # theirs takes each row alone: in float64 its eager attention makes NaN of padding
    for row, start in enumerate((3, 0)):
        theirs = pair[1](ids[row : row + 1, start:], **options)
        for own, truth in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            torch.testing.assert_close(own[row, start:], truth[0], rtol=1e-5, atol=1e-6)
        for own, truth in zip(ours.attentions, theirs.attentions, strict=True):
            torch.testing.assert_close(own[row, :, start:, start:], truth[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "how", [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str
)
def test_generation_from_padded_rows_is_theirs(pair, how):
    ids, mask = padded_on_the_left()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    pair[1].set_attn_implementation("sdpa")
    generated = pair[0].generate(ids, **options, **how)
    beams = {"num_beams": how["num_beams"]} if "num_beams" in how else {}
    assert torch.equal(generated, pair[1].generate(ids, **options, **beams))
    embedded = pair[0].generate(inputs_embeds=pair[0].get_input_embeddings()(ids), **options, **how)
    assert torch.equal(embedded, generated[:, 8:])
    # a row alone, without its padding
    if not how:
        alone = pair[0].generate(ids[:1, 3:], max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert torch.equal(alone[0, 5:], generated[0, 8:])


def test_attentions_of_generated_tokens(pair):
    ids, mask = padded_on_the_left()
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    generated = pair[0].generate(ids, **options, output_attentions=True, return_dict_in_generate=True)
    whole_mask = torch.cat([mask, mask.new_ones(2, 3)], -1)
    whole = pair[0](generated.sequences, attention_mask=whole_mask, output_attentions=True).attentions
    for step, weights in enumerate(generated.attentions[1:], start=8):
        for own, truth in zip(weights, whole, strict=True):
            torch.testing.assert_close(own[:, :, 0], truth[:, :, step, : step + 1])


def test_a_model_and_a_classifier_load_it(pair, tmp_path):
    pair[0].save_pretrained(tmp_path)
    ids, mask = padded_on_the_left()
    base = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(base(ids, attention_mask=mask).last_hidden_state, pair[0].base_outputs(ids, mask)[0])
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, pad_token_id=0)
    assert classifier(ids, attention_mask=mask).logits.shape == (2, 3)
