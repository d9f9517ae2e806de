"""Starting the processes of a run, hearing from them, and ending exactly those."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .events import Event, LineReader

_PR_SET_PDEATHSIG = 1
STOP_GRACE_S = 10.0
# Loaded before any fork: a child between fork and exec must not load libraries.
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """This process gets SIGTERM when its parent ends, however that happens."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class ProcessFailed(Exception):
    """A process ended that should have gone on, or with a failure. The text has the end of its log."""


@dataclass
class Child:
    """One started process and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    reader: LineReader = field(default_factory=LineReader)
    events_fd: int | None = None
    finished: bool = False

    def log_end(self, lines: int = 15) -> str:
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


class Processes:
    """The processes of one run. Confined to one thread. Use as a context manager: leaving it ends what still runs."""

    def __init__(self, log_folder: Path) -> None:
        self._logs = log_folder
        self._logs.mkdir(parents=True, exist_ok=True)
        self._selector = selectors.DefaultSelector()
        self.children: list[Child] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._selector.close()

    def start(self, name: str, command: Sequence[str | Path], *, events: bool = False, env: dict[str, str] | None = None) -> Child:
        """Starts a process in a group of its own, output to `NAME.log`. With `events` it gets `--events-fd N` appended."""
        words = [str(word) for word in command]
        read_fd = write_fd = None
        if events:
            read_fd, write_fd = os.pipe()
            words += ["--events-fd", str(write_fd)]
        log = self._logs / f"{name.replace('/', '-')}.log"
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})},
                    pass_fds=() if write_fd is None else (write_fd,), start_new_session=True, preexec_fn=end_with_parent)
        except OSError as error:
            if read_fd is not None:
                os.close(read_fd)
            raise ProcessFailed(f"{name}: cannot start {words[0]}: {error.strerror}") from error
        finally:
            if write_fd is not None:
                os.close(write_fd)
        child = Child(name, process, log, events_fd=read_fd)
        self.children.append(child)
        if read_fd is not None:
            os.set_blocking(read_fd, False)
            self._selector.register(read_fd, selectors.EVENT_READ, child)
        return child

    def poll(self, timeout_s: float) -> Iterator[Event]:
        """Events that have come, waiting at most `timeout_s` for the first.

        ProcessFailed when a process has ended with a failure, or a service ended at all.
        """
        for key, _ in self._selector.select(timeout_s):
            child: Child = key.data
            data = os.read(key.fd, 1 << 16)
            if data:
                yield from child.reader.feed(data)
            else:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                child.events_fd = None
        self._check()

    def _check(self) -> None:
        for child in self.children:
            if child.events_fd is not None or child.finished:
                continue  # first hear what it had to say
            status = child.process.poll()
            if status is None:
                continue
            child.finished = True
            service = not child.name.startswith(("trainer", "rollout"))
            if status or service:
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                raise ProcessFailed(f"{child.name} {how}\n{child.log_end()}")

    def wait_all(self, prefix: str, timeout_s: float) -> None:
        """Waits until the processes whose names begin so have ended well."""
        deadline = time.monotonic() + timeout_s
        for child in self.children:
            if child.name.startswith(prefix):
                try:
                    status = child.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise ProcessFailed(f"{child.name} did not end within {timeout_s:.0f} s\n{child.log_end()}") from None
                child.finished = True
                if status:
                    raise ProcessFailed(f"{child.name} ended with status {status}\n{child.log_end()}")

    def stop(self) -> None:
        """Ends what still runs, last started first: SIGTERM, then SIGKILL after a grace. Never waits without end."""
        running = [child for child in reversed(self.children) if child.process.poll() is None]
        for child in running:
            _signal_group(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        for child in running:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_group(child, signal.SIGKILL)
                child.process.wait()
        for child in self.children:
            if child.events_fd is not None:
                self._selector.unregister(child.events_fd)
                os.close(child.events_fd)
                child.events_fd = None


def _signal_group(child: Child, number: signal.Signals) -> None:
    # Its session is its own (start_new_session), so the group holds it and its children only.
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        pass
