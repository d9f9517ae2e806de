"""One rank of the rollout job: holds the shard that a tensor-parallel engine would hold, and proves each refresh.

It asks the bus for one version after the other, waits for the flip and compares every element of every buffer with an independent
slicing of the trainer's full state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from tensorbus.models.config import read_config

from .bus import Subscriber, open_subscriber
from .leaks import own_usage
from .rank_process import RankProcess, start_rank
from .settings import Settings
from .verify import verify_against_file
from .vllm_layout import Buffer, vllm_layout

SubscriberOf = Callable[[Settings, int, int, list[Buffer]], Subscriber]

MAX_REPORTED_DIFFERENCES = 5


class VerificationError(Exception):
    """What arrived is not what the trainer had. Names the first differences."""


def roll_out(process: RankProcess, subscriber_of: SubscriberOf) -> None:
    """Takes and verifies `settings.refreshes` versions. VerificationError at the first that differs."""
    settings, rank, emit = process.settings, process.rank, process.emit
    config = read_config(Path(settings.model))
    subscriber = subscriber_of(settings, process.replica, rank, vllm_layout(
        config, settings.tp, rank, single_experts=settings.single_experts))
    try:
        size = sum(t.numel() * t.element_size() for t in subscriber.buffers.values())
        emit("registered", bytes=size, buffers=len(subscriber.buffers), memory=subscriber.memory)
        for expected in range(1, settings.refreshes + 1):
            asked = time.monotonic()
            arrived = subscriber.update_next(settings.deadline_s)
            emit("flipped", version=arrived.version, bytes=arrived.bytes, seconds=arrived.seconds, asked=asked,
                 copy_seconds=arrived.copy_seconds, digest=f"{arrived.digest:032x}")
            if arrived.version != expected:
                raise VerificationError(f"version {arrived.version} came where {expected} was next")
            began = time.monotonic()
            elements, differences = verify_against_file(config, settings.tp, rank, subscriber.buffers,
                                                        settings.reference(arrived.version), settings.single_experts)
            if differences:
                shown = "; ".join(str(d) for d in differences[:MAX_REPORTED_DIFFERENCES])
                raise VerificationError(f"version {arrived.version}: {len(differences)} buffers differ: {shown}")
            emit("verified", version=arrived.version, elements=elements, seconds=time.monotonic() - began, usage=own_usage())
    finally:
        subscriber.close()


def main(argv: list[str], subscriber_of: SubscriberOf = open_subscriber) -> int:
    process = start_rank("rollout", __doc__, argv)
    try:
        roll_out(process, subscriber_of)
    except VerificationError as error:
        process.emit("differs", message=str(error))
        print(f"error: {error}", file=sys.stderr)
        return 1
    process.emit("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
