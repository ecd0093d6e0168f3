"""Inputs and outputs of transformers' models: embeddings, hidden states, attentions, tuples and labels."""

import pytest
import torch
import torch.nn.functional as F
from hub_helpers import tiny, tokens

from spheret import SCHEMES
from spheret.hub import SpheretForCausalLM, to_gpt2


def wrapped(scheme, **changes):
    return SpheretForCausalLM.of(tiny(scheme, **changes)).eval()


@pytest.fixture(scope="module")
def pair():
    """A pre-ln model and transformers' GPT-2 with the same weights, in float64."""
    model = tiny("pre-ln", activation="gelu_tanh").double()
    gpt2 = to_gpt2(model)
    gpt2.set_attn_implementation("eager")
    return SpheretForCausalLM.of(model).eval(), gpt2


def padded(batch=3, time=8):
    """Ids, and a mask that pads the first row on the left and the last on the right."""
    mask = torch.ones(batch, time, dtype=torch.long)
    mask[0, :3], mask[-1, -2:] = 0, 0
    return tokens(batch, time), mask


class TestEmbeddings:
    @pytest.mark.parametrize("name", SCHEMES)
    def test_they_stand_for_tokens(self, name):
        model = wrapped(name)
        ids, mask = padded()
        embeddings = model.get_input_embeddings()(ids)
        given = model(inputs_embeds=embeddings, attention_mask=mask, labels=ids)
        truth = model(ids, attention_mask=mask, labels=ids)
        assert torch.equal(given.logits, truth.logits)
        assert torch.equal(given.loss, truth.loss)

    def test_one_of_both(self):
        model = wrapped("pre-ln")
        with pytest.raises(ValueError, match="neither"):
            model()
        with pytest.raises(ValueError, match="both"):
            model(tokens(1, 4), inputs_embeds=torch.zeros(1, 4, 16))
        with pytest.raises(ValueError, match=r"16\).*\(1, 4, 8\)"):
            model(inputs_embeds=torch.zeros(1, 4, 8))


class TestStates:
    def test_those_of_gpt2(self, pair):
        ids, mask = padded()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        options = {"attention_mask": mask, "output_hidden_states": True}
        ours, gpt2 = pair[0](ids, **options), pair[1](ids, position_ids=positions, **options)
        assert len(ours.hidden_states) == len(gpt2.hidden_states) == 3
        real = mask.bool()
        for own, truth in zip(ours.hidden_states, gpt2.hidden_states, strict=True):
            torch.testing.assert_close(own[real], truth[real])


def test_a_tuple_instead_of_a_record():
    model, ids = wrapped("proj-spheretnorm"), tokens(1, 6)
    record, plain = model(ids, use_cache=False), model(ids, use_cache=False, return_dict=False)
    assert type(plain) is tuple
    assert [torch.equal(a, b) for a, b in zip(plain, record.to_tuple(), strict=True)] == [True]
    model.config.return_dict = False
    assert type(model(ids)) is tuple


class TestLabels:
    def test_minus_100_is_left_out(self):
        model = wrapped("proj-spheretnorm")
        ids = tokens(2, 8)
        labels = ids.masked_fill(torch.arange(8) < 4, -100)
        truth = F.cross_entropy(model(ids).logits[:, 3:-1].flatten(0, 1), ids[:, 4:].flatten())
        torch.testing.assert_close(model(ids, labels=labels).loss, truth)

    def test_accumulated_gradients_are_those_of_one_batch(self, tmp_path):
        """Trainer divides by the labels of all micro-batches, although they have different numbers of them."""
        from transformers import Trainer, TrainingArguments

        rows = [{"input_ids": row, "labels": row.clone()} for row in tokens(4, 16)]
        for row, kept in zip(rows, (16, 3, 8, 5), strict=True):
            row["labels"][kept:] = -100
        losses = []
        for size, accumulation in ((4, 1), (1, 4)):
            arguments = TrainingArguments(
                output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=size, report_to=[], use_cpu=True,
                gradient_accumulation_steps=accumulation, logging_steps=1, save_strategy="no", disable_tqdm=True,
                learning_rate=1e-2,
            )  # fmt: skip
            trainer = Trainer(wrapped("proj-spheretnorm").train(), arguments, train_dataset=rows)
            trainer.train()
            losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
