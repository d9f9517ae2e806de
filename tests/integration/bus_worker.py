"""One rank of a job for test_bus.py: does what it reads from standard input, one JSON order a line, and says how it went.

usage: bus_worker.py ROLE RANK RANK_COUNT [REPLICA]
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import tensorbus

ROWS, COLUMNS = 12, 10


def value(version: int) -> np.ndarray:
    """The matrix of a version."""
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + 1000 * version


class Worker:
    """Holds rows of "m" as a producer, columns of it (kept transposed) as a consumer, and the vector "v" whole."""

    def __init__(self, role: str, rank: int, count: int, replica: int) -> None:
        self.role, self.rank, self.count = role, rank, count
        self.producer = role == "producer"
        self.bus = tensorbus.connect("policy", "trainer" if self.producer else "engine", role=role, rank=rank, rank_count=count,
                                     replica=replica)
        self.hooks: list[str] = []
        self.pending: dict[str, tensorbus.Request] = {}

    def register(self, private: bool = False, dtype: str = "float32", rows: int = ROWS, name: str = "m", mode: str | None = None,
                 hooks: bool = False, hang: float = 0.0, vector: bool = True, **options) -> dict:
        def make(*shape):
            return np.zeros(shape, dtype) if private else self.arena.array(shape, dtype)

        self.arena = tensorbus.Arena(1 << 20)
        if not private:
            self.bus.attach(self.arena)
        holding = tensorbus.Holding()
        if self.producer:
            lo, hi = self.rank * rows // self.count, (self.rank + 1) * rows // self.count
            self.part = (slice(lo, hi), slice(None))
            self.m = make(hi - lo, COLUMNS)
            holding.add(name, self.m, shape=(rows, COLUMNS), box=((lo, hi), (0, COLUMNS)))
        else:
            lo, hi = self.rank * COLUMNS // self.count, (self.rank + 1) * COLUMNS // self.count
            self.part = (slice(None), slice(lo, hi))
            self.m = make(hi - lo, rows).T
            holding.add(name, self.m, shape=(rows, COLUMNS), box=((0, rows), (lo, hi)))
        self.v = make(7)
        if vector:
            holding.add("v", self.v)
        if hang:
            self.bus.set_hook(lambda event: time.sleep(hang))
        if hooks:
            self.bus.set_hook(lambda event: self.hooks.append(event.kind))
        registered = self.bus.register(holding, private_mode=mode, **options)
        return {"mode": registered.mode, "why": registered.why, "epoch": registered.epoch, "latest": registered.latest_version}

    def write(self, version: int, fence: bool = True, timeout_s: float = 20.0) -> dict:
        if fence:
            self.bus.before_write(timeout_s)
        self.m[...] = value(version)[self.part]
        self.v[...] = version
        return {"blocked": self.bus.blocked_seconds}

    def publish(self, version: int, **options) -> None:
        self.bus.publish(version, **options).wait(timeout_s=20)

    def released(self, version: int, timeout_s: float = 20.0) -> None:
        self.bus.wait_released(version, timeout_s)

    def update(self, which: str | int = "latest", timeout_s: float = 20.0) -> dict:
        outcome = self.bus.update(which, timeout_s=timeout_s).wait(timeout_s=timeout_s + 5)
        return {"version": outcome.version, "bytes": outcome.bytes, "digest": outcome.digest}

    def holds(self, version: int) -> bool:
        return bool((self.m == value(version)[self.part]).all() and (self.v == version).all())

    def cancel(self) -> None:
        self.bus.cancel_update().wait(timeout_s=20)

    def reconnect(self, timeout_s: float = 20.0) -> None:
        self.bus.reconnect(timeout_s)

    def state(self) -> dict:
        return {"live": self.bus.live_version, "released": self.bus.released_version, "hooks": self.hooks}

    def serve(self) -> None:
        self.bus.start_service()

    def save(self, folder: str) -> None:
        np.savez(Path(folder, f"{self.rank}.npz"), m=self.m, v=self.v)

    def load(self, folder: str, count: int) -> None:
        parts = [np.load(Path(folder, f"{rank}.npz")) for rank in range(count)]
        self.m[...] = np.concatenate([part["m"] for part in parts])[self.part]
        self.v[...] = parts[0]["v"]

    def claim(self) -> int:
        return self.bus.claim().wait(timeout_s=20)


def main() -> None:
    role, rank, count, *rest = sys.argv[1:]
    worker = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if worker is None:
                worker = Worker(role, int(rank), int(count), int(rest[0]) if rest else 0)
            answer = {"ok": getattr(worker, order.pop("do"))(**order)}
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
            answer = {"error": type(error).__name__, "kinds": [k.__name__ for k in type(error).__mro__], "message": str(error),
                      "code": getattr(error, "code", ""), "reason": getattr(error, "reason", "")}
        print(json.dumps(answer), flush=True)
    if worker is not None:
        worker.bus.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
