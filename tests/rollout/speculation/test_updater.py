"""Updates of a draft in a plain loop of speculative decoding, with transformers models in place of the engine."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.core.speculation import TestTimeSpeculation
from slipstream.rollout.speculation.following import Following
from slipstream.rollout.speculation.placement import Inline, Placement
from slipstream.rollout.speculation.runner_v1 import Forward, Judged, Part, Round
from slipstream.rollout.speculation.sharing import average
from slipstream.rollout.speculation.student import DraftModelStudent, Lesson
from slipstream.rollout.speculation.updater import Updater

K = 3
T = 0.5


class Loop:
    """Two requests decoded with drafts of K tokens: an exact, slow engine whose busy time grows by ``work_s`` a round."""

    def __init__(self, target: Path, draft: Path, work_s: float = 1.0) -> None:
        self.target, self.draft = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (target, draft))
        self.generator = torch.Generator().manual_seed(0)
        self.requests = {"a": [1, 9, 12, 6], "b": [1, 8, 7]}
        self.prompts = {name: len(ids) for name, ids in self.requests.items()}
        self.busy_s, self.work_s = 0.0, work_s
        self.published = 0

    def publish(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.published += 1
        own = dict(self.draft.named_parameters())
        for name, weight in weights:
            own[name].data.copy_(weight)

    @torch.no_grad()
    def _probs(self, model, ids: list[int]) -> Tensor:
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()

    def _draw(self, probs: Tensor) -> int:
        return int(torch.multinomial(probs, 1, generator=self.generator))

    def round(self) -> Round:
        judged, logits, probs, committed = [], [], [], {}
        for slot, (name, ids) in enumerate(self.requests.items()):
            drafts, q = [], []
            for _ in range(K):
                q.append((self._probs(self.draft, ids + drafts)[-1] / T).softmax(-1))
                drafts.append(self._draw(q[-1]))
            rows = self._probs(self.target, ids + drafts)[len(ids) - 1 :]
            p = (rows / T).softmax(-1)
            accepted = 0
            while (
                accepted < K
                and torch.rand((), generator=self.generator) < p[accepted, drafts[accepted]] / q[accepted][drafts[accepted]]
            ):
                accepted += 1
            rest = p[K] if accepted == K else (p[accepted] - q[accepted]).clamp_min(0)
            new = [*drafts[:accepted], self._draw(rest)]
            judged.append(Judged(name, slot, self.prompts[name], len(ids), K, accepted, slot * K, T))
            logits.append(rows[:K])
            probs.append(torch.stack(q))
            committed[name] = ids + new
        self.requests = committed
        self.busy_s += self.work_s
        return Round(judged, torch.cat(logits), torch.cat(probs), lambda one: list(committed[one.request_id]))

    @torch.no_grad()
    def overlap(self) -> float:
        """Σ min(p, q), the chance that a draft token is accepted, on 200 tokens that the target wrote itself."""
        generator, ids = torch.Generator().manual_seed(1), [1, 10, 11, 6]
        while len(ids) < 204:
            probs = (self._probs(self.target, ids)[-1] / T).softmax(-1)
            ids.append(int(torch.multinomial(probs, 1, generator=generator)))
        p, q = ((self._probs(model, ids)[3:] / T).softmax(-1) for model in (self.target, self.draft))
        return torch.minimum(p, q).sum(-1).mean().item()

    def run(self, updater: Updater, rounds: int) -> list[int]:
        """Accepted drafts per round and request; requests start again at 120 tokens."""
        accepted = []
        for _ in range(rounds):
            verification = self.round()
            accepted += [one.accepted for one in verification.judged]
            updater.observe(verification, set(self.requests))
            for name, ids in list(self.requests.items()):
                if len(ids) > 120:
                    del self.requests[name]
                    self.requests[name + "'"] = ids[: self.prompts[name]]
                    self.prompts[name + "'"] = self.prompts[name]
        return accepted


def settings(**keys) -> TestTimeSpeculation:
    return TestTimeSpeculation.model_validate(
        {"enabled": True, "lr": 3e-3, "baseline_rounds": 10, "max_cost_share": 1.0, **keys}
    )


def updater_of(loop: Loop, folder: Path, chosen: TestTimeSpeculation, placement: Placement | None = None) -> Updater:
    student = DraftModelStudent(folder, torch.device("cpu"), train=chosen.train)
    return Updater(chosen, student, placement or Inline(), loop.publish, lambda: loop.busy_s, tokens=K, max_length=128)


@pytest.fixture
def loop(tiny: Path, small_draft: Path) -> Loop:
    return Loop(tiny, small_draft)


@pytest.mark.parametrize("rounds", ["all", "latest"])
def test_what_is_learnt_holds_on_new_text(loop: Loop, small_draft: Path, rounds: str) -> None:
    """Round 5 compares the copies, round 10 ends the baseline and updates; then every fifth does."""
    updater = updater_of(loop, small_draft, settings(rounds=rounds))
    at_rest = loop.overlap()
    loop.run(updater, 9)
    assert updater.updates == loop.published == 0 and updater.watchdog.resting
    loop.run(updater, 191)
    assert updater.updates == loop.published == 39 and updater.kills == 0
    assert loop.overlap() > at_rest + 0.05


def test_a_copy_of_another_model_is_refused(loop: Loop, tiny: Path) -> None:
    updater = updater_of(loop, tiny, settings())
    loop.run(updater, 40)
    assert updater.refused is not None and "not the same model" in updater.refused
    assert updater.updates == loop.published == 0


def test_a_rate_that_diverges_is_undone(loop: Loop, small_draft: Path) -> None:
    """Adam at a rate of 1: the draft is destroyed, found worse than at rest, and put back as it was; the rate is halved."""
    original = [p.clone() for p in loop.draft.parameters()]
    updater = updater_of(loop, small_draft, settings(lr=1.0, kill_below=1.0, baseline_rounds=20))
    loop.run(updater, 20)
    updater.watchdog.baseline = updater.watchdog.average = 2.0  # a draft that had been good at rest
    while not updater.kills:
        loop.run(updater, 5)
        assert updater.updates < 100
    assert updater.lr == 0.5
    assert all(torch.equal(now, before) for now, before in zip(loop.draft.parameters(), original, strict=True))
    assert not updater.watchdog.rings and updater.watchdog.resting


def test_a_loss_that_is_not_finite_is_undone(loop: Loop, small_draft: Path) -> None:
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 20)
    learnt = updater.updates
    with torch.no_grad():
        next(updater._student.model.parameters()).fill_(math.nan)
    loop.run(updater, 5)
    assert (updater.updates, updater.kills, updater.lr) == (learnt, 1, 1.5e-3)
    assert all(torch.isfinite(p).all() for p in loop.draft.parameters())


def test_a_step_to_weights_that_are_not_finite_is_undone(loop: Loop, small_draft: Path) -> None:
    """Loss and gradient were of the weights before the step."""
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 14)
    first = next(iter(updater._student.parameters())).detach()
    updater._optimizer.step = lambda: first.fill_(math.inf)  # type: ignore[method-assign]
    loop.run(updater, 1)
    assert (updater.updates, updater.kills) == (1, 1)
    assert all(torch.isfinite(p).all() for p in loop.draft.parameters())


def test_an_alarm_does_not_wait_for_an_update_that_can_be_paid(loop: Loop, small_draft: Path) -> None:
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 20)
    updater._last_s = math.inf
    updater.watchdog.average = 0.0
    loop.run(updater, 1)
    assert updater.kills == 1 and updater.watchdog.resting


def test_a_draft_that_has_proved_itself_gets_its_rate_back(loop: Loop, small_draft: Path) -> None:
    """20 updates after an alarm, at least as good as at rest: the halved rate doubles, and no further than the recipe's."""
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 20)
    updater._restore("a test")
    assert updater.lr == 1.5e-3
    updater.watchdog.below = 0.0
    while updater.updates < 60:
        updater.watchdog.average = 4.0
        loop.run(updater, 5)
    assert updater.lr == 3e-3 == updater._optimizer.param_groups[0]["lr"]


