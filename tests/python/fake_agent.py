"""An agent played by a test: the frames of docs/wire.md with struct, nothing of our own library."""

from __future__ import annotations

import array
import mmap
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

HELLO, ATTACH, REGISTER, PUBLISH, RELEASE, UPDATE, CANCEL, HOOK_DONE, BUCKET_DONE, CLAIM, GOODBYE, PING = range(1, 13)
WELCOME, REPLY, REGISTERED, RELEASED, FENCE, FLIP_BEGIN, LIVE, UPDATED, PACK, UNPACK, BUCKET, CLAIMED, PONG, BROKEN_OFF = range(64, 78)

PROTOCOL = 4
SECONDS = 10.0


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<I", len(raw)) + raw


def status(code: int = 0, reason: int = 0, message: str = "") -> bytes:
    return struct.pack("<BBq", code, reason, 0) + text(message)


class FakeAgent:
    """Listens at `path`; a test plays its part with accept(), take() and send()."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "agent.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(8)
        self._listener.settimeout(SECONDS)
        self._socket: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []
        self.registrations: list[bytes] = []
        self.segments: list[tuple[bool, int, int]] = []
        self.page: mmap.mmap | None = None

    def close(self) -> None:
        for thread in self._threads:
            thread.join(SECONDS)
        self.drop()
        self._listener.close()
        if self.failures:
            raise self.failures[0]

    def forgive(self) -> None:
        """The worker left in the middle of the agent's part, and that is right."""
        for thread in self._threads:
            thread.join(SECONDS)
        self.failures.clear()

    def drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def play(self, script: Callable[[], None]) -> None:
        """Runs the agent's part in a thread; what it raises fails the test at close()."""

        def run() -> None:
            try:
                script()
            except BaseException as error:  # noqa: BLE001
                self.failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)

    def accept(self) -> None:
        self._socket, _ = self._listener.accept()
        self._socket.settimeout(SECONDS)
        kind, request, _, fds = self.take()
        assert kind == HELLO
        self.page = mmap.mmap(fds[0], 4096)
        self.send(WELCOME, request, struct.pack("<I", PROTOCOL) + status() + text("fake") + struct.pack("<Q", 0))

    def register(self, mode: int = 1) -> None:
        """Takes segments and a registration, and answers."""
        self.segments.clear()
        while True:
            kind, request, body, _ = self.take()
            if kind == ATTACH:
                _, mapped, size, address = struct.unpack("<IBQQ", body)
                self.segments.append((bool(mapped), size, address))
                self.send(REPLY, request, status())
                continue
            assert kind == REGISTER
            self.registrations.append(body)
            self.send(REGISTERED, request, status() + struct.pack("<B", mode) + text("because") +
                      struct.pack("<dQQdd", 1.5, 2, 8, 0.1, 0.2))
            return

    def accept_and_register(self) -> None:
        self.accept()
        self.register()

    def take(self) -> tuple[int, int, bytes, list[int]]:
        """Type, request, body and descriptors of the next frame."""
        header, fds = b"", array.array("i")
        while len(header) < 16:
            data, ancillary, _, _ = self._socket.recvmsg(16 - len(header), socket.CMSG_SPACE(64))
            if not data:
                raise EOFError("the worker closed")
            header += data
            for _, _, raw in ancillary:
                fds.frombytes(raw)
        size, kind, count, request = struct.unpack("<IHHQ", header)
        assert count == len(fds)
        body = b""
        while len(body) < size:
            body += self._socket.recv(size - len(body))
        return kind, request, body, list(fds)

    def expect(self, wanted: int) -> tuple[int, bytes]:
        kind, request, body, _ = self.take()
        assert kind == wanted, (kind, wanted)
        return request, body

    def send(self, kind: int, request: int, body: bytes = b"") -> None:
        self._socket.sendall(struct.pack("<IHHQ", len(body), kind, 0, request) + body)

    def updated(self, request: int, version: int, answer: bytes | None = None) -> None:
        self.send(UPDATED, request, (answer or status()) + struct.pack("<QQQddQQQ", version, 7, 64, 0.5, 0.25, 1, 2, 64))

    def hook(self, kind: int, version: int) -> bytes:
        """Asks for a hook; the worker's answer."""
        self.send(kind, 99, struct.pack("<QQQ", 7, version, 1000))
        request, body = self.expect(HOOK_DONE)
        assert request == 99
        return body

    def release(self, version: int) -> None:
        struct.pack_into("<Q", self.page, 16, version)

    def live(self, version: int) -> None:
        struct.pack_into("<Q", self.page, 24, version)

    @property
    def write_count(self) -> int:
        return struct.unpack_from("<Q", self.page, 8)[0]
