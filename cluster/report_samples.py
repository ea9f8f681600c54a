"""The report's samples: every token with its version, log-prob and weight.  All text is the model's, so all is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.cluster.report_page import safe

_TAIL_BYTES = 8 * 2**20
_MOST_TOKENS = 400
_TINTS = ("#dbeafe", "#fde68a", "#bbf7d0", "#fbcfe8", "#ddd6fe", "#fed7aa", "#a5f3fc", "#e2e8f0")

Decode = Callable[[int], str]


def read_latest(path: Path) -> list[dict[str, Any]]:
    """The samples in the last 8 MiB of ``samples.jsonl``; a line cut off by a crash is left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    samples = []
    for line in lines[1 if size > _TAIL_BYTES else 0 :]:
        try:
            sample = json.loads(line)
        except ValueError:
            continue
        if isinstance(sample, dict) and sample.get("token_ids"):
            samples.append(sample)
    return samples


def choose(samples: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """A few late samples that show something, each with why; no sample twice."""
    late = samples[-512:]
    wanted: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("most policy versions in one response", lambda s: len({span[0] for span in s.get("versions", [])})),
        ("highest reward of the last batches", lambda s: s.get("reward", 0.0)),
        ("lowest reward of the last batches", lambda s: -s.get("reward", 0.0)),
        ("least likely tokens", lambda s: -_mean(s.get("behaviour_logprobs", []))),
        ("longest response", lambda s: len(s["token_ids"])),
    ]
    chosen: list[tuple[str, dict[str, Any]]] = []
    for why, key in wanted:
        left = [sample for sample in late if all(sample is not other for _, other in chosen)]
        if left:
            chosen.append((why, max(reversed(left), key=key)))
    return chosen


def render(why: str, sample: Mapping[str, Any], decode: Decode | None) -> str:
    """One sample as HTML: what it was, then a box per token with its log-prob beneath, tinted by policy version."""
    versions = _spread(sample.get("versions", []), len(sample["token_ids"]))
    tints = {version: _TINTS[i % len(_TINTS)] for i, version in enumerate(sorted(set(versions), key=_order))}
    legend = "".join(f'<span class="key" style="background:{tints[v]}">{safe(v)}</span>' for v in tints)
    facts = {
        "batch": sample.get("batch"),
        "assembled at": sample.get("assembled_at"),
        "reward": _number(sample.get("reward")),
        "advantage": _number(sample.get("advantage")),
        "status": sample.get("status"),
        "outcome": sample.get("outcome"),
        **{f"reward {name}": _number(value) for name, value in (sample.get("rewards") or {}).items()},
    }
    line = " ".join(f"<span>{safe(name)} <b>{safe(value)}</b></span>" for name, value in facts.items() if value is not None)
    return (
        f'<article class="sample"><h3>{safe(why)} <small>{safe(sample.get("sample_id"))}</small></h3>'
        f'<p class="facts">{line}</p><p class="prompt"><b>prompt</b> <bdi>{_visible(_prompt(sample.get("prompt")))}</bdi></p>'
        f'<p class="keys">policy version of each token: {legend} · below it its log-prob · dashed: no loss weight · '
        "faint: what the environment answered</p>"
        f'<div class="tokens">{_tokens(sample, versions, tints, decode)}</div></article>'
    )


def _tokens(sample: Mapping[str, Any], versions: Sequence[str], tints: Mapping[str, str], decode: Decode | None) -> str:
    ids = sample["token_ids"]
    texts = _texts(ids, str(sample.get("text") or ""), decode)
    logprobs = sample.get("behaviour_logprobs") or [None] * len(ids)
    weights = _spread(sample.get("weights", []), len(ids))
    kv_versions = _spread(sample.get("kv_versions", []), len(ids))
    written = _spread(sample.get("loss_mask", []), len(ids))
    boxes = []
    for place in range(min(len(ids), _MOST_TOKENS)):
        if place and written[place - 1] == "0" != written[place]:
            boxes.append("<hr>")  # the policy's next turn
        kind = "observed" if written[place] == "0" else "unused" if weights[place] in ("0", "0.0") else "used"
        logprob = logprobs[place]
        title = (
            f"token {place} · id {ids[place]} · version {versions[place]} · KV from {kv_versions[place]} · "
            f"log-prob {_number(logprob)} · weight {weights[place]}"
        )
        below = "" if logprob is None or kind == "observed" else f"<i>{round(logprob, 2) + 0.0:.2f}</i>"
        style = f"background:{tints.get(versions[place], '#fff')}"
        shown = _visible(texts[place].replace(" ", "␣"))
        boxes.append(f'<span class="{kind}" style="{style}" title="{safe(title)}">{shown}{below}</span>')
    if len(ids) > _MOST_TOKENS:
        boxes.append(f"<em>… {len(ids) - _MOST_TOKENS} more tokens</em>")
    return "".join(boxes)


def _texts(ids: Sequence[int], text: str, decode: Decode | None) -> list[str]:
    """What to write in each box: the decoded token; a character where each token is one; otherwise the id."""
    if decode is not None:
        return [decode(token) for token in ids]
    if len(text) in (len(ids), len(ids) - 1):
        return [*text, "■"][: len(ids)]
    return [str(token) for token in ids]


def _spread(spans: Sequence[Sequence[Any]], length: int) -> list[str]:
    """``[["0.5", 0, 2], ["0.6", 2, 3]]`` -> ``["0.5", "0.5", "0.6"]``; unknown places are ``"–"``."""
    values = ["–"] * length
    for value, start, end in spans:
        values[start:end] = [str(value)] * (min(end, length) - start)
    return values


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
    return str(prompt)


def _visible(text: str) -> str:
    """Escaped, with line ends shown."""
    return safe(text.replace("\n", "⏎").replace("\t", "⇥"))


def _number(value: Any) -> str | None:
    return f"{value:.4g}" if isinstance(value, int | float) else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else -math.inf
