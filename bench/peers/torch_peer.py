"""One process of a PyTorch peer of `tensorbusctl bench m2n`: what people do today, over gloo.

Started by tensorbusctl, once per rank: source ranks first, then target ranks of replica 0, 1, …. It is told what to do on
a SOCK_SEQPACKET socket (tensorbus/cli/bench_protocol.h has the messages) and starts each run at the shared go flag.

gather-broadcast  every tensor is gathered whole on the first source rank, broadcast to all targets, and each cuts its part
gloo-p2p          each target receives exactly its slices, one message per slice
gloo-bucket       the same slices, packed into one message per pair of ranks
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

COMMAND = struct.Struct("<IIQQQ")
REPLY = struct.Struct("<IIQQQQQ4dII")  # and then its text
HELLO, WRITE, RUN, VERIFY, QUIT = 1, 2, 6, 7, 8
SLOT_BYTES = 64
GO_TIMEOUT_S = 120.0  # whoever measures ends its peers long before

Box = tuple[tuple[int, int], ...]

ITEM_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1, "f8e5m2": 1, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1,
              "bool": 1, "f4e2m1x2": 1}
UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def pattern_key(version: int, name: str) -> int:
    """The key of the closed form; the same as PatternKey() of bench_pattern.cc."""
    mask = (1 << 64) - 1
    x = 0xCBF29CE484222325
    for byte in name.encode():
        x = ((x ^ byte) * 0x100000001B3) & mask
    x = (x + version * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 16) & 0xFFFFFFFF


@dataclass
class Tensor:
    name: str
    item_bytes: int
    shape: tuple[int, ...]
    boxes: list[list[Box]]  # by rank

    def values(self, box: Box, version: int) -> np.ndarray:
        """What the elements of a box are in a version, as unsigned integers."""
        index = np.zeros([1] * len(self.shape), dtype=np.uint32)
        for d, (lo, hi) in enumerate(box):
            axis = np.arange(lo, hi, dtype=np.uint32).reshape([-1 if i == d else 1 for i in range(len(box))])
            index = index * np.uint32(self.shape[d] & 0xFFFFFFFF) + axis
        h = index * np.uint32(0x9E3779B1) + np.uint32(pattern_key(version, self.name))
        if self.item_bytes == 8:
            return (h.astype(np.uint64) << np.uint64(32)) | (~h).astype(np.uint64)
        return (h >> np.uint32(32 - 8 * self.item_bytes)).astype(UINT[self.item_bytes])


@dataclass
class Job:
    ranks: int
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: str) -> Job:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        tensors = {}
        for entry in data["tensors"]:
            boxes = [[tuple((lo, hi) for lo, hi in box) for box in rank] for rank in entry["boxes"]]
            tensors[entry["name"]] = Tensor(entry["name"], ITEM_BYTES[entry["dtype"]], tuple(entry["shape"]), boxes)
        return cls(data["ranks"], tensors)


def intersect(a: Box, b: Box) -> Box | None:
    box = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return None if any(lo >= hi for lo, hi in box) else box


def contains(outer: Box, inner: Box) -> bool:
    return all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner))


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(lo - o[0], hi - o[0]) for (lo, hi), o in zip(box, outer))


def as_torch(array: np.ndarray) -> torch.Tensor:
    """The bytes of a contiguous array; gloo does not know every dtype."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


@dataclass
class Slice:
    """A box that goes from one source rank to one target rank."""

    tensor: Tensor
    box: Box
    source: int
    source_box: Box
    target_box: Box


def slices_of(source: Job, target: Job, rank: int) -> list[Slice]:
    """What one target rank needs: each part from the lowest source rank that holds it."""
    result = []
    for name, wanted in target.tensors.items():
        for target_box in wanted.boxes[rank]:
            taken: list[Box] = []
            for holder, boxes in enumerate(source.tensors[name].boxes):
                for source_box in boxes:
                    box = intersect(target_box, source_box)
                    if box is None or any(contains(other, box) for other in taken):
                        continue
                    if any(intersect(other, box) for other in taken):
                        raise SystemExit(f"tensor {name}: holders that overlap in part are beyond this peer")
                    taken.append(box)
                    result.append(Slice(wanted, box, holder, source_box, target_box))
    return result


