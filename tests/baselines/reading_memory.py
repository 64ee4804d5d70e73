"""The memory that a checkpoint takes on its way into the engine.

python -m tests.baselines.reading_memory FOLDER    # bytes by which the process grew at its peak, bytes of the plan, bytes of the largest parameter
"""

import sys
from pathlib import Path

import psutil
import torch

from baselines.checkpoint import CheckpointWeights
from baselines.checkpoint_folder import spec_of
from baselines.model import build_skeleton, count_params
from engine import EngineConfig, MegaTrain, Recipe


def main(folder: Path) -> None:
    spec = spec_of(folder)
    engine = MegaTrain(
        build_skeleton(spec, torch.bfloat16),
        recipe=Recipe(lr=1e-3),
        micro_batch_size=1,
        seq_len=16,
        config=EngineConfig(num_threads=1, torch_adamw=True),
    )
    weights = CheckpointWeights(spec)
    before = psutil.Process().memory_info().rss
    engine.setup(weights)
    # getrusage would tell the peak of the process that started this one, where that was larger
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    print(peak - before, sum(engine.plan().host.values()), 4 * count_params(spec).largest)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
