"""What the jobs need of the bus, as two small interfaces, and their real making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn, optim

from .settings import Settings
from .vllm_layout import Buffer


@dataclass(frozen=True)
class Arrived:
    """One version, live at this rank. `digest` is the additive sum of what arrived, as an integer below 2**128."""

    version: int
    bytes: int
    seconds: float
    copy_seconds: float
    digest: int


class Publisher(Protocol):
    """One trainer rank's end. Every call is for all ranks of the job."""

    def fence(self, optimizer: optim.Optimizer) -> None:
        """Makes the optimizer wait for release before it writes."""

    def publish(self, version: int) -> None:
        """Offers the parameters as they are. They must not change until wait_released()."""

    def wait_released(self, version: int, timeout_s: float) -> None:
        """Returns when every replica has the version. TimeoutError names who has not."""

    def close(self) -> None:
        """Leaves the channel."""


class BufferPublisher(Protocol):
    """One rank of a trainer whose buffers are described by views."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The trainer's tensors by name, bf16, zero at first."""

    def before_write(self, timeout_s: float) -> None:
        """Waits until the memory may be written, and says so to the agent."""

    def publish(self, version: int) -> None:
        """Offers the buffers as they are."""

    def wait_released(self, version: int, timeout_s: float) -> None:
        """As Publisher's."""

    def close(self) -> None:
        """Leaves the channel."""


class Subscriber(Protocol):
    """One rollout rank's end."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The engine's live tensors by name, bf16."""

    @property
    def memory(self) -> str:
        """How the bus reaches them, for people."""

    def update_next(self, timeout_s: float) -> Arrived:
        """Waits for the version after the live one; returns once all ranks of the replica have flipped."""

    def close(self) -> None:
        """Leaves the channel."""


def open_publisher(settings: Settings, rank: int, module: nn.Module) -> Publisher:
    """Connects to the agent and offers the module's parameters, each with its DTensor placements."""
    from .bus_client import ClientPublisher

    return ClientPublisher(settings, rank, module)


def open_buffer_publisher(settings: Settings, rank: int, layout: list[Buffer]) -> BufferPublisher:
    """Connects to the agent and registers buffers, made by it, with the boxes that their views say."""
    from .bus_client import ClientBufferPublisher

    return ClientBufferPublisher(settings, rank, layout)


def open_subscriber(settings: Settings, replica: int, rank: int, layout: list[Buffer]) -> Subscriber:
    """Connects to the agent and registers one engine rank's buffers, made by it and zero at first."""
    from .bus_client import ClientSubscriber

    return ClientSubscriber(settings, replica, rank, layout)
