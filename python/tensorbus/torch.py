"""PyTorch on the bus: publish a module, FSDP2 or DTensors; receive into an engine's tensors in place.

A trainer:

    publisher = tensorbus.torch.publish(model, channel="policy")     # after fully_shard(), before the first step
    publisher.fence(optimizer)                                       # no write before the bus has let go
    version = publisher.latest_version + 1                           # versions only grow
    …
    publisher.publish(version).wait(timeout_s=60)

An engine:

    subscriber = tensorbus.torch.subscribe(weights, channel="policy", rank=r, rank_count=n)
    subscriber.update("latest").wait(timeout_s=60)
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ._client import Arena, Client, HookEvent, Registered, Request, connect
from .errors import InvalidError, LayoutError, MovedMemoryError
from .layouts import Box, LocalBox, local_boxes, local_shape
from .views import Holding, unknown_name

_PAGE_BYTES = 4096
_LINE_BYTES = 64


class Shard(NamedTuple):
    """Which part of a tensor of `shape` a plain local tensor is."""

    shape: tuple[int, ...]
    box: Box


Source = nn.Module | Mapping[str, Tensor] | Holding


# ---- finding tensors


@dataclass
class _Entry:
    """One logical tensor: how to get the tensor that holds it now, and how to give it other memory."""

    name: str
    current: Callable[[], Tensor]
    move: Callable[[Tensor], None]
    shape: tuple[int, ...] = ()
    boxes: list[LocalBox] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)

    @property
    def local(self) -> Tensor:
        return _local(self.current())

    def place(self) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
        local = self.local
        return local.data_ptr(), tuple(local.shape), local.stride(), local.dtype


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _fsdp_params(module: nn.Module) -> dict[int, Any]:
    """FSDP2's own record of each sharded parameter, by the parameter's id."""
    found: dict[int, Any] = {}
    for part in module.modules():
        state = part._get_fsdp_state() if hasattr(part, "_get_fsdp_state") else None
        if state is None:
            continue
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            for record in group.fsdp_params if group is not None else ():
                found[id(record.sharded_param)] = record
    return found


def _reshard(module: nn.Module) -> None:
    """Puts every FSDP2 group back to its shards; after a forward pass the outermost may still hold whole parameters."""
    for part in module.modules():
        if hasattr(part, "_get_fsdp_state") and part._get_fsdp_state() is not None:
            part.reshard()


def _module_entries(module: nn.Module, buffers: bool) -> Iterator[_Entry]:
    _reshard(module)
    records = _fsdp_params(module)
    for prefix, part in module.named_modules(remove_duplicate=False):
        prefix = f"{prefix}." if prefix else ""
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            record = records.get(id(parameter))
            if record is not None:
                yield _Entry(prefix + key, lambda r=record: r.sharded_param, lambda view, r=record: _move_fsdp(r, view))
            else:
                yield _Entry(prefix + key, lambda p=part, k=key: p._parameters[k], lambda view, p=part, k=key: _move(p._parameters[k], view))
        for key, buffer in part._buffers.items() if buffers else ():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                yield _Entry(prefix + key, lambda p=part, k=key: p._buffers[k], lambda view, p=part, k=key: _move(p._buffers[k], view))


def _mapping_entries(tensors: Mapping[str, Tensor]) -> Iterator[_Entry]:
    for name, tensor in tensors.items():
        yield _Entry(name, lambda t=tensors, n=name: t[n], lambda view, t=tensor: _move(t, view))


def _move(tensor: Tensor, view: Tensor) -> None:
    if isinstance(tensor, DTensor):
        tensor._local_tensor = view
    else:
        tensor.data = view


def _move_fsdp(record: Any, view: Tensor) -> None:
    """FSDP2 keeps two tensors on one storage: what the optimizer writes and what all-gather reads. Both move, or training freezes."""
    flat = record._sharded_param_data
    old = record.sharded_param._local_tensor
    if flat.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
        raise InvalidError("this PyTorch keeps FSDP shards in a way that is not known; pass adopt=False", code="UNIMPLEMENTED",
                           reason="unsupported")
    moved = torch.empty(0, dtype=flat.dtype).set_(view.untyped_storage(), flat.storage_offset(), flat.shape, flat.stride())
    record.sharded_param._local_tensor = view
    record._sharded_param_data = moved


def _select(entries: Iterable[_Entry], include: Iterable[str] | None, exclude: Iterable[str]) -> list[_Entry]:
    entries = list(entries)
    names = [entry.name for entry in entries]

    def matching(patterns: Iterable[str]) -> set[str]:
        out: set[str] = set()
        for pattern in patterns:
            found = fnmatch.filter(names, pattern)
            if not found:
                raise unknown_name(pattern, names)
            out.update(found)
        return out

    wanted = matching(include) if include is not None else set(names)
    wanted -= matching(exclude)
    return [entry for entry in entries if entry.name in wanted]


def _merge_tied(entries: list[_Entry]) -> list[_Entry]:
    """Entries on the very same memory are one tensor under the first name; the others become its aliases."""
    first: dict[Any, _Entry] = {}
    out = []
    for entry in entries:
        place = entry.place()
        known = first.get(place) if entry.local.numel() else None
        if known is not None:
            known.aliases.append(entry.name)
            continue
        first[place] = entry
        out.append(entry)
    return out


def _resolve(entry: _Entry, shard: Shard | None) -> None:
    """Fills in which boxes of the logical tensor the entry's local tensor holds."""
    tensor = entry.current()
    local = _local(tensor)
    if shard is not None:
        entry.shape = tuple(shard.shape)
        entry.boxes = [LocalBox(tuple(shard.box), (0,) * len(shard.box))]
        return
    entry.shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        entry.boxes = [LocalBox(tuple((0, n) for n in local.shape), (0,) * local.dim())]
        return
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        entry.boxes = []
        return
    sizes = tuple(mesh.shape)
    try:
        for placement in placements:
            split = getattr(placement, "split_factor", 1)
            if split > 1 and entry.shape[placement.dim] % split:
                raise LayoutError(f"{placement} of {entry.shape[placement.dim]} elements: where FSDP cuts tensor-parallel shards of "
                                  "unequal size, placements do not say who holds what; give shards={name: Shard(shape, box)}",
                                  code="UNIMPLEMENTED", reason="unsupported")
        entry.boxes = local_boxes(entry.shape, sizes, placements, coordinate)
        given = list(local_shape(entry.boxes)) if entry.boxes else "nothing"
        if given != list(local.shape) and (entry.boxes or local.numel()):
            raise LayoutError(f"a local tensor of shape {list(local.shape)} where {placements} of {list(entry.shape)} gives {given}",
                              code="INVALID_ARGUMENT", reason="layout_mismatch")
    except LayoutError as error:
        raise LayoutError(f"tensor '{entry.name}': {error}", code=error.code, reason=error.reason) from None


