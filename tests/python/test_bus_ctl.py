"""tensorbusctl against a real daemon and agent in a temporary runtime folder."""

import concurrent.futures
import json
import os
import pathlib
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def bin_folder():
    """$TENSORBUS_BIN_DIR, else the environment's own programs, else a build's."""
    folders = [pathlib.Path(sys.executable).parent, *sorted(ROOT.glob("build/*/bin"))]
    if "TENSORBUS_BIN_DIR" in os.environ:
        folders = [pathlib.Path(os.environ["TENSORBUS_BIN_DIR"]).resolve()]
    return next((folder for folder in folders if (folder / "tensorbusctl").exists()), folders[0])


BIN = bin_folder()
CTL = BIN / "tensorbusctl"
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(not CTL.exists(), reason=f"{CTL} is not built")


@pytest.fixture
def runtime(monkeypatch):
    """A private runtime folder; whatever runs there is stopped afterwards."""
    with tempfile.TemporaryDirectory(prefix="tb-ctl-") as folder:
        monkeypatch.setenv("TENSORBUS_RUNTIME_DIR", folder)
        for name in ("TENSORBUS_DAEMON", "TENSORBUS_TOKEN_FILE", "TENSORBUS_LOG_LEVEL"):
            monkeypatch.delenv(name, raising=False)
        yield pathlib.Path(folder)
        subprocess.run([CTL, "down", "--timeout", "20"], capture_output=True, timeout=PATIENCE_S)


