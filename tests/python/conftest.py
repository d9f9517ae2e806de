"""Shared fixtures of the Python tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A shell that starts the tests in the background has SIGINT ignored, and what they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The environment of scripts/setup has the package already; this is for a bare pytest in a fresh clone.
try:
    import tensorbus.models  # noqa: F401
except ImportError:
    # In a build folder the package is the compiled module beside links to the sources.
    built = sorted(ROOT.glob("build/*/python/tensorbus/_core.*.so"), key=lambda path: path.stat().st_mtime)
    package = str(built[-1].parents[1] if built else ROOT / "python")
    sys.path.insert(0, package)
    # The C++ folder of the same name passes for an empty package when the root is on the path.
    sys.modules.pop("tensorbus", None)
    os.environ["PYTHONPATH"] = package  # for the processes that tests start


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TENSORBUS_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, made once in the user's cache."""
    from tensorbus.models.smollm2 import smollm2_folder

    return smollm2_folder()
