"""One thread for torch and the engine's kernels: test models are tiny and the machine may have two cores."""

import torch

torch.set_num_threads(1)
