"""Rows through W&B and back: offline runs written and read by the real library, and what goes wrong
on the way."""

from __future__ import annotations

import dataclasses
import http.server
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pandas as pd
import pytest

from analysis import rows as frames
from sweeps.mirror import history, packed, unpacked
from sweeps.result import Row
from sweeps.upload import config_of
from tests.made_rows import curve, plan, row, save

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "system": {"dtype": "bfloat16", "depth": 2},
    "seed": 0,
    "measure": {"warmup_steps": 1, "windows": 2, "steps_per_window": 2, "timeout_s": 9.5},
    "machine": {"device": "cuda", "host_bytes": None, "device_bytes": None},
}
NO_KEY = {"WANDB_API_KEY": "", "HOME": "/dev/null", "NETRC": "/nonexistent"}
NO_NETWORK = {
    "WANDB_API_KEY": "0123456789" * 4,
    "WANDB_BASE_URL": "http://127.0.0.1:9",
    "WANDB_HTTP_TIMEOUT": "2",
}


def rows() -> list[Row]:
    """Measured, non-finite, without a number; the reference comes last, so that `agrees` has to be
    filled in."""
    return [
        row(
            "megatrain",
            [1.6, 1.7],
            losses=curve(5, 1e-4),
            plan=plan(7, 9) | {"step_s": 1.55},
            config=CONFIG,
        ),
        row(
            "fsdp2",
            status="nonfinite",
            reason="loss nan at step 4",
            losses=[*curve(4), math.nan],
            config=CONFIG,
        ),
        row(
            "zero2",
            status="wont_fit",
            reason='no "room" — 2 × 10 GiB',
            plan=plan(2**60, 3),
            losses=[],
        ),
        row(
            "in_memory",
            [0.1 + 0.2, 1 / 3],
            losses=curve(5),
            counters={"optimizer_s": math.inf},
            config=CONFIG,
        ),
    ]


