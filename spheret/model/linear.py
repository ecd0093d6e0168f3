"""nn.Linear with a faster path for single rows, which cached generation consists of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spheret.support.autograd import recorded

# tensor classes whose memory can be viewed in parts
PLAIN = (Tensor, nn.Parameter)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear. A single row on the CPU, without a gradient, runs on all cores.

    A matrix-vector product is bound by memory, and BLAS runs it on one core. A batch of smaller products runs on all.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type != "cpu" or recorded():
        return F.linear(x, weight, bias)
    rows, width = weight.shape
    parts = torch.get_num_threads()
    if x.numel() != width or parts == 1 or rows % parts or not weight.is_contiguous() or type(weight) not in PLAIN:
        return F.linear(x, weight, bias)
    pieces = torch.bmm(x.reshape(1, 1, width).expand(parts, 1, width), weight.view(parts, -1, width).mT)
    y = pieces.view(*x.shape[:-1], rows)
    return y if bias is None else y + bias.to(y.dtype)


def plain_linears(model: nn.Module) -> None:
    """Make every `Linear` of a model a plain nn.Linear, with the same weights.

    Tools that go by the exact class, such as torch.ao's quantize_dynamic, pass subclasses over without a word.
    """
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


class Linear(nn.Linear):
    """y = W x + b.

    parts: the heights of the matrices that W holds one above the other, such as those of q, k and v; empty for one.
        An optimiser that looks at a whole matrix takes each of them by itself.
    """

    parts: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
