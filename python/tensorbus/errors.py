"""What can go wrong, by kind.

Every failure of the bus is an `Error` and also the built-in exception a Python programmer would expect, so both
`except TimeoutError` and `except tensorbus.Error` work. `code` says what kind of failure it is, `reason` what exactly,
`native` is an errno or 0.
"""

from __future__ import annotations


class Error(Exception):
    """A failure of the bus. Never raised itself when there is a finer kind."""

    def __init__(self, message: str, *, code: str = "UNKNOWN", reason: str = "", native: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.native = native

    def __reduce__(self):
        return _rebuild, (type(self), str(self), self.code, self.reason, self.native)


def _rebuild(kind: type[Error], message: str, code: str, reason: str, native: int) -> Error:
    return kind(message, code=code, reason=reason, native=native)


class DeadlineError(Error, TimeoutError):
    """Something did not happen in time; the message names what and who."""


class BusConnectionError(Error, ConnectionError):
    """The agent is not there, or went away."""


class NotRunningError(BusConnectionError):
    """No agent or daemon listens: start one with `tensorbusctl up`."""


class InvalidError(Error, ValueError):
    """The call cannot be right: a shape, dtype, name, box or number that does not fit."""


class LayoutError(InvalidError):
    """Two sides do not fit together: shapes, coverage, dtypes, or a tensor that the other side lacks."""


class MovedMemoryError(InvalidError):
    """A registered tensor no longer lives where it was registered."""


class BusPermissionError(Error, PermissionError):
    """The socket or the memory may not be used by this user."""


class OutOfMemoryError(Error, MemoryError):
    """Shared memory, staging budget or address space is exhausted."""


class StateError(Error, RuntimeError):
    """Not possible in the present state: a version that goes back, a second publisher, a dirty replica."""


class CorruptionError(Error, RuntimeError):
    """What arrived is not what was sent; it was refused before anybody served it."""


class UnsupportedError(Error, NotImplementedError):
    """Asked for something that this build or this machine cannot do."""


class CancelledError(Error, RuntimeError):
    """Stopped on request."""


CODES = ("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
         "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
         "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED")

# The reason decides where there is one, else the code.
_BY_REASON: dict[str, type[Error]] = {
    "not_running": NotRunningError,
    "peer_lost": BusConnectionError,
    "layout_mismatch": LayoutError,
    "dtype_mismatch": LayoutError,
    "unknown_tensor": LayoutError,
    "no_holder": LayoutError,
    "overlap": InvalidError,
    "malformed": InvalidError,
    "moved_memory": MovedMemoryError,
    "checksum_mismatch": CorruptionError,
    "write_during_publish": CorruptionError,
    "plan_mismatch": CorruptionError,
    "out_of_memory": OutOfMemoryError,
    "stale_version": StateError,
    "second_publisher": StateError,
    "dirty": StateError,
    "protocol_version": StateError,
    "cancelled": CancelledError,
    "unsupported": UnsupportedError,
}
_BY_CODE: dict[str, type[Error]] = {
    "CANCELLED": CancelledError,
    "INVALID_ARGUMENT": InvalidError,
    "OUT_OF_RANGE": InvalidError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "PERMISSION_DENIED": BusPermissionError,
    "UNAUTHENTICATED": BusPermissionError,
    "RESOURCE_EXHAUSTED": OutOfMemoryError,
    "UNAVAILABLE": BusConnectionError,
    "FAILED_PRECONDITION": StateError,
    "ALREADY_EXISTS": StateError,
    "NOT_FOUND": StateError,
    "ABORTED": StateError,
    "DATA_LOSS": CorruptionError,
    "UNIMPLEMENTED": UnsupportedError,
}


def from_status(code: int, reason: str, native: int, message: str) -> Error:
    """The exception for a failed status of the library below."""
    name = CODES[code] if 0 <= code < len(CODES) else "UNKNOWN"
    if name == "DEADLINE_EXCEEDED":
        kind: type[Error] = DeadlineError
    else:
        kind = _BY_REASON.get(reason) or _BY_CODE.get(name, Error)
    error = kind(message, code=name, reason=reason, native=native)
    if isinstance(error, OSError) and native:
        error.errno = native
    return error
