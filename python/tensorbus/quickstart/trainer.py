"""One rank of the trainer job: a real PyTorch training loop that publishes its weights after every step.

FSDP2 (`fully_shard` per layer) over gloo on the CPU, bf16 parameters, AdamW. The ranks read different rows of one small text.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tensorbus.models.llama import Decoder
from tensorbus.models.weights import load_decoder

from .bus import Publisher, open_publisher
from .events import Emitter
from .leaks import own_usage
from .processes import end_with_parent
from .settings import Settings

PublisherOf = Callable[[Settings, int, nn.Module], Publisher]

TEXT = """A bus carries many passengers at once and stops only where somebody wants to get off. Weights travel the same way: the
trainer knows which rows of a matrix each of its ranks holds, the engine knows which rows it needs, and whoever has a row hands it
over directly. Nobody collects the whole matrix first. When every rank has its rows and has checked them, all of them turn to the new
weights in the same moment, and the next token is made by the model that was trained a second ago."""


def training_tokens(settings: Settings, vocab: int) -> Tensor:
    """Token ids [ranks * batch, sequence + 1]: the text under the model's tokenizer, or seeded noise where it has none."""
    rows, length = settings.trainer_ranks * settings.batch, settings.sequence + 1
    ids: list[int] = []
    tokenizer_file = Path(settings.model) / "tokenizer.json"
    if tokenizer_file.exists():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(tokenizer_file)).encode(TEXT).ids
    if len(set(ids)) < 8:
        noise = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(0, vocab, (4 * length,), generator=noise).tolist()
    # Rows begin at different places of the repeated text, so that ranks do different work.
    starts = [row * len(ids) // rows for row in range(rows)]
    return torch.tensor([list(itertools.islice(itertools.cycle(ids), start, start + length)) for start in starts])


def compute_dtype() -> torch.dtype:
    """bf16 where this CPU multiplies it in hardware; elsewhere PyTorch falls back to a product ten times slower than f32."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def shard_model(model: Decoder, ranks: int) -> Decoder:
    """FSDP2 over all ranks: a group per layer, one for the rest.

    Parameters and optimizer state stay bf16; FSDP casts what it gathers to compute_dtype(). Gradients are summed in float32.
    """
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype(), reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """One optimizer step on this rank's rows [batch, sequence + 1]; the loss before it, in nats per token."""
    logits = model(tokens[:, :-1]).float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def gather_state(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Every whole parameter, by name. All ranks must call it; those that do not `keep` get an empty answer."""
    state = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.data
        if keep:
            state[name] = whole.detach()
    return state


def write_reference(state: dict[str, Tensor], path: Path) -> None:
    """Writes the full state so that a reader sees all of it or nothing."""
    part = path.with_suffix(".part")
    save_file(state, str(part))
    part.rename(path)


def train(settings: Settings, rank: int, emit: Emitter, publisher_of: PublisherOf) -> None:
    """The job of one rank, inside an initialised process group. Ends after the last version is released."""
    began = time.monotonic()
    model = shard_model(load_decoder(Path(settings.model)), settings.trainer_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    rows = training_tokens(settings, model.config.vocab)
    tokens = rows[rank * settings.batch:(rank + 1) * settings.batch]
    emit("loaded", seconds=time.monotonic() - began)
    publisher = publisher_of(settings, rank, model)
    publisher.fence(optimizer)
    emit("registered", seconds=time.monotonic() - began)
    try:
        for version in range(1, settings.refreshes + 1):
            step_began = time.monotonic()
            losses = [train_step(model, optimizer, tokens) for _ in range(settings.steps_per_refresh)]
            emit("step", version=version, loss=losses[-1], seconds=time.monotonic() - step_began)
            state = gather_state(model, keep=rank == 0)
            if rank == 0:
                write_reference(state, settings.reference(version))
            del state
            # Nobody publishes before the reference is there: a rank that flips may read it at once.
            dist.barrier()
            asked = time.monotonic()
            publisher.publish(version)
            emit("published", at=asked, version=version, seconds=time.monotonic() - asked)
            publisher.wait_released(version, settings.deadline_s)
            emit("released", version=version, blocked_seconds=time.monotonic() - asked, usage=own_usage())
            if rank == 0:
                # This version is live everywhere, so everybody is done comparing the one before.
                settings.reference(version - 1).unlink(missing_ok=True)
    finally:
        publisher.close()


def main(argv: list[str], publisher_of: PublisherOf = open_publisher) -> int:
    parser = argparse.ArgumentParser(prog="python -m tensorbus.quickstart.trainer", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--events-fd", type=int)
    options = parser.parse_args(argv)
    end_with_parent()
    settings = Settings.read(options.settings)
    emit = Emitter(options.events_fd, "trainer", options.rank)
    torch.set_num_threads(settings.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A file instead of a port: nothing to collide with, and it goes with the run's folder.
    dist.init_process_group("gloo", init_method=f"file://{settings.folder}/rendezvous", rank=options.rank,
                            world_size=settings.trainer_ranks)
    try:
        train(settings, options.rank, emit, publisher_of)
    finally:
        dist.destroy_process_group()
    emit("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
