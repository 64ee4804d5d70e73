"""A cell's memory and the device's clock and power, sampled from outside the cell's process.

Host memory is the PSS of the process tree; the device is read through NVML. Invariant: the measured
process never measures itself, except for the peak of torch's allocator, which only it knows; and
sampling takes at most two percent of one core.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import psutil

from sweeps.energy import Rapl

KINDS = ("Pss_Anon", "Pss_File", "Pss_Shmem")
"""Kinds of pages that smaps_rollup splits the proportional set size into: private, of mapped files,
shared (gloo; pinned memory of some drivers)."""
BUILDERS = frozenset(
    ("as", "c++", "cc1plus", "cicc", "collect2", "g++", "ld", "ninja", "nvcc", "ptxas", "sh")
)
"""Child processes that compile an extension on its first use. They may take gigabytes, which are no
part of training."""
IDLE_BYTES = 1 << 30
"""A device with less than this in use has no other user: the driver keeps about half of it for
itself."""
PATIENCE_S = 5.0
"""Seconds to wait for the processes of an earlier cell to leave the device."""
BACKOFF = 50.0
"""Seconds between two samples, in multiples of what one sample costs."""
THROTTLE_REASONS = (
    "gpu_idle",
    "applications_clocks",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "display_clocks",
)
"""Reasons why the clock is below its highest, in the order of NVML's bits."""


def pss(pid: int) -> dict[str, int]:
    """Proportional set size of `pid` and its descendants, bytes by kind and in total (`Pss`); {}
    once the process has ended."""
    return _own_pss(_tree(pid))


