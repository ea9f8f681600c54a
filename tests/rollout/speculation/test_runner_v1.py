"""What is read off vLLM's model runner, without one."""

import math
from types import SimpleNamespace

import pytest
import torch

from slipstream.rollout.speculation import runner_v1
from slipstream.rollout.speculation.runner_v1 import RunnerV1, make_certain


def test_a_draft_that_is_no_distribution_is_judged_as_a_certain_one() -> None:
    """Kept by p of its token, else another by theirs: the law is p.  Rows that are distributions stay."""
    probs = torch.tensor([[0.1, 0.2, 0.7], [math.nan] * 3, [0.5, math.inf, 0.0], [0.0, 1.0, 0.0]])
    make_certain(probs, torch.tensor([2, 0, 2, 1], dtype=torch.int32))
    assert torch.equal(probs, torch.tensor([[0.1, 0.2, 0.7], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))


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
