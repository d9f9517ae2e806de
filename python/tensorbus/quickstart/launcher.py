"""Runs daemon, agent, trainer job and rollout job as processes of their own, watches them, and reports."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tensorbus.errors import NotRunningError
from tensorbus.models.cache import cache_folder
from tensorbus.models.config import read_config

from .display import Display, print_table
from .leaks import Usage, find_leaks, shared_memory_files, usage_of
from .megatron_layout import check_megatron
from .processes import ProcessFailed, Processes
from .report import median, render_report, write_report
from .settings import Settings
from .tally import Tally
from .vllm_layout import check_tensor_parallel

# Importing PyTorch in eight processes on two busy cores takes its time.
START_DEADLINE_S = 120.0

StartServices = Callable[[Processes, Path], str]
"""Starts daemon and agent with their files in a folder; answers the agent's socket path once it listens."""

JobCommand = Callable[[str], list[str]]
"""The command line of a rank of the job "trainer", "sliced_trainer" or "rollout", without its arguments."""


class RunFailed(Exception):
    """The run did not reach its end. The text says why, and who is to blame."""


@dataclass(frozen=True)
class Options:
    """What a run is asked to do, beyond its Settings."""

    settings: Settings
    model_name: str = ""
    report: Path | None = None
    check_leaks: bool = False


@dataclass
class Result:
    """What a run gave."""

    tally: Tally
    seconds: float
    leaks: list[str] | None = None
    service_usage: dict[str, list[Usage]] = field(default_factory=dict)


def job_command(job: str) -> list[str]:
    """This Python on the job's module; isolated from the folder it was called in."""
    return [sys.executable, "-m", f"tensorbus.quickstart.{job}"]


def run(options: Options, start_services: StartServices, command: JobCommand = job_command) -> Result:
    """One whole run, everything ended and removed at its end. RunFailed says what went wrong."""
    config = read_config(Path(options.settings.model))
    check_tensor_parallel(config, options.settings.tp)
    if options.settings.trainer_tp:
        check_megatron(config, options.settings.trainer_tp, options.settings.trainer_pp)
    before = shared_memory_files()
    folder = Path(tempfile.mkdtemp(prefix="tensorbus-quickstart-"))
    failed = True
    try:
        result = _run_in(folder, options, start_services, command)
        failed = False
    finally:
        if failed:
            _keep_logs(folder)
        shutil.rmtree(folder, ignore_errors=True)
    if options.check_leaks:
        left = sorted(shared_memory_files() - before)
        samples = {**result.tally.usage, **result.service_usage}
        result.leaks = [leak for name in sorted(samples) for leak in find_leaks(name, samples[name])]
        result.leaks += [f"/dev/shm/{name} was left behind" for name in left if "tensorbus" in name or name.startswith("torch_")]
    return result


def log_folder() -> Path:
    """Where the logs of the last failed run are kept."""
    return cache_folder() / "quickstart-logs"


def _keep_logs(folder: Path) -> None:
    shutil.rmtree(log_folder(), ignore_errors=True)
    shutil.copytree(folder / "logs", log_folder(), dirs_exist_ok=True)


def _run_in(folder: Path, options: Options, start_services: StartServices, command: JobCommand) -> Result:
    began = time.monotonic()
    with Display(options.settings.refreshes) as display, Processes(folder / "logs") as processes:
        try:
            display.now("starting daemon and agent")
            settings = replace(options.settings, folder=str(folder), agent_socket=start_services(processes, folder))
            services = list(processes.children)
            display.say("daemon and agent are up")
            settings.write(folder / "settings.json")
            _start_jobs(processes, settings, folder / "settings.json", command)
            display.say(f"started a trainer job of {settings.trainer_ranks} ranks and {settings.replicas} rollout "
                        f"job{'s' if settings.replicas > 1 else ''} of {settings.tp}")
            tally = Tally(settings)
            usage: dict[str, list[Usage]] = {child.name: [] for child in services}
            _watch(processes, settings, tally, display, lambda: _sample(services, usage))
            for prefix in ("trainer", "rollout"):
                processes.wait_all(prefix, settings.deadline_s)
        except (ProcessFailed, NotRunningError) as error:
            raise RunFailed(str(error)) from error
    return Result(tally, time.monotonic() - began, service_usage=usage)


def _start_jobs(processes: Processes, settings: Settings, file: Path, command: JobCommand) -> None:
    # glibc raises the size from which it asks the kernel as blocks are freed, and then keeps some megabytes more in some runs
    # than in others. With fixed sizes what is freed goes back, and RSS says what a process holds.
    env = {"OMP_NUM_THREADS": str(settings.threads), "MALLOC_ARENA_MAX": "2",
           "MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
    for rank in range(settings.trainer_ranks):
        processes.start(f"trainer-{rank}", [*command(settings.trainer_module), "--settings", str(file), "--rank", str(rank)], events=True, env=env)
    for replica in range(settings.replicas):
        for rank in range(settings.tp):
            processes.start(f"rollout/{replica}-{rank}", [*command("rollout"), "--settings", str(file), "--replica", str(replica),
                                                          "--rank", str(rank)], events=True, env=env)


def _watch(processes: Processes, settings: Settings, tally: Tally, display: Display, sample: Callable[[], None]) -> None:
    """Takes events until the run is complete. RunFailed when nothing happens for the deadline, or a rank differs."""
    heard, counted = time.monotonic(), 0
    while not tally.complete():
        for event in processes.poll(timeout_s=0.5):
            heard = time.monotonic()
            if event.kind == "differs":
                raise RunFailed(f"{event.job} rank {event.rank}: {event['message']}")
            tally.add(event)
            display.event(event, tally)
        if tally.verified_count > counted:
            counted = tally.verified_count
            sample()
        starting = len(tally.registered) < len(tally.everybody)
        patience_s = max(settings.deadline_s, START_DEADLINE_S) if starting else settings.deadline_s
        if time.monotonic() - heard > patience_s:
            raise RunFailed(f"nothing happened for {patience_s:.0f} s; {tally.missing()}")


def _sample(services: list, usage: dict[str, list[Usage]]) -> None:
    for child in services:
        try:
            usage[child.name].append(usage_of(child.process.pid))
        except (OSError, KeyError):
            pass  # it has just ended: poll() says so


def facts(result: Result, model_name: str) -> list[tuple[str, str]]:
    """The numbers at the top of the report."""
    rows = [result.tally.rows[v] for v in sorted(result.tally.rows)]
    s = result.tally.settings
    return [
        (model_name, "model"), (f"{s.trainer_ranks} → {s.replicas} × {s.tp}", "trainer ranks → replicas × engine ranks"),
        (str(len(rows)), "versions verified"), (f"{rows[-1].bytes / 1e6:,.0f} MB", "a refresh, all engine ranks together"),
        (f"{median([row.seconds for row in rows]) * 1e3:,.0f} ms", "median, publish to flip"),
        (f"{median([row.gb_per_s for row in rows]):.2f} GB/s", "median speed"),
        (f"{sum(sum(row.elements.values()) for row in rows):,}", "elements compared"),
        (f"{result.seconds:.0f} s", "whole run")]


def show(result: Result, options: Options) -> None:
    """Prints the table, writes the report."""
    rows = [result.tally.rows[v] for v in sorted(result.tally.rows)]
    print_table(rows)
    if options.report:
        name = options.model_name or Path(options.settings.model).name
        write_report(options.report, render_report("Tensorbus: weights from trainer to engine", facts(result, name), rows, result.leaks))
        print(f"report: {options.report}")
