"""Repeats: the order in which they are measured, and what is known of them before."""

from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from omegaconf import OmegaConf

from sweeps import auto
from sweeps.command import command_of
from sweeps.config import Cell, cell_from
from sweeps.errors import parse
from sweeps.identity import configuration
from sweeps.outlook import Outlook, outlook_here
from tests.sweeps.test_config import composed

pytestmark = pytest.mark.slow

HEADLINE = sorted(path.stem for path in (auto.CONF / "experiment").glob("zero3_*.yaml"))


def told(cells: list[Cell]) -> list[tuple[int, str]]:
    return [(cell.measure.repeat, cell.system) for cell in cells]


def test_a_repeat_is_a_cell_of_its_own_and_the_first_is_the_cell_without_repeats() -> None:
    first, second = composed(), composed("measure.repeat=2")
    before = {
        **first.config,
        "measure": {key: first.config["measure"][key] for key in ("warmup_steps", "windows")},
    }
    before["measure"] |= {"steps_per_window": first.measure.steps_per_window, "trace": False}
    assert cell_from(before).hash == first.hash != second.hash
    assert (
        configuration(first.config)
        == configuration(second.config)
        != configuration(composed("seed=1").config)
    )


@pytest.mark.parametrize(
    "axes",
    [
        ["system=zero3,fsdp2", "measure.repeat=1,2,3"],
        ["measure.repeat=1,2,3", "system=zero3,fsdp2"],
    ],
)
def test_repeats_go_in_rounds_wherever_they_stand(axes: list[str]) -> None:
    auto.register()
    command = command_of(["--multirun", *axes])
    assert told(command.cells or []) == [
        (repeat, system) for repeat in (1, 2, 3) for system in ("zero3", "fsdp2")
    ]
    given = [
        argument
        for argument in command.argv
        if argument != "--multirun" and not argument.startswith("hydra.")
    ]
    jobs = BasicSweeper.split_arguments(parse(given), None)[0]
    assert jobs[0] == ["measure.repeat=1", "system=zero3"]
    assert jobs[1] == ["measure.repeat=1", "system=fsdp2"]


def test_the_headline_runs_every_system_and_repeats_three() -> None:
    auto.register()
    cells = command_of([f"+experiment={HEADLINE[0]}", "model=tiny"]).cells
    assert cells is not None
    assert len({cell.hash for cell in cells}) == len(cells)
    first = [cell for cell in cells if cell.measure.repeat == 1]
    assert cells[: len(first)] == first
    assert {cell.system for cell in first} >= {"in_memory", "zero3", "zero2", "fsdp2", "megatrain"}
    again = [
        (repeat, system) for repeat in (2, 3) for system in ("zero3", "zero3", "megatrain")
    ]  # ZeRO-3 eager and compiled
    assert told(cells[len(first) :]) == again
    compiled = {cell.system for cell in first if cell.options.get("compile")}
    assert compiled == {
        "in_memory",
        "zero3",
        "zero2",
        "superoffload",
        "zenflow",
        "fsdp2",
        "torchao_offload",
        "megatrain",
    }
    assert {cell.recipe.total_steps for cell in cells} == {21}


def test_the_headline_is_the_same_at_every_size() -> None:
    files: list[Any] = [
        OmegaConf.to_container(OmegaConf.load(auto.CONF / "experiment" / f"{name}.yaml"))
        for name in HEADLINE
    ]
    assert files == [
        {
            "defaults": ["common/headline", {"override /model": f"qwen2.5-{size}"}, "_self_"],
            "experiment": f"zero3_{size}",
        }
        for size in ("14b", "3b", "7b")
    ]


def test_a_system_to_repeat_that_does_not_exist_is_one_line() -> None:
    auto.register()
    with pytest.raises(
        ValueError,
        match=r"measure\.repeated: got 'zero33', allowed fsdp2, fsdp2_compiled, fsdp2_grad_op",
    ):
        command_of(["--multirun", "measure.repeat=1,2", "measure.repeated=[zero33]"])


@pytest.mark.parametrize(
    ("system", "kind"), [("in_memory", "device"), ("zero3", "host"), ("fsdp2", "host")]
)
def test_what_has_no_room_on_a_gpu_is_known_without_one(
    system: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "device", lambda: "cuda")
    machine = ["machine.host_bytes=137438953472", "machine.device_bytes=150754820096"]

    def look(*overrides: str, predict: bool = True) -> Outlook | None:
        return outlook_here(composed(*overrides, "shape=b32x1024", *machine), {}, predict=predict)

    found = look(f"system={system}", "model=qwen2.5-14b")
    assert found is not None
    assert f"bytes of {kind} memory, allowed" in (found.refusal or "")
    assert found.events[0]["num_params"] == pytest.approx(14.77e9, rel=1e-3)
    small = look(f"system={system}", "model=qwen2.5-3b")
    assert small is not None
    assert (small.refusal, small.prediction, small.step_s) == (None, None, None)
    assert (
        look("system=megatrain", "model=qwen2.5-32b", predict=False) is None
    )  # its placement needs the GPU's rates
