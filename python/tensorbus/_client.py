"""One rank's connection to the agent of its host."""

from __future__ import annotations

import asyncio
import bisect
import math
import operator
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from . import _core
from .errors import DeadlineError, Error, InvalidError
from .views import DTYPES, Holding

# While a call waits, Python's signals (Ctrl-C) are looked at this often.
_SIGNAL_SECONDS = 0.1
# Before a wait gives up, the agent is asked what keeps it; that long before, since it may have to ask the daemon.
_EXPLAIN_SECONDS = 0.5
# Longer than an agent gives itself for anything that carries no time of its own.
_REQUEST_SECONDS = 900.0
# After a request's own time is over, for the agent to say so.
_ANSWER_SECONDS = 5.0

_ROLES = {"producer": 1, "consumer": 2}
_FLIPS = {"in_place": 1, "shadow": 2}
_PROOFS = {"off": 1, "stream": 2, "readback": 3, "memory": 4}
_MEMORY = {None: 0, "cma": 2, "bucket": 3}
_MEMORY_NAMES = {1: "mapped", 2: "cma", 3: "bucket"}
_POLICIES = {"wait": 1, "skip": 2, "snapshot": 3}
# What the wire takes of a channel's, a job's and a tensor's name.
_MAX_NAME_BYTES = 1024
_HOOKS = {0: "fence", 1: "flip_begin", 2: "live"}


def _choose(table: dict[Any, int], value: Any, what: str) -> int:
    if not isinstance(value, (str, type(None))) or value not in table:
        known = ", ".join(repr(k) for k in table)
        raise InvalidError(f"{what} {value!r}; known are {known}", code="INVALID_ARGUMENT")
    return table[value]


def _seconds(value: Any) -> float:
    """A time to wait; none below zero. NaN would wait forever: it is less than nothing."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidError(f"a timeout of {value!r}: a number of seconds is needed", code="INVALID_ARGUMENT")
    return max(seconds, 0.0)


def _integer(value: Any, what: str, bits: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << bits:
        raise InvalidError(f"{what} {value!r}: a whole number from 0 to {(1 << bits) - 1} is needed", code="INVALID_ARGUMENT")
    return number


def _name(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidError(f"{what} {value!r}: a text is needed", code="INVALID_ARGUMENT")
    try:
        length = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidError(f"{what} {value!r} is no valid Unicode: {error}", code="INVALID_ARGUMENT") from None
    if not 1 <= length <= _MAX_NAME_BYTES:
        raise InvalidError(f"{what} {value[:40]!r} has {length} bytes; 1 to {_MAX_NAME_BYTES} are supported", code="INVALID_ARGUMENT")
    return value


@dataclass(frozen=True)
class Registered:
    """How the agent reaches this rank's memory, and why so. `mode` is mapped, cma or bucket.

    `latest_version` is the newest version of the channel, 0 for none; of a trainer that began anew the newest before it did,
    the same for all its ranks. The next to publish is above it.
    """

    mode: str
    why: str
    expected_gb_per_s: float
    epoch: int
    latest_version: int
    register_seconds: float
    prefault_seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a request ended. Which fields mean something depends on what was asked.

    `digest` is the additive 128-bit sum of what arrived at this rank.
    """

    version: int
    session: int
    bytes: int
    seconds: float
    copy_seconds: float
    digest: int


@dataclass(frozen=True)
class HookEvent:
    """`kind` is fence (stop using the weights), flip_begin (stop at a step edge) or live (go on with the new version)."""

    kind: str
    session: int
    version: int
    timeout_s: float


Hook = Callable[[HookEvent], None]


