"""Every YAML composes; a cell's hash covers what changes a measurement and nothing else."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sweeps import auto, environment, groups
from sweeps.config import Cell, cell_from
from sweeps.identity import MOVED, PATHS, comparison_key, configuration, drives_of, published

GROUPS = {
    folder.name: sorted(item.stem for item in folder.glob("*.yaml"))
    for folder in auto.CONF.iterdir()
    if folder.is_dir()
}
NOT_ALONE = ("ablation", "experiment", "rates", "rung", "tune")
CHOICES = [
    (group, name)
    for group, names in GROUPS.items()
    for name in names
    if group not in NOT_ALONE and name != "checkpoint"  # which names no folder
]
PUBLISHED = {
    "tiny": 5.62e6,
    "qwen2.5-0.5b": 0.494e9,
    "qwen2.5-1.5b": 1.544e9,
    "qwen2.5-3b": 3.086e9,
    "qwen2.5-7b": 7.616e9,
}
PUBLISHED |= {"qwen2.5-14b": 14.77e9, "qwen2.5-32b": 32.76e9, "qwen2.5-72b": 72.71e9}


def composed(*overrides: str) -> Cell:
    auto.register()
    with initialize_config_dir(str(auto.CONF), version_base="1.3"):
        return cell_from(auto.resolve(compose("config", list(overrides))))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_option_composes(group: str, name: str) -> None:
    needs = {"text": ["data.files=a.jsonl"]}.get(name, [])
    cell = composed(f"{group}={name}", *needs)
    assert len(cell.hash) == 12


def test_a_system_plans_for_packed_documents_where_the_text_is_of_files() -> None:
    assert composed("data=text", "data.files=a.jsonl").spec().packed
    assert not composed().spec().packed


def own(experiment: str) -> list[str]:
    """The systems that an experiment's own file names."""
    file = OmegaConf.load(auto.CONF / "experiment" / f"{experiment}.yaml")
    named = OmegaConf.select(file, "hydra.sweeper.params.system") or ""
    return [system for system in named.split(",") if system]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "system"),
    [
        (name, system)
        for first, name in enumerate(GROUPS["experiment"])
        for second, system in enumerate(GROUPS["system"])
        # And a third of all other pairs, which has every system and every experiment.
        if system in own(name) or (first + second) % 3 == 0
    ],
)
def test_every_experiment_composes(name: str, system: str) -> None:
    cell = composed(f"+experiment={name}", f"system={system}")
    assert cell.experiment == name
    assert system.startswith(cell.system)
    assert cell.model.name != "auto"


