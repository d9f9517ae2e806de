"""What a rank of a Megatron-like trainer holds: tensor parallel inside a pipeline stage, fused projections.

Rank = stage * tp + tensor rank. A stage has consecutive layers; the first also has the embedding, the last the final norm and the head
(a tied head is a second copy of the embedding). `linear_qkv` interleaves by key/value group: the group's query heads, its key
head, its value head, then the next group. `linear_fc1` has the rank's gate rows, then its up rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from tensorbus.models.config import DecoderConfig

from .vllm_layout import Buffer, View


def check_megatron(config: DecoderConfig, tp: int, pp: int) -> None:
    """ValueError when the model cannot be held this way, saying what does not divide."""
    if config.experts:
        raise ValueError("the Megatron-like trainer has no expert layers")
    for what, size in (("key/value heads", config.kv_heads), ("intermediate size", config.intermediate)):
        if size % tp:
            raise ValueError(f"{what} ({size}) must be divisible by the tensor parallel size ({tp})")
    if config.layers < pp:
        raise ValueError(f"{config.layers} layers are too few for {pp} pipeline stages")


def stage_layers(layers: int, pp: int, stage: int) -> range:
    """Consecutive layers of a stage; the first stages have one more where it does not come out even."""
    each, over = divmod(layers, pp)
    first = stage * each + min(stage, over)
    return range(first, first + each + (stage < over))


def _vocab(name: str, buffer: str, config: DecoderConfig, tp: int, rank: int) -> Buffer:
    """Rows of the vocabulary, padded to a multiple of 128 * tp."""
    rows = -(-config.vocab // (128 * tp)) * 128
    lo, hi = rank * rows, min((rank + 1) * rows, config.vocab)
    views = (View(name, ((lo, hi), (0, config.hidden)), (0, 0)),) if lo < hi else ()
    return Buffer(buffer, (rows, config.hidden), views)


def _norm(name: str, buffer: str, size: int) -> Buffer:
    return Buffer(buffer, (size,), (View(name, ((0, size),), (0,)),))


def _layer(layer: int, config: DecoderConfig, tp: int, rank: int) -> Iterator[Buffer]:
    source, target = f"model.layers.{layer}", f"decoder.layers.{layer}"
    attention, d, hidden = f"{source}.self_attn", config.head_dim, config.hidden
    per_group, groups = config.heads // config.kv_heads, config.kv_heads // tp
    views, at = [], 0
    for group in range(rank * groups, (rank + 1) * groups):
        for kind, first, heads in (("q", group * per_group, per_group), ("k", group, 1), ("v", group, 1)):
            views.append(View(f"{attention}.{kind}_proj.weight", ((first * d, (first + heads) * d), (0, hidden)), (at, 0)))
            at += heads * d
    yield _norm(f"{source}.input_layernorm.weight", f"{target}.self_attention.linear_qkv.layer_norm_weight", hidden)
    yield Buffer(f"{target}.self_attention.linear_qkv.weight", (at, hidden), tuple(views))
    columns = config.heads // tp * d
    yield Buffer(f"{target}.self_attention.linear_proj.weight", (hidden, columns), (
        View(f"{attention}.o_proj.weight", ((0, hidden), (rank * columns, (rank + 1) * columns)), (0, 0)),))
    if config.qk_norm:
        for kind in "qk":
            yield _norm(f"{attention}.{kind}_norm.weight", f"{target}.self_attention.{kind}_layernorm.weight", d)
    size = config.intermediate // tp
    lo, hi = rank * size, (rank + 1) * size
    yield _norm(f"{source}.post_attention_layernorm.weight", f"{target}.mlp.linear_fc1.layer_norm_weight", hidden)
    yield Buffer(f"{target}.mlp.linear_fc1.weight", (2 * size, hidden), (
        View(f"{source}.mlp.gate_proj.weight", ((lo, hi), (0, hidden)), (0, 0)),
        View(f"{source}.mlp.up_proj.weight", ((lo, hi), (0, hidden)), (size, 0))))
    yield Buffer(f"{target}.mlp.linear_fc2.weight", (hidden, size), (
        View(f"{source}.mlp.down_proj.weight", ((0, hidden), (lo, hi)), (0, 0)),))


def megatron_layout(config: DecoderConfig, tp: int, pp: int, rank: int) -> list[Buffer]:
    """The buffers of one rank of tp * pp. ValueError as check_megatron()."""
    check_megatron(config, tp, pp)
    stage, tensor_rank = divmod(rank, tp)
    buffers = []
    if stage == 0:
        buffers.append(_vocab("model.embed_tokens.weight", "embedding.word_embeddings.weight", config, tp, tensor_rank))
    for layer in stage_layers(config.layers, pp, stage):
        buffers += _layer(layer, config, tp, tensor_rank)
    if stage == pp - 1:
        buffers.append(_norm("model.norm.weight", "decoder.final_layernorm.weight", config.hidden))
        head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        if not config.tied or pp > 1:
            buffers.append(_vocab(head, "output_layer.weight", config, tp, tensor_rank))
    return buffers


def fill_buffers(layout: list[Buffer], buffers: dict[str, Tensor], full: Callable[[str], Tensor]) -> None:
    """Writes every view of every buffer from whole tensors, in place; padding is left alone."""
    for buffer in layout:
        for view in buffer.views:
            part = full(view.tensor)[tuple(slice(lo, hi) for lo, hi in view.box)]
            buffers[buffer.name][view.slices()] = part.reshape(view.extent)
