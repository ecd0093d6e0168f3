"""Our models as lm_eval sees them; importing this registers `--model spheret`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import torch
from torch import Tensor

from spheret.data.tokenizers import Tokenizer
from spheret.evaluate.scoring import request, score
from spheret.model.gpt import GPT
from spheret.support.errors import need, unknown
from spheret.support.machine import resolve_device

TemplateLM: Any = need("lm_eval.api.model", "eval").TemplateLM
register_model = need("lm_eval.api.registry", "eval").register_model
_windows = need("lm_eval.utils", "eval")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# what a task may ask of generation, and what each is if it does not
GENERATION = {
    "until": (),
    "max_gen_toks": 256,
    "do_sample": False,
    "temperature": None,
    "top_k": None,
    "top_p": None,
    "seed": None,
}


def check_batch_size(given: int | str) -> int | None:
    """A number of requests, or None for "auto"."""
    if str(given) == "auto":
        return None
    if not str(given).isdecimal() or int(given) < 1:
        raise ValueError(f'batch size must be a positive number or "auto", got {given!r}.')
    return int(given)


class Lines:
    """Progress where there is no terminal: a line whenever another tenth is done."""

    def __init__(self, what: str, total: int, stream: TextIO):
        self.what, self.total, self.stream, self.done = what, total, stream, 0

    def __call__(self, n: int) -> None:
        before, self.done = self.done, self.done + n
        if 10 * before // self.total < 10 * self.done // self.total:
            print(f"{self.what}: {self.done:,} of {self.total:,}", file=self.stream, flush=True)


def _tasks(requests: Sequence[Any]) -> list[str | None]:
    """Which task each request is of, where lm_eval says so."""
    return [getattr(asked, "task_name", None) for asked in requests]


@register_model("spheret")
class SpheretLM(TemplateLM):
    """A run's model, or any GPT with its tokenizer, behind lm_eval's three questions.

    run, step: a run directory and which of its checkpoints, the newest by default; or model and tokenizer.
    batch_size: requests in a batch or "auto".  dtype: of weights and arithmetic; probabilities are float32 or better.
    """

    def __init__(
        self,
        run: str | None = None,
        step: int | None = None,
        batch_size: int | str = "auto",
        device: str | None = None,
        dtype: str = "float32",
        max_batch_size: int | None = None,
        model: GPT | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        super().__init__()
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES)
        if run is not None:
            from spheret.runs.run import open_run

            opened = open_run(run)
            model, tokenizer = opened.model(step=step), opened.tokenizer()
        if model is None or tokenizer is None:
            raise ValueError("an evaluation needs a run directory: give run=RUN, or a model and its tokenizer.")
        if tokenizer.vocab_size > model.config.vocab:
            raise ValueError(
                f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and the model rows for "
                f"{model.config.vocab}: it is not the one that this model was trained with."
            )
        self._device = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.gpt, self.text = model.to(self._device, DTYPES[dtype]).eval(), tokenizer
        self.batch_size = check_batch_size(batch_size)
        # of each task: requests whose text was cut on the left, and all of them
        self.truncated: Counter[str | None] = Counter()
        self.asked: Counter[str | None] = Counter()
        # the tasks of the requests that are being scored
        self.owners: list[str | None] = []
        # kept: lm_eval's own bars are silenced by putting another in its place
        self.stream, self.quiet = sys.stderr, False

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> SpheretLM:
        """From `--model_args`, which lm_eval's own options give way to."""
        options = {name: value for name, value in (additional_config or {}).items() if value is not None}
        # lm_eval's command line says cuda:0 where nobody names a device, and falls back to the cpu for its own models
        if options.get("device") == "cuda:0" and not torch.cuda.is_available():
            del options["device"]
        return cls(**{**options, **arg_dict})

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
        made = []
        for task, (_key, context, continuation) in zip(self.owners, requests, strict=True):
            new, cut = request(context, continuation, self.max_length)
            made.append(new)
            self._count(task, cut)
        with self._progress("loglikelihood", len(made)) as tick:
            scores = score(self.gpt, made, self.batch_size, tick)
        for (key, *_rest), answer in zip(requests, scores, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return scores

    def _count(self, task: str | None, cut: bool) -> None:
        self.asked[task] += 1
        self.truncated[task] += cut

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Every token once, each document's windows as far apart as they can be: stride `block`, full last window."""
        windows, owner = [], []
        for index, (text,) in enumerate(r.args for r in requests):
            for pair in _windows.get_rolling_token_windows(
                self.tok_encode(text), self.eot_token_id, self.max_length, 1
            ):
                context, continuation = _windows.make_disjoint_window(pair)
                windows.append(request(context, continuation, self.max_length)[0])
                owner.append(index)
        self.asked.update(_tasks(requests))
        with self._progress("rolling loglikelihood", len(windows)) as tick:
            scores = score(self.gpt, windows, self.batch_size, tick)
        totals = [0.0] * len(requests)
        for index, (value, _) in zip(owner, scores, strict=True):
            totals[index] += value
        for made, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", made.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string, the end of text or `max_gen_toks`, in batches padded on the left."""
        order = sorted(range(len(requests)), key=lambda i: (str(requests[i].args[1]), -len(requests[i].args[0])))
        said = [""] * len(requests)
        size = self.batch_size or 16
        with self._progress("generation", len(requests)) as tick:
            while order:
                options = requests[order[0]].args[1]
                batch = [i for i in order[:size] if requests[i].args[1] == options]
                order = order[len(batch) :]
                for i, text in zip(batch, self._generate([requests[i] for i in batch], options), strict=True):
                    said[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                tick(len(batch))
        return said

    def _generate(self, requests: list[Any], options: dict[str, Any]) -> list[str]:
        for name in options:
            if name not in GENERATION:
                raise unknown("generation option", name, GENERATION)
        wanted = {**GENERATION, **options}
        new = int(wanted["max_gen_toks"])
        room = self.max_length - new
        if room < 1:
            raise ValueError(f"max_gen_toks = {new} leaves no room for a prompt in a context of {self.max_length}.")
        stops = [wanted["until"]] if isinstance(wanted["until"], str) else list(wanted["until"])
        prompts = [self.tok_encode(text) or [self.eot_token_id] for text, *_ in (r.args for r in requests)]
        for task, prompt in zip(_tasks(requests), prompts, strict=True):
            self._count(task, len(prompt) > room)
        prompts = [prompt[-room:] for prompt in prompts]
        width = max(map(len, prompts))
        padding = torch.tensor([width - len(prompt) for prompt in prompts])
        tokens = torch.tensor([[self.eot_token_id] * (width - len(prompt)) + prompt for prompt in prompts])

        def finished(tokens: Tensor) -> bool:
            return all(self._said(row, stops)[1] for row in tokens[:, width:].tolist())

        made = self.gpt.generate(
            tokens.to(self._device),
            new,
            temperature=(1.0 if wanted["temperature"] is None else wanted["temperature"])
            if wanted["do_sample"]
            else 0,
            top_k=wanted["top_k"] or None,
            top_p=wanted["top_p"],
            seed=wanted["seed"],
            padding=padding.to(self._device),
            vocab=self.text.vocab_size,
            until=finished,
        )
        return [self._said(row, stops)[0] for row in made[:, width:].tolist()]

    def _said(self, ids: list[int], stops: list[str]) -> tuple[str, bool]:
        """The text of generated ids before the first stop, and whether there was one."""
        ended = self.eot_token_id in ids
        text = self.text.decode(ids[: ids.index(self.eot_token_id)] if ended else ids)
        places = [text.find(stop) for stop in stops if stop and stop in text]
        return text[: min(places, default=len(text))], ended or bool(places)

    @contextmanager
    def _progress(self, what: str, total: int) -> Iterator[Callable[[int], object]]:
        """A bar in a terminal, elsewhere a line a tenth."""
        if self.quiet or not self.stream.isatty():
            yield (lambda n: None) if self.quiet else Lines(what, total, self.stream)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(file=self.stream), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda n: bar.advance(task, n)
