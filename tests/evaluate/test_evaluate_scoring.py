"""Packed, masked and batched log-likelihoods against plain ones, one request at a time."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spheret import GPT, GPTConfig
from spheret.evaluate.scoring import Request, batches, pack, request, score

BLOCK, VOCAB = 16, 7


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(layers=2, heads=2, width=16, block=BLOCK, vocab=VOCAB, scheme="proj-spheretnorm")).double()
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return gpt.eval()


def plain(model: GPT, item: Request) -> tuple[float, bool]:
    """One sequence through the whole model."""
    tokens = torch.tensor([item.tokens])
    with torch.no_grad():
        logits = model(tokens[:, :-1])[0, -item.scored :].log_softmax(-1)
    target = tokens[0, -item.scored :]
    return float(logits.gather(1, target[:, None]).sum()), bool((logits.argmax(-1) == target).all())


token = st.integers(0, VOCAB - 1)
# few tokens and short texts, so that prefixes are shared in many ways
texts = st.lists(
    st.tuples(st.lists(token, min_size=1, max_size=12), st.lists(token, min_size=1, max_size=6)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30)
@given(pairs=texts, size=st.sampled_from([None, 1, 3, 16]))
def test_packed_scores_are_the_plain_ones(model, pairs: Sequence, size):
    requests = [request(context, continuation, BLOCK)[0] for context, continuation in pairs]
    for (value, greedy), item in zip(score(model, requests, size), requests, strict=True):
        plain_value, plain_greedy = plain(model, item)
        assert value == pytest.approx(plain_value, rel=1e-9)
        assert greedy == plain_greedy


def test_a_shared_question_is_computed_once():
    question = [*range(VOCAB), 1, 2, 3]
    requests = [request(question, answer, BLOCK)[0] for answer in ([4, 5], [4, 6], [1, 1], [4, 5])]
    (row,) = pack(requests, BLOCK)
    # the question, and the tokens of the answers that the model reads: 4 once and 1 once
    assert len(row.tokens) == len(question) + 2
    assert row.positions == [*range(10), 10, 10]
    assert sorted(number for number, _ in row.requests) == [0, 1, 2, 3]
    mask = row.mask(14)
    assert mask[11].nonzero().flatten().tolist() == [*range(10), 11]
    assert mask[13].nonzero().flatten().tolist() == [13]


def test_rows_fit_the_context_and_batches_their_size():
    requests = [request([n % 3] * 9, [n % 5, n % 2, n % 7, 1], BLOCK)[0] for n in range(40)]
    rows = pack(requests, BLOCK)
    assert max(len(row.tokens) for row in rows) <= BLOCK
    assert sum(len(row.requests) for row in rows) == 40
    lengths = [[len(row.tokens) for row in batch] for batch in batches(rows, None, 64)]
    assert all(max(batch) * len(batch) <= 64 for batch in lengths)
    assert [n for batch in lengths for n in batch] == sorted((n for batch in lengths for n in batch), reverse=True)
    assert all(sum(len(r.requests) for r in b) <= 5 or len(b) == 1 for b in batches(rows, 5, 64))


def test_cut_on_the_left():
    item, cut = request(range(30), [1, 2], BLOCK)
    assert cut
    assert item.inputs == (*range(15, 30), 1)
    assert not request(range(15), [1, 2], BLOCK)[1]
    with pytest.raises(ValueError, match=r"17 .*16"):
        request([1], [0] * 17, BLOCK)
    with pytest.raises(ValueError, match="at least one token of context"):
        request([1], [], BLOCK)
