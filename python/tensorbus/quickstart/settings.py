"""What one run of the quickstart does; written by the launcher, read by every rank process."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Immutable. Times in seconds; `folder` is the run's own, removed at its end."""

    folder: str
    model: str
    agent_socket: str
    trainer_ranks: int = 2
    # Both 0 for FSDP; otherwise the Megatron-like trainer of tp * pp ranks.
    trainer_tp: int = 0
    trainer_pp: int = 0
    tp: int = 3
    replicas: int = 1
    single_experts: bool = False
    refreshes: int = 4
    steps_per_refresh: int = 1
    channel: str = "policy"
    flip: str = "shadow"
    batch: int = 1
    sequence: int = 64
    learning_rate: float = 3e-4
    seed: int = 0
    threads: int = 1
    deadline_s: float = 180.0

    @property
    def trainer_module(self) -> str:
        """Which job the trainer's ranks run."""
        return "sliced_trainer" if self.trainer_tp else "trainer"

    def reference(self, version: int) -> Path:
        """Where trainer rank 0 leaves the full state of a version, for the verification."""
        return Path(self.folder) / f"state-{version}.safetensors"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Settings:
        return cls(**json.loads(path.read_text(encoding="utf-8")))
