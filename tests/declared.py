"""An executor whose operations see only what they declare: `Op.reads` and `Op.writes` are checked,
not trusted.

While a handler runs, every resource that its operation did not declare holds NaN everywhere, or is
not there. What it wrote elsewhere, and what it read elsewhere and passed on, is `UndeclaredError`.
Beside resources, the values of one step belong to the computations and the moments that wait to the
updates: other operations have neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from engine import MegaTrain
from engine.layers.decoder import tensors
from engine.step import Kind, Op

NAN = torch.tensor([0xA1, 0x7F], dtype=torch.uint8)
"""Two bytes of which bf16 and fp32 are NaN, of the kind that any arithmetic changes: an update in
place shows."""
COMPUTING = (
    Kind.EMBED,
    Kind.FORWARD,
    Kind.TAIL,
    Kind.RECOMPUTE,
    Kind.BACKWARD,
    Kind.EMBED_BACKWARD,
)
COMPUTING += (Kind.EVALUATE, Kind.LOSS)
COMPUTING += (Kind.CLIP, Kind.DROP, Kind.STAGE, Kind.UPDATE_HERE)
"""Kinds that pass values to one another on the compute lane."""
UPDATING = (Kind.UPDATE, Kind.MOMENTS)
"""Kinds that pass values to one another on the CPU lane."""
VIRTUAL = frozenset({"updates", "peers", "evictions"})
"""Names that order operations and stand for no memory."""


class UndeclaredError(AssertionError):
    """An operation touched what it did not declare."""


def declared_only(engine: MegaTrain) -> MegaTrain:
    """The engine, set up, with every handler guarded."""
    executor = engine.executor
    for kind, handler in executor.handlers.items():
        executor.handlers[kind] = _guarded(executor, handler)
    return engine


def _guarded(executor: Any, handler: Callable[[Op, Any], None]) -> Callable[[Op, Any], None]:
    def guarded(op: Op, s: Any) -> None:
        guard = _Guard(executor, op, s)
        try:
            handler(op, guard.state)
        except Exception as error:
            raise UndeclaredError(f"{op}: {error!r}") from error
        finally:
            touched = guard.release()
        if touched:
            raise UndeclaredError(f"{op}: touched {', '.join(touched)}")

    return guarded


class _Guard:
    """Hides what an operation did not declare, until `release`."""

    def __init__(self, executor: Any, op: Op, s: Any) -> None:
        self.executor, self.op, self.s = executor, op, s
        self.computes, self.updates = op.kind in COMPUTING, op.kind in UPDATING
        declared = op.reads | op.writes
        named = {n for n in declared - VIRTUAL if n.split(" ")[0] not in ("activations", "disk")}
        unknown = named - set(self._resources())
        assert not unknown, f"{op} declares {unknown}, which are no memory"
        self.mine = {b for b in range(executor.blocks.num_blocks) if f"activations {b}" in declared}
        lane = {"the compute lane's values"} if self.computes else set()
        resources = self._resources()
        self.hidden = [
            (n, t, t.clone()) for n, ts in resources.items() if n not in declared | lane for t in ts
        ]
        self.read_only = [
            (n, t, t.clone())
            for n, ts in resources.items()
            if n in op.reads - op.writes
            for t in ts
        ]
        for _, tensor, _ in self.hidden:
            tensor.copy_(_nans(tensor.numel()))
        self.offloaded, self.late = s.offloaded, executor._late
        s.offloaded = {block: kept for block, kept in s.offloaded.items() if block in self.mine}
        self.state = s if self.computes else SimpleNamespace(index=s.index, offloaded=s.offloaded)
        if not self.updates:
            executor._late = None

    def _resources(self) -> dict[str, list[torch.Tensor]]:
        """Name -> the bytes of its memory. No write to them counts as one for autograd, which looks
        at versions."""
        memory, store, blocks = self.executor.memory, self.executor.store, self.executor.blocks
        found = {f"slot {i}": [t] for i, t in enumerate(memory.slots)}
        found |= {f"slab {i}": [t] for i, t in enumerate(memory._slabs)}
        found |= {f"device gradients {b}": [t] for b, t in memory._own_slabs.items()}
        found |= {f"device weights {b}": [t] for b, t in memory._homes.items()}
        for block, state in enumerate(store.states):
            master = [t for t in (state.weight, state.extra) if t is not None]
            moments = [state.exp_avg, state.exp_avg_sq]
            if blocks.on_device(block):
                found[f"device weights {block}"] = [store.homes[block], *master[1:], *moments]
            elif blocks.on_disk(block):
                found[f"host weights {block}"] = master[:1]
            else:
                found |= {f"host weights {block}": master, f"host moments {block}": moments}
        if blocks.disk_blocks:
            found |= {f"stage {i}": [t] for i, t in enumerate(store.stages)}
        found |= {f"host slab {i}": [t] for i, t in store.slabs.items()}
        found |= {f"host gradients {b}": [t] for b, t in store.parked.items()}
        found |= {f"host activations {b}": [t] for b, t in store.activations.items()}
        found |= {f"activations {b}": kept._pieces for b, kept in self.s.offloaded.items()}
        tied = memory.tied_gradients
        wide = [memory._layer_wide, tied._sums[0]._base if tied and tied._wide else None]
        lane = [memory.scale, *self.executor._hyper.values(), *wide]
        if blocks.num_ranks == 1:
            lane.append(memory.norms)
        else:
            found["norms"] = [memory.norms]
        found |= {
            "verdict": [memory.verdict],
            "the compute lane's values": [t for t in lane if t is not None],
        }
        return {
            name: [t.data.view(-1).view(torch.uint8) for t in ts if t.numel()]
            for name, ts in found.items()
        }

    def release(self) -> list[str]:
        """Everything as it was or as the operation left it; what it touched undeclared."""
        touched = [f"{name} (written)" for name, tensor, _ in self.hidden if not _is_hidden(tensor)]
        for _, tensor, before in self.hidden:
            tensor.copy_(before)
        touched += [
            f"{n} (written, declared as read)"
            for n, t, before in self.read_only
            if not torch.equal(t, before)
        ]
        touched += [f"activations {block} (made)" for block in set(self.s.offloaded) - self.mine]
        others = {block: kept for block, kept in self.offloaded.items() if block not in self.mine}
        self.s.offloaded = others | self.s.offloaded
        self.executor._late = self.late
        return touched + [
            f"what is NaN now in {name}" for name, tensor in self._results() if _has_nan(tensor)
        ]

    def _results(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the operation may have written, as numbers."""
        resources = self._resources()
        numbers = {n for n in self.op.writes - VIRTUAL if not n.startswith("stage")}
        for name in numbers & set(resources):
            # A block's first array is its weight; what follows is its remainder, which is no
            # number.
            arrays = resources[name][:1] if "weights" in name else resources[name]
            yield from ((name, array) for array in map(self._numbers(name), arrays))
        if self.computes:
            values = [vars(self.s)[n] for n in ("hidden", "saved", "grads", "loss")]
            yield from (("the step's values", value) for value in tensors(values))
            yield "norms", self.executor.memory.norms

    def _numbers(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Bytes as what they are; activations, of any dtype, as whether they are what was
        hidden."""
        if "activations" in name:
            return lambda array: torch.tensor(torch.nan if _is_hidden(array) else 0.0)
        wide = name.startswith(("verdict", "norms", "host moments"))
        dtype = torch.float32 if wide else self.executor.store.spec.dtype
        return lambda array: array.view(dtype)


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _is_hidden(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor, _nans(tensor.numel()))


@cache
def _nans(num_bytes: int) -> torch.Tensor:
    return NAN.repeat(num_bytes // 2 + 1)[:num_bytes]
