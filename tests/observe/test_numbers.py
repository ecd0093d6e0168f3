"""What is seen equals what `inspect` and torch's own norms say of the same model and batch."""

import math
from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch
from small_models import TINY, randomize, tokens
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from watched_training import llama

import spheret
from spheret.connections import SCHEMES
from spheret.observe.inspection import inspect
from spheret.observe.observer import Observer

# one sequence, because attention is looked at in the first one alone
BATCH = {"batch": 1, "time": 24}


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=24, use_cache=False))


def seen(model, call, **options):
    """The first observation, after one update."""
    watch = spheret.watch(model, quiet=True, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    loss = call(model)
    loss.backward()
    watch.step(loss)
    optimizer.step()
    watch.close()
    return watch, watch.observations[0]


def observed_in_training(model, x, y):
    """What `spheret train` records."""
    return Observer(model, nullcontext, None, 0, 1).observe(1, x, y)


def check(each, wanted, rel):
    for key in ("norm", "angle_mean", "moved", "cosine", "massive", "grad_norm"):
        assert getattr(each, key) == pytest.approx(getattr(wanted, key), rel=rel, abs=1e-12), key


@pytest.mark.parametrize("name", SCHEMES)
def test_our_model_as_inspect_sees_it(name):
    torch.manual_seed(0)
    model = spheret.GPT(spheret.GPTConfig(**TINY, scheme=name)).double().eval()
    x, y = tokens(**BATCH), tokens(**BATCH, seed=1)
    truth, trained = inspect(model, x, y), observed_in_training(model, x, y)
    watch, found = seen(model, lambda model: model(x, y))
    assert watch.header.found == "connections"
    assert found.losses == pytest.approx([truth.loss])
    for each, wanted, metrics in zip(found.sublayers, truth.sublayers, trained.sublayers, strict=True):
        check(each, wanted, 1e-9)
        assert each.sink == (wanted.sink if wanted.sink is None else pytest.approx(wanted.sink, rel=1e-9))
        # the trainer has the same numbers from passes of its own, by the same functions
        for name, value in asdict(metrics).items():
            if value is not None and name not in ("sublayer", "branch"):
                assert getattr(each, name) == pytest.approx(value, rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_a_strangers_model_as_inspect_sees_it(make):
    model = randomize(make()).double().eval()
    x, y = tokens(**BATCH), tokens(**BATCH, seed=1)

    def call(model):
        logits = model(input_ids=x, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    watch, found = seen(model, call)
    # the update has changed the weights
    truth = inspect(randomize(make()).double().eval(), x, y)
    assert watch.header.found == "residual sums"
    assert len(found.sublayers) == len(truth.sublayers)
    for each, wanted in zip(found.sublayers, truth.sublayers, strict=True):
        check(each, wanted, 1e-6)


def test_post_norm_is_seen_behind_its_norm():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(vocab_size=50, **sizes)).double().eval()
    x = tokens(**BATCH)
    with torch.no_grad():
        states = model(input_ids=x, output_hidden_states=True).hidden_states
    _, found = seen(model, lambda model: model(input_ids=x, labels=x).loss)
    assert [each.norm for each in found.sublayers[1::2]] == pytest.approx(
        [float(state.norm(dim=-1).mean()) for state in states[1:]]
    )


def test_gradients_and_updates_are_those_of_torch():
    model = llama()
    x = tokens(**BATCH)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    watch, found = seen(model, lambda model: model(input_ids=x, labels=x).loss)
    named = dict(model.named_parameters())
    assert found.grad_norm == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in named.values()])))
    groups = [each.parameters for each in watch.anatomy.sublayers] + list(watch.anatomy.places.values())
    # every weight is watched at one place
    assert sorted(name for group in groups for name in group) == sorted(named)
    for each, group in zip(found.everywhere, groups, strict=True):
        change = math.hypot(*(float((named[name].detach() - before[name]).norm()) for name in group))
        size = math.hypot(*(float(before[name].norm()) for name in group))
        assert each.update == pytest.approx(change / size, rel=1e-5)
        assert each.grad_norm == pytest.approx(math.hypot(*(float(named[n].grad.norm()) for n in group)), rel=1e-5)


def test_attention_weights_of_a_strangers_model():
    model = llama(attn_implementation="eager")
    x = tokens(**BATCH)
    wanted = [w[:, :, 1:, 0].mean() for w in model(input_ids=x, output_attentions=True).attentions]
    _, found = seen(model, lambda model: model(input_ids=x, labels=x).loss)
    assert [each.sink for each in found.sublayers[::2]] == pytest.approx([float(w) for w in wanted], rel=1e-5)
    assert all(each.sink is None for each in found.sublayers[1::2])


def test_the_own_logit_of_a_tied_head():
    for tied in (True, False):
        model = llama(tie_word_embeddings=tied)
        x = tokens(**BATCH)
        logits = model(input_ids=x).logits
        own = logits.gather(-1, x[..., None]).mean() - logits.mean()
        _, found = seen(model, lambda model, x=x: model(input_ids=x, labels=x).loss)
        assert found.own_logit == (pytest.approx(float(own.detach()), rel=1e-4) if tied else None)


def test_without_a_stream_the_weights_are_watched():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(5, 8)
    watch, found = seen(model, lambda model: model(x).square().mean())
    assert watch.header.found == "parameters only"
    assert watch.header.note
    assert [each.name for each in found.places] == ["0", "1", "2", "3"]
    assert all(each.grad_norm > 0 and each.update > 0 for each in found.places)


class Pair(nn.Module):
    """One layer in the way that the README has it."""

    def __init__(self, number):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.join = spheret.SpheretNorm(8, sublayer=number)

    def forward(self, h):
        return self.join(h, self.branch(h))


def test_a_model_of_ones_own_with_spheretnorm():
    torch.manual_seed(0)
    model = nn.Sequential(spheret.ScaleNorm(8), *(Pair(number) for number in range(1, 4)), nn.Linear(8, 8))
    x = torch.randn(2, 5, 8)
    watch, found = seen(model, lambda model: model(x).square().mean())
    assert [each.name for each in watch.header.sublayers] == ["1.branch", "2.branch", "3.branch"]
    assert watch.anatomy.sublayers[0].parameters.keys() >= {"1.branch.0.weight", "1.branch.2.bias"}
    assert all(each.norm == pytest.approx(math.sqrt(8), rel=1e-5) for each in found.sublayers)
    assert list(watch.anatomy.places) == ["0", "4"]