def _own_pss(pids: Sequence[int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for process in pids:
        with contextlib.suppress(OSError):  # a process may end between the listing and the read
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name == "Pss" or name in KINDS:
                    total[name] = total.get(name, 0) + int(rest.split()[0]) * 1024
    return total


def _tree(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
        return [pid, *(child.pid for child in children if child.name() not in BUILDERS)]
    return []


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """Processes of others on the device, and the memory they use."""

    num_bytes: int
    """Device memory in use."""
    num_processes: int
    """As many as the driver lists: none where pids are hidden, as in containers."""

    def __str__(self) -> str:
        """One line: who, how much, what to do."""
        who = {0: "a process that is hidden from here", 1: "another process"}.get(
            self.num_processes, f"{self.num_processes} others"
        )
        return (
            f"the GPU was shared with {who}, {self.num_bytes:,} bytes of it in use beside this "
            "cell; end what runs there, or "
            "choose another one with CUDA_VISIBLE_DEVICES"
        )


@dataclass(frozen=True, kw_only=True)
class Look:
    """Clock, energy and throttle reasons of the device at one moment; None for what its driver does
    not tell."""

    at_s: float
    sm_mhz: int | None
    energy_mj: int | None
    """Millijoules since the driver was loaded."""
    reasons: int | None
    """Bits of THROTTLE_REASONS."""
    host_j: float | None = None
    """Joules of the host's processors since the looks began."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Mean clock, power and throttle reasons of the device over some time; None where unknown."""

    sm_mhz: float | None = None
    """Mean clock of the multiprocessors."""
    power_w: float | None = None
    """From the device's own count of energy."""
    throttle_reasons: dict[str, float] | None = None
    """Reason -> share of the looks at which it held the clock down; {} where none ever did."""
    host_power_w: float | None = None
    """Of the host's processors and their memory, by their own count (RAPL)."""


def pace(*spells: Sequence[Look]) -> Pace:
    """Means over the looks of some spells; power is the energy between the first and the last look
    of each over the time between them."""
    looks = [look for spell in spells for look in spell]
    clocks = [look.sm_mhz for look in looks if look.sm_mhz is not None]
    bits = [look.reasons for look in looks if look.reasons is not None]
    joules = [[(k.at_s, k.energy_mj / 1e3) for k in s if k.energy_mj is not None] for s in spells]
    host_joules = [[(k.at_s, k.host_j) for k in s if k.host_j is not None] for s in spells]
    shares = {
        name: fmean(seen >> bit & 1 for seen in bits)
        for bit, name in enumerate(THROTTLE_REASONS)
        if bits
    }
    return Pace(
        sm_mhz=fmean(clocks) if clocks else None,
        power_w=_mean_power(joules),
        throttle_reasons={name: share for name, share in shares.items() if share} if bits else None,
        host_power_w=_mean_power(host_joules),
    )


def _mean_power(spells: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """Watts, from (seconds, joules) at some moments of each spell; None without two moments."""
    ends = [(spell[0], spell[-1]) for spell in spells if spell]
    seconds = sum(last[0] - first[0] for first, last in ends)
    return sum(last[1] - first[1] for first, last in ends) / seconds if seconds else None


class DeviceSampler(Protocol):
    """Looks at the device: a cell's bytes, who else is there, clock and power."""

    def look(self) -> Look | None:
        """Clock, energy and throttle reasons now, or None where there is no device."""

    def sample(self, pid: int) -> int | None:
        """Bytes that the process tree of `pid` uses now; None where there is no device."""

    def power_limit(self) -> float | None:
        """Watts that the device may draw; None where it does not tell or is not there."""

    def crowd(self) -> Crowd | None:
        """Who is on the device while no cell runs; None where nobody is."""


class NoDevice:
    """The stand-in for machines without an NVIDIA GPU."""

    def look(self) -> Look | None:
        """Nothing to see."""
        return None

    def sample(self, pid: int) -> int | None:
        """Nothing to read."""
        return None

    def power_limit(self) -> float | None:
        """Nobody tells."""
        return None

    def crowd(self) -> Crowd | None:
        """Nobody."""
        return None


class Nvml:
    """One visible device, the first unless it is told, through NVML. Samples of a cell do not count
    the bytes that others held before it."""

    def __init__(self, number: int = 0) -> None:
        self._nvml, self._handle = nvml_device(number)
        self._before = self._used() or 0

    def _used(self) -> int | None:
        return self._asked(lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def look(self) -> Look:
        """Clock, energy and throttle reasons now."""
        nvml, handle = self._nvml, self._handle
        return Look(
            at_s=time.monotonic(),
            sm_mhz=self._asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            energy_mj=self._asked(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
            reasons=self._asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        )

    def _asked(self, query: Callable[[], Any]) -> int | None:
        try:
            return int(query())
        except self._nvml.NVMLError:  # this card does not tell
            return None

    def sample(self, pid: int) -> int | None:
        """Bytes of the process tree; where pids are hidden, as in containers, the bytes in use
        beyond those before the cell; None where the device does not tell."""
        tree = set(_tree(pid))
        mine = [item.usedGpuMemory for item in self._running() if item.pid in tree]
        if mine and all(item is not None for item in mine):
            return int(sum(mine))
        used = self._used()
        return None if used is None else max(0, used - self._before)

    def _running(self) -> list[Any]:
        """Processes on the device; none where it does not tell."""
        try:
            return list(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        except self._nvml.NVMLError:
            return []

    def power_limit(self) -> float | None:
        """Watts that the device may draw; None where it does not tell."""
        nvml, handle = self._nvml, self._handle
        milliwatts = self._asked(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        return None if milliwatts is None else milliwatts / 1000

    def crowd(self) -> Crowd | None:
        """Who is still there after up to PATIENCE_S. What is in use then is not counted as the next
        cell's."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._crowd()) is not None and time.monotonic() < deadline:
            time.sleep(PATIENCE_S / 20)
        self._before = self._used() or 0
        return found

    def _crowd(self) -> Crowd | None:
        others, used = {item.pid for item in self._running()} - {os.getpid()}, self._used() or 0
        return (
            Crowd(num_bytes=used, num_processes=len(others))
            if others or used > IDLE_BYTES
            else None
        )


class Several:
    """The devices of several ranks: the most that one of them holds, energy of all."""

    def __init__(self, devices: Sequence[DeviceSampler]) -> None:
        self._devices = devices

    def look(self) -> Look | None:
        """Mean clock, energy in sum, every reason that holds one of them down."""
        looks = [look for device in self._devices if (look := device.look()) is not None]
        if not looks:
            return None
        clocks = [look.sm_mhz for look in looks if look.sm_mhz is not None]
        energies = [look.energy_mj for look in looks if look.energy_mj is not None]
        bits = [look.reasons for look in looks if look.reasons is not None]
        return Look(
            at_s=looks[0].at_s,
            sm_mhz=round(fmean(clocks)) if clocks else None,
            energy_mj=sum(energies) if len(energies) == len(looks) else None,
            reasons=reduce(or_, bits) if bits else None,
        )

    def sample(self, pid: int) -> int | None:
        """Bytes that the process tree of `pid` uses of the device that it uses most of."""
        found = [device.sample(pid) for device in self._devices]
        return max((one for one in found if one is not None), default=None)

    def power_limit(self) -> float | None:
        """Watts that all may draw."""
        found = [device.power_limit() for device in self._devices]
        known = [watts for watts in found if watts is not None]
        return sum(known) if len(known) == len(found) else None

    def crowd(self) -> Crowd | None:
        """Who is on the first of them that is not free."""
        found = [device.crowd() for device in self._devices]
        return next((one for one in found if one is not None), None)


def nvml_device(number: int = 0) -> tuple[Any, Any]:
    """(pynvml, handle of a visible device, the first unless told); RuntimeError where there is
    none."""
    try:
        import pynvml
    except ImportError:
        raise RuntimeError("nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        visible = named[number].strip() if number < len(named) else ""
        if visible.startswith(("GPU-", "MIG-")):
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(visible)
        index = int(visible) if visible.isdigit() else number
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        raise RuntimeError(f"no NVIDIA device: {error}") from None


def device_sampler(device: str, num_gpus: int = 1) -> DeviceSampler:
    """NVML for a CUDA cell, of all its GPUs, otherwise the stand-in."""
    if device != "cuda":
        return NoDevice()
    try:
        return Nvml() if num_gpus == 1 else Several([Nvml(number) for number in range(num_gpus)])
    except RuntimeError:
        return NoDevice()


class Sampler:
    """Peak memory of one process tree, and what the device did meanwhile. Call `poll` often: it
    samples when a sample is due."""

    def __init__(
        self, pid: int, device: DeviceSampler, interval_s: float = 0.1, *, num_ranks: int = 1
    ) -> None:
        """num_ranks: of several, which are the children of `pid`, the largest is known too."""
        self.peak_host: dict[str, int] = {}
        """Bytes by kind at the moment of the largest total."""
        self.peak_host_bytes: int | None = None
        self.peak_rank_bytes: int | None = None
        self.peak_device_bytes: int | None = None
        self.spells: list[list[Look]] = []
        """What was seen from each `watch_pace` to its end."""
        self._pid, self._device, self._interval_s, self._due = pid, device, interval_s, 0.0
        self._watching, self._look_due, self._rapl = False, 0.0, Rapl()
        self._num_ranks = num_ranks

    def hurry(self) -> None:
        """Take the next sample at the next `poll`: the process has reached its full size, and a
        short run may end before a sample would be due."""
        self._due = 0.0

    def watch_pace(self, watching: bool) -> None:
        """From now on `poll` records clock, energy and throttle reasons too, or no longer."""
        if self._watching:
            self._take_look()
        elif watching:
            self.spells.append([])
        self._watching, self._look_due = watching, 0.0

    def _look(self) -> None:
        started = time.monotonic()
        if self._watching and started >= self._look_due:
            self._take_look()
            finished = time.monotonic()
            self._look_due = finished + max(self._interval_s, BACKOFF * (finished - started))

    def _take_look(self) -> None:
        seen, host_j = self._device.look(), self._rapl.joules()
        if seen is not None or host_j is not None:
            blind = Look(at_s=time.monotonic(), sm_mhz=None, energy_mj=None, reasons=None)
            self.spells[-1].append(replace(seen or blind, host_j=host_j))

    def poll(self) -> dict[str, int | None] | None:
        """Sample if due: {"host_bytes", "device_bytes"} now, else None."""
        self._look()
        started = time.monotonic()
        if started < self._due:
            return None
        host, device = self._host(), self._device.sample(self._pid)
        if host.get("Pss", 0) > (self.peak_host_bytes or 0):
            self.peak_host_bytes = host["Pss"]
            self.peak_host = {kind.lower() + "_bytes": host.get(kind, 0) for kind in KINDS}
        if device is not None:
            self.peak_device_bytes = max(device, self.peak_device_bytes or 0)
        finished = time.monotonic()
        self._due = finished + max(self._interval_s, BACKOFF * (finished - started))
        return {"host_bytes": host.get("Pss"), "device_bytes": device}

    def _host(self) -> dict[str, int]:
        """As `pss`; the largest rank is noted."""
        if self._num_ranks == 1:
            return pss(self._pid)
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self._pid).children()
        ranks = [pss(child.pid) for child in children]
        largest = max((rank.get("Pss", 0) for rank in ranks), default=0)
        self.peak_rank_bytes = max(largest, self.peak_rank_bytes or 0)
        every = [_own_pss([self._pid]), *ranks]
        return {name: sum(one.get(name, 0) for one in every) for one in every for name in one}


def _cgroup_limits() -> Iterator[int]:
    """Memory limits of this process's cgroup and its parents, v2 and v1."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            v1 = "memory" in controllers.split(",")
            top, name = (
                (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")
                if v1
                else (Path("/sys/fs/cgroup"), "memory.max")
            )
            folder = top / path.lstrip("/")
            for parent in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):
                    yield int((parent / name).read_text())
                if parent == top:
                    break


def host_bytes() -> int:
    """Memory this process may use: the smaller of the machine's and every cgroup limit above it."""
    return min(int(psutil.virtual_memory().total), *_cgroup_limits(), 1 << 62)
