"""Exports as transformers' own Llama and Qwen3, and of the modern backbone as spheret."""

import pytest
import torch
from hub_helpers import tiny, tokens
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

import spheret.hub  # noqa: F401
from spheret.cli import main
from spheret.data.tokenizers import describe
from spheret.data.tokenizers import load as load_tokenizer
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


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"qk_norm": True}, "it has qk_norm=True in place of False"),
        ("qwen3", {}, "it has qk_norm=False in place of True"),
        ("qwen3", {"qk_norm": True}, "it has biases"),
        ("llama", {"positions": "learned"}, "it has positions='learned' in place of 'rope'"),
        ("llama", {"mlp": "relu2"}, "it has mlp='relu2'"),
        ("llama", {"norm": None}, "its norms are not RMSNorms"),
        ("llama", {"head_bias": "zero"}, "it has head_bias='zero'"),
        ("llama", {"scheme": "peri-ln"}, "its scheme is peri-ln"),
        ("gpt2", {"bias": True}, "it has positions='rope', mlp='swiglu', norm='rmsnorm', kv_heads=2"),
    ],
)
def test_what_is_not_theirs_is_refused(kind, changes, reason, tmp_path):
    run, _ = make_run(tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=reason):
        export(run, tmp_path / "hub", kind)
    assert not (tmp_path / "hub").exists()


def test_a_branch_that_is_still_warming_up_is_refused():
    model = tiny("pre-ln", **BACKBONE, scheme_options={"prores": 10.0})
    model.at_update(20)
    assert to_transformers(model, "llama").config.num_key_value_heads == 2
    model.at_update(19)
    with pytest.raises(ValueError, match="the branches of 2 sublayers are still multiplied by less than 1"):
        to_transformers(model, "llama")
