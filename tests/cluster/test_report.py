"""The report shows what the run recorded, whatever is missing, and no text of a model can act on the page."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from slipstream.cluster.report import build_report
from slipstream.cluster.report_charts import LIMIT, History, _thin, _totals, draw_lags, draw_panel
from slipstream.cluster.report_panels import Panel, panels
from slipstream.cluster.report_samples import choose, read_latest, render
from slipstream.core.recipe import load_recipe
from slipstream.core.rundir import RunDirectory

ATTACK = "</span><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x07 & \"'"
SUMMARY = {
    "status": "completed",
    "error": None,
    "steps": 3,
    "eval": {"before": 0.447, "after": 0.9134, "n": 256, "metric": "accuracy"},
    "staleness": {"bound": 1, "token_max": 2, "trained_token_max": 1, "masked_frac": 0.25, "token_mean": 0.75},
    "ledger": {"dispatched": 10, "trained": 6, "stale": 4},
}


@pytest.fixture
def run(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: trial\nmodel: {path: 'builtin:tiny'}\ndata: {source: 'builtin:number_sorting'}\n")
    with RunDirectory.create(tmp_path / "runs", load_recipe([recipe])) as directory:
        yield directory


def sample(**changes: Any) -> dict[str, Any]:
    return {
        "batch": 3,
        "assembled_at": "0.2",
        "sample_id": "train/0/1#0",
        "prompt": "21<",
        "token_ids": [5, 6, 2],
        "text": "12",
        "versions": [["0.1", 0, 1], ["0.2", 1, 3]],
        "kv_versions": [["0.1", 0, 3]],
        "weights": [[0.0, 0, 1], [1.0, 1, 3]],
        "behaviour_logprobs": [-0.25, -0.001, -1.5],
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "advantage": 0.5,
        "status": "eos",
        "outcome": "trained",
        **changes,
    }


def fill(run: RunDirectory, **changes: Any) -> None:
    for step in (1, 2, 3):
        lags = {"0": 2, "1": 1, "2": 1}
        run.append(
            "metrics",
            {"step": step, "time": 1.7e9 + step, "reward/mean": 0.5, "staleness/token_hist": lags, "loss/entropy": 1.0},
        )
    run.append("events", {"time": 1.7e9, "kind": "eval", "step": 0, "score": 0.447, "metric": "accuracy"})
    run.append("samples", sample(**changes))


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_holds_the_numbers_and_loads_nothing(run: RunDirectory) -> None:
    fill(run)
    run.write_summary(SUMMARY)
    page = build_report(run.path).read_text()
    for text in ("0.447 → 0.913", "bound 1, mean 0.75", "25.0%", "completed", "builtin:number_sorting", "train/0/1#0"):
        assert text in page, text
    tags = Tags(page).found
    sources = [
        value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href", "action", "data")
    ]
    assert len(sources) == 4  # learning, lags, entropy, ledger
    assert all(str(source).startswith("data:image/svg+xml;base64,") for source in sources)
    assert not re.search(r"url\(|@import|https?://", page)
    policy = next(attributes["content"] for tag, attributes in tags if tag == "meta" and "http-equiv" in attributes)
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@pytest.mark.parametrize(
    ("summary", "told"),
    [
        ({"status": "interrupted", "version": 3, "steps": 100}, "<p>3 of 100 steps · "),
        ({"status": "failed", "version": 3}, "<p>3 steps · "),  # the driver's, where the controller died
        (None, "<p>3 steps · "),
    ],
)
def test_the_header_tells_what_was_done_and_not_what_was_planned(
    run: RunDirectory, summary: dict[str, Any] | None, told: str
) -> None:
    fill(run)
    if summary is not None:
        run.write_summary(summary)
    assert told in build_report(run.path).read_text()


def test_text_of_models_graders_and_errors_cannot_act(run: RunDirectory) -> None:
    fill(run, text=ATTACK, prompt=ATTACK, sample_id=ATTACK, rewards={ATTACK: 1.0}, status=ATTACK, token_ids=[1] * len(ATTACK),
         behaviour_logprobs=[0.0] * len(ATTACK), versions=[[ATTACK, 0, len(ATTACK)]])  # fmt: skip
    run.append("events", {"time": 1.7e9, "kind": "fault", "error": ATTACK, "reason": ATTACK})
    run.append("metrics", {"step": 4, "reward/<script>": 1.0, "reward/$\\frac{": 2.0})
    run.write_summary({**SUMMARY, "status": ATTACK, "error": ATTACK, ATTACK: {ATTACK: ATTACK}})
    page = build_report(run.path).read_text()
    tags = Tags(page).found
    assert {tag for tag, _ in tags}.isdisjoint({"script", "iframe", "object", "a", "link", "form", "svg"})
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert all(str(attributes["src"]).startswith("data:image/svg+xml;base64,") for tag, attributes in tags if tag == "img")
    start, end = page.index('class="tokens"'), page.index("<h2>Events")
    assert "\u202e" not in page[start:end] and "\\u202e" in page[start:end] and "\\x07" in page[start:end]


def test_a_run_without_anything_and_one_cut_off_still_have_a_report(run: RunDirectory) -> None:
    page = build_report(run.path).read_text()
    assert "unfinished" in page and "no step yet" in page and "<img" not in page
    fill(run)
    run.stream_file("metrics").open("ab").write(b'{"step": 4, "rew')
    run.stream_file("samples").open("ab").write(b'{"batch": 4')
    page = build_report(run.path).read_text()
    assert "The last line of metrics.jsonl was cut off" in page and "train/0/1#0" in page
    with pytest.raises(ValueError, match=r"no recipe\.yaml"):
        build_report(run.path / "logs")


def test_each_token_shows_its_version_log_prob_and_weight() -> None:
    shown = render("why", sample(), None)
    boxes = re.findall(
        r'<span class="(used|unused|observed)" style="background:(#\w+)" title="([^"]*)">(.)<i>(-?[\d.]+)</i>', shown
    )
    assert [(kind, text, logprob) for kind, _, _, text, logprob in boxes] == [
        ("unused", "1", "-0.25"),
        ("used", "2", "0.00"),
        ("used", "■", "-1.50"),
    ]
    assert boxes[0][1] != boxes[1][1] == boxes[2][1]  # the tint is the version's
    assert boxes[1][2] == "token 1 · id 6 · version 0.2 · KV from 0.1 · log-prob -0.001 · weight 1.0"
    assert ">6<i>" in render("why", sample(text="twelve"), None)  # no character per token: ids
    assert ">t6<i>" in render("why", sample(), lambda token: f"t{token}")
    assert 'class="observed"' in render("why", sample(loss_mask=[[1, 0, 2], [0, 2, 3]]), None)
    assert "… 100 more tokens" in render("why", sample(token_ids=[1] * 500, behaviour_logprobs=[0.0] * 500), None)


def test_every_turn_begins_a_line_and_answers_have_no_log_prob() -> None:
    """Two tokens of the policy, an answer of one, and the next turn of two."""
    turns = sample(token_ids=[8, 2, 47, 6, 2], loss_mask=[[1, 0, 2], [0, 2, 3], [1, 3, 5]], versions=[["0.2", 0, 5]],
                   kv_versions=[["0.2", 0, 5]], weights=[[1.0, 0, 2], [0.0, 2, 3], [1.0, 3, 5]],
                   behaviour_logprobs=[-0.5, -0.1, 0.0, -0.5, -0.1])  # fmt: skip
    shown = render("why", turns, {8: "4", 2: "■", 47: "<", 6: "2"}.__getitem__)
    boxes = re.findall(r'<span class="(used|unused|observed)"[^>]*>(.*?)</span>|(<hr>)', shown)
    assert [line or (kind, text) for kind, text, line in boxes] == [
        ("used", "4<i>-0.50</i>"),
        ("used", "■<i>-0.10</i>"),
        ("observed", "&lt;"),
        "<hr>",
        ("used", "2<i>-0.50</i>"),
        ("used", "■<i>-0.10</i>"),
    ]
    assert "<hr>" not in render("why", sample(), None)


def test_the_chosen_samples_differ_and_show_extremes(tmp_path: Path) -> None:
    plain = [sample(sample_id=str(i), versions=[["0.2", 0, 3]], reward=0.5) for i in range(20)]
    plain[4] |= {"versions": [["0.0", 0, 1], ["0.1", 1, 2], ["0.2", 2, 3]]}
    plain[7] |= {"reward": 2.0}
    plain[9] |= {"reward": -1.0}
    plain[2] |= {"behaviour_logprobs": [-9.0, -9.0, -9.0]}
    plain[0] |= {"token_ids": [1] * 30}
    assert [one["sample_id"] for _, one in choose(plain)] == ["4", "7", "9", "2", "0"]
    assert choose([]) == [] and len(choose(plain[:2])) == 2
    assert read_latest(tmp_path / "none.jsonl") == []


def test_lags_are_shares_of_tokens_and_red_beyond_the_bound() -> None:
    axes = Figure().subplots()
    _totals(axes, np.array([6.0, 3.0, 1.0]), limit=1)
    assert [text.get_text() for text in axes.texts] == ["60.0%", "30.0%", "10.0%"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.6, 0.3, 0.1])
    red = tuple(int(LIMIT[i : i + 2], 16) / 255 for i in (1, 3, 5))
    assert [bar.get_facecolor()[:3] == pytest.approx(red) for bar in axes.patches] == [False, False, True]
    assert draw_lags(History([{"step": 1}]), 2) is None


def test_series_leave_out_what_is_missing_and_long_runs_stay_small() -> None:
    history = History([{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": 2, "h": {"0": 3, "2": 1}}])
    x, y = history.series("a")
    assert x.tolist() == [1, 3] and y.tolist() == [1, 2]
    assert history.histograms("h") == {3: {0: 3, 2: 1}}
    assert draw_panel(Panel("t", "c", (("absent", "x"),)), history) is None
    steps = np.arange(4000.0)
    assert [part[:2].tolist() for part in _thin(steps, steps)] == [[4.5, 14.5], [4.5, 14.5]]  # means of 10 neighbours
    assert _thin(steps, steps, mean=False)[1][:2].tolist() == [9, 19]
    lines = [{"step": i, "loss/entropy": 1.0, "staleness/token_hist": {"0": 5, "1": 5}} for i in range(4000)]
    pictures = [draw_panel(panel, History(lines)) for panel in panels(1)] + [draw_lags(History(lines), 1)]
    assert sum(len(picture) for picture in pictures if picture) < 200_000
