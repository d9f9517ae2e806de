"""The fenced blocks of README.md and docs/*.md, as test_docs.py runs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\S*)\s*$")
HEADING = re.compile(r"^#+ +(.*)$")
NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")


@dataclass(frozen=True)
class Block:
    """One fenced block. `line` is that of its first line of text; `not_run` the reason of a marker above it, if any."""

    page: str
    heading: str
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path, name: str) -> list[Block]:
    """Every fenced block of a page, in order. Raises ValueError for a fence that is never closed."""
    blocks: list[Block] = []
    heading, before = "", ""
    begun: tuple[int, str, str | None] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if begun is None:
            if fence:
                marker = NOT_RUN.match(before)
                begun, body = (number + 1, fence[1], marker[1] if marker else None), []
            elif found := HEADING.match(line):
                heading = found[1]
            before = line
        elif fence:
            first, language, reason = begun
            blocks.append(Block(name, heading, first, language, "\n".join(body) + "\n", reason))
            begun = None
        else:
            body.append(line)
    if begun is not None:
        raise ValueError(f"{name}:{begun[0] - 1}: a fence that is never closed")
    return blocks


def all_blocks(root: Path) -> list[Block]:
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [block for page in pages for block in blocks_of(page, str(page.relative_to(root)))]
