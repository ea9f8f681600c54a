"""Real engines with drafts: what they write is the policy's own, whoever drafts; one engine start per method."""

from pathlib import Path

import pytest
import torch

from slipstream.core.speculation import Speculation

pytestmark = pytest.mark.engine

PROMPTS = [(1, 4 + i % 10, 5 + i % 7, 6) for i in range(64)]
TOLERANCE = 1e-4


def require_exact(engine, prompts=PROMPTS) -> None:
    """Log-probs of two temperatures, and greedy choices, are those of a transformers forward (ties under 1e-4 excepted)."""
    for temperature in (1.0, 0.5):
        answers = engine.answers(prompts, temperature)
        assert sum(len(a.token_ids) for a in answers) >= 500
        assert engine.worst_difference(prompts, answers, temperature) <= TOLERANCE
    for prompt, answer in zip(prompts, engine.answers(prompts, 0.0), strict=True):
        logprobs = engine.logprobs(prompt, answer.token_ids, 1.0)
        chosen = logprobs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (logprobs.max(-1).values - chosen).max() <= TOLERANCE


def perturb(policy) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator)


def test_draft_model(speculating, tiny: Path) -> None:
    """The target as its own draft: every draft is accepted, K + 1 tokens a round, until a policy update leaves it behind."""
    engine = speculating(tiny, Speculation(method="draft_model", draft=str(tiny), tokens=3), tiny, "test-drafts")
    answers = engine.answers(PROMPTS)
    counters = engine.acceptance()
    # a response's last round may have fewer drafts than K, or tokens beyond the end, which vLLM does not count as accepted
    incomplete = sum(counters.rounds_by_accepted[:3])
    assert counters.rounds_by_accepted[3] > 5 * len(PROMPTS) and incomplete <= len(PROMPTS)
    assert sum(a.draft.rounds for a in answers) == counters.rounds == sum(counters.rounds_by_quarter)
    assert sum(a.draft.accepted for a in answers) == counters.accepted
    assert sum(a.draft.drafted for a in answers) == counters.drafted
    require_exact(engine)

    engine.update(perturb)
    before = engine.acceptance()
    require_exact(engine)
    after = engine.acceptance().minus(before)
    assert sum(after.rounds_by_accepted[:3]) > 0.3 * after.rounds, "the draft moved with the policy"


def test_ngram(speculating, tiny: Path) -> None:
    """Greedy tiny policies repeat themselves, which is what n-grams find."""
    engine = speculating(tiny, Speculation(method="ngram", tokens=3), None, "test-ngram")
    require_exact(engine)
    counters = engine.acceptance()
    assert counters.rounds > 50 and counters.accepted > 50


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_heads(speculating, deep: Path, request: pytest.FixtureRequest, method: str) -> None:
    """Random heads on the target's hidden states; after a policy update they read the new ones."""
    head = request.getfixturevalue(f"{method}_head")
    engine = speculating(deep, Speculation(method=method, draft=str(head), tokens=4), head, f"test-{method}")
    require_exact(engine)
    engine.update(perturb)
    require_exact(engine)
    counters = engine.acceptance()
    assert counters.rounds > 1000 and 0 < counters.accepted < counters.rounds


@pytest.mark.slow
def test_a_draft_with_another_tokenizer(speculating, tiny: Path, translated: Path) -> None:
    """The target itself in another vocabulary: greedy drafts of a greedy policy are all accepted."""
    speculation = Speculation(method="draft_model", draft=str(translated), tokens=3, universal=True)
    engine = speculating(tiny, speculation, translated, "test-universal")
    engine.answers(PROMPTS, 0.0)
    counters = engine.acceptance()
    assert counters.rounds_by_accepted[3] > 5 * len(PROMPTS) and sum(counters.rounds_by_accepted[:3]) <= len(PROMPTS)
    require_exact(engine)


@pytest.mark.slow
def test_a_lookahead_that_changes(speculating, tiny: Path, small_draft: Path) -> None:
    """From no draft to four, as times and verdicts have it; exact throughout."""
    speculation = Speculation(method="draft_model", draft=str(small_draft), tokens=4, lookahead="dynamic")
    engine = speculating(tiny, speculation, small_draft, "test-lookahead")
    require_exact(engine)
    counters = engine.acceptance()
    assert counters.rounds > 0 and counters.drafted < 4 * counters.rounds
