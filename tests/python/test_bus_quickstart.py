"""The quickstart over the real bus: daemon, agent and both jobs as processes, every element of every version verified."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorbus.errors import NotRunningError
from tensorbus.local import find_program
from tensorbus.models.config import DecoderConfig
from tensorbus.models.made import make_folder

CONFIG = DecoderConfig(vocab=131, hidden=64, layers=4, heads=8, kv_heads=2, head_dim=8, intermediate=64)
MODELS = {
    "untied": CONFIG,
    "tied": dataclasses.replace(CONFIG, tied=True),
    "experts": dataclasses.replace(CONFIG, experts=4, experts_per_token=2, qk_norm=True),
    "one_kv_head": dataclasses.replace(CONFIG, kv_heads=1),
}

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    for name in ("tensorbusd", "tensorbus-agent"):
        try:
            find_program(name)
        except NotRunningError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_folder(config, tmp_path_factory.mktemp(name)) for name, config in MODELS.items()}


def quickstart(tmp_path: Path, *arguments: str, timeout_s: float = 550) -> str:
    """Runs it to its end; what it wrote on standard output."""
    command = [sys.executable, "-m", "tensorbus.quickstart", "--report", str(tmp_path / "report.html"), "--sequence", "16", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    assert answer.returncode == 0, answer.stderr[-3000:]
    lines = answer.stdout.strip().splitlines()
    assert lines[-1] == "verified"
    assert "next: `" in answer.stderr
    assert (tmp_path / "report.html").stat().st_size > 1000
    return answer.stdout


def versions(output: str) -> list[int]:
    return [int(match) for match in re.findall(r"^│\s+(\d+) │", output, re.MULTILINE)]


@pytest.mark.parametrize(("model", "arguments"), [
    ("untied", ["--tp", "4", "--flip", "in_place"]),
    ("tied", ["--tp", "2", "--replicas", "2", "--trainer-ranks", "3"]),
    ("experts", ["--tp", "2", "--single-experts"]),
    ("experts", ["--tp", "2", "--flip", "in_place"]),
    ("one_kv_head", ["--tp", "4"]),
    ("tied", ["--trainer", "megatron:tp=2,pp=2", "--tp", "2", "--replicas", "2"]),
    ("untied", ["--trainer", "megatron:tp=2,pp=2", "--tp", "2", "--replicas", "2", "--flip", "in_place"])])
def test_made_models(models: dict[str, Path], tmp_path: Path, model: str, arguments: list[str]) -> None:
    output = quickstart(tmp_path, "--model", str(models[model]), "--refreshes", "2", *arguments)
    assert versions(output) == [1, 2]


def test_fifty_refreshes_leave_nothing_behind(models: dict[str, Path], tmp_path: Path) -> None:
    output = quickstart(tmp_path, "--model", str(models["untied"]), "--tp", "2", "--refreshes", "50", "--check-leaks")
    assert versions(output) == list(range(1, 51))


def test_real_weights(smollm2: Path, tmp_path: Path) -> None:
    output = quickstart(tmp_path, "--refreshes", "2")
    assert versions(output) == [1, 2]
    assert "134,585,280 elements" in output


@pytest.mark.parametrize(("sent", "ends"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_run_leaves_nothing_running(models: dict[str, Path], sent: signal.Signals, ends: int) -> None:
    process = subprocess.Popen([sys.executable, "-m", "tensorbus.quickstart", "--model", str(models["untied"]), "--tp", "2"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "started a trainer job" in line:
            break
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == 6, "daemon, agent, two trainer ranks, two engine ranks"
    process.send_signal(sent)
    assert process.wait(timeout=60) == ends
    process.stderr.close()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < deadline, "something was left running"
        time.sleep(0.05)
