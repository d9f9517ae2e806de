"""A daemon and an agent of this process's own, for notebooks, tests and jobs on one machine."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import BusConnectionError, DeadlineError, NotRunningError

ENVIRONMENT = "TENSORBUS_AGENT_SOCKET"

_STOP_SECONDS = 5.0


class Local:
    """What local() started. `agent` is the socket that connect() uses, `daemon` the address of tensorbusd."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agent = str(folder / "agent.sock")
        self.daemon = f"unix:{folder}/daemon.sock"
        self._owner = os.getpid()
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by program."""
        return {name: process.pid for name, process in self._processes}

    def log(self, program: str) -> str:
        """What `tensorbusd` or `tensorbus-agent` has written so far."""
        path = self.folder / f"{program}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _start(self, program: str, arguments: Sequence[str], listens: Path, deadline: float) -> None:
        with (self.folder / f"{program}.log").open("wb") as log:
            process = subprocess.Popen([find_program(program), *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       preexec_fn=_die_with_parent() if _in_main_thread() else None)
        self._processes.append((program, process))
        while not _accepts(listens):
            if process.poll() is not None:
                raise BusConnectionError(f"{program} ended at once with status {process.returncode}: "
                                         f"{self.log(program).strip()[-2000:]}", code="UNAVAILABLE", reason="not_running")
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{program} does not listen at {listens} in time", code="DEADLINE_EXCEEDED")
            time.sleep(0.005)

    def _stop(self) -> None:
        # A forked child that ends in the ordinary way comes here too: what runs is not its own.
        if os.getpid() != self._owner:
            return
        for _, process in reversed(self._processes):
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for _, process in reversed(self._processes):
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def find_program(name: str) -> str:
    """Path of one of our programs: $TENSORBUS_BIN, beside this Python, beside the build's package, then $PATH."""
    build = Path(__file__).parent.parent.parent / "bin"
    for folder in (os.environ.get("TENSORBUS_BIN"), Path(sys.executable).parent, build):
        if folder and os.access(Path(folder) / name, os.X_OK):
            return str(Path(folder) / name)
    found = shutil.which(name)
    if found is None:
        raise NotRunningError(f"no program {name} beside this Python or on PATH; scripts/setup of a checkout and pip both "
                              "install it, or set TENSORBUS_BIN to the folder that has it", code="UNAVAILABLE",
                              reason="not_running")
    return found


@contextlib.contextmanager
def local(*, agent_options: Sequence[str] = (), daemon_options: Sequence[str] = (), timeout_s: float = 15.0) -> Iterator[Local]:
    """Starts tensorbusd and tensorbus-agent in a folder of their own and stops them at the end.

    Inside, connect() finds the agent in this process and in processes started from it (through $TENSORBUS_AGENT_SOCKET).

    Raises NotRunningError when the programs are missing, BusConnectionError with their output when one ends at once.
    """
    # Short, since a socket's path has at most 107 bytes.
    running = Local(Path(tempfile.mkdtemp(prefix="tensorbus-")))
    stop = atexit.register(running._stop)
    before = os.environ.get(ENVIRONMENT)
    try:
        deadline = time.monotonic() + timeout_s
        running._start("tensorbusd", ["--listen", running.daemon, *daemon_options], running.folder / "daemon.sock", deadline)
        running._start("tensorbus-agent", ["--daemon", running.daemon, "--socket", running.agent, *agent_options],
                       Path(running.agent), deadline)
        os.environ[ENVIRONMENT] = running.agent
        yield running
    finally:
        if before is None:
            os.environ.pop(ENVIRONMENT, None)
        else:
            os.environ[ENVIRONMENT] = before
        running._stop()
        atexit.unregister(stop)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _in_main_thread() -> bool:
    # The kernel's signal comes when the *thread* that started the child ends.
    return threading.current_thread() is threading.main_thread()


def _die_with_parent():  # noqa: ANN202
    # Loaded before fork(): afterwards the child may do next to nothing.
    prctl = ctypes.CDLL(None).prctl
    pr_set_pdeathsig = 1

    def apply() -> None:
        prctl(pr_set_pdeathsig, signal.SIGTERM)

    return apply
