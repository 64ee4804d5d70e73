"""What any number of ranks saved, any other number resumes, bit for bit; a state of several is whole
or absent too."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Ranks, resuming
from engine.state import Saver
from tests.engine.test_ranks import batch_of, engine_of
from tests.threads import on_ranks

pytestmark = pytest.mark.slow
CASES = [(torch.float32, 0.5, 1, True), (torch.bfloat16, 0.5, 1, False)]
"""dtype, clip_norm, micro-batches, tied."""
Found = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def held(engine: Any) -> Found:
    """Parameters and first moments."""
    return dict(engine.parameters()), dict(engine.moments())


def assert_same(one: Found, other: Found) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def saved(folder: Path, case: Any, count: int, *, beside: bool = False, **pipeline: Any) -> Found:
    """The state that so many ranks had when they wrote it to `folder`."""

    def work(ranks: Ranks) -> Found:
        engine = engine_of(case, ranks, **pipeline)
        for step in range(2):
            engine.train_step(batch_of(step, case[2]))
        if beside:
            engine.save_beside(folder, room=1 << 30)
            found = held(engine)
            engine.train_step(batch_of(2, case[2]))
            engine.saved()
        else:
            engine.save(folder)
            found = held(engine)
        engine.close()
        return found

    return on_ranks(count, work)[0]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("wrote", "reads"), [(2, 1), (2, 4), (4, 2), (1, 2)])
def test_any_number_of_ranks_resumes_what_another_wrote(wrote, reads, case, beside, tmp_path):
    """Under another placement too."""
    folder = tmp_path / "state"
    expected = saved(folder, case, wrote, beside=beside, device_optimizer=2)

    def work(ranks: Ranks) -> tuple[Found, float]:
        engine = engine_of(case, ranks, device_optimizer=3)
        engine.resume(folder)
        found = held(engine)
        loss = engine.train_step(batch_of(7, case[2])).item()
        engine.drain()
        engine.close()
        return found, loss

    found = on_ranks(reads, work)
    for state, _ in found:
        assert_same(state, expected)
    alone = engine_of(case)
    alone.resume(folder)
    assert found[0][1] == pytest.approx(alone.train_step(batch_of(7, case[2])).item(), rel=1e-5)
    parts = json.loads((folder / "state.json").read_text())["parts"]
    assert len(list(folder.glob("block-*"))) == wrote * 5
    assert parts == wrote
    assert not list(folder.glob("rank-*"))


def test_what_is_saved_beside_steps_is_of_one_step_on_all_ranks(tmp_path):
    """Each copies its blocks when it comes to them, and the others are elsewhere."""
    saved(tmp_path / "beside", CASES[1], 2, beside=True)
    saved(tmp_path / "plain", CASES[1], 2)
    for path in sorted((tmp_path / "plain").glob("block-*")):
        assert path.read_bytes() == (tmp_path / "beside" / path.name).read_bytes(), path.name


def test_a_state_that_one_rank_cannot_read_is_refused_by_all(tmp_path):
    saved(tmp_path / "state", CASES[0], 4)
    torn = tmp_path / "state" / "block-0002-part-1-of-4.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])

    def work(ranks: Ranks) -> str:
        engine = engine_of(CASES[0], ranks)
        before = held(engine)
        with pytest.raises(ValueError, match="block-0002-part-1-of-4") as error:
            engine.resume(tmp_path / "state")
        assert_same(held(engine), before)
        return str(error.value)

    one, other = on_ranks(2, work)
    assert one == other
    assert "\n" not in one


@pytest.mark.parametrize("where", ["_commit", "_copy"])
def test_where_one_rank_cannot_write_no_directory_appears(where, tmp_path, monkeypatch):
    plain = getattr(Saver, where)

    def failing(self: Saver, given: Any, *rest: Any) -> Any:
        if self._ranks.index and where == "_copy":
            raise OSError("no room")
        if self._ranks.index:
            given[0].result()
            given[0]._exception, given[0]._result = OSError("no room"), None
        return plain(self, given, *rest)

    monkeypatch.setattr(Saver, where, failing)

    def work(ranks: Ranks) -> str:
        engine = engine_of(CASES[0], ranks)
        with pytest.raises(OSError, match=r"no room|rank 1 did not write") as error:
            engine.save(tmp_path / "state")
        return str(error.value)

    said = on_ranks(2, work)
    assert said == ["save: rank 1 did not write its part; look for its error", "no room"]
    assert list(tmp_path.iterdir()) == []


def test_where_the_first_rank_makes_no_folder_all_say_why(tmp_path):
    (tmp_path / "file").touch()

    def work(ranks: Ranks) -> str:
        with pytest.raises((OSError, ValueError), match=r"Not a directory|Errno 17") as error:
            engine_of(CASES[0], ranks).save(tmp_path / "file" / "state")
        return str(error.value)

    one, other = on_ranks(2, work)
    assert one == other


def test_where_one_rank_cannot_read_all_refuse(tmp_path, monkeypatch):
    def write(ranks: Ranks) -> None:
        engine_of(CASES[0], ranks).save(tmp_path / "state")

    on_ranks(2, write)
    fitting = resuming._fitting

    def failing(store: Any, directory: Path) -> Any:
        if store.ranks.index:
            raise OSError(5, "Input/output error", "block-0001")
        return fitting(store, directory)

    monkeypatch.setattr(resuming, "_fitting", failing)

    def work(ranks: Ranks) -> str:
        with pytest.raises(
            ValueError, match=r"block-0001.*, allowed a state that can be read"
        ) as e:
            engine_of(CASES[0], ranks).resume(tmp_path / "state")
        return str(e.value)

    one, other = on_ranks(2, work)
    assert one == other


@pytest.mark.parametrize("late", [None, "_commit", "_take"])
def test_where_the_first_rank_cannot_commit_the_others_say_so(late, tmp_path, monkeypatch):
    """late: what the other begins when the folder that it is to write in has gone already."""

    waits = threading.Event()

    def fails(self: Saver, whole: Path, files: Any) -> Any:
        assert not late or waits.wait(60)  # or the other would still write into what is removed
        raise OSError("no room")

    monkeypatch.setattr(Saver, "_of_all", fails)
    if late:
        begins = getattr(Saver, late)

        def once_gone(self: Saver, *given: Any) -> None:
            if self._ranks.index:
                waits.set()
            while self._ranks.index and (self._scratch is None or self._scratch.exists()):
                time.sleep(0.001)
            begins(self, *given)

        monkeypatch.setattr(Saver, late, once_gone)

    def work(ranks: Ranks) -> None:
        engine = engine_of(CASES[0], ranks)
        engine.save_beside(tmp_path / "state", room=1 << 30)
        with pytest.raises(OSError, match=r"^no room$"):
            engine.saved()

    on_ranks(2, work)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_refused_by_all(tmp_path):
    (tmp_path / "state").mkdir()

    def work(ranks: Ranks) -> str:
        with pytest.raises(ValueError, match="exists, allowed a new directory") as error:
            engine_of(CASES[0], ranks).save(tmp_path / "state")
        return str(error.value)

    one, other = on_ranks(2, work)
    assert one == other
    assert list((tmp_path / "state").iterdir()) == []


def test_a_rank_that_ends_waits_for_nobody(tmp_path):
    """The others may be dead."""

    def work(ranks: Ranks) -> None:
        engine = engine_of(CASES[0], ranks)
        if ranks.index:  # as far as the name of the folder, and no further
            assert Path(ranks.texts("")[0]).parent.parent == tmp_path
            return
        engine.save_beside(tmp_path / "state", room=1 << 30)
        engine.saver._closing.set()
        with pytest.raises(OSError, match="rank 1 did not write"):
            engine.saved()

    on_ranks(2, work)
    assert list(tmp_path.iterdir()) == []
