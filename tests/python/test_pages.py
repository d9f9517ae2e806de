"""The HTML pages in a real browser: nothing is cut in a window of a laptop's width, and what is wider than a narrow one scrolls."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorbus.quickstart.report import render_report
from tensorbus.quickstart.tally import VersionRow
from test_bus_ctl import CTL

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")

# What a reader would see cut: the page itself wider than the window, and tables wider than the box they may scroll in.
MEASURE = """<script>document.title = JSON.stringify({
  page: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  tables: [...document.querySelectorAll("table")].map(t => t.offsetWidth - t.parentElement.clientWidth),
  scrolls: [...document.querySelectorAll("table")].every(t => getComputedStyle(t.parentElement).overflowX == "auto")})</script>"""


def quickstart_page(path: Path) -> None:
    rows = []
    for version in (1, 2000):
        row = VersionRow(version, losses={0: 11.0123}, published_at={0: 1.0})
        for rank in range(3):
            key = ("rollout", rank)
            row.asked_at[key], row.flipped_at[key], row.arrived_bytes[key] = 1.0, 12.3, 3_089_723_136
            row.copy_seconds[key], row.digests[key], row.elements[key] = 10.3, 1 << 100, 44_861_760
        rows.append(row)
    path.write_text(render_report("Tensorbus: weights from trainer to engine", [("SmolLM2-135M", "model")], rows, None), encoding="utf-8")


def ctl_page(*words: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        if not CTL.exists():
            pytest.skip(f"{CTL} is not built")
        subprocess.run([CTL, *words, "--html", path], check=True, capture_output=True, timeout=60)

    return make


@pytest.mark.parametrize("make", [
    pytest.param(quickstart_page, id="quickstart"),
    pytest.param(ctl_page("plan", "--scenario", "S02"), id="plan"),
    pytest.param(ctl_page("simulate", "--scenario", "S02", "--cluster", "h100-8x400g"), id="simulate")])
def test_nothing_is_cut(make: Callable[[Path], None], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    make(page)
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    for width in (1100, 700):
        shown = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
                                f"--window-size={width},1000", "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
        found = re.search(r"<title>(\{.*?\})</title>", shown.stdout)
        assert found, shown.stderr[-2000:]
        seen = json.loads(found[1])
        assert seen["page"] <= 0 and seen["scrolls"], (width, seen)
        if width == 1100:
            assert all(over <= 0 for over in seen["tables"]), seen
