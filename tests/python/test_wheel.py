"""The wheel in a virtual environment that has nothing else: programs, package, manifests, and nothing of the machine that built it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")
pytest.importorskip("pybind11")

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("tensorbusd", "tensorbus-agent", "tensorbusctl", "tensorbus-bench-peer")
BUILD_S = 1500

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(BUILD_S + 120)]


def run(*command: str | Path, folder: Path, timeout_s: float = 120, **environment: str) -> str:
    """Runs it without what this test's own environment says; what it wrote on standard output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TENSORBUS_", "PYTHON"))}
    answer = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, timeout=timeout_s,
                            stdin=subprocess.DEVNULL, env={**clean, **environment})
    assert answer.returncode == 0, f"{command}\n{answer.stdout[-2000:]}\n{answer.stderr[-4000:]}"
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tree, in the folder that every such build shares."""
    folder = tmp_path_factory.mktemp("wheel")
    # With the flags of scripts/setup, and the names that CMake finds by itself: the compiler cache has it all then.
    compilers = {"CC": os.environ.get("CC", "cc"), "CXX": os.environ.get("CXX", "c++")}
    flags = ["-C", "cmake.define.TENSORBUS_WERROR=ON"] if os.environ.get("CI") == "true" else []
    run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder,
        "--disable-pip-version-check", *flags, folder=folder, timeout_s=BUILD_S, **compilers)
    (built,) = folder.glob("tensorbus-*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel alone."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    run(folder / "venv" / "bin" / "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check", wheel, folder=folder)
    return folder / "venv"


def test_package_needs_no_framework(bare: Path, tmp_path: Path) -> None:
    code = ("import importlib.util, tensorbus\n"
            "assert importlib.util.find_spec('torch') is None and importlib.util.find_spec('numpy') is None\n"
            "with tensorbus.local() as bus, tensorbus.connect('policy', 'trainer', role='producer') as client:\n"
            "    print(tensorbus.__file__, sorted(bus.pids), client.live_version)\n")
    said = run(bare / "bin" / "python", "-c", code, folder=tmp_path)
    assert said.startswith(str(bare)) and "['tensorbus-agent', 'tensorbusd'] 0" in said


def test_programs_start_and_find_the_manifests(bare: Path, tmp_path: Path) -> None:
    for program in PROGRAMS:
        run(bare / "bin" / program, "--help", folder=tmp_path)
    manifests = bare / "share" / "tensorbus" / "manifests"
    planned = json.loads(run(bare / "bin" / "tensorbusctl", "plan", "--layouts", manifests / "layouts.json", "--scenario", "T01",
                             "--json", folder=tmp_path))
    assert planned["tensors"] > 0
    # This one is told of no folder.
    measured = json.loads(run(bare / "bin" / "tensorbusctl", "bench", "m2n", "--workload", "qwen3-0.6b", "--scale", "64",
                              "--iterations", "1", "--json", folder=tmp_path))
    assert measured["verified"] is True


def test_wheel_knows_nothing_of_the_build(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        programs = [name for name in archive.namelist() if ".data/scripts/" in name or name.endswith(".so")]
        assert len(programs) == len(PROGRAMS) + 1
        for name in programs:
            # Neither a search path for libraries nor a source file's name.
            assert str(ROOT).encode() not in archive.read(name), f"{name} has a path of the build in it"


def test_extras_are_declared(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    assert {"numpy", "torch", "bench", "quickstart"} <= set(metadata.get_all("Provides-Extra"))
    assert all("extra ==" in line for line in metadata.get_all("Requires-Dist")), "nothing but extras needs anything"
