"""Energy of the host's processors and their memory, as the kernel reads it from RAPL.

Invariant: joules only grow, whatever the counters below do, and a machine that does not tell, or
not to this user, has None.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
COUNTED = ("package", "dram")
"""First words of the zones that are added: cores lie within packages, and psys holds them all."""


class Rapl:
    """Joules since it was made. A counter that began anew between two looks is taken to have done
    so once, so look at least every few minutes."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._joules = 0.0
        seen = {zone: _read(zone, "energy_uj") for zone in _zones(root)}
        self._last = {zone: value for zone, value in seen.items() if value is not None}

    def joules(self) -> float | None:
        """Joules of all packages and their memory until now; None where nothing is readable."""
        for zone, before in self._last.items():
            now = _read(zone, "energy_uj")
            if now is None:
                return None
            grown = now - before
            if grown < 0:
                grown += _read(zone, "max_energy_range_uj") or 0
            self._joules += max(0, grown) / 1e6
            self._last[zone] = now
        return self._joules if self._last else None


def _zones(root: Path) -> Iterator[Path]:
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
        except OSError:
            continue
        if name.partition("-")[0] in COUNTED:
            yield zone


def _read(zone: Path, name: str) -> int | None:
    try:
        return int((zone / name).read_text())
    except (OSError, ValueError):
        return None
