"""The stages of scripts/test: each builds what it needs, runs it within the stage's deadline and reads the results."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from results import Outcome, merge_ctest, read_junit

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = "T01,T02,T03,T04,T12,T13,S01,S02,S03,S04,S05"
JOBS = os.environ.get("TENSORBUS_JOBS", str(len(os.sched_getaffinity(0))))


class StageError(Exception):
    """A stage could not do its work; the text says why."""


@dataclass
class Context:
    """What the stages share."""

    preset: str
    quick: bool = False
    stage: str = ""
    deadline: float = 0.0
    results: Path = field(default_factory=lambda: ROOT / "build" / "test-results")

    @property
    def venv(self) -> Path:
        return Path(os.environ.get("TENSORBUS_VENV", ROOT / ".venv"))

    def folder(self) -> Path:
        """This stage's own folder for result files, empty at the start of a run."""
        path = self.results / self.stage
        path.mkdir(parents=True, exist_ok=True)
        return path

    def left_s(self) -> float:
        return max(1.0, self.deadline - time.monotonic())


def run(context: Context, command: list[str | Path], env: dict[str, str] | None = None, quiet: bool = True) -> int:
    """Runs a command in its own process group, its output in the stage's log (and shown, unless `quiet`).

    Returns the exit status. Past the deadline the whole group is ended and StageError raised.
    """
    words = [str(word) for word in command]
    log_path = context.folder() / "log.txt"
    with log_path.open("ab") as log:
        log.write(f"$ {' '.join(words)}\n".encode())
        log.flush()
        process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                                   stdout=log if quiet else None, stderr=subprocess.STDOUT if quiet else None,
                                   start_new_session=True)
        try:
            return process.wait(timeout=context.left_s())
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if isinstance(error, KeyboardInterrupt):
                raise
            raise StageError(f"out of time in: {' '.join(words)} (log: {log_path})") from None


def show_log_end(context: Context, lines: int = 80) -> None:
    text = (context.folder() / "log.txt").read_text(encoding="utf-8", errors="replace")
    print("\n".join(text.splitlines()[-lines:]), flush=True)


def must(context: Context, command: list[str | Path], env: dict[str, str] | None = None) -> None:
    """run(), where anything but exit status 0 ends the stage."""
    if run(context, command, env):
        show_log_end(context)
        raise StageError(f"failed: {' '.join(str(word) for word in command)}")


