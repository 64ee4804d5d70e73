"""One thread for torch and the engine's kernels: test models are tiny and the machine may have two cores."""

import pytest
import torch

from tests.models import make_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models() -> dict[torch.dtype, torch.nn.Module]:
    return {dtype: make_model("qwen2", num_hidden_layers=4, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
