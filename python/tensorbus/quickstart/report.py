"""The report of a run as one HTML file that needs nothing else: numbers first, then charts, then the table."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from pathlib import Path

from .tally import VersionRow

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6670; --line: #d8dde3; --page: #ffffff; --card: #f5f7f9;
        --bar: #2f6db5; --bar2: #2e8b6f; --good: #1d7a46; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9aa4af; --line: #343b44; --page: #14181d; --card: #1c2229; --bar: #6aa5e8; --bar2: #5cc3a1;
          --good: #58c789; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 34px 0 10px; }
p.sub { color: var(--soft); margin: 0 0 22px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 12px; }
.fact { background: var(--card); border-radius: 8px; padding: 12px 14px; }
.fact b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; } .fact span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 20px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 11px; }
/* A shadow at a side says that the table goes on there. */
.scroll { overflow-x: auto; background: linear-gradient(to right, var(--page) 40%, transparent) 0 0 / 36px 100% no-repeat local,
          linear-gradient(to left, var(--page) 40%, transparent) 100% 0 / 36px 100% no-repeat local,
          linear-gradient(to right, var(--line), transparent) 0 0 / 14px 100% no-repeat,
          linear-gradient(to left, var(--line), transparent) 100% 0 / 14px 100% no-repeat; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: 13px; } td.ok { color: var(--good); font-weight: 600; }
td.digest { font: 12px ui-monospace, monospace; white-space: normal; } td.digest, th.left { text-align: left; }
"""


def _nice_ceiling(value: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is not below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0
    while power > value:
        power /= 10
    while power * 10 < value:
        power *= 10
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value)


def bar_chart(title: str, unit: str, labels: Sequence[str], values: Sequence[float], colour: str) -> str:
    """An SVG of one bar per label with an axis from zero; each bar says its value on hover."""
    width, height, left, bottom, top = 460, 220, 46, 28, 12
    ceiling = _nice_ceiling(max(values, default=0.0))
    inner_width, inner_height = width - left - 8, height - top - bottom
    slot = inner_width / max(1, len(values))
    # A label under every bar while they fit, then every n-th.
    every = max(1, -(-len(values) * 22 // inner_width))
    parts = []
    for tick in range(5):
        y = top + inner_height * (1 - tick / 4)
        parts.append(f'<line x1="{left}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
                     f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{ceiling * tick / 4:g}</text>')
    for i, (label, value) in enumerate(zip(labels, values)):
        bar = inner_height * value / ceiling
        x = left + slot * i + slot * 0.15
        parts.append(f'<rect x="{x:.1f}" y="{top + inner_height - bar:.1f}" width="{slot * 0.7:.1f}" height="{bar:.1f}" rx="2" '
                     f'fill="var({colour})"><title>version {html.escape(label)}: {value:.4g} {html.escape(unit)}</title></rect>')
        if i % every == 0:
            parts.append(f'<text x="{x + slot * 0.35:.1f}" y="{height - 9}" text-anchor="middle">{html.escape(label)}</text>')
    return (f'<figure style="margin:0"><figcaption>{html.escape(title)} <span style="color:var(--soft)">({html.escape(unit)}, by '
            f'version)</span></figcaption><svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">'
            f'{"".join(parts)}</svg></figure>')


def median(values: Sequence[float]) -> float:
    """0 for none."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2 if ordered else 0.0


def render_report(title: str, facts: Sequence[tuple[str, str]], rows: Sequence[VersionRow], leaks: Sequence[str] | None) -> str:
    """The whole page. `facts` are (value, what it is); `leaks` is None when nobody looked for them."""
    labels = [str(row.version) for row in rows]
    cards = "".join(f'<div class="fact"><b>{html.escape(value)}</b><span>{html.escape(what)}</span></div>' for value, what in facts)
    charts = "".join([
        bar_chart("From publish to flip", "s", labels, [row.seconds for row in rows], "--bar"),
        bar_chart("Speed", "GB/s", labels, [row.gb_per_s for row in rows], "--bar2"),
        bar_chart("Training loss before the step", "nats per token", labels, [row.loss for row in rows], "--bar")])
    lines = "".join(
        f"<tr><td>{row.version}</td><td>{row.loss:.4f}</td><td>{row.bytes:,}</td><td>{row.seconds:.3f}</td>"
        f"<td>{row.copy_seconds_max:.3f}</td><td>{row.gb_per_s:.2f}</td><td>{row.flip_spread_ms:.1f}</td>"
        f'<td class="digest">{row.digest[:16]}<wbr>{row.digest[16:]}</td><td class="ok">{sum(row.elements.values()):,} elements</td></tr>' for row in rows)
    leak_text = ""
    if leaks is not None:
        inner = "".join(f"<li>{html.escape(leak)}</li>" for leak in leaks) or "<li>none: memory, descriptors, threads and shared " \
            "memory files stayed as they were</li>"
        leak_text = f"<h2>Leaks</h2><ul>{inner}</ul>"
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{html.escape(title)}</h1>"
            f'<p class="sub">{time.strftime("%Y-%m-%d %H:%M")}. Every element of every engine rank was compared with an independent '
            f'slicing of the trainer\'s full state after each flip.</p><div class="facts">{cards}</div>'
            f'<h2>Refreshes</h2><div class="charts">{charts}</div><h2>Versions</h2><div class="scroll"><table><thead><tr><th>version</th>'
            f"<th>loss</th><th>bytes</th><th>seconds</th><th>copying, s</th><th>GB/s</th><th>flip spread, ms</th><th class=\"left\">digest</th>"
            f"<th>verified</th></tr></thead><tbody>{lines}</tbody></table></div>{leak_text}</main></body></html>\n")


def write_report(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
