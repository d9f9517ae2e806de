"""FSDP2 on two ranks: its shards move into shared memory without changing training, and are described as they lie."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

JOB = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import tensorbus.torch as bus

folder, rank, adopted = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{adopted}", rank=rank, world_size=2)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))  # 7 and 1 rows: uneven and empty shards
mesh = init_device_mesh("cpu", (2,))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
arena = bus.adopt(model) if adopted else None
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
losses = []
for _ in range(4):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
entries = bus._collect(model, None, (), True, {})
holding = bus._holding_of(entries)
right = True
state = {n: p.full_tensor() for n, p in model.named_parameters()}
for view in holding.views:
    index = tuple(slice(lo, hi) for lo, hi in view.box)
    right = right and torch.equal(view.memory, state[view.name][index].detach())
    if adopted:
        right = right and arena.address <= view.at.address < arena.address + arena.size
print(json.dumps({"losses": losses, "right": right, "boxes": {v.name: v.box for v in holding.views},
                  "tensors": len(holding.tensors)}))
dist.destroy_process_group()
"""


def run(folder: Path, adopted: bool) -> list[dict]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    jobs = [subprocess.Popen([sys.executable, "-c", JOB, str(folder), str(rank), str(int(adopted))], env=environment,
                             stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        outputs = [job.communicate(timeout=200)[0] for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()
    assert [job.returncode for job in jobs] == [0, 0]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_fsdp_trains_the_same_in_shared_memory(tmp_path):
    plain, moved = run(tmp_path, False), run(tmp_path, True)
    for rank in range(2):
        assert plain[rank]["losses"] == moved[rank]["losses"]
        assert len(set(moved[rank]["losses"])) == 4, "training stands still"
        assert plain[rank]["right"] and moved[rank]["right"]
        assert moved[rank]["tensors"] == 4
    assert moved[0]["boxes"] == {"0.weight": [[0, 4], [0, 6]], "0.bias": [[0, 4]], "2.weight": [[0, 1], [0, 7]], "2.bias": [[0, 1]]}
    assert moved[1]["boxes"] == {"0.weight": [[4, 7], [0, 6]], "0.bias": [[4, 7]]}, "the second rank has no row of one row"
