"""The user's cache folder, and folders in it that are either complete or absent."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """`$TENSORBUS_CACHE`, else `tensorbus` in the user's cache folder. Made if missing."""
    chosen = os.environ.get("TENSORBUS_CACHE")
    if chosen:
        path = Path(chosen)
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tensorbus"
    path.mkdir(parents=True, exist_ok=True)
    return path


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache; `build(empty_folder)` fills it when it is not there yet.

    Safe against crashes: the work happens in a temporary folder that is renamed at the end, so a folder that exists is
    complete. Safe against company: one process builds, others wait for it. What a crashed builder left is removed.
    """
    cache = cache_folder()
    final = cache / name
    if final.is_dir():
        return final
    with open(cache / f".{name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            return final
        for stale in cache.glob(f".{name}.part-*"):
            shutil.rmtree(stale, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=f".{name}.part-", dir=cache))
        try:
            build(part)
            part.chmod(0o755)
            part.rename(final)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return final
