"""Closed-form bytes that every baseline shares: activations, logits, the workspace of the libraries
below, and pinned host blocks.

Invariant: on the device an upper estimate, for phases are added that need not coincide; on the host
what the systems allocate (tests/baselines/test_host_plans.py holds both to rows of an H200);
nothing here allocates.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from baselines.model import config_of, count_params
from baselines.options import AS_MANY_AS_FIT, CommonOptions
from baselines.system import SystemSpec
from engine import (
    HOST_OVERHEAD,
    USABLE_DEVICE,
    Masks,
    Plan,
    Widths,
    layer_activation_bytes,
    logits_bytes,
    pinned_rounding,
)

CUDA_WORKSPACE_BYTES = 1 << 30
"""cuBLAS and cuDNN workspaces and the allocator's fragments."""


def activation_bytes(spec: SystemSpec, options: CommonOptions) -> dict[str, int]:
    """`checkpoints` and `activations` of one rank's rows of a micro-batch, by kind.

    checkpoints: the input of every recomputed layer, the decoder's output and its gradient.
    activations: what the graph of every kept layer holds, and beside it one chunk's logits or the
    temporaries of one layer's backward, whichever are larger, for they are never alive together;
    or, where that is more, one recomputed layer's graph, made when those are gone. The formulas are
    the engine's, so that plans differ by schedule alone. Eager attention adds its scores, in the
    compute dtype before and after, and their fp32 softmax. Packed documents add masks, of which
    each layer's graph saves a part.
    """
    config = config_of(spec.model)
    itemsize = spec.dtype.itemsize
    tokens = spec.rows * spec.shape.seq_len
    layer = functools.partial(
        layer_activation_bytes, Widths.of(config), tokens, itemsize, compiled=options.compile
    )
    kept = layer(backward=False)
    temporaries = layer(backward=True) - kept
    if spec.model.attn_implementation == "eager":
        kept += tokens * spec.shape.seq_len * Widths.of(config).heads * (2 * itemsize + 4)
    masks = packed_masks(spec)
    kept += masks.saved
    logits = logits_bytes(
        config.vocab_size, min(options.loss_chunk, tokens), itemsize, compiled=options.compile
    )
    hidden = tokens * config.hidden_size * itemsize
    num_layers: int = config.num_hidden_layers
    num_kept = options.num_kept
    return {
        "checkpoints": (num_layers - num_kept + 2) * hidden,
        "activations": max(num_kept * kept + max(temporaries, logits), kept + temporaries),
        **({"masks": masks.given} if masks.given else {}),
    }


def packed_masks(spec: SystemSpec) -> Masks:
    """The masks of one rank's rows of a micro-batch of packed documents, or none."""
    if not spec.packed:
        return Masks()
    config, shape = config_of(spec.model), spec.shape
    config._attn_implementation = spec.model.attn_implementation
    return Masks.of(config, spec.rows, shape.seq_len, spec.dtype.itemsize)


def usable_bytes(spec: SystemSpec) -> int:
    """Device bytes that a plan may fill where a system chooses what to put there; 0 on the CPU.

    Less than the engine's on a large device: of DeepSpeed, 6.5 GB were fragments beyond a plan that
    filled an H200.
    """
    if spec.device.type != "cuda":
        return 0
    return int(USABLE_DEVICE * (spec.device_memory or int(torch.cuda.mem_get_info(spec.device)[1])))


def choose_kept_layers(system: Any) -> None:
    """Make keep_activations=-1 of a system with `CommonOptions` the largest number whose plan has
    room on the device, 0 on the CPU.

    `system.placement` has the number then. What the constructor chose comes first. ValueError, in
    one line, for more layers than the model has.
    """
    options = getattr(system, "options", None)
    if not isinstance(options, CommonOptions):
        return
    spec: SystemSpec = system.spec
    num_layers: int = config_of(spec.model).num_hidden_layers
    if options.keep_activations > num_layers:
        raise ValueError(
            f"system.keep_activations: got {options.keep_activations}, allowed {AS_MANY_AS_FIT} to "
            f"{num_layers}, the layers of {spec.model.name}; choose one of these"
        )
    if options.keep_activations != AS_MANY_AS_FIT:
        return

    def device_bytes(number: int) -> int:
        system.options = dataclasses.replace(options, keep_activations=number)
        planned: Plan = system.plan()
        return planned.device_bytes

    room = usable_bytes(spec)
    number = bisect.bisect_right(range(1, num_layers + 1), room, key=device_bytes) if room else 0
    system.options = dataclasses.replace(options, keep_activations=number)
    system.placement = {"kept_layers": number}


def plan_on(device: torch.device, on_device: Mapping[str, int], on_host: Mapping[str, int]) -> Plan:
    """The plan with the libraries' workspace added; the CPU has none."""
    workspace = CUDA_WORKSPACE_BYTES if device.type == "cuda" else 0
    return Plan(device={**on_device, "workspace": workspace}, host=dict(on_host))


def with_module(host: dict[str, int], spec: SystemSpec, itemsize: int) -> dict[str, int]:
    """A rank's host plan and, as `setup`, what the whole module needs beyond it where several ranks
    make one each, before it is spread over them; `itemsize` bytes a parameter."""
    if spec.num_ranks == 1:
        return host
    module = itemsize * count_params(spec.model).total
    return {**host, "setup": max(0, module - sum(host.values()))}


class PinnedBlocks:
    """What torch's pinned allocator holds: blocks of a power of two, kept when freed, for requests
    of their own size alone.

    Source: allocate and get_free_block of ATen/core/CachingHostAllocator.h, torch 2.13. Shared
    memory that was observed under 2.11 is within 60 MB of it at 3B and 7B (FSDP2) and within 24 MB
    at 0.5B to 14B (ZeRO-3).
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: Counter[int] = Counter()

    def take(self, num_bytes: int) -> None:
        """Allocate: a free block of that size, else a new one."""
        block = num_bytes + pinned_rounding(num_bytes)
        if self._free[block]:
            self._free[block] -= 1
        else:
            self.num_bytes += block

    def free(self, num_bytes: int) -> None:
        """Give back what `take` gave for as many bytes; nothing returns to the system."""
        self._free[num_bytes + pinned_rounding(num_bytes)] += 1


def process_bytes(device: torch.device, num_processes: int = 1) -> int:
    """Host bytes of processes with torch and CUDA, before any model; not counted on the CPU."""
    return num_processes * HOST_OVERHEAD if device.type == "cuda" else 0
