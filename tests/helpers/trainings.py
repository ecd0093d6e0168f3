"""Small trainings of many kinds, and faults that are planted in them: what `spheret.watch` says to each.

python tests/helpers/trainings.py normal     # every kind with three seeds, watched every 10 and every 50 steps
python tests/helpers/trainings.py faults     # the first alarm beside the one that names the fault
"""

import copy
import math
import sys
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
    order: what the loop does. learned: what the optimiser gets, if not all that has a gradient.
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
        learned = self.learned or [p for p in self.model.parameters() if p.requires_grad]
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


def residual_mlp(inputs, outputs, width=24, layers=3):
    blocks = [
        Residual(nn.LayerNorm(width), nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)) for _ in range(layers)
    ]
    return nn.Sequential(nn.Linear(inputs, width), *blocks, nn.Linear(width, outputs))


def convolutions():
    def block():
        return Residual(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))  # fmt: skip

    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), block(), block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(8, 4))  # fmt: skip


def gpt(**options):
    sizes = {"layers": 2, "heads": 2, "width": 16, "vocab": VOCAB, "block": TIME}
    return spheret.GPT(spheret.GPTConfig(**{**sizes, "head": "untied", "head_bias": "zero", **options}))


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


def language(model, data=counting, seed=0, **options):
    def loss(step):
        x = data(step, seed)
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return Training(model, loss, **options)


def classes(step, seed, size=32):
    """Points around four centres."""
    y = torch.randint(4, (size,), generator=dice(step, seed))
    centres = 2 * torch.randn(4, 8, generator=dice(0))
    return centres[y] + 0.5 * torch.randn(size, 8, generator=dice(step, seed + 1)), y


def classify(model, seed, images=False, smooth=0.0, **options):
    def loss(step):
        x, y = classes(step, seed)
        x = F.interpolate(x.view(-1, 1, 2, 4), size=(8, 8)) if images else x
        return F.cross_entropy(model(x), y, label_smoothing=smooth)

    return Training(model, loss, **options)


def regress(model, seed, noise=None, target=lambda x: x.sin().sum(-1, keepdim=True), **options):
    def loss(step):
        x = torch.randn(32, 8, generator=dice(step, seed))
        rest = 0.0 if noise is None else noise(step)
        return (model(x) - target(x) - rest).square().mean()

    return Training(model, loss, **options)


# trainings without a fault, by kind: a function of the seed


def masked(seed):
    model = Decoder(causal=False)

    def loss(step):
        x = counting(step, seed)
        hidden = torch.rand(x.shape, generator=dice(step, seed)) < 0.3
        return F.cross_entropy(model(x.masked_fill(hidden, 0))[hidden], x[hidden])

    return Training(model, loss)


def adversarial(seed):
    generator, judge = residual_mlp(4, 8), residual_mlp(8, 1)
    other = torch.optim.Adam(judge.parameters(), 1e-3)

    def loss(step):
        noise = torch.randn(32, 4, generator=dice(step, seed))
        with torch.no_grad():
            fake = generator(noise)
        other.zero_grad()
        (F.softplus(judge(fake)).mean() + F.softplus(-judge(classes(step, seed)[0])).mean()).backward()
        other.step()
        return F.softplus(-judge(generator(noise))).mean()

    return Training(generator, loss, rate=1e-3)


def reinforced(seed):
    model = residual_mlp(8, 4)

    def loss(step):
        x, y = classes(step, seed)
        odds = model(x).log_softmax(-1)
        action = torch.multinomial(odds.exp().detach(), 1, generator=dice(step, seed))
        reward = 10.0 * (action[:, 0] == y) * torch.rand(32, generator=dice(step, 5)) ** 4
        return -(odds.gather(1, action)[:, 0] * reward).mean()

    return Training(model, loss)


