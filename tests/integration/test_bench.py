"""tensorbusctl bench m2n, on workloads scaled down: what it reports, and how it ends when something is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 90

# docs/interfaces says which fields there are; scripts rely on them.
FIELDS = {"workload", "transport", "memory", "proof", "flip", "host", "bytes", "seconds", "gb_per_s", "copy_seconds",
          "receipt_seconds", "trigger_ms", "first_seconds", "register_seconds", "prefault_seconds", "verified",
          "memcpy_gb_per_s", "ntcopy_gb_per_s", "socket_gb_per_s", "staging_bytes_peak", "rss_bytes_peak", "cpu_seconds",
          "source_blocked_seconds", "peers"}
POSITIVE = ("bytes", "gb_per_s", "copy_seconds", "first_seconds", "memcpy_gb_per_s", "ntcopy_gb_per_s", "socket_gb_per_s",
            "rss_bytes_peak", "cpu_seconds", "source_blocked_seconds")


def program() -> Path:
    folder = os.environ.get("TENSORBUS_BIN")
    candidates = [Path(folder)] if folder else [ROOT / "build" / preset / "bin" for preset in ("dev", "release")]
    for candidate in candidates:
        if (candidate / "tensorbusctl").exists() and (candidate / "tensorbus-agent").exists():
            return candidate / "tensorbusctl"
    pytest.skip("tensorbusctl and tensorbus-agent are not built")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A folder for the runtime folders of benchmarks; none may be left over."""
    yield tmp_path
    assert not list(tmp_path.glob("tensorbus-bench-*")), "a runtime folder was left behind"


def command(*arguments: str) -> list[str]:
    return [str(program()), "bench", "m2n", *arguments]


def environment(scratch: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(scratch)}


def bench(scratch: Path, *arguments: str, status: int = 0) -> tuple[dict, str]:
    """Runs it with --json; answers the object and what it said to people."""
    done = subprocess.run(command(*arguments, "--json"), capture_output=True, text=True, timeout=TIMEOUT_S,
                          env=environment(scratch), stdin=subprocess.DEVNULL)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout), done.stderr


def quick(scratch: Path, *arguments: str) -> dict:
    result, _ = bench(scratch, "--scale", "64", "--iterations", "2", *arguments)
    return result


def check(result: dict, **expected: str) -> None:
    assert FIELDS <= result.keys(), FIELDS - result.keys()
    assert result["verified"] is True
    for field in POSITIVE:
        assert result[field] > 0, field
    seconds = result["seconds"]
    assert 0 < seconds["min"] <= seconds["median"] <= seconds["p95"] <= seconds["max"]
    assert result["copy_seconds"] <= seconds["max"]
    assert 0 < result["trigger_ms"]["p50"] <= result["trigger_ms"]["p95"]
    assert result["host"]["cpu_model"] and result["host"]["cores"] > 0 and result["host"]["ram_bytes"] > 0
    for field, value in expected.items():
        assert result[field] == value


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("flip", ["in_place", "shadow"])
def test_reports_every_field_for_both_flips(scratch: Path, transport: str, flip: str) -> None:
    result = quick(scratch, "--workload", "large", "--transport", transport, "--flip", flip)
    check(result, workload="large", transport=transport, flip=flip, proof="readback", memory="mapped")
    assert result["bytes"] == 8 * 64 * 2048 * 4


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("proof", ["stream", "memory", "off"])
def test_runs_with_every_proof(scratch: Path, transport: str, proof: str) -> None:
    result = quick(scratch, "--workload", "large", "--transport", transport, "--proof", proof)
    check(result, proof=proof)
    assert (result["receipt_seconds"] > 0) == (proof == "stream")


def test_all_workloads_move_the_bytes_of_the_table(scratch: Path) -> None:
    result = quick(scratch, "--workload", "all")
    found = {entry["workload"]: entry for entry in result["results"]}
    assert list(found) == ["large", "small", "qwen3-0.6b", "replicas", "uneven"]
    for entry in found.values():
        check(entry)
    assert found["small"]["bytes"] == 1000 * 2 * 128 * 4
    assert found["replicas"]["bytes"] == 2 * 8 * 64 * 2048 * 4
    assert found["uneven"]["bytes"] == 8 * 65 * 2053 * 4 + 200 * 3 * 67 * 4
    assert found["qwen3-0.6b"]["tensors"] == 310


@pytest.mark.parametrize("memory", ["mapped", "cma", "bucket"])
@pytest.mark.parametrize("transport,proof,flip", [("shm", "readback", "in_place"), ("tcp", "stream", "shadow")])
def test_runs_with_memory_of_every_kind(scratch: Path, memory: str, transport: str, proof: str, flip: str) -> None:
    result = quick(scratch, "--memory", memory, "--transport", transport, "--proof", proof, "--flip", flip)
    check(result, memory=memory, transport=transport, proof=proof, flip=flip)
    assert result["memory_note"].startswith(memory + ":"), "the agent reaches it another way"


