"""A decoder of the Llama and Qwen3 shape in plain PyTorch, small enough to read in one sitting.

Module and parameter names are those of the usual checkpoints (`model.layers.0.self_attn.q_proj.weight`), with two
differences: a tied head has no parameter of its own, and the experts of a layer are stacked into one tensor each
(`mlp.experts.gate_up_proj` and `mlp.experts.down_proj`), which is how trainers hold them.

Shapes in comments: B sequences, S tokens, D hidden, H heads, G key/value heads, d head size, F intermediate, V vocabulary,
E experts.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import DecoderConfig


class RMSNorm(nn.Module):
    """Scales the last dimension to unit root mean square, computed in float32. weight [size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """Radians per position, [d / 2], float32."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = config.rope_theta ** -exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # Long waves are stretched by `factor`, short ones kept, those between blended.
    turns = scaling.original_length * frequencies / (2 * math.pi)
    keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rotary_angles(config: DecoderConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each [S, d], for positions [S]."""
    angles = positions.float()[:, None] * rotary_frequencies(config).to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + d/2) of x [B, H, S, d] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal attention where H heads share G key/value heads."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class DenseMlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """The stacked weights of E SwiGLU experts: gate_up_proj [E, 2F, D] (gate first), down_proj [E, D, F]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * config.intermediate, config.hidden))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.hidden, config.intermediate))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [T, D], chosen [T, k] expert indices, shares [T, k] their weights; answers [T, D]."""
        out = torch.zeros_like(x)
        for expert in range(self.gate_up_proj.shape[0]):
            tokens, slots = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, self.down_proj[expert]) * shares[tokens, slots, None]
            out = out.index_add(0, tokens, part)
        return out


class SparseMlp(nn.Module):
    """A router (`gate` [E, D]) that sends each token to its best experts."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.per_token, self.normalise = config.experts_per_token, config.normalise_experts
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(flat).float().softmax(-1).topk(self.per_token, dim=-1)
        if self.normalise:
            shares = shares / shares.sum(-1, keepdim=True)
        return self.experts(flat, chosen, shares.to(x.dtype)).view_as(x)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = SparseMlp(config) if config.experts else DenseMlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers, last norm: token ids [B, S] to hidden states [B, S, D]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = rotary_angles(self.config, torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Decoder(nn.Module):
    """The whole language model: token ids [B, S] to logits [B, S, V]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = None if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.model(tokens)
        # A tied head reads the embedding itself; there is no second parameter that could drift away.
        return F.linear(hidden, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(hidden)

    @torch.no_grad()
    def generate(self, tokens: list[int], count: int, stop: int | None = None) -> list[int]:
        """The `count` most likely next tokens, one after the other; ends early after `stop`. Recomputes the prefix."""
        answer: list[int] = []
        device = self.model.embed_tokens.weight.device
        for _ in range(count):
            logits = self(torch.tensor([tokens + answer], device=device))[0, -1]
            answer.append(int(logits.argmax()))
            if answer[-1] == stop:
                break
        return answer
