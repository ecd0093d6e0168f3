"""transformers' Trainer decides by names which parameters decay: of ours, the matrices alone."""

import pytest
import torch
from hub_helpers import TINY
from transformers import Trainer, TrainingArguments

from spheret import GPT, SCHEMES, GPTConfig, parameter_groups
from spheret.hub import SpheretForCausalLM

VARIANTS = [
    *((name, {}) for name in SCHEMES),
    ("p-spheretnorm", {"learnable_p": True}),
    ("proj-spheretnorm", {"inner_norm": True}),
    ("pre-ln", {"norm": "rmsnorm"}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_no_scalar_gain_or_bias_decays(name, options, tmp_path):
    config = GPTConfig(**{**TINY, "head_bias": "zero"}, scheme=name, scheme_options=options)
    model = SpheretForCausalLM.of(GPT(config))
    arguments = TrainingArguments(output_dir=str(tmp_path), weight_decay=0.1, report_to=[], use_cpu=True)
    trainer = Trainer(model, arguments)
    decaying = set(trainer.get_decay_parameter_names(model))
    assert decaying == {key for key, p in model.named_parameters() if p.dim() >= 2}
    groups = trainer.create_optimizer().param_groups
    truth = parameter_groups(model, 0.1)
    for group, own in zip(groups, truth, strict=True):
        assert group["weight_decay"] == own["weight_decay"]
        assert [id(p) for p in group["params"]] == [id(p) for p in own["params"]]


def test_weights_that_a_scheme_constrains_stay_so(tmp_path):
    model = SpheretForCausalLM.of(GPT(GPTConfig(**TINY, scheme="ngpt")))
    gpt = model.model
    before = gpt.tokens.weight.detach().clone()
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, learning_rate=0.1, report_to=[], use_cpu=True, save_strategy="no",
        per_device_train_batch_size=2, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=[row] * 6).train()
    assert not torch.allclose(gpt.tokens.weight, before, atol=1e-3)
    reading = [w for b in gpt.each_block() for w in (b.attention.qkv.weight, b.mlp.hidden.weight)]
    writing = [w.mT for b in gpt.each_block() for w in (b.attention.output.weight, b.mlp.output.weight)]
    for weight in (gpt.tokens.weight, *reading, *writing):
        torch.testing.assert_close(weight.norm(dim=-1), torch.ones(len(weight)))
