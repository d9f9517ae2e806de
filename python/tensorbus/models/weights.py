"""Reading and writing the safetensors files of a model folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import DecoderConfig, read_config
from .llama import Decoder

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, those of its index where there is one."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [str(path) for path in files if not path.exists()]
    if missing or not files:
        raise FileNotFoundError(f"{folder}: " + (f"missing {', '.join(missing)}" if missing else "no safetensors files"))
    return files


def iterate_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of a folder, one tensor in memory at a time."""
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


@torch.no_grad()
def load_into(model: Decoder, folder: Path) -> None:
    """Copies a checkpoint into the model's parameters, converting dtypes; single experts go into their stacks.

    ValueError when a parameter stays without a value, a shape differs or a tensor has no place. The head that some
    folders carry in spite of tying is accepted and left out.
    """
    parameters = dict(model.named_parameters())
    size = model.config.intermediate
    open_parts = {name: model.config.experts * (2 if "gate_up" in name else 1) if ".experts." in name else 1
                  for name in parameters}
    for name, value in iterate_weights(folder):
        if name == "lm_head.weight" and model.config.tied:
            continue
        place, target = name, parameters.get(name)
        single = _EXPERT.fullmatch(name)
        if single:
            stack, expert, kind = single.group(1), int(single.group(2)), single.group(3)
            place = f"{stack}.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"
            if place in parameters and expert < model.config.experts:
                rows = {"gate_proj": slice(0, size), "up_proj": slice(size, 2 * size)}.get(kind, slice(None))
                target = parameters[place].data[expert, rows]
        if target is None:
            raise ValueError(f"{folder}: tensor {name} has no place in this model")
        if target.shape != value.shape:
            raise ValueError(f"{folder}: {name} is {list(value.shape)}, the model wants {list(target.shape)}")
        target.copy_(value)
        open_parts[place] -= 1 if single or ".experts." not in name else open_parts[place]
    missing = [name for name, left in open_parts.items() if left > 0]
    if missing:
        raise ValueError(f"{folder}: no value for {', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}")


def load_decoder(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """The decoder of a model folder with its weights, in `dtype`, on the CPU."""
    config = read_config(folder)
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(dtype).to_empty(device="cpu")
    load_into(model, folder)
    return model


def save_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    """Writes one `model.safetensors`."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, str(Path(folder) / "model.safetensors"),
              metadata={"format": "pt"})


def checkpoint_tensors(model: Decoder) -> dict[str, Tensor]:
    """The model's weights under checkpoint names: stacks of experts taken apart."""
    config: DecoderConfig = model.config
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        stack, _, kind = name.rpartition(".")
        if not stack.endswith(".mlp.experts"):
            tensors[name] = value
            continue
        for expert in range(config.experts):
            parts = {"down_proj": value[expert]} if kind == "down_proj" else {
                "gate_proj": value[expert, :config.intermediate], "up_proj": value[expert, config.intermediate:]}
            for part, weight in parts.items():
                tensors[f"{stack}.{expert}.{part}.weight"] = weight.clone()
    return tensors
