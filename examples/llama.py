"""A Llama in 90 lines, which docs/tutorial.md changes: python examples/llama.py

It learns the source code of torch.nn.functional, byte by byte, because that text is on every machine with torch.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import nn


def rotate(x):  # RoPE: each pair of entries turns by an angle that grows with the position
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / 10_000 ** (torch.arange(half) / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate_and_up = nn.Linear(width, 2 * 3 * width, bias=False)
        self.output = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.output(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads), SwiGLU(width)

    def forward(self, h):
        h = h + self.attention(self.attention_norm(h))
        return h + self.mlp(self.mlp_norm(h))


class Decoder(nn.Module):
    def __init__(self, vocab=256, width=64, heads=4, layers=4):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.05)
            if name.endswith("output.weight"):  # the weights that write to the stream
                weight.data /= (2 * layers) ** 0.5

    def forward(self, tokens):
        h = self.tokens(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(self.final_norm(h))


def train(model, steps=40, warmup=16, lr=5e-3):
    text = torch.tensor(list(inspect.getsource(F).encode()))
    windows = text[: len(text) // 65 * 65].view(-1, 65)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / warmup)
        batch = windows[torch.randint(len(windows), (16,))]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


torch.manual_seed(0)
model = Decoder()
loss = train(model)
print(f"loss {loss:.2f}")