def ctl(*arguments, expect=0):
    done = subprocess.run([CTL, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == expect, (arguments, done.stdout, done.stderr)
    return done


def ctl_json(*arguments, expect=0):
    done = ctl(*arguments, "--json", expect=expect)
    assert done.stdout.count("\n") == 1, "exactly one object"
    return json.loads(done.stdout)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_up_is_idempotent_and_down_stops_exactly_that(runtime):
    first = ctl_json("up", "--timeout", "40")
    assert first["daemon"]["state"] == "started" and first["agent"]["state"] == "started"
    pids = [first["daemon"]["pid"], first["agent"]["pid"]]
    assert all(alive(pid) for pid in pids)
    again = ctl_json("up", "--timeout", "40")
    assert [again["daemon"]["pid"], again["agent"]["pid"]] == pids
    assert again["daemon"]["state"] == "running"
    status = ctl_json("status")
    assert [agent["pid"] for agent in status["agents"]] == [pids[1]]
    assert status["channels"] == [] and status["sessions"] == []
    down = ctl_json("down", "--timeout", "20")
    assert down["daemon"] == {"state": "stopped", "pid": pids[0]}
    assert not any(alive(pid) for pid in pids)
    assert not list(runtime.glob("*.sock")) and not list(runtime.glob("*.pid"))
    assert ctl_json("down")["daemon"]["state"] == "not running"


def test_down_leaves_a_process_with_a_reused_number_alone(runtime):
    with subprocess.Popen(["sleep", "60"]) as bystander:
        try:
            runtime.chmod(0o700)
            (runtime / "daemon.pid").write_text(f"{bystander.pid} 1\n")
            ctl("down")
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_up_starts_again_what_was_killed(runtime):
    first = ctl_json("up", "--timeout", "40")
    os.kill(first["agent"]["pid"], signal.SIGKILL)
    until(lambda: not alive(first["agent"]["pid"]))
    second = ctl_json("up", "--timeout", "40")
    assert second["daemon"]["pid"] == first["daemon"]["pid"]
    assert second["agent"]["state"] == "started"


def test_every_command_says_that_no_daemon_runs(runtime):
    for command in (["status"], ["versions"], ["who-is-missing"], ["verify"], ["explain", "w"],
                    ["rollback", "--to", "3"], ["trace", "--out", str(runtime / "trace.json")]):
        error = ctl_json(*command, expect=1)["error"]
        assert (error["code"], error["reason"]) == ("UNAVAILABLE", "not_running"), command
        assert "tensorbusctl up" in error["message"]
        plain = ctl(*command, expect=1)
        assert plain.stdout == "" and "no daemon answers" in plain.stderr


def test_what_is_no_daemon_is_told_without_the_words_of_grpc(runtime):
    ctl("up", "--timeout", "40")
    with socket.socket() as closing, socket.socket() as web, concurrent.futures.ThreadPoolExecutor(2) as threads:
        for server in (closing, web):
            server.bind(("127.0.0.1", 0))
            server.listen(8)
            server.settimeout(PATIENCE_S)

        def answer(server, words):
            connection, _ = server.accept()
            connection.settimeout(PATIENCE_S)
            with connection:
                if words:
                    connection.recv(4096)
                connection.sendall(words)

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        for target, server, words, says in (
                (f"127.0.0.1:{free}", None, b"", "nobody listens there"),
                (f"unix:{runtime}/agent.sock", None, b"", "does not speak the daemon's protocol"),
                (f"127.0.0.1:{web.getsockname()[1]}", web, b"HTTP/1.1 400 Bad request\r\n\r\n", "does not speak the daemon's protocol"),
                (f"127.0.0.1:{closing.getsockname()[1]}", closing, b"", "closed the connection")):
            playing = threads.submit(answer, server, words) if server else None
            error = ctl_json("status", "--daemon", target, expect=1)["error"]
            if playing:
                playing.result(PATIENCE_S)
            assert (error["code"], error["reason"]) == ("UNAVAILABLE", "not_running")
            assert f"no daemon answers at {target}" in error["message"] and says in error["message"], error
            assert f"(it listens at unix:{runtime}/daemon.sock then)" in error["message"]
            for word in ("last error", "UNKNOWN", "ipv4:", "gRPC", "addresses"):
                assert word not in error["message"]
    (refused,) = [line for line in (runtime / "agent.log").read_text().splitlines() if "event=worker_broken_off" in line]
    assert "broke the protocol" in refused


def test_a_silent_daemon_is_named_within_the_timeout(runtime):
    path = runtime / "daemon.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        begin = time.monotonic()
        done = ctl("status", "--timeout", "0.5", expect=1)
        assert time.monotonic() - begin < 10
        assert str(path) in done.stderr


def test_bad_usage_ends_with_2(runtime):
    for arguments in ([], ["status", "--no-such-flag"], ["rollback"], ["rollback", "--to", "0"],
                      ["completion", "fish"], ["status", "--timeout", "-1"], ["status", "--timeout", "nan"],
                      ["up", "--timeout", "nan"], ["doctor", "--timeout", "inf"], ["status", "--watch", "--interval", "nan"],
                      ["status", "--tls-ca", "only-one-file"]):
        ctl(*arguments, expect=2)


def test_bad_usage_names_what_is_bad(runtime):
    for arguments, word in ((["nope"], "nope"), (["bench", "nope"], "nope"), (["status", "--daemon", "127.0.0.1:99999"], "99999"),
                            (["status", "--daemon", "nonsense"], "nonsense"), (["status", "--daemon", "unix:"], "1 to 107 bytes"),
                            (["status", "--daemon", "unix:/" + "x" * 120], "1 to 107 bytes")):
        assert word in ctl(*arguments, expect=2).stderr, arguments


@pytest.mark.parametrize("arguments, says", [
    (["stats"], "tensorbusctl has no command 'stats'; did you mean 'status'? `tensorbusctl --help` lists what there is"),
    (["verfy", "--json"], "has no command 'verfy'; did you mean 'verify'?"),
    (["--timeout", "3", "who-is-mising"], "has no command 'who-is-mising'; did you mean 'who-is-missing'?"),
    (["xyzzy"], "tensorbusctl has no command 'xyzzy'; `tensorbusctl --help` lists what there is"),
    (["bench-workr"], "has no command 'bench-workr'; `tensorbusctl"),
    (["bench", "m2m"], "tensorbusctl bench has no command 'm2m'; did you mean 'm2n'? `tensorbusctl bench --help`"),
    (["status", "--jsn"], "tensorbusctl status has no option '--jsn'; did you mean '--json'? `tensorbusctl status --help` lists what there is"),
    (["bench", "m2n", "--iteration=3"], "tensorbusctl bench m2n has no option '--iteration'; did you mean '--iterations'?"),
    (["rollback", "--too", "3"], "tensorbusctl rollback has no option '--too'; did you mean '--to'?"),
    (["--jsn", "status"], "tensorbusctl has no option '--jsn'; `tensorbusctl --help`"),
    (["status", "extra"], "tensorbusctl status takes no argument 'extra'; `tensorbusctl status --help`"),
])
def test_a_mistyped_word_is_met_with_those_that_look_like_it(runtime, arguments, says):
    said = ctl(*arguments, expect=2)
    assert says in said.stderr and len(said.stderr.splitlines()) == 1
    arguments = [word for word in arguments if word != "--json"]
    error = json.loads(ctl(*arguments, "--json", expect=2).stdout)["error"]
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "malformed") and says in error["message"]


def test_bad_usage_is_json_for_whoever_asked_for_it(runtime):
    for arguments, word in ((["nope"], "nope"), (["status", "--timeout", "nan"], "nan"), (["rollback"], "--to")):
        error = ctl_json(*arguments, expect=2)["error"]
        assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "malformed") and word in error["message"]