# What is injected, further flags, the reasons it may fail with, and who or what must be named. Of an in_place replica's ranks
# the first to be heard may have seen a byte (and is dirty) or not.
FAULTS = [
    ("stray-write", ["--proof", "stream"], ["dirty", "write_during_publish"], ["bench/trainer rank 0 of 2", "large.0"]),
    ("stray-write", ["--proof", "stream", "--flip", "shadow", "--memory", "bucket"], ["write_during_publish"],
     ["bench/trainer rank 0 of 2", "large.0"]),
    ("stray-write", ["--proof", "stream", "--flip", "shadow", "--transport", "tcp"], ["write_during_publish"],
     ["bench/trainer rank 0 of 2", "bench/engine replica 0 rank", "large.0["]),
    ("stray-write", ["--proof", "readback"], ["checksum_mismatch"], ["target 0", "large.0"]),
    ("damage", [], ["checksum_mismatch"], ["target 0", "large.0"]),
    ("damage", ["--memory", "cma"], ["checksum_mismatch"], ["target 0", "large.0"]),
    ("dead-source", [], ["peer_lost"], ["source 0", "signal 9"]),
    ("dead-target", ["--transport", "tcp"], ["peer_lost"], ["target 0", "signal 9"]),
]


@pytest.mark.parametrize("fault,flags,reasons,named", FAULTS, ids=lambda value: value if isinstance(value, str) else None)
def test_an_injected_fault_fails_naming_the_culprit(scratch: Path, fault: str, flags: list[str], reasons: list[str],
                                                    named: list[str]) -> None:
    answer, said = bench(scratch, "--scale", "64", "--iterations", "2", "--fault", fault, *flags, status=1)
    assert answer["fault"] == fault and "results" not in answer
    for word in named:
        assert word in answer["error"]["message"] and word in said, answer
    assert answer["error"]["reason"] in reasons, answer


