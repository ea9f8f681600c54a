"""The parts of speculation that need no engine: loss, student, watchdog, counters, options."""

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.core.metrics import values
from slipstream.core.speculation import Speculation
from slipstream.rollout.speculation import runner_v1
from slipstream.rollout.speculation.acceptance import Acceptance
from slipstream.rollout.speculation.loss import draft_loss, position_weights
from slipstream.rollout.speculation.options import speculative_config
from slipstream.rollout.speculation.runner_v1 import RunnerV1, make_certain
from slipstream.rollout.speculation.student import DraftModelStudent, Prefix
from slipstream.rollout.speculation.watchdog import Watchdog


def test_loss_by_hand() -> None:
    """Two rows over two tokens, weights 1 and e^-1 (k = 1, 2 and a decay of 1).

    Row 1: p = (1/2, 1/2), q' = (1/4, 3/4), q = (1/4, 3/4): KL(p‖q') = ln 2 / 2 + ln(2/3) / 2 = 0.1438410, KL(q‖q') = 0.
    Row 2: p = q' = (1/2, 1/2), q = (1/4, 3/4): KL(p‖q') = 0, KL(q‖q') = ln(1/2) / 4 + 3 ln(3/2) / 4 = 0.1308120.
    With λ = 2: (0.1438410 + e^-1 · 2 · 0.1308120) / (1 + e^-1) = (0.1438410 + 0.0962464) / 1.3678794 = 0.1755182.
    The gradient of row 1 is w (q' − p) = (−1/4, 1/4) / 1.3678794; of row 2, λ w (q' − q) = 2 e^-1 (1/4, −1/4) / 1.3678794.
    """
    one, other = [0.0, math.log(3)], [0.0, 0.0]
    now = torch.tensor([one, other], requires_grad=True)
    weights = position_weights(torch.tensor([1, 2]), 1.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.3678794]))
    loss = draft_loss(now, torch.tensor([other, other]), torch.tensor([one, one]), weights, 2.0)
    torch.testing.assert_close(loss, torch.tensor(0.1755182))
    loss.backward()
    torch.testing.assert_close(now.grad, torch.tensor([[-0.1827646, 0.1827646], [0.1344706, -0.1344706]]))
    assert draft_loss(now, torch.tensor([other, other]), None, weights, 0.0).item() == pytest.approx(0.1438410 / 1.3678794)


def test_the_proximal_term_has_no_gradient_at_the_draft_that_proposed() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    target = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    gradients = []
    for proximal in (0.0, 5.0):
        now = logits.clone().requires_grad_()
        draft_loss(now, target, logits.clone(), torch.ones(3), proximal).backward()
        gradients.append(now.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_student_with_prefixes_is_the_model_itself(small_draft: Path) -> None:
    """Requests of different lengths, read in pieces of different lengths, give the logits of one plain forward of each."""
    student = DraftModelStudent(small_draft, torch.device("cpu"), train="all")
    model = AutoModelForCausalLM.from_pretrained(small_draft, dtype=torch.float32)
    sequences = [[5 + (i * 7 + r) % 50 for i in range(30 + 5 * r)] for r in range(3)]
    prefixes = [Prefix(), Prefix(), Prefix()]
    with torch.no_grad():
        student.extend(prefixes[0], sequences[0][:11])
        student.extend(prefixes[2], sequences[2][:4])
        first = student.logits(prefixes, [sequences[0][11:20], sequences[1][:5], sequences[2][4:30]])
        second = student.logits(prefixes[1:], [sequences[1][5:], sequences[2][30:]])
        expected = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences]
    torch.testing.assert_close(first[0], expected[0][11:20], rtol=0, atol=1e-5)
    torch.testing.assert_close(first[1], expected[1][:5], rtol=0, atol=1e-5)
    torch.testing.assert_close(first[2], expected[2][4:30], rtol=0, atol=1e-5)
    torch.testing.assert_close(second[0], expected[1][5:], rtol=0, atol=1e-5)
    torch.testing.assert_close(second[1], expected[2][30:], rtol=0, atol=1e-5)
    assert [p.length for p in prefixes] == [20, 35, 40]
    assert [tuple(k.shape) for k, _ in prefixes[1].layers] == [(1, 35, 32)]
    assert student.prefix_bytes(35) == sum(t.nbytes for pair in prefixes[1].layers for t in pair)


