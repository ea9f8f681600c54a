"""The report's page: its frame, its looks, and how values are written on it."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import Any


def page(title: str, body: Sequence[str]) -> str:
    """The whole document.  Its policy allows no script and nothing from outside; ``body`` must be escaped already."""
    return _PAGE.replace("{{title}}", safe(title)).replace("{{style}}", _STYLE).replace("{{body}}", "\n".join(body))


def section(title: str, content: str) -> str:
    return f"<section><h2>{safe(title)}</h2>{content}</section>" if content else ""


def safe(value: Any) -> str:
    """Text for the page: escaped, with control and direction characters written out."""
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in str(value))
    return html.escape("".join(shown), quote=True)


def show(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def percent(value: Any, digits: int = 1) -> str:
    return f"{value:.{digits}%}" if isinstance(value, int | float) else "–"


def clock(value: Any) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(value)) if isinstance(value, int | float) else ""


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.0f} s"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}} · slipstream</title><style>{{style}}</style></head>
<body><main>
{{body}}
</main></body></html>
"""

_STYLE = """
:root { color: #1f2933; background: #f8fafc; font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
body { margin: 0; } main { max-width: 1180px; margin: 0 auto; padding: 24px; }
h1 { font-size: 28px; margin: 0 0 4px; } h2 { font-size: 20px; margin: 36px 0 12px; } h3 { font-size: 15px; margin: 0 0 6px; }
small { color: #64748b; font-weight: 400; }
bdi, .tokens span, .key { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }

header p { margin: 0; color: #64748b; } .brand { letter-spacing: .12em; text-transform: uppercase; font-size: 12px; }
header .error { color: #991b1b; background: #fee2e2; padding: 8px 12px; border-radius: 8px; margin-top: 10px;
  white-space: pre-wrap; }
.status { font-size: 13px; vertical-align: middle; padding: 3px 10px; border-radius: 99px; background: #e2e8f0; }
.status.completed { background: #d1fae5; color: #065f46; } .status.failed { background: #fee2e2; color: #991b1b; }

.cards > div, figure, .sample, table, pre { background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 12px; margin-top: 20px; }
.cards > div { padding: 12px; } .cards h4 { margin: 0; font-size: 12px; color: #64748b; font-weight: 500; }
.cards p { margin: 2px 0; font-size: 18px; font-weight: 650; white-space: nowrap; }

figure { margin: 0; padding: 14px; } figure img { width: 100%; display: block; }
figcaption { color: #64748b; font-size: 13px; margin-top: 6px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
@media (max-width: 760px) { .grid { grid-template-columns: 1fr; } }

.tables { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 12px; align-items: start; }
table { border-collapse: separate; border-spacing: 0; font-size: 13px; padding: 8px 12px; margin-bottom: 12px; }
.tables table { margin: 0; } caption { text-align: left; font-weight: 650; padding: 6px 2px; }
th { text-align: left; font-weight: 500; color: #475569; padding: 2px 14px 2px 0; vertical-align: top; white-space: nowrap; }
td { padding: 2px 14px 2px 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.small td:last-child { text-align: right; padding-right: 0; }
.log { width: 100%; } .log td { vertical-align: top; white-space: nowrap; }
.log td:last-child { width: 100%; white-space: normal; }

.sample { padding: 14px 16px; margin-bottom: 14px; }
.facts, .prompt, .keys { margin: 4px 0; font-size: 13px; color: #475569; }
.facts span { margin-right: 14px; } .facts b, .prompt b, bdi { color: #1f2933; }
bdi { white-space: pre-wrap; overflow-wrap: anywhere; }
.key { padding: 1px 9px; border-radius: 6px; margin-left: 6px; }
.tokens { display: flex; flex-wrap: wrap; gap: 3px; margin-top: 10px; }
.tokens span { font-size: 15px; line-height: 1.15; padding: 3px 5px; min-width: 24px; box-sizing: border-box;
  border-radius: 5px; text-align: center; unicode-bidi: isolate; overflow-wrap: anywhere; }
.tokens i { display: block; font-size: 9.5px; font-style: normal; color: #475569; margin-top: 2px; }
.tokens .unused { outline: 1.5px dashed #dc2626; outline-offset: -1px; } .tokens .observed { opacity: .45; }
.tokens hr { flex-basis: 100%; height: 0; border: 0; margin: 0; }
pre { padding: 14px; overflow-x: auto; font-size: 13px; } summary { cursor: pointer; color: #475569; }
"""
