"""A GPT as a model of lm_eval."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch

from spheret.data.tokenizers import Tokenizer
from spheret.evaluate.scoring import request, score
from spheret.model.gpt import GPT
from spheret.support.errors import need, unknown
from spheret.support.machine import resolve_device
from spheret.support.meter import Meter
from spheret.support.ranges import whole_number

TemplateLM: Any = need("lm_eval.api.model", "eval").TemplateLM
_lm_eval_utils = need("lm_eval.utils", "eval")

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}


def _tasks(requests: Sequence[Any]) -> list[str | None]:
    """The task of each request, or None if lm_eval does not name it."""
    return [getattr(request, "task_name", None) for request in requests]


class SpheretLM(TemplateLM):
    """An lm_eval model around any GPT with its tokenizer.

    batch_size: requests per batch, or "auto".
    precision: of weights and arithmetic. Log-probabilities are computed in float32 or better.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        batch_size: int | str = "auto",
        device: str | None = None,
        precision: str = "float32",
    ):
        super().__init__()
        if precision not in PRECISIONS:
            raise unknown("precision", precision, PRECISIONS)
        if tokenizer.vocab_size > model.config.vocab:
            raise ValueError(
                f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and the model's embedding has "
                f"{model.config.vocab} rows: the model was trained with a different tokenizer."
            )
        self._device = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.gpt, self.text = model.to(self._device, PRECISIONS[precision]).eval(), tokenizer
        # None fills the batches
        auto, name = str(batch_size) == "auto", '--batch-size, if it is not "auto",'
        self.batch_size = None if auto else whole_number(name, str(batch_size))
        # requests per task, and how many of them were cut on the left
        self.requested: Counter[str | None] = Counter()
        self.truncated: Counter[str | None] = Counter()
        # the task of each request that `_loglikelihood_tokens` is about to score
        self.owners: list[str | None] = []
        # `spheret eval` silences lm_eval by replacing sys.stderr; our own progress goes to the original
        self.stream, self.quiet = sys.stderr, False

    @property
    def eot_token_id(self) -> int:
        return self.text.end_of_text

    @property
    def max_length(self) -> int:
        return self.gpt.config.block

    @property
    def tokenizer_name(self) -> str:
        return f"{self.text.name}-{self.text.sha256}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.text.encode(string).tolist()

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        for number, (context, continuation) in enumerate(r.args for r in requests):
            if not continuation:
                raise ValueError(
                    f"request {number} has nothing to score: its continuation after {context!r} is empty."
                )
        self.quiet, self.owners = disable_tqdm, _tasks(requests)
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        to_score = []
        for task, (_key, context, continuation) in zip(self.owners, requests, strict=True):
            item, cut = request(context, continuation, self.max_length)
            to_score.append(item)
            self.requested[task] += 1
            self.truncated[task] += cut
        with self._progress("loglikelihood", len(to_score)) as tick:
            return score(self.gpt, to_score, self.batch_size, tick)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole documents, each token scored once.

        Windows are `block` tokens apart. The last window of a document is full and scores only the remaining tokens.
        """
        windows, owners = [], []
        for index, (text,) in enumerate(r.args for r in requests):
            for pair in _lm_eval_utils.get_rolling_token_windows(
                self.tok_encode(text), self.eot_token_id, self.max_length, 1
            ):
                context, continuation = _lm_eval_utils.make_disjoint_window(pair)
                windows.append(request(context, continuation, self.max_length)[0])
                owners.append(index)
        self.requested.update(_tasks(requests))
        with self._progress("rolling loglikelihood", len(windows)) as tick:
            scores = score(self.gpt, windows, self.batch_size, tick)
        totals = [0.0] * len(requests)
        for index, (value, _) in zip(owners, scores, strict=True):
            totals[index] += value
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        names = ", ".join(sorted({str(task) for task in _tasks(requests)}))
        raise ValueError(f"{names} asks for generated text, and spheret scores given answers only: take other tasks.")

    @contextmanager
    def _progress(self, title: str, total: int) -> Iterator[Callable[[int], object]]:
        """Show progress on stderr. Call the result with the number of requests that were finished."""
        done = 0
        with redirect_stderr(self.stream), Meter(title, self.quiet) as meter:

            def tick(count: int) -> None:
                nonlocal done
                done += count
                meter.show(f"{done:,} of {total:,}", done / total, done == total)

            meter.show(f"0 of {total:,}", 0.0)
            yield tick
