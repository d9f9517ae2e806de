"""Shared fixtures of the Python tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The environment of scripts/setup has the package already; this is for a bare pytest in a fresh clone.
try:
    import tensorbus.models  # noqa: F401
except ImportError:
    sys.path.insert(0, str(ROOT / "python"))
    os.environ["PYTHONPATH"] = str(ROOT / "python")  # for the processes that tests start


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