def sparse(seed):
    model = nn.Sequential(nn.EmbeddingBag(VOCAB, 16, sparse=True), nn.Linear(16, VOCAB))
    model[1].requires_grad_(False)

    def loss(step):
        x = counting(step, seed)
        return F.cross_entropy(model(x[:, :2]), x[:, 2])

    return Training(model, loss, optimizer=torch.optim.SparseAdam, learned=[model[0].weight])


def adapted(seed):
    model = Decoder()
    for block in model.blocks:
        block.mlp[0] = LowRank(block.mlp[0])
    for name, p in model.named_parameters():
        p.requires_grad_("down" in name or "up" in name)
    return language(model, seed=seed)


def head_of_a_frozen_model(seed):
    model = Decoder()
    model.embedding.requires_grad_(False)
    model.blocks.requires_grad_(False)
    return language(model, seed=seed)


def mixer(seed):
    model = nn.Sequential(Mixing(), Mixing(), nn.Flatten(), nn.Linear(30, 4))

    def loss(step):
        y = torch.randint(4, (16,), generator=dice(step, seed))
        x = torch.randn(16, 5, 6, generator=dice(step, seed + 1))
        return F.cross_entropy(model(x + y[:, None, None] * torch.linspace(0, 1, 6)), y)

    return Training(model, loss)


def warm(step):
    return min(1.0, step / 20) * 0.5 * (1 + math.cos(math.pi * step / 160))


def heavy(seed, step):
    random = dice(step, seed + 9)
    return torch.randn(32, 1, generator=random) / torch.randn(32, 1, generator=random).abs().sqrt()


NORMAL = {
    "a decoder": lambda seed: language(Decoder(), seed=seed),
    "a tied decoder": lambda seed: language(Decoder(tied=True), seed=seed),
    "a Post-LN decoder": lambda seed: language(Decoder(post=True), seed=seed, schedule=warm),
    "a decoder on the unigram plateau": lambda seed: language(Decoder(), zipf, seed, rate=1e-3),
    "a sphere on the plateau": lambda seed: language(gpt(scheme="proj-spheretnorm", head="shifted"), zipf, seed),
    "a sphere": lambda seed: language(gpt(scheme="proj-spheretnorm"), seed=seed),
    "normed branches": lambda seed: language(gpt(scheme="normed-spheretnorm"), seed=seed),
    "hyper-connections": lambda seed: language(gpt(scheme="hyper"), seed=seed),
    "a Pre-LN GPT": lambda seed: language(gpt(scheme="pre-ln"), seed=seed, schedule=warm),
    "masked tokens": masked,
    "experts": lambda seed: language(Decoder(Experts(False)), seed=seed),
    "an LSTM": lambda seed: language(Recurrent(nn.LSTM), seed=seed),
    "a GRU that keeps its state": lambda seed: language(Recurrent(nn.GRU, True), seed=seed),
    "SGD with momentum": lambda seed: language(
        Decoder(), seed=seed, optimizer=torch.optim.SGD, rate=0.1, options={"momentum": 0.9}
    ),
    "warm restarts": lambda seed: language(
        Decoder(), seed=seed, schedule=lambda step: 0.5 * (1 + math.cos(math.pi * (step % 50) / 50)) + 0.01
    ),
    "low-rank adapters": adapted,
    "a head on a frozen model": head_of_a_frozen_model,
    "an MLP": lambda seed: classify(residual_mlp(8, 4), seed),
    "label smoothing": lambda seed: classify(residual_mlp(8, 4), seed, smooth=0.1),
    "convolutions with BatchNorm": lambda seed: classify(convolutions(), seed, True, rate=1e-2),
    "images until the loss is zero": lambda seed: classify(convolutions(), seed, True, rate=3e-2, steps=250),
    "regression": lambda seed: regress(residual_mlp(8, 1), seed),
    "heavy tails": lambda seed: regress(residual_mlp(8, 1), seed, partial(heavy, seed)),
    "an autoencoder": lambda seed: regress(residual_mlp(8, 8), seed, target=lambda x: x),
    "a generator and its judge": adversarial,
    "a policy gradient": reinforced,
    "sparse embeddings": sparse,
    "an MLP-Mixer": mixer,
}