def test_version_is_that_of_the_project(runtime):
    (version,) = re.findall(r"project\(tensorbus VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert ctl("--version").stdout == f"tensorbusctl {version}\n"


def test_watching_ends_when_nobody_reads_on(runtime):
    ctl("up", "--timeout", "40")
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([CTL, "status", "--watch", "--interval", "0.05", "--json"], stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (1, "error: standard output cannot be written\n")


def test_output_that_cannot_be_written_is_a_failure(runtime):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([CTL, "completion", "bash"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (1, "error: standard output cannot be written\n")


def _read(path):
    try:
        return path.read_bytes()
    except OSError:  # the process ended
        return b""


def test_up_leaves_nothing_that_down_could_not_stop(runtime):
    (runtime / "daemon.pid").symlink_to("/dev/full")
    assert "daemon.pid: No space left" in ctl("up", "--timeout", "20", expect=1).stderr
    assert (runtime / "daemon.pid").is_symlink()
    running = [path for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if str(runtime).encode() in _read(path)]
    assert running == []


def test_a_daemon_removes_no_file(tmp_path):
    file = tmp_path / "weights"
    file.write_text("precious")
    done = subprocess.run([BIN / "tensorbusd", "--listen", f"unix:{file}"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "is not a socket" in done.stderr
    assert file.read_text() == "precious"


def test_answers_of_an_empty_bus(runtime):
    ctl("up", "--timeout", "40")
    assert ctl_json("versions") == {"versions": []}
    assert ctl_json("who-is-missing") == {"missing": []}
    assert "no channel" in ctl_json("verify", expect=1)["error"]["message"]
    assert "no channel" in ctl_json("explain", "w", expect=1)["error"]["message"]
    trace = runtime / "trace.json"
    assert ctl_json("trace", "--out", str(trace))["file"] == str(trace)
    assert "traceEvents" in json.loads(trace.read_text())
    for path, why in (("/nowhere/t.json", "No such file or directory"), ("/dev/full", "No space left on device"), (str(runtime), "Is a directory")):
        message = ctl_json("trace", "--out", path, expect=1)["error"]["message"]
        assert path in message and why in message
    people = ctl("status")
    assert people.stdout == "" and "AGENT" in people.stderr
    assert "\x1b" not in people.stderr, "colours only on a terminal"
    watched = ctl("status", "--watch", "--updates", "2", "--interval", "0.05", "--json")
    assert len(watched.stdout.splitlines()) == 2


def test_doctor_finds_the_bus_and_this_machine(runtime):
    absent = ctl_json("doctor")
    levels = {check["check"]: check["level"] for check in absent["checks"]}
    assert levels["memfd"] == "fine" and levels["daemon"] == "warning"
    ctl("up", "--timeout", "40")
    present = ctl_json("doctor")
    levels = {check["check"]: check["level"] for check in present["checks"]}
    assert levels["daemon"] == "fine" and levels["agents"] == "fine"
    assert levels["agent_socket"] == "fine"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_every_command(runtime, shell):
    script = ctl("completion", shell).stdout
    for command in ("status", "verify", "plan", "who-is-missing", "doctor", "bench m2n"):
        assert command in script
    assert "bench-worker" not in script


def typed(line, folder):
    """What an interactive bash makes of a line and the tabulator key, twice."""
    script = f"PS1='> '; bind 'set bell-style none'; PATH={BIN}:$PATH; cd {folder}; source <(tensorbusctl completion bash); echo rea''dy\n"
    master, slave = pty.openpty()
    shell = subprocess.Popen(["bash", "--norc", "--noprofile", "-i"], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
                             env={**os.environ, "TERM": "dumb", "COLUMNS": "400", "HISTFILE": ""})
    os.close(slave)
    try:
        seen = ""

        def read_until(done):
            nonlocal seen
            deadline = time.monotonic() + PATIENCE_S
            while not done():
                assert time.monotonic() < deadline, seen
                if select.select([master], [], [], 0.1)[0]:
                    seen += os.read(master, 65536).decode()

        os.write(master, script.encode())
        read_until(lambda: "\nready" in seen)
        seen = ""
        # The comment ends the line, so that the shell echoes what it made of it and runs nothing of it.
        os.write(master, f"{line}\t\t".encode())
        time.sleep(0.5)
        os.write(master, b" #e''nd\n")
        read_until(lambda: "#e''nd" in seen)
        return seen
    finally:
        shell.kill()
        shell.wait()
        os.close(master)


def test_completion_in_a_real_shell(runtime, tmp_path):
    (tmp_path / "my layout.json").touch()
    for line, words in (("tensorbusctl stat", ["status"]), ("tensorbusctl bench m", ["bench m2n"]),
                        ("tensorbusctl bench m2n --mem", ["--memory"]), ("tensorbusctl bench m2n --memory ", ["mapped", "cma", "bucket"]),
                        ("tensorbusctl bench m2n --memory=b", ["bucket"]), ("tensorbusctl up --log-level w", ["warn"]),
                        ("tensorbusctl completion ", ["bash", "zsh"]), ("tensorbusctl plan --source my", ["my\\ layout.json"])):
        said = typed(line, tmp_path)
        assert all(word in said for word in words), (line, said)


@pytest.mark.parametrize("program", ["tensorbusd", "tensorbus-agent"])
def test_flags_beat_environment_beats_config(runtime, monkeypatch, program):
    config = runtime / "config.toml"
    config.write_text('log-level="error"\nmetrics-listen="127.0.0.1:1"\n')
    command = [BIN / program, "--print-config", "--config", str(config)]

    def level(*arguments):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)["log-level"]

    assert level() == '"error"'
    monkeypatch.setenv("TENSORBUS_LOG_LEVEL", "warn")
    assert level() == '"warn"'
    assert level("--log-level", "debug") == '"debug"'


def test_daemon_refuses_what_is_not_safe(runtime):
    daemon = BIN / "tensorbusd"

    def refused(*arguments):
        done = subprocess.run([daemon, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode != 0
        return done.stderr

    assert "--token-file" in refused("--listen", "127.0.0.1:0")
    open_folder = runtime / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    assert "others may write" in refused("--listen", f"unix:{open_folder}/d.sock")


@pytest.fixture
def join(runtime):
    """Ranks of a running bus, in this process; those that are there at the end leave."""
    tensorbus = pytest.importorskip("tensorbus")
    if not hasattr(tensorbus, "connect"):
        pytest.skip("the Python package is not built")
    ctl("up", "--timeout", "40")
    clients = []

    def enter(job, role, rank, count, rows, channel="policy", dtype="float32"):
        client = tensorbus.connect(channel, job, role=role, rank=rank, rank_count=count,
                                   agent=runtime / "agent.sock", timeout_s=30)
        clients.append(client)
        arena = tensorbus.Arena(1 << 16)
        weights = arena.array((rows[1] - rows[0], 4), dtype)
        holding = tensorbus.Holding()
        holding.add("w", weights, shape=(8, 4), box=[rows, (0, 4)])
        client.attach(arena)
        client.register(holding, **({"flip": "shadow"} if role == "consumer" else {}))
        return client, weights

    yield enter
    for client in clients:
        client.close()


@pytest.fixture
def bus(join):
    """A running bus with a trainer of one rank and an engine of two; everything in this process."""
    numpy = pytest.importorskip("numpy")
    trainer = join("trainer", "producer", 0, 1, (0, 8))
    engine = [join("engine", "consumer", rank, 2, rows) for rank, rows in enumerate([(0, 3), (3, 8)])]

    def step(version, **options):
        trainer[0].before_write(timeout_s=30)
        trainer[1][...] = numpy.arange(32, dtype="float32").reshape(8, 4) * version
        trainer[0].publish(version, **options).wait(timeout_s=30)

    def sync(which="latest"):
        # A rank answers the agent while it waits, so all must wait at the same time.
        with concurrent.futures.ThreadPoolExecutor(len(engine)) as threads:
            waits = [threads.submit(client.update(which, timeout_s=30).wait, timeout_s=30) for client, _ in engine]
            for wait in waits:
                wait.result()
        return [float(weights[0, 1]) for _, weights in engine]

    return step, sync, engine


def test_a_bus_at_work(bus, runtime):
    step, sync, engine = bus
    step(3)
    assert sync() == [3.0, 39.0]
    status = ctl_json("status")
    (channel,) = status["channels"]
    assert channel["latest_version"] == 3 and channel["replicas"][0]["live_version"] == 3
    assert channel["replicas"][0]["state"] == "idle" and channel["replicas"][0]["flip"] == "shadow"
    assert status["sessions"][-1]["state"] == "done" and status["sessions"][-1]["bytes"] == 128
    (version,) = ctl_json("versions")["versions"]
    assert version["state"] == "readable" and version["live_at"] == ["engine replica 0"]
    explained = ctl_json("explain", "w")
    assert explained["shape"] == [8, 4] and sum(route["bytes"] for route in explained["routes"]) == 128
    assert "nearest names" not in ctl("explain", "zzzzzz", expect=1).stderr
    verified = ctl_json("verify")
    assert verified["equal"] and verified["holders"] == 3 and list(verified["digests"]) == ["w"]
    trace = runtime / "trace.json"
    ctl("trace", "--out", str(trace))
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"move", "flip", "copy"} <= names


def test_verify_names_rank_tensor_and_box(bus):
    step, sync, engine = bus
    step(1)
    sync()
    engine[1][1][2, 2] += 1
    verified = ctl_json("verify", expect=1)
    assert not verified["equal"]
    (fault,) = verified["faults"]
    assert fault["tensor"] == "w" and fault["box"] == [[3, 8], [0, 4]]
    assert fault["holder"] == "policy/engine replica 0 rank 1 of 2"


def test_who_is_missing_names_the_rank_that_has_not_asked(bus):
    step, sync, engine = bus
    step(1)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        first = thread.submit(engine[0][0].update("latest", timeout_s=30).wait, timeout_s=30)
        until(lambda: ctl_json("who-is-missing")["missing"])
        (missing,) = ctl_json("who-is-missing")["missing"]
        assert missing["who"].startswith("policy/engine replica 0 rank 1 of 2")
        engine[1][0].update("latest", timeout_s=30).wait(timeout_s=30)
        first.result()


def test_rollback_brings_a_kept_version_back(bus):
    step, sync, engine = bus
    for version in (1, 2):
        step(version, policy="snapshot", keep_last=2)
    assert sync() == [2.0, 26.0]
    assert ctl_json("rollback", "--to", "1") == {"version": 1, "replicas": 1}
    assert sync() == [1.0, 13.0]
    assert "kept: 1, 2" in ctl_json("rollback", "--to", "7", expect=1)["error"]["message"]


def test_what_is_said_when_everybody_has_left(join):
    trainer, _ = join("trainer", "producer", 0, 1, (0, 8))
    engine, _ = join("engine", "consumer", 0, 1, (0, 8))
    trainer.publish(1).wait(timeout_s=30)
    engine.update("latest", timeout_s=30).wait(timeout_s=30)
    trainer.close()
    engine.close()
    until(lambda: not ctl_json("status")["channels"][0]["producer_ranks"] and not ctl_json("status")["channels"][0]["replicas"])
    assert re.search(r"trainer +producer +0/1 +left", ctl("status").stderr)
    left = r"policy/trainer rank 0 of 1 left \d+\.\d s ago \("
    for command in (["verify"], ["explain", "w"], ["explain", "misspelt"]):
        message = ctl_json(*command, expect=1)["error"]["message"]
        assert re.search(left, message) and "yet" not in message, message
    time.sleep(0.2)
    (missing,) = ctl_json("who-is-missing")["missing"]
    assert re.match(left, missing["who"]) and missing["waiting_seconds"] >= 0.2 and "start it again" in missing["remedy"]


def test_a_mistyped_channel_goes_with_its_engine(join):
    trainer, _ = join("trainer", "producer", 0, 1, (0, 8))
    trainer.publish(1).wait(timeout_s=30)
    stray, _ = join("engine", "consumer", 0, 1, (0, 8), channel="polcy")
    assert "--channel: polcy, policy" in ctl_json("verify", expect=2)["error"]["message"]
    stray.close()
    until(lambda: [channel["channel"] for channel in ctl_json("status")["channels"]] == ["policy"])
    assert ctl_json("verify")["channel"] == "policy" and ctl_json("explain", "w")["channel"] == "policy"


def test_a_layout_that_nothing_could_be_compared_with_yet(join):
    engine, _ = join("engine", "consumer", 0, 1, (0, 8), dtype="int32")

    def replica():
        return ctl_json("status")["channels"][0]["replicas"][0]

    assert (replica()["state"], replica()["layout"]) == ("idle", "not_compared") and "error" not in replica()
    assert re.search(r"idle +not compared", ctl("status").stderr)
    explained = ctl_json("explain", "w")
    assert explained["routes"] == [] and explained["why_no_routes"] == "no producer has registered yet"
    assert "no routes: no producer has registered yet" in ctl("explain", "w").stderr
    with pytest.raises(TimeoutError, match="layout is compared with the producer's once it is there"):
        engine.update("latest", timeout_s=1).wait(timeout_s=30)
    join("trainer", "producer", 0, 1, (0, 8))
    until(lambda: replica()["layout"] == "does_not_fit")
    assert replica()["error"]["reason"] == "dtype_mismatch" and "policy/engine replica 0" in replica()["error"]["message"]
    explained = ctl_json("explain", "w")
    assert [holder["job"] for holder in explained["holders"]] == ["trainer", "engine"] and explained["routes"] == []
    assert "to engine replica 0: tensor 'w'" in explained["why_no_routes"]
    assert re.search(r"idle +does not fit(.|\n)*engine replica 0: .*i32", ctl("status").stderr)