@dataclass
class Rank:
    """One process: its place in the world, its memory and how it moves."""

    kind: str
    process: int
    source: Job
    target: Job
    replicas: int
    store: str
    held: dict[tuple[str, Box], np.ndarray] = field(default_factory=dict)
    plan: list[tuple[int, list[Slice]]] = field(default_factory=list)  # peer process, what goes there or comes from there

    @property
    def world(self) -> int:
        return self.source.ranks + self.target.ranks * self.replicas

    @property
    def is_source(self) -> bool:
        return self.process < self.source.ranks

    @property
    def rank(self) -> int:
        return self.process if self.is_source else (self.process - self.source.ranks) % self.target.ranks

    def set_up(self) -> None:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(self.store, self.world)
        dist.init_process_group("gloo", store=store, rank=self.process, world_size=self.world)
        job = self.source if self.is_source else self.target
        for tensor in job.tensors.values():
            for box in tensor.boxes[self.rank]:
                self.held[tensor.name, box] = tensor.values(box, 0).copy()
        if self.kind == "gather-broadcast":
            self.set_up_gather()
        else:
            self.set_up_slices()
        dist.barrier()

    def set_up_slices(self) -> None:
        by_peer: dict[int, list[Slice]] = {}
        for process in range(self.source.ranks, self.world):
            if not self.is_source and process != self.process:
                continue
            for part in slices_of(self.source, self.target, (process - self.source.ranks) % self.target.ranks):
                if self.is_source and part.source != self.rank:
                    continue
                by_peer.setdefault(process if self.is_source else part.source, []).append(part)
        self.plan = sorted(by_peer.items())
        self.buckets = {peer: np.empty(sum(self.size(part) for part in parts), dtype=np.uint8) for peer, parts in self.plan}

    def set_up_gather(self) -> None:
        self.whole = {}
        for tensor in self.source.tensors.values():
            if self.process == 0 or not self.is_source:
                self.whole[tensor.name] = np.zeros(tensor.shape, dtype=UINT[tensor.item_bytes])
        targets = list(range(self.source.ranks, self.world))
        self.group = dist.new_group([0, *targets])

    @staticmethod
    def size(part: Slice) -> int:
        return part.tensor.item_bytes * int(np.prod([hi - lo for lo, hi in part.box], dtype=np.int64))

    def write(self, version: int) -> None:
        for (name, box), array in self.held.items():
            array[...] = self.source.tensors[name].values(box, version)

    def verify(self, version: int) -> str:
        for (name, box), array in self.held.items():
            if not np.array_equal(array, self.target.tensors[name].values(box, version)):
                return f"version {version}: tensor '{name}' differs"
        return ""

    def run(self) -> None:
        if self.kind == "gather-broadcast":
            self.run_gather()
        elif self.kind == "gloo-p2p":
            self.run_p2p()
        else:
            self.run_bucket()

    def view(self, part: Slice) -> np.ndarray:
        mine = part.source_box if self.is_source else part.target_box
        return self.held[part.tensor.name, mine][within(part.box, mine)]

    def run_p2p(self) -> None:
        pending = []
        for peer, parts in self.plan:
            for part in parts:
                view = self.view(part)
                if self.is_source:
                    pending.append((dist.isend(as_torch(np.ascontiguousarray(view)), peer), None, None))
                else:
                    landing = view if view.flags.c_contiguous else np.empty(view.shape, dtype=view.dtype)
                    pending.append((dist.irecv(as_torch(landing), peer), view, landing))
        for work, view, landing in pending:
            work.wait()
            if view is not None and landing is not view:
                view[...] = landing

    def run_bucket(self) -> None:
        pending = []
        for peer, parts in self.plan:
            bucket = self.buckets[peer]
            if self.is_source:
                at = 0
                for part in parts:
                    size = self.size(part)
                    view = self.view(part)
                    bucket[at:at + size].view(view.dtype).reshape(view.shape)[...] = view
                    at += size
                pending.append((peer, dist.isend(torch.from_numpy(bucket), peer)))
            else:
                pending.append((peer, dist.irecv(torch.from_numpy(bucket), peer)))
        for (peer, work), (_, parts) in zip(pending, self.plan):
            work.wait()
            if self.is_source:
                continue
            at = 0
            for part in parts:
                size = self.size(part)
                view = self.view(part)
                view[...] = self.buckets[peer][at:at + size].view(view.dtype).reshape(view.shape)
                at += size

    def run_gather(self) -> None:
        for name, tensor in self.source.tensors.items():
            if self.process == 0:
                whole = self.whole[name]
                for holder, boxes in enumerate(tensor.boxes):
                    for box in boxes:
                        part = whole[within(box, tuple((0, n) for n in tensor.shape))]
                        if holder == 0:
                            part[...] = self.held[name, box]
                            continue
                        landing = part if part.flags.c_contiguous else np.empty(part.shape, dtype=part.dtype)
                        dist.recv(as_torch(landing), holder)
                        if landing is not part:
                            part[...] = landing
            elif self.is_source:
                for box in tensor.boxes[self.rank]:
                    dist.send(as_torch(self.held[name, box]), 0)
                continue
            dist.broadcast(as_torch(self.whole[name]), 0, group=self.group)
            if not self.is_source and name in self.target.tensors:
                for box in self.target.tensors[name].boxes[self.rank]:
                    self.held[name, box][...] = self.whole[name][within(box, tuple((0, n) for n in tensor.shape))]


