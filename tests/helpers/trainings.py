"""Small trainings of many kinds, and faults that are planted in them: two tables, for tests/observe/test_rules.py."""

import copy
import math
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import spheret

WIDTH, VOCAB, TIME = 16, 24, 12
SEEDS = (0, 1, 2)


@dataclass
class Training:
    """A model, its loss at a step, how it learns, and what happens to it.

    each: called before every step. scale, schedule: what the loss and the learning rate are multiplied by.
    order: what the loop does. learned: what the optimiser gets, of the model, if not all that has a gradient.
    """

    model: nn.Module
    loss: object
    rate: float = 3e-3
    steps: int = 150
    optimizer: object = torch.optim.AdamW
    options: dict = field(default_factory=dict)
    each: object = lambda training, step: None
    scale: object = lambda step: 1.0
    order: str = "backward watch update zero"
    schedule: object = lambda step: 1.0
    learned: object = None

    def run(self, every=10, **watch_options):
        """Train until the first alarm or the end. Returns the watch."""
        learned = self.learned(self) if self.learned else [p for p in self.model.parameters() if p.requires_grad]
        optimizer = self.optimizer(learned, self.rate, **self.options)
        usual = [group["lr"] for group in optimizer.param_groups]
        watch = spheret.watch(self.model, every, quiet=True, **watch_options)
        for step in range(1, self.steps + 1):
            self.each(self, step)
            for group, rate in zip(optimizer.param_groups, usual, strict=True):
                group["lr"] = rate * self.schedule(step)
            loss = self.loss(step) * self.scale(step)
            do = {"backward": loss.backward, "watch": partial(watch.step, loss), "update": optimizer.step}
            for part in self.order.split():
                do.get(part, optimizer.zero_grad)()
            if watch.alarms:
                break
        watch.close()
        return watch


# models


class Attention(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gain, self.causal = 1.0, causal

    def forward(self, x):
        q, k, v = (m(x)[:, None] for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(self.gain * q, k, v, is_causal=self.causal)[:, 0])


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
    """Pre-LN, or Post-LN."""

    def __init__(self, mlp=None, causal=True, post=False):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.post = Attention(causal), post
        self.mlp = mlp or nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        if self.post:
            x = self.norms[0](x + self.attention(x))
            return self.norms[1](x + self.mlp(x))
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self, mlp=None, layers=3, tied=False, **options):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(mlp if number == 1 else None, **options) for number in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """x + branch(x)."""

    def __init__(self, *branch):
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x):
        return x + self.branch(x)


class Mixing(nn.Module):
    """Token mixing of an MLP-Mixer."""

    def __init__(self):
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(6), nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5))

    def forward(self, x):
        return x + self.tokens(self.norm(x).mT).mT


class Recurrent(nn.Module):
    """An RNN that keeps its hidden state from batch to batch."""

    def __init__(self, cell, keeps=False):
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(VOCAB, 16), cell(16, 32, batch_first=True), None
        self.head, self.keeps, self.hidden = nn.Linear(32, VOCAB), keeps, None

    def forward(self, x):
        y, hidden = self.cell(self.embedding(x), self.hidden)
        if self.keeps:
            self.hidden = hidden.detach()
        return self.head(y)


