"""Runs the test stages one after the other and prints what ran, what was skipped and how long it took.

Called by scripts/test, which has done the set-up. Only the standard library is used here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import stages  # noqa: E402  (beside this file)
from results import Outcome  # noqa: E402

BOLD, RED, GREEN, DIM, OFF = ("\033[1m", "\033[31m", "\033[32m", "\033[2m", "\033[0m")
if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
    BOLD = RED = GREEN = DIM = OFF = ""


@dataclass(frozen=True)
class Stage:
    """One row of the table. `budget_s` is for two cores with an empty compiler cache."""

    name: str
    what: str
    budget_s: int
    run: Callable[[stages.Context], Outcome]
    quick: bool = False
    needs: tuple[str, ...] = ()


STAGES = (
    Stage("build", "programs, Python module and C++ tests", 420, stages.build, quick=True),
    Stage("unit", "C++ unit, simulation and conformance tests", 120, stages.unit, quick=True, needs=("build",)),
    Stage("python", "Python tests", 240, stages.python_tests, quick=True, needs=("build",)),
    Stage("acceptance", "plans checked by independent code", 240, stages.acceptance, quick=True, needs=("build",)),
    Stage("integration", "real processes on this host", 600, stages.integration, needs=("build",)),
    Stage("asan", "C++ tests under ASan, UBSan; clang plans as gcc", 450, stages.asan, needs=("build",)),
    Stage("tsan", "C++ tests under ThreadSanitizer", 450, stages.tsan),
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test", description="Runs every test that can run on this machine.")
    parser.add_argument("--quick", action="store_true", help="only the quick stages, without slow tests")
    parser.add_argument("--stage", action="append", choices=[s.name for s in STAGES], help="only this stage (may be repeated)")
    parser.add_argument("--list", action="store_true", help="show the stages and stop")
    parser.add_argument("--preset", default=os.environ.get("TENSORBUS_PRESET", "release"), help="CMake preset of the plain build (default: release, as the quick start)")
    return parser.parse_args(argv)


def choose(options: argparse.Namespace) -> list[Stage]:
    """The stages to run, in order; those that a chosen one needs come along."""
    if not options.stage:
        return [s for s in STAGES if s.quick or not options.quick]
    names = set(options.stage)
    for stage in STAGES:
        if stage.name in options.stage:
            names.update(stage.needs)
    return [s for s in STAGES if s.name in names]


def run_stage(stage: Stage, context: stages.Context) -> Outcome:
    print(f"\n{BOLD}=== {stage.name}: {stage.what}{OFF}", flush=True)
    context.stage, context.deadline = stage.name, time.monotonic() + 3 * stage.budget_s
    began = time.monotonic()
    try:
        outcome = stage.run(context)
    except stages.StageError as error:
        outcome = Outcome(failed=[f"{stage.name}: {error}"])
    outcome.seconds = time.monotonic() - began
    return outcome


def table(rows: list[tuple[Stage, Outcome]]) -> None:
    print(f"\n{BOLD}{'stage':12} {'seconds':>8} {'budget':>7} {'passed':>7} {'failed':>7} {'skipped':>8}  result{OFF}")
    for stage, outcome in rows:
        late = outcome.seconds > stage.budget_s
        colour, word = (RED, "FAILED") if outcome.failed else (GREEN, "ok, over its budget" if late else "ok")
        if not outcome.failed and not outcome.passed and not outcome.made:
            colour, word = DIM, "nothing ran"
        made = f", {outcome.made}" if outcome.made else ""
        print(f"{stage.name:12} {outcome.seconds:8.1f} {stage.budget_s:7} {outcome.passed:7} {len(outcome.failed):7} "
              f"{len(outcome.skipped):8}  {colour}{word}{OFF}{made}")


def status_of(outcomes: list[Outcome]) -> int:
    """0 when nothing failed and something was done: a run in which every stage was skipped has shown nothing."""
    failed = any(outcome.failed for outcome in outcomes)
    done = any(outcome.passed or outcome.made for outcome in outcomes)
    return 1 if failed or not done else 0


def stop(number: int, _: object) -> None:
    """Ends the running stage's processes on the way out, as Ctrl-C does."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.list:
        for stage in STAGES:
            print(f"{stage.name:12} {stage.budget_s:4} s  {'quick' if stage.quick else '     '}  {stage.what}")
        return 0
    signal.signal(signal.SIGTERM, stop)
    context = stages.Context(preset=options.preset, quick=options.quick)
    shutil.rmtree(context.results, ignore_errors=True)
    rows: list[tuple[Stage, Outcome]] = []
    broken: set[str] = set()
    for stage in choose(options):
        missing = broken.intersection(stage.needs)
        if missing:
            outcome = Outcome(skipped=[(f"stage {stage.name}", f"stage {', '.join(sorted(missing))} failed")])
        else:
            outcome = run_stage(stage, context)
        if outcome.failed:
            broken.add(stage.name)
        rows.append((stage, outcome))

    everything = [outcome for _, outcome in rows]
    reasons: dict[str, list[str]] = {}
    for name, reason in (skip for outcome in everything for skip in outcome.skipped):
        reasons.setdefault(reason, []).append(name)
    if reasons:
        print(f"\n{BOLD}skipped{OFF}")
        for reason, names in sorted(reasons.items()):
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            print(f"  {reason}\n    {DIM}{', '.join(names[:4])}{more}{OFF}")
    failures = [name for outcome in everything for name in outcome.failed]
    if failures:
        print(f"\n{BOLD}{RED}failed{OFF}")
        for name in failures:
            print(f"  {name}")
    table(rows)
    passed = sum(outcome.passed for outcome in everything)
    skipped = sum(len(outcome.skipped) for outcome in everything)
    print(f"\n{passed} passed, {len(failures)} failed, {skipped} skipped", flush=True)
    return status_of(everything)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