def await_go(page: mmap.mmap, slot: int, go: int) -> None:
    """Says that this process stands ready and waits for the go flag. Whoever measures ends us when it
    ends; a flag that never comes ends us as well."""
    deadline = time.monotonic() + GO_TIMEOUT_S
    struct.pack_into("<I", page, SLOT_BYTES * (slot + 1), go)
    while struct.unpack_from("<I", page, 0)[0] != go:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody said go within {GO_TIMEOUT_S} s")
        os.sched_yield()


def serve(rank: Rank, channel: socket.socket, page: mmap.mmap) -> int:
    while True:
        message = channel.recv(COMMAND.size)
        if len(message) != COMMAND.size:
            return 1
        command, count, version, _, _ = COMMAND.unpack(message)
        if command == QUIT:
            return 0
        begin = end = 0
        problem = ""
        cpu = time.process_time_ns()
        if command == HELLO:
            rank.set_up()
        elif command == WRITE:
            rank.write(version)
        elif command == VERIFY:
            problem = rank.verify(version)
        elif command == RUN:
            await_go(page, rank.process, count)
            begin = time.monotonic_ns()
            rank.run()
            end = time.monotonic_ns()
        cpu = time.process_time_ns() - cpu
        text = problem.encode()
        channel.send(REPLY.pack(15 if problem else 0, command, begin, end, cpu, 0, 0, 0.0, 0.0, 0.0, 0.0, 0, len(text)) + text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["gather-broadcast", "gloo-p2p", "gloo-bucket"])
    for flag in ("source", "target", "store"):
        parser.add_argument(f"--{flag}", required=True)
    for flag in ("replicas", "process", "go", "fd"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    options = parser.parse_args()
    rank = Rank(options.kind, options.process, Job.read(options.source), Job.read(options.target), options.replicas, options.store)
    page = mmap.mmap(options.go, SLOT_BYTES * 256)
    status = serve(rank, socket.socket(fileno=options.fd), page)
    # Gloo's threads need no ceremony; whoever measured has all it wants.
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
