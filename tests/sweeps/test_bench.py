"""THE loop, with a system that records its calls and a clock that counts; rows on disk."""

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import Batch, NonFiniteLossError
from sweeps import auto, bench
from sweeps.command import command_of
from sweeps.groups import Measure
from sweeps.isolate import Outcome
from sweeps.mirror import history
from sweeps.result import Row
from sweeps.rowfile import read_rows
from sweeps.rows import Rows
from sweeps.study import row_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ROW = {
    "experiment": "e",
    "system": "s",
    "model": "m",
    "batch_size": 2,
    "seq_len": 8,
    "num_micro_batches": 1,
    "status": "ok",
}


STEPS = ["step", "clock"] * 3
"""A window's: on a CPU the clock says where each ended."""


class Recorder:
    """A TrainingSystem's two hot calls, written down; each takes a fixed time on the counted clock.
    Counters are not."""

    def __init__(self, nan_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.now, self.nan_at = 0.0, nan_at

    def train_step(self, batch: Batch) -> torch.Tensor:
        self.calls.append("step")
        self.now += 1.0
        number = self.calls.count("step") - 1
        return torch.tensor(math.nan if number == self.nan_at else float(number))

    def drain(self) -> None:
        self.calls.append("drain")
        self.now += 0.5

    def clock(self) -> float:
        self.calls.append("clock")
        return self.now

    def counters(self) -> dict[str, float]:
        return {"optimizer_s": 0.25 * self.calls.count("step")}


def forever():
    while True:
        tokens = torch.zeros(1, 2, 4, dtype=torch.int64)
        yield Batch(tokens=tokens, labels=torch.where(torch.arange(4) == 3, -100, tokens))


def run(system: Recorder, saves: bench.Saves | None = None, **fields: float) -> list[dict]:
    """The `losses` events of eight steps: two of warm-up, two windows of three."""
    return [event for event in all_events(system, saves, **fields) if event["event"] == "losses"]


def all_events(system: Recorder, saves: bench.Saves | None = None, **fields: float) -> list[dict]:
    events: list[dict] = []
    spec = Measure(**{"warmup_steps": 2, "windows": 2, "steps_per_window": 3, **fields})
    bench.measure(
        system,
        forever(),
        spec,
        lambda event, **more: events.append({"event": event, **more}),
        system.clock,
        saves=saves,
    )
    return events


def test_windows_lie_between_drains() -> None:
    system = Recorder()
    warmup, *windows = run(system)
    window = ["clock", *STEPS, "drain", "clock"]
    assert system.calls == [*STEPS[:4], "drain", *window, *window]
    assert (warmup["first_step"], warmup["losses"], warmup["seconds"]) == (0, [0.0, 1.0], None)
    assert [event["losses"] for event in windows] == [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]
    assert [event["first_step"] for event in windows] == [2, 5]
    assert [event["seconds"] for event in windows] == [3.5, 3.5]
    assert [event["num_tokens"] for event in windows] == [
        18,
        18,
    ]  # 6 label tokens a step: the ignored ones are not counted
    assert "steady_s" not in warmup
    between = [(event["steady_s"], event["steady_tokens"]) for event in windows]
    assert between == [(2.0, 12)] * 2  # the last two steps, without the drain
    assert [event["counters"] for event in (warmup, *windows)] == [
        {"optimizer_s": seconds} for seconds in (0.5, 0.75, 0.75)
    ]


def test_a_window_of_one_step_says_nothing_of_a_steady_rate() -> None:
    _, *windows = run(Recorder(), steps_per_window=1)
    assert [(event["steady_s"], event["steady_tokens"]) for event in windows] == [(None, 0)] * 2


class Saving(Recorder):
    """One that saves beside training; each wait for the disk takes time too."""

    def save_beside(self, directory: Path, *, room: int) -> None:
        assert room == 7
        directory.mkdir()
        (directory / f"of step {self.calls.count('step')}").touch()
        self.calls.append("save")
        self.now += 0.25

    def saved(self) -> None:
        self.calls.append("saved")
        self.now += 100.0


def test_what_saving_takes_is_in_its_window_and_what_follows_is_not(tmp_path: Path) -> None:
    system, folder = Saving(), tmp_path / "state"
    folder.mkdir()  # of a cell that was killed
    saves = bench.Saves(system, folder, room=7)
    events = all_events(system, saves=saves)
    _, *windows = [event for event in events if event["event"] == "losses"]
    window = ["clock", "save", *STEPS, "drain", "clock", "saved"]
    assert system.calls == [*STEPS[:4], "drain", *window, *window]
    assert [event["seconds"] for event in windows] == [3.75, 3.75]
    assert (folder / "of step 5").exists()  # the last stays, for sweeps.again
    # while the disk is waited for, clock and power are nobody's
    names = [event.get("name", event["event"]) for event in events if event["event"] != "step"]
    assert names == ["warm-up", "losses", *["windows", "saving", "losses"] * 2]


class Normed(Recorder):
    """One that knows the norm of its gradients, in a tensor of each step's own."""

    gradient_norm: torch.Tensor | None = None

    def train_step(self, batch: Batch) -> torch.Tensor:
        loss = super().train_step(batch)
        self.gradient_norm = 10 * loss
        return loss


def test_gradient_norms_stand_beside_the_losses_where_they_are_known() -> None:
    assert [event["gradient_norms"] for event in run(Recorder())] == [[], [], []]
    read = run(Normed())
    assert [event["gradient_norms"] for event in read] == [
        [10 * loss for loss in event["losses"]] for event in read
    ]
    auto.register()
    (cell,) = command_of(["model=tiny", "system=megatrain"]).cells
    row = row_of(cell, Outcome(status="ok", events=read), started_at="", machine={})
    assert row.gradient_norms == [10 * loss for loss in row.losses] != []


def test_float8_has_no_share_of_a_peak_of_bfloat16() -> None:
    auto.register()
    machine = {"matrix_peak_tflops": 4e-6, "datasheet_tflops": 2e-6}
    window = {"event": "losses", "first_step": 0, "losses": [1.0], "seconds": 1.0, "num_tokens": 2}
    plan = {"event": "plan", "flops_per_token": {"6p": 5e5}}
    shares = []
    for products in ("plain", "float8"):
        asked = ["model=tiny", "system=megatrain", f"system.products={products}"]
        (cell,) = command_of([*asked, "measure.windows=1"]).cells
        outcome = Outcome(status="ok", events=[plan, window])
        row = row_of(cell, outcome, started_at="", machine=machine)
        shares.append((row.tflops_6p, row.mfu, row.mfu_sustained, row.mfu_datasheet))
    assert shares == [(1e-6, 0.25, None, 0.5), (1e-6, None, None, None)]


class Evaluating(Recorder):
    """One that can be asked for the loss of a batch: a hundredth of the steps before, negative."""

    def evaluate(self, batch: Batch) -> torch.Tensor:
        self.calls.append("evaluate")
        self.now += 100.0
        return torch.tensor(self.calls.count("step") / 100 + float(batch.tokens[0, 0, 0]))


def followed(system: Recorder, sizes: dict[int, int]) -> list[dict]:
    """Every event of a measurement with held-out batches: their loss's offset -> label tokens."""
    events: list[dict] = []
    batches = []
    for offset, size in sizes.items():
        labels = torch.full((1, 1, 4), -100)
        labels[0, 0, :size] = 1
        batches.append(Batch(tokens=torch.full((1, 1, 4), offset), labels=labels))
    bench.measure(
        system,
        forever(),
        Measure(warmup_steps=2, windows=2, steps_per_window=3),
        lambda event, **more: events.append({"event": event, **more}),
        system.clock,
        heldout=batches,
    )
    return events


def test_held_out_text_is_evaluated_before_the_first_step_and_between_windows() -> None:
    system = Evaluating()
    events = followed(system, {0: 3, 4: 1})
    window = ["clock", *STEPS, "drain", "clock"]
    look = ["evaluate", "evaluate", "drain"]
    assert system.calls == [*look, *STEPS[:4], "drain", *window, *look, *window, *look]
    assert [event["seconds"] for event in events if event["event"] == "losses"] == [None, 3.5, 3.5]
    seen = [event for event in events if event["event"] == "evaluated"]
    assert [(one["step"], one["tokens"], one["seconds"]) for one in seen] == [
        (0, 0, 0.0), (5, 30, 3.5), (8, 48, 7.0)
    ]  # fmt: skip
    # Three tokens of offset 0 and one of offset 4.
    assert [one["loss"] for one in seen] == pytest.approx([1.0, 1.05, 1.08])
    phases = [event["name"] for event in events if event["event"] == "phase"]
    assert phases == ["evaluation", "warm-up", *["windows", "evaluation"] * 2]
    auto.register()
    (cell,) = command_of(["model=tiny", "system=megatrain"]).cells
    row = row_of(cell, Outcome(status="ok", events=events), started_at="", machine={})
    assert [point["step"] for point in row.heldout] == [0, 5, 8]
    assert list(row.heldout[0]) == ["step", "tokens", "seconds", "loss"]


def test_a_system_that_cannot_evaluate_says_so_in_its_row() -> None:
    events = followed(Recorder(), {0: 1})
    auto.register()
    (cell,) = command_of(["model=tiny", "system=megatrain"]).cells
    row = row_of(cell, Outcome(status="ok", events=events), started_at="", machine={})
    assert row.heldout == []
    assert "no held-out curve: the system evaluates no batch" in row.reason
    assert sum(event["event"] == "not_evaluated" for event in events) == 1


def test_a_slow_first_window_is_the_last() -> None:
    for stop_below, num_windows in (
        (5.2, 1),
        (5.1, 2),
    ):  # 18 label tokens in 3.5 s are 5.14 a second
        assert len(run(Recorder(), stop_below=stop_below)) == 1 + num_windows


def test_a_nan_is_reported_and_raised() -> None:
    events: list[dict] = []
    system = Recorder(nan_at=3)
    with pytest.raises(NonFiniteLossError, match="step 3"):
        bench.measure(
            system,
            forever(),
            Measure(warmup_steps=2),
            lambda event, **more: events.append({"event": event, **more}),
        )
    assert math.isnan(events[-1]["losses"][1])


WRITER = """
import pathlib, sys
from tests.sweeps.test_bench import ROW, Row, Rows
print("ready", flush=True)
sys.stdin.readline()
for number in range(50):
    Rows().append(pathlib.Path(sys.argv[1]), Row(**ROW, cell=f"{sys.argv[2]}-{number}", losses=[1.0] * 500))
"""


def test_two_writers_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, name],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name in "ab"
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.close()
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len({row.cell for row in read_rows(path)}) == 100


