"""Bytes and seconds of one model on one machine for any placement of its blocks, and the best of
them.

Invariant: what is planned here is what the store and the device memory allocate and what the step
does; nothing here allocates, but for the probe of rates that were not given.
"""

from __future__ import annotations

import math
from bisect import bisect_left as bisect
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engine.blocks import Blocks
from engine.config import ATTENTION, AUTO, PLACED, EngineConfig
from engine.planner import placement
from engine.planner.cost import Cost
from engine.planner.rates import MANY_THREADS, Rates, disk_rates, measure, peer_rate
from engine.ranks import Ranks
from engine.sizes import Plan, StoreSpec, Work, device_bytes
from engine.step import operations
from engine.timeline import Timeline, simulate, window_s

MOST_LAYERS = 1 << 14
HOST_OVERHEAD = 2 * 10**9
"""Bytes of host memory that a process with torch and a CUDA context holds before any model."""
CPU_OVERHEAD = 8 * 10**8 if torch.version.cuda else 5 * 10**8
"""The same on a CPU; torch's libraries for CUDA take memory also where nobody calls them. No plan
has it, as none of another system has; what `disk_blocks=-1` puts on drives leaves room for it."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What to plan for; None asks the machine at hand."""

    rates: Rates | None = None
    device_memory: int | None = None
    """Bytes."""
    host_memory: int | None = None
    """Bytes that a chosen placement must stay under; None sets no limit."""
    disk_bytes: int | None = None
    """Most that `most_layers` puts on disk; None sets no limit."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Everything but where the blocks live."""

    work: Work
    config: EngineConfig
    device: torch.device
    num_threads: int
    """Of the optimizers of all ranks together."""
    machine: Machine = field(default_factory=Machine)
    ranks: Ranks = field(default_factory=Ranks)
    folders: Sequence[Path] = ()
    """Of drives, for state on disk."""

    @cached_property
    def rates(self) -> Rates:
        """What the machine does in a second: as given, or probed once. ValueError where several
        ranks are given no rate of what they say to each other."""
        found = self.machine.rates or self._probed()
        if self.ranks.count > 1 and not found.peer_bytes:
            raise ValueError(
                f"rates.peer_bytes: got {found.peer_bytes:g}, allowed > 0 with {self.ranks.count} "
                "ranks, bytes that a device gets from the others in a second; give it"
            )
        if self.config.disk_blocks and not min(found.disk_read_bytes, found.disk_write_bytes):
            raise ValueError(
                "rates.disk_read_bytes: got 0, or rates.disk_write_bytes, allowed > 0 with "
                f"system.disk_blocks={self.config.disk_blocks}, bytes a second; give both"
            )
        return found

    def _probed(self) -> Rates:
        """By the first rank, for which the others wait; the same on all."""
        names = [field.name for field in fields(Rates)]
        pinned, use_native = self.config.pinned != "none", not self.config.torch_adamw
        if self.ranks.index == 0:
            layer = self.work.layouts[1].numel
            found = measure(self.device, self._threads, layer, pinned=pinned, use_native=use_native)
        else:
            found = Rates(**dict.fromkeys(names, 0.0))
        if self.config.disk_blocks and self.ranks.index == 0:
            read, written = disk_rates(self.folders)
            found = replace(found, disk_read_bytes=read, disk_write_bytes=written)
        if self.ranks.count > 1:
            found = replace(found, peer_bytes=peer_rate(self.device, self.ranks))
        if self.ranks.joined:
            mine = torch.tensor(astuple(found), dtype=torch.float64)
            first = self.ranks.stacked(mine)[0].tolist()
            found = Rates(**dict(zip(names, first, strict=True)))
        return found

    @property
    def _threads(self) -> list[int]:
        """Numbers of threads that AdamW may run with: the one that is asked for, or all; of many,
        half of them too."""
        fixed = self.config.num_threads or self.config.torch_adamw or self.ranks.count > 1
        few = fixed or self.num_threads <= MANY_THREADS
        return [self.num_threads] if few else [self.num_threads, self.num_threads // 2]

    @property
    def chosen(self) -> EngineConfig:
        """The config with as many threads as AdamW was fastest with, where that was left open: it
        is probed for that alone where no rate was asked for before."""
        if self.device.type != "cuda" or len(self._threads) == 1:
            return self.config
        fastest = int(self.rates.adamw_threads)
        return replace(self.config, num_threads=fastest if fastest in self._threads else 0)

    @cached_property
    def _device_memory(self) -> int:
        return self.machine.device_memory or int(torch.cuda.mem_get_info(self.device)[1])

    def placed(self, asked: Blocks) -> Blocks:
        """`asked` with what was left open chosen."""
        if asked.disk_blocks == AUTO:
            given = asked if self.device.type == "cuda" else placement.nothing_moved(asked)
            fewest = placement.fewest_on_disk(
                given, fits=self._fits, device_bytes=self._device_total
            )
            asked = replace(asked, disk_blocks=fewest)
        return self._placed(asked)

    def _placed(self, asked: Blocks) -> Blocks:
        """All but what is on disk; on the CPU nothing is gained by moving things."""
        blocks = self._filled(asked)
        if self.device.type == "cuda" and blocks.two_passes and self._one_pass_wins(blocks):
            return self._filled(replace(asked, late_moments=False))
        return blocks

    def _one_pass_wins(self, blocks: Blocks) -> bool:
        """Whether AdamW in one pass is faster: it moves fewer bytes, which counts where the CPU is
        what the whole step waits for."""
        once = replace(blocks, late_moments=False)
        return self.predict(once).step_s < (1 - placement.EQUAL) * self.predict(blocks).step_s

    def _filled(self, asked: Blocks) -> Blocks:
        """The fewest layers between two kept inputs that there is room for; but where attention's
        results may be kept, which take the same room, as many as make the shortest step."""
        open_ = AUTO in (asked.keep_attention, asked.offload_attention)
        if asked.checkpoint_interval != AUTO or not open_ or not self._keeps_attention:
            return self._filled_given(asked)
        given = {name: max(0, getattr(asked, name)) for name in ATTENTION}
        fewest = placement.checkpoint_interval(
            replace(asked, **given), fits=self._fits, device_bytes=self._device_total
        )
        # More than the root of the number of layers keeps no fewer inputs.
        tried = range(fewest, max(fewest, math.isqrt(asked.num_layers) + 1) + 1)
        found = [self._filled_given(replace(asked, checkpoint_interval=n)) for n in tried]
        fitting = [blocks for blocks in found if self._fits(blocks)]
        return min(fitting, key=lambda blocks: self.predict(blocks).step_s, default=found[0])

    @property
    def _keeps_attention(self) -> bool:
        compiled = self.work.compiled and not self.work.mlp_chunk
        return self.device.type == "cuda" and not compiled

    def _filled_given(self, asked: Blocks) -> Blocks:
        given = {name: max(0, getattr(asked, name)) for name in ATTENTION}
        blocks = self._filled_but_for_attention(replace(asked, **given))
        if not self._keeps_attention:
            return blocks
        if asked.keep_attention == AUTO:
            blocks = self._with_most(blocks, "keep_attention")
        if asked.offload_attention != AUTO:
            return blocks
        # where fewer than two stay, what passes through the device needs room for two
        kept = blocks.keep_attention
        fewest = max(0, kept - 2) if asked.keep_attention == AUTO else kept
        found = [
            self._with_most(replace(blocks, keep_attention=number), "offload_attention")
            for number in range(kept, fewest - 1, -1)
        ]
        return max(found, key=lambda blocks: len(blocks.attention_kept))

    def _with_most(self, blocks: Blocks, name: str) -> Blocks:
        """With as many layers in that option as there is room for."""

        def of(number: int) -> Blocks:
            option: dict[str, Any] = {name: number}
            return replace(blocks, **option)

        numbers = range(1, blocks.num_layers + 1)
        return of(bisect(numbers, True, key=lambda n: not self._fits(of(n))))

    def _filled_but_for_attention(self, asked: Blocks) -> Blocks:
        gpu, blocks = self.device.type == "cuda", asked
        if blocks.checkpoint_interval == AUTO:
            interval = (
                placement.checkpoint_interval(
                    blocks, fits=self._fits, device_bytes=self._device_total
                )
                if gpu
                else 1
            )
            blocks = replace(blocks, checkpoint_interval=interval)
        if blocks.offload_activations and gpu:
            cost = self._cost(placement.nothing_moved(blocks))
            visits = math.ceil(cost.evict_s / cost.forward_s)
            blocks = replace(blocks, evict_visits=visits)
        if not blocks.keep_activations:
            blocks = replace(blocks, reload_weights=0)
        if AUTO not in (getattr(blocks, name) for name in PLACED):
            moves = gpu and blocks.offload_activations
            return self._with_room_to_evict(blocks) if moves else blocks
        if not gpu:
            return placement.nothing_moved(blocks)
        return placement.choose(
            blocks,
            fits=self._fits,
            device_bytes=self._device_total,
            step_s=lambda candidate: self.predict(candidate).step_s,
        )

    def _with_room_to_evict(self, blocks: Blocks) -> Blocks:
        """A given placement, whose evictions take as many forwards as rates say, or as there is
        room for, if possible with the usual margin. The forward then waits: a slow probe is no
        refusal."""
        sooner = [replace(blocks, evict_visits=n) for n in range(blocks.evict_visits, 0, -1)]
        for limit in (placement.usable(self._device_memory), self._device_memory):
            for one in sooner:
                if self._device_total(one) <= limit:
                    return one
        return sooner[-1]

    def _device_total(self, blocks: Blocks) -> int:
        return sum(self.device_bytes(blocks).values())

    def _fits(self, blocks: Blocks) -> bool:
        if blocks.device_optimizer + blocks.disk_blocks > blocks.num_blocks:
            return False
        host = math.inf if self.machine.host_memory is None else self.machine.host_memory
        needed, device = sum(self.host_bytes(blocks).values()), self._device_total(blocks)
        on_cpu = self.device.type == "cpu"
        needed += device + CPU_OVERHEAD if on_cpu else 0
        fits_host = blocks.num_ranks * needed <= placement.USABLE_HOST * host
        return fits_host and (on_cpu or device <= placement.usable(self._device_memory))

    def most_layers(self, asked: Blocks) -> tuple[int, int]:
        """Layers like the first that there is room for, and the bytes that then lie on disk: with
        as many blocks on the device as fit there, and all others on disk where `asked` leaves that
        open and it helps."""
        tried = 1
        while tried < MOST_LAYERS and self._away(asked, tried) is not None:
            tried *= 2
        most = bisect(range(1, tried), True, key=lambda n: self._away(asked, n) is None)
        return most, (self._away(asked, most) or 0) if most else 0

    def _away(self, asked: Blocks, num_layers: int) -> int | None:
        """Bytes on disk of a model of so many layers; None where there is no room for it."""
        first, layer, *_, last = self.work.layouts
        work = replace(self.work, layouts=[first, *[layer] * num_layers, last])
        planner = replace(self, work=work)
        empty = replace(asked, num_layers=num_layers, device_optimizer=0, disk_blocks=0)
        if empty.checkpoint_interval == AUTO:  # which takes the least of the device
            empty = replace(empty, checkpoint_interval=max(1, math.isqrt(num_layers)))
        usable = placement.usable(planner._device_memory)
        if planner._device_total(empty) > usable:
            return None
        most = range(1, empty.num_blocks + 1)
        here = bisect(
            most,
            True,
            key=lambda n: planner._device_total(replace(empty, device_optimizer=n)) > usable,
        )
        left = empty.num_blocks - here
        limit = math.inf if planner.machine.disk_bytes is None else planner.machine.disk_bytes

        def on_disk(away: int) -> int:
            return planner.store_spec(placed(away)).disk_bytes

        def placed(away: int) -> Blocks:
            return replace(empty, device_optimizer=here, disk_blocks=max(0, away))

        room = bisect(range(1, left + 1), True, key=lambda n: on_disk(n) > limit)
        numbers = sorted({0, room, left - 2, left - 1, left}) if asked.disk_blocks else [0]
        for away in numbers:  # as little on disk as may be
            if on_disk(away) <= limit and planner._fits(placed(away)):
                return on_disk(away)
        return None

    def predict(self, blocks: Blocks) -> Timeline:
        """One steady step, simulated."""
        return simulate(operations(self._as_run(blocks)), self._cost(blocks).seconds)

    def predict_window(self, blocks: Blocks, num_steps: int) -> float:
        """Seconds of `num_steps` steps between two drains, simulated."""
        ops = operations(self._as_run(blocks))
        return window_s(ops, self._cost(blocks).seconds, num_steps)

    def _as_run(self, blocks: Blocks) -> Blocks:
        """Pageable copies hold the launching thread until they are done, so all takes turns as on
        one stream."""
        return replace(blocks, streams=1) if self.config.pinned == "none" else blocks

    def _cost(self, blocks: Blocks) -> Cost:
        rest = self.store_spec(blocks).rest_itemsize
        return Cost(blocks=blocks, work=self.work, rates=self.rates, rest_itemsize=rest)

    def store_spec(self, blocks: Blocks) -> StoreSpec:
        """Sizes of the host store."""
        return StoreSpec.of(blocks, self.work, self.config, self.device)

    def host_bytes(self, blocks: Blocks) -> dict[str, int]:
        """Host bytes by kind."""
        other = {"other": HOST_OVERHEAD} if self.device.type == "cuda" else {}
        return self.store_spec(blocks).host_bytes() | other

    def device_bytes(self, blocks: Blocks) -> dict[str, int]:
        """Device bytes by kind."""
        return device_bytes(blocks, self.work) | self.store_spec(blocks).device_state_bytes()

    def plan(self, blocks: Blocks) -> Plan:
        """Closed-form bytes by kind."""
        away = self.store_spec(blocks).disk_bytes
        disk = {"optimizer": away} if away else {}
        return Plan(device=self.device_bytes(blocks), host=self.host_bytes(blocks), disk=disk)
