"""One rank of a trainer job with Megatron's layout: tensor parallel times pipeline parallel, fused buffers.

It does not train: each version is the model with noise of the version's own, which every rank can compute for itself. What is real is the
layout and the publishing; for real training see `trainer`.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tensorbus.models.config import read_config
from tensorbus.models.weights import load_decoder

from .bus import BufferPublisher, open_buffer_publisher
from .megatron_layout import fill_buffers, megatron_layout
from .rank_process import RankProcess, offer_version, start_rank, write_reference
from .settings import Settings
from .vllm_layout import Buffer

BufferPublisherOf = Callable[[Settings, int, list[Buffer]], BufferPublisher]


def noisy(name: str, weight: Tensor, version: int) -> Tensor:
    """The weight at a version: one to two per cent off, by name and version alone. Same shape and dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}@{version}".encode()))
    return (weight.float() * (1 + 0.01 * torch.randn(weight.shape, generator=generator))).to(weight.dtype)


def publish_versions(process: RankProcess, publisher_of: BufferPublisherOf) -> None:
    """Publishes `settings.refreshes` versions, each after the one before is released."""
    settings, rank, emit = process.settings, process.rank, process.emit
    began = time.monotonic()
    layout = megatron_layout(read_config(Path(settings.model)), settings.trainer_tp, settings.trainer_pp, rank)
    base = dict(load_decoder(Path(settings.model)).state_dict())
    held = {view.tensor for buffer in layout for view in buffer.views}
    publisher = publisher_of(settings, rank, layout)
    try:
        emit("registered", seconds=time.monotonic() - began)
        for version in range(1, settings.refreshes + 1):
            step_began = time.monotonic()
            state = {name: noisy(name, weight, version) for name, weight in base.items() if rank == 0 or name in held}
            if rank == 0:
                write_reference(state, settings.reference(version))
            publisher.before_write(settings.deadline_s)
            fill_buffers(layout, dict(publisher.buffers), state.__getitem__)
            del state
            emit("step", version=version, loss=0.0, seconds=time.monotonic() - step_began)
            offer_version(publisher, version, process)
    finally:
        publisher.close()


def main(argv: list[str], publisher_of: BufferPublisherOf = open_buffer_publisher) -> int:
    process = start_rank("sliced_trainer", __doc__, argv)
    publish_versions(process, publisher_of)
    process.emit("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
