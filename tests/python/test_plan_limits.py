"""Hostile input to tensorbusctl plan and simulate: one clear error, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import os
import resource
import struct
import subprocess
from pathlib import Path

import pytest

from test_bus_ctl import BIN

SECONDS = 120
MEMORY = 6 << 30

pytestmark = pytest.mark.skipif(not (BIN / "tensorbusctl").exists(), reason="tensorbusctl is not built")


def refused(*words: str | Path) -> str:
    """What the command says when it refuses, which it must do within its limits."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    done = subprocess.run([BIN / "tensorbusctl", *map(str, words), "--json"], capture_output=True, text=True, timeout=SECONDS,
                          preexec_fn=limit, env={k: v for k, v in os.environ.items() if not k.startswith("TENSORBUS_")})
    assert done.returncode in (1, 2), f"exit {done.returncode}: {done.stderr[-500:]}"
    error = json.loads(done.stdout)["error"]
    assert done.stderr.count("\n") == 1, done.stderr
    assert len(error["message"]) < 2000
    return error["message"]


def layout(folder: Path, name: str, ranks: int, tensors: list[dict]) -> Path:
    path = folder / name
    path.write_text(json.dumps({"format": "tensorbus-layout-1", "ranks": ranks, "tensors": tensors}))
    return path


def tensor(name: str, shape: list[int], mesh: int, placement: str) -> dict:
    return {"name": name, "dtype": "f32", "shape": shape, "mesh": [["x", mesh]], "placements": [placement]}


@pytest.mark.parametrize(("shape", "says"), [
    ([1 << 63], "'shape'"), ([1 << 40, 1 << 40], "'shape'"), ([(1 << 64) - 1], "'shape'"), ([1 << 64], "'shape'"), ([1] * 9, "9 dimensions"),
    ([-1], "'shape'")])
def test_sizes_that_overflow(tmp_path: Path, shape: list[int], says: str) -> None:
    path = layout(tmp_path, "a.json", 1, [tensor("a", shape, 1, "Replicate")])
    message = refused("plan", "--source", path, "--target", path)
    assert "tensor 'a'" in message and says in message


def test_a_million_ranks(tmp_path: Path) -> None:
    path = layout(tmp_path, "a.json", 1_000_000, [tensor("a", [4], 1_000_000, "Shard(0)")])
    assert "'ranks'" in refused("plan", "--source", path, "--target", path)


def test_many_ranks_with_many_holdings(tmp_path: Path) -> None:
    tensors = [tensor(f"t{i}", [65536 + i], 65536, "Shard(0)") for i in range(400)]
    path = layout(tmp_path, "a.json", 65536, tensors)
    assert "boxes in all" in refused("plan", "--source", path, "--target", path)


def test_more_ops_than_a_plan_may_have(tmp_path: Path) -> None:
    tensors = [tensor(f"t{i}", [4], 65536, "Replicate") for i in range(6000)]
    path = layout(tmp_path, "a.json", 65536, tensors)
    assert "copy ops" in refused("plan", "--source", path, "--target", path)


def test_ten_million_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"format": "tensorbus-layout-1", "ranks": 1, "tensors": [')
        entry = b'{"name": "a", "dtype": "u8", "shape": [1], "mesh": [["x", 1]], "placements": ["Shard(0)"]},'
        for _ in range(1000):
            file.write(entry * 10_000)
        file.write(b"{}]}")
    message = refused("plan", "--source", path, "--target", path)
    assert "memory" in message or "more than" in message


def test_meshes_that_contradict_each_other(tmp_path: Path) -> None:
    path = layout(tmp_path, "a.json", 4, [{"name": "a", "dtype": "f32", "shape": [4], "mesh": [["x", 3], ["y", 2]],
                                          "placements": ["Shard(0)", "Replicate"]}])
    assert "tensor 'a'" in refused("plan", "--source", path, "--target", path)


def test_a_tensor_that_nobody_holds(tmp_path: Path) -> None:
    source = layout(tmp_path, "a.json", 2, [{"name": "a", "dtype": "f32", "shape": [4], "boxes": [[], []]}])
    target = layout(tmp_path, "b.json", 1, [tensor("a", [4], 1, "Replicate")])
    message = refused("plan", "--source", source, "--target", target)
    assert "tensor 'a'" in message and "no source rank holds" in message


def header_of(folder: Path, tensors: dict, data: int = 0) -> None:
    text = json.dumps(tensors).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


def test_a_folder_that_lacks_layers(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 2, 3)]
    header_of(tmp_path, {name: {"dtype": "U8", "shape": [2], "data_offsets": [2 * i, 2 * i + 2]} for i, name in enumerate(names)}, 6)
    message = refused("plan", "--model", tmp_path, "--from", "fsdp:shard=2", "--to", "vllm:tp=2")
    assert "1 of its 4 layers have no tensors: 1" in message


def test_a_header_that_claims_too_much(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert "a header of" in refused("plan", "--model", tmp_path, "--from", "fsdp:shard=2", "--to", "vllm:tp=2")


@pytest.mark.parametrize(("source", "target", "says"), [
    ("megatron:tp=3", "vllm:tp=8", "tp=3 does not divide the 32 attention heads"),
    ("megatron:ep=7,dp=7", "vllm:tp=8", "ep=7 does not divide the 128 experts"),
    ("megatron:pp=7", "vllm:tp=8", "layers"), ("megatron:tq=2", "vllm:tp=8", "near: 'tp'"),
    ("fsdp:shard=65536,replicate=65536", "vllm:tp=8", "65536 ranks"), ("fsdp:shard=9223372036854775808", "vllm:tp=8", "whole number")])
def test_rules_that_do_not_apply(source: str, target: str, says: str) -> None:
    assert says in refused("plan", "--model", "qwen3-30b-a3b", "--from", source, "--to", target)


def test_a_config_of_a_giant(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "hidden_size": 8, "head_dim": 2, "moe_intermediate_size": 4, "num_experts": 1 << 20,
              "num_attention_heads": 4, "num_hidden_layers": 1 << 20, "num_key_value_heads": 2, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refused("plan", "--model", tmp_path / "config.json", "--from", "fsdp:shard=2", "--to", "vllm:tp=2")
    assert "more than 4000000 tensors" in message


def test_a_cluster_that_is_too_small(tmp_path: Path) -> None:
    cluster = json.loads((Path(__file__).parents[2] / "share/clusters/tcp-pair.json").read_text())
    cluster["node"]["ranks"] = 2
    (tmp_path / "c.json").write_text(json.dumps(cluster))
    assert "need" in refused("simulate", "--scenario", "T03", "--cluster", tmp_path / "c.json")
