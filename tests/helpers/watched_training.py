"""Small trainings to watch: tokens of a Markov chain, so that there is more to learn than their frequencies."""

import math

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import spheret

VOCAB, TIME, BATCH, LAYERS = 64, 32, 8, 6


class Chain:
    """Batches of a Markov chain. spread: how much its rows differ; at 0 the tokens are independent."""

    def __init__(self, seed, spread=1.5):
        self.random = torch.Generator().manual_seed(seed)
        odds = torch.exp(spread * torch.randn(VOCAB, VOCAB, generator=self.random)) / torch.arange(1, VOCAB + 1)
        self.sums = (odds / odds.sum(-1, keepdim=True)).cumsum(-1)

    def batch(self):
        x = torch.randint(VOCAB, (BATCH, TIME + 1), generator=self.random)
        for t in range(TIME):
            chosen = torch.rand(BATCH, 1, generator=self.random) > self.sums[x[:, t]]
            x[:, t + 1] = chosen.sum(-1).clamp(max=VOCAB - 1)
        return x

    def noise(self):
        """A batch that has nothing of the chain."""
        return torch.randint(VOCAB, (BATCH, TIME + 1), generator=self.random)


def llama(seed=0, layers=LAYERS, **options):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
            pad_token_id=None, bos_token_id=None, eos_token_id=None, **options,
        )
    )  # fmt: skip


def gpt(seed=0, layers=LAYERS, head="untied", **options):
    torch.manual_seed(seed)
    options = {"scheme": "proj-spheretnorm", "head_bias": "zero", **options}
    sizes = {"layers": layers, "heads": 4, "width": 32, "vocab": VOCAB, "block": TIME}
    return spheret.GPT(spheret.GPTConfig(head=head, **sizes, **options))


def loss_of(model, x):
    if isinstance(model, LlamaForCausalLM):
        logits = model(input_ids=x[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    logits = model(x[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())


# what is called a sublayer, by its number from 0
NAMES = {
    llama: lambda i: f"model.layers.{i // 2}.{'mlp' if i % 2 else 'self_attn'}",
    gpt: lambda i: f"blocks.{i // 2}.{'mlp' if i % 2 else 'attention'}",
}


def silenced(module):
    """The output of a branch times zero."""

    def hook(module, args, output):
        return (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0

    module.register_forward_hook(hook)


def train(make, seed, fault=None, steps=160, every=20, lr=3e-3, spread=1.5, **options):
    """A watched training. fault: rate, zero, nan or batch. Returns the watch and the name of the faulty sublayer."""
    model, chain = make(seed, **options), Chain(seed, spread)
    name = NAMES[make](int(torch.randint(2 * LAYERS, (1,), generator=torch.Generator().manual_seed(seed))))
    module = model.get_submodule(name)
    own = list(module.parameters())
    others = [p for p in model.parameters() if all(p is not q for q in own)]
    factors = [1, 30 if fault == "rate" else 1]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": own}], lr)
    if fault == "zero":
        silenced(module)
    watch = spheret.watch(model, every, quiet=True)
    for step in range(1, steps + 1):
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = lr * factor * min(1, step / 20)
        if fault == "nan" and step == 50:
            with torch.no_grad():
                own[0].view(-1)[3] = math.nan
        x = chain.noise() if fault == "batch" and step == 90 else chain.batch()
        loss = loss_of(model, x)
        loss.backward()
        watch.step(loss)
        optimizer.step()
        optimizer.zero_grad()
        if fault and watch.alarms:
            break
    watch.close()
    return watch, name
