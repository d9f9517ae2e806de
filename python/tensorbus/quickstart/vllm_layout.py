"""What a tensor-parallel rank of a vLLM-like engine holds, and which part of which trainer tensor fills it.

An engine fuses q, k and v into one buffer, gate and up into another, splits the vocabulary (padded to a multiple of 64)
over its ranks and keeps norms whole. Each buffer is described by views: a box of a logical tensor and where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorbus.models.config import DecoderConfig

Box = tuple[tuple[int, int], ...]

VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class View:
    """`box` (half-open range per dimension) of the logical tensor `tensor`, laid at `at` in the buffer.

    `at` has one index per dimension of the buffer. Where it has fewer than the box has dimensions, the box's leading
    dimensions are of extent 1 and drop out (one expert of a stack).
    """

    tensor: str
    box: Box
    at: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Elements taken up in the buffer, per dimension of the buffer."""
        sizes = tuple(hi - lo for lo, hi in self.box)
        return sizes[len(sizes) - len(self.at):]

    def slices(self) -> tuple[slice, ...]:
        """Where in the buffer."""
        return tuple(slice(first, first + size) for first, size in zip(self.at, self.extent))


@dataclass(frozen=True)
class Buffer:
    """One tensor of the engine: its parameter name, shape in elements, and what fills it. What no view covers is zero."""

    name: str
    shape: tuple[int, ...]
    views: tuple[View, ...]


def _whole(name: str, *shape: int) -> Buffer:
    return Buffer(name, shape, (View(name, tuple((0, n) for n in shape), (0,) * len(shape)),))


def _rows(tensor: str, lo: int, hi: int, columns: int, at: int) -> View:
    return View(tensor, ((lo, hi), (0, columns)), (at, 0))


