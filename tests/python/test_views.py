"""Views of memory against NumPy: every element of a box is where the view says."""

import itertools

import numpy as np
import pytest

import tensorbus
from tensorbus.views import Holding, concatenate, dtype_name, padded, rows, stack, strides_of, tie, unstack


def check(holding, logical, base):
    """Reads every view of `holding` through its bytes in `base` and compares with the logical tensors."""
    raw = base.view(np.uint8).reshape(-1)
    for view in holding.views:
        tensor = logical[view.name]
        assert holding.tensors[view.name][1] == tensor.shape
        for index in itertools.product(*(range(lo, hi) for lo, hi in view.box)):
            at = view.at.address - base.ctypes.data + sum((i - lo) * s for i, (lo, _), s in zip(index, view.box, view.at.strides))
            got = raw[at:at + view.at.item_bytes].view(base.dtype)[0]
            assert got == tensor[index], (view.name, index)


def numbered(*shape, start=0):
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def test_slices_transposes_and_permutations():
    logical = {"t": numbered(4, 6, 5)}
    base = np.ascontiguousarray(logical["t"][1:3, :, 2:5].transpose(2, 0, 1))
    holding = Holding()
    holding.add("t", base.transpose(1, 2, 0), shape=(4, 6, 5), box=((1, 3), (0, 6), (2, 5)))
    check(holding, logical, base)


def test_interleaved_heads():
    logical = {"q": numbered(8, 3), "k": numbered(8, 3, start=100)}
    # Heads of two rows, q and k in turns.
    base = np.empty((4, 2, 2, 3), np.float32)
    holding = Holding()
    for head in range(4):
        for slot, name in enumerate("qk"):
            base[head, slot] = logical[name][2 * head:2 * head + 2]
            holding.add(name, base[head, slot], shape=(8, 3), box=((2 * head, 2 * head + 2), (0, 3)))
    check(holding, logical, base)


def test_fused_qkv_fills_its_buffer():
    logical = {"q": numbered(8, 4), "k": numbered(4, 4, start=50), "v": numbered(4, 4, start=90)}
    base = np.concatenate([logical["q"][4:8], logical["k"][2:4], logical["v"][2:4]])
    holding = Holding()
    parts = [rows("q", (8, 4), 4, 8), rows("k", (4, 4), 2, 4), rows("v", (4, 4), 2, 4)]
    concatenate(holding, base, parts)
    check(holding, logical, base)
    with pytest.raises(tensorbus.LayoutError, match="fill 6 of 8"):
        concatenate(Holding(), base, parts[:2])


def test_experts_stacked_both_ways():
    logical = {f"e{i}": numbered(2, 3, start=10 * i) for i in range(3)}
    base = np.stack([logical[f"e{i}"] for i in range(3)])
    holding = Holding()
    stack(holding, base, [rows(f"e{i}", (2, 3), 0, 2) for i in range(3)])
    check(holding, logical, base)

    logical = {"all": numbered(4, 2, 6)}
    base = np.stack([logical["all"][1][:, 3:6], logical["all"][2][:, 3:6]])
    holding = Holding()
    unstack(holding, [base[0], base[1]], "all", (4, 2, 6), first=1, box=((0, 2), (3, 6)))
    check(holding, logical, base)
    with pytest.raises(tensorbus.LayoutError):
        stack(Holding(), base, [rows("e", (2, 3), 0, 2)])


def test_padded_vocabulary():
    logical = {"v": numbered(10, 2)}
    base = np.full((4, 2), -1, np.float32)
    base[:2] = logical["v"][8:]
    holding = Holding()
    assert padded(holding, base, "v", (10, 2), first=8) == 2
    check(holding, logical, base)
    holding = Holding()
    assert padded(holding, base, "v", (10, 2), first=12) == 0
    assert not holding.views and "v" in holding


def test_tied_memory_is_a_second_view_of_one_tensor():
    a, b = numbered(3), numbered(3)
    holding = Holding()
    holding.add("w", a)
    tie(holding, "w", b)
    assert [view.box for view in holding.views] == [((0, 3),)] * 2
    assert len(holding) == 1 and holding.bytes == 24
    with pytest.raises(tensorbus.LayoutError, match="near are 'w'"):
        tie(holding, "w.", b)


def test_scalars_and_empty_parts():
    holding = Holding()
    holding.add("s", np.array(5.0))
    holding.add("e", np.empty((0, 3), np.float32), shape=(4, 3), box=((4, 4), (0, 3)))
    assert len(holding.views) == 1 and holding.tensors["e"] == ("f32", (4, 3))


@pytest.mark.parametrize("arguments, message", [
    ({"shape": (2, 4)}, "memory of shape"),
    ({"shape": (4, 4), "box": ((0, 2), (0, 5))}, "does not lie in"),
    ({"shape": (4, 4), "box": ((0, 2),)}, "does not lie in"),
    ({"shape": (4, 3), "box": ((3, 2), (0, 3))}, "does not lie in"),
    ({"dtype": "bf16"}, "is bf16, its memory f32"),
])
def test_what_does_not_fit_names_the_tensor(arguments, message):
    holding = Holding()
    with pytest.raises(tensorbus.LayoutError, match=f"'t'.*{message}|'t' {message}"):
        holding.add("t", numbered(2, 3), **arguments)
    assert len(holding) == 0


def test_one_name_has_one_shape_and_dtype():
    holding = Holding()
    holding.add("t", numbered(2, 3))
    with pytest.raises(tensorbus.LayoutError, match="was f32"):
        holding.add("t", numbered(2, 4))
    with pytest.raises(tensorbus.LayoutError):
        holding.declare("t", "f16", (2, 3))


def test_memory_that_cannot_be_described():
    with pytest.raises(ValueError, match="backwards"):
        strides_of(numbered(4)[::-1])
    with pytest.raises(ValueError, match="neither"):
        strides_of([1, 2])
    with pytest.raises(ValueError, match="known are"):
        strides_of(np.zeros(2, np.complex64))


def test_unknown_names_show_the_near_ones():
    holding = Holding()
    holding.add("model.norm.weight", numbered(2))
    assert list(holding.select(["model.norm.weight"]).tensors) == ["model.norm.weight"]
    with pytest.raises(tensorbus.LayoutError, match="near are 'model.norm.weight'"):
        holding.select(["norm.weight"])


def test_both_spellings_of_dtypes():
    spelled = {"BF16": "bf16", "torch.bfloat16": "bf16", np.float16: "f16", np.dtype("i8"): "i64", "F8_E4M3": "f8e4m3",
               np.dtype(bool): "bool", "f8e5m2": "f8e5m2"}
    assert {d: dtype_name(d) for d in spelled} == spelled


def test_bytes_in_the_other_order_are_refused():
    other = np.dtype(np.float32).newbyteorder("S")
    with pytest.raises(tensorbus.InvalidError, match="tensor 'w': .*newbyteorder"):
        Holding().add("w", np.zeros(4, other))
    with pytest.raises(tensorbus.InvalidError, match="other order"):
        strides_of(np.zeros((2, 2), np.dtype(np.int64).newbyteorder("S"))[:, 1])
    strides_of(np.zeros(4, np.dtype(np.uint8).newbyteorder("S")))  # one byte has no order
