"""Where the pieces of a sharded tensor lie: DeviceMesh placements to boxes, in closed form.

The rules are PyTorch's: `Shard(d)` cuts like `torch.chunk` (ceil, trailing shards short or empty);
`_StridedShard(d, split_factor=s)` splits into s chunks, each of these over the mesh dimension, and joins piece i of every chunk.
Several placements on one tensor dimension apply in mesh order, each to what the one before left.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .errors import LayoutError

Range = tuple[int, int]
Box = tuple[Range, ...]


class LocalBox(NamedTuple):
    """A box of the logical tensor and where it begins in the rank's local tensor."""

    box: Box
    at: tuple[int, ...]


def chunk(size: int, parts: int, index: int) -> Range:
    """Chunk `index` of `size` elements cut into `parts` as torch.chunk does; empty ones are (size, size)."""
    each = -(-size // parts)
    return min(size, index * each), min(size, (index + 1) * each)


def _cut(ranges: list[Range], lo: int, hi: int) -> list[Range]:
    """Elements [lo, hi) of the concatenation of `ranges`."""
    out, at = [], 0
    for first, last in ranges:
        begin, end = max(lo - at, 0), min(hi - at, last - first)
        if begin < end:
            out.append((first + begin, first + end))
        at += last - first
    return out


def _joined(ranges: list[Range]) -> list[Range]:
    out: list[Range] = []
    for lo, hi in ranges:
        if out and out[-1][1] == lo:
            out[-1] = (out[-1][0], hi)
        else:
            out.append((lo, hi))
    return out


def local_boxes(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int]) -> list[LocalBox]:
    """The boxes that the rank at `coordinate` of a mesh holds, each with its place in the local tensor.

    Placements are PyTorch's objects. Empty when the rank holds nothing. Raises LayoutError for what cannot be sent.
    """
    held: list[list[Range]] = [[(0, int(n))] for n in shape]
    for parts, placement, index in zip(mesh, placements, coordinate, strict=True):
        if placement.is_partial():
            raise LayoutError(f"placement {placement}: the ranks hold terms of a sum; reduce them first (redistribute)",
                              code="UNIMPLEMENTED", reason="unsupported")
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue  # replicated
        dim += len(shape) if dim < 0 else 0
        if not 0 <= dim < len(shape):
            raise LayoutError(f"placement {placement} of a tensor of {len(shape)} dimensions", code="INVALID_ARGUMENT",
                              reason="layout_mismatch")
        held[dim] = _shard(held[dim], parts, index, getattr(placement, "split_factor", 1))
    per_dim = []
    for ranges in held:
        starts, at = [], 0
        for lo, hi in _joined(ranges):
            starts.append(((lo, hi), at))
            at += hi - lo
        per_dim.append([s for s in starts if s[0][0] < s[0][1]])
    return [LocalBox(tuple(r for r, _ in combination), tuple(at for _, at in combination))
            for combination in itertools.product(*per_dim)]


def _shard(ranges: list[Range], parts: int, index: int, split_factor: int) -> list[Range]:
    size = sum(hi - lo for lo, hi in ranges)
    out: list[Range] = []
    for split in range(split_factor):
        first, last = chunk(size, split_factor, split)
        lo, hi = chunk(last - first, parts, index)
        out += _cut(ranges, first + lo, first + hi)
    return out


def local_shape(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int]) -> tuple[int, ...]:
    """Shape of the rank's local tensor."""
    sizes = [int(n) for n in shape]
    for parts, placement, index in zip(mesh, placements, coordinate, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_partial():
            continue
        dim += len(shape) if dim < 0 else 0
        sizes[dim] = sum(hi - lo for lo, hi in _shard([(0, sizes[dim])], parts, index, getattr(placement, "split_factor", 1)))
    return tuple(sizes)