def test_what_a_student_trains(small_draft: Path) -> None:
    names = {name for name, _ in DraftModelStudent(small_draft, torch.device("cpu"), train="all").weights()}
    body = {name for name, _ in DraftModelStudent(small_draft, torch.device("cpu"), train="body").weights()}
    assert names - body == {"model.embed_tokens.weight", "lm_head.weight"}
    frozen = DraftModelStudent(small_draft, torch.device("cpu"), train="all", frozen={"lm_head.weight"})
    assert names - {name for name, _ in frozen.weights()} == {"lm_head.weight"}


def test_the_watchdog_rings_for_a_fall_and_not_for_chance() -> None:
    """Baseline 2.0 of variance 1 over 100; 3 · sqrt(1.5 / 100) = 0.367, so the alarm is below 0.95 · 2 − 0.367 = 1.533.

    At a steady 1.0 the average is 1 + 0.99^n: 1.534 after 62 drafts, 1.528 after 63.
    """
    watchdog = Watchdog(horizon=100, below=0.95)
    for _ in range(50):
        watchdog.count([1])
        watchdog.count([3])
    assert (watchdog.resting, watchdog.baseline, watchdog.average, watchdog.variance) == (False, 2.0, 2.0, 1.0)
    for _ in range(62):
        watchdog.count([1])
    assert not watchdog.rings and not watchdog.content
    watchdog.count([1])
    assert watchdog.rings
    watchdog.restart()
    assert not watchdog.rings and watchdog.resting
    for tokens in [1, 3, 2, 2] * 25:
        assert watchdog.resting, "the restored draft is measured at rest"
        watchdog.count([tokens])
    assert not watchdog.resting and (watchdog.baseline, watchdog.average) == (2.0, 2.0)


def test_a_new_policy_may_only_lower_the_baseline() -> None:
    watchdog = Watchdog(horizon=10, below=0.95)
    for tokens in [2] * 10:
        watchdog.count([tokens])
    watchdog.new_policy()
    for tokens in [1.8, 2] * 5:
        assert not watchdog.rings, "no alarm while the policy's new baseline is being measured"
        watchdog.count([tokens])
    assert watchdog.baseline == pytest.approx(1.9)
    watchdog.new_policy()
    for tokens in [3] * 10:
        watchdog.count([tokens])
    assert watchdog.baseline == pytest.approx(1.9) and watchdog.content


def test_a_policy_that_costs_more_than_a_tenth_is_not_believed_at_once() -> None:
    """2.0, then 1.0 from a new policy on: the baseline falls to 1.8, it rings, and the draft at rest falls as far."""
    watchdog = Watchdog(horizon=10, below=0.95)
    for tokens in [2] * 10:
        watchdog.count([tokens])
    watchdog.new_policy()
    for _ in range(60):
        watchdog.count([1] * 8)
    assert watchdog.baseline == 1.8 and watchdog.rings
    watchdog.restart()
    for _ in range(10):
        watchdog.count([1] * 8)
    assert watchdog.baseline == 1.0 and not watchdog.rings and watchdog.content


def test_a_slow_decline_over_many_policies_is_noticed() -> None:
    """3 % lost under every policy and none at its arrival: 2.0, 1.94, 1.88, … ; the alarm comes below 0.95 · 2.0 = 1.9."""
    watchdog = Watchdog(horizon=10, below=0.95)
    lengths = []
    for policy in range(4):
        for share in (1.0, 0.97):
            for _ in range(60):
                watchdog.count([2.0 * 0.97**policy * share])
        lengths.append((round(watchdog.average, 2), watchdog.rings))
        watchdog.new_policy()
    assert lengths == [(1.94, False), (1.88, True), (1.83, True), (1.77, True)]


