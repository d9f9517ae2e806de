"""What a person sees while the quickstart runs: live progress on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .events import Event
from .tally import Tally, VersionRow


class Display:
    """Progress on standard error, the table on standard output. Use as a context manager."""

    def __init__(self, refreshes: int) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = self._console.is_terminal
        self._began = time.monotonic()
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=28), MofNCompleteColumn(), TextColumn("versions verified"),
            TimeElapsedColumn(), console=self._console, transient=True, disable=not self._live)
        self._task = self._progress.add_task("starting", total=refreshes)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._progress.console.print(f"[dim]{time.monotonic() - self._began:6.1f} s[/dim]  {text}")

    def now(self, text: str) -> None:
        """What is going on at this moment; shown on a terminal only."""
        self._progress.update(self._task, description=text)

    def event(self, event: Event, tally: Tally) -> None:
        """Tells of what is worth telling."""
        if event.kind == "registered":
            left = len(tally.everybody) - len(tally.registered)
            self.now(f"{event.job} rank {event.rank} registered" + (f", {left} to come" if left else ""))
            if not left:
                target = tally.registered[tally.targets[0]]
                self.say(f"all {len(tally.everybody)} ranks registered; an engine rank holds {target['bytes'] / 1e6:.0f} MB in "
                         f"{target['buffers']} buffers ({target['memory']})")
        elif event.kind == "step" and event.rank == 0:
            self.now(f"version {event['version']}: step done, loss {event['loss']:.3f}")
        elif event.kind == "flipped":
            self.now(f"version {event['version']}: comparing every element")
        elif event.kind == "verified" and tally.verified(event["version"]):
            row = tally.rows[event["version"]]
            self._progress.update(self._task, completed=tally.verified_count)
            self.now("training")
            self.say(f"version {row.version}: loss {row.loss:.3f}, {row.bytes / 1e6:.0f} MB in {row.seconds:.3f} s "
                     f"({row.gb_per_s:.2f} GB/s), [green]verified[/green]")


def print_table(rows: list[VersionRow]) -> None:
    """The result, on standard output."""
    table = Table(title=None, header_style="bold")
    for name in ("version", "loss", "bytes", "seconds", "GB/s", "flip spread", "digest", "verified"):
        table.add_column(name, justify="left" if name in ("digest", "verified") else "right", no_wrap=True)
    for row in rows:
        table.add_row(str(row.version), f"{row.loss:.4f}", f"{row.bytes:,}", f"{row.seconds:.3f}", f"{row.gb_per_s:.2f}",
                      f"{row.flip_spread_ms:.1f} ms", row.digest[:16], f"{sum(row.elements.values()):,} elements")
    # Wide enough for the table wherever it goes: a pipe has no width.
    width = None if sys.stdout.isatty() else 130
    Console(width=width, highlight=False).print(table)
