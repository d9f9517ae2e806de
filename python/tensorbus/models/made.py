"""Seeded models of any small shape: the same numbers on every machine, made in well under a second."""

from __future__ import annotations

from pathlib import Path

import torch

from .config import DecoderConfig, write_config
from .llama import Decoder
from .weights import checkpoint_tensors, save_weights

# Eight heads serve TP 2, 4 and 8; 1,003 tokens need padding for every one of them.
DEFAULT = DecoderConfig(vocab=1003, hidden=256, layers=4, heads=8, kv_heads=2, head_dim=32, intermediate=512)


@torch.no_grad()
def made_decoder(config: DecoderConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A decoder with random weights that depend on `config` and `seed` alone.

    Projections are wide enough for outputs to differ between seeds, norms are near one but not one: a tensor left out or
    mixed up shows.
    """
    model = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.1 * noise if weight.dim() == 1 else 0.1 * noise)
    return model.to(dtype)


def make_folder(config: DecoderConfig, folder: Path, seed: int = 0) -> Path:
    """Writes config, weights (experts one by one, as checkpoints have them) and a word-level tokenizer `t0 t1 ...`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(checkpoint_tensors(made_decoder(config, seed)), folder)
    write_config(config, folder, extra={"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1})
    _write_tokenizer(config.vocab, folder)
    return folder


def _write_tokenizer(vocab: int, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