def test_an_error_names_its_trace_to_the_end(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = scratch / ("runtime-" + "long" * 50)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    answer, said = bench(scratch, "--scale", "64", "--iterations", "2", "--proof", "stream", "--flip", "shadow", "--fault", "stray-write", status=1)
    (path,) = re.findall(r"\(trace: (\S+)\)", answer["error"]["message"])
    assert path in said and Path(path).parent == folder / "tensorbus" / "traces" and "event=session_failed" in Path(path).read_text(encoding="utf-8")


def test_hand_written_peers_move_the_same_bytes(scratch: Path) -> None:
    result = quick(scratch, "--workload", "uneven", "--peers", "hand-shm,hand-cma")
    check(result)
    assert result["peers"]["hand-shm"]["ran"] is True
    for name, peer in result["peers"].items():
        if not peer["ran"]:
            assert peer["why"]
            continue
        assert peer["verified"] is True and peer["bytes"] == result["bytes"] and peer["gb_per_s"] > 0, name


def test_layout_files_and_scenarios(scratch: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source.json", tmp_path / "target.json"
    source.write_text(json.dumps({"format": "tensorbus-layout-1", "ranks": 2, "tensors": [
        {"name": "a", "dtype": "bf16", "shape": [7, 5], "mesh": [["x", 2]], "placements": ["Shard(0)"]},
        {"name": "unwanted", "dtype": "u8", "shape": [3], "mesh": [["x", 2]], "placements": ["Replicate"]}]}))
    target.write_text(json.dumps({"format": "tensorbus-layout-1", "ranks": 3, "tensors": [
        {"name": "a", "dtype": "bf16", "shape": [7, 5], "mesh": [["x", 3]], "placements": ["Shard(1)"]}]}))
    result, _ = bench(scratch, "--source", str(source), "--target", str(target), "--iterations", "1")
    assert result["verified"] is True and result["bytes"] == 70
    result, _ = bench(scratch, "--scenario", "T01", "--iterations", "1")
    assert result["verified"] is True and result["workload"].startswith("T01")


def test_page_with_chart(scratch: Path, tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    quick(scratch, "--workload", "large", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text and "tensorbus" in text and "http" not in text


@pytest.mark.parametrize("arguments,named", [
    (["--workload", "huge"], "large, small, qwen3-0.6b, replicas, uneven"),
    (["--transport", "pigeon"], "shm, tcp"),
    (["--proof", "none"], "readback"),
    (["--flip", "now"], "in_place"),
    (["--memory", "disk"], "mapped"),
    (["--fault", "rain"], "stray-write, damage, dead-source, dead-target"),
    (["--peers", "hand-shm,nope"], "no peer 'nope'; known are hand-shm, hand-cma, gather-broadcast, gloo-p2p, gloo-bucket and all"),
    (["--html", "/nowhere/page.html"], "--html: /nowhere/page.html"),
    (["--log-dir", "/proc/nowhere"], "--log-dir /proc/nowhere"),
    (["--timeout", "nan"], "'nan' is not a number of seconds"),
    (["--iterations", "0"], "--iterations"),
    (["--no-such-flag"], "--no-such-flag"),
    (["--source", "a.json"], "--target"),
    (["--workload", "large", "--scenario", "T01"], "--scenario"),
    (["--scenario", "X99"], "T01"),
    (["--source", "nowhere.json", "--target", "nowhere.json"], "nowhere.json"),
])
def test_bad_usage_names_what_would_do(scratch: Path, arguments: list[str], named: str) -> None:
    # Refused at once: a process that was started would have left its folder or its log.
    began = time.monotonic()
    answer, said = bench(scratch, *arguments, status=2)
    assert named in said and named in answer["error"]["message"]
    assert "event=" not in said and time.monotonic() - began < TIMEOUT_S / 2


def children_of(pid: int) -> dict[int, list[str]]:
    """Processes whose parent is `pid`, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(stat[1]) == pid and stat[0] != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, ValueError):
            continue
    return found


def running(scratch: Path, *arguments: str, until: str, **variables: str) -> tuple[subprocess.Popen, dict[int, list[str]]]:
    """A benchmark that goes on until it is ended, with a process of which the command line holds `until`."""
    process = subprocess.Popen(command("--workload", "large", "--scale", "64", "--iterations", "100000", "--timeout", "20", "--json", *arguments),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environment(scratch), **variables},
                               stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        children = children_of(process.pid)
        if any(until in " ".join(words) for words in children.values()):
            return process, children
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"never started: {process.communicate()[1]}")


def assert_all_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.02)
    raise AssertionError("processes were left running")


@pytest.mark.parametrize("victim,named", [("--role target", "target"), ("--role source", "source"), ("tensorbus-agent", "tensorbus-agent"),
                                          ("tensorbusd --listen", "tensorbusd")])
def test_killed_process_ends_the_run_and_is_named(scratch: Path, victim: str, named: str) -> None:
    # The ceilings start last: everything runs then.
    process, children = running(scratch, until="tensorbus-bench-peer ceiling")
    pid = next(pid for pid, words in children.items() if victim in " ".join(words))
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    message = json.loads(out)["error"]["message"]
    assert named in message and "signal 9" in message, message
    assert_all_ended(list(children))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_everything(scratch: Path, sent: signal.Signals) -> None:
    process, children = running(scratch, until="tensorbus-bench-peer ceiling")
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + sent, err
    assert "signal" in json.loads(out)["error"]["message"]
    assert_all_ended(list(children))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["asked for torch", "setting up"])
def test_interrupt_while_python_peers_start_ends_everything(scratch: Path, tmp_path: Path, sent: signal.Signals, stage: str) -> None:
    # Its folder has a name that a shell would trip over.
    folder = tmp_path / "it's python"
    folder.mkdir()
    python = folder / "python"
    python.write_text("#!/bin/sh\n" + ("[ $1 = -c ] && exit 0\n" if stage == "setting up" else "") + "exec sleep 100\n")
    python.chmod(0o755)
    process, children = running(scratch, "--peers", "gloo-p2p", until="sleep 100", TENSORBUS_PYTHON=str(python))
    began = time.monotonic()
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + sent, err
    assert "signal" in json.loads(out)["error"]["message"]
    assert time.monotonic() - began < 6, "it waited for a peer"
    assert_all_ended(list(children))


def test_logs_that_cannot_be_kept_are_a_failure(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "logs" / "large" / "000-tensorbusd.log").mkdir(parents=True)  # stands for a full disk
    answer, said = bench(scratch, "--workload", "large", "--scale", "64", "--iterations", "1", "--log-dir", str(tmp_path / "logs"), status=1)
    assert "000-tensorbusd.log" in said and "--log-dir" in answer["error"]["message"]
    assert "GB/s" in said, "the figures are shown all the same"


def test_killed_bench_takes_its_processes_along(tmp_path: Path) -> None:
    process, children = running(tmp_path, until="tensorbus-bench-peer ceiling")
    process.kill()
    process.communicate(timeout=60)
    assert_all_ended(list(children))


def test_does_not_start_what_does_not_fit(scratch: Path, tmp_path: Path) -> None:
    layout = tmp_path / "wide.json"
    layout.write_text(json.dumps({"format": "tensorbus-layout-1", "ranks": 500, "tensors": [
        {"name": "a", "dtype": "f32", "shape": [500], "mesh": [["x", 500]], "placements": ["Shard(0)"]}]}))
    answer, _ = bench(scratch, "--source", str(layout), "--target", str(layout), status=1)
    assert "1000 ranks" in answer["error"]["message"]
