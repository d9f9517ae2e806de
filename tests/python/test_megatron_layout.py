"""The Megatron-like trainer's layout: coverage, the interleaved projection by reshaping, stages."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tensorbus.models.config import DecoderConfig
from tensorbus.models.made import made_decoder
from tensorbus.quickstart.megatron_layout import fill_buffers, megatron_layout, stage_layers
from tensorbus.quickstart.sliced_trainer import noisy

SMALL = DecoderConfig(vocab=131, hidden=64, layers=3, heads=8, kv_heads=4, head_dim=8, intermediate=64)


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL, tied=True), dataclasses.replace(SMALL, qk_norm=True)])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 1), (1, 3), (2, 3)])
def test_all_ranks_together_hold_the_whole_model(config: DecoderConfig, tp: int, pp: int) -> None:
    state = {name: weight.detach() for name, weight in made_decoder(config).named_parameters()}
    seen = {name: torch.zeros(weight.shape, dtype=torch.int32) for name, weight in state.items()}
    for rank in range(tp * pp):
        layout = megatron_layout(config, tp, pp, rank)
        buffers = {b.name: torch.zeros(b.shape, dtype=torch.bfloat16) for b in layout}
        fill_buffers(layout, buffers, state.__getitem__)
        for buffer in layout:
            covered = torch.zeros(buffer.shape, dtype=torch.int32)
            for view in buffer.views:
                box = tuple(slice(lo, hi) for lo, hi in view.box)
                seen[view.tensor][box] += 1
                covered[view.slices()] += 1
                assert torch.equal(buffers[buffer.name][view.slices()], state[view.tensor][box].reshape(view.extent))
            assert int(covered.max()) <= 1, f"{buffer.name}: two views overlap"
            padded = buffer.name.startswith(("embedding", "output_layer"))
            assert padded or int(covered.min()) == 1, f"{buffer.name} has gaps"
    for name, count in seen.items():
        twice = config.tied and pp > 1 and name == "model.embed_tokens.weight"
        copies = 2 if twice else tp if state[name].dim() == 1 else 1
        assert int(count.min()) == int(count.max()) == copies, name


def stacked_qkv(config: DecoderConfig, tp: int, rank: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`linear_qkv` of a rank from whole projections [heads * d, D], by reshaping instead of views."""
    d, groups = config.head_dim, config.kv_heads
    grouped = [w.view(groups, -1, d, w.shape[-1]) for w in (q, k, v)]
    return torch.cat(grouped, dim=1).chunk(tp)[rank].reshape(-1, q.shape[-1])


@pytest.mark.parametrize("rank", [0, 1])
def test_interleaved_projection_equals_reshaping(rank: int) -> None:
    state = {name: weight.detach() for name, weight in made_decoder(SMALL).named_parameters()}
    layout = megatron_layout(SMALL, 2, 1, rank)
    buffers = {b.name: torch.zeros(b.shape, dtype=torch.bfloat16) for b in layout}
    fill_buffers(layout, buffers, state.__getitem__)
    whole = [state[f"model.layers.1.self_attn.{kind}_proj.weight"] for kind in "qkv"]
    assert torch.equal(buffers["decoder.layers.1.self_attention.linear_qkv.weight"], stacked_qkv(SMALL, 2, rank, *whole))


def test_stages_share_layers_out() -> None:
    assert [list(stage_layers(7, 3, stage)) for stage in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(("config", "tp", "pp", "message"), [
    (SMALL, 3, 1, r"key/value heads \(4\)"), (SMALL, 1, 4, "3 layers"),
    (dataclasses.replace(SMALL, experts=4, experts_per_token=2, qk_norm=True), 1, 1, "expert")])
def test_what_cannot_be_held_is_named(config: DecoderConfig, tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        megatron_layout(config, tp, pp, 0)


def test_versions_differ_and_repeat() -> None:
    weight = made_decoder(SMALL).model.norm.weight.detach()
    assert torch.equal(noisy("a", weight, 1), noisy("a", weight, 1))
    assert not torch.equal(noisy("a", weight, 1), noisy("a", weight, 2))
    assert not torch.equal(noisy("a", weight, 1), noisy("b", weight, 1))
