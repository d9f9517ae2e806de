"""The quickstart's smaller parts: events, processes, leak detection, tally, report, training data."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorbus.errors import NotRunningError
from tensorbus.local import find_program
from tensorbus.models.config import DecoderConfig
from tensorbus.models.made import DEFAULT, make_folder
from tensorbus.quickstart.__main__ import choose_tp, main, parse
from tensorbus.quickstart.events import Emitter, Event, LineReader
from tensorbus.quickstart.leaks import WARM_UP, Usage, find_leaks, own_usage, usage_of
from tensorbus.quickstart.next_steps import command, next_steps
from tensorbus.quickstart.processes import ProcessFailed, Processes
from tensorbus.quickstart.report import _nice_ceiling, bar_chart, median, render_report
from tensorbus.quickstart.services import wait_for_socket
from tensorbus.quickstart.settings import Settings
from tensorbus.quickstart.tally import Tally
from tensorbus.quickstart.trainer import training_tokens

SETTINGS = Settings(folder="/nowhere", model="", agent_socket="", tp=2, refreshes=1)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "soon"])
def test_a_timeout_is_a_number_of_seconds(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--timeout", text])
    assert "is not a number of seconds above 0" in capsys.readouterr().err


# Events

def test_events_survive_the_pipe_in_pieces() -> None:
    read_fd, write_fd = os.pipe()
    emit = Emitter(write_fd, "trainer", 1)
    emit("step", version=3, loss=0.5)
    emit("done", at=7.0)
    os.close(write_fd)
    data = os.read(read_fd, 1 << 16)
    os.close(read_fd)
    reader = LineReader()
    events = [event for i in range(len(data)) for event in reader.feed(data[i:i + 1])]
    assert [(e.kind, e.job, e.rank) for e in events] == [("step", "trainer", 1), ("done", "trainer", 1)]
    assert events[0]["loss"] == 0.5 and events[1].at == 7.0


def test_endless_line_is_refused() -> None:
    with pytest.raises(ValueError, match="without end"):
        LineReader().feed(b"x" * (1 << 17))


def test_emitter_outlives_its_reader() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    emit = Emitter(write_fd, "trainer", 0)
    emit("step")
    emit("step")
    os.close(write_fd)


# Processes

def drain(processes: Processes, seconds: float = 20.0) -> list[Event]:
    events, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline and not all(child.finished for child in processes.children):
        events += processes.poll(0.05)
    return events


def test_events_of_a_process_that_ends_at_once_are_heard(tmp_path: Path) -> None:
    script = ("import sys; from tensorbus.quickstart.events import Emitter; e = Emitter(int(sys.argv[-1]), 'trainer', 0); "
              "[e('tick', n=i) for i in range(50)]")
    with Processes(tmp_path) as processes:
        processes.start("trainer-0", [sys.executable, "-c", script], events=True, env={"PYTHONPATH": os.pathsep.join(sys.path)})
        assert [event["n"] for event in drain(processes)] == list(range(50))


def test_failure_carries_the_end_of_the_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("trainer-0", ["sh", "-c", "echo the reason >&2; exit 3"])
        with pytest.raises(ProcessFailed, match="trainer-0 ended with status 3\nthe reason"):
            drain(processes)


def test_missing_program_is_named(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        with pytest.raises(ProcessFailed, match="cannot start /no/such/program: No such file"):
            processes.start("agent", ["/no/such/program"], events=True)


def test_leaving_ends_processes_and_their_children(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        child = processes.start("trainer-0", ["sh", "-c", "trap '' TERM; sleep 100 & echo $!; wait; sleep 100"])
        deadline = time.monotonic() + 10
        while not child.log.read_text().strip() and time.monotonic() < deadline:
            time.sleep(0.01)
        inner = int(child.log.read_text())
        import tensorbus.quickstart.processes as module
        module.STOP_GRACE_S, kept = 0.2, module.STOP_GRACE_S
    module.STOP_GRACE_S = kept
    assert child.process.returncode is not None
    deadline = time.monotonic() + 10
    while Path(f"/proc/{inner}/status").exists() and "zombie" not in Path(f"/proc/{inner}/status").read_text():
        assert time.monotonic() < deadline, "the child of the child lives on"
        time.sleep(0.01)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = own_usage()["fds"]
    with Processes(tmp_path) as processes:
        processes.start("trainer-0", ["true"], events=True)
        processes.start("trainer-1", ["sleep", "100"], events=True)
    assert own_usage()["fds"] == before


# Leaks

def samples(rss: list[int], fds: int = 10, threads: int = 4) -> list[Usage]:
    return [Usage(rss_bytes=r << 20, fds=fds, threads=threads) for r in rss]


def test_flat_usage_is_no_leak() -> None:
    growing_at_first = [50, 90, 120, 140, 150] + [150, 151, 150, 149, 151, 150, 150, 151, 150]
    assert find_leaks("agent", samples(growing_at_first)) == []


def test_growing_memory_is_a_leak() -> None:
    assert "RSS went from" in find_leaks("agent", samples([200 + 2 * i for i in range(30)]))[0]


def test_one_descriptor_and_one_thread_are_leaks() -> None:
    usage = samples([100] * 20)
    usage[-1] = Usage(rss_bytes=100 << 20, fds=11, threads=5)
    assert [text.split(":")[1].split()[0] for text in find_leaks("agent", usage)] == ["descriptors", "threads"]


def test_too_few_samples_prove_nothing() -> None:
    assert "only 8 samples" in find_leaks("agent", samples([1] * (WARM_UP + 3)))[0]


def test_usage_counts_descriptors() -> None:
    before = own_usage()
    with open(os.devnull, "rb"):
        assert own_usage()["fds"] == before["fds"] + 1
    assert usage_of(os.getpid())["threads"] >= 1 and before["rss_bytes"] > 1 << 20


# Tally

def event(job: str, rank: int, kind: str, at: float = 0.0, **fields: object) -> Event:
    return Event(job, rank, kind, at, dict(fields))


def one_refresh(tally: Tally) -> None:
    for rank in range(2):
        tally.add(event("trainer", rank, "registered"))
        tally.add(event("rollout/0", rank, "registered"))
        tally.add(event("trainer", rank, "step", version=1, loss=1.0 + rank, seconds=0.1))
        tally.add(event("trainer", rank, "published", at=10.0 + rank, version=1, seconds=0.0))


def flips(tally: Tally) -> None:
    for rank in range(2):
        tally.add(event("rollout/0", rank, "flipped", at=11.5 + rank / 100, version=1, bytes=10**9, seconds=0.4, copy_seconds=0.3,
                        digest=f"{(1 << 128) - 1:032x}", asked=9.0))


def test_seconds_run_from_the_last_publish_to_the_last_flip() -> None:
    tally = Tally(SETTINGS)
    one_refresh(tally)
    flips(tally)
    row = tally.rows[1]
    assert row.seconds == pytest.approx(0.51) and row.gb_per_s == pytest.approx(2 / 0.51)
    assert row.flip_spread_ms == pytest.approx(10.0) and row.loss == 1.5
    assert row.digest == "f" * 15 + "e" + "f" * 15 + "e", "each 64-bit half is a sum of its own"


def test_the_missing_are_named_at_every_stage() -> None:
    tally = Tally(SETTINGS)
    assert "not registered with the bus: trainer rank 0, trainer rank 1, rollout/0 rank 0" in tally.missing()
    one_refresh(tally)
    assert tally.missing() == "version 1 not flipped at rollout/0 rank 0, rollout/0 rank 1"
    flips(tally)
    tally.add(event("rollout/0", 0, "verified", version=1, elements=5, seconds=0.1))
    assert tally.missing() == "version 1 not verified at rollout/0 rank 1"
    assert not tally.verified(1)
    tally.add(event("rollout/0", 1, "verified", version=1, elements=5, seconds=0.1))
    assert tally.verified(1) and not tally.complete()
    for who in tally.everybody:
        tally.add(event(*who, "done"))
    assert tally.complete()


# Report

@pytest.mark.parametrize(("value", "ceiling"), [(0, 1), (0.3, 0.5), (1, 1), (1.1, 2), (2.2, 2.5), (26, 50), (0.0071, 0.01)])
def test_axis_ends_at_a_round_number(value: float, ceiling: float) -> None:
    assert _nice_ceiling(value) == pytest.approx(ceiling)


def test_the_next_step_is_a_command_that_works_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    for name in ("tensorbusctl", "python", "activate"):
        (folder / name).write_text("#!/bin/sh\necho ran\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("TENSORBUS_BIN", str(folder))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    for cwd, ctl in ((tmp_path, "env/bin/tensorbusctl"), (Path("/"), str(folder)[1:] + "/tensorbusctl"), (Path("/usr"), f"{folder}/tensorbusctl")):
        monkeypatch.chdir(cwd)
        assert command("tensorbusctl") == ctl
        assert subprocess.run(["sh", "-c", command("tensorbusctl")], capture_output=True, text=True, check=True).stdout == "ran\n"
        said = next_steps()
        assert f"`{ctl} up`" in said and f"`. {ctl.removesuffix('tensorbusctl')}activate`" in said and "docs/trainer.md" in said
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert "`tensorbusctl up`" in next_steps() and "activate" not in next_steps()


def test_report_is_self_contained_and_escaped() -> None:
    tally = Tally(SETTINGS)
    one_refresh(tally)
    flips(tally)
    page = render_report("a <b> title", [("1", "x & y")], list(tally.rows.values()), ["agent: RSS <grew>"])
    assert "a &lt;b&gt; title" in page and "x &amp; y" in page and "RSS &lt;grew&gt;" in page
    assert "http" not in page.replace("http-equiv", "")


def test_chart_labels_thin_out() -> None:
    labels = [str(i) for i in range(100)]
    assert bar_chart("t", "s", labels, [1.0] * 100, "--bar").count('text-anchor="middle"') < 25


def test_median() -> None:
    assert [median([]), median([3]), median([1, 9, 2]), median([1, 2, 3, 10])] == [0, 3, 2, 2.5]


# Training data

def test_ranks_get_different_rows_and_noise_replaces_a_useless_tokenizer(tmp_path: Path) -> None:
    make_folder(DEFAULT, tmp_path)  # its word-level tokenizer knows none of the words
    settings = Settings(folder="", model=str(tmp_path), agent_socket="", batch=2, sequence=16)
    rows = training_tokens(settings, DEFAULT.vocab)
    assert rows.shape == (4, 17) and int(rows.max()) < DEFAULT.vocab
    assert len({tuple(row.tolist()) for row in rows}) == 4


@pytest.mark.slow
def test_real_text_is_used_where_there_is_a_tokenizer(smollm2: Path) -> None:
    rows = training_tokens(Settings(folder="", model=str(smollm2), agent_socket=""), 49152)
    assert len(set(rows.flatten().tolist())) > 60


# Services and the command line

def test_a_program_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NotRunningError, match="no program tensorbus-nothing .*scripts/setup"):
        find_program("tensorbus-nothing")


def test_waiting_for_a_socket_ends_with_the_process(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("tensorbusd", ["sh", "-c", "echo cannot bind; exit 1"])
        with pytest.raises(ProcessFailed, match="tensorbusd ended with status 1\ncannot bind"):
            wait_for_socket(processes, tmp_path / "no.sock", "tensorbusd")


def test_waiting_for_a_socket_has_a_deadline(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("tensorbusd", ["sleep", "60"])
        with pytest.raises(ProcessFailed, match="does not listen at .*no.sock after 0 s: No such file"):
            wait_for_socket(processes, tmp_path / "no.sock", "tensorbusd", timeout_s=0.2)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--refreshes", "0"], "--refreshes must be at least 1"), (["--made", "--model", "x"], "not allowed with"),
    (["--check-leaks"], "--check-leaks needs at least"), (["nothing"], "invalid choice")])
def test_bad_usage_ends_with_two(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_a_folder_without_a_model_is_bad_usage(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["--model", str(tmp_path / folder)]) == 2
    assert str(tmp_path / folder) in capsys.readouterr().err


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(8, 2, 2), (9, 3, 3), (5, 5, 1)])
def test_ranks_follow_the_heads(heads: int, kv_heads: int, tp: int) -> None:
    config = DecoderConfig(vocab=192, hidden=64, layers=1, heads=heads, kv_heads=kv_heads, head_dim=8, intermediate=12)
    assert choose_tp(config) == tp
