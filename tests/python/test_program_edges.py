"""Programs at their edges: settings that are none, output that cannot be written, text that a terminal would act on, two agents of one name."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from test_bus_ctl import BIN, CTL, alive, ctl, ctl_json, runtime, until  # noqa: F401
from test_plan_limits import layout, tensor

SERVICES = ("tensorbusd", "tensorbus-agent")
CSI = "\x9b"  # what ESC [ is in one character

pytestmark = pytest.mark.skipif(not CTL.exists(), reason=f"{CTL} is not built")


def run(*words, **options):
    return subprocess.run([str(word) for word in words], capture_output="stdout" not in options, text=True, timeout=60, stdin=subprocess.DEVNULL,
                          **options)


def service(name, *flags):
    return run(BIN / name, *flags)


# ---- --config and --print-config -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("line", ["log-levle=debug", "print-config=true", "config=other", "help=true", "[section]\nlog-level=debug", "no setting at all"])
def test_a_setting_that_is_no_flag_is_refused(tmp_path, name, line):
    config = tmp_path / "settings.toml"
    config.write_text(f"log-level=debug\n{line}\n")
    done = service(name, "--config", config, "--print-config")
    assert done.returncode == 2 and done.stdout == ""
    assert str(config) in done.stderr and line.split("=")[0].strip("[]").split("\n")[0].split(" ")[0].rstrip("]") in done.stderr, done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_settings_are_a_regular_file_of_bounded_size(tmp_path, name):
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.write_bytes(b"#" * ((1 << 20) + 1))
    for path, says in (("/dev/zero", "not a regular file"), (pipe, "not a regular file"), (tmp_path, "not a regular file"),
                       (large, "at most 1048576 bytes"), (tmp_path / "missing", "No such file")):
        done = service(name, "--config", path, "--print-config")
        assert done.returncode == 2 and says in done.stderr and str(path) in done.stderr, done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_settings_that_would_be_read_as_others_are_refused(tmp_path, name):
    config = tmp_path / "settings.toml"
    for line, says in (('name="a#1"', "line 2 has a # between quotes"), ('name="a', "line 2 has a quote that is not closed"),
                       ("name='a # b'", "line 2 has a # between quotes")):
        config.write_text(f"# it's a comment\n{line}\n")
        assert says in refused(name, "--config", config, "--print-config")
    config.write_text("; a 'comment\nlog-level='warn'  # it's one too\n")
    assert 'log-level="warn"' in service(name, "--config", config, "--print-config").stdout
    assert "cannot be read" in refused(name, "--config", "/proc/self/mem", "--print-config")


@pytest.mark.parametrize("name", SERVICES)
def test_a_flag_without_its_value_takes_no_other_word(name):
    assert "--log-level= has nothing after" in refused(name, "--log-level=", "--print-config")
    done = run(CTL, "versions", "--channel=", "--json")
    assert done.returncode == 2 and "--channel= has nothing after" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize("name", SERVICES)
def test_print_config_is_checked_and_can_be_read_again(tmp_path, name):
    first = service(name, "--print-config", "--log-level", "warn")
    assert first.returncode == 0 and "print-config" not in first.stdout and 'log-level="warn"' in first.stdout
    config = tmp_path / "again.toml"
    config.write_text(first.stdout)
    again = service(name, "--config", config, "--print-config")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert "loud" in refused(name, "--print-config", "--log-level", "loud")
    target = "--listen" if name == "tensorbusd" else "--daemon"
    assert "nonsense" in refused(name, "--print-config", target, "nonsense")
    config.write_text('log-level="loud"\n')
    assert "loud" in refused(name, "--print-config", "--config", config)


@pytest.mark.parametrize("name", SERVICES)
def test_print_config_shows_what_a_terminal_would_obey(name, monkeypatch):
    flag = "--listen" if name == "tensorbusd" else "--daemon"
    done = service(name, "--print-config", flag, "unix:/a\x1b[2J" + CSI + "1m\nb", "--token-file", "größer\u202e")
    assert done.returncode == 0, done.stderr
    assert_printable(done.stdout)
    assert r"unix:/a\x1b[2J\u{009b}1m\nb" in done.stdout and r"größer\u{202e}" in done.stdout, done.stdout
    monkeypatch.setenv("TENSORBUS_RUNTIME_DIR", "/a\x1b[2J")  # where defaults come from
    assert_printable(service(name, "--print-config").stdout)


def test_words_that_are_refused_are_shown_not_obeyed():
    for words in (["tensorbusd", HOSTILE], ["tensorbus-agent", "--copy-threads", HOSTILE], ["tensorbusctl", "status", HOSTILE], ["tensorbusctl", HOSTILE]):
        done = run(BIN / words[0], *words[1:])
        assert done.returncode == 2 and r"\x1b]0;owned" in done.stderr, done.stderr
        assert_printable(done.stderr)


def refused(name, *flags):
    done = service(name, *flags)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    return done.stderr


def test_an_agent_checks_its_times():
    for value in ("nan", "0", "1e9", "soon"):
        assert value in refused("tensorbus-agent", "--print-config", "--bucket-timeout-s", value)


# ---- output that cannot be written ---------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["tensorbusctl", "--help"], ["tensorbusctl", "--version"], ["tensorbusctl", "plan", "--help"],
                                   *([name, flag] for name in SERVICES for flag in ("--help", "--print-config"))])
def test_help_that_cannot_be_written_is_a_failure(words):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = run(BIN / words[0], *words[1:], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "error: standard output cannot be written\n")


def full_disk(file_bytes=64):
    """Files hold so many bytes, as on a disk that is full then."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