def cmake_flags() -> list[str]:
    """What every configure is given: asked from the set-up, so that both share one build folder."""
    script = ". scripts/lib/common.sh && cmake_flags"
    return subprocess.run(["bash", "-c", script], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def configure_and_build(context: Context, preset: str, target: str = "all", flags: list[str] | None = None) -> None:
    began = time.monotonic()
    must(context, ["cmake", "--preset", preset, *cmake_flags(), *(flags or [])])
    must(context, ["cmake", "--build", f"build/{preset}", "-j", JOBS, "--target", target])
    print(f"built preset {preset} ({target}) in {time.monotonic() - began:.0f} s", flush=True)


def ctest(context: Context, preset: str, selection: list[str]) -> Outcome:
    """Runs a selection of the C++ tests and counts single tests, not programs."""
    folder = context.folder()
    junit = folder / "ctest.xml"
    # googletest names the file after the program, which is how ctest names the test.
    env = {"GTEST_OUTPUT": f"xml:{folder}/googletest/", "GTEST_COLOR": "no"}
    status = run(context, ["ctest", "--test-dir", f"build/{preset}", "--output-on-failure", "--no-tests=ignore", "-j", JOBS,
                           "--output-junit", junit, *selection], env)
    if not junit.exists():
        if status:
            show_log_end(context)
            raise StageError("ctest failed before it ran a test")
        return Outcome()
    outcome = merge_ctest(junit, folder / "googletest")
    if status and not outcome.failed:
        outcome.failed.append(f"ctest ended with status {status}")
    if outcome.failed:
        show_log_end(context)
    return outcome


def build(context: Context) -> Outcome:
    """The set-up's build, then the C++ tests in the same build folder."""
    must(context, [ROOT / "scripts" / "setup", "--tests"], {"TENSORBUS_PRESET": context.preset})
    must(context, ["cmake", "--build", f"build/{context.preset}", "-j", JOBS])
    programs = [path for path in (ROOT / "build" / context.preset / "bin").iterdir() if os.access(path, os.X_OK) and path.is_file()]
    return Outcome(made=f"{len(programs)} programs")


def unit(context: Context) -> Outcome:
    leave_out = "integration|slow" if context.quick else "integration"
    return ctest(context, context.preset, ["-LE", leave_out])


def integration(context: Context) -> Outcome:
    """Real processes: the C++ tests labelled so, and the Python ones that start daemon, agent and jobs."""
    outcome = ctest(context, context.preset, ["-L", "integration"])
    outcome.add(pytest(context, ["-m", "integration"]))
    return outcome


def python_tests(context: Context) -> Outcome:
    return pytest(context, ["-m", "not integration and not slow" if context.quick else "not integration"])


def pytest(context: Context, selection: list[str]) -> Outcome:
    """pytest over tests/python, in the environment as users get it."""
    junit = context.folder() / "pytest.xml"
    status = run(context, [context.venv / "bin" / "python", "-m", "pytest", "tests/python", "-q", "--no-header", "--color=no",
                           f"--junitxml={junit}", "-o", "junit_family=xunit1", *selection], quiet=True)
    outcome = Outcome()
    if junit.exists():
        for test in read_junit(junit, strip="tests.python.").values():
            outcome.add(test)
    if status not in (0, 5) and not outcome.failed:
        outcome.failed.append(f"pytest ended with status {status}")
    if outcome.failed:
        show_log_end(context)
    return outcome


def installed_ctl(context: Context) -> Path:
    """The tensorbusctl that stage build installs. Without it there is nothing to check, which is a failure and no reason to skip."""
    ctl = context.venv / "bin" / "tensorbusctl"
    if not os.access(ctl, os.X_OK):
        raise StageError(f"{ctl} is not there, so nothing can be checked; scripts/setup installs it")
    return ctl


def acceptance(context: Context) -> Outcome:
    """Random plans checked element by element and the real scenarios against independently computed bytes."""
    ctl = installed_ctl(context)
    outcome = Outcome()
    for relays in (False, True):
        outcome.add(accept_plans(context, ctl, relays))
    return outcome


def accept_plans(context: Context, ctl: Path, relays: bool) -> Outcome:
    # All scenarios take some 5 s of processor time, a random pair a quarter of a second.
    seeds, scenarios = (30, "tiny") if context.quick else (100 if relays else 200, "all")
    log = context.folder() / "log.txt"
    seen = log.stat().st_size if log.exists() else 0
    status = run(context, [context.venv / "bin" / "python", "tests/acceptance/accept_plans.py", "--ctl", ctl, "--seeds", str(seeds),
                           "--scenarios", scenarios, "--jobs", JOBS, *(["--relays"] if relays else [])])
    text = log.read_bytes()[seen:].decode("utf-8", errors="replace")
    counts = re.search(r"^(\d+) scenarios, (\d+) random pairs, (\d+) faults$", text, re.MULTILINE)
    if counts is None:
        show_log_end(context)
        raise StageError(f"accept_plans.py ended with status {status} before its last line")
    planned, pairs, faults = map(int, counts.groups())
    print(counts.group(0) + (" with relays" if relays else ""), flush=True)
    named = [f"plan{' with relays' if relays else ''} {m.group(0)}" for m in re.finditer(r"^(seed \d+|[ST]\d\d\S*): .*$", text, re.MULTILINE)] if faults else []
    if status and not named:
        named = [f"accept_plans.py ended with status {status}"]
    return Outcome(passed=planned + pairs - len(named), failed=named)


def sanitized(context: Context, preset: str) -> Outcome:
    """All C++ tests but those of speed and size, which say nothing in a program several times slower."""
    configure_and_build(context, preset, flags=["-DTENSORBUS_BUILD_BENCH=OFF", "-DTENSORBUS_BUILD_PYTHON=OFF"])
    return ctest(context, preset, ["-LE", "slow"])


def asan(context: Context) -> Outcome:
    """Also compares plan digests: clang compiled these programs, gcc those of the plain build."""
    ours = installed_ctl(context)
    outcome = sanitized(context, "asan")
    theirs = ROOT / "build" / "asan" / "bin" / "tensorbusctl"
    for scenario in SCENARIOS.split(","):
        digests = [plan_digest(context, program, scenario) for program in (ours, theirs)]
        if digests[0] and digests[0] == digests[1]:
            outcome.passed += 1
        else:
            outcome.failed.append(f"plan digest of {scenario}: gcc {digests[0]}, clang {digests[1]}")
    return outcome


def tsan(context: Context) -> Outcome:
    return sanitized(context, "tsan")


def plan_digest(context: Context, ctl: Path, scenario: str) -> str | None:
    import json

    result = subprocess.run([ctl, "plan", "--layouts", ROOT / "share" / "manifests" / "layouts.json", "--scenario", scenario,
                             "--json"], capture_output=True, text=True, timeout=context.left_s(), stdin=subprocess.DEVNULL)
    try:
        return json.loads(result.stdout)["digest"]
    except (ValueError, KeyError):
        print(f"{ctl}: {result.stderr.strip()[-300:]}", file=sys.stderr)
        return None
