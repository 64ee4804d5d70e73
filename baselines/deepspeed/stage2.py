"""Zero2: DeepSpeed's ZeRO-2 with the optimizer offloaded.

Weights stay on the device, and gradients go to the host in buckets as they appear.

Invariant: the plan is what DeepSpeed 0.19.8 allocates in deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from typing import ClassVar

from baselines import footprint
from baselines.deepspeed.base import DeepSpeed
from baselines.deepspeed.options import Zero2Options
from baselines.model import count_params
from engine import pinned_rounding


class Zero2(DeepSpeed):
    """ZeRO-2 with CPU offload, as a `TrainingSystem`."""

    options_class: ClassVar[type[Zero2Options]] = Zero2Options
    options: Zero2Options

    def _accumulated(self) -> tuple[int, int]:
        """Bytes on device and host that several micro-batches accumulate in: fp32 on the device,
        or, where that is the compute dtype, on the host."""
        total, itemsize = (
            self.spec.part(count_params(self.spec.model).total),
            self.spec.dtype.itemsize,
        )
        if self.spec.shape.num_micro_batches == 1:
            return 0, 0
        return (4 * total, 0) if itemsize < 4 else (0, itemsize * total)

    def _device_plan(self) -> dict[str, int]:
        """Buckets are whole whatever the model; the largest gradient has a buffer of its own and
        may stand beside it."""
        spec, count = self.spec, count_params(self.spec.model)
        weights = spec.dtype.itemsize * count.total
        buckets = self.options.bucket_params() + 2 * count.largest
        device = {
            "weights": weights,
            "gradients": spec.dtype.itemsize * buckets + self._accumulated()[0],
            **footprint.activation_bytes(spec, self.options),
        }
        # The weights stand twice while they are made one flat tensor, and again while the master is
        # made of it.
        device["setup"] = max(0, 2 * weights - sum(device.values()))
        return device

    def _host_plan(self) -> dict[str, int]:
        """Weights are updated ones on their way to the device."""
        count, itemsize = count_params(self.spec.model), self.spec.dtype.itemsize
        total, largest = self.spec.part(count.total), itemsize * count.largest
        pinned = (itemsize * total, 4 * total, 4 * total, largest)
        rounded = sum(map(pinned_rounding, pinned)) if self.options.pins(self.spec) else 0
        host = {
            "weights": itemsize * total,
            "master": 4 * total,
            "moments": 8 * total,
            "gradients": 4 * total + self._accumulated()[1],
            "other": footprint.process_bytes(self.spec.device),
            "staging": largest + rounded,
        }
        return footprint.with_module(host, self.spec, self.spec.dtype.itemsize)