def _collect(source: nn.Module | Mapping[str, Tensor], include: Iterable[str] | None, exclude: Iterable[str], buffers: bool,
             shards: Mapping[str, Shard]) -> list[_Entry]:
    found = _module_entries(source, buffers) if isinstance(source, nn.Module) else _mapping_entries(source)
    entries = _merge_tied(_select(found, include, exclude))
    names = {entry.name for entry in entries}
    for name in shards:
        if name not in names:
            raise unknown_name(name, names)
    for entry in entries:
        _resolve(entry, shards.get(entry.name))
    if not entries:
        raise InvalidError("there are no tensors to register", code="INVALID_ARGUMENT")
    return entries


def _holding_of(entries: Iterable[_Entry]) -> Holding:
    holding = Holding()
    for entry in entries:
        local = entry.local.detach()
        holding.declare(entry.name, local.dtype, entry.shape)
        for part in entry.boxes:
            view = local
            for dim, ((lo, hi), at) in enumerate(zip(part.box, part.at)):
                view = view.narrow(dim, at, hi - lo)
            holding.add(entry.name, view, shape=entry.shape, box=part.box)
    return holding


# ---- memory


def _aligned(size: int) -> int:
    step = _PAGE_BYTES if size >= 256 * _PAGE_BYTES else _LINE_BYTES
    return -(-size // step) * step


def _storage_in(arena: Arena, nbytes: int) -> torch.UntypedStorage:
    # One storage per former storage: saving or copying one tensor does not drag the arena along.
    memory = arena.allocate(nbytes, _PAGE_BYTES if nbytes >= 256 * _PAGE_BYTES else _LINE_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def adopt(source: nn.Module | Mapping[str, Tensor], *, include: Iterable[str] | None = None, exclude: Iterable[str] = (),
          buffers: bool = True) -> Arena:
    """Moves tensors into shared memory, in place: the same Parameter objects, the same values, other memory.

    Whatever else looks at the old memory (views taken before) keeps looking there: do it right after the model is made and
    sharded. publish() and subscribe() do it by themselves.
    """
    return _adopt(_collect(source, include, exclude, buffers, {}))


def _adopt(entries: list[_Entry]) -> Arena:
    groups: dict[int, tuple[torch.UntypedStorage, list[_Entry]]] = {}
    for entry in entries:
        if entry.local.device.type != "cpu":
            raise InvalidError(f"tensor '{entry.name}' is on {entry.local.device}; only host memory can move into an arena",
                               code="UNIMPLEMENTED", reason="unsupported")
        storage = entry.local.untyped_storage()
        if storage.nbytes():
            groups.setdefault(storage.data_ptr(), (storage, []))[1].append(entry)
    arena = Arena(max(sum(_aligned(storage.nbytes()) + _PAGE_BYTES for storage, _ in groups.values()), _PAGE_BYTES))
    with torch.no_grad():
        for storage, members in groups.values():
            fresh = _storage_in(arena, storage.nbytes())
            fresh.copy_(storage)
            for entry in members:
                old = entry.local
                view = torch.empty(0, dtype=old.dtype).set_(fresh, old.storage_offset(), old.shape, old.stride())
                entry.move(view)
                if entry.local.data_ptr() != view.data_ptr():
                    raise InvalidError(f"tensor '{entry.name}' did not move; pass adopt=False", code="INTERNAL")
    return arena


def tensors_in_arena(specs: Mapping[str, tuple[Iterable[int], torch.dtype]]) -> tuple[Arena, dict[str, Tensor]]:
    """Zeroed tensors in one arena, by name: an engine's buffers."""
    sizes = {}
    for name, (shape, dtype) in specs.items():
        shape = tuple(int(n) for n in shape)
        count = 1
        for n in shape:
            count *= n
        sizes[name] = (shape, dtype, count * dtype.itemsize)
    arena = Arena(max(sum(_aligned(size) + _PAGE_BYTES for _, _, size in sizes.values()), _PAGE_BYTES))
    out = {}
    for name, (shape, dtype, size) in sizes.items():
        out[name] = (torch.empty(shape, dtype=dtype) if size == 0
                     else torch.empty(0, dtype=dtype).set_(_storage_in(arena, size)).view(shape))
    return arena, out


# ---- the two ends


class _End:
    """A connection with what is registered on it."""

    def __init__(self, client: Client, entries: list[_Entry], registered: Registered) -> None:
        self._client = client
        self._entries = entries
        self._places = {entry.name: entry.place() for entry in entries}
        self._registered = registered

    @property
    def client(self) -> Client:
        """The connection below, for everything that is not PyTorch's."""
        return self._client

    @property
    def memory(self) -> Registered:
        """How the agent reaches the tensors, and why so."""
        return self._registered

    @property
    def latest_version(self) -> int:
        """The channel's newest version when this registered, 0 for none: a trainer's first version is one above it.

        All ranks of a trainer that begins anew see the same number.
        """
        return self._registered.latest_version

    @property
    def aliases(self) -> dict[str, str]:
        """Tied names, each with the name under which the tensor travels."""
        return {alias: entry.name for entry in self._entries for alias in entry.aliases}

    def check_memory(self) -> None:
        """Raises MovedMemoryError naming a tensor that no longer lives where it was registered."""
        for entry in self._entries:
            if entry.place() != self._places[entry.name]:
                raise MovedMemoryError(
                    f"parameter '{entry.name}' no longer lives where it was registered (moved by .to(), load_state_dict(assign=True) "
                    "or the like): close this and register again", code="FAILED_PRECONDITION", reason="moved_memory")

    def close(self) -> None:
        """Leaves the channel. Idempotent; the tensors stay as they are."""
        self._client.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Publisher(_End):
    """One trainer rank's end of a channel. Use publish()."""

    def __init__(self, client: Client, entries: list[_Entry], registered: Registered) -> None:
        super().__init__(client, entries, registered)
        self._fences: list[Any] = []

    def __enter__(self) -> Publisher:
        return self

    def fence(self, optimizer: torch.optim.Optimizer, *, timeout_s: float = 600.0) -> None:
        """Makes the optimizer's step wait until the bus has let go of the last version.

        A step raises DeadlineError, and writes nothing, when that takes longer than `timeout_s`.
        """
        self._fences.append(optimizer.register_step_pre_hook(lambda *_: self.before_write(timeout_s=timeout_s)))

    def before_write(self, *, timeout_s: float = 600.0) -> None:
        """What the fence does, for writes that no optimizer makes."""
        self._client.before_write(timeout_s)

    @property
    def blocked_seconds(self) -> float:
        """How long steps have waited for the bus, all together."""
        return self._client.blocked_seconds

    def publish(self, version: int, *, policy: str = "wait", min_replicas: int = 1, receipts: bool = False,
                keep_last: int = 0) -> Request:
        """Offers the parameters as they are now. They must not change until the fence or wait_released() let them.

        The arguments are those of Client.publish(). Raises MovedMemoryError for parameters that live elsewhere now.
        """
        self.check_memory()
        return self._client.publish(version, policy=policy, min_replicas=min_replicas, receipts=receipts, keep_last=keep_last)

    def wait_released(self, version: int, timeout_s: float) -> None:
        """Returns once nobody reads `version` any more. Raises DeadlineError naming who does."""
        self._client.wait_released(version, timeout_s)

    def close(self) -> None:
        for fence in self._fences:
            fence.remove()
        self._fences.clear()
        super().close()


class Subscriber(_End):
    """One engine rank's end of a channel. Use subscribe()."""

    def __enter__(self) -> Subscriber:
        return self

    def update(self, which: str | int = "latest", *, timeout_s: float = 600.0) -> Request:
        """Asks for "latest", "next" or a version; the request gives an Outcome once all ranks of the replica have flipped."""
        self.check_memory()
        return self._client.update(which, timeout_s=timeout_s)

    @property
    def live_version(self) -> int:
        """What this rank's memory is, whole; 0 when it is nothing yet or dirty."""
        return self._client.live_version


def _world(rank: int | None, rank_count: int | None) -> tuple[int, int]:
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank() if group else 0) if rank is None else rank, \
        (torch.distributed.get_world_size() if group else 1) if rank_count is None else rank_count


def _prepare(client: Client, source: Source, include: Iterable[str] | None, exclude: Iterable[str], buffers: bool,
             shards: Mapping[str, Shard], move: bool, arenas: Iterable[Arena]) -> tuple[Holding, list[_Entry]]:
    for arena in arenas:
        client.attach(arena)
    if isinstance(source, Holding):
        return source, []
    entries = _collect(source, include, exclude, buffers, shards)
    if move:
        client.attach(_adopt(entries))
    return _holding_of(entries), entries


def publish(source: Source, *, channel: str, job: str = "trainer", rank: int | None = None, rank_count: int | None = None,
            include: Iterable[str] | None = None, exclude: Iterable[str] = (), buffers: bool = True,
            shards: Mapping[str, Shard] | None = None, adopt: bool = True, arenas: Iterable[Arena] = (),
            private_mode: str | None = None, agent: str | None = None, timeout_s: float = 60.0) -> Publisher:
    """Registers a module (plain, FSDP2, with DTensors), a dict of tensors, or a Holding as one rank of a producer.

    Names are the module's own. `include` and `exclude` are names or patterns with `*`; buffers that are saved with the
    module go along unless `buffers` is false. Plain tensors are whole ones unless `shards` says which part they are. With
    `adopt` the tensors move into shared memory first, which changes nothing about training; without it they stay private
    memory, which is slower. `rank` and `rank_count` are the process group's.

    Raises LayoutError, StateError, NotRunningError and the others of tensorbus.errors.
    """
    rank, rank_count = _world(rank, rank_count)
    deadline = time.monotonic() + timeout_s
    client = connect(channel, job, role="producer", rank=rank, rank_count=rank_count, agent=agent, timeout_s=min(timeout_s, 10.0))
    try:
        holding, entries = _prepare(client, source, include, exclude, buffers, shards or {}, adopt, arenas)
        registered = client.register(holding, private_mode=private_mode, timeout_s=max(deadline - time.monotonic(), 1.0))
        return Publisher(client, entries, registered)
    except BaseException:
        client.close()
        raise


def subscribe(target: Source, *, channel: str, job: str = "engine", replica: int = 0, rank: int | None = None,
              rank_count: int | None = None, include: Iterable[str] | None = None, exclude: Iterable[str] = (),
              buffers: bool = True, shards: Mapping[str, Shard] | None = None, adopt: bool = True, arenas: Iterable[Arena] = (),
              private_mode: str | None = None, flip: str = "in_place", proof: str = "readback", leave_out: Iterable[str] = (),
              before_flip: Callable[[int], None] | None = None, after_flip: Callable[[int], None] | None = None,
              agent: str | None = None, timeout_s: float = 60.0) -> Subscriber:
    """Registers an engine's tensors as one rank of a replica; updates are written into them in place.

    `target` is a module, a dict of tensors, or a Holding for fused and stacked buffers; `before_flip(version)` runs when the
    engine has to stop using its weights (in_place: before the first byte; shadow: before the swap), `after_flip(version)` when
    the new ones are in place. `leave_out` names what this engine deliberately does not take. The rest is as for publish().
    """
    rank, rank_count = _world(rank, rank_count)
    deadline = time.monotonic() + timeout_s
    client = connect(channel, job, role="consumer", replica=replica, rank=rank, rank_count=rank_count, agent=agent,
                     timeout_s=min(timeout_s, 10.0))
    try:
        holding, entries = _prepare(client, target, include, exclude, buffers, shards or {}, adopt, arenas)

        def hook(event: HookEvent) -> None:
            run = after_flip if event.kind == "live" else before_flip
            if run is not None:
                run(event.version)

        if before_flip is not None or after_flip is not None:
            client.set_hook(hook)
        registered = client.register(holding, flip=flip, proof=proof, leave_out=leave_out, private_mode=private_mode,
                                     timeout_s=max(deadline - time.monotonic(), 1.0))
        return Subscriber(client, entries, registered)
    except BaseException:
        client.close()
        raise
