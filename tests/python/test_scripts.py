"""The reading of test reports by scripts/test, and how scripts/setup and scripts/test answer bad usage."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))

import results  # noqa: E402
import run_tests  # noqa: E402
import stages  # noqa: E402


def googletest_report(path: Path, cases: str) -> None:
    path.write_text(f'<?xml version="1.0"?><testsuites><testsuite name="Suite">{cases}</testsuite></testsuites>')


def ctest_report(path: Path, cases: str) -> None:
    path.write_text(f"<testsuite>{cases}</testsuite>")


def test_googletest_counts_each_kind(tmp_path: Path) -> None:
    googletest_report(tmp_path / "a.xml", """
        <testcase name="Passes" status="run" result="completed" classname="Suite"/>
        <testcase name="Fails" status="run" result="completed" classname="Suite"><failure message="x" type=""/></testcase>
        <testcase name="Skips" status="run" result="skipped" classname="Suite">
          <skipped message="file.cc:3&#x0A;no RDMA device&#x0A;"><![CDATA[file.cc:3]]></skipped>
        </testcase>
        <testcase name="DISABLED_Off" status="notrun" result="suppressed" classname="Suite"/>""")
    outcome = results.read_googletest(tmp_path / "a.xml")
    assert (outcome.passed, outcome.failed) == (1, ["Suite.Fails"])
    assert outcome.skipped == [("Suite.Skips", "no RDMA device"), ("Suite.DISABLED_Off", "disabled")]


def test_ctest_verdict_counts_where_a_program_left_no_report(tmp_path: Path) -> None:
    details = tmp_path / "googletest"
    details.mkdir()
    for program, names in {"good": "ABC", "late": "A"}.items():
        googletest_report(details / f"{program}.xml",
                          "".join(f'<testcase name="{name}" status="run" result="completed" classname="Suite"/>' for name in names))
    ctest_report(tmp_path / "ctest.xml", """
        <testcase name="good" classname="good" status="run"/>
        <testcase name="script" classname="script" status="run"/>
        <testcase name="crash" classname="crash" status="fail"><failure message="SEGFAULT"/></testcase>
        <testcase name="late" classname="late" status="fail"><failure message="timeout"/></testcase>
        <testcase name="absent" classname="absent" status="notrun"><skipped message="no such device"/></testcase>""")
    outcome = results.merge_ctest(tmp_path / "ctest.xml", details)
    assert outcome.passed == 4
    assert outcome.failed == ["crash", "late"]
    assert outcome.skipped == [("absent", "no such device")]


@pytest.mark.parametrize("script", ["setup", "test"])
def test_unknown_option_is_bad_usage(script: str) -> None:
    command = [ROOT / "scripts" / script, "--no-such-option"]
    if script == "test":  # without the set-up in front of it
        command = [sys.executable, ROOT / "scripts" / "lib" / "run_tests.py", "--no-such-option"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert "--no-such-option" in answer.stderr


def test_a_build_is_not_made_again_because_ci_is_set_otherwise(tmp_path: Path) -> None:
    """But one that let warnings pass is, for whoever wants them to be errors."""
    script = '''
        . scripts/lib/common.sh; . scripts/lib/steps.sh
        step() { echo "$1" >&3; }; hash_tree() { echo "$sources"; }
        mkdir -p "$TB_VENV/bin"; touch "$TB_VENV/bin/tensorbusctl"; chmod +x "$TB_VENV/bin/tensorbusctl"
        for round in $1; do CI=${round%/*} sources=${round#*/}; echo "[$round]" >&3; ensure_build; done'''

    def built(rounds: str) -> list[str]:
        said = subprocess.run(["bash", "-euc", f"exec 3>&1; {script}", "-", rounds], cwd=ROOT, capture_output=True, text=True, timeout=60,
                              env={**os.environ, "TENSORBUS_VENV": str(tmp_path / rounds.replace("/", "-")[:8])})
        assert said.returncode == 0, said.stderr
        return [part.split("]")[0] for part in said.stdout.split("[")[1:] if "build (" in part]

    assert built("true/a /a 1/a true/a /b true/b") == ["true/a", "/b", "true/b"]
    assert built("/a 1/a true/a /a true/a") == ["/a", "true/a"]


def test_stages_are_listed_from_any_folder(tmp_path: Path) -> None:
    answer = subprocess.run([ROOT / "scripts" / "test", "--list"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0
    assert [line.split()[0] for line in answer.stdout.splitlines()] == [
        "build", "unit", "python", "acceptance", "integration", "asan", "tsan"]


@pytest.mark.parametrize("name", ["acceptance", "asan"])
def test_a_stage_without_the_program_it_checks_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBUS_VENV", str(tmp_path))
    (stage,) = [stage for stage in run_tests.STAGES if stage.name == name]
    outcome = run_tests.run_stage(stage, stages.Context("dev", results=tmp_path / "results"))
    assert (outcome.passed, outcome.skipped) == (0, [])
    (failure,) = outcome.failed
    assert f"{tmp_path}/bin/tensorbusctl is not there" in failure and "scripts/setup" in failure


def test_a_build_is_no_passed_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "build" / "dev" / "bin"
    folder.mkdir(parents=True)
    for name, mode in {"tensorbusctl": 0o755, "tensorbusd": 0o755, "notes.txt": 0o644}.items():
        (folder / name).touch(mode)
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.setattr(stages, "must", lambda *_: None)
    outcome = stages.build(stages.Context("dev"))
    assert (outcome.passed, outcome.made) == (0, "2 programs")


def test_a_run_that_did_nothing_has_failed() -> None:
    done, skipped = results.Outcome(passed=1), results.Outcome(skipped=[("stage unit", "stage build failed")])
    assert run_tests.status_of([results.Outcome(made="2 programs")]) == 0
    assert run_tests.status_of([done, skipped]) == 0
    assert run_tests.status_of([skipped]) == 1
    assert run_tests.status_of([]) == 1
    assert run_tests.status_of([done, results.Outcome(failed=["a"])]) == 1


def runs(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ending_the_runner_ends_the_stage(tmp_path: Path) -> None:
    """A stage's command has a session of its own; it must not outlive the runner."""
    program = (f"import sys; sys.path.insert(0, {str(ROOT / 'scripts' / 'lib')!r})\n"
               "import run_tests, stages, signal, time\nfrom pathlib import Path\n"
               f"context = stages.Context('dev', results=Path({str(tmp_path)!r}))\n"
               "context.stage, context.deadline = 'x', time.monotonic() + 60\n"
               "signal.signal(signal.SIGTERM, run_tests.stop)\n"
               "stages.run(context, ['sh', '-c', 'echo $$; exec sleep 60'])\n")
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    log, deadline = tmp_path / "x" / "log.txt", time.monotonic() + 60
    while not (log.exists() and len(log.read_text().splitlines()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    inner = int(log.read_text().splitlines()[1])
    process.terminate()
    process.wait(timeout=60)
    # Whoever inherits the ended process may take its time to collect it.
    deadline = time.monotonic() + 60
    while runs(inner):
        assert time.monotonic() < deadline
        time.sleep(0.02)
