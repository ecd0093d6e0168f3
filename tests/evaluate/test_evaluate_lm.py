"""SpheretLM: rolling log-likelihoods and bad input."""

from types import SimpleNamespace

import pytest
import torch

from spheret import GPT, GPTConfig
from spheret.data.tokenizers import load as load_tokenizer
from spheret.evaluate.lm import SpheretLM

TEXT = "Fellow citizens of the Senate and of the House of Representatives: among the vicissitudes of life"


def small_gpt(block=32, scheme="proj-spheretnorm", scale=0.05):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, heads=2, width=32, block=block, vocab=320, scheme=scheme)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn_like(p))
    return model.eval()


def adapter(model):
    return SpheretLM(model=model, tokenizer=load_tokenizer("bytes"), precision="float64")


def ask(*arguments):
    return SimpleNamespace(args=arguments)


class TestRolling:
    @pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 90])
    def test_every_token_once_with_the_most_context(self, length):
        """Windows of `block` from the end of text on; the last is full and scores only what is left."""
        model, text = small_gpt(), TEXT[:length]
        ids = [256, *text.encode()]
        losses = []
        for start in range(0, length, 32):
            stop = min(start + 32, length)
            first = max(0, stop - 32)
            window = torch.tensor([ids[first : stop + 1]])
            window_losses = model.token_losses(window[:, :-1], window[:, 1:])[0]
            losses.append(window_losses[start - first :].sum())
        (total,) = adapter(model).loglikelihood_rolling([ask(text)])
        assert total == pytest.approx(-float(sum(losses)), rel=1e-9)


class TestBadInput:
    def test_tasks_that_generate(self):
        with pytest.raises(ValueError, match="generated"):
            adapter(small_gpt(block=64)).generate_until([ask("We", {"max_gen_toks": 8})])

    def test_nothing_to_score(self):
        with pytest.raises(ValueError, match="request 1 "):
            adapter(small_gpt()).loglikelihood([ask("We", " the"), ask("We", "")])

    def test_no_context_is_the_end_of_text(self):
        model = small_gpt()
        ((total, _),) = adapter(model).loglikelihood([ask("", "We")])
        window = torch.tensor([[256, *b"We"]])
        assert total == pytest.approx(-float(model.token_losses(window[:, :-1], window[:, 1:]).sum()), rel=1e-9)

    def test_a_tokenizer_of_another_model(self):
        with pytest.raises(ValueError, match=r"gpt2 .*50257 .*320"):
            SpheretLM(model=small_gpt(), tokenizer=load_tokenizer("gpt2"))
