"""Figures: every one is drawn from the record, the same bytes twice, and says its finding and
units."""

import io
import itertools
import re
import textwrap
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib import image
from matplotlib import style as plot_style
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis import figures, names, record, speeds, studies
from analysis.figures import of_record, of_study, step, style

LINES = record.lines()
DRAWN = dict(figures.all_figures(LINES, record.RESULTS))
ALONG = [
    name for name, study in studies.listed().items() if study.figure == "lines" and name in DRAWN
]


def test_each_study_and_the_whole_record_have_their_picture() -> None:
    told = list(studies.shown(LINES))
    shown = {study.name for study, mine in told if of_study.drawable(study, mine)}
    assert {study.name for study, _ in told} - shown == {"larger"}  # of which one line is known
    assert set(DRAWN) == shown | set(figures.TITLES)
    assert {path.stem for path in (record.RESULTS / "figures").glob("*.png")} == set(DRAWN)


@pytest.mark.parametrize("name", ["vs_zero3_14b", "double_buffering", "ladder", "rivals"])
def test_a_picture_is_the_same_bytes_whenever_it_is_drawn(name: str) -> None:
    first = style.drawn(DRAWN[name])
    assert first == style.drawn(DRAWN[name])
    assert image.imread(io.BytesIO(first)).shape[1] <= 200 * style.PAGE_IN + 1


@pytest.mark.parametrize("name", DRAWN)
def test_no_words_overlap_or_leave_the_page(name: str) -> None:
    with mpl.rc_context(), plot_style.context(style.LOOK):
        figure = DRAWN[name]()
        figure.draw_without_rendering()
    unseen = {
        id(tick.label1)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    words = [
        one
        for one in figure.findobj(Text)
        if one.get_visible() and one.get_text().strip() and id(one) not in unseen
    ]
    boxes = [(one.get_text(), one.get_window_extent()) for one in words]
    page = figure.bbox
    for text, box in boxes:
        assert box.x0 >= page.x0 - 3, text
        assert box.x1 <= page.x1 + 3, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert width < 2 or height < 2, (one, other)


@pytest.mark.parametrize("name", ALONG)
def test_marks_along_an_axis_are_whole(name: str) -> None:
    with mpl.rc_context(), plot_style.context(style.LOOK):
        figure = DRAWN[name]()
        figure.draw_without_rendering()
    axes = figure.axes[0]
    marks = [one for one in axes.lines if one.get_marker() not in ("None", "_", "|", "")]
    assert marks
    for one in marks:
        height = one.get_markersize() / 2 * figure.dpi / 72
        tops = one.get_transform().transform(one.get_xydata())[:, 1] + height
        assert (tops[tops == tops] <= axes.bbox.y1).all(), one.get_label()


@pytest.mark.parametrize("reach", [1.01, 1.37, 1.59, 3.0])
def test_words_beside_a_bar_stand_beyond_its_interval_if_that_ends_in_sight(reach: float) -> None:
    one = LINES[LINES["tokens_per_s"].notna()].tail(1)
    fast = float(one["tokens_per_s"].iloc[0])
    one = one.assign(label="a, b", words="1.69x", lo=fast / reach, hi=fast * reach)
    with mpl.rc_context(), plot_style.context(style.LOOK):
        figure = Figure(figsize=(style.PAGE_IN * 0.6, 1.4))
        axes = figure.subplots()
        style.bars(axes, one, "tokens_per_s", ",.0f")
        figure.draw_without_rendering()
    words = axes.texts[0].get_window_extent()
    end = axes.transData.transform((fast * (reach if reach < 1.6 else 1), 0.0))[0]
    assert words.x0 == pytest.approx(end, abs=1)
    assert words.x1 <= axes.bbox.x1 + 3


def test_the_figure_of_the_instructions_draws() -> None:
    text = (Path(__file__).parents[2] / "docs" / "adding.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    space = dict(vars(of_record))
    exec(textwrap.dedent("   " + block[1].lstrip()), space)
    assert style.drawn(lambda: space["host_memory"](LINES)).startswith(b"\x89PNG")


def test_the_forest_has_a_mark_for_each_run_that_measured_both() -> None:
    told = of_record.ratios(LINES)
    mine = told[(told["model"] == "qwen2.5-7b") & (told["family"] == "zero3_twinflow")]
    ready = LINES[(LINES["model"] == "qwen2.5-7b") & LINES["tokens_per_s"].notna()]
    families = ready.groupby("run")["family"].agg(set)
    both = families.map({"megatrain_fast", "zero3_twinflow"}.issubset)
    assert sorted(mine["run"]) == list(families[both].index)
    assert len(mine) >= 4
    assert (mine["value"] > 1.5).all()


def title_of(name: str) -> str:
    with mpl.rc_context(), plot_style.context(style.LOOK):
        return DRAWN[name]().get_suptitle().replace("\n", " ")


def test_the_frontier_is_what_nothing_beats_in_both_speed_and_memory() -> None:
    mine = LINES[(LINES["study"] == of_record.HEADLINE) & ~LINES["superseded"]]
    mine = mine[speeds.comparable(mine)]
    speed, gb = mine["tokens_per_s"], mine["device_gb"] + mine["host_gb"]
    best = {
        names.name(line)
        for place, line in mine.iterrows()
        if not ((speed > speed[place]) & (gb <= gb[place])).any()
    }
    told = title_of("pareto").removeprefix("At 14B ").split(" on the frontier")[0]
    who = told.removesuffix(" are" if len(best) > 1 else " alone is")
    assert set(who.split(" and ")) == best


def test_the_title_of_energy_is_that_of_its_rows() -> None:
    known = LINES[LINES["joules_per_token"].notna() & (LINES["model"] == "qwen2.5-7b")]
    known = known.drop_duplicates(["run", "family", "mode"])
    known = known[known.groupby("run")["system"].transform("nunique") > 1]
    told = [
        f"{least:#.3g} J a token, {1 - least / then:.0%} less than" in title_of("energy")
        for _, run in known.groupby("run")
        for least, then in [sorted(run.groupby("system")["joules_per_token"].min())[:2]]
    ]
    assert any(told)


def test_all_work_of_a_recorded_step_is_drawn() -> None:
    """But for what takes next to no time on its lane."""
    for path in (record.RESULTS / "timelines").rglob("*.json"):
        for one in step.load(path):
            drawn = one.intervals["work"].isin(step.FILLS)
            seconds = one.intervals["end_s"] - one.intervals["start_s"]
            assert seconds[~drawn].sum() < 0.01 * one.step_s, (path.name, one.predicted)


def test_a_recorded_step_is_read_and_hidden_shares_follow_from_its_intervals(tmp_path) -> None:
    steps = step.load(record.RESULTS / "timelines" / "fast.timeline.json")
    assert [one.predicted for one in steps] == [False, True]
    fast = steps[0]
    assert fast.busy_s("compute") == pytest.approx(2.33, abs=0.01)
    assert fast.hidden_share("cpu") == pytest.approx(0.79, abs=0.01)
    assert fast.hidden_share("compute") is None
    style.drawn(lambda: step.draw(steps))
    for content in ("", "[]", '{"measured": {"step_s": 1, "intervals": [["a", "b", 0, 2]]}}'):
        bad = tmp_path / "bad.timeline.json"
        bad.write_text(content)
        with pytest.raises(ValueError, match="not a timeline") as caught:
            step.load(bad)
        assert str(bad) in str(caught.value)
