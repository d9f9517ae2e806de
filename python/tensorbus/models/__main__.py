"""Makes model folders from the command line; prints the folder on standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .config import DecoderConfig
from .made import DEFAULT, make_folder
from .smollm2 import smollm2_folder


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tensorbus.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("smollm2", help="SmolLM2-135M-Instruct, downloaded and converted on first use")
    made = commands.add_parser("made", help="a seeded Llama-shaped model")
    made.add_argument("--out", type=Path, required=True, help="folder to write")
    made.add_argument("--seed", type=int, default=0)
    for name in ("vocab", "hidden", "layers", "heads", "kv-heads", "intermediate"):
        made.add_argument(f"--{name}", type=int, default=getattr(DEFAULT, name.replace("-", "_")))
    made.add_argument("--head-dim", type=int, default=0, help="default: hidden / heads")
    made.add_argument("--tied", action="store_true", help="the head is the embedding")
    made.add_argument("--qk-norm", action="store_true", help="norms on queries and keys, as Qwen3 has them")
    made.add_argument("--experts", type=int, default=0, help="experts per layer (0: dense)")
    made.add_argument("--experts-per-token", type=int, default=2)
    return parser.parse_args(argv)


def made_config(options: argparse.Namespace) -> DecoderConfig:
    return DecoderConfig(
        vocab=options.vocab, hidden=options.hidden, layers=options.layers, heads=options.heads, kv_heads=options.kv_heads,
        head_dim=options.head_dim or options.hidden // options.heads, intermediate=options.intermediate, tied=options.tied,
        # The expert shape is Qwen3's, which has query and key norms.
        qk_norm=options.qk_norm or options.experts > 0, experts=options.experts,
        experts_per_token=options.experts_per_token if options.experts else 0)


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        if options.command == "smollm2":
            print(smollm2_folder(lambda text: print(text, file=sys.stderr)))
        else:
            print(make_folder(made_config(options), options.out, options.seed))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
