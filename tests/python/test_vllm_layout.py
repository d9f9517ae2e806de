"""The engine's layout: views against the independent slicing, known shapes, and that both notice mistakes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorbus.models.config import DecoderConfig
from tensorbus.models.made import DEFAULT, made_decoder
from tensorbus.quickstart.verify import compare, verify_shard
from tensorbus.quickstart.vllm_layout import Buffer, padded_vocab, vllm_layout

SMALL = DecoderConfig(vocab=61, hidden=32, layers=2, heads=8, kv_heads=2, head_dim=8, intermediate=64)
MOE = dataclasses.replace(SMALL, experts=4, experts_per_token=2, qk_norm=True)
SMOLLM2 = DecoderConfig(vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, tied=True)


def numbered(config: DecoderConfig) -> dict[str, torch.Tensor]:
    """A full state in which every element of the model has a number of its own."""
    state, first = {}, 1
    for name, weight in made_decoder(config).named_parameters():
        state[name] = torch.arange(first, first + weight.numel(), dtype=torch.int32).view(weight.shape)
        first += weight.numel()
    return state


def fill(buffers: list[Buffer], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Does what the bus does: every view's box into its place, nothing else."""
    held = {}
    for buffer in buffers:
        held[buffer.name] = torch.zeros(buffer.shape, dtype=torch.int32)
        for view in buffer.views:
            part = state[view.tensor][tuple(slice(lo, hi) for lo, hi in view.box)]
            held[buffer.name][view.slices()] = part.reshape(view.extent)
    return held


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("config", [
    SMALL, MOE, DEFAULT, dataclasses.replace(SMALL, tied=True), dataclasses.replace(SMALL, kv_heads=1),
    dataclasses.replace(SMALL, qk_norm=True, head_dim=16)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_views_agree_with_independent_slicing(config: DecoderConfig, tp: int, single: bool) -> None:
    state = numbered(config)
    for rank in range(tp):
        buffers = vllm_layout(config, tp, rank, single_experts=single)
        elements, differences = verify_shard(config, tp, rank, fill(buffers, state), state.__getitem__, single_experts=single)
        assert not differences, differences[0]
        assert elements == sum(torch.Size(b.shape).numel() for b in buffers)


@settings(max_examples=40, deadline=None)
@given(heads=st.sampled_from([4, 6, 8, 12]), share=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 3, 4]),
       vocab=st.integers(1, 200), tied=st.booleans(), width=st.integers(1, 5))
def test_views_of_random_models(heads: int, share: int, tp: int, vocab: int, tied: bool, width: int) -> None:
    if heads % share:
        return
    config = DecoderConfig(vocab=vocab, hidden=8 * width, layers=1, heads=heads, kv_heads=heads // share, head_dim=4,
                           intermediate=12 * width, tied=tied)
    try:
        layouts = [vllm_layout(config, tp, rank) for rank in range(tp)]
    except ValueError as error:
        assert "divisible" in str(error) or "replicated" in str(error)
        return
    state = numbered(config)
    for rank, buffers in enumerate(layouts):
        assert not verify_shard(config, tp, rank, fill(buffers, state), state.__getitem__)[1]


def test_ranks_together_hold_every_element_of_split_tensors_once() -> None:
    config = dataclasses.replace(SMALL, kv_heads=8)
    counts: dict[str, int] = {}
    for rank in range(4):
        for buffer in vllm_layout(config, 4, rank):
            for view in buffer.views:
                counts[view.tensor] = counts.get(view.tensor, 0) + torch.Size(view.extent).numel()
    for name, weight in made_decoder(config).named_parameters():
        assert counts[name] == weight.numel() * (4 if weight.dim() == 1 else 1), name


@pytest.mark.parametrize(("name", "shape"), [
    ("model.embed_tokens.weight", (16384, 576)), ("model.layers.0.self_attn.qkv_proj.weight", (320, 576)),
    ("model.layers.29.self_attn.o_proj.weight", (576, 192)), ("model.layers.3.mlp.gate_up_proj.weight", (1024, 576)),
    ("model.layers.3.mlp.down_proj.weight", (576, 512)), ("model.norm.weight", (576,))])
def test_smollm2_shapes_at_three_ranks(name: str, shape: tuple[int, ...]) -> None:
    for rank in range(3):
        buffers = {b.name: b for b in vllm_layout(SMOLLM2, 3, rank)}
        assert buffers[name].shape == shape
        assert "lm_head.weight" not in buffers and len(buffers) == 182


def test_padding_falls_to_the_last_ranks() -> None:
    config = dataclasses.replace(SMALL, vocab=130)  # padded to 192: 48 rows a rank, the last without any of the 130
    last = [vllm_layout(config, 4, rank)[0] for rank in range(4)]
    assert padded_vocab(130) == 192
    assert [b.views[0].box[0] if b.views else None for b in last] == [(0, 48), (48, 96), (96, 130), None]


@pytest.mark.parametrize(("config", "tp", "message"), [
    (SMOLLM2, 2, r"attention heads \(9\) must be divisible by the tensor parallel size \(2\)"),
    (dataclasses.replace(SMALL, intermediate=30), 4, "intermediate size"),
    (dataclasses.replace(SMALL, heads=12, kv_heads=12, intermediate=60), 3, "padded vocabulary"),
    (dataclasses.replace(SMALL, heads=12, kv_heads=4, intermediate=60, vocab=192), 6, "4 key/value heads")])
def test_impossible_splits_are_named(config: DecoderConfig, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm_layout(config, tp, 0)


def test_rank_out_of_range() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        vllm_layout(SMALL, 2, 2)


# The verification itself notices what is wrong

def held_rank() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    state = numbered(SMALL)
    return fill(vllm_layout(SMALL, 2, 1), state), state


def test_one_wrong_element_is_found() -> None:
    held, state = held_rank()
    held["model.layers.1.mlp.down_proj.weight"][3, 5] += 1
    _, differences = verify_shard(SMALL, 2, 1, held, state.__getitem__)
    assert [(d.buffer, d.index, d.count) for d in differences] == [("model.layers.1.mlp.down_proj.weight", (3, 5), 1)]
    assert "down_proj.weight[3, 5]" in str(differences[0])


def test_written_padding_is_found() -> None:
    held, state = held_rank()
    held["model.embed_tokens.weight"][-1, 0] = 7
    assert verify_shard(SMALL, 2, 1, held, state.__getitem__)[1][0].wanted == 0


def test_another_ranks_shard_is_found() -> None:
    state = numbered(SMALL)
    held = fill(vllm_layout(SMALL, 2, 0), state)
    differing = {d.buffer for d in verify_shard(SMALL, 2, 1, held, state.__getitem__)[1]}
    assert "model.layers.0.self_attn.qkv_proj.weight" in differing
    assert "model.norm.weight" not in differing


def test_missing_and_surplus_buffers_are_errors() -> None:
    held, state = held_rank()
    with pytest.raises(ValueError, match="nobody expects: extra"):
        verify_shard(SMALL, 2, 1, held | {"extra": torch.zeros(1)}, state.__getitem__)
    del held["model.norm.weight"]
    with pytest.raises(ValueError, match="no buffer model.norm.weight"):
        verify_shard(SMALL, 2, 1, held, state.__getitem__)


def test_comparison_is_of_bits() -> None:
    nan, zero = torch.tensor([float("nan")], dtype=torch.bfloat16), torch.tensor([0.0], dtype=torch.bfloat16)
    assert compare("x", nan, nan.clone()) is None
    assert compare("x", -zero, zero) is not None
    with pytest.raises(ValueError, match="bfloat16"):
        compare("x", zero, zero.float())
