"""Tensorbus moves model weights from a trainer to the engines that sample from it.

    import tensorbus

    with tensorbus.connect("policy", "trainer", role="producer") as bus:      # or tensorbus.torch.publish(model, …)
        arena = tensorbus.Arena(1 << 20)
        weights = arena.array((256, 256), "float32")
        holding = tensorbus.Holding()
        holding.add("w", weights)
        bus.attach(arena)
        bus.register(holding)
        bus.publish(1).wait(timeout_s=10)

`tensorbus.torch` publishes modules, FSDP2 and DTensors and receives into an engine's tensors; `tensorbus.views` describes fused,
stacked, padded and tied buffers; `tensorbus.local()` starts a daemon and an agent for this process.
"""

from ._client import Arena, Client, HookEvent, Outcome, Registered, Request, connect
from ._core import __version__
from .errors import (
    BusConnectionError,
    BusPermissionError,
    CancelledError,
    CorruptionError,
    DeadlineError,
    Error,
    InvalidError,
    LayoutError,
    MovedMemoryError,
    NotRunningError,
    OutOfMemoryError,
    StateError,
    UnsupportedError,
)
from .local import Local, local
from .views import Holding

__all__ = [
    "Arena", "BusConnectionError", "BusPermissionError", "CancelledError", "Client", "CorruptionError", "DeadlineError",
    "Error", "Holding", "HookEvent", "InvalidError", "LayoutError", "Local", "MovedMemoryError", "NotRunningError",
    "OutOfMemoryError", "Outcome", "Registered", "Request", "StateError", "UnsupportedError", "__version__", "connect", "local",
]
