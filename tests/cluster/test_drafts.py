"""What a run says about its drafts, from the engines' counters; and the folder that a draft's name means."""

import math
from pathlib import Path

import pytest

from slipstream.cluster.drafts import DraftUsage, saved_drafts, summarise_drafts
from slipstream.cluster.models import draft_folder
from slipstream.cluster.telemetry import Telemetry
from slipstream.core.metrics import values
from slipstream.core.recipe import load_recipe
from slipstream.core.rundir import RunDirectory
from slipstream.core.speculation import Speculation
from slipstream.rollout.speculation.acceptance import Acceptance, DraftStats, Learning


def engine(histogram: tuple[int, ...], learning: Learning | None = None) -> DraftStats:
    return DraftStats(Acceptance(histogram, 2 * sum(histogram)), learning)


def learning(updates: int, update_s: float, busy_s: float, learned_batch: int, loss: float = 0.5) -> Learning:
    return Learning(updates=updates, kills=0, postponed=0, loss=loss, lr=1e-3, update_s=update_s, busy_s=busy_s,
                    policy_batch=5, learned_batch=learned_batch, baseline=1.25)  # fmt: skip


def test_without_speculation_nothing_is_said() -> None:
    usage = DraftUsage(Speculation())
    usage.begin([None, None])
    assert usage.step([None, None], 3) == {}


def test_two_engines_with_a_frozen_draft() -> None:
    """Since ``begin`` 4 + 6 rounds, 1 + 4 accepted: 1.5 tokens a round; a draft that never learns is as old as the policy."""
    usage = DraftUsage(Speculation(method="draft_model", draft="d"))
    usage.begin([engine((5, 0, 0)), engine((0, 0, 0))])
    found = values(usage.step([engine((8, 1, 0)), engine((3, 2, 1))], 7))
    assert (found["draft/rounds"], found["draft/accepted"], found["draft/acceptance_length"]) == (10, 5, pytest.approx(1.5))
    assert found["draft/lag"] == 7
    assert values(usage.step([engine((8, 1, 0)), engine((3, 2, 2))], 8))["draft/acceptance_length"] == 3.0


def test_learning_drafts() -> None:
    """Of 10 s of work in the step 1.2 s were updates; the older of the two drafts learnt at batch 2, and the engines hold 5."""
    usage = DraftUsage(Speculation(method="draft_model", draft="d"))
    usage.begin([engine((1, 0, 0), learning(0, 0.0, 4.0, 0, math.nan)), engine((1, 0, 0), learning(1, 0.2, 6.0, 0))])
    now = [engine((2, 0, 0), learning(3, 0.6, 8.0, 5, 0.4)), engine((2, 0, 0), learning(5, 0.8, 12.0, 2, 0.6))]
    found = values(usage.step(now, 6))
    assert (found["draft/updates"], found["draft/lag"]) == (7, 3)
    assert found["draft/cost_share"] == pytest.approx(0.12)
    assert (found["draft/loss"], found["draft/baseline"]) == (pytest.approx(0.5), 1.25)


def test_the_summary_covers_the_steps_before_a_resume(tmp_path: Path) -> None:
    """Two steps of 10 and 30 rounds with 5 and 25 accepted: 1 + 30 / 40."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: t\nmodel: {path: 'builtin:tiny'}\ndata: {source: 'builtin:number_sorting'}\n")
    history = [{"draft/rounds": 10, "draft/accepted": 5, "draft/updates": 2, "draft/lag": 1},
               {"draft/rounds": 30, "draft/accepted": 25, "draft/updates": 4, "draft/lag": 0}]  # fmt: skip
    speculation = Speculation(method="ngram", rejection="synthetic", synthetic_length=2.0, allow_lossy=True)
    with RunDirectory.create(tmp_path / "runs", load_recipe([recipe])) as run:
        found = summarise_drafts(speculation, Telemetry(run, "t", (), history))
        assert summarise_drafts(Speculation(), Telemetry(run, "t", ()))["acceptance_length"] is None
    assert (found["method"], found["lossy"], found["acceptance_length"]) == ("ngram", True, pytest.approx(1.75))
    assert (found["rounds"], found["updates"]) == (40, 6)


def test_a_draft_is_named_as_a_model_is(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    text = "name: t\nmodel: {path: 'builtin:tiny'}\ndata: {source: 'builtin:number_sorting'}\n"
    recipe.write_text(text + "rollout: {speculation: {method: draft_model, draft: 'builtin:tiny'}}")
    folder = draft_folder(load_recipe([recipe]))
    assert folder is not None and (folder / "config.json").is_file()
    recipe.write_text(text + "rollout: {speculation: {method: draft_model, draft: nowhere}}")
    with pytest.raises(ValueError, match=r"rollout\.speculation\.draft: nowhere is no folder"):
        draft_folder(load_recipe([recipe]))


def test_saved_drafts_are_in_the_order_of_their_engines(tmp_path: Path) -> None:
    for index in range(11):
        (tmp_path / "drafts" / f"engine-{index}").mkdir(parents=True)
    assert [folder.name for folder in saved_drafts(tmp_path)] == [f"engine-{index}" for index in range(11)]
    assert saved_drafts(None) == saved_drafts(tmp_path / "drafts") == []
