"""What somebody who has seen the quickstart may do next, in words that work where they stand."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from tensorbus.local import find_program


def command(name: str) -> str:
    """How to call one of our programs from here: by its name if PATH leads to it, else by its path."""
    program = find_program(name)
    on_path = shutil.which(name)
    if on_path is not None and os.path.samefile(on_path, program):
        return name
    beside = os.path.relpath(program)
    return shlex.quote(program if beside.startswith("..") else beside)


def next_steps() -> str:
    """Some lines without a newline at the end."""
    ctl = command("tensorbusctl")
    lines = [f"next: `{ctl} up` starts a bus for jobs of your own, `{ctl} status --watch` shows it, `{ctl} down` ends it;",
             "      README.md has a trainer and an engine in ten lines each, docs/trainer.md and docs/rollout.md the rest"]
    activate = Path(sys.executable).parent / "activate"
    if ctl != "tensorbusctl" and activate.exists():
        beside = os.path.relpath(activate)
        where = shlex.quote(str(activate) if beside.startswith("..") else beside)
        lines.append(f"      (`. {where}` puts tensorbusctl and this python on PATH)")
    return "\n".join(lines)
