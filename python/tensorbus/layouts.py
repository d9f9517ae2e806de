"""Where the pieces of a sharded tensor lie: DeviceMesh placements to boxes. The rules are those of every layout (tensorbus/types/placement.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _core
from .errors import InvalidError, LayoutError, UnsupportedError

Range = tuple[int, int]
Box = tuple[Range, ...]


class LocalBox(NamedTuple):
    """A box of the logical tensor and where it begins in the rank's local tensor."""

    box: Box
    at: tuple[int, ...]


def local_boxes(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int]) -> list[LocalBox]:
    """The boxes that the rank at `coordinate` of a mesh holds, each with its place in the local tensor.

    Placements are PyTorch's objects. Empty when the rank holds nothing. Raises LayoutError for what cannot be sent.
    """
    try:
        boxes = _core.boxes_at(list(shape), list(mesh), [repr(placement) for placement in placements], list(coordinate))
    except (InvalidError, UnsupportedError) as error:
        raise LayoutError(str(error), code=error.code, reason=error.reason) from None
    # What is held is a product of index sets, and the local tensor has the indices of each set one after the other.
    starts: list[dict[int, int]] = []
    for ranges in zip(*boxes):
        at, firsts = 0, {}
        for lo, hi in sorted(set(ranges)):
            firsts[lo] = at
            at += hi - lo
        starts.append(firsts)
    return [LocalBox(box, tuple(firsts[lo] for (lo, _), firsts in zip(box, starts))) for box in map(tuple, boxes)]


def local_shape(boxes: Sequence[LocalBox]) -> tuple[int, ...]:
    """Shape of the local tensor that has these boxes, of which there is at least one."""
    return tuple(max(at + hi - lo for (lo, hi), at in dim) for dim in zip(*(zip(b.box, b.at) for b in boxes)))