def padded_vocab(vocab: int) -> int:
    """The vocabulary as an engine pads it, in rows."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def check_tensor_parallel(config: DecoderConfig, tp: int) -> None:
    """ValueError when an engine could not split this model over `tp` ranks, saying what does not divide."""
    for what, size in (("attention heads", config.heads), ("intermediate size", config.intermediate),
                       ("padded vocabulary", padded_vocab(config.vocab))):
        if size % tp:
            raise ValueError(f"{what} ({size}) must be divisible by the tensor parallel size ({tp})")
    if config.kv_heads % tp and tp % config.kv_heads:
        raise ValueError(f"{config.kv_heads} key/value heads can be neither split nor replicated over {tp} ranks")


def kv_head_range(config: DecoderConfig, tp: int, rank: int) -> tuple[int, int]:
    """The key/value heads [lo, hi) of a rank; neighbours share one where there are fewer heads than ranks."""
    if config.kv_heads >= tp:
        each = config.kv_heads // tp
        return rank * each, (rank + 1) * each
    head = rank // (tp // config.kv_heads)
    return head, head + 1


def _vocab_buffer(name: str, config: DecoderConfig, tp: int, rank: int) -> Buffer:
    rows = padded_vocab(config.vocab) // tp
    lo, hi = rank * rows, min((rank + 1) * rows, config.vocab)
    views = (_rows(name, lo, hi, config.hidden, 0),) if lo < hi else ()
    return Buffer(name, (rows, config.hidden), views)


def _attention(prefix: str, config: DecoderConfig, tp: int, rank: int) -> list[Buffer]:
    d, hidden = config.head_dim, config.hidden
    q_rows = config.heads // tp * d
    kv_lo, kv_hi = (head * d for head in kv_head_range(config, tp, rank))
    kv_rows = kv_hi - kv_lo
    qkv = Buffer(f"{prefix}.qkv_proj.weight", (q_rows + 2 * kv_rows, hidden), (
        _rows(f"{prefix}.q_proj.weight", rank * q_rows, (rank + 1) * q_rows, hidden, 0),
        _rows(f"{prefix}.k_proj.weight", kv_lo, kv_hi, hidden, q_rows),
        _rows(f"{prefix}.v_proj.weight", kv_lo, kv_hi, hidden, q_rows + kv_rows)))
    columns = (rank * q_rows, (rank + 1) * q_rows)
    out = Buffer(f"{prefix}.o_proj.weight", (hidden, q_rows), (
        View(f"{prefix}.o_proj.weight", ((0, hidden), columns), (0, 0)),))
    norms = [_whole(f"{prefix}.{kind}.weight", d) for kind in ("q_norm", "k_norm")] if config.qk_norm else []
    return [qkv, out, *norms]


def _dense_mlp(prefix: str, config: DecoderConfig, tp: int, rank: int) -> list[Buffer]:
    size, hidden = config.intermediate // tp, config.hidden
    lo, hi = rank * size, (rank + 1) * size
    return [
        Buffer(f"{prefix}.gate_up_proj.weight", (2 * size, hidden), (
            _rows(f"{prefix}.gate_proj.weight", lo, hi, hidden, 0), _rows(f"{prefix}.up_proj.weight", lo, hi, hidden, size))),
        Buffer(f"{prefix}.down_proj.weight", (hidden, size), (
            View(f"{prefix}.down_proj.weight", ((0, hidden), (lo, hi)), (0, 0)),))]


def _expert_mlp(prefix: str, config: DecoderConfig, tp: int, rank: int, single: bool) -> list[Buffer]:
    size, full, hidden, count = config.intermediate // tp, config.intermediate, config.hidden, config.experts
    lo, hi = rank * size, (rank + 1) * size
    gate_up, down = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    router = _whole(f"{prefix}.gate.weight", count, hidden)
    if not single:
        every, columns = (0, count), (0, hidden)
        return [router,
                Buffer(f"{prefix}.experts.w13_weight", (count, 2 * size, hidden), (
                    View(gate_up, (every, (lo, hi), columns), (0, 0, 0)),
                    View(gate_up, (every, (full + lo, full + hi), columns), (0, size, 0)))),
                Buffer(f"{prefix}.experts.w2_weight", (count, hidden, size), (
                    View(down, (every, (0, hidden), (lo, hi)), (0, 0, 0)),))]
    buffers = [router]
    for expert in range(count):
        one = (expert, expert + 1)
        buffers += [
            Buffer(f"{prefix}.experts.{expert}.gate_proj.weight", (size, hidden), (
                View(gate_up, (one, (lo, hi), (0, hidden)), (0, 0)),)),
            Buffer(f"{prefix}.experts.{expert}.up_proj.weight", (size, hidden), (
                View(gate_up, (one, (full + lo, full + hi), (0, hidden)), (0, 0)),)),
            Buffer(f"{prefix}.experts.{expert}.down_proj.weight", (hidden, size), (
                View(down, (one, (0, hidden), (lo, hi)), (0, 0)),))]
    return buffers


def vllm_layout(config: DecoderConfig, tp: int, rank: int, *, single_experts: bool = False) -> list[Buffer]:
    """The buffers of rank `rank` of `tp`, in the order an engine would register them.

    A tied head is the embedding's buffer and not listed. Experts lie stacked in `w13_weight` and `w2_weight`, or one by one
    with `single_experts`. ValueError as check_tensor_parallel(), or for a rank out of range.
    """
    check_tensor_parallel(config, tp)
    if not 0 <= rank < tp:
        raise ValueError(f"rank {rank} is not one of {tp}")
    buffers = [_vocab_buffer("model.embed_tokens.weight", config, tp, rank)]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        buffers.append(_whole(f"{prefix}.input_layernorm.weight", config.hidden))
        buffers += _attention(f"{prefix}.self_attn", config, tp, rank)
        buffers.append(_whole(f"{prefix}.post_attention_layernorm.weight", config.hidden))
        if config.experts:
            buffers += _expert_mlp(f"{prefix}.mlp", config, tp, rank, single_experts)
        else:
            buffers += _dense_mlp(f"{prefix}.mlp", config, tp, rank)
    buffers.append(_whole("model.norm.weight", config.hidden))
    if not config.tied:
        buffers.append(_vocab_buffer("lm_head.weight", config, tp, rank))
    return buffers
