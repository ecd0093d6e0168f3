"""The loader is a pure function of the step. Its windows do not depend on the number of ranks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spheret.data import Data, prepare
from spheret.data.loader import shuffled


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Some texts as bytes, in shards far shorter than the whole."""
    root = tmp_path_factory.mktemp("loader")
    (root / "texts").mkdir()
    for number in range(80):
        (root / "texts" / f"{number}.txt").write_text(f"text {number} " * (number % 9 + 3))
    return prepare(str(root / "texts"), "bytes", root / "out", val_fraction=0.3, shard_tokens=500)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(size=st.integers(1, 700), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 9))
def test_shuffled_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


def test_shuffled_mixes_and_depends_on_seed_and_epoch() -> None:
    orders = [shuffled(np.arange(10_000), 10_000, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for n, order in enumerate(orders):
        # independent orders agree in about one place, and neighbours are a third of the range apart
        assert all((order == other).sum() < 10 for other in orders[:n])
        assert abs(np.abs(np.diff(order)).mean() / 10_000 - 1 / 3) < 0.02


def test_windows_are_those_of_the_stream(data: Data) -> None:
    stream = data.stream()
    whole = np.concatenate([np.fromfile(data.path / shard.name, "<u2") for shard in data.manifest.shards["train"]])
    assert len(data.manifest.shards["train"]) > 5
    assert len(stream) == len(whole) == data.tokens()
    ring = np.concatenate([whole, whole])
    loader = data.loader(block=37, batch_size=6, seed=5)
    for step in range(40):
        x, y = loader.batch(step)
        assert x.dtype == y.dtype == torch.int64
        assert x.is_contiguous()
        assert y.is_contiguous()
        for row, start in enumerate(loader.starts(step)):
            assert x[row].tolist() == ring[start : start + 37].tolist()
            assert y[row].tolist() == ring[start + 1 : start + 38].tolist()
    # longer than a shard
    assert stream.window(5, 2500).tolist() == ring[5:2505].tolist()


def test_an_epoch_visits_every_window_once(data: Data) -> None:
    loader = data.loader(block=50, batch_size=1, seed=3)
    size = loader.windows_per_epoch
    assert size == data.tokens() // 50
    orders = []
    for epoch in range(3):
        starts = np.concatenate([loader.starts(epoch * size + n) for n in range(size)])
        offset = starts.min() % 50
        places = np.sort((starts - starts.min()) % data.tokens())
        assert len(set(starts.tolist())) == size
        # every epoch has a grid from an offset of its own, round the ring
        assert set(np.diff(places)) <= {50, 50 + data.tokens() % 50}
        orders.append((offset, starts.tolist()))
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (1, 4), (3, 2), (6, 2), (12, 1)])
def test_the_global_batch_does_not_depend_on_ranks_and_accumulation(
    data: Data, world_size: int, accumulation: int
) -> None:
    reference = data.loader(block=16, batch_size=12, seed=1)
    ranks = [
        data.loader(
            block=16,
            batch_size=12 // (world_size * accumulation),
            seed=1,
            rank=rank,
            world_size=world_size,
            accumulation=accumulation,
        )
        for rank in range(world_size)
    ]
    assert {loader.windows_per_update for loader in ranks} == {12}
    for step in (0, 3, 1000, 10**12):
        x, y = reference.batch(step)
        parts = [loader.batch(step, micro) for micro in range(accumulation) for loader in ranks]
        assert torch.equal(torch.cat([part[0] for part in parts]), x)
        assert torch.equal(torch.cat([part[1] for part in parts]), y)


def test_the_background_thread_ends_and_passes_errors_on(data: Data) -> None:
    loader = data.loader(block=16, batch_size=4)
    batches = loader.batches()
    next(batches)
    assert any(thread.name == "spheret-loader" for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name == "spheret-loader" for thread in threading.enumerate())
    with pytest.raises(ValueError, match="step counts from 0"):
        list(loader.batches(start=-1))


def test_evaluating_never_changes_training(data: Data) -> None:
    loader = data.loader(block=16, batch_size=4, seed=1)
    plain = [x for x, _ in loader.batches(stop=6)]
    state = torch.get_rng_state()
    mixed = []
    for x, _ in loader.batches(stop=6):
        list(data.validation(block=16, batch_size=3))
        mixed.append(x)
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_validation_windows_are_fixed_and_know_their_documents(data: Data) -> None:
    validation = data.validation(block=16, batch_size=7)
    batches = list(validation)
    assert len(batches) == len(validation)
    whole = data.stream("val").window(0, data.tokens("val"))
    x, y, documents = (torch.cat(parts) for parts in zip(*batches, strict=True))
    count = (data.tokens("val") - 1) // 16
    assert x.flatten().tolist() == whole[: count * 16].tolist()
    assert y.flatten().tolist() == whole[1 : count * 16 + 1].tolist()
    # the targets of a document are its text
    for number in range(1, int(documents.max())):
        text = data.decode(y[documents == number])
        assert text.startswith("text ")
        assert text.endswith("<|endoftext|>")
        assert text.count("<|endoftext|>") == 1
    few = data.validation(block=16, batch_size=2, windows=5)
    assert len(few.starts) == 5
    assert few.starts[-1] > len(whole) // 2


def test_counts(data: Data) -> None:
    whole = data.stream().window(0, data.tokens())
    assert data.counts().tolist() == np.bincount(whole, minlength=257).tolist()
    assert data.padded_vocab_size == 320


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"block": 10**6}, "window"),
        ({"block": 0}, "block"),
        ({"batch_size": 0}, "batch_size"),
        ({"world_size": 0}, "world_size"),
        ({"accumulation": 0}, "accumulation"),
        ({"rank": 2, "world_size": 2}, "rank"),
    ],
)
def test_bad_options(data: Data, options: dict[str, int], noun: str) -> None:
    with pytest.raises(ValueError, match=noun):
        data.loader(**{"block": 16, "batch_size": 4, **options})