class Arena:
    """Shared memory that the agent maps, for the tensors of one rank. Lives as long as anything that uses it."""

    def __init__(self, bytes: int) -> None:
        """Makes `bytes` of zeroed memory. Raises OutOfMemoryError."""
        self._core = _core.Arena(_integer(bytes, "arena bytes", 64))

    @property
    def address(self) -> int:
        return self._core.address

    @property
    def size(self) -> int:
        return self._core.size

    @property
    def used(self) -> int:
        return self._core.used

    @property
    def fd(self) -> int:
        """Descriptor of the memory; borrowed."""
        return self._core.fd

    def allocate(self, bytes: int, alignment: int = 64) -> memoryview:
        """`bytes` that nobody has yet, as a writable buffer that keeps the arena alive. Never given back."""
        count = _integer(bytes, "bytes", 64)
        offset = self._core.allocate(count, _integer(alignment, "alignment", 64))
        return memoryview(self._core)[offset:offset + count]

    def array(self, shape: Iterable[int], dtype: Any = "float32") -> Any:
        """A zeroed NumPy array in the arena."""
        import numpy

        kind = numpy.dtype(dtype)
        shape = tuple(_integer(n, "dimension", 63) for n in shape)
        count = 1
        for n in shape:
            count *= n
        # frombuffer() refuses an empty buffer.
        if count == 0:
            return numpy.empty(shape, kind)
        return numpy.frombuffer(self.allocate(count * kind.itemsize), kind).reshape(shape)


class Request:
    """Something asked of the agent. Wait for it, or `await` it; dropping it gives up the answer, not the request."""

    def __init__(self, client: Client, core: _core.Request, make: Callable[[dict[str, Any]], Any],
                 seconds: float = _REQUEST_SECONDS) -> None:
        self._client = client
        self._seconds = seconds
        self._core = core
        self._make = make
        self._ended: tuple[Any, BaseException | None] | None = None
        self._turn = threading.Lock()  # whoever gets the outcome keeps it for all that wait

    def done(self) -> bool:
        """Whether wait() would return at once. Reads what the agent has sent so far."""
        if self._ended is None and not self._core.done():
            self._client._poll()
        return self._ended is not None or self._core.done()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Returns how it ended; may be called again. Raises what it failed with, or DeadlineError.

        Without `timeout_s` it waits until the request's own time is over, which ends it.
        After a DeadlineError of this call itself (`done()` is false) the request goes on; the error says what it waits for.
        """
        timeout_s = self._seconds if timeout_s is None else _seconds(timeout_s)
        deadline = time.monotonic() + timeout_s
        explain_at = deadline - min(_EXPLAIN_SECONDS, timeout_s / 2)
        while self._ended is None:
            left = deadline - time.monotonic()
            if explain_at is not None and time.monotonic() >= explain_at:
                explain_at = None
                if left > 0:
                    self._core.explain()
            with self._turn:
                if self._ended is None:
                    self._wait_slice(left)
        value, failure = self._ended
        if failure is not None:
            raise failure
        return value

    def _wait_slice(self, left: float) -> None:
        try:
            self._ended = self._make(self._core.wait(min(max(left, 0.0), _SIGNAL_SECONDS))), None
        except Error as error:
            if self._core.taken:
                self._ended = None, error if isinstance(error, DeadlineError) else self._client._explain(error)
            # Otherwise only this slice is over. The answer may have come since: the next one has it.
            elif not isinstance(error, DeadlineError) or (left <= 0 and not self._core.done()):
                raise

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            yield from self._client._pump().add(self).__await__()
        return self.wait(0)


class _Pump:
    """Wakes the futures of one event loop when their requests end."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._fd = client._core.poll_fd()
        self._waiting: dict[Request, asyncio.Future[None]] = {}

    def add(self, request: Request) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        if not self._waiting:
            self._loop.add_reader(self._fd, self._ready)
        self._waiting[request] = future
        self._loop.call_soon(self._ready)
        return future

    def stop(self) -> None:
        """Lets go of the descriptor and wakes everybody; from the loop's own thread when it runs."""
        if self._loop.is_closed():
            return
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._loop.remove_reader(self._fd)
        for future in waiting.values():
            if not future.done():
                future.set_result(None)

    def _ready(self) -> None:
        self._client._poll()
        for request, future in list(self._waiting.items()):
            if future.cancelled() or request.done():
                del self._waiting[request]
                if not future.done():
                    future.set_result(None)
        if not self._waiting:
            self._loop.remove_reader(self._fd)