@pytest.mark.parametrize("path", sorted(auto.CONF.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_field_has_a_doc_line(path: Path) -> None:
    lines = path.read_text().splitlines()
    keys = [
        number
        for number, line in enumerate(lines)
        if ": " in line and not line.lstrip().startswith(("#", "-")) and line[0] != " "
    ]
    assert yaml.safe_load("\n".join(lines)) is not None
    if "_global_" not in lines[0]:
        assert all(lines[number - 1].lstrip().startswith("#") for number in keys), path


@pytest.mark.parametrize(("model", "published"), PUBLISHED.items())
def test_model_sizes_are_the_published_ones(model: str, published: float) -> None:
    from baselines.model import count_params

    assert count_params(composed(f"model={model}").model).total == pytest.approx(
        published, rel=2e-3
    )


SAME = [
    "logging=none",
    "output_dir=x",
    "process.timeout_s=1.5",
    "machine.host_bytes=9",
    "machine.checkout=/x",
    "machine.nvme_path=/x",
    "+measure.stop_below=3",
    "measure.repeated=[fsdp2]",
]


@pytest.mark.parametrize("same", SAME)
def test_hash_ignores(same: str) -> None:
    assert composed(same).hash == composed().hash


def test_a_label_changes_no_identity() -> None:
    assert (
        composed("system.preset=mine").identity
        == composed().identity
        != composed("system.depth=3").identity
    )
    assert (
        composed("system=megatrain_fast").identity
        == composed("system=megatrain_paper", "+rung=8_fast").identity
    )


@pytest.mark.parametrize(
    "other",
    [
        "+system.num_micro_batches=2",
        "measure.repeat=2",
        "system.depth=3",
        "seed=1",
        "shape.seq_len=32",
        "recipe.lr=1",
        "measure.windows=2",
        "model.config.rms_norm_eps=1",
        "machine.device_bytes=9",
    ],
)
def test_hash_covers(other: str) -> None:
    assert composed(other).hash != composed().hash


@pytest.mark.slow
def test_comparison_key_spans_systems_of_one_dtype() -> None:
    """And of one kind of product, in which in_memory is the reference of the others."""
    cells = [composed(f"system={name}") for name in GROUPS["system"]]
    cells.append(composed("system=in_memory", "system.products=float8"))
    kinds = {(cell.options.get("products", "plain"), comparison_key(cell.config)) for cell in cells}
    assert sorted(products for products, _ in kinds) == ["float8", "plain"]
    keys = {key for _, key in kinds}
    assert (
        comparison_key(composed("machine.device_bytes=9").config) in keys
    )  # a cap changes the speed, not the losses
    assert comparison_key(composed("system.dtype=float32").config) not in keys
    assert comparison_key(composed("seed=1").config) not in keys


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("shape.num_micro_batches=3", "shape.num_micro_batches: got 3, allowed a divisor"),
        ("shape.seq_len=4096", "shape.seq_len: got 4096, allowed 1 to 2048"),
        ("system.dtype=float16", "system.dtype: got 'float16', allowed bfloat16, float32"),
        ("measure.windows=0", "measure.windows: got 0, allowed >= 1"),
        ("shape.batch_size=x", "shape.batch_size: got 'x', allowed a value of type int"),
        ("recipe.clip_norm=-1", "recipe.clip_norm: got -1.0, allowed >= 0"),
        (
            "logging.wandb=sometimes",
            "logging.wandb: got 'sometimes', allowed offline, online, disabled",
        ),
        ("+shape.foo=1", "shape.foo: got 1, allowed fields batch_size"),
        ("+experimnt=quickstart", "experimnt: got 'quickstart', allowed"),
        ("model.config.vocab_size=100", "model.config.vocab_size: got 100, allowed >= 256"),
        ("measure.repeat=0", "measure.repeat: got 0, allowed >= 1"),
        ("+measure.stop_below=-1", "measure.stop_below: got -1.0, allowed >= 0"),
        (
            "+system.num_micro_batches=3",
            "system.num_micro_batches: got 3, allowed a divisor of shape.batch_size (2)",
        ),
        ("process.omp_num_threads=-1", "process.omp_num_threads: got -1, allowed >= 0"),
        ("process.huge_pages=1", "process.huge_pages: got 1, allowed a value of type bool"),
        ("process.numactl=1", "process.numactl: got 1, allowed a value of type str"),
        *(
            (f"+{old}=1", f"{old}: got 1, allowed under another name; give {new}")
            for old, new in MOVED.items()
        ),
        ("machine=null", "machine: got None, allowed a group with fields"),
        ("machine=5", "machine: got 5, allowed a group with fields"),
        ("output_dir=", "output_dir: got '', allowed a path"),
        ("output_dir=null", "output_dir: got None, allowed a path"),
    ],
)
def test_invalid_values_name_their_path(override: str, message: str) -> None:
    with pytest.raises(ValueError, match="; ") as error:
        composed(override)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_system_may_cut_the_step_and_count_its_threads_by_itself() -> None:
    cell = composed(
        "shape.batch_size=4", "+system.num_micro_batches=2", "process.omp_num_threads=3"
    )
    assert (cell.shape.num_micro_batches, cell.spec().shape.num_micro_batches) == (2, 2)
    assert cell.spec().options["num_threads"] == 3, "the engine's AdamW counts its threads itself"
    assert "num_threads" not in composed("system=zero3", "process.omp_num_threads=3").spec().options
    assert "num_micro_batches" not in cell.options
    assert comparison_key(cell.config) == comparison_key(
        composed("shape.batch_size=4").config
    )  # the same step of the same batch
    assert environment.cell_variables(cell.process)["OMP_NUM_THREADS"] == "3"


def test_a_cell_may_ask_for_huge_pages() -> None:
    cell = composed("process=huge_pages")
    assert cell.hash != composed().hash
    assert environment.cell_variables(cell.process)["THP_MEM_ALLOC_ENABLE"] == "1"
    assert "THP_MEM_ALLOC_ENABLE" not in environment.cell_variables()


