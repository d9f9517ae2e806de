"""The jobs' two interfaces (`bus`) over tensorbus.torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn, optim

import tensorbus.torch
from tensorbus.models.config import DecoderConfig, read_config
from tensorbus.models.llama import Decoder
from tensorbus.views import Holding

from .bus import Arrived
from .settings import Settings
from .vllm_layout import Buffer

REGISTER_TIMEOUT_S = 120.0
# The bus has a deadline of its own; this much later we stop believing in it.
GRACE_S = 5.0


def logical_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the model, by name."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}


def hold(layout: list[Buffer], buffers: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Holding:
    """Tells the bus what the views of a layout say. A tensor of which this rank has only padding is declared."""
    holding = Holding()
    for buffer in layout:
        for view in buffer.views:
            memory = buffers[buffer.name][view.slices()]
            # Leading dimensions that drop out of the buffer (one expert of a stack) come back with extent 1.
            memory = memory[(None,) * (len(view.box) - memory.dim())]
            holding.add(view.tensor, memory, shape=shapes[view.tensor], box=view.box)
        if not buffer.views and buffer.name in shapes:
            holding.declare(buffer.name, buffers[buffer.name].dtype, shapes[buffer.name])
    return holding


def _made_buffers(layout: list[Buffer]) -> tuple[tensorbus.Arena, dict[str, Tensor]]:
    return tensorbus.torch.tensors_in_arena({buffer.name: (buffer.shape, torch.bfloat16) for buffer in layout})


class _Published:
    """What both publishers share."""

    def __init__(self, settings: Settings, publisher: tensorbus.torch.Publisher) -> None:
        self._settings = settings
        self._publisher = publisher

    def publish(self, version: int) -> None:
        self._publisher.publish(version, policy="wait", min_replicas=self._settings.replicas).wait(self._settings.deadline_s)

    def wait_released(self, version: int, timeout_s: float) -> None:
        self._publisher.wait_released(version, timeout_s)

    def close(self) -> None:
        self._publisher.close()


class ClientPublisher(_Published):
    """A trainer rank whose parameters are FSDP2's."""

    def __init__(self, settings: Settings, rank: int, module: nn.Module) -> None:
        super().__init__(settings, tensorbus.torch.publish(
            module, channel=settings.channel, job="trainer", rank=rank, rank_count=settings.trainer_ranks,
            agent=settings.agent_socket, timeout_s=REGISTER_TIMEOUT_S))

    def fence(self, optimizer: optim.Optimizer) -> None:
        self._publisher.fence(optimizer, timeout_s=self._settings.deadline_s)


class ClientBufferPublisher(_Published):
    """A trainer rank with fused buffers."""

    def __init__(self, settings: Settings, rank: int, layout: list[Buffer]) -> None:
        arena, self._buffers = _made_buffers(layout)
        holding = hold(layout, self._buffers, logical_shapes(read_config(Path(settings.model))))
        super().__init__(settings, tensorbus.torch.publish(
            holding, channel=settings.channel, job="trainer", rank=rank, rank_count=settings.trainer_ranks, arenas=[arena],
            agent=settings.agent_socket, timeout_s=REGISTER_TIMEOUT_S))

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        return self._buffers

    def before_write(self, timeout_s: float) -> None:
        self._publisher.before_write(timeout_s=timeout_s)


class ClientSubscriber:
    """A rollout rank."""

    def __init__(self, settings: Settings, replica: int, rank: int, layout: list[Buffer]) -> None:
        arena, self._buffers = _made_buffers(layout)
        holding = hold(layout, self._buffers, logical_shapes(read_config(Path(settings.model))))
        self._subscriber = tensorbus.torch.subscribe(
            holding, channel=settings.channel, job="rollout", replica=replica, rank=rank, rank_count=settings.tp, arenas=[arena],
            flip=settings.flip, agent=settings.agent_socket, timeout_s=REGISTER_TIMEOUT_S)

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        return self._buffers

    @property
    def memory(self) -> str:
        return self._subscriber.memory.mode

    def update_next(self, timeout_s: float) -> Arrived:
        outcome = self._subscriber.update("next", timeout_s=timeout_s).wait(timeout_s + GRACE_S)
        return Arrived(version=outcome.version, bytes=outcome.bytes, seconds=outcome.seconds, copy_seconds=outcome.copy_seconds,
                       digest=outcome.digest)

    def close(self) -> None:
        self._subscriber.close()
