"""One rank of the trainer job: a real PyTorch training loop that publishes its weights after every step.

FSDP2 (`fully_shard` per layer) over gloo on the CPU, bf16 parameters, AdamW. The ranks read different rows of one small text.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tensorbus.models.llama import Decoder
from tensorbus.models.weights import load_decoder

from .bus import Publisher, open_publisher
from .rank_process import RankProcess, offer_version, start_rank, write_reference
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


def train(process: RankProcess, publisher_of: PublisherOf) -> None:
    """The job of one rank, inside an initialised process group. Ends after the last version is released."""
    settings, rank, emit = process.settings, process.rank, process.emit
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
            offer_version(publisher, version, process)
    finally:
        publisher.close()


def main(argv: list[str], publisher_of: PublisherOf = open_publisher) -> int:
    process = start_rank("trainer", __doc__, argv)
    settings = process.settings
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A file instead of a port: nothing to collide with, and it goes with the run's folder.
    dist.init_process_group("gloo", init_method=f"file://{settings.folder}/rendezvous", rank=process.rank,
                            world_size=settings.trainer_ranks)
    try:
        train(process, publisher_of)
    finally:
        dist.destroy_process_group()
    process.emit("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
