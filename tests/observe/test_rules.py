"""Every rule: a small training with a planted fault is named, one without is not. Models keep their state."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spheret

WIDTH, VOCAB, TIME = 16, 24, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gain = 1.0

    def forward(self, x):
        q, k, v = (m(x)[:, None] for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(self.gain * q, k, v, is_causal=True)[:, 0])


class Experts(nn.Module):
    """Each token goes to one expert; `favourite` draws all of them."""

    def __init__(self, favourite):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("favourite", 9.0 * favourite * torch.eye(4)[1])

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        chosen = F.one_hot((shares + self.favourite).argmax(-1), 4)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * (shares * chosen)[..., None, :]).sum(-1)


class Block(nn.Module):
    def __init__(self, mlp=None):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.mlp = mlp or nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, mlp=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(mlp if number == 1 else None) for number in range(3))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step):
    """Tokens that mostly count upwards."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (8, 1), generator=generator)
    steps = torch.randint(1, 3, (8, TIME + 1), generator=generator).cumsum(-1)
    return (start + steps) % VOCAB


def train(model, every=10, steps=50, lr=3e-3, decay=0.0, left_out=(), at=lambda *_: 1.0, zeroed=True, **options):
    """The first alarm, or None. at: called before each step, returns what the loss is multiplied by."""
    left_out = {id(p) for p in left_out}
    learned = [p for p in model.parameters() if id(p) not in left_out]
    optimizer = torch.optim.AdamW(learned, lr, weight_decay=decay)
    watch = spheret.watch(model, every, quiet=True, **options)
    for step in range(1, steps + 1):
        factor = at(step, model, optimizer)
        x = batch(step)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()) * abs(factor)
        loss.backward()
        if factor < 0:
            optimizer.zero_grad()
        watch.step(loss)
        optimizer.step()
        if zeroed:
            optimizer.zero_grad()
        if watch.alarms:
            break
    watch.close()
    return watch.alarms[0] if watch.alarms else None


@torch.no_grad()
def changed(change, model=None):
    model = model or Model()
    change(model.blocks[1])
    return model


def jump(step, model, optimizer):
    optimizer.param_groups[0]["lr"] = 3e-3 if step < 40 else 0.1
    return 1.0


def grow(step, model, optimizer):
    model.blocks[1].attention.gain = 1.3**step
    return 1.0


def gain_of_zero(block):
    block.norms[1].weight.zero_()
    block.norms[1].bias.fill_(0.1)
    block.norms[1].requires_grad_(False)


def detached(module):
    module.register_forward_hook(lambda module, args, output: output.detach())


