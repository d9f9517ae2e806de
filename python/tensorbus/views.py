"""What one rank holds: which part of which logical tensor lies where in this process's memory.

A `Holding` is a list of views. Each says that a strided stretch of memory (a PyTorch tensor or a NumPy array, or any
slice, transpose or permutation of one) holds one box of a logical tensor:

    holding = Holding()
    holding.add("norm.weight", norm)                                           # all of it
    holding.add("q_proj.weight", qkv[:q], shape=(4096, 4096), box=((0, q), (0, 4096)))

Fused, stacked, padded, transposed and tied buffers are all just views; the functions below spell the usual ones out.
Names are exact: nothing is guessed from them.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import InvalidError, LayoutError

Box = tuple[tuple[int, int], ...]
"""Half-open index range per dimension of a logical tensor."""

MAX_DIMS = 8

DTYPES: dict[str, tuple[int, int]] = {
    "f64": (1, 8), "f32": (2, 4), "f16": (3, 2), "bf16": (4, 2), "f8e4m3": (5, 1), "f8e5m2": (6, 1), "i64": (7, 8),
    "i32": (8, 4), "i16": (9, 2), "i8": (10, 1), "u8": (11, 1), "bool": (12, 1), "f4e2m1x2": (13, 1),
}
"""Our spelling of each dtype, its code and its bytes per element."""

_SPELLINGS = {
    "float64": "f64", "double": "f64", "float32": "f32", "float": "f32", "float16": "f16", "half": "f16",
    "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "float4_e2m1fn_x2": "f4e2m1x2",
    "f8_e4m3": "f8e4m3", "f8_e5m2": "f8e5m2",
}


def dtype_name(dtype: Any) -> str:
    """Our spelling of a dtype of PyTorch, NumPy or a string ("BF16", "torch.bfloat16", "bf16")."""
    text = dtype.__name__ if isinstance(dtype, type) else getattr(dtype, "name", None) or str(dtype)
    text = text.removeprefix("torch.").lower()
    text = _SPELLINGS.get(text, text)
    if text not in DTYPES:
        raise InvalidError(f"dtype {dtype} cannot travel; known are {', '.join(DTYPES)}", code="INVALID_ARGUMENT",
                           reason="dtype_mismatch")
    return text


class Strides(NamedTuple):
    """Where a strided view lies: bytes throughout."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    item_bytes: int
    read_only: bool = False

    @property
    def end(self) -> int:
        """First byte after the view."""
        if 0 in self.shape:
            return self.address
        return self.address + sum((n - 1) * s for n, s in zip(self.shape, self.strides)) + self.item_bytes


def strides_of(view: Any) -> Strides:
    """Looks at a PyTorch tensor, a NumPy array or anything with `__array_interface__`."""
    if hasattr(view, "data_ptr") and hasattr(view, "stride"):
        return _strides_of_torch(view)
    interface = getattr(view, "__array_interface__", None)
    if interface is None:
        raise InvalidError(f"a {type(view).__name__} is neither a PyTorch tensor nor a NumPy array", code="INVALID_ARGUMENT")
    dtype = dtype_name(view.dtype)
    # Bytes travel as they lie.
    if interface["typestr"].startswith(">" if sys.byteorder == "little" else "<"):
        raise InvalidError(f"dtype {interface['typestr']} has its bytes in the other order than this machine; copy it with "
                           "astype(dtype.newbyteorder('='))", code="INVALID_ARGUMENT", reason="dtype_mismatch")
    item = DTYPES[dtype][1]
    shape = tuple(interface["shape"])
    steps = interface.get("strides")
    if steps is None:
        steps, step = [], item
        for n in reversed(shape):
            steps.append(step)
            step *= n
        steps = tuple(reversed(steps))
    return _checked(Strides(interface["data"][0], shape, tuple(steps), dtype, item, interface["data"][1]))


def _strides_of_torch(view: Any) -> Strides:
    if str(view.layout) != "torch.strided" or view.device.type != "cpu":
        raise InvalidError(f"a {view.layout} tensor on {view.device}: only strided tensors in host memory can be reached",
                           code="UNIMPLEMENTED", reason="unsupported")
    if view.is_conj() or view.is_neg():
        raise InvalidError("a conjugated or negated view does not hold the values it shows", code="INVALID_ARGUMENT")
    dtype = dtype_name(view.dtype)
    item = view.element_size()
    return _checked(Strides(view.data_ptr(), tuple(view.shape), tuple(s * item for s in view.stride()), dtype, item))


