"""nanoGPT's GPT-2. The scheme alone decides how branches join the stream; the model names no method."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spheret.connections import Scheme, scheme
from spheret.connections.bounded import Constrained
from spheret.connections.parse import json_options, options_from_json
from spheret.kernels import check_environment
from spheret.model.linear import Linear, linear
from spheret.model.loss import cross_entropy, token_losses
from spheret.model.sampling import check_prompt, choose, left_padded
from spheret.support.autograd import recorded
from spheret.support.errors import unknown
from spheret.support.ranges import check_count, divisors, nearest

ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}
HEAD_BIASES = ("none", "zero", "unigram")
# the width of an MLP's hidden layer, in widths of the stream
HIDDEN = 4
# layers, heads, width
PRESETS = {"S": (12, 12, 768), "M": (24, 16, 1024), "L": (36, 20, 1280)}


@dataclass(frozen=True)
class GPTConfig:
    """All options of the model. `as_dict` and `from_dict` convert them to and from JSON.

    Args:
        layers: the number of blocks. Each has two sublayers, attention and an MLP.
        heads: the attention heads of a block; they divide the width.
        width: the width of the stream.
        block: the longest sequence in tokens.
        vocab: the rows of the embedding.
        bias: whether the linear layers have a bias, and the scheme's norms too unless `scheme_options` sets theirs.
        dropout: of branches, embedding and attention.
        scheme: a name of SCHEMES.
        scheme_options: options for `spheret.scheme`.
        activation: "gelu" is nanoGPT's, "gelu_tanh" that of GPT-2 in transformers.
        head_bias: the bias of the logits. "none" is the paper's, "zero" starts at 0, and "unigram" starts at the log
            frequencies that `GPT(config, counts)` computes.
        recompute: keep only the input of each block for the backward pass, and compute the rest again.
    """

    layers: int = 12
    heads: int = 12
    width: int = 768
    block: int = 1024
    vocab: int = 50304
    bias: bool = True
    dropout: float = 0.0
    scheme: str = "proj-spheretnorm"
    scheme_options: dict[str, Any] = field(default_factory=dict)
    activation: str = "gelu"
    head_bias: str = "none"
    recompute: bool = False

    def __post_init__(self) -> None:
        # the width before the heads, whose default follows from it
        for name in ("layers", "width", "heads", "block", "vocab"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
            check_count(name, value)
        if self.width % self.heads:
            near = nearest(divisors(self.width), self.heads)
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}: heads may be {near}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}.")
        if self.activation not in ACTIVATIONS:
            raise unknown("activation", self.activation, ACTIVATIONS)
        if self.head_bias not in HEAD_BIASES:
            raise unknown("head_bias", self.head_bias, HEAD_BIASES)
        object.__setattr__(self, "scheme_options", options_from_json(self.scheme_options))
        # the entry's options depend on the width: a radius beyond sqrt(width) is an error
        with torch.device("meta"):
            self.build_scheme().enter(self.width)
        check_environment()

    def build_scheme(self) -> Scheme:
        """The scheme with its options. If the model has no biases, its norms have none either."""
        built = scheme(self.scheme, **self.scheme_options)
        without_bias = not self.bias and hasattr(built, "bias") and "bias" not in self.scheme_options
        return replace(built, bias=False) if without_bias else built  # type: ignore[call-arg]

    @classmethod
    def preset(cls, size: str, **changes: Any) -> GPTConfig:
        """The paper's size S, M or L, with other options as given."""
        if size not in PRESETS:
            raise unknown("size", size, PRESETS)
        layers, heads, width = PRESETS[size]
        return cls(**{"layers": layers, "heads": heads, "width": width, **changes})

    def as_dict(self) -> dict[str, Any]:
        """All options, as JSON can hold them."""
        return {**asdict(self), "scheme_options": json_options(self.scheme_options)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GPTConfig:
        """The config of what `as_dict` returned. An unknown name is an error."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown("model option", name, known)
        return cls(**values)


class Cache:
    """Keys and values of the tokens seen so far: two tensors (batch, heads, block, d) per layer.

    The model calls only `update` and `get_seq_length`, which transformers' caches have too.
    """

    def __init__(self, config: GPTConfig, batch: int, device: torch.device, dtype: torch.dtype):
        shape = (batch, config.heads, config.block, config.width // config.heads)
        self.layers = [torch.empty(2, *shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.length = 0

    def update(self, k: Tensor, v: Tensor, layer_idx: int) -> tuple[Tensor, ...]:
        """Append new keys and values to those of a layer and return all of them. The last layer updates `length`."""
        past, end = self.layers[layer_idx], self.length + k.shape[2]
        past[0, :, :, self.length : end], past[1, :, :, self.length : end] = k, v
        if layer_idx == len(self.layers) - 1:
            self.length = end
        return past[:, :, :, :end].unbind()

    def get_seq_length(self) -> int:
        return self.length


# appends a layer's new keys and values, and returns all of them
Past = Callable[[Tensor, Tensor], Sequence[Tensor]]


class Attention(nn.Module):
    """Causal self-attention, from (batch, time, width) to the same shape.

    qkv_norm: what the scheme puts between the projections and the scores, see `Scheme.inside_attention`.
    """

    def __init__(self, config: GPTConfig, qkv_norm: nn.Module | None = None):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = Linear(config.width, 3 * config.width, bias=config.bias)
        self.qkv_norm = qkv_norm
        self.output = Linear(config.width, config.width, bias=config.bias)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """Three tensors (batch, heads, time, d)."""
        batch, time, width = x.shape
        # taken apart before the heads move, so that the three gradients are put together in the projection's order
        projected = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).unbind(2)
        parts = tuple(part.transpose(1, 2) for part in projected)
        return parts if self.qkv_norm is None else self.qkv_norm(*parts)

    def weights(self, x: Tensor) -> Tensor:
        """The attention weights (batch, heads, time, time). `forward` computes them inside its kernel only."""
        q, k, _ = self.queries_keys_values(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1)

    def forward(self, x: Tensor, past: Past | None = None, mask: Tensor | None = None) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.queries_keys_values(x)
        if past is not None:
            k, v = past(k, v)
        dropout = self.dropout if self.training else 0.0
        # without a mask a prompt attends causally, and a single new token attends to all tokens before it
        causal = mask is None and (past is None or time > 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        y = self.output(y.transpose(1, 2).reshape(batch, time, width))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with a GELU between them; the hidden layer is 4 width wide.

    hidden_norm: what the scheme puts before the GELU, see `Scheme.inside_mlp`.
    """

    def __init__(self, config: GPTConfig, hidden_norm: nn.Module | None = None):
        super().__init__()
        self.approximate, self.dropout = ACTIVATIONS[config.activation], config.dropout
        self.hidden = Linear(config.width, HIDDEN * config.width, bias=config.bias)
        self.hidden_norm = hidden_norm
        self.output = Linear(HIDDEN * config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if self.hidden_norm is not None:
            hidden = self.hidden_norm(hidden)
        y = self.output(F.gelu(hidden, approximate=self.approximate))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Two sublayers, attention and MLP. Each joins the stream through its own connection."""

    def __init__(self, config: GPTConfig, scheme: Scheme, index: int):
        super().__init__()
        width, first, sublayers = config.width, 2 * index + 1, 2 * config.layers
        self.attention = Attention(config, scheme.inside_attention(width, config.heads, first, sublayers))
        self.mlp = MLP(config, scheme.inside_mlp(width, HIDDEN * width, first + 1, sublayers))
        self.attention_connection, self.mlp_connection = scheme.connect_block(width, index + 1, config.layers)

    def forward(self, h: Tensor, past: Past | None = None, mask: Tensor | None = None) -> Tensor:
        h = self.attention_connection(h, lambda x: self.attention(x, past, mask))
        return self.mlp_connection(h, self.mlp)


class GPT(Constrained):
    """Maps tokens (batch, time) to logits (batch, time, vocab); with targets it returns their mean loss.

    Args:
        config: the options.
        counts: how often each token occurs, for `head_bias="unigram"`. Without counts that bias starts at 0.
    """

    def __init__(self, config: GPTConfig, counts: Tensor | None = None):
        super().__init__()
        self.config, self.recompute = config, config.recompute
        self.scheme = config.build_scheme()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        # what the scheme puts at the entry and at the exit, mostly a norm; transformers' Trainer does not decay
        # parameters under names that end in "_norm"
        self.entry_norm = self.scheme.enter(config.width)
        self.blocks = nn.ModuleList(Block(config, self.scheme, index) for index in range(config.layers))
        self.final_norm = self.scheme.exit(config.width)
        self.logit_norm = self.scheme.logit_gain(config.width, config.vocab)
        self.head_bias = nn.Parameter(torch.zeros(config.vocab)) if config.head_bias != "none" else None
        self._draw_weights()
        if counts is not None:
            self.start_from_counts(counts)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew and set every scalar, gain and bias to its start, a "unigram" bias to 0."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and not isinstance(module, (nn.Linear, nn.Embedding)) and reset is not None:
                reset()
        if self.head_bias is not None:
            nn.init.zeros_(self.head_bias)
        self._draw_weights()

    @torch.no_grad()
    def _draw_weights(self) -> None:
        """Draw weights from N(0, 0.02), with a wider spread for widths below 768.

        The draws are the same for every scheme. Then the factors of the scheme's `initialisation` and its constraint
        are applied.
        """
        std = 0.02 * math.sqrt(max(1.0, 768 / self.config.width))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        factors = self.scheme.initialisation(2 * self.config.layers)
        for block in self.each_block():
            block.attention.qkv.weight[2 * self.config.width :] *= factors.value
            block.attention.output.weight *= factors.output
            block.mlp.hidden.weight *= factors.hidden
            block.mlp.output.weight *= factors.output
        self.constrain()

    def each_block(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    @torch.no_grad()
    def start_from_counts(self, counts: Tensor) -> None:
        """Set the head's bias to the log frequencies. A token that never occurs counts as 0.5 occurrences."""
        if self.head_bias is None or self.config.head_bias != "unigram":
            raise ValueError(f'counts are for head_bias="unigram", and this model has {self.config.head_bias!r}.')
        if counts.dim() != 1 or len(counts) > self.config.vocab or (counts < 0).any() or counts.sum() == 0:
            raise ValueError(
                f"counts must be up to {self.config.vocab} numbers, none negative and not all 0, "
                f"got shape {tuple(counts.shape)}."
            )
        full = torch.full((self.config.vocab,), 0.5, dtype=torch.float64)
        full[: len(counts)] = counts.double().clamp(min=0.5).cpu()
        self.head_bias.copy_((full / full.sum()).log())

    def parameter_count(self) -> int:
        """The number of parameters. The head shares its weight with the token embedding and is counted once."""
        return sum(p.numel() for p in self.parameters())

    def constrain(self, held: Container[int] | None = None) -> None:
        """Apply the scheme's constraint to the weights, or to those whose id is in `held`. Most schemes have none.

        A new model fulfils it, and so does a model after a step of a torch optimiser. An update that you write by
        hand needs the call.
        """
        blocks = list(self.each_block())
        reading = [w for b in blocks for w in (b.attention.qkv.weight, b.mlp.hidden.weight)]
        writing = [w for b in blocks for w in (b.attention.output.weight, b.mlp.output.weight)]
        both = ([self.tokens.weight, *reading], writing)
        self.scheme.constrain(*([w for w in weights if held is None or id(w) in held] for weights in both))

    def _check(self, tokens: Tensor, positions: Tensor | None, past: int) -> None:
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens must be (batch, time) integers, got {tuple(tokens.shape)} {tokens.dtype}.")
        if not 0 < tokens.shape[1] + past <= self.config.block:
            raise ValueError(f"between 1 and block = {self.config.block} tokens fit, got {tokens.shape[1] + past}.")
        # reading the values would make a GPU wait, and a graph cannot hold it
        if torch.compiler.is_compiling() or recorded() or tokens.device.type != "cpu" or not tokens.numel():
            return
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= self.config.vocab:
            bad = low if low < 0 else high
            raise ValueError(f"token {bad} lies outside the vocabulary of {self.config.vocab}.")
        if positions is not None and int(positions.max()) >= self.config.block:
            raise ValueError(f"positions below block = {self.config.block} exist, got {int(positions.max())}.")

    def stream(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The stream after the last sublayer and the exit, (batch, time, width).

        Args:
            tokens: (batch, time) integers.
            cache: keys and values of earlier tokens, to which those of these tokens are appended.
            positions: (batch or 1, time); by default the positions that follow the cache.
            mask: (batch or 1, 1, time, keys), either boolean (True where a token attends) or added to the scores; by
                default a token attends to itself and to the tokens before it.
        """
        past = 0 if cache is None or positions is not None else cache.get_seq_length()
        self._check(tokens, positions, past)
        time = tokens.shape[1]
        if positions is None:
            positions = torch.arange(past, past + time, device=tokens.device)
            if past and time > 1 and mask is None:
                mask = torch.ones(time, past + time, dtype=torch.bool, device=tokens.device).tril(past)
        h = self.tokens(tokens) + self.positions(positions)
        h = self.entry_norm(F.dropout(h, self.config.dropout, self.training))
        for index, block in enumerate(self.blocks):
            if cache is not None:
                h = block(h, partial(cache.update, layer_idx=index), mask)
            elif self.recompute and torch.is_grad_enabled():
                h = checkpoint(block, h, None, mask, use_reentrant=False)
            else:
                h = block(h, None, mask)
        return self.final_norm(h)

    def logits(self, h: Tensor) -> Tensor:
        """Logits from the output of `stream`. The head's weight is the token embedding's."""
        y = linear(h, self.tokens.weight)
        y = y if self.logit_norm is None else self.logit_norm(y)
        return y if self.head_bias is None else y + self.head_bias.to(y.dtype)

    def head_weight(self) -> Tensor:
        """The head: a weight (vocab, width) whose product with the output of `stream` is the logits without bias."""
        weight = self.tokens.weight
        return weight if self.logit_norm is None else self.logit_norm(weight.mT).mT

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        h = self.stream(tokens)
        if targets is None:
            return self.logits(h)
        return cross_entropy(h, self.head_weight(), self.head_bias, targets)

    @torch.no_grad()
    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of every token, (batch, time), without a gradient."""
        return token_losses(self.stream(tokens), self.head_weight(), self.head_bias, targets)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        new: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        cached: bool = True,
        padding: Tensor | None = None,
        vocab: int | None = None,
        until: Callable[[Tensor], bool] | None = None,
    ) -> Tensor:
        """The given tokens (batch, time) followed by `new` generated ones.

        Args:
            tokens: the prompts, (batch, time) integers.
            new: how many tokens to add.
            temperature: 0 takes the likeliest token.
            top_k: sample among the k likeliest tokens.
            top_p: sample among the fewest tokens that hold probability p.
            seed: of the choices; None takes torch's own generator.
            cached: keep keys and values. The result is the same without, and slower.
            padding: (batch,), the number of entries at the left of each row that are padding.
            vocab: choose only ids below it, for embeddings with more rows than the tokenizer has tokens.
            until: a function of all tokens so far; generation stops when it returns True.

        Beyond `block` tokens the model sees the last `block` of them, as in nanoGPT. Positions are learned, so the
        cache is of no use after such a shift, and each step computes the whole window again.
        """
        check_prompt(tokens, new, temperature, top_k, top_p, padding)
        if vocab is not None and not 0 < vocab <= self.config.vocab:
            raise ValueError(f"vocab must lie between 1 and {self.config.vocab}, got {vocab}.")
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        weight = self.tokens.weight
        dtype = (
            torch.get_autocast_dtype(tokens.device.type)
            if torch.is_autocast_enabled(tokens.device.type)
            else weight.dtype
        )
        cache = Cache(self.config, len(tokens), tokens.device, dtype) if cached else None
        try:
            for _ in range(new):
                if cache is None or tokens.shape[1] > self.config.block:
                    seen, used = tokens[:, -self.config.block :], None
                else:
                    seen, used = tokens[:, cache.length :], cache
                if padding is None:
                    h = self.stream(seen, used)
                else:
                    keys = seen.shape[1] if used is None else tokens.shape[1]
                    h = self.stream(seen, used, *left_padded(seen.shape[1], keys, padding - (tokens.shape[1] - keys)))
                logits = self.logits(h[:, -1]).float() if weight.dtype != torch.float64 else self.logits(h[:, -1])
                chosen = choose(logits[:, :vocab], temperature, top_k, top_p, generator)
                tokens = torch.cat([tokens, chosen], dim=1)
                if until is not None and until(tokens):
                    break
        finally:
            for module, training in modes:
                module.training = training
        return tokens
