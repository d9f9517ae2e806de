"""Runs a Python example of the docs as one rank of a job: what the example leaves to its reader before it, a look at the outcome after it.

usage: doc_job.py SURROUNDINGS RANK RANK_COUNT FOLDER < example

The trainer leaves its last weights in FOLDER; an engine compares what it holds with them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEPS = 3
PATIENCE_S = 60.0

Names = dict[str, Any]


def tiny_model() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))


def train(model: Any, optimizer: Any) -> None:
    import torch

    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(tensors: dict[str, Any], folder: Path) -> None:
    import torch

    torch.save(tensors, folder / "part")
    (folder / "part").rename(folder / "weights.pt")


def load(folder: Path) -> dict[str, Any]:
    import torch

    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "weights.pt").exists():
        assert time.monotonic() < deadline, "the trainer has left no weights"
        time.sleep(0.02)
    return torch.load(folder / "weights.pt")


@contextlib.contextmanager
def trainer(rank: int, count: int, folder: Path) -> Iterator[Names]:
    """A model, its optimizer, a training step."""
    import torch

    model = tiny_model()
    first = model[0].weight.detach().clone()
    yield {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "train": train, "steps": STEPS}
    assert not torch.equal(model[0].weight, first), "nothing was trained"
    save({name: tensor.detach().clone() for name, tensor in model.named_parameters()}, folder)


@contextlib.contextmanager
def sharded_trainer(rank: int, count: int, folder: Path) -> Iterator[Names]:
    """The same inside a process group, for an example that shards the model itself."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    try:
        model = tiny_model()
        yield {"model": model, "train": train, "steps": STEPS, "torch": torch, "fully_shard": fully_shard}
        whole = {name: tensor.full_tensor() for name, tensor in model.named_parameters()}
        assert not torch.equal(whole["0.weight"], tiny_model()[0].weight), "nothing was trained"
        if rank == 0:
            save(whole, folder)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def engine(rank: int, count: int, folder: Path) -> Iterator[Names]:
    """An engine with a whole copy of the model on each rank; it serves until it has the trainer's last version."""
    import torch

    calls: list[str] = []
    served = SimpleNamespace(version=0, pause=lambda: calls.append("pause"), reset_caches=lambda: calls.append("reset"))

    class Serving:
        def __bool__(self) -> bool:
            # Every run of the trainer ends at a multiple of its steps.
            return served.version == 0 or served.version % STEPS != 0

    model = tiny_model()
    yield {"model": model, "engine": served, "serving": Serving(), "rank": rank, "world": count}
    assert calls and calls == ["pause", "reset"] * (len(calls) // 2), calls
    expected = load(folder)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, expected[name]), name


@contextlib.contextmanager
def fused_trainer(rank: int, count: int, folder: Path) -> Iterator[Names]:
    """Not an example: publishes the tensors that the example of fused buffers asks for."""
    import torch

    import tensorbus.torch

    shapes = {"layers.0.q_proj.weight": (1024, 1024), "layers.0.k_proj.weight": (256, 1024), "layers.0.v_proj.weight": (256, 1024),
              "layers.0.o_proj.weight": (1024, 1024), "embed.weight": (8003, 1024)}
    shapes.update({f"layers.0.experts.{e}.down.weight": (1024, 256) for e in range(8)})
    torch.manual_seed(3)
    tensors = {name: torch.randn(shape, dtype=torch.float32).to(torch.bfloat16) for name, shape in shapes.items()}
    save(tensors, folder)
    with tensorbus.torch.publish(tensors, channel="policy") as publisher:
        yield {}
        publisher.publish(1).wait(timeout_s=PATIENCE_S)
        publisher.client.wait_released(1, PATIENCE_S)


@contextlib.contextmanager
def fused_engine(rank: int, count: int, folder: Path) -> Iterator[Names]:
    """Updates what the example registered and compares each buffer with a slicing written out here."""
    import torch

    names: Names = {"r": rank, "n": count}
    yield names
    names["subscriber"].update("latest").wait(timeout_s=PATIENCE_S)
    whole, buffers = load(folder), names["buffers"]
    q, k, v = (whole[f"layers.0.{part}_proj.weight"].chunk(count)[rank] for part in "qkv")
    assert torch.equal(buffers["qkv"], torch.cat([q, k, v]))
    assert torch.equal(buffers["o"], whole["layers.0.o_proj.weight"].chunk(count)[rank].T)
    assert torch.equal(buffers["w2"], torch.stack([whole[f"layers.0.experts.{e}.down.weight"] for e in range(8)]))
    part = whole["embed.weight"][2001 * rank:2001 * (rank + 1)]
    for name in ("embed", "head"):
        assert torch.equal(buffers[name][:len(part)], part), name
        assert not buffers[name][len(part):].any(), "padding was written"


@contextlib.contextmanager
def arrays(rank: int, count: int, folder: Path) -> Iterator[Names]:
    """What an example without PyTorch leaves open: which rank this is."""
    yield {"r": rank, "n": count}


@contextlib.contextmanager
def array_engine(rank: int, count: int, folder: Path) -> Iterator[Names]:
    """Not an example: takes what the example without PyTorch publishes."""
    import tensorbus

    arena = tensorbus.Arena(1 << 27)
    weights = arena.array((4096, 4096), "float32")
    holding = tensorbus.Holding()
    holding.add("w", weights)
    with tensorbus.connect("policy", "engine", role="consumer", timeout_s=PATIENCE_S) as bus:
        bus.attach(arena)
        bus.register(holding)
        yield {}
        bus.update("next").wait(timeout_s=PATIENCE_S)
    assert (weights == 1).all()


SURROUNDINGS: dict[str, Callable[[int, int, Path], contextlib.AbstractContextManager[Names]]] = {
    run.__name__: run for run in (trainer, sharded_trainer, engine, fused_trainer, fused_engine, arrays, array_engine)}


def main(surroundings: str, rank: str, count: str, folder: str) -> None:
    code = compile(sys.stdin.read(), "example", "exec")
    with SURROUNDINGS[surroundings](int(rank), int(count), Path(folder)) as names:
        exec(code, names)  # noqa: S102  the example is ours


if __name__ == "__main__":
    main(*sys.argv[1:])
