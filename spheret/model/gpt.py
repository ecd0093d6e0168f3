"""nanoGPT's GPT-2, with options for its parts. Only the scheme decides how branches join the stream."""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spheret.connections import State
from spheret.connections.bounded import Constrained
from spheret.model.branches import MLP, Attention, Block, Cache, rotation
from spheret.model.config import PRESETS, GPTConfig
from spheret.model.head import Shift, UntiedHead, log_frequencies
from spheret.model.loss import cross_entropy, token_losses
from spheret.model.sampling import check_prompt, choose
from spheret.support.autograd import plain_backward, recorded

__all__ = ["GPT", "MLP", "PRESETS", "Attention", "Block", "Cache", "GPTConfig", "initial_std"]


def initial_std(width: int) -> float:
    """The standard deviation of new weights before a scheme's factors: 0.02, and more for widths below 768."""
    return 0.02 * math.sqrt(max(1.0, 768 / width))


class GPT(Constrained):
    """Maps tokens (batch, time) to logits (batch, time, vocab); with targets it returns their mean loss.

    Args:
        config: the options.
        counts: how often each token occurs in the training data, for `head_bias="unigram"`. Without counts that
            bias starts at 0, which the first training pass warns of.
    """

    def __init__(self, config: GPTConfig, counts: Tensor | None = None):
        super().__init__()
        self.config, self.recompute = config, config.recompute
        self.scheme = config.build_scheme()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.block, config.width) if config.positions == "learned" else None
        # what the scheme puts at the entry and at the exit, mostly a norm; transformers' Trainer does not decay
        # parameters under names that end in "_norm"
        self.entry_norm = self.scheme.enter(config.width)
        self.blocks = nn.ModuleList(Block(config, self.scheme, index) for index in range(config.layers))
        self.final_norm = self.scheme.exit(config.width)
        self.logit_norm = self.scheme.logit_gain(config.width, config.vocab)
        self.head_bias = nn.Parameter(torch.zeros(config.vocab)) if config.head_bias != "none" else None
        self.shift = Shift(config.width) if config.head == "shifted" else None
        # last, so that its weight is drawn after all others
        self.head = UntiedHead(config.width, config.vocab) if config.head == "untied" else None
        self._draw_weights()
        self._bias_to_check = True
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
            self._bias_to_check = True
        self._draw_weights()

    @torch.no_grad()
    def _draw_weights(self) -> None:
        """Draw weights from N(0, 0.02), with a wider spread for widths below 768.

        The draws are the same for every scheme. Then the factors of the scheme's `initialisation` and its constraint
        are applied.
        """
        std = initial_std(self.config.width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        factors = self.scheme.initialisation(2 * self.config.layers)
        values = self.config.shape.kv_heads * self.config.shape.head_dim
        for block in self.each_block():
            block.attention.qkv.weight[-values:] *= factors.value
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
        self.head_bias.copy_(log_frequencies(counts, self.config.vocab))

    def parameter_count(self) -> int:
        """The number of parameters. A head that shares its weight with the token embedding is counted once."""
        return sum(p.numel() for p in self.parameters())

    def constrain(self, held: Container[int] | None = None) -> None:
        """Apply the scheme's constraint to the weights, or to those whose id is in `held`. Most schemes have none.

        A new model fulfils it, and so does a model after a step of a torch optimiser. An update that you write by
        hand needs the call.
        """
        blocks = list(self.each_block())
        reading = [w for b in blocks for w in (b.attention.qkv.weight, b.mlp.hidden.weight)]
        writing = [w for b in blocks for w in (b.attention.output.weight, b.mlp.output.weight)]
        outer = [self.tokens.weight, *([] if self.head is None else [self.head.weight])]
        both = ([*outer, *reading], writing)
        self.scheme.constrain(*([w for w in weights if held is None or id(w) in held] for weights in both))

    def _check(self, tokens: Tensor, positions: Tensor | None, past: int) -> None:
        embedded = tokens.is_floating_point() and tokens.dim() == 3 and tokens.shape[-1] == self.config.width
        if not embedded and (tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32)):
            raise ValueError(
                f"tokens must be (batch, time) integers, or embeddings (batch, time, {self.config.width}), got "
                f"{tuple(tokens.shape)} {tokens.dtype}."
            )
        if not 0 < tokens.shape[1] + past <= self.config.block:
            raise ValueError(f"between 1 and block = {self.config.block} tokens fit, got {tokens.shape[1] + past}.")
        # reading the values would make a GPU wait, and a graph cannot hold it
        if torch.compiler.is_compiling() or recorded() or tokens.device.type != "cpu" or not tokens.numel():
            return
        low, high = (0, 0) if embedded else (int(x) for x in tokens.aminmax())
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
        states: list[State] | None = None,
    ) -> Tensor:
        """The stream after the last sublayer and the exit, (batch, time, width).

        Args:
            tokens: (batch, time) ids, or (batch, time, width) embeddings in place of the tokens' own.
            cache: keys and values of earlier tokens; the new ones are appended to them.
            positions: (batch or 1, time); by default the positions that follow the cache.
            mask: (batch or 1, 1, time, keys), either boolean (True where a token attends) or added to the scores; by
                default a token attends to itself and to the tokens before it.
            states: a list to which the scheme's state before each block is appended.
        """
        past = 0 if cache is None or positions is not None else cache.get_seq_length()
        self._check(tokens, positions, past)
        time = tokens.shape[1]
        if positions is None:
            positions = torch.arange(past, past + time, device=tokens.device)
            if past and time > 1 and mask is None:
                mask = torch.ones(time, past + time, dtype=torch.bool, device=tokens.device).tril(past)
        h = tokens if tokens.is_floating_point() else self.tokens(tokens)
        if self.positions is not None:
            h = h + self.positions(positions)
        state = self.entry_norm(F.dropout(h, self.config.dropout, self.training))
        turn = None
        if self.positions is None:
            turn = rotation(positions, self.config.shape.head_dim, self.config.rope_base)
        for index, block in enumerate(self.blocks):
            if states is not None:
                states.append(state)
            if cache is not None:
                state = block(state, partial(cache.update, layer_idx=index), mask, turn)
            elif self.recompute and torch.is_grad_enabled():
                state = checkpoint(block, state, None, mask, turn, use_reentrant=False)
            else:
                state = block(state, None, mask, turn)
        return self.final_norm(state)

    def read_out(self, h: Tensor) -> Tensor:
        """What the head's weight is multiplied with, from the output of `stream`."""
        return h if self.shift is None else self.shift(h)

    def logits(self, h: Tensor) -> Tensor:
        """Logits from the output of `stream`."""
        y = F.linear(self.read_out(h), self._outer_weight())
        y = y if self.logit_norm is None else self.logit_norm(y)
        return y if self.head_bias is None else y + self.head_bias.to(y.dtype)

    def _outer_weight(self) -> Tensor:
        return self.tokens.weight if self.head is None else self.head.weight

    def head_weight(self) -> Tensor:
        """The head: a weight (vocab, width) whose product with `read_out` is the logits without bias."""
        weight = self._outer_weight()
        return weight if self.logit_norm is None else self.logit_norm(weight.mT).mT

    def plain_head(self) -> Tensor:
        """The head as one linear layer: a weight whose product with `stream` is the logits without bias."""
        return self.head_weight() if self.shift is None else self.shift.fold(self.head_weight())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.logits(self.stream(tokens))
        # the stream before a shift is not held while the loss is computed
        read = self.read_out(self.stream(tokens))
        # compiled code must not depend on what comes last
        if self.training and plain_backward(read) and self._bias_to_check:
            self._check_bias()
        return cross_entropy(read, self.head_weight(), self.head_bias, targets)

    def _check_bias(self) -> None:
        """Warn, once, of a bias that should have started at the log frequencies and did not."""
        self._bias_to_check = False
        bias = self.head_bias if self.config.head_bias == "unigram" else None
        if type(bias) is nn.Parameter and not bias.is_meta and not bool(bias.any()):
            warnings.warn(
                "this model has head_bias = unigram and was made without counts, so that its bias starts at 0, with "
                "which models collapse more often: give GPT(config, counts=torch.bincount(tokens)), or take "
                "head_bias = zero.",
                stacklevel=2,
            )

    @torch.no_grad()
    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of every token, (batch, time), without a gradient."""
        return token_losses(self.read_out(self.stream(tokens)), self.head_weight(), self.head_bias, targets)

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
        vocab: int | None = None,
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
            vocab: choose only ids below it, for embeddings with more rows than the tokenizer has tokens.

        Beyond `block` tokens the model sees the last `block` of them, as in nanoGPT. Their positions count from 0, so
        the cache is of no use after such a shift, and each step computes the whole window again.
        """
        check_prompt(tokens, new, temperature, top_k, top_p)
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
                h = self.stream(seen, used)
                logits = self.logits(h[:, -1]).float() if weight.dtype != torch.float64 else self.logits(h[:, -1])
                chosen = choose(logits[:, :vocab], temperature, top_k, top_p, generator)
                tokens = torch.cat([tokens, chosen], dim=1)
        finally:
            for module, training in modes:
                module.training = training
        return tokens
