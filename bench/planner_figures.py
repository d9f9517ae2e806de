#!/usr/bin/env python3
"""Writes docs/planner-figures.md: what the planner makes of every shipped scenario, and what is predicted for it.

usage: planner_figures.py [--ctl tensorbusctl] [--cluster h100-8x400g] [--bench RESULTS.json] [--out docs/planner-figures.md]

RESULTS.json is what `planner_bench --benchmark_out` wrote, for the table of single steps.

Times of planning are those of this machine, on one core; byte figures and predictions are the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ["scenario", "tensors", "ranks", "routes", "slices", "plan s", "certificate s", "max send / bound", "max receive / bound",
           "node-in / bound", "predicted s", "/ bound", "held by", "fp8 wire s"]


def run(ctl: str, *words: str) -> list[dict]:
    """The results of a command over all scenarios."""
    done = subprocess.run([ctl, *words, "--scenario", "all", "--json"], capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{ctl} {' '.join(words)}: {done.stderr.strip()}")
    return json.loads(done.stdout)["results"]


def ratio(value: float, bound: float) -> str:
    return f"{value / bound:.3f}" if bound else "-"


def row(plan: dict, expected: dict, predicted: dict | None, fp8: dict | None) -> list[str]:
    least_send = expected["send_minmax_p2p" if not any(plan["relay_bytes"]) else "send_minmax_once"]
    least_in = max(expected["node_in_min"], default=0)
    return [
        plan["scenario"], f"{plan['tensors']:,}", f"{plan['source_ranks']} → {plan['target_ranks']}", f"{plan['routes']:,}", f"{plan['ops']:,}",
        f"{plan['plan_seconds']:.3f}", f"{plan['certificate']['seconds']:.3f}",
        ratio(max(plan["send_bytes"]), least_send[0] / least_send[1]),
        ratio(plan["max_recv_bytes"], max(expected["recv_min"], default=0)),
        ratio(max(plan["node_in_bytes"], default=0), least_in),
        f"{predicted['predicted_seconds']:.4g}" if predicted else "-", f"{predicted['ratio']:.3f}" if predicted else "-",
        predicted["bound"] if predicted else "-", f"{fp8['predicted_seconds']:.4g}" if fp8 else "-"]


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def scenarios(args: argparse.Namespace, expected: dict, relays: str) -> list[str]:
    flags = ["--relays", relays]
    plans = run(args.ctl, "plan", *flags)
    predicted = {r["scenario"]: r for r in run(args.ctl, "simulate", "--cluster", args.cluster, *flags)}
    fp8 = {r["scenario"]: r for r in run(args.ctl, "simulate", "--cluster", args.cluster, "--wire", "fp8-block", *flags)}
    return table(COLUMNS, [row(plan, expected[plan["scenario"]], predicted.get(plan["scenario"]), fp8.get(plan["scenario"])) for plan in plans])


STEPS = ["plan/direct", "plan/relays", "own_part/sources", "own_part/targets", "replan/direct",
         "replan/relays", "naive"]


def steps(results: Path) -> list[str]:
    """Milliseconds of the steps that `planner_bench` times, by scenario."""
    times: dict[str, dict[str, float]] = {}
    for result in json.loads(results.read_text(encoding="utf-8"))["benchmarks"]:
        scenario, step = result["name"].split("/", 1)
        times.setdefault(scenario, {})[step.split("/manual_time")[0].split("/iterations")[0]] = result["real_time"]
    return table(["scenario, ms", *STEPS], [[scenario, *(f"{of[step]:.1f}" if step in of else "-" for step in STEPS)] for scenario, of in times.items()])


def machine() -> str:
    """The processor's model and how many cores it has."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"


def page(args: argparse.Namespace) -> str:
    expected = json.loads((ROOT / "share" / "manifests" / "expected_bytes.json").read_text(encoding="utf-8"))
    lines = [
        "# Planner figures", "",
        "Every scenario of `share/manifests`; written by `bench/planner_figures.py`. Byte figures are exact and the same on",
        "every machine; their bounds were computed by other programs (`share/manifests/layouts.md`, section 6). Seconds of planning and checking are of",
        f"one core of {machine()}. \"Predicted\" is what `tensorbusctl simulate` expects on cluster `{args.cluster}`: a **prediction** from",
        "line rates and message costs, nothing was measured; \"held by\" is the bound next below it ([planner.md](planner.md#prediction)), \"fp8 wire\" the same",
        "with linear layers as fp8 and a scale for each block of 128 x 128. The tiny scenarios are nothing but message costs.", "",
        "## Without relays", "", *scenarios(args, expected, "off"), "",
        "## With relays", "", *scenarios(args, expected, "on")]
    if args.bench:
        lines += ["", "## Single steps", "",
                  "Processor time ([benchmarks.md](benchmarks.md#planning)): all ops and their certificate, from two layouts on; given the class-level plan, one",
                  "agent's eight sources or targets, ops and certificate; given what matching found out, all ops again without a rank; and, as a baseline, all ops",
                  "by nested loops without balance, rounds or digest.", "",
                  *steps(args.bench)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctl", default="tensorbusctl")
    parser.add_argument("--cluster", default="h100-8x400g")
    parser.add_argument("--bench", type=Path, help="JSON of planner_bench")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "planner-figures.md")
    args = parser.parse_args()
    args.out.write_text(page(args), encoding="utf-8")


if __name__ == "__main__":
    main()
