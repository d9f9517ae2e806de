"""What the rank processes of all jobs begin with, and how those of a trainer offer a version and take it back."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from .events import Emitter
from .leaks import own_usage
from .processes import end_with_parent
from .settings import Settings


class RankProcess(NamedTuple):
    """Who this process is. `replica` is 0 in a trainer."""

    settings: Settings
    replica: int
    rank: int
    emit: Emitter


def start_rank(module: str, about: str | None, argv: list[str]) -> RankProcess:
    """Reads the launcher's command line and settles in: ends with the launcher, uses the threads it was given."""
    parser = argparse.ArgumentParser(prog=f"python -m tensorbus.quickstart.{module}", description=about)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--events-fd", type=int)
    options = parser.parse_args(argv)
    end_with_parent()
    settings = Settings.read(options.settings)
    torch.set_num_threads(settings.threads)
    job = f"rollout/{options.replica}" if module == "rollout" else "trainer"
    return RankProcess(settings, options.replica, options.rank, Emitter(options.events_fd, job, options.rank))


class Offers(Protocol):
    """The part of either kind of publisher that a version passes through."""

    def publish(self, version: int) -> None: ...

    def wait_released(self, version: int, timeout_s: float) -> None: ...


def offer_version(publisher: Offers, version: int, process: RankProcess) -> None:
    """Publishes a version, of which the reference is there already, and waits until nobody reads it any more."""
    settings, emit = process.settings, process.emit
    asked = time.monotonic()
    publisher.publish(version)
    emit("published", at=asked, version=version, seconds=time.monotonic() - asked)
    publisher.wait_released(version, settings.deadline_s)
    emit("released", version=version, blocked_seconds=time.monotonic() - asked, usage=own_usage())
    if process.rank == 0:
        # This version is live everywhere, so everybody is done comparing the one before.
        settings.reference(version - 1).unlink(missing_ok=True)


def write_reference(state: dict[str, Tensor], path: Path) -> None:
    """Writes the full state so that a reader sees all of it or nothing."""
    part = path.with_suffix(".part")
    save_file(state, str(part))
    part.rename(path)
