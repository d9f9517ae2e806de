"""One rank of a job whose layout is a file: fills or checks its boxes by a closed form.

    python layout_rank.py --layout FILE --peer FILE --role producer|consumer --rank R --channel NAME --agent SOCKET
                          --versions N [--flip F] [--proof P] [--seed S]

A producer publishes N versions, a consumer takes and checks as many. Boxes lie in memory of their own, some with gaps between
rows or with their dimensions turned round; a byte outside of a box that changes is a failure too.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import zlib
from pathlib import Path

import numpy as np

import tensorbus
from tensorbus.views import DTYPES, Holding

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "acceptance"))
import check_plan  # noqa: E402

GUARD = 0xA5
WAIT_S = 60.0


class Memory:
    """A strided stretch of an arena under a dtype that NumPy may not have; `raw` is [*shape, bytes per element], uint8."""

    def __init__(self, raw: np.ndarray, dtype: str) -> None:
        self.raw, self.dtype, self.shape = raw, dtype, raw.shape[:-1]

    @property
    def __array_interface__(self) -> dict:
        return {**self.raw.__array_interface__, "shape": self.shape, "strides": self.raw.strides[:-1]}


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Stretches [lo, hi) of True in a vector."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(lo), int(hi)) for lo, hi in zip(edges[::2], edges[1::2])]


def boxes_of(tensor: dict, ranks: int, rank: int) -> list[tuple[tuple[int, int], ...]]:
    """What a rank holds, by the independent reading of the file; only boxes that are not empty."""
    if "boxes" in tensor:
        found = [tuple((lo, hi) for lo, hi in box) for box in tensor["boxes"][rank]]
        return [box for box in found if all(lo < hi for lo, hi in box)]
    mask = check_plan.held(tensor, ranks, rank)
    if not mask.any():
        return []
    # Placements hold a product of index sets: one projection per dimension says it all.
    axes = [runs(mask.any(axis=tuple(a for a in range(mask.ndim) if a != d))) for d in range(mask.ndim)]
    return list(itertools.product(*axes))


def contents(name: str, shape: tuple[int, ...], item: int, version: int, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    """The bytes [*box extents, item] of a box at a version: of the element's place, the name and the version alone."""
    index = np.zeros((), dtype=np.uint64)
    for (lo, hi), size in zip(box, shape):
        index = index[..., None] * np.uint64(size) + np.arange(lo, hi, dtype=np.uint64)
    with np.errstate(over="ignore"):  # a scalar that wraps warns, an array does not
        mixed = (index + np.uint64(zlib.crc32(name.encode()) * 1000003 + version)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return np.ascontiguousarray(mixed[..., None]).view(np.uint8)[..., :item]


def allocate(arena: tensorbus.Arena, extents: tuple[int, ...], item: int, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """(raw [*extents, item] in the arena, the whole stretch it lies in, all GUARD)."""
    gaps = [rng.choice([0, 0, 1, 3]) for _ in extents]
    order = list(range(len(extents)))
    if rng.random() < 0.4:
        rng.shuffle(order)
    stretch = arena.array([*(extents[d] + gaps[d] for d in order), item], "uint8")
    stretch[...] = GUARD
    inner = stretch[tuple(slice(0, extents[d]) for d in order)]
    back = [order.index(d) for d in range(len(extents))]
    return inner.transpose(*back, len(extents)), stretch


def held_somewhere(layout: dict) -> set[str]:
    """Tensors of which some rank holds something."""
    ranks = layout["ranks"]
    return {t["name"] for t in layout["tensors"] if any(boxes_of(t, ranks, rank) for rank in range(ranks))}


def held_whole(layout: dict) -> set[str]:
    """Tensors that the ranks hold all of, together."""
    whole = set()
    for tensor in layout["tensors"]:
        covered = np.zeros(tensor["shape"], bool)
        for rank in range(layout["ranks"]):
            for box in boxes_of(tensor, layout["ranks"], rank):
                covered[tuple(slice(lo, hi) for lo, hi in box)] = True
        if covered.all():
            whole.add(tensor["name"])
    return whole


def hold(layout: dict, names: set[str], rank: int, rng: random.Random) -> tuple[tensorbus.Arena, Holding, list]:
    """The rank's memory, what it tells the bus, and (name, shape, item, box, raw, stretch) of each box."""
    arena, holding, held = tensorbus.Arena(64 << 20), Holding(), []
    for tensor in layout["tensors"]:
        name, shape, dtype = tensor["name"], tuple(tensor["shape"]), tensor["dtype"]
        if name not in names:
            continue
        item = DTYPES[dtype][1]
        holding.declare(name, dtype, shape)
        for box in boxes_of(tensor, layout["ranks"], rank):
            raw, stretch = allocate(arena, tuple(hi - lo for lo, hi in box), item, rng)
            holding.add(name, Memory(raw, dtype), shape=shape, box=box)
            held.append((name, shape, item, box, raw, stretch))
    return arena, holding, held


def check(held: list, version: int) -> int:
    """Compares every byte. Bytes compared; SystemExit naming the first that is wrong."""
    count = 0
    for name, shape, item, box, raw, stretch in held:
        wanted = contents(name, shape, item, version, box)
        if not np.array_equal(raw, wanted):
            place = np.argwhere(raw != wanted)[0].tolist()
            sys.exit(f"version {version}: tensor {name} box {box} differs at {place}")
        if int((stretch == GUARD).sum()) < stretch.size - raw.size:
            sys.exit(f"version {version}: bytes beside tensor {name} box {box} were written")
        count += raw.size
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layout", "peer", "role", "channel", "agent"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("--flip", default="shadow")
    parser.add_argument("--proof", default="readback")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    layout, peer = check_plan.load(options.layout), check_plan.load(options.peer)
    rng = random.Random(options.seed * 1000 + options.rank)
    names = held_somewhere(layout)
    arena, holding, held = hold(layout, names, options.rank, rng)
    with tensorbus.connect(options.channel, options.role, role=options.role, rank=options.rank, rank_count=layout["ranks"],
                           agent=options.agent, timeout_s=WAIT_S) as client:
        client.attach(arena)
        if options.role == "producer":
            client.register(holding, timeout_s=WAIT_S)
            for version in range(1, options.versions + 1):
                client.before_write(WAIT_S)
                for name, shape, item, box, raw, _ in held:
                    raw[...] = contents(name, shape, item, version, box)
                client.publish(version).wait(WAIT_S)
                client.wait_released(version, WAIT_S)
            return
        client.register(holding, flip=options.flip, proof=options.proof, timeout_s=WAIT_S,
                        leave_out=sorted(held_somewhere(peer) - held_whole(layout)))
        for version in range(1, options.versions + 1):
            outcome = client.update("next", timeout_s=WAIT_S).wait(WAIT_S + 5)
            if outcome.version != version:
                sys.exit(f"version {outcome.version} came where {version} was next")
            print(f"version {version}: {check(held, version)} bytes checked")


if __name__ == "__main__":
    main()
