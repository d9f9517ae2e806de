#!/usr/bin/env python3
"""Checks the source tree against the rules that a compiler does not know.

usage: check_tree.py [ROOT]

- `#include "..."` lines follow the module graph of docs/code-style.md (the table below is that graph);
- heavy third-party headers stay where they may be seen;
- no absolute path of a developer's machine stands in a tracked text file.

Exit 0, or 1 with one line per fault.
"""
import pathlib
import re
import subprocess
import sys

# folder -> folders it may include. Longer names win ("tensorbus/rpc" before "tensorbus").
BASE = {"tensorbus/base"}
TYPES = BASE | {"tensorbus/types"}
SHIM = TYPES | {"tensorbus/kernels", "worker_shim"}
CLIENT = SHIM | {"tensorbus/client"}
MAY_INCLUDE = {
    "tensorbus/base": set(),
    "tensorbus/types": BASE,
    "tensorbus/formats": TYPES | {"planner", "simulate"},
    "tensorbus/kernels": TYPES,
    "planner": TYPES,
    "simulate": TYPES | {"planner"},
    "tensorbus/device": BASE,
    "tensorbus/transport": TYPES | {"tensorbus/kernels", "tensorbus/device"},
    "tensorbus/collectives": TYPES | {"tensorbus/transport", "tensorbus/kernels"},
    "proto": set(),
    "tensorbus/rpc": TYPES | {"proto"},
    "tensorbus/daemon": TYPES | {"planner", "tensorbus/rpc", "proto", "worker_shim/wire.h", "tensorbus/kernels"},
    "agent": TYPES | {"planner", "tensorbus/transport", "tensorbus/kernels", "tensorbus/rpc", "proto",
                      "worker_shim/wire.h", "worker_shim/framing.h"},
    "worker_shim": SHIM,
    "tensorbus/client": CLIENT,
    "tensorbus/cli": CLIENT | {"planner", "simulate", "tensorbus/rpc", "tensorbus/formats", "proto"},
    "python": CLIENT | {"planner", "tensorbus/formats"},
}
ANYTHING = ("tests", "bench", "examples")

# Third-party headers by prefix -> files or folders that may include them.
RESTRICTED = {
    "CLI/": re.compile(r"(^|/)main\.cc$|^tensorbus/cli/|^tensorbus/base/service_flags\."),
    "grpc": re.compile(r"^tensorbus/(rpc|daemon|device)/.*|\.cc$"),
    "google/protobuf": re.compile(r"^tensorbus/rpc/|\.cc$"),
    "cuda": re.compile(r"^tensorbus/device/"),
    "nccl": re.compile(r"^tensorbus/device/"),
    "infiniband/": re.compile(r"^tensorbus/device/"),
}

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)')
ABSOLUTE = re.compile(r"(?<![A-Za-z0-9_.~$}-])/(?:work|home|farm|root|Users)/[A-Za-z0-9_.-]+")
SOURCES = {".h", ".cc", ".cu", ".cuh", ".c"}
TEXT = SOURCES | {".py", ".md", ".txt", ".cmake", ".json", ".toml", ".sh", ".yml", ".yaml", ".proto", ".pyi", ".html", ""}


def folder_of(path):
    """The module a file belongs to, or None when the graph does not cover it."""
    for name in sorted(MAY_INCLUDE, key=len, reverse=True):
        if path.startswith(name + "/"):
            return name
    return None


def include_faults(path, text):
    module = folder_of(path)
    for number, line in enumerate(text.splitlines(), 1):
        found = INCLUDE.match(line)
        if not found:
            continue
        ours, theirs = found.groups()
        header = ours or theirs
        for prefix, allowed in RESTRICTED.items():
            if header.startswith(prefix) and not allowed.search(path) and not path.startswith(ANYTHING):
                yield f"{path}:{number}: {header} may not be included here"
        if ours is None or module is None:
            continue
        target = folder_of(ours)
        if target is None:
            if not path.startswith(ANYTHING):
                yield f"{path}:{number}: \"{ours}\" is not named from the repository root"
        elif target != module and target not in MAY_INCLUDE[module] and ours not in MAY_INCLUDE[module]:
            yield f"{path}:{number}: {module} may not include {target} ({ours})"


def path_faults(path, text):
    for number, line in enumerate(text.splitlines(), 1):
        found = ABSOLUTE.search(line)
        if found:
            yield f"{path}:{number}: absolute path {found.group(0)}"


def tracked_files(root):
    try:
        out = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, check=True).stdout
        return [name for name in out.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):  # a source archive without git
        skip = {"build", ".venv", ".git"}
        return [str(p.relative_to(root)) for p in pathlib.Path(root).rglob("*")
                if p.is_file() and not skip & set(p.relative_to(root).parts)]


def faults(root):
    for name in tracked_files(root):
        path = pathlib.Path(root, name)
        if path.suffix not in TEXT or not path.is_file() or name == "tests/tidy/check_tree.py":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix in SOURCES:
            yield from include_faults(name, text)
        yield from path_faults(name, text)


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else str(pathlib.Path(__file__).resolve().parents[2])
    found = list(faults(root))
    for fault in found:
        print(fault)
    print(f"{len(found)} faults", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
