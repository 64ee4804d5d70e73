"""What a study's rows answer, in a sentence or two."""

import dataclasses

import pandas as pd
from numpy.testing import assert_allclose

from analysis import answers, record, report, speeds, studies, tables
from analysis.figures import of_record, of_study
from tests.made_rows import H200, framed, row
from tests.study_rows import config


def test_the_headline_is_a_comparison_though_zero3_is_run_in_two_ways() -> None:
    """Eager and compiled, on one, two and one GPU of less memory: no ratio spans two of these."""
    given = [
        row(
            system,
            [step * gpus] * 3,
            cell=f"{system}{compiled}{gpus}{limit}",
            experiment="headline",
            preset="fast" if system == "megatrain" else None,
            num_ranks=gpus,
            agrees=True,
            config=config(name=system, compile=compiled)
            | {"machine": {"device": "cuda", "device_bytes": limit}, "gpus": gpus},
        )
        for gpus, limit in ((1, None), (2, None), (1, 24 * 10**9))
        for system, compiled, step in (
            ("zero3", False, 4.0),
            ("zero3", True, 3.0),
            ("megatrain", True, 1.0),
        )
        if (system, limit) != ("megatrain", 24 * 10**9)
    ]
    ((study, lines),) = report.sections(framed(given))
    assert study.compares
    told = answers.answer(study, lines)
    assert told.startswith(
        "MegaTrain fast is 3.00x (one round, 95% interval 3.00 to 3.00) as fast as ZeRO-3"
    )
    assert [len(part) for part in studies.parts(study, lines)] == [3, 3, 2]
    assert {round(one, 9) for one in of_record.ratios(lines)["value"]} == {3.0, 4.0}


def test_an_effect_is_of_one_system_at_a_time() -> None:
    """As in the ablation of saving, which has two."""
    steps = {
        ("stream", False): 4.0,
        ("stream", True): 5.0,
        ("fast", False): 1.0,
        ("fast", True): 2.0,
    }
    given = [
        row(
            "megatrain",
            [step] * 3,
            cell=f"{preset}{save}",
            experiment="saving",
            preset=preset,
            config=config(preset=preset) | {"measure": {"windows": 3, "save": save}},
        )
        for (preset, save), step in steps.items()
    ]
    ((study, lines),) = report.sections(framed(given))
    told = answers.answer(study, lines)
    assert told.startswith("MegaTrain fast: with the state saved in every window, tokens/s change")
    assert "−50.0%" in told
    table = tables.of(study, lines)
    assert list(table["system"]) == ["MegaTrain fast", "MegaTrain stream"] * 2
    changes = [text.partition(" ")[0] for text in table["vs not saved"]]
    assert changes == ["—", "—", "−50.0%", "−20.0%"]


def test_what_another_run_made_of_an_effect_is_of_the_same_model() -> None:
    def of(params: int, slower: float, run: str) -> pd.DataFrame:
        made = [
            row(
                "megatrain",
                [step] * 3,
                cell=f"{save}",
                experiment="saving",
                model=f"of {params}",
                num_params=params,
                config=config() | {"measure": {"windows": 3, "save": save}},
            )
            for save, step in ((False, 1.0), (True, slower))
        ]
        return speeds.lines(studies.assigned(framed(made)).assign(run=run))

    study = studies.listed()["saving"]
    lead, other = of(3, 2.0, "3"), of(7, 4.0, "1")
    assert "other run" not in answers.answer(study, pd.concat([lead, other], ignore_index=True))
    same = pd.concat([lead, of(3, 4.0, "1")], ignore_index=True)
    assert "In another run it is −75.0%." in answers.answer(study, same)


