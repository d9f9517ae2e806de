"""The bus end to end on this host: train, publish, refresh, verify, report.

Starts a daemon and an agent, a trainer job (PyTorch FSDP2, gloo, bf16) and, separately, a rollout job that holds what a tensor-parallel
engine holds. After every optimizer step the new weights go over the bus; every element of every engine rank is compared with an
independent slicing of the trainer's full state. Ends with a table, an HTML report and the word `verified`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
from pathlib import Path

from tensorbus.models.cache import build_once, cache_folder
from tensorbus.models.config import DecoderConfig, read_config

from .leaks import WARM_UP
from .settings import Settings
from .vllm_layout import check_tensor_parallel


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tensorbus.quickstart", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["bus"], default="bus", help="the job to run (default: bus)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, metavar="DIR", help="a Llama- or Qwen3-shaped safetensors folder (default: SmolLM2-135M)")
    which.add_argument("--made", action="store_true", help="a small seeded model instead; needs no download")
    parser.add_argument("--refreshes", type=int, default=4, metavar="N", help="versions to move (default: 4)")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="optimizer steps before each (default: 1)")
    parser.add_argument("--trainer-ranks", type=int, default=2, metavar="N", help="FSDP ranks (default: 2)")
    parser.add_argument("--trainer", default="fsdp", metavar="KIND",
                        help="fsdp (real training), or megatron:tp=2,pp=2 (that layout, versions made up) (default: fsdp)")
    parser.add_argument("--tp", type=int, metavar="N", help="engine ranks (default: what the model's heads allow)")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="engines (default: 1)")
    parser.add_argument("--single-experts", action="store_true", help="the engine holds experts one by one, not stacked")
    parser.add_argument("--flip", choices=["shadow", "in_place"], default="shadow", help="how an engine takes a version (default: shadow)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows per trainer rank (default: 1)")
    parser.add_argument("--sequence", type=int, default=64, metavar="N", help="tokens per row (default: 64)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, metavar="X")
    parser.add_argument("--report", type=Path, metavar="FILE", help="HTML report (default: in the user's cache folder)")
    parser.add_argument("--check-leaks", action="store_true", help="fail unless memory, descriptors and threads stay flat")
    parser.add_argument("--timeout", type=_seconds, default=180.0, metavar="S", help="longest wait for anything, seconds (default: 180)")
    options = parser.parse_args(argv)
    megatron = re.fullmatch(r"megatron:tp=([1-9]\d?),pp=([1-9]\d?)", options.trainer)
    if not megatron and options.trainer != "fsdp":
        parser.error(f"--trainer is fsdp or megatron:tp=N,pp=N, not {options.trainer}")
    options.trainer_tp, options.trainer_pp = (int(megatron[1]), int(megatron[2])) if megatron else (0, 0)
    if megatron:
        options.trainer_ranks = options.trainer_tp * options.trainer_pp
    for name in ("refreshes", "steps", "trainer_ranks", "replicas", "batch", "sequence"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.tp is not None and options.tp < 1:
        parser.error("--tp must be at least 1")
    if options.check_leaks and options.refreshes < WARM_UP + 6:
        parser.error(f"--check-leaks needs at least --refreshes {WARM_UP + 6}")
    return options


def choose_model(options: argparse.Namespace) -> Path:
    """The model's folder, made or downloaded if need be."""
    if options.model:
        return options.model
    if options.made:
        from tensorbus.models.made import DEFAULT, make_folder

        return build_once("made-default-1", lambda folder: make_folder(DEFAULT, folder))
    from tensorbus.models.smollm2 import smollm2_folder

    return smollm2_folder(lambda text: print(f"          {text}", file=sys.stderr))


def choose_tp(config: DecoderConfig) -> int:
    """The first of 2, 3, 4 that an engine could split this model over, else 1."""
    for tp in (2, 3, 4):
        try:
            check_tensor_parallel(config, tp)
            return tp
        except ValueError:
            continue
    return 1


def main(argv: list[str]) -> int:
    options = parse(argv)

    sent = int(signal.SIGINT)

    def stop(number: int, _: object) -> None:
        nonlocal sent
        sent = number
        raise KeyboardInterrupt(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, stop)
    try:
        model = choose_model(options)
        # After the model is there: these bring rich and, through the jobs, torch.
        from .launcher import Options, RunFailed, log_folder, run, show
        from .next_steps import next_steps
        from .services import start_services

        settings = Settings(
            folder="", model=str(model.resolve()), agent_socket="", trainer_ranks=options.trainer_ranks,
            trainer_tp=options.trainer_tp, trainer_pp=options.trainer_pp,
            tp=options.tp or choose_tp(read_config(model)), replicas=options.replicas, single_experts=options.single_experts, refreshes=options.refreshes,
            steps_per_refresh=options.steps, flip=options.flip, batch=options.batch, sequence=options.sequence,
            learning_rate=options.learning_rate, deadline_s=options.timeout)
        name = "" if options.model else "seeded" if options.made else "SmolLM2-135M"
        wanted = Options(settings, model_name=name, report=options.report or cache_folder() / "reports" / "quickstart.html",
                         check_leaks=options.check_leaks)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + sent  # as a shell says it of who is ended by a signal
    try:
        result = run(wanted, start_services)
        show(result, wanted)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}\nlogs: {log_folder()}{os.sep}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything started here has been ended", file=sys.stderr)
        return 128 + sent  # as a shell says it of who is ended by a signal
    if result.leaks:
        for leak in result.leaks:
            print(f"leak: {leak}", file=sys.stderr)
        return 1
    print(next_steps(), file=sys.stderr)
    print("verified")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
