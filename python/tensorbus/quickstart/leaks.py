"""Does memory, a descriptor, a thread or a shared memory file stay behind as refreshes go by?"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import TypedDict

RSS_TOLERANCE = 0.02
# Below this much the two per cent are less than a page cache of a malloc arena: a process of 20 MiB would have to hold
# still to 400 KiB.
RSS_FLOOR_BYTES = 2 << 20
# The first refreshes fill caches, make threads and grow arenas; they do not count.
WARM_UP = 5


class Usage(TypedDict):
    """What one process held at one moment."""

    rss_bytes: int
    fds: int
    threads: int


def usage_of(pid: int) -> Usage:
    """Reads /proc. OSError when the process is gone."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    return Usage(rss_bytes=int(status["VmRSS"].split()[0]) * 1024, threads=int(status["Threads"]),
                 fds=len(os.listdir(folder / "fd")))


def own_usage() -> Usage:
    """This process, at this moment; the descriptor that the counting itself opens is left out."""
    usage = usage_of(os.getpid())
    usage["fds"] -= 1
    return usage


def shared_memory_files() -> set[str]:
    """Names in /dev/shm."""
    try:
        return set(os.listdir("/dev/shm"))
    except OSError:
        return set()


def find_leaks(name: str, samples: list[Usage]) -> list[str]:
    """Compares the first and the last third of a process's samples, one a refresh, after the warm-up.

    Empty when it is flat: RSS within two per cent (medians), no more descriptors or threads than before.
    """
    settled = samples[WARM_UP:]
    if len(settled) < 6:
        return [f"{name}: only {len(samples)} samples, at least {WARM_UP + 6} are needed to tell"]
    third = len(settled) // 3
    early, late = settled[:third], settled[-third:]
    found = []
    before, after = (statistics.median(s["rss_bytes"] for s in part) for part in (early, late))
    if abs(after - before) > max(RSS_TOLERANCE * before, RSS_FLOOR_BYTES):
        found.append(f"{name}: RSS went from {before / 2**20:.1f} to {after / 2**20:.1f} MiB ({100 * (after / before - 1):+.1f} %)")
    if max(s["fds"] for s in late) > max(s["fds"] for s in early):
        found.append(f"{name}: descriptors went from {max(s['fds'] for s in early)} to {max(s['fds'] for s in late)}")
    if max(s["threads"] for s in late) > max(s["threads"] for s in early):
        found.append(f"{name}: threads went from {max(s['threads'] for s in early)} to {max(s['threads'] for s in late)}")
    return found