def test_policies_that_come_faster_than_a_baseline_do_not_hide_a_fall() -> None:
    """A new policy every 6 rounds, a baseline of 10: 2.0 at first, then 1.0 all of a sudden, in the midst of a policy."""
    watchdog = Watchdog(horizon=10, below=0.95)
    rang = False
    for turn in range(120):
        if turn % 6 == 0 and turn:
            watchdog.new_policy()
        watchdog.count([2.0 if turn < 63 else 1.0] * 8)
        rang |= watchdog.rings
        assert not (rang and turn < 63)
    assert rang


def test_rounds_of_many_requests_make_a_watchdog_sharp() -> None:
    """20 rounds of 16 drafts: 320 lengths of mean 2.2 and variance 1.5, so 3 standard errors are 0.25; a fall to 1.6 is seen,
    and nothing rings where nothing has changed."""
    generator = random.Random(0)
    watchdog = Watchdog(horizon=20, below=0.95)

    def rounds(accepted: float, count: int) -> bool:
        for _ in range(count):
            drafts = [next(k for k in range(4) if k == 3 or generator.random() > accepted) + 1 for _ in range(16)]
            watchdog.count(drafts)
            if watchdog.rings:
                return True
        return False

    assert not rounds(0.6, 400)
    assert watchdog.drafts == 320
    assert rounds(0.4, 40)


@pytest.mark.parametrize("accepted", [0.6, 0.9, 0.95, 0.98])
def test_a_draft_that_never_changes_rings_seldom(accepted: float) -> None:
    """One request, 20 drafts in the baseline, 20 seeds of 2,000 rounds each: a lucky baseline is found out, not rung for."""
    alarms = []
    for seed in range(20):
        generator = random.Random(seed)
        watchdog = Watchdog(horizon=20, below=0.95)
        alarms.append(0)
        for _ in range(2000):
            watchdog.count([next(k for k in range(4) if k == 3 or generator.random() > accepted) + 1])
            if watchdog.rings:
                alarms[-1] += 1
                watchdog.restart()
    assert max(alarms) <= 2 and sum(alarms) <= 10, alarms