def test_a_torn_line_is_cut_off_before_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Rows().append(path, Row(**ROW, cell="a"))
    with path.open("a") as file:
        file.write('{"schema_version": 1, "cel')
    Rows().append(path, Row(**ROW, cell="b"))
    assert [row.cell for row in read_rows(path)] == ["a", "b"]


def test_rows_round_trip_with_nan(tmp_path: Path) -> None:
    row = Row(
        **ROW,
        cell="a",
        losses=[1.5, math.nan, math.inf],
        step_s=[0.1],
        plan={"host": {"weights": 7}, "device": {}},
    )
    Rows().append(tmp_path / "rows.jsonl", row)
    (back,) = read_rows(tmp_path / "rows.jsonl")
    assert math.isnan(back.losses[1])
    assert [back.losses[0], back.losses[2]] == [1.5, math.inf]
    assert json.loads(back.to_json()) == json.loads(row.to_json())


def test_the_history_of_a_run_is_the_row() -> None:
    config = {"measure": {"warmup_steps": 1, "steps_per_window": 2}}
    row = Row(
        **ROW,
        cell="a",
        losses=[3.0, 2.0, 1.0],
        gradient_norms=[9.0, 8.0, 7.0],
        step_s=[0.5],
        tokens_per_s=28.0,  # 14 of 16 are labels
        config=config,
    )
    steps = list(history(row))
    assert steps == [
        (0, {"loss": 3.0, "gradient_norm": 9.0}),
        (1, {"loss": 2.0, "gradient_norm": 8.0}),
        (2, {"loss": 1.0, "gradient_norm": 7.0, "step_s": 0.5, "tokens_per_s": 28.0}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5", "line 1 has no row, allowed schema_version 1"),
        (
            '{"schema_version": 1, "new_field": 1, "status": "ok"}',
            "line 1 has the field 'new_field', allowed what this version knows",
        ),
        (
            '{"schema_version": 1, "status": "bogus"}',
            "line 1 has status 'bogus', allowed what this version knows",
        ),
    ],
)
def test_a_line_that_is_no_row_of_this_version_says_so(
    tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "rows.jsonl")


