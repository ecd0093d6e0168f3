"""AutoModel and AutoModelForSequenceClassification: the same weights, and what transformers' GPT-2 gives."""

import pytest
import torch
from hub_helpers import tiny, tokens
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
)

from spheret import SCHEMES
from spheret.hub import SpheretForCausalLM, SpheretForSequenceClassification, SpheretModel, to_gpt2


def classifier(scheme="proj-spheretnorm", **more):
    torch.manual_seed(0)
    return SpheretForSequenceClassification.of(tiny(scheme), num_labels=3, **more).eval()


@pytest.fixture(scope="module")
def pair():
    """A pre-ln classifier and transformers' GPT-2 with the same weights, in float64."""
    gpt = tiny("pre-ln", activation="gelu_tanh").double()
    torch.manual_seed(0)
    ours = SpheretForSequenceClassification.of(gpt, num_labels=3, pad_token_id=0).eval()
    stock = to_gpt2(gpt)
    stock.config.num_labels, stock.config.pad_token_id = 3, 0
    gpt2 = GPT2ForSequenceClassification(stock.config).double().eval()
    gpt2.transformer.load_state_dict(stock.transformer.state_dict())
    gpt2.score.load_state_dict(ours.score.state_dict())
    return ours, gpt2


def padded(side):
    ids = tokens(3, 9).clamp(min=1)
    for row, length in zip(ids, (9, 4, 6), strict=True):
        row[slice(length, None) if side == "right" else slice(0, 9 - length)] = 0
    return ids


class TestAgainstGPT2:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_the_last_token_that_is_not_padding(self, pair, side):
        ids = padded(side)
        mask = (ids != 0).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        ours = pair[0](ids, attention_mask=mask).logits
        truth = pair[1](ids, attention_mask=mask, position_ids=positions).logits
        assert ours.shape == (3, 3)
        torch.testing.assert_close(ours, truth)
        # each row alone, without its padding
        for row, logits in zip(ids, ours, strict=True):
            torch.testing.assert_close(pair[0](row[row != 0][None]).logits[0], logits)

    @pytest.mark.parametrize(
        ("problem", "labels"),
        [
            ("single_label_classification", torch.tensor([2, 0, 1])),
            ("multi_label_classification", torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 0]]).double()),
            ("regression", torch.tensor([[0.5, 1, -1], [0, 1, 1], [2, 0, 0]]).double()),
            (None, torch.tensor([2, 0, 1])),
        ],
    )
    def test_the_loss(self, pair, problem, labels):
        losses = []
        for model in pair:
            model.config.problem_type = problem
            losses.append(model(padded("right"), labels=labels).loss)
        torch.testing.assert_close(*losses)


class TestPadding:
    def test_a_mask_says_it_where_no_id_does(self, pair):
        ids = padded("left")
        mask, truth = (ids != 0).long(), pair[0](ids, attention_mask=(ids != 0).long()).logits
        embeddings = pair[0].get_input_embeddings()(ids)
        torch.testing.assert_close(pair[0](inputs_embeds=embeddings, attention_mask=mask).logits, truth)
        nameless = SpheretForSequenceClassification.of(pair[0].model, num_labels=3).double().eval()
        nameless.score.load_state_dict(pair[0].score.state_dict())
        torch.testing.assert_close(nameless(ids, attention_mask=mask).logits, truth)

    def test_nothing_says_it(self):
        model = classifier()
        assert model(tokens(1, 4)).logits.shape == (1, 3)
        with pytest.raises(ValueError, match=r"2 rows .*attention_mask"):
            model(tokens(2, 4))


class TestSaved:
    @pytest.mark.parametrize("name", SCHEMES)
    def test_each_class_loads_what_another_saved(self, name, tmp_path):
        gpt, ids = tiny(name, head_bias="zero"), tokens(1, 6)
        SpheretForCausalLM.of(gpt).save_pretrained(tmp_path)
        base = AutoModel.from_pretrained(tmp_path)
        assert type(base) is SpheretModel
        assert torch.equal(base(ids).last_hidden_state, gpt.stream(ids))
        base.save_pretrained(tmp_path / "base")
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).logits, gpt(ids))

    def test_a_classifier(self, tmp_path):
        model, ids = classifier(id2label={0: "a", 1: "b", 2: "c"}), tokens(1, 6)
        model.save_pretrained(tmp_path)
        assert "score.weight" in load_file(tmp_path / "model.safetensors")
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        assert type(loaded) is SpheretForSequenceClassification
        assert loaded.config.id2label == {0: "a", 1: "b", 2: "c"}
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        # the score is left out
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model.model(ids))

    def test_a_new_head_on_a_language_model(self, tmp_path):
        SpheretForCausalLM.of(tiny("proj-spheretnorm")).save_pretrained(tmp_path)
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=50)
        assert model.score.weight.shape == (50, 16)
        assert model.score.weight.std().item() == pytest.approx(0.02, rel=0.1)


class TestTraining:
    def test_trainer_and_an_adapter(self, tmp_path):
        """The score and the adapter learn to tell rows apart by their last token. The other weights stay."""
        import peft
        from transformers import Trainer, TrainingArguments

        model = classifier(pad_token_id=0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
        adapted = peft.get_peft_model(model, config)
        ids = tokens(12, 5).clamp(min=4)
        ids[:, -1] = torch.arange(12) % 3 + 1
        rows = [{"input_ids": row, "attention_mask": row * 0 + 1, "labels": int(row[-1]) - 1} for row in ids]
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=15, per_device_train_batch_size=12, learning_rate=3e-2, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        Trainer(adapted, arguments, train_dataset=rows).train()
        adapted.eval()
        assert adapted(ids).logits.argmax(-1).tolist() == [row["labels"] for row in rows]
        for name, value in adapted.unload().state_dict().items():
            if "score" not in name:
                assert torch.equal(value, before[name])
