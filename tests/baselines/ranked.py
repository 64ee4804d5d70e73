"""Trains systems on the ranks that torch's launcher started, or on one; rank 0 writes what it saw.

torchrun --nproc-per-node 2 -m tests.baselines.ranked FOLDER
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tests.conftest  # noqa: F401 - one thread, and DeepSpeed asks for the processor once
from baselines import distributed
from baselines.model import initial_weights
from baselines.registry import RANKED, build
from baselines.system import SystemSpec, Unsupported
from engine import Batch
from tests.baselines.test_baseline_parity import BATCH_SIZE, CPU, SEQ_LEN, make_batch, make_spec

STEPS = 4
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in RANKED},
    "zero3_optimizer": ("zero3", {"param_persistence_threshold": 10**12}),
    "zero3_twinflow": ("zero3", {"offload_param": False, "offload_ratio": 0.5}),
    "fsdp2_grad_op": ("fsdp2", {"reshard_after_forward": False, "accumulate_on_device": True}),
}
"""Every registered system that trains on several ranks, and its settings in conf/system."""
CASES = {
    "fp32-accumulation": (torch.float32, 2, 0.1, True),
    "bf16": (torch.bfloat16, 1, 0.1, False),
}
"""As in test_baseline_parity."""


def uneven(batch: Batch) -> Batch:
    """Three label tokens in the last row of a micro-batch, for the last rank has fewer than the
    others."""
    labels = batch.labels.clone()
    labels[:, -1, 3:] = -100
    return dataclasses.replace(batch, labels=labels)


def trained(system: str, spec: SystemSpec) -> dict[str, Any]:
    """Losses and gradient norms of some steps, the loss of another batch, the parameters."""
    one = build(system, spec)
    try:
        one.setup(initial_weights(spec.model, 0, spec.dtype, CPU))
        found: dict[str, Any] = {"losses": [], "norms": []}
        for step in range(STEPS):
            found["losses"].append(float(one.train_step(uneven(make_batch(step, spec)))))
            assert one.gradient_norm is not None
            found["norms"].append(float(one.gradient_norm))
        one.drain()
        found["evaluated"] = float(one.evaluate(make_batch(9, spec)))
        found["parameters"] = dict(one.parameters())
    finally:
        one.close()
    return found


def all_trained(num_ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(system and case, what was seen) of all."""
    for name, (system, options) in OPTIONS.items():
        for case, settings in CASES.items():
            spec = dataclasses.replace(make_spec(*settings, **options), num_ranks=num_ranks)
            yield f"{name} {case}", trained(system, spec)


def refusals() -> dict[str, str]:
    """What saving says, of one system of each kind."""
    said = {}
    for name in ("fsdp2", "zero3"):
        one = build(name, dataclasses.replace(make_spec(), num_ranks=2))
        try:
            one.save(Path("nowhere"))
        except Unsupported as error:
            said[name] = str(error)
    return said


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ[distributed.STORE] = str(folder / "store")
    distributed.acquire("gloo")  # as a cell does: systems come and go in its group
    found = dict(all_trained(distributed.num_ranks()))
    assert distributed.slowest(float(distributed.rank())) == distributed.num_ranks() - 1
    assert distributed.gathered(distributed.rank() + 5) == [5, 6]
    assert distributed.num_collectives() > 0
    mine = distributed.part_of(make_batch(0, make_spec()))
    assert mine.tokens.shape == (1, BATCH_SIZE // distributed.num_ranks(), SEQ_LEN)
    if distributed.rank() == 0:
        torch.save({"trained": found, "refused": refusals()}, folder / "seen.pt")
    distributed.release()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
