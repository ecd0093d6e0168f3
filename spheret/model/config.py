"""`GPTConfig`: all options of the model, and its presets."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from spheret.connections import NORMS, BranchShape, HeadNorm, Scheme, scheme
from spheret.connections.parse import json_options, options_from_json
from spheret.kernels import check_environment
from spheret.model.head import HEADS
from spheret.support.errors import unknown
from spheret.support.ranges import check_above_zero, check_count, divisors, nearest
from spheret.support.settings import declared, setting

ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}
HEAD_BIASES = ("none", "zero", "unigram")
POSITIONS = ("learned", "rope")
MLPS = ("gelu", "swiglu", "relu2")
# the base of rotary positions: as in their source and in Llama 1 and 2
ROPE_BASE = 10_000.0
# options of positions, MLP, norms and attention
BACKBONE = ("positions", "rope_base", "mlp", "norm", "qk_norm", "kv_heads")
# heads of keys and values of the modern presets, which have the paper's shapes and these options
MODERN_KV_HEADS = {"modern-S": 4, "modern-M": 4, "modern-L": 5}
MODERN: dict[str, Any] = {
    "positions": "rope",
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "qk_norm": True,
    "bias": False,
}


def default_heads(width: int) -> int:
    """The heads of a model of this width: one per 64 columns, at least 4."""
    return max(4, width // 64)


@dataclass(frozen=True)
class GPTConfig:
    """All options of the model. `as_dict` and `from_dict` convert them to and from JSON.

    Each field says what it is in its `help`, and docs/settings.md lists them. An MLP of "gelu" has the `activation`
    "gelu" (nanoGPT's) or "gelu_tanh" (transformers' GPT-2). `counts` of the GPT start a "unigram" bias.

    The defaults of `head` and `head_bias` are those that train with every scheme; docs/collapse.md says what the
    paper's do. `preset` has the paper's.
    """

    layers: int = setting(12, help="Blocks.", flag=True, small=12, paper=(12, 24, 36), with_size="{}")
    heads: int = setting(
        12, help="Attention heads.", flag=True, follows="one per 64 columns, at least 4", paper=(12, 16, 20),
        with_size="{}",
    )  # fmt: skip
    width: int = setting(
        768, help="Width of the stream.", flag=True, small=64, paper=(768, 1024, 1280), with_size="{}"
    )
    block: int = setting(1024, help="Tokens per sequence.", flag=True, small=128, paper=1024, with_size="{}")
    vocab: int = setting(
        50304, help="Rows of the embedding.", follows="the data's vocabulary, rounded up to a multiple of 64",
        paper=50_304,
    )  # fmt: skip
    bias: bool = setting(True, help="Biases in linear layers and norms.")
    dropout: float = setting(0.0, help="Dropout of branches, embedding and attention.", paper=0.0)
    scheme: str = setting(
        "proj-spheretnorm",
        help="How branches join the stream: pre-ln, proj-spheretnorm, ... (`spheret schemes` lists all).",
        flag=True, follows="required",
    )  # fmt: skip
    scheme_options: dict[str, Any] = setting(  # noqa: RUF009
        factory=dict, help="Options of the scheme. Each is also `--set option=value`.", follows="the scheme's own"
    )
    activation: str = setting("gelu", help="gelu, or gelu_tanh as in transformers' GPT-2.")
    head_bias: str = setting(
        "unigram", help="Bias of the output head: unigram (log token frequencies), zero, or none (the paper's).",
        flag=True, paper="none", with_size="{}",
    )  # fmt: skip
    recompute: bool = setting(
        False, help="Keep one tensor per block and compute the rest again in the backward pass."
    )
    positions: str = setting("learned", help="learned embeddings (the paper's), or rope.")
    rope_base: float = setting(ROPE_BASE, help="Base of the angles of rope.")
    mlp: str = setting("gelu", help="gelu (the paper's), swiglu, or relu2.")
    norm: str | None = setting(
        None, help="What the scheme's norms are, where its definition leaves it open: layernorm or rmsnorm.",
        follows="the scheme's own",
    )  # fmt: skip
    qk_norm: bool = setting(False, help="RMSNorm of queries and keys, per head.")
    kv_heads: int | None = setting(
        None, help="Heads of keys and values. Each serves heads/kv_heads heads of queries.",
        follows="as many as heads",
    )  # fmt: skip
    head: str = setting(
        "shifted", help="How logits read the stream: shifted (docs/collapse.md), tied (the paper's), or untied.",
        flag=True, paper="tied", with_size="{}",
    )  # fmt: skip

    def __post_init__(self) -> None:
        # the width before the heads, whose default follows from it
        optional = () if self.kv_heads is None else ("kv_heads",)
        for name in ("layers", "width", "heads", "block", "vocab", *optional):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
            check_count(name, value)
        if self.width % self.heads:
            near = nearest(divisors(self.width), self.heads)
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}: heads may be {near}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}.")
        for name, allowed in (
            ("activation", tuple(ACTIVATIONS)),
            ("head_bias", HEAD_BIASES),
            ("head", HEADS),
            ("positions", POSITIONS),
            ("mlp", MLPS),
            ("norm", (*NORMS, None)),
        ):
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), [word for word in allowed if word is not None])
        self._check_backbone()
        object.__setattr__(self, "scheme_options", options_from_json(self.scheme_options))
        # the entry's options depend on the width: a radius beyond sqrt(width) is an error
        with torch.device("meta"):
            built = self.build_scheme()
            built.enter(self.width)
            own = built.inside_attention(self.shape, 1, 2 * self.layers)
            built.inside_mlp(self.shape, 2, 2 * self.layers)
            self.head_norm()
        if self.qk_norm and own is not None:
            raise ValueError(
                f"qk_norm norms the queries and keys, and {self.scheme} norms them itself: set qk_norm to "
                "false, or take another scheme."
            )
        check_environment()

    def _check_backbone(self) -> None:
        """Raise unless the options of positions, heads and MLP fit together."""
        if self.kv_heads is not None and self.heads % self.kv_heads:
            near = nearest(divisors(self.heads), self.kv_heads)
            raise ValueError(
                f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}: kv_heads may be {near}."
            )
        if self.positions == "rope" and self.shape.head_dim % 2:
            raise ValueError(
                f"positions = rope turns pairs of entries, and a head of width/heads = {self.shape.head_dim} entries "
                "has one left over: take another width or number of heads, or learned positions."
            )
        if self.head == "shifted" and self.width < 2:
            raise ValueError(f"head = shifted needs a width of at least 2, got {self.width}: take head = untied.")
        check_above_zero("rope_base", self.rope_base)
        if self.positions != "rope" and self.rope_base != ROPE_BASE:
            raise ValueError(
                f"rope_base {self.rope_base:g} is of positions = rope, and these are {self.positions}: leave "
                "rope_base out, or take positions = rope."
            )
        if self.mlp != "gelu" and self.activation != "gelu":
            raise ValueError(
                f"activation {self.activation} is of mlp = gelu, and this is {self.mlp}: leave activation out."
            )

    @property
    def shape(self) -> BranchShape:
        """The widths and heads of a block's branches."""
        gated = self.mlp == "swiglu"
        # a gate makes three matrices of the two, which stay as large together: 8/3 of the width
        hidden = 16 * math.ceil(self.width / 6) if gated else 4 * self.width
        return BranchShape(self.width, self.heads, self.kv_heads or self.heads, hidden, gated)

    @property
    def matrix_entries(self) -> int:
        """The entries of one block's matrices."""
        shape = self.shape
        attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
        return shape.dim * (attention + (3 if shape.gated else 2) * shape.hidden)

    @property
    def least_parameters(self) -> int:
        """The entries of the matrices, the embeddings and an untied head. Gains and biases come on top."""
        positions = self.block if self.positions == "learned" else 0
        rows = positions + (2 if self.head == "untied" else 1) * self.vocab
        return self.matrix_entries * self.layers + rows * self.width

    def build_scheme(self) -> Scheme:
        """The scheme with its options. If the model has no biases, its norms have none either."""
        built = scheme(self.scheme, **self.scheme_options)
        asked: dict[str, Any] = {} if self.bias else {"bias": False}
        asked |= {} if self.norm is None else {"norm": self.norm}
        changes = {name: x for name, x in asked.items() if hasattr(built, name) and name not in self.scheme_options}
        return replace(built, **changes) if changes else built

    def head_norm(self) -> HeadNorm | None:
        """The module of `qk_norm` for one attention."""
        return HeadNorm(self.shape.head_dim) if self.qk_norm else None

    def backbone_changes(self) -> dict[str, Any]:
        """The options of positions, MLP, norms and attention that are not nanoGPT's."""
        return {name: getattr(self, name) for name in BACKBONE if getattr(self, name) != getattr(type(self), name)}

    @classmethod
    def preset(cls, size: str, **changes: Any) -> GPTConfig:
        """The paper's size S, M or L, or modern-S, modern-M or modern-L, with other options as given.

        All have the paper's head, which is tied and has no bias.

        The modern ones have the same layers, heads and widths. They have rotary positions, SwiGLU, RMSNorm, norms of
        queries and keys, three or four heads of queries per head of keys, and no biases.
        """
        sizes = [*PRESETS, *MODERN_KV_HEADS]
        if size not in sizes:
            raise unknown("size", size, sizes)
        layers, heads, width = PRESETS[size.removeprefix("modern-")]
        modern = {**MODERN, "kv_heads": MODERN_KV_HEADS[size]} if size in MODERN_KV_HEADS else {}
        paper = {"layers": layers, "heads": heads, "width": width, "head": "tied", "head_bias": "none"}
        return cls(**{**paper, **modern, **changes})

    def as_dict(self) -> dict[str, Any]:
        """All options, as JSON can hold them."""
        return {**asdict(self), "scheme_options": json_options(self.scheme_options)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GPTConfig:
        """The config of what `as_dict` returned. An unknown name is an error, and so is one that is missing."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown("model option", name, known)
        missing = [name for name in known if name not in values]
        if missing:
            raise ValueError(f"the model option {missing[0]} is missing, as in an older format: give every option.")
        return cls(**values)


# layers, heads and width of the paper's sizes
PRESETS = {
    size: tuple(declared(GPTConfig)[name].paper_value(size) for name in ("layers", "heads", "width"))
    for size in ("S", "M", "L")
}
