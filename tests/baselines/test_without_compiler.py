"""Without a C++ compiler the engine's cell has no number; with torch's AdamW, where that is asked
for, it has one that says so."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from analysis import numbers, speeds, studies, tables
from baselines import megatrain
from baselines.registry import build
from baselines.system import ModelSpec, Shape, SystemSpec, Unsupported
from engine import Machine, Recipe, native
from sweeps.config import cell_from
from tests.baselines.test_model import TINY
from tests.made_rows import curve, framed, row
from tests.models import H200
from tests.sweeps.test_config import composed


def make_spec(**options: Any) -> SystemSpec:
    return SystemSpec(
        model=ModelSpec(name="m", model_type="qwen2", config=TINY),
        shape=Shape(batch_size=2, seq_len=16),
        recipe=Recipe(),
        options=options,
    )


@pytest.fixture(params=["", "no-such-compiler", "/bin/false"])
def _no_compiler(request, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", request.param)
    native.cache_clear()
    yield
    native.cache_clear()


@pytest.mark.usefixtures("_no_compiler")
def test_the_engine_is_unsupported_in_one_line_and_its_fallback_runs_on_request() -> None:
    with pytest.raises(Unsupported) as caught:
        build("megatrain", make_spec())
    assert re.fullmatch(
        r"CXX: got .*, allowed a C\+\+ compiler .*; install g\+\+, or set system\.torch_adamw=true .*",
        str(caught.value),
    )
    asked = build("megatrain", make_spec(torch_adamw=True))
    assert getattr(asked, "caveat", None) == (
        "AdamW through torch, several times slower than its own: not the engine's speed, not ranked"
    )
    asked.setup([(name, torch.zeros(shape)) for name, shape in shapes()])
    asked.close()


def shapes() -> list[tuple[str, torch.Size]]:
    from baselines.model import build_skeleton

    model = build_skeleton(make_spec().model, torch.bfloat16)
    return [(name, parameter.shape) for name, parameter in model.named_parameters()]


@pytest.mark.usefixtures("_no_compiler")
def test_another_machine_is_planned_for_all_the_same() -> None:
    machine = Machine(rates=H200, host_memory=1 << 40, device_memory=1 << 37)
    assert megatrain.build(make_spec(), machine=machine).plan().host_bytes


def test_the_setting_makes_another_cell_and_its_default_does_not() -> None:
    cell, asked = (
        composed("system=megatrain"),
        composed("system=megatrain", "system.torch_adamw=true"),
    )
    before = {name: value for name, value in cell.config["system"].items() if name != "torch_adamw"}
    assert cell_from({**cell.config, "system": before}).hash == cell.hash != asked.hash
    assert asked.config["system"]["torch_adamw"] is True


def test_the_fallback_is_never_ranked_nor_held_against_others() -> None:
    def config(**system: Any) -> dict[str, Any]:
        return composed(
            "system=megatrain", *(f"system.{name}={value}" for name, value in system.items())
        ).config

    caveat = "AdamW through torch"
    given = [
        row("in_memory", [0.5], losses=curve(3)),
        row("zero3", [2.0], agrees=True, max_loss_difference=0.0),
        row(
            "megatrain",
            [1.0],
            agrees=True,
            cell="a",
            config=config(torch_adamw="true"),
            caveat=caveat,
        ),
        row("megatrain", [1.5], agrees=True, cell="b", config=config()),
    ]
    lines = speeds.lines(studies.assigned(framed(given)))
    asked = lines[lines["caveat"].notna()].iloc[0]
    own = lines[(lines["system"] == "megatrain") & ~lines["fallback"]].iloc[0]
    assert asked["fallback"]
    assert not speeds.comparable(lines)[asked.name]
    assert speeds.comparable(lines)[own.name]
    assert numbers.line(lines, "megatrain").name == own.name
    assert any(caveat in note for note in tables.notes(lines))
    first = tables.of(studies.Study(name="mine", title="Mine"), lines)
    assert list(first["system"])[-1].startswith("MegaTrain (torch adamw")