class LowRank(nn.Module):
    """A frozen layer with a low-rank addition that starts at zero."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def residual_mlp(inputs, outputs, width=24):
    blocks = [Residual(nn.LayerNorm(width), nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)) for _ in range(3)]
    return nn.Sequential(nn.Linear(inputs, width), *blocks, nn.Linear(width, outputs))


def convolutions():
    first, blocks = nn.Conv2d(1, 8, 3, padding=1), []
    for _ in range(2):
        layers = [(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)) for _ in range(2)]
        blocks.append(Residual(*layers[0], nn.ReLU(), *layers[1]))
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def gpt(**options):
    sizes = {"layers": 2, "heads": 2, "width": 16, "vocab": VOCAB, "block": TIME}
    return spheret.GPT(spheret.GPTConfig(**{**sizes, "head": "untied", "head_bias": "zero", **options}))


def adapted():
    model = Decoder()
    for block in model.blocks:
        block.mlp[0] = LowRank(block.mlp[0])
    for name, p in model.named_parameters():
        p.requires_grad_("down" in name or "up" in name)
    return model


def head_of_a_frozen_model():
    model = Decoder()
    model.embedding.requires_grad_(False)
    model.blocks.requires_grad_(False)
    return model


def sparse():
    model = nn.Sequential(nn.EmbeddingBag(VOCAB, 16, sparse=True), nn.Linear(16, VOCAB))
    model[1].requires_grad_(False)
    return model


class Generator(nn.Module):
    """A generator, and in a list that nobody watches a judge that learns beside it."""

    def __init__(self):
        super().__init__()
        self.generator, judge = residual_mlp(4, 8), residual_mlp(8, 1)
        self.judge = [judge, torch.optim.Adam(judge.parameters(), 1e-3)]

    def forward(self, noise):
        return self.generator(noise)


# data


def dice(step, seed=0):
    return torch.Generator().manual_seed(1000 * seed + step)


def counting(step, seed=0, size=8):
    """Tokens that mostly count upwards."""
    start = torch.randint(VOCAB, (size, 1), generator=dice(step, seed))
    steps = torch.randint(1, 3, (size, TIME + 1), generator=dice(step, seed + 1)).cumsum(-1)
    return (start + steps) % VOCAB


def zipf(step, seed=0, size=32, spread=0.8):
    """Tokens of a Markov chain whose frequencies differ and whose order says little: a plateau at their entropy."""
    odds = torch.exp(spread * torch.randn(VOCAB, VOCAB, generator=dice(0))) / torch.arange(1, VOCAB + 1)
    sums, random = (odds / odds.sum(-1, keepdim=True)).cumsum(-1), dice(step, seed)
    x = torch.randint(VOCAB, (size, TIME + 1), generator=random)
    for t in range(TIME):
        x[:, t + 1] = (torch.rand(size, 1, generator=random) > sums[x[:, t]]).sum(-1).clamp(max=VOCAB - 1)
    return x


def classes(step, seed, size=32):
    """Points around four centres."""
    y = torch.randint(4, (size,), generator=dice(step, seed))
    centres = 2 * torch.randn(4, 8, generator=dice(0))
    return centres[y] + 0.5 * torch.randn(size, 8, generator=dice(step, seed + 1)), y


# losses: functions of the model, the seed, the step, and options


def language(model, seed, step, data=counting):
    x = data(step, seed)
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def masked(model, seed, step):
    x = counting(step, seed)
    hidden = torch.rand(x.shape, generator=dice(step, seed)) < 0.3
    return F.cross_entropy(model(x.masked_fill(hidden, 0))[hidden], x[hidden])


def classify(model, seed, step, images=False, smooth=0.0):
    x, y = classes(step, seed)
    x = F.interpolate(x.view(-1, 1, 2, 4), size=(8, 8)) if images else x
    return F.cross_entropy(model(x), y, label_smoothing=smooth)


def regress(model, seed, step, noise=lambda seed, step: 0.0, target=lambda x: x.sin().sum(-1, keepdim=True)):
    x = torch.randn(32, 8, generator=dice(step, seed))
    return (model(x) - target(x) - noise(seed, step)).square().mean()


def heavy(seed, step):
    random = dice(step, seed + 9)
    return torch.randn(32, 1, generator=random) / torch.randn(32, 1, generator=random).abs().sqrt()


def adversarial(model, seed, step):
    judge, other = model.judge
    noise = torch.randn(32, 4, generator=dice(step, seed))
    with torch.no_grad():
        fake = model(noise)
    other.zero_grad()
    (F.softplus(judge(fake)).mean() + F.softplus(-judge(classes(step, seed)[0])).mean()).backward()
    other.step()
    return F.softplus(-judge(model(noise))).mean()


def reinforced(model, seed, step):
    x, y = classes(step, seed)
    odds = model(x).log_softmax(-1)
    action = torch.multinomial(odds.exp().detach(), 1, generator=dice(step, seed))
    reward = 10.0 * (action[:, 0] == y) * torch.rand(32, generator=dice(step, 5)) ** 4
    return -(odds.gather(1, action)[:, 0] * reward).mean()


def bags(model, seed, step):
    x = counting(step, seed)
    return F.cross_entropy(model(x[:, :2]), x[:, 2])


def mixed(model, seed, step):
    y = torch.randint(4, (16,), generator=dice(step, seed))
    x = torch.randn(16, 5, 6, generator=dice(step, seed + 1))
    return F.cross_entropy(model(x + y[:, None, None] * torch.linspace(0, 1, 6)), y)


def warm(step):
    return min(1.0, step / 20) * 0.5 * (1 + math.cos(math.pi * step / 160))


plateau, images = partial(language, data=zipf), partial(classify, images=True)
residuals = partial(residual_mlp, 8)
SGD = {"optimizer": torch.optim.SGD, "rate": 0.1, "options": {"momentum": 0.9}}
# trainings without a fault, by kind: the model, its loss, and the options of `Training`
NORMAL = {
    "a decoder": (Decoder, language, {}),
    "a tied decoder": (partial(Decoder, tied=True), language, {}),
    "a Post-LN decoder": (partial(Decoder, post=True), language, {"schedule": warm}),
    "a decoder on the unigram plateau": (Decoder, plateau, {"rate": 1e-3}),
    "a sphere on the plateau": (partial(gpt, scheme="proj-spheretnorm", head="shifted"), plateau, {}),
    "a sphere": (partial(gpt, scheme="proj-spheretnorm"), language, {}),
    "normed branches": (partial(gpt, scheme="normed-spheretnorm"), language, {}),
    "hyper-connections": (partial(gpt, scheme="hyper"), language, {}),
    "a Pre-LN GPT": (partial(gpt, scheme="pre-ln"), language, {"schedule": warm}),
    "masked tokens": (partial(Decoder, causal=False), masked, {}),
    "experts": (lambda: Decoder(Experts(False)), language, {}),
    "an LSTM": (partial(Recurrent, nn.LSTM), language, {}),
    "a GRU that keeps its state": (partial(Recurrent, nn.GRU, True), language, {}),
    "SGD with momentum": (Decoder, language, SGD),
    "warm restarts": (Decoder, language, {"schedule": lambda k: 0.51 + 0.5 * math.cos(math.pi * (k % 50) / 50)}),
    "low-rank adapters": (adapted, language, {}),
    "a head on a frozen model": (head_of_a_frozen_model, language, {}),
    "an MLP": (partial(residuals, 4), classify, {}),
    "label smoothing": (partial(residuals, 4), partial(classify, smooth=0.1), {}),
    "convolutions with BatchNorm": (convolutions, images, {"rate": 1e-2}),
    "images until the loss is zero": (convolutions, images, {"rate": 3e-2, "steps": 250}),
    "regression": (partial(residuals, 1), regress, {}),
    "heavy tails": (partial(residuals, 1), partial(regress, noise=heavy), {}),
    "an autoencoder": (partial(residuals, 8), partial(regress, target=lambda x: x), {}),
    "a generator and its judge": (Generator, adversarial, {"rate": 1e-3}),
    "a policy gradient": (partial(residuals, 4), reinforced, {}),
    "sparse embeddings": (sparse, bags, {"optimizer": torch.optim.SparseAdam}),
    "an MLP-Mixer": (lambda: nn.Sequential(Mixing(), Mixing(), nn.Flatten(), nn.Linear(30, 4)), mixed, {}),
}


def training(make, loss, seed=0, **options):
    model = make()
    return Training(model, partial(loss, model, seed), **options)


def false_alarms(kind, seed, intervals):
    """The alarms of a training without a fault, watched at each of these intervals."""
    alarms, (make, loss, options) = [], NORMAL[kind]
    for every in intervals:
        torch.manual_seed(seed)
        alarms += training(make, loss, seed, **options).run(every).alarms
    return alarms


# planted faults, by name: what names it, the kind or one of several, and the place; and the options of `decoder`

AT = 60


def decoder(change=None, mlp=None, data=counting, **options):
    """A decoder whose middle block is changed before training."""
    model = Decoder(mlp)
    if change is not None:
        with torch.no_grad():
            change(model.blocks[1])
    return Training(model, partial(language, model, 0, data=data), **options)


def at(change):
    """`change` of the middle block before one step."""

    @torch.no_grad()
    def each(training, step):
        if step == AT:
            change(training.model.blocks[1])

    return {"each": each}


def scaled(first, end, times):
    """A factor at the steps from `first` to before `end`."""
    return lambda step: times if first <= step < end else 1.0


def jump(times):
    return scaled(AT, math.inf, times)


def group(times=None):
    """The middle MLP learns at a rate of its own; without one it is left out."""

    def learned(training):
        own = list(training.model.blocks[1].mlp.parameters())
        groups = [{"params": [p for p in training.model.parameters() if all(p is not q for q in own)]}]
        return groups if times is None else [*groups, {"params": own, "lr": times * training.rate}]

    return {"learned": learned}


def maximised(model, seed, step):
    """The value of the loss, and its gradient with the wrong sign."""
    rising = language(model, seed, step)
    return 2 * rising.detach() - rising


def gain_of_zero(block):
    block.norms[1].weight.zero_()
    block.norms[1].bias.fill_(0.1)
    block.norms[1].requires_grad_(False)


def returns(change):
    """The MLP returns something else."""
    return {"change": lambda block: block.mlp.register_forward_hook(lambda module, args, output: change(output))}


MLP, ALL = "blocks.1.mlp", "the model"
FAULTS = {
    "the learning rate times 10": ("rate", ALL, {"schedule": jump(10)}),
    "the learning rate times 33": ("rate", ALL, {"schedule": jump(33)}),
    "the learning rate times 100": ("rate", ALL, {"schedule": jump(100)}),
    "the loss times 1000": ("rate", ALL, {"scale": jump(1000.0)}),
    "weights without an optimiser": ("no update", MLP, group()),
    "detached": ("no gradient", MLP, returns(torch.Tensor.detach)),
    "16 times as large at the start": ("growth", MLP, {"change": lambda block: block.mlp[2].weight.mul_(16)}),
    "a gain of zero": ("constant", MLP, {"change": gain_of_zero}),
    "dead ReLU": ("constant", MLP, {"change": lambda block: block.mlp[0].bias.fill_(-50)}),
    "gradients never zeroed": ("not zeroed", ALL, {"order": "backward watch update"}),
    "attention logits that grow": ("attention", "blocks.1.attention", {
        "each": lambda training, step: setattr(training.model.blocks[1].attention, "gain", 1.1**step)
    }),
    "one expert gets all": ("expert", MLP, lambda: decoder(mlp=Experts(True))),
    "weight decay 30": ("decay", ALL, {"options": {"weight_decay": 30.0}}),
    "watched after zero_grad": ("no gradient", ALL, {"order": "backward update zero watch"}),
    "no backward": ("no gradient", ALL, {"order": "watch update zero"}),
    "collapse": ("collapsed", "", lambda: training(
        partial(gpt, scheme="proj-spheretnorm", head="tied", layers=4),
        partial(language, data=partial(zipf, spread=0.3)), rate=1e-2, options={"weight_decay": 0.0},
    )),
    "a batch of noise": ("spike", "the batch", {
        "data": lambda step, seed: torch.randint(VOCAB, (8, TIME + 1)) if step == 100 else counting(step)
    }),
    "a weight that is NaN": ("not finite", MLP, at(lambda block: block.mlp[0].weight[0].fill_(math.nan))),
    "a group with 30 times the rate": ("exploding", MLP, group(30)),
    "a branch times zero": ("dead", MLP, returns(lambda output: 0 * output)),
    "targets in a wrong unit": ("spike", "the batch", lambda: training(
        partial(residuals, 1), partial(regress, noise=lambda seed, step: 1000.0 * (step == AT)),
    )),
    "a division by zero": (
        "not finite", "blocks.1.attention", at(lambda block: setattr(block.attention, "gain", math.inf)),
    ),
    "the loss is maximised": ("diverged", "", lambda: training(Decoder, maximised, rate=1e-2)),
    "the optimiser of a copy": (
        "no update", ALL, {"learned": lambda training: list(copy.deepcopy(training.model).parameters())},
    ),
    "dropout of everything": ("dead", MLP, {"change": lambda block: block.mlp.append(nn.Dropout(1.0))}),
    "a flipped bit": ("growth|spike", MLP, at(lambda block: block.mlp[2].weight[3, 4].fill_(2.0**20))),
    "weights made anew": (
        "growth|spike", "blocks.1.attention", at(lambda block: block.attention.o.weight.normal_(std=3)),
    ),
    "gradients times 100 under SGD": ("exploding", MLP, {
        "change": lambda block: [p.register_hook(lambda grad: 100 * grad) for p in block.mlp.parameters()],
        "optimizer": torch.optim.SGD, "rate": 0.03,
    }),
    "an overflow": ("not finite", MLP, at(lambda block: block.mlp[0].bias.fill_(3e38))),
    "a rate far too high": ("rate", ALL, {"rate": 5.0}),
}  # fmt: skip


def planted(name, every=10, seed=0):
    """The first alarm of a planted fault, and whether it names the fault."""
    torch.manual_seed(seed)
    kinds, where, fault = FAULTS[name]
    watch = (decoder(**fault) if isinstance(fault, dict) else fault()).run(every)
    first = watch.alarms[0] if watch.alarms else None
    return first, first is not None and first.kind in kinds.split("|") and where in ("", first.where)
