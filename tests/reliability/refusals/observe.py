import torch
from torch import nn

import spheret
from spheret.observe.inspection import inspect
from spheret.observe.jacobians import turn


def without_loss(*loss):
    model = nn.Linear(2, 2)
    watch = spheret.watch(model, quiet=True)
    model(torch.ones(3, 2)).sum().backward()
    watch.step(*loss)


IDS = torch.zeros(1, 8, dtype=torch.long)
ROWS = []
CALLS = [
    (lambda: spheret.watch({}), TypeError, "module"),
    (lambda: spheret.watch(nn.Linear(2, 2), every=0), ValueError, "every"),
    (lambda: spheret.watch(nn.Linear(2, 2), unigram_entropy=-1.0), ValueError, "unigram_entropy"),
    (lambda: spheret.watch(nn.Linear(2, 2), log=3), TypeError, "log"),
    (lambda: spheret.watch(nn.Linear(2, 2), optimizer=5), TypeError, "optimizer"),
    (lambda: spheret.watch(nn.Linear(2, 2), sensitivity=0.0), ValueError, "sensitivity"),
    (without_loss, ValueError, "loss"),
    (lambda: without_loss(torch.ones(3)), ValueError, "shape"),
    (lambda: without_loss(10**400), ValueError, "float"),
    (lambda: inspect(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)), IDS, IDS), ValueError, "stream"),
    (lambda: turn(torch.zeros(3), torch.ones(3)), ValueError, "sphere"),
]
