"""The bus through Python: a real daemon and agent, two processes a job, every element compared."""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

import tensorbus  # noqa: E402
from tensorbus.local import find_program  # noqa: E402

WORKER = Path(__file__).with_name("bus_worker.py")
SECONDS = 60


class Process:
    """A rank. do() gives it an order and returns the answer; Failed carries a typed failure."""

    def __init__(self, *arguments: object) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen([sys.executable, str(WORKER), *map(str, arguments)], env=environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def do(self, what: str, **options: object) -> object:
        self.process.stdin.write(json.dumps({"do": what, **options}) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        if not ready:
            raise AssertionError(f"no answer to {what} in {SECONDS} s")
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the worker ended at {what}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer)
        return answer["ok"]

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Failed(Exception):
    def __init__(self, answer: dict) -> None:
        super().__init__(f"{answer['error']}: {answer['message']}")
        self.answer = answer


@pytest.fixture
def jobs(bus):
    started = []

    def start(role: str, count: int = 2, replica: int = 0) -> list[Process]:
        ranks = [Process(role, rank, count, replica) for rank in range(count)]
        started.extend(ranks)
        return ranks

    yield start
    for process in started:
        process.end()


def all_of(ranks: list[Process], what: str, **options: object) -> list:
    """The same order for every rank, at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [f.result() for f in [pool.submit(rank.do, what, **options) for rank in ranks]]


def accepts(path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def step(trainer, version, **options):
    all_of(trainer, "write", version=version)
    all_of(trainer, "publish", version=version, **options)


@pytest.mark.parametrize("flip", ["in_place", "shadow"])
@pytest.mark.parametrize("policy", ["wait", "skip", "snapshot"])
def test_versions_arrive_whole(jobs, policy, flip):
    trainer, engine = jobs("producer"), jobs("consumer")
    assert {r["mode"] for r in all_of(trainer, "register")} == {"mapped"}
    all_of(engine, "register", flip=flip, hooks=True)
    for version in (1, 2, 3):
        step(trainer, version, policy=policy)
        for got in all_of(engine, "update", which=version):
            assert got["version"] == version and got["bytes"] > 0
        assert all(all_of(engine, "holds", version=version))
    first = {"in_place": "fence", "shadow": "flip_begin"}[flip]
    for state in all_of(engine, "state"):
        assert state["hooks"] == [first, "live"] * 3 and state["live"] == 3
    all_of(trainer, "released", version=3)


@pytest.mark.parametrize("mode", ["cma", "bucket", None])
def test_private_memory_works_too(jobs, mode):
    trainer, engine = jobs("producer"), jobs("consumer")
    try:
        got = all_of(trainer, "register", private=True, mode=mode) + all_of(engine, "register", private=True, mode=mode)
    except Failed as error:
        if error.answer["reason"] == "unsupported":
            pytest.skip(str(error))
        raise
    assert {r["mode"] for r in got} <= ({mode} if mode else {"cma", "bucket"}) and all(r["why"] for r in got)
    all_of(trainer, "serve")
    step(trainer, 1)
    all_of(engine, "update")
    assert all(all_of(engine, "holds", version=1))


def test_either_job_may_start_first(jobs):
    engine = jobs("consumer")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(rank.do, "register") for rank in engine]
        trainer = jobs("producer")
        all_of(trainer, "register")
        for wait in waiting:
            wait.result()
    step(trainer, 1)
    all_of(engine, "update", which="next")
    assert all(all_of(engine, "holds", version=1))


def test_the_fence_keeps_writers_out_and_times_out_typed(jobs):
    trainer, engine = jobs("producer"), jobs("consumer")
    all_of(trainer, "register")
    all_of(engine, "register")
    step(trainer, 1)
    with pytest.raises(Failed) as caught:
        trainer[0].do("write", version=2, timeout_s=0.3)
    assert "TimeoutError" in caught.value.answer["kinds"]
    all_of(engine, "update")
    assert all(all_of(engine, "holds", version=1))
    all_of(trainer, "write", version=2)


def failure_of(ranks, what, **options):
    """The failures of all ranks that failed; at least one."""
    found = []
    with ThreadPoolExecutor(len(ranks)) as pool:
        for f in [pool.submit(rank.do, what, **options) for rank in ranks]:
            try:
                f.result()
            except Failed as error:
                found.append(error.answer)
    assert found, f"{what} did not fail"
    return found


@pytest.mark.parametrize("options, reason", [
    ({"dtype": "float64"}, "dtype_mismatch"),
    ({"rows": 14}, "layout_mismatch"),
    ({"name": "other"}, "unknown_tensor"),
])
def test_an_engine_that_does_not_fit_is_refused(jobs, options, reason):
    trainer, engine = jobs("producer"), jobs("consumer")
    all_of(trainer, "register")
    step(trainer, 1)

    def attempt():
        all_of(engine, "register", **options)
        all_of(engine, "update")

    with pytest.raises(Failed) as caught:
        attempt()
    assert caught.value.answer["reason"] == reason, caught.value
    assert "ValueError" in caught.value.answer["kinds"]


def test_what_is_left_out_is_said(jobs):
    trainer, engine = jobs("producer"), jobs("consumer")
    all_of(trainer, "register")
    all_of(engine, "register", vector=False, leave_out=["v"])
    step(trainer, 1)
    assert [got["version"] for got in all_of(engine, "update")] == [1, 1]


def test_receipts_do_not_trouble_an_engine_without_proof(jobs):
    trainer, engine = jobs("producer"), jobs("consumer")
    all_of(trainer, "register")
    all_of(engine, "register", proof="off")
    for version in (1, 2):
        step(trainer, version, receipts=True)
        assert [got["version"] for got in all_of(engine, "update", which=version)] == [version] * 2
        assert all(all_of(engine, "holds", version=version))


def test_an_engine_rank_that_does_not_answer_its_fence_is_named(jobs):
    trainer, engine = jobs("producer"), jobs("consumer")
    all_of(trainer, "register")
    all_of(engine[:1], "register", flip="in_place", hooks=True)
    all_of(engine[1:], "register", flip="in_place", hang=20)
    step(trainer, 1)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(rank.do, "update", which=1, timeout_s=4) for rank in engine]
        for each in asked:
            assert "rank 1 of 2 did not answer its fence hook" in str(each.exception(60))


def test_versions_never_go_back(jobs):
    trainer = jobs("producer")
    all_of(trainer, "register")
    step(trainer, 5, policy="snapshot")
    for answer in failure_of(trainer, "publish", version=4):
        assert answer["reason"] == "stale_version"


def test_a_trainer_that_is_run_again_goes_on_from_the_latest_version(jobs):
    for first in (1, 3):
        trainer = jobs("producer")
        # The first rank publishes before the second has come.
        assert trainer[0].do("register")["latest"] == first - 1
        trainer[0].do("write", version=first)
        trainer[0].do("publish", version=first, policy="skip")
        assert trainer[1].do("register")["latest"] == first - 1
        trainer[1].do("write", version=first)
        trainer[1].do("publish", version=first, policy="skip")
        step(trainer, first + 1, policy="skip")
        for rank in trainer:
            rank.end()


def test_a_channel_has_one_publisher(jobs, bus):
    trainer = jobs("producer")
    all_of(trainer, "register")
    with pytest.raises(tensorbus.StateError) as caught, tensorbus.connect("policy", "intruder", role="producer") as other:
        arena = tensorbus.Arena(4096)
        holding = tensorbus.Holding()
        holding.add("m", arena.array((3,)))
        other.attach(arena)
        other.register(holding)
    assert caught.value.reason == "second_publisher"


def test_a_killed_engine_rank_is_named_and_the_trainer_goes_on(jobs):
    trainer, engine = jobs("producer"), jobs("consumer")
    all_of(trainer, "register")
    all_of(engine, "register")
    step(trainer, 1, policy="skip")
    all_of(engine, "update")
    engine[1].process.kill()
    engine[1].process.wait()
    all_of(trainer, "write", version=2)
    all_of(trainer, "publish", version=2, policy="skip")
    with pytest.raises(Failed) as caught:
        engine[0].do("update", which="next", timeout_s=3)
    answer = caught.value.answer
    assert (answer["code"], answer["reason"]) == ("DEADLINE_EXCEEDED", "missing_rank"), answer
    assert "policy/engine replica 0 rank 1 of 2" in answer["message"]
    all_of(trainer, "write", version=3)


@pytest.mark.parametrize("policy", ["wait", "snapshot"])
def test_an_engine_proves_which_version_it_loaded_from_disk(jobs, tmp_path, policy):
    trainer = jobs("producer")
    all_of(trainer, "register")
    step(trainer, 3, policy=policy)
    all_of(trainer, "save", folder=str(tmp_path))
    if policy == "snapshot":  # the trainer's memory has moved on; its snapshot still tells
        all_of(trainer, "write", version=4)
    engine = jobs("consumer")
    all_of(engine, "register")
    all_of(engine, "load", folder=str(tmp_path), count=len(trainer))
    assert all_of(engine, "claim") == [3, 3]
    assert [state["live"] for state in all_of(engine, "state")] == [3, 3]
    assert [(got["version"], got["bytes"]) for got in all_of(engine, "update")] == [(3, 0), (3, 0)]
    assert all(all_of(engine, "holds", version=3))


def test_an_engine_that_loaded_something_else_is_not_believed(jobs):
    trainer, engine = jobs("producer"), jobs("consumer")
    all_of(trainer, "register")
    all_of(engine, "register")
    step(trainer, 3)
    assert [got["version"] for got in all_of(engine, "update")] == [3, 3]
    all_of(engine, "write", version=2, fence=False)
    assert [answer["code"] for answer in failure_of(engine, "claim")] == ["NOT_FOUND"] * 2
    assert [state["live"] for state in all_of(engine, "state")] == [0, 0]
    assert [got["version"] for got in all_of(engine, "update")] == [3, 3]
    assert all(all_of(engine, "holds", version=3))


def test_an_agent_that_goes_fails_everybody_typed(jobs, bus):
    trainer = jobs("producer", 1)
    trainer[0].do("register")
    os.kill(bus.pids["tensorbus-agent"], 9)
    answer = failure_of(trainer, "publish", version=1)[0]
    assert "ConnectionError" in answer["kinds"] and answer["reason"] == "peer_lost"
    trainer[0].do("write", version=2)  # nobody reads this memory any more


def until(condition, what):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in {SECONDS} s: {what}"
        time.sleep(0.01)


def waiting(bus, count):
    """Whether so many engine ranks are waiting for a version, as the daemon sees it."""
    done = subprocess.run([find_program("tensorbusctl"), "status", "--json", "--daemon", bus.daemon], capture_output=True, text=True,
                          check=True, timeout=SECONDS)
    replicas = json.loads(done.stdout)["channels"][0]["replicas"]
    return sum(rank["waiting"] for replica in replicas for rank in replica["ranks"]) == count


def test_workers_that_wait_hear_at_once_that_their_agent_was_killed(jobs, bus):
    trainer, engine = jobs("producer"), jobs("consumer")
    all_of(trainer, "register")
    all_of(engine, "register")
    with ThreadPoolExecutor(len(engine)) as pool:
        updates = [pool.submit(rank.do, "update", which="next", timeout_s=SECONDS) for rank in engine]
        until(lambda: waiting(bus, len(engine)), "both ranks wait")
        killed = time.monotonic()
        os.kill(bus.pids["tensorbus-agent"], signal.SIGKILL)
        for update in updates:
            with pytest.raises(Failed) as caught:
                update.result()
            answer = caught.value.answer
            assert "ConnectionError" in answer["kinds"] and answer["reason"] == "peer_lost", answer
    assert time.monotonic() - killed < 5


def test_a_worker_waits_for_its_agent_to_be_started_again(jobs, bus):
    trainer, engine = jobs("producer", 1), jobs("consumer", 1)
    trainer[0].do("register")
    engine[0].do("register")
    step(trainer, 1)
    os.kill(bus.pids["tensorbus-agent"], signal.SIGKILL)
    with ThreadPoolExecutor(2) as pool:
        back = [pool.submit(rank.do, "reconnect", timeout_s=SECONDS) for rank in (trainer[0], engine[0])]
        until(lambda: not accepts(bus.agent), "nobody listens")
        # Both wait now, or will in a moment; neither may have given up.
        time.sleep(0.3)
        assert not any(rank.done() for rank in back)
        with subprocess.Popen([find_program("tensorbus-agent"), "--daemon", bus.daemon, "--socket", bus.agent]) as agent:
            try:
                for rank in back:
                    rank.result()
                engine[0].do("update")
                assert engine[0].do("holds", version=1)
            finally:
                agent.terminate()
                agent.wait(SECONDS)
    began = time.monotonic()
    (answer,) = failure_of(trainer, "reconnect", timeout_s=0.5)
    assert answer["reason"] == "not_running" and 0.4 < time.monotonic() - began < 20


@pytest.mark.parametrize("waits_for", ["update", "reconnect"])
def test_ctrl_c_ends_a_wait_at_once_and_harms_nobody_else(jobs, bus, waits_for):
    trainer, engine = jobs("producer", 1), [*jobs("consumer", 1), *jobs("consumer", 1, replica=1)]
    trainer[0].do("register")
    all_of(engine, "register")
    if waits_for == "reconnect":
        os.kill(bus.pids["tensorbus-agent"], signal.SIGKILL)
        until(lambda: not accepts(bus.agent), "nobody listens")
    with ThreadPoolExecutor(len(engine)) as pool:
        options = {"which": "next"} if waits_for == "update" else {}
        waits = [pool.submit(rank.do, waits_for, timeout_s=SECONDS, **options) for rank in engine]
        if waits_for == "update":
            until(lambda: waiting(bus, len(engine)), "both replicas wait")
        else:
            time.sleep(0.3)
        sent = time.monotonic()
        engine[0].process.send_signal(signal.SIGINT)
        with pytest.raises(Failed, match="KeyboardInterrupt"):
            waits[0].result()
        assert time.monotonic() - sent < 2
        assert not waits[1].done()
        if waits_for == "reconnect":
            engine[1].process.send_signal(signal.SIGINT)
            with pytest.raises(Failed, match="KeyboardInterrupt"):
                waits[1].result()
            return
        # The one that was interrupted takes back what it had asked for, and goes on.
        engine[0].do("cancel")
        until(lambda: waiting(bus, 1), "nobody waits for what was taken back")
        step(trainer, 1, policy="snapshot")
        assert waits[1].result()["version"] == 1
    assert engine[0].do("update")["version"] == 1
    assert all(all_of(engine, "holds", version=1))
    assert all(alive(pid) for pid in bus.pids.values())


def test_what_is_no_worker_is_refused_with_a_line_in_the_log_and_the_agent_goes_on(jobs, bus):
    trainer, engine = jobs("producer", 1), jobs("consumer", 1)
    trainer[0].do("register")
    engine[0].do("register")
    hello = struct.pack("<IHHQ", 40, 1, 0, 1)
    garbage = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 64, bytes(64), hello + b"\xff" * 40,
               struct.pack("<IHHQ", 4, 4711, 0, 1) + b"\0" * 4, struct.pack("<IHHQ", 0, 4, 0, 1)]
    for words in garbage:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(SECONDS)
            stranger.connect(bus.agent)
            stranger.sendall(words)
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # not all of it was read before the end
                while more := stranger.recv(65536):
                    answer += more
            # A welcome that says why it is none.
            assert struct.unpack_from("<IHHQ", answer)[1] == 64, answer
    lines = [line for line in bus.log("tensorbus-agent").splitlines() if "event=worker_broken_off" in line or "event=worker_refused" in line]
    assert len(lines) == len(garbage) and all(f"pid={os.getpid()}" in line for line in lines), lines
    step(trainer, 1)
    assert engine[0].do("update")["version"] == 1
    assert engine[0].do("holds", version=1) and alive(bus.pids["tensorbus-agent"])


def test_a_daemons_socket_is_not_taken_for_an_agents(bus, monkeypatch):
    daemon = bus.daemon.removeprefix("unix:")
    monkeypatch.setenv("TENSORBUS_AGENT_SOCKET", daemon)
    monkeypatch.setenv("TENSORBUS_RUNTIME_DIR", "/run/elsewhere")
    with pytest.raises((ValueError, ConnectionError)) as caught:
        tensorbus.connect("policy", "job", role="producer")
    for words in (daemon, "an agent's socket", "the agent's protocol", "/run/elsewhere/agent.sock", "TENSORBUS_AGENT_SOCKET"):
        assert words in str(caught.value)


def test_the_examples_in_cpp_run(bus):
    folder = Path(tensorbus.__file__).parent.parent.parent / "examples"
    if not (folder / "example_producer").exists():
        pytest.skip("the C++ examples were not built")
    for last in (3, 6):  # the second time on the same bus
        pair = [subprocess.Popen([str(folder / name)], stdout=subprocess.PIPE, text=True)
                for name in ("example_producer", "example_consumer")]
        try:
            outputs = [process.communicate(timeout=SECONDS)[0] for process in pair]
        finally:
            for process in pair:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        assert [process.returncode for process in pair] == [0, 0], outputs
        assert f"version {last} is live" in outputs[1] and outputs[1].count("verified") == outputs[1].count("live") == 3


MODULE_JOB = """
import sys
import torch, tensorbus.torch as bus
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
if sys.argv[1] == "trainer":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bus.publish(model, channel="net") as publisher:
        publisher.fence(optimizer, timeout_s=60)
        for version in (1, 2, 3):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(version).wait(timeout_s=60)
            print(float(sum(p.double().sum() for p in model.parameters())), flush=True)
        publisher.wait_released(3, timeout_s=60)
else:
    with bus.subscribe(model, channel="net", flip="shadow") as subscriber:
        for version in (1, 2, 3):
            assert subscriber.update("next", timeout_s=60).wait(timeout_s=65).version == version
            print(float(sum(p.double().sum() for p in model.parameters())), flush=True)
"""


def test_a_module_follows_another(bus):
    pytest.importorskip("torch")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    pair = [subprocess.Popen([sys.executable, "-c", MODULE_JOB, role], env=environment, stdout=subprocess.PIPE, text=True)
            for role in ("trainer", "engine")]
    try:
        trained, received = (process.communicate(timeout=200)[0].split() for process in pair)
    finally:
        for process in pair:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert [process.returncode for process in pair] == [0, 0]
    assert trained == received and len(set(trained)) == 3


def test_local_leaves_nothing_behind():
    with tensorbus.local() as running:
        folder, pids = running.folder, running.pids
        assert os.environ["TENSORBUS_AGENT_SOCKET"] == running.agent
    assert not folder.exists()
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(tensorbus.NotRunningError):
        tensorbus.connect("policy", "job", role="producer", agent=running.agent)


FORKING = """
import os, sys, tensorbus
with tensorbus.local() as running:
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    tensorbus.connect("policy", "job", role="producer").close()
    print("still there")
"""


def test_a_forked_child_that_ends_stops_nothing():
    done = subprocess.run([sys.executable, "-c", FORKING], env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                          capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "still there\n"), done.stderr


def test_ranks_that_hold_nothing_take_part(bus):
    whole, arrived = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((2, 3), np.float32)
    trainer = [tensorbus.connect("policy", "trainer", role="producer", rank=rank, rank_count=3) for rank in range(3)]
    engine = [tensorbus.connect("policy", "engine", role="consumer", rank=rank, rank_count=2) for rank in range(2)]
    shards = [whole[rank:rank + 1].copy() for rank in range(2)]
    try:
        for side in (trainer, engine):
            for client in side:
                holding = tensorbus.Holding()
                holding.declare("w", "float32", (2, 3))
                rank = side.index(client)
                if side is trainer and rank < 2:
                    holding.add("w", shards[rank], shape=(2, 3), box=((rank, rank + 1), (0, 3)))
                elif side is engine and rank == 0:
                    holding.add("w", arrived)
                client.register(holding)
                client.start_service()
        for request in [client.publish(1) for client in trainer]:
            request.wait(timeout_s=30)
        for request in [client.update() for client in engine]:
            assert request.wait(timeout_s=30).version == 1
        assert np.array_equal(arrived, whole)
    finally:
        for client in trainer + engine:
            client.close()