def test_what_other_runs_made_of_a_comparison_is_of_the_same_pair() -> None:
    """And stands behind the ratio that it is of."""

    def of(run: str, **steps: float) -> pd.DataFrame:
        made = [
            row(
                name.partition("_")[0],
                [step] * 3,
                cell=name,
                experiment="vs_zero3_7b",
                preset=name.partition("_")[2] or None,
                config=config(preset=name.partition("_")[2] or None),
                agrees=True,
            )
            for name, step in steps.items()
        ]
        return speeds.lines(studies.assigned(framed(made)).assign(run=run))

    study = studies.listed()["vs_zero3_7b"]
    lead = of("3", megatrain_fast=1.0, zero3=4.0, zero3_twinflow=2.0, fsdp2=8.0)
    told = answers.answer(study, lead)
    assert "other run" not in told
    both = [lead, of("2", megatrain_fast=1.0, zero3=5.0), of("1", megatrain_fast=1.0, zero3=3.0)]
    told = answers.answer(study, pd.concat(both, ignore_index=True))
    assert (
        "fast as ZeRO-3. In 2 other runs it is 3.00x to 5.00x (one round in each run). Its" in told
    )
    assert told.count("other run") == 1, "no other run has Twin-Flow"
    others = [lead, of("2", megatrain_fast=1.0, zero3_twinflow=1.5), of("1", zero3=3.0)]
    told = answers.answer(study, pd.concat(others, ignore_index=True))
    assert told.endswith(" In another run it is 1.50x (one round).")
    assert told.count("other run") == 1, "one alone has the engine too"


def test_two_models_of_one_run_are_no_seeds_of_a_system() -> None:
    made = [
        row(
            system,
            [1.0] * 3,
            experiment="quality",
            cell=f"{system}{params}",
            model=f"of {params}",
            num_params=params,
            heldout_loss=loss,
        )
        for params, loss in ((5, 0.5), (15, 1.2))
        for system in ("in_memory", "fsdp2", "zero3")
        if (system, params) != ("zero3", 15)
    ]
    study = studies.listed()["quality"]
    told = answers.answer(study, framed(made))
    assert told == "3 systems with an exact master end at the same loss on held-out text."


def test_both_ends_are_of_the_same_gpu_where_several_runs_have_one() -> None:
    def of(run: str, gpu: str, **seconds: float) -> pd.DataFrame:
        made = [
            row(
                "megatrain",
                [step] * 3,
                experiment="context_length",
                cell=name,
                preset="fast",
                seq_len=1024 * int(name[1:]),
                batch_size=32 // int(name[1:]),
                machine=H200 | {"gpu": gpu},
                agrees=True,
            )
            for name, step in seconds.items()
        ]
        return framed(made).assign(run=run)

    study = studies.listed()["context_length"]
    lead = of("3", "NVIDIA H200", x2=2.0, x4=2.5, x8=3.0)
    h100, h200 = of("1", "NVIDIA H100", x1=4.0, x16=8.0), of("2", "NVIDIA H200", x1=1.0, x16=5.0)
    every = [pd.concat([lead, *some]) for some in ([h100, h200], [h200, h100], [h100])]
    ends = [answers.lines_of(study, one.reset_index(drop=True)) for one in every]
    assert [list(one["run"]) for one in ends] == [["2", "2"], ["2", "2"], ["1", "1"]]


def test_settings_that_may_be_equal_are_not_told_apart() -> None:
    def told(*windows: list[float]) -> str:
        given = [
            row("megatrain", each, cell=str(depth), experiment="mine", config=config(depth=depth))
            for depth, each in enumerate(windows, 1)
        ]
        ((study, lines),) = report.sections(framed(given))
        return answers.answer(study, lines)

    apart = "1 weight slot and 2 weight slots, the fastest and the slowest, cannot be told apart: −"
    assert told([1.0, 1.2, 1.4], [1.1, 1.3, 1.5]).startswith(apart)
    assert told([1.0, 1.01, 1.02], [2.0, 2.01, 2.02]).startswith("The fastest is 1 weight slot. ")


