"""What README.md and docs/*.md tell people to type is run: commands in a scratch folder, Python examples as jobs on a real bus."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from doc_blocks import Block, all_blocks, blocks_of
from test_bus_ctl import BIN

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("doc_job.py")
BLOCKS = all_blocks(ROOT)
# Generous: a block of the quick start runs whole jobs, each of which imports PyTorch half a dozen times.
PATIENCE_S = 800.0

# What a fence may be. Only the first two are run as commands and examples; JSON is fed to the program that reads it.
LANGUAGES = {"bash", "python", "json", "cpp", "cmake", "text"}
# A line like these in a block of plain text is a command that nobody runs.
COMMAND = re.compile(r"^(\$ |tensorbus(ctl|d|-agent)\b|scripts/|(\.venv/bin/)?python3? -|pip |cmake |git |sudo )", re.MULTILINE)

# What a block may rely on: page and heading -> the surroundings it is run in. Everything else gets a scratch folder alone.
NEEDS_BUS = {("README.md", "Look inside"), ("docs/operations.md", "Commands")}
NEEDS_HOSTS = {("docs/operations.md", "Several hosts")}
# Jobs that run at the same time on one bus: (page, heading or surroundings without an example), surroundings, ranks.
JOBS = [
    [("README.md", "Plug in a trainer", "trainer", 1), ("README.md", "Plug in a rollout job", "engine", 2)],
    [("docs/trainer.md", "PyTorch, in ten lines", "sharded_trainer", 2), ("docs/rollout.md", "PyTorch, in ten lines", "engine", 2)],
    [("docs/trainer.md", "Anything else", "arrays", 4), ("", "", "array_engine", 1)],
    [("", "", "fused_trainer", 1), ("docs/rollout.md", "Fused, stacked and padded buffers", "fused_engine", 4)],
]

# Long or endless commands are cut short, and the scripts that set a machine up stand aside: what is left to check is theirs.
PRELUDE = """
set -Eeuo pipefail
trap 'echo "failed at line $LINENO: $BASH_COMMAND" >&2' ERR
tensorbusctl() {
  case " $* " in
    " bench m2n"*" --source "* | " bench m2n"*" --scenario "*) set -- "$@" --iterations 1 ;;
    " bench m2n "*) set -- "$@" --iterations 1 --scale 64 ;;
    *" --watch "*) set -- "$@" --updates 2 --interval 0.1 ;;
  esac
  command tensorbusctl "$@"
}
"""

# Stands in for scripts/quickstart: without the set-up, and short unless the length is the point.
QUICKSTART = """
case " $* " in *" --refreshes "*) ;; *) set -- "$@" --refreshes 1 ;; esac
exec "$PYTHON" -m tensorbus.quickstart "$@" --report report.html --sequence 16
"""

# One network and one process table for all "hosts", with the addresses of the page; servers go to the background.
HOSTS = """
ip link set lo up
ip addr add 10.0.0.1/32 dev lo
ip addr add 10.0.0.2/32 dev lo
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir -m 0700 /run/tensorbus
tensorbusd() {
  command tensorbusd "$@" &
  for _ in $(seq 400); do [ ! -S /run/tensorbus/daemon.sock ] || return 0; sleep 0.05; done
  return 1
}
tensorbus-agent() { command tensorbus-agent "$@" & }
"""
IN_NAMESPACE = ["unshare", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]

LAYOUT = {"format": "tensorbus-layout-1", "ranks": 2, "tensors": [
    {"name": "a", "dtype": "bf16", "shape": [64, 6], "mesh": [["x", 2]], "placements": ["Shard(0)"]}]}


def is_runnable(block: Block) -> bool:
    return block.language == "bash"


def marked(blocks: list[Block]) -> list[object]:
    """Parameters of a test per block; those with a marker are skipped with its reason, so that every report names them."""
    return [pytest.param(block, id=block.place, marks=[pytest.mark.skip(reason=block.not_run)] if block.not_run else [])
            for block in blocks]


def of(page: str, heading: str) -> str:
    """The text of the Python example under a heading."""
    found = [block for block in BLOCKS if (block.page, block.heading, block.language) == (page, heading, "python")]
    assert len(found) == 1, f"{page} has {len(found)} examples under '{heading}'"
    return found[0].text


def end_group(process: subprocess.Popen) -> None:
    """Ends a process started in a session of its own, with everything it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that looks like a checkout to the commands of the docs, with a runtime folder of its own."""
    if not (BIN / "tensorbusctl").exists():
        pytest.skip(f"{BIN / 'tensorbusctl'} is not built")
    # Short, since a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="tb-docs-") as name:
        folder = Path(name)
        (folder / "share").symlink_to(ROOT / "share")
        for path, text in {"scripts/quickstart": QUICKSTART, ".venv/bin/python": 'exec "$PYTHON" "$@"', ".venv/bin/activate": ""}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(f"#!/bin/sh\n{text}\n")
            (folder / path).chmod(0o755)
        for layout in ("trainer.json", "engine.json", "A.json", "B.json"):
            (folder / layout).write_text(json.dumps(LAYOUT))
        for variable in [v for v in os.environ if v.startswith("TENSORBUS_") and v != "TENSORBUS_CACHE"]:
            monkeypatch.delenv(variable)
        monkeypatch.setenv("TENSORBUS_RUNTIME_DIR", str(folder / "run"))
        monkeypatch.setenv("TENSORBUS_BIN", str(BIN))
        monkeypatch.setenv("PYTHON", sys.executable)
        monkeypatch.setenv("PATH", f"{BIN}:{Path(sys.executable).parent}:{os.environ['PATH']}")
        monkeypatch.chdir(folder)
        yield folder
        subprocess.run(["tensorbusctl", "down", "--timeout", "20"], capture_output=True, timeout=60)


@contextlib.contextmanager
def bus_at_work(runtime: Path) -> Iterator[None]:
    """A running bus with a trainer and an engine that has version 1."""
    numpy = pytest.importorskip("numpy")
    import tensorbus

    subprocess.run(["tensorbusctl", "up", "--timeout", "40"], check=True, capture_output=True, timeout=60)
    with contextlib.ExitStack() as clients:
        for role, job in (("producer", "trainer"), ("consumer", "engine")):
            client = clients.enter_context(tensorbus.connect("policy", job, role=role, agent=runtime / "agent.sock", timeout_s=30))
            arena = tensorbus.Arena(1 << 16)
            client.attach(arena)
            holding = tensorbus.Holding()
            weights = arena.array((8, 4), "float32")
            holding.add("model.norm.weight", weights)
            client.register(holding)
            if role == "producer":
                client.before_write(timeout_s=30)
                weights[...] = numpy.arange(32).reshape(8, 4)
                client.publish(1, policy="snapshot", keep_last=1).wait(timeout_s=30)
            else:
                client.update("latest", timeout_s=30).wait(timeout_s=30)
                assert float(weights[7, 3]) == 31
        yield


def run_commands(block: Block, folder: Path) -> None:
    """Runs a block as one script and shows what it said, when a command in it fails or its time is up."""
    here = (block.page, block.heading)
    wrapper = ["bash", "-c"]
    prelude = PRELUDE
    if here in NEEDS_HOSTS:
        probe = subprocess.run([*IN_NAMESPACE, "ip", "link"], capture_output=True, text=True, timeout=60)
        if probe.returncode:
            pytest.skip(f"no namespaces here: {probe.stderr.strip()}")
        wrapper, prelude = [*IN_NAMESPACE, *wrapper], PRELUDE + HOSTS
    with bus_at_work(folder / "run") if here in NEEDS_BUS else contextlib.nullcontext():
        process = subprocess.Popen([*wrapper, prelude + block.text], cwd=folder, text=True, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            said, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            end_group(process)
    assert process.returncode == 0, f"{block.place}\n{said[-4000:]}"


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", marked([block for block in BLOCKS if is_runnable(block)]))
def test_commands_of_a_block(block: Block, scratch: Path) -> None:
    run_commands(block, scratch)


@pytest.mark.integration
@pytest.mark.parametrize("jobs", JOBS, ids=lambda jobs: "+".join(f"{page}:{name}" for page, _, name, _ in jobs))
def test_examples_run_together(jobs: list[tuple[str, str, str, int]], scratch: Path) -> None:
    """Every rank of every job is a process; an engine fails unless it ends with exactly the trainer's weights.

    A trainer that is an example is run a second time on the same bus, as its reader will.
    """
    pytest.importorskip("torch")
    import tensorbus

    with tensorbus.local():
        trainer_page = jobs[0][0]
        for again in range(2 if trainer_page else 1):
            folder = scratch / f"run-{again}"
            folder.mkdir()
            run_jobs(jobs, folder)


def run_jobs(jobs: list[tuple[str, str, str, int]], folder: Path) -> None:
    processes: dict[str, subprocess.Popen] = {}
    try:
        for page, heading, surroundings, count in jobs:
            example = of(page, heading) if page else ""
            for rank in range(count):
                with (folder / f"{surroundings}-{rank}.py").open("w+") as code:
                    code.write(example)
                    code.seek(0)
                    processes[f"{page or surroundings} rank {rank}"] = subprocess.Popen(
                        [sys.executable, JOB, surroundings, str(rank), str(count), folder], stdin=code, text=True,
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo",
                                                                              "OMP_NUM_THREADS": "1"}, start_new_session=True)
        for name, process in processes.items():
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, f"{name}\n{said[-4000:]}"
    finally:
        for process in processes.values():
            end_group(process)


def test_every_python_example_has_surroundings() -> None:
    known = {(page, heading) for jobs in JOBS for page, heading, _, _ in jobs if page}
    assert {(block.page, block.heading) for block in BLOCKS if block.language == "python"} == known


def test_surroundings_name_blocks_that_are_there() -> None:
    assert NEEDS_BUS | NEEDS_HOSTS <= {(block.page, block.heading) for block in BLOCKS if is_runnable(block)}


def test_every_fence_says_what_it_is() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block.place}: say one of {', '.join(sorted(LANGUAGES))} after the fence"
        if block.language == "text":
            assert not COMMAND.search(block.text), f"{block.place}: a command in a block of text; call it bash"


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def commands_of_ctl() -> set[str]:
    """The commands that help lists, those below others as two words."""
    def below(*words: str) -> Iterator[str]:
        _, listed, text = told("tensorbusctl", *words, "--help").partition("Subcommands:\n")
        if not listed:
            yield " ".join(words)
        for name in re.findall(r"^  ([a-z][a-z0-9-]*) ", text, re.MULTILINE):
            yield from below(*words, name)

    return set(below())


def section(page: str, heading: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section '{heading}'"
    return found[1]


def test_every_command_is_described_and_run(scratch: Path) -> None:
    commands = commands_of_ctl()
    assert {"status", "bench m2n"} <= commands
    cells = re.findall(r"^\| (`.*?`) \|", section("docs/operations.md", "Commands"), re.MULTILINE)
    described = {re.match(r"[a-z-]+(?: m2n)?", code)[0] for cell in cells for code in re.findall(r"`([^`]*)`", cell)}
    assert described == commands
    shown = "".join(block.text for block in BLOCKS if is_runnable(block) and not block.not_run)
    assert [command for command in sorted(commands) if f"tensorbusctl {command}" not in shown] == []


@pytest.mark.parametrize("program", ["tensorbusd", "tensorbus-agent"])
def test_every_flag_of_a_server_is_described(scratch: Path, program: str) -> None:
    help_text = told(program, "--help")
    flags = set(re.findall(r"^\s+(?:-h,)?--([a-z-]+)", help_text, re.MULTILINE)) - {"help"}
    text = section("docs/operations.md", f"Flags of `{program}`")
    assert set(re.findall(r"`--([a-z-]+)", text)) == flags
    if program == "tensorbus-agent":
        variables = set(re.findall(r"\(Env:(\w+)\)", help_text))
        assert set(re.findall(r"`(TENSORBUS_\w+)`", text)) == variables


def test_few_blocks_are_not_run() -> None:
    assert [block.place.split(":")[0] for block in BLOCKS if block.not_run] == ["README.md", "docs/quickstart.md"]


def test_json_examples_are_read(scratch: Path) -> None:
    examples = [block for block in BLOCKS if block.language == "json"]
    assert examples
    for block in examples:
        value = json.loads(block.text)
        if value["format"] != "tensorbus-layout-1":
            continue
        (scratch / "layout.json").write_text(block.text)
        answer = subprocess.run(["tensorbusctl", "plan", "--source", "layout.json", "--target", "layout.json", "--json"],
                                capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, f"{block.place}\n{answer.stderr}"
        assert json.loads(answer.stdout)["tensors"] == len(value["tensors"])


@pytest.mark.integration
def test_a_wrong_command_is_seen(scratch: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```bash\ntrue\ntensorbusctl no-such-command\ntrue\n```\n")
    (block,) = blocks_of(page, "page.md")
    assert (block.heading, block.line) == ("Title", 4)
    with pytest.raises(AssertionError, match="tensorbusctl|no-such-command"):
        run_commands(block, scratch)


def test_parts_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n<!-- not run: too long -->\n```bash\n# not a heading\n```\n## B\n\n```python\npass\n```\n")
    first, second = blocks_of(page, "page.md")
    assert (first.not_run, first.heading, first.text) == ("too long", "A", "# not a heading\n")
    assert (second.not_run, second.heading, second.language) == (None, "B", "python")
    page.write_text("```bash\n")
    with pytest.raises(ValueError, match="page.md:1"):
        blocks_of(page, "page.md")
