"""The groups of parameters that an optimiser treats alike: what decays, and what is a hidden matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from spheret.model.head import Head

# AdamW's epsilon
EPSILON = 1e-8
# parts of the names of modules that map the stream to logits, and methods of transformers and timm that return them
_HEADS = {"head", "lm_head", "classifier", "score"}
_HEAD_METHODS = ("get_output_embeddings", "get_classifier")
# the last parts of names of parameters that do not decay whatever their shape, as in timm
_NO_DECAY = ("bias", "cls_token", "pos_embed")


def parameter_groups(model: nn.Module, weight_decay: float, muon: bool = False) -> list[dict[str, Any]]:
    """Groups of parameters for an optimiser: matrices decay, all other parameters do not.

    Decay would pull the step sizes a_l, the radius gamma, a learned p, gains and biases towards 0, which is not a
    neutral value for them. Every learnable scalar of this library is a 1-element vector. So nanoGPT's rule applies:
    parameters of two or more dimensions decay. As in timm, `cls_token`, `pos_embed`, and what a module's method
    `no_weight_decay` names do not. Shared parameters appear once. Frozen parameters are left out.

    With `muon` the matrices of hidden linear layers have a group of their own, with `use_muon` True, and embeddings,
    heads and convolutions are for AdamW. `spheret.optim.Muon` takes all groups. `torch.optim.Muon` takes the groups
    with `use_muon`, and AdamW the others.

    Args:
        model: any module.
        weight_decay: for the matrices, at least 0.
        muon: split for Muon and AdamW.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"parameter_groups takes the model itself, got {type(model).__name__}: leave out .parameters()."
        )
    _check_decay(weight_decay)
    hidden = hidden_matrices(model) if muon else {}
    if muon and not hidden:
        raise ValueError("muon=True is for the weights of hidden nn.Linear layers, and this model has none.")
    decaying, keeping = list[nn.Parameter](), list[nn.Parameter]()
    by_heights: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for _, parameter, decays in _trainable(model):
        if not decays:
            keeping.append(parameter)
        elif parameter in hidden:
            by_heights.setdefault(hidden[parameter], []).append(parameter)
        else:
            decaying.append(parameter)
    plain = {"use_muon": False, "heights": None} if muon else {}
    return [
        *(
            {"params": matrices, "weight_decay": float(weight_decay), "use_muon": True, "heights": heights}
            for heights, matrices in by_heights.items()
        ),
        {"params": decaying, "weight_decay": float(weight_decay), **plain},
        {"params": keeping, "weight_decay": 0.0, **plain},
    ]


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Every parameter that is not frozen, once, with its name and whether it decays."""
    named = [
        f"{prefix}.{pattern}".removeprefix(".")
        for prefix, module in model.named_modules()
        if callable(names := getattr(module, "no_weight_decay", None))
        for pattern in names()
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = name.rpartition(".")[2] in _NO_DECAY or any(fnmatchcase(name, pattern) for pattern in named)
            yield name, parameter, parameter.dim() >= 2 and not exempt


def _check_decay(weight_decay: float) -> None:
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}.")


def hidden_matrices(model: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """The weights of the hidden linear layers, each with the heights of the matrices that are stacked in it.

    Embeddings, heads, and weights that they share are not among them. A head is a `Head`, what is called `head`,
    `lm_head`, `classifier` or `score` or lies in it, and what transformers and timm say is one. A layer whose weight
    holds several matrices one above the other, as the weight of q, k and v does, says so in its attribute `parts`.
    """
    outer = {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, Head))}
    heads = set[Any]()
    for module in model.modules():
        for method in _HEAD_METHODS:
            found: Any = getattr(module, method, tuple)()
            heads.update(found if isinstance(found, tuple) else [found])
    hidden: dict[Tensor, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if module in heads or not _HEADS.isdisjoint(name.split(".")):
                outer.add(module.weight)
            else:
                hidden[module.weight] = tuple(getattr(module, "parts", ())) or (module.out_features,)
    return {weight: heights for weight, heights in hidden.items() if weight not in outer}


@dataclass(frozen=True)
class Factors:
    """The factors of one parameter on the learning rate, the weight decay and AdamW's epsilon."""

    lr: float = 1.0
    weight_decay: float = 1.0
    epsilon: float = 1.0


def optimizer_groups(
    model: nn.Module, weight_decay: float, optimizer: str = "adamw", factors: Mapping[str, Factors] | None = None
) -> list[dict[str, Any]]:
    """The groups of an optimiser of OPTIMIZERS. Parameters with the same rules share a group.

    What decays is as in `parameter_groups`. factors: by the names of parameters; all are 1 where there is no entry.
    Each group has `lr_factor`, by which the learning rate is multiplied, and `heights`: None for AdamW; for Muon the
    heights of the matrices that are stacked in its weights.
    """
    _check_decay(weight_decay)
    hidden = hidden_matrices(model) if optimizer == "muon" else {}
    same: dict[tuple[bool, tuple[int, ...] | None, Factors], list[nn.Parameter]] = {}
    for name, parameter, decays in _trainable(model):
        factor = (factors or {}).get(name, Factors())
        same.setdefault((decays, hidden.get(parameter), factor), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": float(weight_decay) * factor.weight_decay if decays else 0.0,
            "lr_factor": factor.lr,
            "eps": EPSILON * factor.epsilon,
            "heights": heights,
        }
        for (decays, heights, factor), parameters in same.items()
    ]
