"""The daemon and the agent of a run: started on sockets in the run's own folder, so that no other bus is touched."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from tensorbus.local import find_program

from .processes import ProcessFailed, Processes

START_TIMEOUT_S = 30.0


def wait_for_socket(processes: Processes, path: Path, who: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Returns when something accepts connections at a UNIX socket. ProcessFailed when a process ends first, or too late."""
    deadline = time.monotonic() + timeout_s
    while True:
        list(processes.poll(timeout_s=0.02))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ProcessFailed(f"{who} does not listen at {path} after {timeout_s:.0f} s: {error.strerror}") from None


def start_services(processes: Processes, folder: Path) -> str:
    """Starts tensorbusd and tensorbus-agent; answers the agent's socket path once both listen."""
    daemon_socket, agent_socket = folder / "daemon.sock", folder / "agent.sock"
    processes.start("tensorbusd", [find_program("tensorbusd"), "--listen", f"unix:{daemon_socket}"])
    wait_for_socket(processes, daemon_socket, "tensorbusd")
    processes.start("tensorbus-agent", [find_program("tensorbus-agent"), "--daemon", f"unix:{daemon_socket}", "--socket", str(agent_socket),
                                          "--data-listen", "off"])
    wait_for_socket(processes, agent_socket, "tensorbus-agent")
    return str(agent_socket)
