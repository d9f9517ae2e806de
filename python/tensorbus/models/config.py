"""The shape of a decoder, read from and written to a folder's `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED = ("llama", "mistral", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretch of the low rotary frequencies. Lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a Llama- or Qwen3-shaped decoder. All counts, except where named otherwise."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    normalise_experts: bool = True
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_length: int = 2048

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token is {self.experts_per_token} of {self.experts} experts")

    @property
    def model_type(self) -> str:
        if self.experts:
            return "qwen3_moe"
        return "qwen3" if self.qk_norm else "llama"


def read_config(folder: Path) -> DecoderConfig:
    """Reads `folder/config.json`. ValueError names what this decoder does not do."""
    path = Path(folder) / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    try:
        return _from_json(raw, path)
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None


def _from_json(raw: dict[str, Any], path: Path) -> DecoderConfig:
    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        raise ValueError(f"{path}: model_type {kind!r} is not one of {', '.join(SUPPORTED)}")
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise ValueError(f"{path}: {field} is not supported")
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"{path}: a mixture of dense and expert layers is not supported")
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    moe = kind == "qwen3_moe"
    # Newer folders keep rotary settings in rope_parameters, older ones in two fields.
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {})}
    return DecoderConfig(
        vocab=raw["vocab_size"], hidden=hidden, layers=raw["num_hidden_layers"], heads=heads,
        kv_heads=raw.get("num_key_value_heads", heads), head_dim=raw.get("head_dim") or hidden // heads,
        intermediate=raw["moe_intermediate_size"] if moe else raw["intermediate_size"],
        tied=bool(raw.get("tie_word_embeddings", False)), qk_norm=kind.startswith("qwen3"),
        experts=raw["num_experts"] if moe else 0, experts_per_token=raw["num_experts_per_tok"] if moe else 0,
        normalise_experts=not moe or bool(raw.get("norm_topk_prob", False)), norm_eps=raw.get("rms_norm_eps", 1e-5),
        rope_theta=float(rope.get("rope_theta", 10000.0)), rope_scaling=_read_scaling(rope, path),
        max_length=raw.get("max_position_embeddings", 2048))


def _read_scaling(rope: dict[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{path}: rotary scaling {kind!r} is not supported")
    return RopeScaling(float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]),
                       int(rope["original_max_position_embeddings"]))


def write_config(config: DecoderConfig, folder: Path, extra: dict[str, Any] | None = None) -> None:
    """Writes `folder/config.json` so that common engines and read_config() understand it. Weights are bf16."""
    classes = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        s = config.rope_scaling
        rope |= {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_freq_factor,
                 "high_freq_factor": s.high_freq_factor, "original_max_position_embeddings": s.original_length}
    raw: dict[str, Any] = {
        "architectures": [classes[config.model_type]], "model_type": config.model_type, "dtype": "bfloat16",
        "vocab_size": config.vocab, "hidden_size": config.hidden, "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim, "hidden_act": "silu", "rms_norm_eps": config.norm_eps, "rope_parameters": rope,
        "max_position_embeddings": config.max_length, "tie_word_embeddings": config.tied, "attention_bias": False,
        "attention_dropout": 0.0, "mlp_bias": False, "initializer_range": 0.02, "use_cache": True}
    if config.experts:
        raw |= {"num_experts": config.experts, "num_experts_per_tok": config.experts_per_token,
                "moe_intermediate_size": config.intermediate, "norm_topk_prob": config.normalise_experts,
                "decoder_sparse_step": 1, "mlp_only_layers": []}
    raw |= extra or {}
    (Path(folder) / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