@pytest.fixture
def pair(tmp_path):
    folder = tmp_path / "layouts"
    folder.mkdir()
    return ["--source", layout(folder, "s.json", 2, [tensor("w", [64, 8], 2, "Shard(0)")]),
            "--target", layout(folder, "t.json", 2, [tensor("w", [64, 8], 2, "Shard(1)")])]


@pytest.mark.parametrize(("command", "flag"), [("plan", "--ops"), ("plan", "--html"), ("simulate", "--html")])
def test_a_file_that_does_not_fit_leaves_what_was_there(tmp_path, pair, command, flag):
    folder = tmp_path / "out"
    folder.mkdir()
    words = [CTL, command, *pair, *(["--cluster", "tcp-pair"] if command == "simulate" else [])]
    done = run(*words, flag, folder / "file", preexec_fn=full_disk)
    assert done.returncode != 0 and str(folder / "file") in done.stderr and "too large" in done.stderr
    assert list(folder.iterdir()) == []
    (folder / "file").write_text("precious")
    assert run(*words, flag, folder / "file", preexec_fn=full_disk).returncode != 0
    assert (folder / "file").read_text() == "precious" and len(list(folder.iterdir())) == 1
    # With room it is replaced, through a link too, and keeps its mode.
    (folder / "file").chmod(0o640)
    (folder / "link").symlink_to("file")
    assert run(*words, flag, folder / "link").returncode == 0
    assert (folder / "link").is_symlink() and (folder / "file").stat().st_mode & 0o777 == 0o640
    assert (folder / "file").read_text() != "precious" and len(list(folder.iterdir())) == 2
    (folder / "early").symlink_to(folder / "later")
    assert run(*words, flag, folder / "early").returncode == 0
    assert (folder / "early").is_symlink() and (folder / "later").is_file() and len(list(folder.iterdir())) == 4


def test_a_trace_that_does_not_fit_leaves_no_file(runtime, tmp_path):  # noqa: F811
    ctl("up", "--timeout", "40")
    folder = tmp_path / "out"
    folder.mkdir()
    done = run(CTL, "trace", "--out", folder / "trace.json", preexec_fn=lambda: full_disk(4))
    assert done.returncode == 1 and "trace.json" in done.stderr
    assert list(folder.iterdir()) == []


def test_ops_go_to_standard_output_as_well(pair):
    done = run(CTL, "plan", *pair, "--ops", "/dev/stdout")
    assert done.returncode == 0
    assert [json.loads(line)["tensor"] for line in done.stdout.splitlines()] == ["w"] * 4
    assert Path("/dev/stdout").is_symlink()


# ---- text that a terminal would act on -----------------------------------------------------------------------

HOSTILE = "\x1b]0;owned\x07" + CSI + "2J\u202e\u2028"


def assert_printable(text):
    for character in "\x1b\x07" + CSI + "\u202e\u2028":
        assert character not in text, repr(text)


def test_tensors_of_layout_files_are_shown_not_obeyed(tmp_path):
    here = layout(tmp_path, "s.json", 2, [tensor(HOSTILE, [8, 4], 2, "Shard(0)")])
    there = layout(tmp_path, "t.json", 2, [tensor(HOSTILE, [8, 4], 2, "Shard(1)")])
    other = layout(tmp_path, "o.json", 2, [tensor(HOSTILE + "x", [8, 4], 2, "Shard(1)")])
    done = run(CTL, "plan", "--source", here, "--target", there, "--explain", HOSTILE)
    assert done.returncode == 0 and r"\x1b]0;owned\x07\u{009b}2J\u{202e}\u{2028}" in done.stderr
    assert_printable(done.stderr)
    for command in (["plan"], ["simulate", "--cluster", "tcp-pair"]):
        done = run(CTL, *command, "--source", here, "--target", other)
        assert done.returncode == 1 and r"\u{009b}2J" in done.stderr
        assert_printable(done.stderr)


def test_a_cluster_of_a_strange_name_is_shown(tmp_path, pair):
    cluster = json.loads((Path(__file__).parents[2] / "share/clusters/tcp-pair.json").read_text())
    cluster["name"] = HOSTILE
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    done = run(CTL, "simulate", *pair, "--cluster", tmp_path / "cluster.json")
    assert done.returncode == 0 and r"\x1b]0;owned" in done.stderr
    assert_printable(done.stderr)