# the model, how it is trained, and the first alarm
FAULTS = {
    "a learning rate that jumps": (Model, {"at": jump}, ("rate", "the model", 40)),
    "a loss scaled by 1000": (
        Model, {"at": lambda step, *_: 1000.0 if step > 40 else 1.0}, ("rate", "the model", 41),
    ),
    "a learning rate far too high": (Model, {"lr": 5.0}, ("rate", "the model", 1)),
    "weight decay 30": (Model, {"decay": 30.0}, ("decay", "the model", 10)),
    "no gradient": (lambda: changed(lambda b: detached(b.mlp)), {}, ("no gradient", "blocks.1.mlp", 30)),
    "no backward": (Model, {"at": lambda *_: -1.0}, ("no gradient", "the model", 2)),
    "never zeroed": (Model, {"zeroed": False}, ("not zeroed", "the model", 20)),
    "nothing is updated": (Model, {"lr": 0.0}, ("no update", "the model", 10)),
    "growth": (lambda: changed(lambda b: b.mlp[2].weight.mul_(20)), {}, ("growth", "blocks.1.mlp", 1)),
    "gain 0": (lambda: changed(gain_of_zero), {}, ("constant", "blocks.1.mlp", 30)),
    "dead ReLU": (lambda: changed(lambda b: b.mlp[0].bias.fill_(-50)), {}, ("constant", "blocks.1.mlp", 30)),
    "attention logits": (Model, {"at": grow}, ("attention", "blocks.1.attention", 30)),
    "one expert": (lambda: Model(Experts(True)), {}, ("expert", "blocks.1.mlp", 30)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    make, options, (kind, where, step) = FAULTS[name]
    alarm = train(make(), **options)
    assert alarm is not None
    assert (alarm.kind, alarm.where, alarm.step) == (kind, where, step)
    assert alarm.remedy


def test_what_no_optimiser_updates_is_named():
    model = Model()
    alarm = train(model, left_out=model.blocks[1].mlp.parameters())
    assert (alarm.kind, alarm.where, alarm.step) == ("no update", "blocks.1.mlp", 30)


def frozen(model):
    model.blocks[0].requires_grad_(False)
    return model


NORMAL = {
    "plain": (Model, {}),
    "warm-up": (Model, {"at": lambda step, m, o: o.param_groups[0].update(lr=3e-3 * min(1, step / 20)) or 1.0}),
    "experts": (lambda: Model(Experts(False)), {}),
    "frozen": (lambda: frozen(Model()), {}),
    "zero-initialised": (lambda: changed(lambda b: [p.zero_() for p in b.mlp[2].parameters()]), {}),
    "the head alone": (Model, {"left_out": "blocks"}),
}


@pytest.mark.parametrize("every", [10, 50])
@pytest.mark.parametrize("name", NORMAL)
def test_a_normal_training_raises_no_alarm(name, every):
    make, options = NORMAL[name]
    model = make()
    if "left_out" in options:
        options = {"left_out": list(model.blocks.parameters()) + list(model.embedding.parameters())}
    assert train(model, every, **options) is None


def test_sensitivity_decides():
    def scaled(step, *_):
        return 4.0 if step == 45 else 1.0

    assert train(Model(), at=scaled, sensitivity=0.2) is None
    assert train(Model(), at=scaled, sensitivity=5.0).step <= 45


class Mixing(nn.Module):
    """Token mixing of an MLP-Mixer."""

    def __init__(self):
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(6), nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5))

    def forward(self, x):
        return x + self.tokens(self.norm(x).mT).mT


def test_a_mixer_is_seen():
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixing(), Mixing()), torch.randn(3, 5, 6)
    with spheret.watch(model, quiet=True) as watch:
        y = model(x)
        y.square().mean().backward()
        watch.step(1.0)
    assert [each.name for each in watch.header.sublayers] == ["0.tokens", "1.tokens"]
    assert watch.observations[0].sublayers[1].norm == pytest.approx(float(y.detach().norm(dim=-1).mean()), rel=1e-5)


class Remembers(nn.Module):
    """Its hidden state, a counter, a buffer and random numbers go on from call to call."""

    def __init__(self):
        super().__init__()
        self.cell, self.hidden, self.calls, self.seen = nn.GRUCell(4, 4), None, 0, []
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.hidden = torch.zeros(len(x), 4) if self.hidden is None else self.hidden.detach()
        self.hidden = self.cell(x + random.random() + float(np.random.rand()), self.hidden)  # noqa: NPY002
        self.mean.add_(self.hidden.detach().mean(0))
        self.calls += 1
        self.seen.append(self.calls)
        return self.hidden.sum() * self.calls + self.mean.sum()


def test_the_trial_leaves_the_state_of_a_model_alone():
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model = Remembers()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch = spheret.watch(model, 1, quiet=True) if watched else None
        for _ in range(3):
            loss = model(torch.ones(5, 4))
            loss.backward()
            if watch is not None:
                watch.step(loss)
            optimizer.step()
            optimizer.zero_grad()
        ends.append([*model.state_dict().values(), torch.tensor([model.calls, *model.seen])])
    assert all(map(torch.equal, *ends))


def test_a_first_forward_that_raises_does_not_blind():
    model = Model()
    with spheret.watch(model, 1, quiet=True) as watch:
        with pytest.raises(IndexError):
            model(torch.full((2, TIME), VOCAB))
        x = batch(1)
        F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        watch.step(math.log(VOCAB))
    assert len(watch.header.sublayers) == 6