def _checked(view: Strides) -> Strides:
    if len(view.shape) > MAX_DIMS:
        raise InvalidError(f"{len(view.shape)} dimensions; at most {MAX_DIMS} are supported", code="INVALID_ARGUMENT")
    # A step over a single element goes nowhere: its stride means nothing.
    strides = tuple(0 if n == 1 else s for n, s in zip(view.shape, view.strides))
    if any(s < 0 for s in strides):
        raise InvalidError("a view that runs backwards (negative strides) cannot be registered", code="INVALID_ARGUMENT")
    return view._replace(strides=strides)


@dataclass(frozen=True)
class View:
    """One box of one logical tensor and the memory that holds it. `memory` keeps that alive."""

    name: str
    box: Box
    at: Strides
    memory: Any


class Holding:
    """The views of one rank, in the order added. `shape` of a tensor is that of the whole logical tensor."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._views: list[View] = []

    @property
    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Name to dtype and shape."""
        return self._tensors

    @property
    def views(self) -> Sequence[View]:
        return self._views

    @property
    def bytes(self) -> int:
        """Bytes of all views; those of an alias count again."""
        total = 0
        for view in self._views:
            size = view.at.item_bytes
            for n in view.at.shape:
                size *= n
            total += size
        return total

    def add(self, name: str, memory: Any, *, shape: Sequence[int] | None = None, box: Sequence[Sequence[int]] | None = None,
            dtype: Any = None) -> None:
        """Says that `memory` holds `box` of the tensor `name`, element for element.

        Without `box` it holds all of it; without `shape` the tensor is as large as `memory`. `dtype` is checked when given.
        The same box again is an alias (tied weights): read through the first, written through all.

        Raises InvalidError or LayoutError naming the tensor; nothing is added then.
        """
        try:
            at = strides_of(memory)
        except InvalidError as error:
            raise type(error)(f"tensor '{name}': {error}", code=error.code, reason=error.reason) from None
        whole = tuple(int(n) for n in (at.shape if shape is None else shape))
        part = tuple((0, n) for n in whole) if box is None else tuple((int(lo), int(hi)) for lo, hi in box)
        if dtype is not None and dtype_name(dtype) != at.dtype:
            raise LayoutError(f"tensor '{name}' is {dtype_name(dtype)}, its memory {at.dtype}", code="INVALID_ARGUMENT",
                              reason="dtype_mismatch")
        if len(part) != len(whole) or any(not 0 <= lo <= hi <= n for (lo, hi), n in zip(part, whole)):
            raise LayoutError(f"tensor '{name}': box {_text(part)} does not lie in shape {list(whole)}",
                              code="INVALID_ARGUMENT", reason="layout_mismatch")
        if tuple(hi - lo for lo, hi in part) != at.shape:
            raise LayoutError(f"tensor '{name}': memory of shape {list(at.shape)} for box {_text(part)}",
                              code="INVALID_ARGUMENT", reason="layout_mismatch")
        known = self._tensors.setdefault(name, (at.dtype, whole))
        if known != (at.dtype, whole):
            raise LayoutError(f"tensor '{name}' was {known[0]} {list(known[1])}, now it is {at.dtype} {list(whole)}",
                              code="INVALID_ARGUMENT", reason="layout_mismatch")
        if 0 not in at.shape:
            self._views.append(View(name, part, at, memory))

    def declare(self, name: str, dtype: Any, shape: Sequence[int]) -> None:
        """Names a tensor of which this rank holds nothing."""
        spec = (dtype_name(dtype), tuple(int(n) for n in shape))
        if self._tensors.setdefault(name, spec) != spec:
            raise LayoutError(f"tensor '{name}' was declared with another shape or dtype", code="INVALID_ARGUMENT",
                              reason="layout_mismatch")

    def select(self, names: Iterable[str]) -> Holding:
        """The part with these tensors. Raises LayoutError with the nearest names for one that is not here."""
        out = Holding()
        for name in names:
            if name not in self._tensors:
                raise unknown_name(name, self._tensors)
            out._tensors[name] = self._tensors[name]
        out._views = [view for view in self._views if view.name in out._tensors]
        return out

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors


