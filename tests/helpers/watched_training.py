"""Small trainings to watch: tokens of a Markov chain, so that there is more to learn than their frequencies."""

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
