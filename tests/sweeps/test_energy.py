"""Joules of the host: which counters are added, what begins anew, and which seconds count."""

from pathlib import Path

import pytest

from sweeps import memory
from sweeps.energy import Rapl
from sweeps.memory import Look, NoDevice, Sampler


def zone(root: Path, place: str, name: str, energy_uj: int, most: int = 10_000_000) -> Path:
    folder = root / f"intel-rapl:{place}"
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder


def test_packages_and_their_memory_are_added_and_nothing_twice(tmp_path: Path) -> None:
    counters = {"0": "package-0", "1": "package-1", "0:0": "core", "0:1": "dram", "2": "psys"}
    for place, name in counters.items():
        zone(tmp_path, place, name, 0)
    rapl = Rapl(tmp_path)
    for place, name in counters.items():
        zone(tmp_path, place, name, 2_000_000)
    assert rapl.joules() == 6.0


def test_a_counter_that_begins_anew_goes_on(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 9_000_000)
    rapl = Rapl(tmp_path)
    seen = []
    for energy_uj in (9_500_000, 1_500_000, 8_000_000, 500_000):
        zone(tmp_path, "0", "package-0", energy_uj)
        seen.append(rapl.joules())
    assert seen == [0.5, 2.5, 9.0, 11.5]


@pytest.mark.parametrize("content", [None, "no number\n"])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (zone(tmp_path, "0", "package-0", 0) / "energy_uj").write_text(content)
    assert Rapl(tmp_path).joules() is None


def look(at_s: float, energy_mj: int, host_j: float | None) -> Look:
    return Look(at_s=at_s, sm_mhz=None, energy_mj=energy_mj, reasons=None, host_j=host_j)


def test_power_is_that_of_the_spells_and_not_of_the_pauses_between_them() -> None:
    first = [look(0.0, 0, 0.0), look(2.0, 200_000, 80.0)]
    second = [look(10.0, 900_000, 900.0), look(12.0, 1_500_000, 940.0)]
    found = memory.pace(first, second)
    assert (found.power_w, found.host_power_w) == (200.0, 30.0)
    assert memory.pace(first[:1], second[:1]).power_w is None


def test_a_sampler_looks_at_the_host_only_while_it_is_told_to(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 0)
    sampler = Sampler(0, NoDevice())
    sampler._rapl = Rapl(tmp_path)
    for number, watching in enumerate((False, True, True, False, True, False)):
        zone(tmp_path, "0", "package-0", 1_000_000 * number)
        sampler.watch_pace(watching)
    assert [[seen.host_j for seen in spell] for spell in sampler.spells] == [[2.0, 3.0], [5.0]]
