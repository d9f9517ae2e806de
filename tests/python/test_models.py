"""Model folders: made ones, the conversion's parts, loading, and the decoder against arithmetic written differently."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorbus.models import __main__ as command
from tensorbus.models.cache import build_once
from tensorbus.models.config import DecoderConfig, RopeScaling, read_config, write_config
from tensorbus.models.llama import Decoder, rotary_frequencies
from tensorbus.models.made import DEFAULT, made_decoder, make_folder
from tensorbus.models.smollm2 import checkpoint_name, halves_from_pairs
from tensorbus.models.weights import iterate_weights, load_decoder, save_weights

SMALL = DecoderConfig(vocab=61, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48)
MOE = dataclasses.replace(SMALL, experts=4, experts_per_token=2, qk_norm=True)


# Cache

def test_cache_builds_once(cache: Path) -> None:
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "x").write_text("1")

    assert build_once("a", build) == build_once("a", build) == cache / "a"
    assert len(calls) == 1
    assert (cache / "a" / "x").read_text() == "1"


def test_cache_holds_nothing_half_made(cache: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "x").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once("a", broken)
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_cache_removes_what_a_killed_builder_left(cache: Path) -> None:
    cache.mkdir()
    (cache / ".a.part-dead").mkdir()
    build_once("a", lambda folder: None)
    assert not (cache / ".a.part-dead").exists()


# Config

@pytest.mark.parametrize("config", [
    SMALL, MOE, dataclasses.replace(SMALL, tied=True), dataclasses.replace(SMALL, qk_norm=True),
    dataclasses.replace(SMALL, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64))])
def test_config_survives_its_file(tmp_path: Path, config: DecoderConfig) -> None:
    write_config(config, tmp_path)
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "gpt2"}, "gpt2"), ({"attention_bias": True}, "attention_bias"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "yarn"), ({"num_key_value_heads": 3}, "3 key/value heads")])
def test_config_says_what_it_cannot_do(tmp_path: Path, change: dict, message: str) -> None:
    write_config(SMALL, tmp_path, extra=change)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_config_names_a_missing_field(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 4, "hidden_size": 8}')
    with pytest.raises(ValueError, match="vocab_size is missing|num_hidden_layers is missing"):
        read_config(tmp_path)


def test_config_reads_the_older_rotary_fields(tmp_path: Path) -> None:
    write_config(SMALL, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_theta": 500000.0}))
    assert read_config(tmp_path).rope_theta == 500000.0


# Conversion

def test_rotary_rows_are_put_back() -> None:
    heads, d, width = 3, 8, 5
    usual = np.arange(heads * d * width).reshape(heads * d, width)
    # GGUF's order, by its definition: row 2i of a head is the usual row i, row 2i + 1 the usual row i + d/2.
    stored = np.empty_like(usual)
    for head in range(heads):
        for i in range(d // 2):
            stored[head * d + 2 * i] = usual[head * d + i]
            stored[head * d + 2 * i + 1] = usual[head * d + d // 2 + i]
    assert np.array_equal(halves_from_pairs(stored, heads), usual)


def test_checkpoint_names() -> None:
    assert checkpoint_name("blk.7.attn_output.weight") == "model.layers.7.self_attn.o_proj.weight"
    assert checkpoint_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(KeyError):
        checkpoint_name("blk.0.ssm_in.weight")


# Made models and loading

@pytest.mark.parametrize("config", [SMALL, MOE, dataclasses.replace(SMALL, tied=True)])
def test_made_model_loads_as_it_was_made(tmp_path: Path, config: DecoderConfig) -> None:
    make_folder(config, tmp_path, seed=3)
    loaded, made = load_decoder(tmp_path).state_dict(), made_decoder(config, seed=3).state_dict()
    assert loaded.keys() == made.keys()
    assert all(torch.equal(loaded[name], made[name]) for name in made)
    assert ("lm_head.weight" in made) == (not config.tied)


def test_made_models_differ_by_seed_only() -> None:
    first, again, other = (made_decoder(SMALL, seed).model.norm.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_checkpoints_hold_experts_one_by_one(tmp_path: Path) -> None:
    make_folder(MOE, tmp_path)
    shapes = {name: list(t.shape) for name, t in iterate_weights(tmp_path)}
    assert shapes["model.layers.1.mlp.experts.3.up_proj.weight"] == [MOE.intermediate, MOE.hidden]
    assert not any("gate_up" in name for name in shapes)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no value for model.layers.1.mlp.up_proj.weight"),
    (lambda t: t.update({"model.extra": torch.zeros(1)}), "model.extra has no place"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight is \[3\]")])
def test_loading_refuses_what_does_not_fit(tmp_path: Path, spoil, message: str) -> None:
    make_folder(SMALL, tmp_path)
    tensors = dict(iterate_weights(tmp_path))
    spoil(tensors)
    save_weights(tensors, tmp_path)
    with pytest.raises(ValueError, match=message):
        load_decoder(tmp_path)


def test_loading_misses_a_single_expert(tmp_path: Path) -> None:
    make_folder(MOE, tmp_path)
    tensors = dict(iterate_weights(tmp_path))
    del tensors["model.layers.0.mlp.experts.2.gate_proj.weight"]
    save_weights(tensors, tmp_path)
    with pytest.raises(ValueError, match="no value for model.layers.0.mlp.experts.gate_up_proj"):
        load_decoder(tmp_path)


def test_folder_without_weights_is_named(tmp_path: Path) -> None:
    write_config(SMALL, tmp_path)
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_decoder(tmp_path)


# Decoder

def test_decoder_is_causal() -> None:
    model = made_decoder(MOE, dtype=torch.float32)
    tokens = torch.arange(12).view(1, 12)
    changed = tokens.clone()
    changed[0, 8] = 60
    before, after = model(tokens), model(changed)
    # Not bit for bit: how many tokens an expert gets decides how its product is summed.
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-5)
    assert not torch.allclose(before[:, 8], after[:, 8], atol=1e-2)


def test_attention_equals_head_by_head_arithmetic() -> None:
    """One layer's attention with complex rotations and one head at a time."""
    model = made_decoder(SMALL, dtype=torch.float64)
    attention, d, length = model.model.layers[0].self_attn, SMALL.head_dim, 6
    x = torch.randn(length, SMALL.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(length).double()[:, None] * rotary_frequencies(SMALL).double()
    heads = []
    for h in range(SMALL.heads):
        g = h // (SMALL.heads // SMALL.kv_heads)
        q, k, v = (x @ p.weight[i * d:(i + 1) * d].T for p, i in
                   ((attention.q_proj, h), (attention.k_proj, g), (attention.v_proj, g)))
        q, k = (torch.complex(t[:, :d // 2], t[:, d // 2:]) * torch.polar(torch.ones_like(angles), angles) for t in (q, k))
        scores = (q @ k.conj().T).real / d ** 0.5
        scores += torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)
        heads.append(scores.softmax(-1) @ v)
    wanted = torch.cat(heads, -1) @ attention.o_proj.weight.T
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    assert torch.allclose(attention(x[None], cos, sin)[0], wanted, atol=1e-9)


def test_experts_equal_a_sum_over_tokens() -> None:
    mlp = made_decoder(MOE, dtype=torch.float64).model.layers[0].mlp
    x = torch.randn(5, MOE.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.zeros_like(x)
    for t in range(5):
        shares = (mlp.gate.weight @ x[t]).float().softmax(0)
        best = shares.argsort(descending=True)[:2]
        for e in best.tolist():
            gate, up = (mlp.experts.gate_up_proj[e] @ x[t]).chunk(2)
            wanted[t] += shares[e] / shares[best].sum() * (mlp.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
    assert torch.allclose(mlp(x), wanted, atol=1e-6)


def test_tied_head_shares_gradients() -> None:
    model = made_decoder(dataclasses.replace(SMALL, tied=True), dtype=torch.float32)
    model(torch.tensor([[1, 2]])).sum().backward()
    grad = model.model.embed_tokens.weight.grad
    assert grad is not None and bool((grad[40] != 0).any()), "a row that no input token used has a gradient through the head"


# Command line

def test_command_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["made", "--out", str(tmp_path / "m"), "--hidden", "32", "--heads", "4", "--kv-heads", "1", "--vocab", "50",
                 "--layers", "1", "--intermediate", "64", "--tied"]
    assert command.main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "m")
    config = read_config(tmp_path / "m")
    assert (config.kv_heads, config.vocab, config.tied) == (1, 50, True)


def test_command_refuses_uneven_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["made", "--out", str(tmp_path), "--heads", "8", "--kv-heads", "3"]) == 2
    assert "3 key/value heads" in capsys.readouterr().err


def test_default_model_needs_padding_and_grouping() -> None:
    assert DEFAULT.vocab % 64 and DEFAULT.heads > DEFAULT.kv_heads


# The real one

@pytest.mark.slow
def test_smollm2_answers_paris(smollm2: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    answer = load_decoder(smollm2, torch.float32).generate(tokenizer.encode(prompt).ids, 10, stop=2)
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@pytest.mark.slow
def test_smollm2_tokenizer_round_trips(smollm2: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text in ("2024 was\t10 years", "Übergrößenträger", "漢字とかな", "a\n\n  b"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("42").ids] == ["4", "2"]


@pytest.mark.slow
def test_smollm2_has_the_known_shape(smollm2: Path) -> None:
    config = read_config(smollm2)
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.intermediate, config.vocab, config.tied, config.rope_theta) == (1536, 49152, True, 100000.0)
    assert sum(t.numel() for _, t in iterate_weights(smollm2)) == 134_515_008


def test_decoder_reports_only_one_embedding_when_tied() -> None:
    names = [name for name, _ in Decoder(dataclasses.replace(SMALL, tied=True)).named_parameters()]
    assert "lm_head.weight" not in names and names[0] == "model.embed_tokens.weight"
