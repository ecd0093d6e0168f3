"""SpheretLM and lm_eval's own `hf` model give the same answers to all eleven tasks, request by request."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from spheret import GPT, GPTConfig
from spheret.data.tokenizers import describe
from spheret.data.tokenizers import load as load_tokenizer
from spheret.evaluate.eval_command import answer
from spheret.evaluate.lm import SpheretLM
from spheret.evaluate.results import summary
from spheret.evaluate.tasks import PAPER_COLUMNS, TASKS
from spheret.hub import SpheretForCausalLM, from_gpt2
from spheret.hub.tokenizer_files import write_tokenizer

ROWS = Path(__file__).parent / "rows"


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path_factory.mktemp("cache")))


def randomize(model):
    """Weights of size 0.2 with random biases and gains, so that a mistake changes the answers."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator) + (1 if p.dim() == 1 and "weight" in name else 0))
    return model.eval()


def hf_model(model, tokenizer, tmp_path, batch_size=4):
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    block = getattr(model.config, "max_position_embeddings", None)
    write_tokenizer(tmp_path, describe(tokenizer), tokenizer.file, block)
    return HFLM(
        pretrained=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path), batch_size=batch_size, device="cpu"
    )


def flat(answers):
    """Every response of every request, and every metric of every document."""
    likelihoods, decisions = [], []
    for name in TASKS:
        for row in answers["samples"][name]:
            for response in row["filtered_resps"]:
                pair = response if isinstance(response, tuple) else (response, None)
                likelihoods.append(pair[0])
                decisions.append(pair[1])
            decisions += [row[metric] for metric in row["metrics"] if metric.startswith("acc")]
    return torch.tensor(likelihoods, dtype=torch.float64), decisions


def assert_same(a, b):
    (likelihoods, decisions), (other_likelihoods, other_decisions) = flat(a), flat(b)
    assert len(likelihoods) == 96
    assert decisions == other_decisions
    torch.testing.assert_close(likelihoods, other_likelihoods, rtol=1e-5, atol=3e-5)


@pytest.fixture(scope="module")
def model():
    config = GPTConfig(layers=2, heads=2, width=32, block=256, vocab=320, scheme="proj-spheretnorm", head_bias="zero")
    return randomize(GPT(config))


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    """The answers of lm_eval's HFLM around the same model as transformers sees it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPHERET_CACHE", str(tmp_path_factory.mktemp("cache")))
        lm = hf_model(SpheretForCausalLM.of(model), load_tokenizer("bytes"), tmp_path_factory.mktemp("tokenizer"))
        return answer(lm, list(TASKS), None, ROWS)


@pytest.mark.parametrize("batch_size", [1, 3, 16, "auto"])
def test_the_same_answers_as_hf(model, reference, batch_size):
    lm = SpheretLM(model=model, tokenizer=load_tokenizer("bytes"), batch_size=batch_size)
    assert_same(answer(lm, list(TASKS), None, ROWS), reference)
    # the pages of wikitext are longer than 256 bytes: they are scored in windows. nothing is cut
    assert lm.truncated.total() == 0
    assert lm.requested.total() == 96


def test_the_values_are_lm_evals(model, reference):
    for _, task, metric in PAPER_COLUMNS:
        values = [row[metric] for row in reference["samples"][task]]
        assert summary(metric, values).value == pytest.approx(reference["results"][task][f"{metric},none"], rel=1e-12)


def test_standard_errors_are_lm_evals(monkeypatch):
    # a pool that is forked from a process with threads may wait for ever
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    from lm_eval.api.metrics import bootstrap_stderr, mean_stderr, perplexity

    generator = torch.Generator().manual_seed(0)
    flips = (torch.rand(200, generator=generator) < 0.3).double().tolist()
    assert summary("acc", flips).stderr == pytest.approx(mean_stderr(flips), rel=1e-12)
    likelihoods = (-3 + torch.randn(400, generator=generator)).tolist()
    bootstrapped = bootstrap_stderr(perplexity, likelihoods, iters=1000)
    assert summary("perplexity", likelihoods).stderr == pytest.approx(bootstrapped, rel=0.15)
    # with one word per document, word perplexity is perplexity
    by_word = summary("word_perplexity", [[x, 1] for x in likelihoods])
    assert by_word.stderr == pytest.approx(summary("perplexity", likelihoods).stderr)


def test_word_perplexity_error_by_simulation():
    """The standard error of one sample of documents predicts the spread over many samples."""
    generator = torch.Generator().manual_seed(0)

    def sample():
        words = torch.randint(50, 400, (60,), generator=generator)
        likelihoods = -words * (3.4 + 0.3 * torch.randn(60, generator=generator))
        return list(zip(likelihoods.tolist(), words.tolist(), strict=True))

    summaries = [summary("word_perplexity", sample()) for _ in range(400)]
    spread = torch.tensor([s.value for s in summaries]).std().item()
    assert sum(s.stderr for s in summaries) / 400 == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("block", [24, pytest.param(256, marks=pytest.mark.slow)])
def test_gpt2_of_transformers_scores_the_same_imported(tmp_path, block):
    """An independent reference: its weights, tokenizer and arithmetic are transformers' own."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50257, n_positions=block, n_embd=32, n_layer=2, n_head=2)
    gpt2 = randomize(GPT2LMHeadModel(config))
    tokenizer = load_tokenizer("gpt2")
    lm = SpheretLM(model=from_gpt2(gpt2), tokenizer=tokenizer, batch_size=3)
    assert_same(
        answer(lm, list(TASKS), None, ROWS), answer(hf_model(gpt2, tokenizer, tmp_path), list(TASKS), None, ROWS)
    )
    assert (lm.truncated.total() > 0) == (block == 24)


def test_our_table_is_lm_evals():
    """Data sets, splits and metrics are those of lm_eval's own definitions."""
    import lm_eval.tasks
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    bundled = Path(lm_eval.tasks.__file__).parent
    for name, task in TASKS.items():
        path = bundled / task.definition
        written = yaml.load(path.read_text(), Loader)
        if "include" in written:
            written = yaml.load((path.parent / written["include"]).read_text(), Loader) | written
        assert written["task"] == name
        assert task.dataset == (written["dataset_path"], written.get("dataset_name"))
        assert task.split == (written.get("test_split") or written["validation_split"])
        metrics = {row["metric"] for row in written["metric_list"]}
        assert {metric for _, t, metric in PAPER_COLUMNS if t == name} <= metrics
    assert {task for _, task, _ in PAPER_COLUMNS} == set(TASKS)