def false_alarms(kind, seed, intervals):
    """The alarms of a training without a fault, watched at each of these intervals."""
    alarms = []
    for every in intervals:
        torch.manual_seed(seed)
        alarms += NORMAL[kind](seed).run(every).alarms
    return alarms


# planted faults, by name: the training, and what names it: the kind, or one of several, and the place

AT = 60


def decoder(change=None, mlp=None, **options):
    """A decoder whose middle block is changed before training."""
    model = Decoder(mlp)
    if change is not None:
        with torch.no_grad():
            change(model.blocks[1])
    return language(model, **options)


def at(step, change):
    """`change` of the middle block before one step."""

    @torch.no_grad()
    def each(training, now):
        if now == step:
            change(training.model.blocks[1])

    return each


def scaled(first, end, times):
    """A factor at the steps from `first` to before `end`."""
    return lambda step: times if first <= step < end else 1.0


def jump(times):
    return scaled(AT, math.inf, times)


def without_the_middle():
    training = decoder()
    own = {id(p) for p in training.model.blocks[1].mlp.parameters()}
    training.learned = [p for p in training.model.parameters() if id(p) not in own]
    return training


def of_a_copy():
    training = decoder()
    training.learned = list(copy.deepcopy(training.model).parameters())
    return training


def group(times, name="blocks.1.mlp"):
    training = decoder()
    own = list(training.model.get_submodule(name).parameters())
    rest = [p for p in training.model.parameters() if all(p is not q for q in own)]
    training.learned = [{"params": rest}, {"params": own, "lr": times * training.rate}]
    return training


def gain_of_zero(block):
    block.norms[1].weight.zero_()
    block.norms[1].bias.fill_(0.1)
    block.norms[1].requires_grad_(False)


def detached(block):
    block.mlp.register_forward_hook(lambda module, args, output: output.detach())


def silent(block):
    block.mlp.register_forward_hook(lambda module, args, output: 0 * output)


def sharper(training, step):
    training.model.blocks[1].attention.gain = 1.1**step


def collapsing():
    model = gpt(scheme="proj-spheretnorm", head="tied", layers=4)
    return language(model, partial(zipf, spread=0.3), rate=1e-2, options={"weight_decay": 0.0})


def one_bad_batch():
    return decoder(data=lambda step, seed: torch.randint(VOCAB, (8, TIME + 1)) if step == 100 else counting(step))


def wrong_unit():
    model = residual_mlp(8, 1)

    def noise(step):
        return 1000.0 if step == AT else 0.0

    return regress(model, 0, noise)


def maximised():
    training = decoder(rate=1e-2)
    rising = training.loss
    # the value of the loss, and its gradient with the wrong sign
    training.loss = lambda step: 2 * rising(step).detach() - rising(step)
    return training


def amplified(block):
    for p in block.mlp.parameters():
        p.register_hook(lambda grad: 100 * grad)