def test_updates_wait_when_they_cost_too_much(tiny: Path, small_draft: Path) -> None:
    """A round of 10 µs pays for no update, which takes milliseconds; one of 1 s pays for every one."""
    dear = Loop(tiny, small_draft, work_s=1e-5)
    updater = updater_of(dear, small_draft, settings(max_cost_share=0.1))
    dear.run(updater, 60)
    assert updater.updates == 0 and updater.postponed > 30
    assert all(len(request.lessons) <= 5 for request in updater._following.requests.values()), "lessons pile up"
    cheap = Loop(tiny, small_draft, work_s=1.0)
    updater = updater_of(cheap, small_draft, settings(max_cost_share=0.1))
    cheap.run(updater, 60)
    assert updater.updates == 11 and updater.postponed == 0


def test_new_policy_weights_reset_adams_moments_and_keep_the_draft(loop: Loop, small_draft: Path) -> None:
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 30)
    assert updater.learned_batch == 0 and updater._optimizer.state
    before = [p.clone() for p in loop.draft.parameters()]
    updater.new_policy(3)
    assert not updater._optimizer.state and updater.learned_batch == 0
    assert all(torch.equal(a, b) for a, b in zip(loop.draft.parameters(), before, strict=True))
    loop.run(updater, 5)
    assert updater.learned_batch == 3


