"""The quickstart's jobs over a stand-in for the bus: a good run, and that every kind of mistake ends it with a named culprit."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

import pytest

from tensorbus.models.config import DecoderConfig
from tensorbus.models.made import make_folder
from tensorbus.quickstart import launcher
from tensorbus.quickstart.launcher import Options, RunFailed, run
from tensorbus.quickstart.processes import Processes
from tensorbus.quickstart.settings import Settings

CONFIG = DecoderConfig(vocab=131, hidden=64, layers=2, heads=8, kv_heads=2, head_dim=8, intermediate=64)
STAND_IN = Path(__file__).with_name("stand_in_jobs.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(CONFIG, tmp_path_factory.mktemp("model"))


def options(model: Path, **changes: object) -> Options:
    settings = Settings(folder="", model=str(model), agent_socket="", tp=2, refreshes=2, sequence=16, deadline_s=60.0,
                        learning_rate=0.01)
    return Options(dataclasses.replace(settings, **changes))


def no_services(processes: Processes, folder: Path) -> str:
    return ""


def stand_in(job: str) -> list[str]:
    return [sys.executable, str(STAND_IN), job]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch):
    return lambda kind: monkeypatch.setenv("TENSORBUS_TEST_FAULT", kind)


def nothing_left_of(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.slow
def test_every_version_is_trained_moved_and_verified(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = dataclasses.replace(options(model, replicas=2, refreshes=3), report=tmp_path / "r.html")
    result = run(wanted, no_services, stand_in)
    rows = [result.tally.rows[v] for v in (1, 2, 3)]
    assert all(result.tally.verified(row.version) for row in rows)
    assert rows[2].loss < rows[0].loss, "these are true optimizer steps"
    assert all(row.bytes == rows[0].bytes > 0 and row.seconds > 0 for row in rows)
    assert len({row.digest for row in rows}) == 3
    launcher.show(result, wanted)
    assert "elements" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "r.html").read_text()


@pytest.mark.slow
def test_tensor_and_pipeline_parallel_trainer_feeds_two_engines(model: Path) -> None:
    wanted = options(model, trainer_ranks=4, trainer_tp=2, trainer_pp=2, replicas=2)
    result = run(wanted, no_services, stand_in)
    assert all(result.tally.verified(version) for version in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "message"), [
    ("flip_bit", r"rollout/0 rank 1: version 2: 1 buffers differ: model.norm.weight\[3\]"),
    ("skip_view", r"rollout/0 rank [01]: version 1: .*0.self_attn.qkv_proj.weight\[40, 0\]"),
    ("die", "rollout/0-1 was ended by SIGKILL")])
def test_mistakes_end_the_run_with_the_culprit(model: Path, fault, kind: str, message: str) -> None:
    fault(kind)
    with pytest.raises(RunFailed, match=message):
        run(options(model), no_services, stand_in)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_in_time(model: Path, fault) -> None:
    fault("stall")
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"nothing happened for 15 s; version 2 not published by trainer rank 1"):
        run(options(model, deadline_s=15.0), no_services, stand_in)
    assert time.monotonic() - began < 120


def test_a_split_that_cannot_be_is_refused_before_anything_starts(model: Path) -> None:
    with pytest.raises(ValueError, match=r"attention heads \(8\)"):
        run(options(model, tp=3), no_services, stand_in)


def test_a_service_that_ends_fails_the_run(model: Path) -> None:
    def broken_services(processes: Processes, folder: Path) -> str:
        processes.start("tensorbusd", ["sh", "-c", "echo no such flag; exit 2"])
        return ""

    def sleeper(job: str) -> list[str]:
        return ["sleep", "60", "#"]

    with pytest.raises(RunFailed, match="tensorbusd ended with status 2\nno such flag"):
        run(options(model), broken_services, lambda job: ["sh", "-c", "sleep 60"])