def test_a_draft_that_is_no_distribution_is_judged_as_a_certain_one() -> None:
    """Kept by p of its token, else another by theirs: the law is p.  Rows that are distributions stay."""
    probs = torch.tensor([[0.1, 0.2, 0.7], [math.nan] * 3, [0.5, math.inf, 0.0], [0.0, 1.0, 0.0]])
    make_certain(probs, torch.tensor([2, 0, 2, 1], dtype=torch.int32))
    assert torch.equal(probs, torch.tensor([[0.1, 0.2, 0.7], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))


def test_acceptance_by_hand() -> None:
    """Ten rounds of K = 2: five with 0 accepted, three with 1, two with 2; the first was taken in 5 of 10, both in 2."""
    start = Acceptance((1, 0, 0), 2, (1, 0, 0, 0), (0, 0, 0, 0))
    now = start.plus(Acceptance((5, 3, 2), 20, (4, 3, 2, 1), (2, 2, 2, 1)))
    assert values(now.minus(start).metrics()) == {
        "draft/rounds": 10,
        "draft/accepted": 7,
        "draft/tokens": 2.0,
        "draft/acceptance_length": pytest.approx(1.7),
        "draft/acceptance_pos_1": pytest.approx(0.5),
        "draft/acceptance_pos_2": pytest.approx(0.2),
        "draft/acceptance_length_q1": pytest.approx(1.5),
        "draft/acceptance_length_q2": pytest.approx(1 + 2 / 3),
        "draft/acceptance_length_q3": pytest.approx(2.0),
        "draft/acceptance_length_q4": pytest.approx(2.0),
    }
    assert values(start.minus(start).metrics()) == {"draft/rounds": 0, "draft/accepted": 0}


@pytest.mark.parametrize(
    ("speculation", "draft", "expected"),
    [
        (Speculation(), None, None),
        (
            Speculation(method="ngram", tokens=3, lookup_max=4),
            None,
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        ),
        (Speculation(method="suffix", tokens=8), None, {"method": "suffix", "num_speculative_tokens": 8}),
        (
            Speculation(method="draft_model", draft="d", tokens_by_batch=[(1, 8, 4), (9, 64, 0)]),
            Path("d"),
            {
                "method": "draft_model", "num_speculative_tokens": 4, "model": "d", "draft_sample_method": "probabilistic",
                "draft_tensor_parallel_size": 1, "use_heterogeneous_vocab": False,
                "num_speculative_tokens_per_batch_size": [(1, 8, 4), (9, 64, 0)],
            },
        ),
        (
            Speculation(method="draft_model", draft="d", universal=True),
            Path("d"),
            {
                "method": "draft_model", "num_speculative_tokens": 4, "model": "d", "draft_sample_method": "greedy",
                "draft_tensor_parallel_size": 1, "use_heterogeneous_vocab": True,
            },
        ),
        *(
            (
                Speculation(method=method, draft="d"),
                Path("d"),
                {"method": method, "num_speculative_tokens": 4, "model": "d", "draft_sample_method": "probabilistic"},
            )
            for method in ("eagle3", "dflash")
        ),
        (
            Speculation(method="mtp", tokens=1, sample="greedy"),
            None,
            {"method": "mtp", "num_speculative_tokens": 1, "draft_sample_method": "greedy"},
        ),
        (Speculation(method="medusa", draft="d"), Path("d"), {"method": "medusa", "num_speculative_tokens": 4, "model": "d"}),
    ],
)  # fmt: skip
def test_what_vllm_is_told(speculation: Speculation, draft: Path | None, expected: dict | None) -> None:
    if expected is not None:
        expected = {**expected, "rejection_sample_method": "standard"}
    assert speculative_config(speculation, draft, 1) == expected


def test_the_dtype_of_a_draft_is_not_that_of_its_vocabulary_map() -> None:
    """In vLLM the map of an EAGLE-3 head, of integers, is a parameter, and the first one."""
    draft = torch.nn.Module()
    draft.draft_id_to_target_id = torch.nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)
    draft.fc = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    assert RunnerV1(SimpleNamespace(get_draft_model=lambda: draft)).dtype == torch.bfloat16


def test_a_round_is_timed_from_the_targets_forward_to_the_proposal_but_for_what_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 10 ms forward, 20 ms rejection, 40 ms learning and 5 ms proposal: 30 ms of verification, 5 ms of drafting."""

    now = 0.0
    monkeypatch.setattr(runner_v1, "time", SimpleNamespace(perf_counter=lambda: now))

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Sampler(torch.nn.Module):
        def forward(self, *_: object) -> SimpleNamespace:
            takes(0.02)
            return SimpleNamespace(sampled_token_ids=torch.tensor([[3]]))

    def propose(**_: object) -> torch.Tensor:
        takes(0.005)
        return torch.zeros(1, 2)

    vllms = SimpleNamespace(
        execute_model=lambda _: takes(0.01),
        drafter=SimpleNamespace(propose=propose),
        rejection_sampler=Sampler(),
        input_batch=SimpleNamespace(req_ids=["a"]),
    )
    runner, took = RunnerV1(vllms), []
    lookahead = SimpleNamespace(choose=lambda requests: 2, took=lambda *figures: took.append(figures))
    runner.look_ahead(lookahead)
    runner.after_verification(lambda _: takes(0.04))
    vllms.execute_model(
        SimpleNamespace(scheduled_spec_decode_tokens={"a": (1, 2)}, num_scheduled_tokens={"a": 3}, total_num_scheduled_tokens=3)
    )
    metadata = SimpleNamespace(num_draft_tokens=[0], target_logits_indices=torch.tensor([], dtype=torch.long))
    vllms.rejection_sampler(metadata, None, torch.zeros(1, 4), SimpleNamespace(temperature=None))
    vllms.drafter.propose(common_attn_metadata=SimpleNamespace(batch_size=lambda: 1), num_speculative_tokens=2)
    ((verified, verify_s, drafted, draft_s),) = took
    assert (verified, drafted) == (3, 2)
    assert (verify_s, draft_s) == pytest.approx((0.03, 0.005))