def test_a_saved_draft_goes_on_as_it_was(loop: Loop, tiny: Path, small_draft: Path, tmp_path: Path) -> None:
    """Weights, Adam's moments and figures; the engine's draft, which has started as the original, gets the saved one."""
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 30)
    updater.save(tmp_path)
    other = Loop(tiny, small_draft)
    again = updater_of(other, small_draft, settings())
    again.load(tmp_path)
    assert other.published == 1
    assert all(torch.equal(a, b) for a, b in zip(other.draft.parameters(), loop.draft.parameters(), strict=True))
    assert again.watchdog == updater.watchdog and (again.age, again.lr) == (updater.updates, updater.lr) == (5, 3e-3)
    mine, theirs = (u._optimizer.state_dict()["state"] for u in (updater, again))
    assert mine.keys() == theirs.keys() and len(mine) > 5
    assert all(torch.equal(mine[i][part], theirs[i][part]) for i in mine for part in ("step", "exp_avg", "exp_avg_sq"))
    again.new_policy(0)
    assert again._optimizer.state and not again.watchdog.measuring, "a resume publishes the policy that it was saved with"
    again.new_policy(1)
    assert not again._optimizer.state and again.watchdog.measuring
    other.run(again, 10)
    assert again.refused is None and (again.updates, again.age) == (1, 6), "counters are the engine's, from its start"


def test_what_a_resume_restores_is_the_draft_that_proved_itself(
    loop: Loop, tiny: Path, small_draft: Path, tmp_path: Path
) -> None:
    """The checkpoint's live draft is destroyed and not yet found out."""
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 20)
    good = [tensor.clone() for tensor in updater._good]
    for parameter in updater._student.parameters():
        parameter.detach().mul_(3.0)
    updater.save(tmp_path)
    again = updater_of(Loop(tiny, small_draft), small_draft, settings())
    again.load(tmp_path)
    assert not torch.equal(next(iter(again._student.parameters())), good[0])
    again._restore("a test")
    assert all(torch.equal(now, then) for now, then in zip(again._student.parameters(), good, strict=True))


def test_memory_bounds_the_requests_that_are_followed(loop: Loop, small_draft: Path) -> None:
    """One request: 5 · 3 rows of 64 float32, twice, and 128 tokens of 2 · 1 · 32 float32 in one layer: 40,448 bytes."""
    each = (15 * 64 * 4 * 2 + 128 * 2 * 32 * 4) / 2**20
    updater = updater_of(loop, small_draft, settings(max_memory_mib=1.5 * each))
    loop.run(updater, 3)
    assert len(updater._following.requests) == 1
    with pytest.raises(ValueError, match=r"max_memory_mib: got .*, expected at least"):
        updater_of(loop, small_draft, settings(max_memory_mib=0.9 * each))