def upload(*arguments: str | Path, **env: str) -> CompletedProcess[str]:
    command = [sys.executable, "-m", "sweeps.upload", *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A rows file, and the folders of its offline runs."""
    path = save(tmp_path_factory.mktemp("study") / "rows.jsonl", rows())
    done = upload(path.parent)
    assert done.returncode == 0, done.stderr
    return path, done.stdout.split()


def test_files_stay_apart(tmp_path: Path) -> None:
    """Two studies of one name are two runs, also when they come back from W&B."""
    for name, hour in (("a", 1), ("b", 2)):
        save(
            tmp_path / f"{name}.jsonl",
            [
                dataclasses.replace(one, started_at=f"2026-11-22T0{hour}:00:00Z")
                for one in rows()[:2]
            ],
        )
    assert upload(tmp_path).returncode == 0
    back = frames.frame(tmp_path / "wandb")
    assert same(back, frames.frame(tmp_path))
    assert sorted(back.groupby("run").size()) == [2, 2]


def same(one: pd.DataFrame, other: pd.DataFrame) -> bool:
    pd.testing.assert_frame_equal(one.drop(columns="source"), other.drop(columns="source"))
    return True


def test_offline_runs_and_the_jsonl_give_the_same_frame(uploaded: tuple[Path, list[str]]) -> None:
    path, folders = uploaded
    frame = frames.frame(path)
    assert same(frames.frame(path.parent / "wandb"), frame)
    assert list(frame["agrees"][[0, 3]]) == [True, True]
    assert math.isnan(frame["losses"][1][-1])
    single = frames.frame(folders[2])
    assert (len(single), single["reason"][0]) == (1, rows()[2].reason)


def test_a_synced_run_gives_the_same_frame(
    uploaded: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """`wandb sync` leaves the file as it is and a marker beside it; an online run has another
    folder name."""
    path, folders = uploaded
    for number, folder in enumerate(map(Path, folders)):
        name = folder.name.removeprefix("offline-") if number % 2 else folder.name
        shutil.copytree(folder, tmp_path / name)
        if number % 2 == 0:
            (tmp_path / name / f"{next(folder.glob('*.wandb')).name}.synced").touch()
    assert same(frames.frame(tmp_path), frames.frame(path))


def test_uploading_again_adds_nothing(uploaded: tuple[Path, list[str]]) -> None:
    path, folders = uploaded
    assert upload(path).stdout.split() == folders
    assert len(list(path.parent.glob("wandb/offline-run-*"))) == len(folders) == len(rows())
    elsewhere = upload(path, "project=other", f"cell={rows()[0].cell}").stdout.split()
    assert len(elsewhere) == 1
    assert elsewhere[0] not in folders


def test_a_reader_that_has_seen_enough_ends_it_quietly(uploaded: tuple[Path, list[str]]) -> None:
    path, _ = uploaded
    command = [sys.executable, "-m", "sweeps.upload", str(path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 1


def test_a_run_whose_writer_was_killed_is_told_and_made_again(
    uploaded: tuple[Path, list[str]], tmp_path: Path
) -> None:
    path = save(tmp_path / "rows.jsonl", rows()[:2])
    torn, other = (tmp_path / "wandb" / Path(folder).name for folder in uploaded[1][:2])
    for folder in (torn, other):
        shutil.copytree(uploaded[0].parent / "wandb" / folder.name, folder)
    log = next(torn.glob("*.wandb"))
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 3])
    (torn / "uploaded").unlink()
    with pytest.raises(ValueError, match=r"its writer was .*upload") as caught:
        frames.frame(torn.parent)
    assert "\n" not in str(caught.value)
    assert len(frames.frame(tmp_path)) == 2  # the JSONL has every row
    assert upload(path).returncode == 0
    assert len(list(torn.parent.glob("offline-run-*"))) == 3
    log.write_bytes(b"")
    again, there = frames.frame(torn.parent), frames.frame(path)
    assert list(again["file"] == there["file"]) == [True, False], (
        "the other was uploaded from another folder"
    )
    assert same(again.drop(columns="file"), there.drop(columns="file"))


def limited(path: Path, num_bytes: int) -> CompletedProcess[str]:
    """An upload in whose files there is no more room, as on a full disk: W&B itself is told, and
    tells nobody."""
    command = ["sh", "-c", f'ulimit -f {num_bytes // 512}; exec "$@"', "sh"]
    command += [sys.executable, "-m", "sweeps.upload", str(path)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (16384, ".wandb: got less than the row, which W&B could not write"),
        (2048, "wandb: got File too large"),
    ],
)
def test_a_run_without_room_is_one_line_and_no_upload(
    tmp_path: Path, num_bytes: int, words: str
) -> None:
    path = save(tmp_path / "rows.jsonl", [dataclasses.replace(rows()[0], losses=curve(500))])
    done = limited(path, num_bytes)
    assert done.returncode == 2, done
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("uploaded"))
    assert upload(path).returncode == 0
    assert same(frames.frame(tmp_path / "wandb"), frames.frame(path))


def test_runs_that_were_damaged_later_are_named_and_the_remedy_works(tmp_path: Path) -> None:
    path = save(tmp_path / "rows.jsonl", rows()[:2])
    torn, flipped = (next(Path(folder).glob("*.wandb")) for folder in upload(path).stdout.split())
    torn.write_bytes(torn.read_bytes()[:4096])
    content = bytearray(flipped.read_bytes())
    content[200:300] = bytes(byte ^ 1 for byte in content[200:300])
    flipped.write_bytes(content)
    with pytest.raises(ValueError, match=r"upload .*; so are 1 more") as caught:
        frames.frame(tmp_path / "wandb")
    assert str(torn) in str(caught.value)
    assert upload(path).returncode == 0
    assert same(frames.frame(tmp_path / "wandb"), frames.frame(path))
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 4


@pytest.mark.parametrize("one", rows(), ids=lambda one: one.system)
def test_row_and_run_are_one_to_one(one: Row) -> None:
    """As `scan_history` has it: other keys beside ours, None where nothing was logged, any
    order."""
    steps = [
        {"_step": step, "_runtime": 0.1, "loss": None, "step_s": None} | values
        for step, values in history(one)
    ]
    assert unpacked(packed(one), reversed(steps), "run").to_json() == one.to_json()
    if steps:
        with pytest.raises(ValueError, match="run has 4 of 5 losses: its writer was stopped"):
            unpacked(packed(one), steps[:-1], "run")


def test_a_run_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="run has schema_version 0, allowed schema_version 1"):
        unpacked(json.dumps(json.loads(packed(rows()[2])) | {"schema_version": 0}), [], "run")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "upload: command line: got nothing, allowed a file or folder"),
        (["rows.jsonl", "extra"], "upload: command line: got 'extra'"),
        (
            ["rows.jsonl", "proj=x"],
            "upload: proj: got 'x', an unknown option, allowed project, mode, cell",
        ),
        (["rows.jsonl", "mode=later"], "upload: mode: got 'later', allowed offline, online"),
        (["nowhere.jsonl"], "got no such file or folder"),
        (["tests"], "upload: tests: got no rows"),
        (
            ["analysis/results/vs_zero3_3b/2026-11-21_h200-16c_t1027.jsonl", "cell=nope"],
            "upload: cell: got nope, allowed a cell of",
        ),
    ],
)
def test_a_mistyped_upload_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from sweeps.upload import main

    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert len(errors.splitlines()) == 1


def test_an_upload_that_cannot_reach_the_server_is_one_line(tmp_path: Path) -> None:
    done = upload(save(tmp_path / "rows.jsonl", rows()[2:3]), "mode=online", **NO_KEY)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "upload: mode=online: W&B said" in done.stderr


def loaded(source: str, **env: str) -> CompletedProcess[str]:
    """In a process of its own: wandb keeps what it once knew of keys and servers."""
    code = f"from analysis import rows\ntry:\n    rows.frame({source!r})\nexcept ValueError as error:\n    print(error)"
    command = [sys.executable, "-c", code]
    quiet = os.environ | {"WANDB_SILENT": "true"} | env
    return subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120, check=False
    )


PROJECT: dict[str, dict[str, Any]] = {}
"""Runs of the one project that the server below knows, by id: config, group, tags, history."""


def answer(query: str, variables: dict[str, Any]) -> dict[str, Any]:
    """What W&B's GraphQL says to the library's queries: who asks, a project's runs by filter, a
    run's history by page."""
    if "project(" not in query:
        return {
            "viewer": {
                "id": "1",
                "username": "u",
                "entity": "u",
                "flags": "{}",
                "teams": {"edges": []},
            }
        }
    if variables["project"] != "bench":
        return {"project": None}
    if "runs(" in query:
        wanted = json.loads(variables["filters"])
        matching = [
            name
            for name, run in PROJECT.items()
            if wanted.get("group", run["group"]) == run["group"]
            and wanted.get("tags", run["tags"][0]) in run["tags"]
        ]
        edges = [{"node": node(name), "cursor": name} for name in matching]
        page = {"endCursor": "", "hasNextPage": False}
        return {
            "project": {
                "id": "1",
                "internalId": "1",
                "runs": {"totalCount": len(edges), "edges": edges, "pageInfo": page},
            }
        }
    name = variables.get("name") or variables.get("run") or variables["runName"]
    first, last = variables.get("minStep", 0), variables.get("maxStep", 0)
    steps = [json.dumps(step) for step in PROJECT[name]["history"] if first <= step["_step"] < last]
    return {
        "project": {
            "run": node(name)
            | {"history": steps, "parquetHistory": {"liveData": [], "parquetUrls": []}}
        }
    }


def node(name: str) -> dict[str, Any]:
    run = PROJECT[name]
    config = json.dumps({key: {"value": value} for key, value in run["config"].items()})
    last = max((step["_step"] for step in run["history"]), default=-1)
    about = {
        "id": name,
        "name": name,
        "displayName": name,
        "state": "finished",
        "config": config,
        "summaryMetrics": "{}",
    }
    return about | {
        "group": run["group"],
        "tags": run["tags"],
        "historyKeys": {"lastStep": last},
        "user": {"username": "u"},
    }


@pytest.fixture
def server() -> Iterator[str]:
    """Stands where api.wandb.ai stands, for the real library to talk to."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            found = {}
            if self.path.endswith("/graphql"):
                body = json.loads(asked)
                found = {"data": answer(body["query"], body.get("variables") or {})}
            told = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *arguments: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listener.server_address[1]}"
    listener.shutdown()


@pytest.mark.parametrize(
    ("source", "env", "words"),
    [
        (
            "wandb:nobody",
            NO_KEY,
            "wandb:nobody: got no project, allowed wandb:entity/project[@group][#tag]",
        ),
        ("wandb:me/project", NO_KEY, "wandb:me/project: W&B said 'No API key configured"),
        (
            "wandb:me/project@quickstart",
            NO_NETWORK,
            "wandb:me/project@quickstart: W&B said '",
        ),  # the words differ with the time it takes
    ],
    ids=["address", "no-key", "no-network"],
)
def test_a_project_that_cannot_be_read_is_one_line(
    source: str, env: dict[str, str], words: str
) -> None:
    done = loaded(source, **env)
    assert done.stdout.startswith(words), done
    assert len(done.stdout.splitlines()) == 1


def test_a_service_that_does_not_end_holds_nobody_up(tmp_path: Path) -> None:
    """As the library's does now and then after a request that it gave up: Python waits for it at
    exit."""
    service = tmp_path / "wandb-core"
    service.write_bytes(Path("/bin/sleep").read_bytes())
    service.chmod(0o755)
    code = (
        "import atexit, subprocess, sys\n"
        "from analysis import rows\n"
        "rows.END_S = 0.1\n"
        "atexit.register(subprocess.Popen([sys.argv[1], '600']).wait)\n"
        "try:\n    rows.frame('wandb:me/project')\nexcept ValueError as error:\n    print(error)"
    )
    env = os.environ | NO_KEY | {"WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code, service],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "W&B said 'No API key" in done.stdout


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("wandb:me/bench", [0, 1, 2, 3]),
        ("wandb:me/bench@here", [0, 1, 2, 3]),
        ("wandb:me/bench@here#zero2", [2]),
    ],
    ids=["all", "group", "tag"],
)
def test_a_project_online_gives_the_frame_of_its_jsonl(
    server: str, address: str, wanted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the real library reads of it, by whole history; runs of another group are left out where
    one is named."""
    path = save(tmp_path / "rows.jsonl", rows())
    for position, one in enumerate(rows()):
        steps = [{"_step": step, **values} for step, values in history(one)]
        run = {
            "config": config_of(one, path, position),
            "group": "here",
            "tags": [one.system, one.status],
            "history": steps,
        }
        monkeypatch.setitem(PROJECT, f"run{position}", run)
    if "@" in address:
        monkeypatch.setitem(PROJECT, "other", PROJECT["run0"] | {"group": "there"})
    code = "import pickle, sys; from analysis import rows; sys.stdout.buffer.write(pickle.dumps(rows.frame(sys.argv[1])))"
    env = (
        os.environ
        | NO_NETWORK
        | {"WANDB_SILENT": "true", "WANDB_BASE_URL": server, "WANDB_HTTP_TIMEOUT": "20"}
    )
    done = subprocess.run(
        [sys.executable, "-c", code, address],
        cwd=ROOT,
        env=env,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    back, whole = pickle.loads(done.stdout), frames.frame(path).iloc[wanted].reset_index(drop=True)
    assert same(back, whole[list(back)])
    assert whole.drop(columns=list(back)).isna().all(axis=None)  # settings of the others alone


def test_a_project_that_does_not_exist_is_one_line(server: str) -> None:
    done = loaded(
        "wandb:me/nowhere", **(NO_NETWORK | {"WANDB_BASE_URL": server, "WANDB_HTTP_TIMEOUT": "20"})
    )
    assert done.stdout.startswith("wandb:me/nowhere: W&B said 'Could not find project nowhere'"), (
        done
    )
    assert len(done.stdout.splitlines()) == 1