def test_a_row_says_how_the_allocators_were_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.allocator() == environment.cell_variables()["PYTORCH_ALLOC_CONF"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert environment.allocator() == "max_split_size_mb:64"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert environment.allocator() == "expandable_segments:False"


def test_a_machine_says_which_boot_it_is_and_names_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots = []
    for number, text in enumerate(("first\n", "first\n", "second\n")):
        monkeypatch.setattr(environment, "BOOT_ID", tmp_path / str(number))
        (tmp_path / str(number)).write_text(text)
        boots.append(environment.machine(groups.Machine(), None)["boot"])
    assert boots[0] == boots[1] != boots[2]
    assert all(re.fullmatch("[0-9a-f]{8}", boot) for boot in boots)
    monkeypatch.setattr(environment, "BOOT_ID", tmp_path / "absent")
    assert environment.machine(groups.Machine(), None)["boot"] is None


@pytest.mark.parametrize(
    "neutral",
    [
        "process.numactl=''",
        "process.omp_num_threads=0",
        "+system.num_micro_batches=0",
        "process.huge_pages=false",
    ],
)
def test_a_knob_that_changes_nothing_changes_no_hash(neutral: str) -> None:
    assert composed(neutral).hash == composed().hash


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=auto", "+model.x=1"], "model.x: got 1, allowed beside a named model only"),
        (["model=auto", "model.candidates=null"], "model.candidates: got None, allowed a list"),
        (["model.name=auto"], "model.fallback: got nothing"),
    ],
)
def test_auto_chooses_among_whole_models(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        composed(*overrides)


@pytest.mark.parametrize(
    ("system", "option"),
    [
        ("published_megatrain", "checkout"),
        ("slideformer", "checkout"),
        ("zero_infinity", "nvme_path"),
        ("megatrain", "nvme_path"),
    ],
)
def test_a_path_of_the_machine_reaches_the_systems_that_ask_for_it_and_no_row(
    system: str, option: str
) -> None:
    given = [
        "machine.checkout=/clone",
        "machine.nvme_path=/disk",
        "output_dir=/home/somebody/study",
    ]
    cell = composed(f"system={system}", *given)
    paths = {name: value for name, value in cell.spec().options.items() if name in PATHS}
    assert paths == {option: "/clone" if option == "checkout" else "/disk"}
    assert composed(f"system={system}").spec().options[option] is None
    assert not set(composed("system=zero3", *given).spec().options) & set(PATHS)
    plain = {"device": "cpu", "host_bytes": None, "device_bytes": None}
    uses = {"drives": drives_of(cell.config)} if system == "zero_infinity" else {}
    assert published(cell.config)["machine"] == plain | uses
    assert (cell.rows_path, published(cell.config)["output_dir"]) == (
        Path("/home/somebody/study/rows.jsonl"),
        "study",
    )
    assert cell_from(published(cell.config)).hash == cell.hash


@pytest.mark.parametrize("system", ["system=zero_infinity", "system.disk_blocks=2"])
def test_another_drive_is_another_cell_and_no_row_says_where_it_is(system: str) -> None:
    asked = ["system=megatrain", system] if "blocks" in system else [system]
    cells = [composed(*asked, f"machine.nvme_path={path}") for path in ("/a", "/a:/b", "/b")]
    assert len({cell.hash for cell in cells}) == len({cell.identity for cell in cells}) == 3
    assert composed(*asked, "machine.nvme_path=/x/../a").hash == cells[0].hash
    assert composed(*asked, "machine.nvme_path='/a:'").hash == cells[0].hash
    assert composed(*asked, "machine.nvme_path='~nobody-here/x'").hash, "refused where it is used"
    for cell in cells:
        told = published(cell.config)["machine"]
        assert set(told) == {"device", "host_bytes", "device_bytes", "drives"}
        assert configuration(published(cell.config)) == configuration(cell.config)
    plain = [composed("system=megatrain", f"machine.nvme_path={path}") for path in ("/a", "/b")]
    assert plain[0].hash == plain[1].hash, "it has no state there"


def test_how_much_of_the_host_there_is_decides_what_must_be_on_disk() -> None:
    limits = ["machine.host_bytes=1000000000", "machine.host_bytes=2000000000"]
    asked = ["system=megatrain", "system.disk_blocks=-1", "machine.nvme_path=/a"]
    assert len({composed(*asked, limit).hash for limit in limits}) == 2
    assert len({composed("system=megatrain", limit).hash for limit in limits}) == 1


def test_keys_of_two_types_have_a_hash() -> None:
    assert len(composed("+model.config.rope_parameters={1:2,a:3}").hash) == 12


@pytest.mark.parametrize("installed", ["/usr/bin/numactl", None])
def test_numactl_is_asked_for_by_its_arguments(
    monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    monkeypatch.setattr("sweeps.groups.shutil.which", lambda name: installed)
    groups.require_numactl.cache_clear()
    override = "process.numactl='--cpunodebind=0 --preferred=0'"
    if installed:
        tried: list[list[str]] = []

        def answers(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            tried.append(command)
            return subprocess.CompletedProcess(
                command, 1 if "--membind=9" in command else 0, "", "usage: numactl\nmore\n"
            )

        monkeypatch.setattr("sweeps.groups.subprocess.run", answers)
        cell = composed(override)
        assert tried == [["numactl", "--cpunodebind=0", "--preferred=0", "true"]]
        with pytest.raises(
            ValueError,
            match=r"'--membind=9', allowed what numactl\(8\) takes here \(usage: numactl\); correct it",
        ):
            composed("process.numactl='--membind=9'")
        assert cell.process.wrapper == ("numactl", "--cpunodebind=0", "--preferred=0")
        assert cell.hash != composed().hash
    else:
        with pytest.raises(
            ValueError,
            match="allowed nothing where numactl is not installed; install it or leave it out",
        ):
            composed(override)


@pytest.mark.parametrize(
    "words",
    [
        "touch PATH",
        "--cpunodebind=0 touch PATH",
        "--file=PATH --touch",
        "--cpunodebind 0 touch PATH",
    ],
)
def test_numactl_starts_no_other_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    """With a numactl that runs what follows its options, as the real one does."""
    numactl = tmp_path / "numactl"
    numactl.write_text(
        '#!/bin/sh\nfor word; do case "$word" in -*|[0-9]*) shift;; *) break;; esac; done\nexec '
        '"$@"\n'
    )
    numactl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    groups.require_numactl.cache_clear()
    assert composed("process.numactl='--cpunodebind=0'").process.wrapper == (
        "numactl",
        "--cpunodebind=0",
    )
    with pytest.raises(ValueError, match=r"process\.numactl: got"):
        composed(f"process.numactl='{words.replace('PATH', str(tmp_path / 'made'))}'")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["megatrain_fast", "zero2"])
def test_a_system_that_has_a_say_in_the_model_is_the_whole_of_its_preset(name: str) -> None:
    """A file of conf/system says only what differs from those that it builds on."""
    whole = composed(f"system={name}").config["system"]
    assert auto._system(name) == whole
    with initialize_config_dir(str(auto.CONF), version_base="1.3"):
        assert auto._system(name) == whole, "while a cell is composed, too"


def plan_here(command: list[str], *, input: str, **_: object) -> subprocess.CompletedProcess[str]:
    """What `python -m sweeps.auto` does with its stdin."""
    return subprocess.CompletedProcess(
        command, 0, json.dumps(sorted(auto.too_large(json.loads(input)))), ""
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host_gib", "device_gib", "expected", "own_process"),
    [
        (
            128,
            140,
            "qwen2.5-3b",
            True,
        ),  # 7B: ZeRO-3 wants 25 bytes a parameter of host, in_memory 18 of device
        (
            2048,
            400,
            "qwen2.5-7b",
            False,
        ),  # without the ten seconds that a process needs to import transformers
        (8, 140, "tiny", False),
    ],
)
def test_the_largest_model_that_fits_all_four_systems(
    monkeypatch: pytest.MonkeyPatch,
    host_gib: int,
    device_gib: int,
    expected: str,
    own_process: bool,
) -> None:
    """What model=auto picks on a GPU machine of that size; the plans need no GPU."""
    if not own_process:
        monkeypatch.setattr(auto.subprocess, "run", plan_here)
    auto.register()
    machine = {"device": "cpu", "host_bytes": host_gib << 30, "device_bytes": device_gib << 30}
    with initialize_config_dir(str(auto.CONF), version_base="1.3"):
        plain = OmegaConf.to_container(compose("config", ["shape=b32x1024"]), resolve=True)
    asked = OmegaConf.to_container(OmegaConf.load(auto.CONF / "model" / "auto.yaml"))
    keys = ("seed", "shape", "recipe", "data", "measure", "process", "logging")
    settings = json.dumps({key: plain[key] for key in keys} | {"machine": machine})
    assert (
        auto._largest(
            tuple(asked["candidates"]), tuple(asked["systems"]), asked["fallback"], settings
        )
        == expected
    )