class Late(Inline):
    """A side stream that needs ``rounds`` rounds for an update, as the engine sees it."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds, self.left, self.joins = rounds, 0, 0

    @property
    def done(self) -> bool:
        self.left -= 1
        return self.left < 0

    @contextlib.contextmanager
    def update(self):
        with super().update():
            yield
        self.left = self.rounds

    def join(self) -> None:
        self.joins += 1

    def wait(self) -> None:
        self.left = 0


def test_an_update_beside_the_engine_is_published_when_it_has_ended(loop: Loop, small_draft: Path) -> None:
    """Update due at round 10 and every fifth; it takes 3 rounds, the first look at it being right after its launch."""
    late = Late(3)
    updater = updater_of(loop, small_draft, settings(), late)
    original = [p.clone() for p in loop.draft.parameters()]
    loop.run(updater, 12)
    assert updater.updates == loop.published == late.joins == 0 and updater._pending is not None
    assert all(torch.equal(now, before) for now, before in zip(loop.draft.parameters(), original, strict=True))
    updater.new_policy(7)
    loop.run(updater, 1)
    assert updater.updates == loop.published == late.joins == 1
    assert updater.learned_batch == 0, "it began before the new policy"
    loop.run(updater, 187)
    assert updater.updates == loop.published == 38 and updater.postponed == 0, "the 39th is still under way"


def test_updates_that_take_longer_than_their_turn_leave_some_out(loop: Loop, small_draft: Path) -> None:
    """Begun at round 10, 17, 24, …, each published 7 rounds later, up to round 59; none of them was too dear."""
    updater = updater_of(loop, small_draft, settings(), Late(7))
    loop.run(updater, 60)
    assert updater.updates == 7 and updater.postponed == 0
    assert all(len(request.lessons) <= 5 for request in updater._following.requests.values()), "lessons pile up"


def test_what_is_saved_or_lent_waits_for_an_update_under_way(loop: Loop, small_draft: Path, tmp_path: Path) -> None:
    updater = updater_of(loop, small_draft, settings(), Late(4))
    accepted = sum(loop.run(updater, 11))
    assert updater._pending is not None
    assert updater.lend(tmp_path / "lent.safetensors") == accepted
    assert updater._pending is None and updater.updates == loop.published == 1
    assert updater.lend(tmp_path / "lent.safetensors") == 0, "counted twice"


def test_an_average_of_drafts_is_adopted(loop: Loop, small_draft: Path, tmp_path: Path) -> None:
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 20)
    updater.lend(tmp_path / "lent.safetensors")
    halved = {name: weight / 2 for name, weight in load_file(tmp_path / "lent.safetensors").items()}
    save_file(halved, tmp_path / "average.safetensors")
    updater.adopt(tmp_path / "average.safetensors")
    assert all(torch.equal(parameter, halved[name]) for name, parameter in loop.draft.named_parameters())
    assert updater.updates == 3 and updater._optimizer.state


def test_an_average_that_comes_before_the_copies_are_compared_is_no_mistake(
    loop: Loop, small_draft: Path, tmp_path: Path
) -> None:
    """Three rounds were proposed by the draft before; the copy is of the one adopted."""
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 3)
    updater.lend(tmp_path / "lent.safetensors")
    other = {name: weight * 1.5 for name, weight in load_file(tmp_path / "lent.safetensors").items()}
    save_file(other, tmp_path / "average.safetensors")
    updater.adopt(tmp_path / "average.safetensors")
    loop.run(updater, 20)
    assert updater.refused is None and updater.updates > 0


def test_a_draft_that_has_become_worse_is_restored_before_it_is_lent(loop: Loop, small_draft: Path, tmp_path: Path) -> None:
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 20)
    updater.watchdog.average = 0.0
    assert updater.lend(tmp_path / "lent.safetensors") == 0 and updater.kills == 1
    lent = load_file(tmp_path / "lent.safetensors")
    assert all(torch.equal(lent[name], good) for (name, _), good in zip(updater._student.weights(), updater._good, strict=True))


def test_a_preempted_request_is_followed_anew_where_there_is_room_for_no_other() -> None:
    """Its features of before, and the lessons on them, go: positions begin at 0 again."""
    student = SimpleNamespace(vocabulary=8, token_ids=None, prefix_bytes=lambda length: 0, reads_features=True)
    following = Following(settings(max_requests=1), student, Inline(), tokens=K, max_length=64)  # type: ignore[arg-type]
    following.read(Forward([Part("a", 0, slice(0, 40))], [torch.zeros(40, 4)]))
    following.requests["a"].lessons.append(Lesson(38, T, torch.zeros(1, 8), None))
    following.read(Forward([Part("a", 0, slice(0, 16)), Part("b", 0, slice(16, 20))], [torch.zeros(20, 4)]))
    assert list(following.requests) == ["a"]
    assert following.requests["a"].features.shape == (16, 4) and not following.requests["a"].lessons


def test_drafts_are_averaged_by_their_accepted_tokens() -> None:
    """(3 · 1 + 1 · 5) / 4 = 2; equal parts where none had any; one gone wrong is left out; nothing of nothing."""
    one, five, wrong = ({"w": np.array([x], dtype=np.float32)} for x in (1.0, 5.0, math.inf))
    assert average([(one, 3), (five, 1)]) == {"w": np.float32(2.0)}
    assert average([(one, 0), (five, 0)]) == {"w": np.float32(3.0)}
    assert average([(wrong, 9), (five, 1)]) == {"w": np.float32(5.0)}
    assert average([(wrong, 9)]) is None


def test_requests_that_have_ended_leave_their_places_to_those_that_begin() -> None:
    """A head's request can be taken up at its first token only, which comes before the next verification."""
    student = SimpleNamespace(vocabulary=8, token_ids=None, prefix_bytes=lambda length: 0, reads_features=True)
    following = Following(settings(max_requests=2), student, Inline(), tokens=K, max_length=64)  # type: ignore[arg-type]
    for wave in (("a", "b"), ("c", "d")):
        parts = [Part(name, 0, slice(4 * slot, 4 * slot + 4)) for slot, name in enumerate(wave)]
        following.read(Forward(parts, [torch.zeros(8, 4)]))
        assert tuple(following.requests) == wave


