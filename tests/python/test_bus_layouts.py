"""Random uneven layouts over a real daemon, a real agent and a process per rank; every byte checked by a closed form."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorbus

sys.path.insert(0, str(Path(__file__).resolve().parent))
import layout_rank  # noqa: E402

HERE = Path(__file__).resolve().parent
RANDOM_LAYOUTS = HERE.parent / "acceptance" / "random_layouts.py"


@pytest.fixture(scope="module")
def bus() -> Iterator[tensorbus.Local]:
    try:
        with tensorbus.local(agent_options=["--data-listen", "off"]) as running:
            yield running
    except tensorbus.NotRunningError as error:
        pytest.skip(str(error))


def run_jobs(bus: tensorbus.Local, source: Path, target: Path, channel: str, extra: list[str]) -> None:
    """Runs all ranks of both jobs to their end; the first failure is shown with its rank."""
    started = []
    try:
        for role, mine, other in (("producer", source, target), ("consumer", target, source)):
            for rank in range(json.loads(mine.read_text())["ranks"]):
                command = [sys.executable, str(HERE / "layout_rank.py"), "--layout", str(mine), "--peer", str(other), "--role", role,
                           "--rank", str(rank), "--channel", channel, "--agent", bus.agent, *extra]
                started.append((role, rank, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                                             stderr=subprocess.STDOUT, text=True)))
        failures = []
        for role, rank, process in started:
            output, _ = process.communicate(timeout=150)
            if process.returncode:
                failures.append(f"{role} {rank}: {output.strip()[-600:]}")
        assert not failures, "\n".join(failures)
    finally:
        for _, _, process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_uneven_layouts(bus: tensorbus.Local, tmp_path: Path, seed: int) -> None:
    source, target = tmp_path / "source.json", tmp_path / "target.json"
    subprocess.run([sys.executable, RANDOM_LAYOUTS, "--seed", str(seed), "--max-ranks", "4", "--out-source", source, "--out-target", target],
                   check=True, timeout=60)
    extra = ["--seed", str(seed), "--flip", ("shadow", "in_place")[seed % 2], "--proof", ("readback", "stream", "memory")[seed % 3]]
    run_jobs(bus, source, target, f"random-{seed}", extra)


# The checker itself

def test_contents_do_not_depend_on_the_cut() -> None:
    whole = layout_rank.contents("a", (5, 7), 2, 3, ((0, 5), (0, 7)))
    assert np.array_equal(whole[1:4, 2:7], layout_rank.contents("a", (5, 7), 2, 3, ((1, 4), (2, 7))))
    assert not np.array_equal(whole, layout_rank.contents("a", (5, 7), 2, 4, ((0, 5), (0, 7))))
    assert layout_rank.contents("s", (), 8, 1, ()).shape == (8,)


def test_a_wrong_byte_and_a_byte_beside_are_noticed() -> None:
    stretch = np.full((4, 5, 2), layout_rank.GUARD, dtype=np.uint8)
    raw = stretch[:3, :4]
    box = ((2, 5), (0, 4))
    raw[...] = layout_rank.contents("a", (5, 4), 2, 1, box)
    held = [("a", (5, 4), 2, box, raw, stretch)]
    assert layout_rank.check(held, 1) == 24
    stretch[3, 0, 0] ^= 1
    with pytest.raises(SystemExit, match="beside tensor a"):
        layout_rank.check(held, 1)
    raw[1, 1, 0] ^= 1
    with pytest.raises(SystemExit, match=r"differs at \[1, 1, 0\]"):
        layout_rank.check(held, 1)


def test_placements_become_boxes() -> None:
    strided = {"shape": [8, 3], "mesh": [["a", 2], ["b", 2]], "placements": ["_StridedShard(0, split_factor=2)", "Shard(0)"]}
    assert layout_rank.boxes_of(strided, 4, 1) == [((4, 6), (0, 3))]
    assert layout_rank.boxes_of({"shape": [], "mesh": [["a", 1]], "placements": ["Replicate"]}, 1, 0) == [()]
    assert layout_rank.boxes_of({"shape": [0, 4], "mesh": [["a", 1]], "placements": ["Replicate"]}, 1, 0) == []
