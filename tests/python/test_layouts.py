"""Placements to boxes: against PyTorch's own arithmetic, and by counting every element."""

import itertools
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

import tensorbus  # noqa: E402
from tensorbus.layouts import local_boxes, local_shape  # noqa: E402


def elements(box):
    return itertools.product(*(range(lo, hi) for lo, hi in box))


@pytest.mark.parametrize("size", range(0, 13))
@pytest.mark.parametrize("parts", range(1, 9))
def test_chunks_are_those_of_torch(size, parts):
    pieces = [len(p) for p in torch.arange(size).chunk(parts)] if size else []
    pieces += [0] * (parts - len(pieces))
    held = [local_boxes((size,), (parts,), (Shard(0),), (i,)) for i in range(parts)]
    assert [boxes[0].box[0][1] - boxes[0].box[0][0] if boxes else 0 for boxes in held] == pieces


SHAPES = ((7, 5), (8, 6), (1, 3), (5,), (2, 3, 4))
MESHES = ((2,), (3,), (2, 2), (3, 2), (2, 2, 2))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shards_lie_where_torch_puts_them(shape, mesh):
    options = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    for placements in itertools.product(options, repeat=len(mesh)):
        count = Counter()
        for coordinate in itertools.product(*map(range, mesh)):
            boxes = local_boxes(shape, mesh, placements, coordinate)
            sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
            if 0 in sizes:
                assert boxes == []
            else:
                assert local_shape(boxes) == tuple(sizes)
                ((box, at),) = boxes
                assert box == tuple((o, o + n) for o, n in zip(offsets, sizes)) and set(at) <= {0}
            for box, _ in boxes:
                count.update(elements(box))
        copies = 1
        for parts, placement in zip(mesh, placements):
            copies *= parts if placement.is_replicate() else 1
        assert set(count) == set(elements(tuple((0, n) for n in shape)))
        assert set(count.values()) == {copies}


@pytest.mark.parametrize("size", range(1, 17))
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3)])
def test_strided_shards_join_their_pieces(size, mesh):
    """FSDP over tensor parallel, against an explicit split, split, concatenate."""
    for rows in (False, True):
        placements = (_StridedShard(0, split_factor=mesh[1]), Shard(0) if rows else Replicate())
        for i, j in itertools.product(range(mesh[0]), range(mesh[1])):
            parts = []
            for block in torch.arange(size).chunk(mesh[1]):
                pieces = block.chunk(mesh[0])
                parts.append(pieces[i] if i < len(pieces) else block[:0])
            held = torch.cat(parts)
            if rows:
                chunks = held.chunk(mesh[1])
                held = chunks[j] if j < len(chunks) else held[:0]
            got = [None] * len(held)
            for ((lo, hi),), (at,) in local_boxes((size,), mesh, placements, (i, j)):
                got[at:at + hi - lo] = range(lo, hi)
            assert got == held.tolist(), (size, mesh, i, j)


def test_negative_dimensions_count_from_the_end():
    assert local_boxes((4, 6), (2,), (Shard(-1),), (1,)) == [(((0, 4), (3, 6)), (0, 0))]


def test_what_cannot_be_sent_says_why():
    with pytest.raises(tensorbus.LayoutError, match="Partial: .* reduce it first"):
        local_boxes((4,), (2,), (Partial(),), (0,))
    with pytest.raises(tensorbus.LayoutError, match=r"Shard\(3\): the tensor has 1 dim"):
        local_boxes((4,), (2,), (Shard(3),), (0,))
    with pytest.raises(tensorbus.LayoutError, match="not on the mesh"):
        local_boxes((4,), (2,), (Shard(0),), (2,))
    with pytest.raises(tensorbus.LayoutError, match="1 for a mesh of 2 axes"):
        local_boxes((4,), (2, 2), (Shard(0),), (0, 0))
