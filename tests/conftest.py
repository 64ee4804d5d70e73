"""One thread for torch and the engine's kernels, before every test: the models are tiny and the
machine may have two cores."""

import functools
import gc
import os
from collections.abc import Iterator

import cpuinfo
import pytest
import torch
from torch.nn import functional as F

from tests.models import make_model

torch.set_num_threads(1)
# Processes that a test starts have a thread for each core. Spinning while they wait for one another
# took a third of the time of all cores where several tests ran at once.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# DeepSpeed asks at each optimizer it makes, and each answer takes a process and a second.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def pytest_collection_finish() -> None:
    """Collections of garbage, a tenth of the time, need not look at what is imported by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """What a test changed in its whole process is taken back.

    DeepSpeed replaces F.linear for good: other systems would train through its Python, and compiled
    layers lose their gradients.
    """
    linear = F.linear
    yield
    F.linear = linear
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models() -> dict[torch.dtype, torch.nn.Module]:
    return {
        dtype: make_model("qwen2", num_hidden_layers=4, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
