"""Runs a rank of the quickstart's jobs over a stand-in for the bus: shards and versions as files in the run's folder.

    python stand_in_jobs.py trainer|sliced_trainer|rollout --settings FILE --rank R ...

For tests of the jobs themselves. `TENSORBUS_TEST_FAULT` makes one kind of mistake: `flip_bit` (one element of one buffer is wrong),
`skip_view` (one view is not copied), `die` (rollout rank 1 ends at version 2), `stall` (trainer rank 1 never publishes version 2).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tensorbus.models.config import read_config
from tensorbus.models.llama import Decoder
from tensorbus.quickstart import rollout, sliced_trainer, trainer
from tensorbus.quickstart.bus import Arrived
from tensorbus.quickstart.settings import Settings
from tensorbus.quickstart.vllm_layout import Buffer

FAULT = os.environ.get("TENSORBUS_TEST_FAULT", "")


def wait_for(files: list[Path], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            raise TimeoutError(f"missing: {', '.join(f.name for f in files if not f.exists())}")
        time.sleep(0.01)


def touch(file: Path) -> None:
    file.write_bytes(b"")


class FilePublisher:
    """Writes boxes of logical tensors: this rank's rows of every parameter, or what its views say."""

    def __init__(self, settings: Settings, rank: int, held: torch.nn.Module | list[Buffer]) -> None:
        self.s, self.rank, self.held = settings, rank, held
        if isinstance(held, list):
            self.buffers = {b.name: torch.zeros(b.shape, dtype=torch.bfloat16) for b in held}

    def before_write(self, timeout_s: float) -> None:
        pass

    def parts(self):
        if isinstance(self.held, list):
            for buffer in self.held:
                for view in buffer.views:
                    yield view.tensor, view.box, self.buffers[buffer.name][view.slices()]
            return
        for name, p in self.held.named_parameters():
            assert isinstance(p, DTensor)
            local = p.to_local().detach()
            first = min(p.shape[0], self.rank * -(-p.shape[0] // self.s.trainer_ranks))
            yield name, ((first, first + local.shape[0]), *((0, n) for n in p.shape[1:])), local

    def fence(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def publish(self, version: int) -> None:
        if FAULT == "stall" and self.rank == 1 and version == 2:
            time.sleep(3600)
        parts = {f"{name}@{json.dumps(box)}": part.clone() for name, box, part in self.parts()}
        file = Path(self.s.folder) / f"shard-{version}-{self.rank}"
        save_file(parts, str(file) + ".part")
        os.rename(str(file) + ".part", file)

    def wait_released(self, version: int, timeout_s: float) -> None:
        folder = Path(self.s.folder)
        wait_for([folder / f"flipped-{version}-{a}-{b}" for a in range(self.s.replicas) for b in range(self.s.tp)], timeout_s)

    def close(self) -> None:
        pass


class FileSubscriber:
    """Fills each view from whichever shards overlap it."""

    memory = "stand-in"

    def __init__(self, settings: Settings, replica: int, rank: int, layout: list[Buffer]) -> None:
        self.s, self.replica, self.rank, self.layout, self.live = settings, replica, rank, layout, 0
        self.buffers = {b.name: torch.zeros(b.shape, dtype=torch.bfloat16) for b in layout}
        self.shapes = {n: p.shape for n, p in Decoder(read_config(Path(settings.model))).named_parameters()}

    def update_next(self, timeout_s: float) -> Arrived:
        began, version, count = time.monotonic(), self.live + 1, 0
        if FAULT == "die" and self.rank == 1 and version == 2:
            os.kill(os.getpid(), 9)
        files = [Path(self.s.folder) / f"shard-{version}-{r}" for r in range(self.s.trainer_ranks)]
        wait_for(files, timeout_s)
        full: dict[str, torch.Tensor] = {}
        for file in files:
            with safe_open(file, framework="pt") as shard:
                for key in shard.keys():
                    name, box = key.split("@")
                    ranges = [slice(lo, hi) for lo, hi in json.loads(box)]
                    if name not in full:
                        full[name] = torch.full(self.shapes[name], torch.nan, dtype=torch.bfloat16)
                    full[name][tuple(ranges)] = shard.get_tensor(key)
        for buffer in self.layout:
            for view in buffer.views:
                if FAULT == "skip_view" and view.tensor.endswith("0.self_attn.v_proj.weight"):
                    continue
                part = full[view.tensor][tuple(slice(lo, hi) for lo, hi in view.box)].reshape(view.extent)
                self.buffers[buffer.name][view.slices()] = part
                count += part.numel() * 2
        if FAULT == "flip_bit" and self.rank == 1 and version == 2:
            self.buffers["model.norm.weight"].view(torch.int16)[3] ^= 1
        self.live = version
        touch(Path(self.s.folder) / f"flipped-{version}-{self.replica}-{self.rank}")
        return Arrived(version, count, time.monotonic() - began, 0.0, version << 64 | self.rank + 1)

    def close(self) -> None:
        pass


if __name__ == "__main__":
    job, *rest = sys.argv[1:]
    module = {"trainer": trainer, "sliced_trainer": sliced_trainer, "rollout": rollout}[job]
    sys.exit(module.main(rest, FileSubscriber if job == "rollout" else FilePublisher))
