import os

# Triton's kernels run in its interpreter here; it looks when it is first imported
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import settings

# the same examples on every machine, however slow it is
settings.register_profile("spheret", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("spheret")


def pytest_configure(config: pytest.Config) -> None:
    # two test processes on two cores: a thread each
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1337)
