"""Files that safetensors itself reads, and pickles that nobody does."""

import hashlib
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from spheret.runs import tensors

DTYPES = list(tensors._NAMES)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=6))
def test_the_library_reads_what_is_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    stored = {f"a.{i}": torch.randn(shape).mul(9).to(dtype) for i, (dtype, shape) in enumerate(rows)}
    digest = tensors.write(path, [tensors.lazy_tensor(name, tensor) for name, tensor in stored.items()])
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    for read in (load_file(path), dict(tensors.each(path))):
        assert read.keys() == stored.keys()
        for name, tensor in stored.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)


def test_a_view_is_written_as_it_looks(tmp_path):
    x = torch.arange(12.0).reshape(3, 4).mT[1:]
    tensors.write(tmp_path / "x", [tensors.lazy_tensor("x", x)])
    assert torch.equal(load_file(tmp_path / "x")["x"], x)


OTHERS = {
    "an archive of torch": lambda path: torch.save({"a": torch.ones(2)}, path),
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"a": [1.0]})),
    "noise": lambda path: path.write_bytes(b"hello, this is no tensor file at all"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_safetensors_is_refused(name, tmp_path):
    OTHERS[name](tmp_path / "x")
    with pytest.raises(ValueError, match="safetensors"):
        dict(tensors.each(tmp_path / "x"))
