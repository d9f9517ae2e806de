#!/usr/bin/env python3
"""Runs `tensorbusctl plan` over random layout pairs and the real scenarios and checks every answer.

usage: accept_plans.py --ctl PATH/tensorbusctl [--seeds 200] [--first-seed 0] [--relays]
                       [--scenarios S01,S02,... | all | tiny] [--manifests DIR] [--jobs N]

Random pairs are checked element by element (check_plan.py); scenarios against
manifests/expected_bytes.json, the busiest source against its bound (at most 1.02 times without relays, 1.05
with them) and, with relays, bytes into each node of eight (at most 1.02 times) and the busiest sender, relaying
included (at most 1.1 times the busiest receive). Exit 0 when all hold; else 1 and each fault on a line.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
MANIFESTS = os.path.join(HERE, "..", "..", "share", "manifests")


def run_json(command):
    r = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if r.returncode:
        return None, f"exit {r.returncode}: {r.stderr.strip()[-200:]}"
    try:
        return json.loads(r.stdout), None
    except ValueError as e:
        return None, f"standard output is not one JSON object: {e}"


def random_pair(ctl, seed, relays):
    """(fault or None, number of relayed ops)."""
    with tempfile.TemporaryDirectory() as folder:
        return checked_pair(ctl, seed, folder, relays)


def checked_pair(ctl, seed, folder, relays):
    a, b, ops = (os.path.join(folder, n) for n in ("a.json", "b.json", "ops.jsonl"))
    subprocess.run([sys.executable, os.path.join(HERE, "random_layouts.py"), "--seed", str(seed),
                    "--out-source", a, "--out-target", b], check=True)
    flag = ["--relays", "on" if relays else "off"]
    plan, fault = run_json([ctl, "plan", "--source", a, "--target", b, "--ops", ops, "--json", *flag])
    if fault:
        return fault, 0
    if not plan["certificate"]["valid"]:
        return "its own certificate says invalid", 0
    r = subprocess.run([sys.executable, os.path.join(HERE, "check_plan.py"), a, b, ops] + (["--relays"] if relays else []),
                       capture_output=True, text=True)
    if r.returncode:
        return (r.stdout + r.stderr).strip()[:200], 0
    return None, int(r.stdout.split()[-2])


def scenario(ctl, manifests, sid, want, relays):
    plan, fault = run_json([ctl, "plan", "--layouts", os.path.join(manifests, "layouts.json"), "--scenario", sid,
                            "--json", "--relays", "on" if relays else "off"])
    if fault:
        return fault
    exact = [("unique_bytes", "unique_bytes"), ("recv_bytes", "recv_min"), ("local_bytes", "local_bytes")]
    for ours, theirs in exact:
        if plan[ours] != want[theirs]:
            return f"{ours} differs from {theirs}"
    kind = "once" if relays else "p2p"
    for rank, (sent, least) in enumerate(zip(plan["send_bytes"], want[f"send_exclusive_{kind}"])):
        if sent < least:
            return f"source {rank} sends {sent} bytes, less than only it holds ({least})"
    number, over = want[f"send_minmax_{kind}"]
    ratio = max(plan["send_bytes"]) * over / number if number else 1.0
    seconds = plan["plan_seconds"] + plan["certificate"]["seconds"]
    print(f"{sid:48s} {seconds:7.3f} s   busiest source / bound {ratio:.3f}", file=sys.stderr)
    if sid.startswith("S") and ratio > (1.05 if relays else 1.02):
        return f"busiest source sends {ratio:.3f} times the bound"
    if relays and sid.startswith("S"):
        for node, (got, least) in enumerate(zip(plan["node_in_bytes"], want["node_in_min"])):
            if got > 1.02 * least:
                return f"node {node} receives {got} bytes, {got / max(1, least):.3f} times the least"
        if plan["max_send_bytes"] > 1.1 * max(plan["recv_bytes"]):
            return f"some rank sends {plan['max_send_bytes']} bytes, the busiest receives {max(plan['recv_bytes'])}"
    if sum(plan["send_bytes"]) + sum(plan["relay_bytes"]) != sum(plan["recv_bytes"]):
        return "bytes sent and passed on are not those received"
    if not relays and any(plan["relay_bytes"]):
        return "bytes are passed on though relays are off"
    return None if plan["certificate"]["valid"] else "certificate invalid"


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--ctl", required=True)
    ap.add_argument("--seeds", type=int, default=200)
    ap.add_argument("--first-seed", type=int, default=0)
    ap.add_argument("--relays", action="store_true")
    ap.add_argument("--scenarios", default="tiny")
    ap.add_argument("--manifests", default=MANIFESTS, help="folder of layouts.json and expected_bytes.json")
    ap.add_argument("--jobs", type=int, default=os.cpu_count())
    a = ap.parse_args()
    with open(os.path.join(a.manifests, "expected_bytes.json")) as f:
        expected = json.load(f)
    if a.scenarios == "tiny":
        wanted = [s for s in expected if s.startswith("T")]
    elif a.scenarios == "all":
        wanted = list(expected)
    else:
        wanted = []
        for short in a.scenarios.split(","):
            found = [s for s in expected if s.startswith(short)]
            if len(found) != 1:
                sys.exit(f"accept_plans: {short!r} names {len(found)} scenarios")
            wanted += found
    faults = []
    for sid in wanted:
        fault = scenario(a.ctl, a.manifests, sid, expected[sid], a.relays)
        if fault:
            faults.append(f"{sid}: {fault}")
    seeds, relayed = range(a.first_seed, a.first_seed + a.seeds), 0
    with ThreadPoolExecutor(a.jobs) as pool:
        for seed, (fault, count) in zip(seeds, pool.map(lambda s: random_pair(a.ctl, s, a.relays), seeds)):
            relayed += count
            if fault:
                faults.append(f"seed {seed}: {fault}")
    if a.relays and a.seeds >= 50 and not relayed:
        faults.append("no random pair was relayed at all")
    for fault in faults:
        print(fault)
    print(f"{len(wanted)} scenarios, {a.seeds} random pairs, {len(faults)} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
