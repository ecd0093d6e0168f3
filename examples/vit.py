"""A vision transformer under a scheme: python examples/vit.py

The images are made here: a noisy bar that is rising, falling, flat or upright.
"""

import torch
import torch.nn.functional as F
from torch import nn

import spheret


def images(count):
    labels, shift = torch.randint(4, (count,)), torch.randint(-4, 5, (count, 1, 1))
    y, x = torch.arange(16)[:, None] - 7.5, torch.arange(16)[None] - 7.5
    distance = torch.stack([x + y, x - y, y.expand(16, 16), x.expand(16, 16)])[labels] - shift
    return (distance.abs() < 1.5)[:, None] + 0.4 * torch.randn(count, 1, 16, 16), labels


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ViT(nn.Module):
    def __init__(self, scheme, width=48, heads=4, layers=2, patch=4, classes=4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (16 // patch) ** 2, width))
        self.entry_norm, self.final_norm = scheme.enter(width), scheme.exit(width)
        self.branches, self.connections = nn.ModuleList(), nn.ModuleList()
        for number in range(1, layers + 1):
            mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            self.branches += [Attention(width, heads), mlp]
            self.connections += scheme.connect_block(width, number, layers)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        h = self.entry_norm(self.patches(x).flatten(2).mT + self.positions)
        for connection, branch in zip(self.connections, self.branches, strict=True):
            h = connection(h, branch)
        return self.head(self.final_norm(h).mean(1))


torch.manual_seed(0)
model = ViT(spheret.scheme("proj-spheretnorm"))
optimizer = torch.optim.AdamW(spheret.parameter_groups(model, 0.05))
for step in range(60):
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 * min(1, (step + 1) / 20)
    x, labels = images(48)
    F.cross_entropy(model(x), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    x, labels = images(200)
    accuracy = (model(x).argmax(-1) == labels).float().mean().item()
print(f"{accuracy:.0%} of 200 new images")