# the faults that had gone unseen or were named wrongly, and a few more that every trainer meets
FAULTS = {
    "the learning rate times 10": (lambda: decoder(schedule=jump(10)), "rate", "the model"),
    "the learning rate times 33": (lambda: decoder(schedule=jump(33)), "rate", "the model"),
    "the learning rate times 100": (lambda: decoder(schedule=jump(100)), "rate", "the model"),
    "the loss times 1000": (lambda: decoder(scale=jump(1000.0)), "rate", "the model"),
    "weights without an optimiser": (without_the_middle, "no update", "blocks.1.mlp"),
    "detached": (lambda: decoder(detached), "no gradient", "blocks.1.mlp"),
    "16 times as large at the start": (
        lambda: decoder(lambda block: block.mlp[2].weight.mul_(16)), "growth", "blocks.1.mlp",
    ),
    "a gain of zero": (lambda: decoder(gain_of_zero), "constant", "blocks.1.mlp"),
    "dead ReLU": (lambda: decoder(lambda block: block.mlp[0].bias.fill_(-50)), "constant", "blocks.1.mlp"),
    "gradients never zeroed": (lambda: decoder(order="backward watch update"), "not zeroed", "the model"),
    "attention logits that grow": (lambda: decoder(each=sharper), "attention", "blocks.1.attention"),
    "one expert gets all": (lambda: decoder(mlp=Experts(True)), "expert", "blocks.1.mlp"),
    "weight decay 30": (lambda: decoder(options={"weight_decay": 30.0}), "decay", "the model"),
    "watched after zero_grad": (lambda: decoder(order="backward update zero watch"), "no gradient", "the model"),
    "no backward": (lambda: decoder(order="watch update zero"), "no gradient", "the model"),
    "collapse": (collapsing, "collapsed", ""),
    "a batch of noise": (one_bad_batch, "spike", "the batch"),
    "a weight that is NaN": (
        lambda: decoder(each=at(AT, lambda block: block.mlp[0].weight[0].fill_(math.nan))), "not finite",
        "blocks.1.mlp",
    ),
    "a group with 30 times the rate": (lambda: group(30), "exploding", "blocks.1.mlp"),
    "a branch times zero": (lambda: decoder(silent), "dead", "blocks.1.mlp"),
    # ten more kinds
    "targets in a wrong unit": (wrong_unit, "spike", "the batch"),
    "a division by zero": (
        lambda: decoder(each=at(AT, lambda block: setattr(block.attention, "gain", math.inf))), "not finite",
        "blocks.1.attention",
    ),
    "the loss is maximised": (maximised, "diverged", ""),
    "the optimiser of a copy": (of_a_copy, "no update", "the model"),
    "dropout of everything": (
        lambda: decoder(lambda block: block.mlp.append(nn.Dropout(1.0))), "dead", "blocks.1.mlp",
    ),
    "a flipped bit": (
        lambda: decoder(each=at(AT, lambda block: block.mlp[2].weight[3, 4].fill_(2.0**20))), "growth|spike",
        "blocks.1.mlp",
    ),
    "weights made anew": (
        lambda: decoder(each=at(AT, lambda block: block.attention.o.weight.normal_(std=3))), "growth|spike",
        "blocks.1.attention",
    ),
    "gradients times 100 under SGD": (
        lambda: decoder(amplified, optimizer=torch.optim.SGD, rate=0.03), "exploding", "blocks.1.mlp",
    ),
    "an overflow": (
        lambda: decoder(each=at(AT, lambda block: block.mlp[0].bias.fill_(3e38))), "not finite", "blocks.1.mlp",
    ),
    "a rate far too high": (lambda: decoder(rate=5.0), "rate", "the model"),
}  # fmt: skip


def planted(name, every=10, seed=0):
    """The first alarm of a planted fault, and whether it names the fault."""
    torch.manual_seed(seed)
    make, kinds, where = FAULTS[name]
    watch = make().run(every)
    first = watch.alarms[0] if watch.alarms else None
    return first, first is not None and first.kind in kinds.split("|") and where in ("", first.where)


def main(what):
    if what == "faults":
        for every, seed in ((10, 0), (50, 1)):
            found = {name: planted(name, every, seed) for name in FAULTS}
            for name, (first, right) in found.items():
                print("right" if right else "WRONG", name, first and (first.kind, first.step, first.where))
            count = sum(right for _, right in found.values())
            print(f"every={every}: {count} of {len(FAULTS)} faults are named by the first alarm", flush=True)
        return
    count = 0
    for kind in NORMAL:
        for seed in SEEDS:
            alarms = false_alarms(kind, seed, (10, 50))
            count += bool(alarms)
            for each in alarms:
                print("ALARM", kind, seed, each.kind, each.step, each.sentence, flush=True)
    print(f"{count} of {len(SEEDS) * len(NORMAL)} normal trainings of {len(NORMAL)} kinds have an alarm")


if __name__ == "__main__":
    main(sys.argv[1])