class Client:
    """One rank's connection to the agent of its host. Use connect().

    Hooks run and buckets are packed in threads that are in a call that waits, in the event loop while something is
    awaited, or in the thread of start_service(). Thread-safe, except close(). Not to be used after fork().
    """

    def __init__(self, core: _core.Client, role: str) -> None:
        self._core = core
        self._role = role
        self._arenas: list[Arena] = []
        self._holding: Holding | None = None
        self._hook_error: BaseException | None = None
        self._pumps: dict[asyncio.AbstractEventLoop, _Pump] = {}
        self._blocked_seconds = 0.0
        self._published = 0  # newest version whose publish was seen accepted

    # -- life

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the channel. Idempotent."""
        if not self._core.closed:
            for pump in self._pumps.values():
                pump.stop()
            self._pumps.clear()
            self._core.close()
        self._holding = None

    @property
    def agent(self) -> str:
        """The agent's name."""
        return self._core.agent_name

    def check_connection(self) -> None:
        """Raises BusConnectionError when the agent is gone."""
        self._core.connection()

    def reconnect(self, timeout_s: float = 60.0) -> None:
        """After the agent went away: the same memory with the agent that listens now, or with the next one that comes in time.

        A producer offers what it published last anew, unless it was released or written since; snapshots went with the agent.
        Raises NotRunningError when no agent came.
        """
        self._core.reconnect(_seconds(timeout_s))

    def start_service(self) -> None:
        """Answers the agent from a thread, so that hooks and buckets do not depend on somebody waiting."""
        self._core.start_service()

    def stop_service(self) -> None:
        self._core.stop_service()

    # -- memory

    def attach(self, arena: Arena) -> None:
        """Makes an arena's memory reachable for the agent; before register()."""
        if arena not in self._arenas:
            self._arenas.append(arena)

    def register(self, holding: Holding, *, flip: str = "in_place", proof: str = "readback", leave_out: Iterable[str] = (),
                 private_mode: str | None = None, timeout_s: float = 60.0) -> Registered:
        """Tells the bus what this rank holds and where. Views outside attached arenas are private memory.

        `flip`, `proof` and `leave_out` are a consumer's: in_place or shadow; off, stream, readback or memory; tensors of
        the channel it deliberately does not take. `private_mode` insists on cma or bucket for private memory.

        Raises LayoutError when the two sides do not fit, StateError for a second publisher, and so on.
        """
        for name in holding.tensors:
            _name(name, "tensor name")
        if self._role == "consumer":
            for view in holding.views:
                if view.at.read_only:
                    raise InvalidError(f"tensor '{view.name}': its memory is read-only, and an update would write it",
                                       code="INVALID_ARGUMENT")
        self._core.detach_all()
        places = _Places(self._core, self._arenas, holding)
        index = {name: i for i, name in enumerate(holding.tensors)}
        tensors = [(name, DTYPES[dtype][0], list(shape)) for name, (dtype, shape) in holding.tensors.items()]
        pieces = []
        for view in holding.views:
            segment, offset = places.find(view.at.address)
            pieces.append((index[view.name], segment, [lo for lo, _ in view.box], [hi for _, hi in view.box], offset,
                           list(view.at.strides)))
        answer = self._core.register(
            tensors=tensors, pieces=pieces, flip=_choose(_FLIPS, flip, "flip mode"),
            proof=_choose(_PROOFS, proof, "proof"), private_mode=_choose(_MEMORY, private_mode, "memory mode"),
            leave_out=[_name(name, "leave_out") for name in leave_out], timeout_s=_seconds(timeout_s))
        self._holding = holding
        return Registered(**{**answer, "mode": _MEMORY_NAMES[answer["mode"]]})

    # -- producer

    def publish(self, version: int, *, policy: str = "wait", min_replicas: int = 1, receipts: bool = False,
                keep_last: int = 0) -> Request:
        """Offers the registered memory as `version`. It must not change until before_write() has returned.

        `policy` is what a slow consumer may cost: wait (until `min_replicas` have it), skip, or snapshot (the agent copies
        now; `keep_last` of these stay for a rollback). `receipts` digests the memory now, to catch writers that bypass the fence.
        """
        version = _integer(version, "version", 64)
        if version == (1 << 64) - 1:
            raise InvalidError(f"version {version}: no version can follow it", code="INVALID_ARGUMENT")
        core = self._core.publish(version=version, policy=_choose(_POLICIES, policy, "policy"),
                                  min_replicas=_integer(min_replicas, "min_replicas", 32), receipts=bool(receipts),
                                  keep_last=_integer(keep_last, "keep_last", 32))

        def accepted(answer: dict[str, Any]) -> None:
            self._published = max(self._published, version)

        return Request(self, core, accepted)

    def before_write(self, timeout_s: float) -> float:
        """To be called before the first write after a publish: waits until the memory is free. Returns the seconds waited.

        Raises DeadlineError naming who holds it; the memory must still not be written then.
        """
        timeout_s = _seconds(timeout_s)
        began = time.monotonic()
        try:
            # The long wait in slices, for Ctrl-C. Without its agent nobody reads the memory: that is the fence's own to judge.
            try:
                self.wait_released(self._published, timeout_s)
            except Error as error:
                if error.reason != "peer_lost":
                    raise
            left = max(timeout_s - (time.monotonic() - began), 0.0)
            return time.monotonic() - began + self._core.before_write(left)
        finally:
            self._blocked_seconds += time.monotonic() - began

    def wait_released(self, version: int, timeout_s: float) -> None:
        """Returns once `version`'s memory may be written. Raises DeadlineError naming who holds it."""
        version, timeout_s = _integer(version, "version", 64), _seconds(timeout_s)
        if self.released_version >= version:
            return
        core = self._core.request_release(version=version, timeout_s=timeout_s)
        Request(self, core, lambda answer: None, timeout_s + _ANSWER_SECONDS).wait()

    @property
    def released_version(self) -> int:
        return self._core.released_version

    @property
    def blocked_seconds(self) -> float:
        """Time that before_write() has waited, all together."""
        return self._blocked_seconds

    # -- consumer

    def update(self, which: str | int = "latest", *, timeout_s: float = 600.0) -> Request:
        """Asks for a version: "latest", "next" (newer than the live one) or a number. The request gives an Outcome.

        `timeout_s` is the bus's own deadline for it. One that leaves the memory a mixture ends with a StateError of the reason
        "dirty"; reconnect() if the agent is gone, and the next update repairs it.
        """
        if isinstance(which, str):
            selector, version = _choose({"latest": 1, "next": 2}, which, "version"), 0
        else:
            selector, version = 3, _integer(which, "version", 64)
        timeout_s = _seconds(timeout_s)
        core = self._core.update(selector=selector, version=version, timeout_s=timeout_s)
        return Request(self, core, _outcome, timeout_s + _ANSWER_SECONDS)

    def cancel_update(self) -> Request:
        """Gives up the running update; it then ends with CancelledError, unless it was past that."""
        return Request(self, self._core.cancel_update(), lambda answer: None)

    def claim(self) -> Request:
        """Which version this rank's memory holds, proven by digest. The request gives the number."""
        return Request(self, self._core.claim(), lambda answer: answer["version"])

    @property
    def live_version(self) -> int:
        """What this rank's memory is, whole; 0 when it is nothing yet or dirty."""
        return self._core.live_version

    def set_hook(self, hook: Hook | None) -> None:
        """What to do at a fence, a flip and when a version is live. An exception refuses the step. Must not wait on this client."""
        if hook is None:
            self._core.set_hook(None)
            return

        def run(kind: int, session: int, version: int, timeout_s: float) -> None:
            try:
                hook(HookEvent(_HOOKS[kind], session, version, timeout_s))
            except BaseException as error:
                self._hook_error = error
                raise

        self._core.set_hook(run)

    # -- inside

    def _poll(self) -> None:
        try:
            self._core.poll()
        except Error:
            pass  # every pending request carries the failure itself

    def _explain(self, error: Exception) -> Exception:
        """A refused update shows the hook's own exception as its cause."""
        cause, self._hook_error = self._hook_error, None
        if cause is not None and error.__cause__ is None:
            error.__cause__ = cause
        return error

    def _pump(self) -> _Pump:
        loop = asyncio.get_running_loop()
        if loop not in self._pumps:
            self._pumps = {known: pump for known, pump in self._pumps.items() if not known.is_closed()}
            self._pumps[loop] = _Pump(self, loop)
        return self._pumps[loop]