def test_words_that_are_not_utf8_are_an_answer_in_json_too(tmp_path):
    for words, status in ((["status", b"\xff"], 2), (["status", "--daemon", b"unix:/nowhere/\xff"], 1), (["explain", b"\xff"], 1),
                          (["down", "--runtime-dir", os.fsencode(tmp_path) + b"/\xff/x"], 0), (["up", "--runtime-dir", os.fsencode(tmp_path) + b"/\xff/x"], 1)):
        done = subprocess.run([CTL, *words, "--json"], capture_output=True, timeout=60, env={**os.environ, "TENSORBUS_RUNTIME_DIR": str(tmp_path)})
        assert done.returncode == status, (words, done.stderr)
        json.loads(done.stdout.decode())


def test_an_agent_takes_no_such_name():
    for flag in ("--name", "--host"):
        for name in ("a\x1b[31m", "a" + CSI + "2J", "a\u0085b", "a\u202eb", "a\u2028b", "a\nb", b"a\xff", "x" * 257):
            word = name if isinstance(name, bytes) else name.encode()
            done = subprocess.run([BIN / "tensorbus-agent", flag, word, "--print-config"], capture_output=True, timeout=60)
            assert done.returncode == 2 and flag.encode() in done.stderr, (flag, name, done.stderr)
            assert_printable(done.stderr.decode())
    assert service("tensorbus-agent", "--name", "größer/1", "--host", "ホスト", "--print-config").returncode == 0


# ---- processes -----------------------------------------------------------------------------------------------


def children_of(pid):
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("name", ["daemon", "agent"])
def test_up_that_is_ended_leaves_nothing_that_down_could_not_stop(runtime, name, sent):  # noqa: F811
    os.mkfifo(runtime / f"{name}.pid")  # holds `up` up where it writes the number of what it has started
    started = set()
    with subprocess.Popen([CTL, "up", "--timeout", "40"], stderr=subprocess.DEVNULL) as up:
        try:
            expected = 1 if name == "daemon" else 2
            until(lambda: len(children_of(up.pid)) == expected)
            started = children_of(up.pid)
            up.send_signal(sent)
            assert up.wait(timeout=60) == -sent
            known = {int(path.read_text().split()[0]) for path in runtime.glob("*.pid") if path.is_file()}
            assert len(started - known) == 1
            until(lambda: not any(alive(pid) for pid in started - known))
        finally:
            up.kill()
            (runtime / f"{name}.pid").unlink()
            for pid in started:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


def test_the_second_agent_of_a_name_is_refused_until_the_first_has_ended(runtime):  # noqa: F811
    first = ctl_json("up", "--timeout", "40", "--agent-arg=--name=twin")["agent"]["pid"]
    log = runtime / "second.log"
    with log.open("w") as out, subprocess.Popen(
            [BIN / "tensorbus-agent", "--name", "twin", "--daemon", f"unix:{runtime}/daemon.sock", "--socket", f"{runtime}/second.sock",
             "--data-listen", "off"], stderr=out) as second:
        try:
            until(lambda: "event=daemon_refused" in log.read_text())
            for word in ("ALREADY_EXISTS", "'twin'", f"process {first}", "--name"):
                assert word in log.read_text()
            assert [agent["pid"] for agent in ctl_json("status")["agents"]] == [first]
            assert "event=agent_lost" not in (runtime / "daemon.log").read_text()
            os.kill(first, signal.SIGKILL)
            until(lambda: [agent["pid"] for agent in ctl_json("status")["agents"]] == [second.pid])
            assert log.read_text().count("event=daemon_refused") == 1
            assert (runtime / "daemon.log").read_text().count("event=agent_refused") <= 2, "it does not try again and again"
        finally:
            second.terminate()
            second.wait(timeout=60)


def test_an_agent_that_was_killed_is_back_at_once(runtime):  # noqa: F811
    ctl("up", "--timeout", "40", "--agent-arg=--name=phoenix")
    for _ in range(3):
        pid = ctl_json("status")["agents"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid))
        begin = time.monotonic()
        ctl("up", "--timeout", "40", "--agent-arg=--name=phoenix")
        assert time.monotonic() - begin < 10
    assert "event=agent_refused" not in (runtime / "daemon.log").read_text()


# ---- signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVICES)
def test_a_signal_finds_no_thread_that_would_end_the_process(tmp_path, name):
    socket = tmp_path / "service.sock"
    flags = ["--listen", f"unix:{socket}"] if name == "tensorbusd" else ["--socket", socket, "--daemon", f"unix:{tmp_path}/none.sock"]
    with subprocess.Popen([BIN / name, *map(str, flags)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(socket.exists)
            others = [task for task in Path(f"/proc/{process.pid}/task").iterdir() if task.name != str(process.pid)]  # that one waits for signals
            assert others
            for task in others:
                try:
                    status = (task / "status").read_text()
                except FileNotFoundError:  # the thread has ended meanwhile
                    continue
                fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
                masked = int(fields["SigBlk"], 16) | int(fields["SigIgn"], 16)
                open_to = [number.name for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if not masked >> (number - 1) & 1]
                assert open_to == [], f"thread {fields['Name']}"
            process.send_signal(signal.SIGHUP)  # a terminal that closes ends no service
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0 and not socket.exists()
        finally:
            process.kill()