def test_tokens_that_no_draft_proposed_say_nothing_about_the_draft(loop: Loop, small_draft: Path) -> None:
    """Near the longest length vLLM fills rounds with token 0, which has no distribution and is rejected."""
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 20)
    before = dataclasses.asdict(updater.watchdog)
    for _ in range(4):
        real = loop.round()
        judged = [dataclasses.replace(one, accepted=0) for one in real.judged]
        updater.observe(Round(judged, real.logits_RV, None, real.tokens), set(loop.requests))
    assert dataclasses.asdict(updater.watchdog) == before


def test_where_rounds_draft_more_or_less_the_first_draft_alone_is_compared(loop: Loop, small_draft: Path) -> None:
    student = DraftModelStudent(small_draft, torch.device("cpu"), train="all")
    updater = Updater(settings(), student, Inline(), loop.publish, lambda: loop.busy_s, tokens=K, max_length=128, watched=1)
    accepted = loop.run(updater, 10)
    assert updater.watchdog.baseline == pytest.approx(1 + sum(min(one, 1) for one in accepted) / len(accepted))
    assert max(accepted) > 1


def test_new_policy_weights_make_the_lessons_of_the_old_ones_void(loop: Loop, small_draft: Path) -> None:
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 23)
    assert any(request.lessons for request in updater._following.requests.values())
    updater.new_policy(1)
    assert updater._following.requests and not any(request.lessons for request in updater._following.requests.values())
    loop.run(updater, 2)
    assert updater.learned_batch == 1


def test_a_cache_that_is_filled_anew_is_so_in_the_copy(loop: Loop, small_draft: Path) -> None:
    """Keys and values of the draft as it is now: after a refill the copy proposes what a copy without a past does."""
    updater = updater_of(loop, small_draft, settings())
    loop.run(updater, 30)
    updater.new_policy(1, refilled=True)
    assert not updater._following.requests
    loop.run(updater, 1)
    student, request = updater._student, updater._following.requests["a"]
    (rows,) = student.rows([request])
    lesson = request.lessons[0]
    expected = loop.draft(torch.tensor([request.tokens]), use_cache=False).logits[0, lesson.start :][: len(lesson.target_KV)]
    torch.testing.assert_close(rows[0], expected, rtol=1e-4, atol=1e-4)


def test_publishing_is_a_part_of_what_an_update_costs(loop: Loop, small_draft: Path) -> None:
    def slow(weights: Iterable[tuple[str, Tensor]]) -> None:
        time.sleep(0.2)

    student = DraftModelStudent(small_draft, torch.device("cpu"), train="all")
    updater = Updater(settings(), student, Inline(), slow, lambda: loop.busy_s, tokens=K, max_length=128)
    loop.run(updater, 20)
    assert updater.updates == 3 and updater.update_s > 0.6