def _outcome(answer: dict[str, Any]) -> Outcome:
    digest = answer.pop("digest_a") | answer.pop("digest_b") << 64
    return Outcome(**answer, digest=digest)


class _Places:
    """Numbers the memory that views lie in: arenas, and stretches of private memory, merged where they touch."""

    def __init__(self, core: _core.Client, arenas: list[Arena], holding: Holding) -> None:
        inside = sorted((arena.address, arena.address + arena.size, i) for i, arena in enumerate(arenas))
        self._starts: list[int] = []
        self._segments: list[tuple[int, int]] = []
        found: list[tuple[int, int, Arena | None]] = [(lo, hi, arenas[i]) for lo, hi, i in inside]
        found += [(lo, hi, None) for lo, hi in self._stretches(inside, holding)]
        numbered = []
        for lo, hi, arena in found:
            segment = core.attach_arena(arena._core) if arena is not None else core.attach(lo, hi - lo)
            numbered.append((lo, segment))
        for lo, segment in sorted(numbered):
            self._starts.append(lo)
            self._segments.append((lo, segment))

    @staticmethod
    def _stretches(inside: list[tuple[int, int, int]], holding: Holding) -> list[tuple[int, int]]:
        starts = [lo for lo, _, _ in inside]
        outside = []
        for view in holding.views:
            at = bisect.bisect_right(starts, view.at.address) - 1
            if at < 0 or view.at.end > inside[at][1]:
                outside.append((view.at.address, view.at.end))
        merged: list[tuple[int, int]] = []
        for lo, hi in sorted(outside):
            if merged and lo <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
            else:
                merged.append((lo, hi))
        return merged

    def find(self, address: int) -> tuple[int, int]:
        """Segment and offset of an address."""
        lo, segment = self._segments[bisect.bisect_right(self._starts, address) - 1]
        return segment, address - lo


def connect(channel: str, job: str, *, role: str, rank: int = 0, rank_count: int = 1, replica: int = 0,
            agent: str | os.PathLike[str] | None = None, agent_uid: int | None = None, timeout_s: float = 5.0) -> Client:
    """Connects one rank to the agent of this host.

    `channel` names the stream of versions, `job` this group of processes; `role` is producer or consumer. `agent` is the
    socket to use instead of $TENSORBUS_AGENT_SOCKET or the one in the user's runtime folder.

    Raises NotRunningError when no agent listens, BusPermissionError, StateError for another protocol or job.
    """
    core = _core.Client.connect(
        channel=_name(channel, "channel"), job=_name(job, "job"), role=_choose(_ROLES, role, "role"),
        replica=_integer(replica, "replica", 32), rank=_integer(rank, "rank", 32),
        rank_count=_integer(rank_count, "rank_count", 32), agent_socket="" if agent is None else os.fspath(agent),
        agent_uid=-1 if agent_uid is None else _integer(agent_uid, "agent_uid", 32),
        library=f"tensorbus {_core.__version__} python", timeout_s=_seconds(timeout_s))
    return Client(core, role)