def unknown_name(name: str, known: Iterable[str], what: str = "tensor") -> LayoutError:
    """The error for a name that is not there, with the nearest ones that are."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    hint = f"; near are {', '.join(repr(n) for n in near)}" if near else ""
    return LayoutError(f"no {what} '{name}'{hint}", code="NOT_FOUND", reason="unknown_tensor")


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in box) + "]"


class Part(NamedTuple):
    """`box` of a tensor of `shape`, to be laid into a fused buffer."""

    name: str
    shape: tuple[int, ...]
    box: Box


def rows(name: str, shape: Sequence[int], lo: int, hi: int) -> Part:
    """Rows [lo, hi) of a tensor, all of its other dimensions."""
    whole = tuple(int(n) for n in shape)
    return Part(name, whole, ((lo, hi), *((0, n) for n in whole[1:])))


def concatenate(holding: Holding, buffer: Any, parts: Sequence[Part], *, dim: int = 0) -> None:
    """Lays parts one after the other along `dim` of a fused buffer, which they must fill.

    qkv_proj of a tensor-parallel rank:

        concatenate(holding, qkv, [rows("q.weight", (4096, 4096), 0, 1024), rows("k.weight", (1024, 4096), 0, 256),
                                   rows("v.weight", (1024, 4096), 0, 256)])
    """
    at = 0
    for part in parts:
        lo, hi = part.box[dim]
        index = [slice(None)] * len(part.box)
        index[dim] = slice(at, at + hi - lo)
        holding.add(part.name, buffer[tuple(index)], shape=part.shape, box=part.box)
        at += hi - lo
    if at != buffer.shape[dim]:
        names = ", ".join(part.name for part in parts)
        raise LayoutError(f"{names} fill {at} of {buffer.shape[dim]} along dimension {dim}", code="INVALID_ARGUMENT",
                          reason="layout_mismatch")


def stack(holding: Holding, buffer: Any, parts: Sequence[Part]) -> None:
    """Lays each part into one slot of a stacked buffer's first dimension: experts one by one into `[experts, …]`."""
    if len(parts) != buffer.shape[0]:
        raise LayoutError(f"{len(parts)} parts for {buffer.shape[0]} slots", code="INVALID_ARGUMENT", reason="layout_mismatch")
    for slot, part in zip(range(len(parts)), parts):
        holding.add(part.name, buffer[slot], shape=part.shape, box=part.box)


def unstack(holding: Holding, buffers: Sequence[Any], name: str, shape: Sequence[int], *, first: int = 0,
            box: Sequence[Sequence[int]] | None = None) -> None:
    """Lays slots `first`, `first` + 1, … of a stacked tensor into a buffer each. `box` bounds the other dimensions."""
    rest = tuple((0, int(n)) for n in shape[1:]) if box is None else tuple((lo, hi) for lo, hi in box)
    for slot, buffer in enumerate(buffers, first):
        holding.add(name, buffer[None], shape=shape, box=((slot, slot + 1), *rest))


def padded(holding: Holding, buffer: Any, name: str, shape: Sequence[int], *, first: int, dim: int = 0) -> int:
    """Lays what a padded buffer has of a tensor: from index `first` of `dim` on, as far as the tensor goes.

    Returns how many indices that are; the rest of the buffer is padding and never touched. 0 when all is padding.
    """
    whole = tuple(int(n) for n in shape)
    count = max(0, min(buffer.shape[dim], whole[dim] - first))
    if count == 0:
        holding.declare(name, strides_of(buffer).dtype, whole)
        return 0
    index = [slice(None)] * len(whole)
    index[dim] = slice(0, count)
    box = [(0, n) for n in whole]
    box[dim] = (first, first + count)
    holding.add(name, buffer[tuple(index)], shape=whole, box=box)
    return count


def tie(holding: Holding, name: str, *memories: Any) -> None:
    """Further memory for what the tensor's first view holds: written together with it."""
    first = next((view for view in holding.views if view.name == name), None)
    if first is None:
        raise unknown_name(name, holding.tensors)
    for memory in memories:
        holding.add(name, memory, shape=holding.tensors[name][1], box=first.box)
