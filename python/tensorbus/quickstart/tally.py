"""Adds up the events of a run: one row per version, and who is still missing."""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Event
from .leaks import Usage
from .settings import Settings


@dataclass
class VersionRow:
    """One refresh. Times in CLOCK_MONOTONIC seconds."""

    version: int
    losses: dict[int, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    published_at: dict[int, float] = field(default_factory=dict)
    asked_at: dict[tuple[str, int], float] = field(default_factory=dict)
    flipped_at: dict[tuple[str, int], float] = field(default_factory=dict)
    arrived_bytes: dict[tuple[str, int], int] = field(default_factory=dict)
    copy_seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    digests: dict[tuple[str, int], int] = field(default_factory=dict)
    elements: dict[tuple[str, int], int] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """That arrived, all targets together."""
        return sum(self.arrived_bytes.values())

    @property
    def seconds(self) -> float:
        """From the last trainer rank's publish, or the last engine rank's asking if that was later, to the last flip."""
        begin = max([*self.published_at.values(), *self.asked_at.values()], default=0.0)
        return max(self.flipped_at.values(), default=begin) - begin

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def copy_seconds_max(self) -> float:
        """First byte read to last byte checked, of the slowest rank."""
        return max(self.copy_seconds.values(), default=0.0)

    @property
    def flip_spread_ms(self) -> float:
        """Between the first and the last rank that heard of the flip."""
        times = self.flipped_at.values()
        return (max(times) - min(times)) * 1e3 if times else 0.0

    @property
    def loss(self) -> float:
        """Mean over trainer ranks, nats per token, before the step."""
        return sum(self.losses.values()) / len(self.losses) if self.losses else float("nan")

    @property
    def digest(self) -> str:
        """Sum over ranks, 32 hex digits: equal content in an equal layout has an equal one."""
        low = sum(d & (1 << 64) - 1 for d in self.digests.values()) % (1 << 64)
        high = sum(d >> 64 for d in self.digests.values()) % (1 << 64)
        return f"{high << 64 | low:032x}"


class Tally:
    """Rows by version and the state of each rank."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rows: dict[int, VersionRow] = {}
        self.registered: dict[tuple[str, int], Event] = {}
        self.done: set[tuple[str, int]] = set()
        self.usage: dict[str, list[Usage]] = {}

    @property
    def targets(self) -> list[tuple[str, int]]:
        s = self.settings
        return [(f"rollout/{replica}", rank) for replica in range(s.replicas) for rank in range(s.tp)]

    @property
    def everybody(self) -> list[tuple[str, int]]:
        return [("trainer", rank) for rank in range(self.settings.trainer_ranks)] + self.targets

    def add(self, event: Event) -> None:
        who = (event.job, event.rank)
        if event.kind == "registered":
            self.registered[who] = event
        elif event.kind == "done":
            self.done.add(who)
        elif "version" in event.fields:
            self._add_to_row(self.rows.setdefault(event["version"], VersionRow(event["version"])), who, event)
        if "usage" in event.fields:
            self.usage.setdefault(f"{event.job}-{event.rank}", []).append(event["usage"])

    @staticmethod
    def _add_to_row(row: VersionRow, who: tuple[str, int], event: Event) -> None:
        if event.kind == "step":
            row.losses[event.rank] = event["loss"]
            row.step_seconds = max(row.step_seconds, event["seconds"])
        elif event.kind == "published":
            row.published_at[event.rank] = event.at
        elif event.kind == "flipped":
            row.asked_at[who], row.flipped_at[who] = event["asked"], event.at
            row.arrived_bytes[who], row.copy_seconds[who] = event["bytes"], event["copy_seconds"]
            row.digests[who] = int(event["digest"], 16)
        elif event.kind == "verified":
            row.elements[who] = event["elements"]
        elif event.kind == "released":
            row.released.add(event.rank)

    def verified(self, version: int) -> bool:
        """Has every rank of every replica compared every element of this version?"""
        row = self.rows.get(version)
        return row is not None and set(row.elements) == set(self.targets)

    @property
    def verified_count(self) -> int:
        return sum(self.verified(version) for version in self.rows)

    def complete(self) -> bool:
        return self.verified_count == self.settings.refreshes and self.done == set(self.everybody)

    def missing(self) -> str:
        """Who has not reported what, for the message of a run that stands still."""
        def names(whom: list[tuple[str, int]]) -> str:
            return ", ".join(f"{job} rank {rank}" for job, rank in whom)

        silent = [who for who in self.everybody if who not in self.registered]
        if silent:
            return f"not registered with the bus: {names(silent)}"
        for version in range(1, self.settings.refreshes + 1):
            row = self.rows.get(version, VersionRow(version))
            unpublished = [("trainer", r) for r in range(self.settings.trainer_ranks) if r not in row.published_at]
            if unpublished:
                return f"version {version} not published by {names(unpublished)}"
            for what, have in (("flipped", row.flipped_at), ("verified", row.elements)):
                waiting = [who for who in self.targets if who not in have]
                if waiting:
                    return f"version {version} not {what} at {names(waiting)}"
        return f"not ended: {names([who for who in self.everybody if who not in self.done])}"