def test_a_saved_state_stands_beside_what_it_costs() -> None:
    """What the last one took, and what another process made of it."""
    once = {"saved_bytes": 9.1e10, "save_s": 69.4, "save_wait_s": 6.3}
    again = {"resume_s": 157.4, "resumed_difference": 3.9e-5}
    rows = [
        row(
            "megatrain",
            [2.0] * 3,
            experiment="saving",
            cell="one",
            config=config() | {"measure": {"save": False}},
        ),
        row(
            "megatrain",
            [2.1] * 3,
            experiment="saving",
            cell="two",
            config=config() | {"measure": {"save": True}},
            window_counters=[once | {"save_s": 80.0}, once],
            counters={name: 2 * value for name, value in once.items()} | again,
        ),
    ]
    ((study, found),) = report.sections(framed(rows))
    table = tables.of(study, found)
    assert table["vs not saved"].str.startswith("−4.8%").tolist() == [False, True]
    states = ["state GB", "write s", "resume s", "resumed losses off"]
    assert table[states].to_numpy().tolist() == [["—"] * 4, ["91", "69", "157", "4e-05"]]
    told = answers.answer(study, found)
    assert told.startswith("With the state saved in every window, tokens/s change by −4.8%")
    assert told.endswith("its losses lie 3.9e-05 nats from the first one's.")
    assert "other run" not in told
    both = pd.concat([found.assign(run="1"), found.assign(run="2")], ignore_index=True)
    assert " In another run it is −4.8%. Another process" in answers.answer(study, both)
    both.at[1, "counters"] = both.at[1, "counters"] | {"resumed_difference": 0.5}
    assert answers.answer(study, both).endswith(" In another run they lie up to 0.5 nats apart.")
    exact = dataclasses.replace(rows[1], counters=rows[1].counters | {"resumed_difference": 0.0})
    ((study, found),) = report.sections(framed([rows[0], exact]))
    assert tables.of(study, found)["resumed losses off"].iloc[1] == "0"
    assert answers.answer(study, found).endswith("the first one's losses bit for bit.")
    ((study, found),) = report.sections(framed(rows[:1]))
    assert "state GB" not in tables.of(study, found)
    assert answers.answer(study, found).startswith("The two settings")


def test_systems_that_end_further_apart_in_another_run_are_told() -> None:
    def of(ends: tuple[float, float], run: str) -> pd.DataFrame:
        made = [
            row(system, [1.0] * 3, experiment="quality", cell=system, heldout_loss=end)
            for system, end in zip(("in_memory", "fsdp2"), ends, strict=True)
        ]
        return framed(made).assign(run=run)

    study = studies.listed()["quality"]
    near, far = of((0.40, 0.41), "2"), of((0.50, 0.60), "1")
    told = "2 systems with an exact master end within {} nats of each other on held-out text."
    assert answers.answer(study, near) == told.format("0.01")
    both = answers.answer(study, pd.concat([far, near], ignore_index=True))
    more = "In another run systems with an exact master end 0.1 nats apart."
    assert both == f"{told.format('0.01')} {more}"
    other = answers.answer(study, pd.concat([far.assign(run="3"), near], ignore_index=True))
    assert other == told.format("0.1")


def test_float8_is_held_against_its_own_system_and_no_exact_master() -> None:
    """It trains another function, so it is not among those that end near each other."""

    def of(run: str, **ends: float) -> pd.DataFrame:
        made = [
            row(
                "in_memory" if name == "in_memory" else "megatrain",
                [1.0] * 3,
                experiment="quality",
                cell=name,
                preset=None if name == "in_memory" else name,
                config=config(products="float8" if name.endswith("float8") else "plain"),
                heldout_loss=end,
                caveat="in float8" if name.endswith("float8") else None,
            )
            for name, end in ends.items()
        ]
        return framed(made).assign(run=run)

    study = studies.listed()["quality"]
    first = of("2", in_memory=0.40, fast=0.41, fast_float8=0.44)
    told = "2 systems with an exact master end within 0.01 nats of each other on held-out text."
    apart = "MegaTrain fast, float8 ends {} nats {} MegaTrain fast on held-out text."
    assert answers.answer(study, first) == f"{told} {apart.format('0.03', 'above')}"
    more = pd.concat([first, of("1", fast=0.51, fast_float8=0.5)], ignore_index=True)
    assert answers.answer(study, more).endswith(f"In another run {apart.format('0.01', 'below')}")
    unknown = of("3", in_memory=0.40, fast_float8=0.44)
    assert answers.answer(study, unknown).startswith("Fewer than two")
    alone = of("3", fast=0.40, fast_float8=0.40)
    level = "MegaTrain fast, float8 ends level with MegaTrain fast on held-out text."
    assert answers.answer(study, alone) == level


