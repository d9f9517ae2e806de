"""What rank processes tell the launcher: one JSON object per line on a pipe of its own.

Standard output and error are left to logs, since libraries write there as they please.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Event:
    """`kind` with its fields. `at` is CLOCK_MONOTONIC in seconds, which all processes of a host share."""

    job: str
    rank: int
    kind: str
    at: float
    fields: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class Emitter:
    """Writes the events of one process. Thread-compatible. Without a descriptor it stays silent."""

    def __init__(self, fd: int | None, job: str, rank: int) -> None:
        self._fd, self._job, self._rank = fd, job, rank

    def __call__(self, kind: str, *, at: float | None = None, **fields: Any) -> None:
        """Sends one event. A launcher that is gone is no error: the process is about to be ended."""
        if self._fd is None:
            return
        line = json.dumps({"job": self._job, "rank": self._rank, "kind": kind,
                           "at": time.monotonic() if at is None else at, "fields": fields}) + "\n"
        data = line.encode()
        if len(data) > MAX_LINE_BYTES:
            raise ValueError(f"event {kind} is {len(data)} bytes")
        try:
            while data:
                data = data[os.write(self._fd, data):]
        except BrokenPipeError:
            self._fd = None


class LineReader:
    """Turns what comes out of a pipe into events; holds a half line until its rest has come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """ValueError on a line that is not an event, or too long."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError("an event line without end")
        return [Event(**json.loads(line)) for line in lines]
