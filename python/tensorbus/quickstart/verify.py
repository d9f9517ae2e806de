"""The proof at the end of a refresh: what a rank should hold, cut out of the trainer's full state by code of its own.

Nothing here uses the views of vllm_layout.py: tensors are cut with torch.chunk, concatenated and padded, the way an engine's
own weight loaders do it. A mistake in the views therefore shows as a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tensorbus.models.config import DecoderConfig

Full = Callable[[str], Tensor]
"""Looks up a whole tensor of the trainer by name."""


@dataclass(frozen=True)
class Difference:
    """The first place where a buffer is not what it should be."""

    buffer: str
    index: tuple[int, ...]
    found: float
    wanted: float
    count: int

    def __str__(self) -> str:
        return (f"{self.buffer}{list(self.index)} is {self.found!r}, should be {self.wanted!r} "
                f"({self.count} elements of the buffer differ)")


def _pad_vocabulary(weight: Tensor, tp: int, rank: int) -> Tensor:
    """[V, D] to this rank's [Vp / tp, D]; the padding is zero."""
    missing = -weight.shape[0] % 64
    padded = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
    return padded.tensor_split(tp)[rank]


def _kv_part(weight: Tensor, config: DecoderConfig, tp: int, rank: int) -> Tensor:
    """A rank's rows of k or v [G * d, D]: its own heads, or a copy of the one it shares."""
    heads = list(weight.split(config.head_dim))
    copies = max(1, tp // config.kv_heads)
    spread = [head for head in heads for _ in range(copies)]
    return torch.cat(spread[rank * len(spread) // tp:(rank + 1) * len(spread) // tp])


def expected_shard(config: DecoderConfig, tp: int, rank: int, full: Full, single_experts: bool = False
                   ) -> Iterator[tuple[str, Tensor]]:
    """Each (buffer name, contents) of an engine's rank, one at a time."""
    def column(name: str) -> Tensor:  # splits outputs: rows of the weight
        return full(name).chunk(tp, dim=0)[rank]

    def row(name: str) -> Tensor:  # splits inputs: columns of the weight
        return full(name).chunk(tp, dim=-1)[rank]

    yield "model.embed_tokens.weight", _pad_vocabulary(full("model.embed_tokens.weight"), tp, rank)
    for layer in range(config.layers):
        base = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{base}{name}.weight", full(f"{base}{name}.weight")
        attention = f"{base}self_attn."
        k, v = (_kv_part(full(f"{attention}{name}_proj.weight"), config, tp, rank) for name in "kv")
        yield f"{attention}qkv_proj.weight", torch.cat([column(f"{attention}q_proj.weight"), k, v])
        yield f"{attention}o_proj.weight", row(f"{attention}o_proj.weight")
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield f"{attention}{name}.weight", full(f"{attention}{name}.weight")
        mlp = f"{base}mlp."
        if not config.experts:
            yield f"{mlp}gate_up_proj.weight", torch.cat([column(f"{mlp}gate_proj.weight"), column(f"{mlp}up_proj.weight")])
            yield f"{mlp}down_proj.weight", row(f"{mlp}down_proj.weight")
            continue
        yield f"{mlp}gate.weight", full(f"{mlp}gate.weight")
        gates, ups = (half.chunk(tp, dim=1)[rank] for half in full(f"{mlp}experts.gate_up_proj").chunk(2, dim=1))
        downs = row(f"{mlp}experts.down_proj")
        if not single_experts:
            yield f"{mlp}experts.w13_weight", torch.cat([gates, ups], dim=1)
            yield f"{mlp}experts.w2_weight", downs
            continue
        for expert, (gate, up, down) in enumerate(zip(gates, ups, downs)):
            for name, part in (("gate", gate), ("up", up), ("down", down)):
                yield f"{mlp}experts.{expert}.{name}_proj.weight", part
    yield "model.norm.weight", full("model.norm.weight")
    if not config.tied:
        yield "lm_head.weight", _pad_vocabulary(full("lm_head.weight"), tp, rank)


def compare(name: str, found: Tensor, wanted: Tensor) -> Difference | None:
    """Bit by bit (so that NaN equals NaN and -0 does not equal 0). ValueError when shape or dtype differ already."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise ValueError(f"{name}: {found.dtype} {list(found.shape)} cannot equal {wanted.dtype} {list(wanted.shape)}")
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    unequal = found.contiguous().view(word) != wanted.contiguous().view(word)
    count = int(unequal.sum())
    if not count:
        return None
    index = tuple(int(i) for i in unequal.nonzero()[0])
    return Difference(name, index, float(found[index]), float(wanted[index]), count)


def verify_shard(config: DecoderConfig, tp: int, rank: int, buffers: Mapping[str, Tensor], full: Full, *,
                 single_experts: bool = False) -> tuple[int, list[Difference]]:
    """Compares every element of every buffer. (elements compared, differences: at most one per buffer).

    ValueError when the rank holds a buffer it should not, or lacks one.
    """
    left = dict(buffers)
    elements, differences = 0, []
    for name, wanted in expected_shard(config, tp, rank, full, single_experts):
        found = left.pop(name, None)
        if found is None:
            raise ValueError(f"rank {rank} has no buffer {name}")
        elements += wanted.numel()
        difference = compare(name, found, wanted)
        if difference:
            differences.append(difference)
    if left:
        raise ValueError(f"rank {rank} holds what nobody expects: {', '.join(sorted(left)[:5])}")
    return elements, differences


def verify_against_file(config: DecoderConfig, tp: int, rank: int, buffers: Mapping[str, Tensor], reference: Path,
                        single_experts: bool = False) -> tuple[int, list[Difference]]:
    """verify_shard() against the full state in a safetensors file; read tensor by tensor, nothing stays open."""
    with safe_open(reference, framework="pt") as file:
        return verify_shard(config, tp, rank, buffers, file.get_tensor, single_experts=single_experts)