def test_the_seeds_of_a_system_are_one_mean_and_tell_how_far_one_system_ends_from_itself() -> None:
    ends = {"in_memory": (0.40, 0.50), "fsdp2": (0.42, 0.50), "lora": (0.1, 0.9)}
    made = [
        row(
            system,
            [1.0] * 3,
            experiment="quality",
            cell=f"{system} {seed}",
            config=config() | {"seed": seed},
            heldout=[{"tokens": 1e6, "seconds": 60.0, "loss": end}],
            heldout_loss=end,
            losses=[3.0 + seed, 1.0 + end],
        )
        for system, both in ends.items()
        for seed, end in enumerate(both)
    ]
    ((study, found),) = report.sections(framed(made))
    told = "2 systems with an exact master end within 0.01 nats of each other on held-out text."
    seeds = "Each is a mean over its seeds. One system's seeds end 0.1 nats apart."
    assert answers.answer(study, found) == f"{told} {seeds}"
    assert "in memory (seed 1)" in tables.of(study, found)["system"].to_list()
    gaps = answers.loss_gaps(found[found["system"] != "lora"])
    assert_allclose(gaps, [[0, 0], [0, 0], [0, 0.02], [0, 0]], atol=1e-9)
    drawn = of_study.draw(study, found)
    named = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert named == ["in memory", "FSDP2", "LoRA"]
    assert drawn.axes[2].get_title() == "FSDP2:\n+0.01 nats in the second half"


def test_what_is_compared_is_of_one_shape() -> None:
    """Though ZeRO-3 was measured at another alone, where it is slower."""
    made = [
        row(
            system,
            [step] * 3,
            experiment="zero3_7b",
            cell=f"{system} {shape}",
            batch_size=shape[0],
            seq_len=shape[1],
            tokens_per_s=32768 / step,
            agrees=True,
            config=config(name=system) | {"shape": {"batch_size": shape[0], "seq_len": shape[1]}},
        )
        for system, shape, step in (
            ("megatrain", (32, 1024), 2.0),
            ("megatrain", (8, 4096), 4.0),
            ("zero3", (8, 4096), 6.0),
        )
    ]
    ((study, found),) = report.sections(framed(made))
    assert "is 1.50x" in answers.answer(study, found)


def test_one_window_has_no_interval_and_one_block_is_no_blocks() -> None:
    made = [
        row(
            "megatrain",
            windows,
            experiment="placement",
            cell=str(blocks),
            config=config(device_optimizer=blocks),
        )
        for blocks, windows in ((1, [2.2]), (30, [2.0]))
    ]
    ((study, found),) = report.sections(framed(made))
    told = answers.answer(study, found)
    assert "slowest is 1 block with" in told
    assert told.endswith("−9.1% (too few windows for an interval).")
    legend = of_study.draw(study, found).legends[0]
    assert "too few windows for intervals" in legend.get_title().get_text()
    assert "bars:" not in legend.get_title().get_text()


def test_without_a_rival_the_engine_is_held_against_training_in_memory() -> None:
    made = [row("in_memory", [1.5] * 3), row("megatrain", [1.0] * 3, agrees=True)]
    ((study, found),) = report.sections(framed(made))
    assert answers.answer(study, found).startswith("MegaTrain is 1.50x")
    assert "as fast as in memory" in answers.answer(study, found)
    assert "vs in memory" in tables.of(study, found)


def test_one_system_alone_is_held_against_what_was_predicted() -> None:
    told = {study.name: (study, mine) for study, mine in studies.shown(record.lines())}
    study, mine = told["larger"]
    table = tables.of(study, studies.leading(study, mine))
    predicted, measured = table["predicted tokens/s"].iloc[0], table["tokens/s"].iloc[0]
    expected = f"MegaTrain fast reaches {measured} tokens/s, where {predicted} were predicted."
    assert answers.answer(study, mine) == expected


def test_an_effect_is_told_at_every_setting_that_the_run_has() -> None:
    """The one that the study asks for first is the mildest."""
    steps = {(128, 0): 4.0, (128, 4): 5.0, (8, 0): 1.0, (8, 4): 4.0, (32, 0): 2.0, (32, 4): 3.0}
    made = [
        row(
            "megatrain",
            [step] * 3,
            cell=f"{batch}-{blocks}",
            experiment="tier",
            batch_size=batch,
            config=config(disk_blocks=blocks) | {"shape": {"batch_size": batch}},
        )
        for (batch, blocks), step in steps.items()
    ]
    ((study, lines),) = report.sections(framed(made))
    told = answers.answer(study, lines)
    assert "with 128 sequences per step, changes tokens/s by −20.0%" in told
    assert told.endswith(
        " Elsewhere in this run: 8 sequences per step −75.0%; 32 sequences per step −33.3%."
    )
    alone = [one for one in made if one.batch_size == 128]
    ((study, lines),) = report.sections(framed(alone))
    assert "Elsewhere" not in answers.answer(study, lines)