def test_a_row_keeps_the_prediction_beside_the_planned_bytes():
    auto.register()
    (cell,) = command_of(["model=tiny", "system=megatrain"]).cells
    prediction = {"step_s": 2.0, "rates": {"adamw_params": 7e9}, "placement": {"kept_layers": 3}}
    plan = {"event": "plan", "plan": {"device": {"weights": 1}, "host": {}}}
    for said, expected in (
        ([plan], {}),
        ([plan, {"event": "predicted", "prediction": prediction}], prediction),
    ):
        row = row_of(cell, Outcome(events=said), started_at="", machine={})
        assert row.plan == {"device": {"weights": 1}, "host": {}, **expected}


def test_a_row_counts_the_tokens_of_all_windows_over_their_seconds():
    auto.register()
    (cell,) = command_of(
        ["model=tiny", "system=megatrain", "measure.windows=2", "measure.steps_per_window=3"]
    ).cells
    said = [
        {"event": "plan", "flops_per_token": {"6p": 2e12}},
        {"event": "losses", "losses": [9.0], "seconds": None, "num_tokens": 0},
    ]
    window = {"event": "losses", "losses": [1.0] * 3, "num_tokens": 18}
    steady = {"steady_s": 1.5, "steady_tokens": 12}
    said += [
        window | {"seconds": seconds, "counters": {"optimizer_s": seconds / 4}} | steady
        for seconds in (3.0, 4.0)
    ]
    machine = {"matrix_peak_tflops": 36.0, "matrix_sustained_tflops": 24.0}
    row = row_of(cell, Outcome(status="ok", events=said), started_at="", machine=machine)
    assert (row.step_s, row.tokens_per_s) == ([1.0, 4 / 3], 36 / 7)
    assert row.steady_tokens_per_s == 24 / 3
    assert (row.tflops_6p, row.mfu) == (pytest.approx(72 / 7), pytest.approx(2 / 7))
    assert row.mfu_sustained == pytest.approx(3 / 7)
    assert row.losses == [9.0] + [1.0] * 6
    assert row.window_counters == [{"optimizer_s": 0.75}, {"optimizer_s": 1.0}]
    assert (
        row_of(cell, Outcome(status="timeout", events=said), started_at="", machine={}).tokens_per_s
        is None
    )
