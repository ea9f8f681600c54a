"""A draft that learns while it serves: it gets better, the target stays as it is, and what is written stays exact."""

from pathlib import Path

import pytest
import torch

from slipstream.core.speculation import Speculation, TestTimeSpeculation

pytestmark = pytest.mark.engine

PROMPTS = [(1, 4 + i % 10, 5 + i % 7, 6 + i % 3) for i in range(128)]
TOLERANCE = 1e-4
K = 3


@pytest.fixture(scope="module")
def engine(speculating, tiny: Path, small_draft: Path):
    tts = TestTimeSpeculation(enabled=True, lr=5e-3, max_cost_share=1.0, baseline_rounds=200)
    return speculating(
        tiny, Speculation(method="draft_model", draft=str(small_draft), tokens=K, tts=tts), small_draft, "test-tts"
    )


def exact(engine, t: float) -> None:
    answers = engine.answers(PROMPTS, t)
    assert engine.worst_difference(PROMPTS, answers, t) <= TOLERANCE
    assert engine.uniformity(PROMPTS, answers, t) > 1e-3


def test_the_draft_learns_and_the_target_does_not_change(engine) -> None:
    before = engine.target_sha256()
    lengths, last = [], engine.acceptance()
    for _ in range(6):
        exact(engine, 0.5)
        now = engine.acceptance()
        since = now.minus(last)
        lengths.append(1 + since.accepted / since.rounds)
        last = now
    learning = engine.drafts().learning
    print("acceptance lengths", lengths, learning)
    assert learning.updates > 20 and learning.kills == 0
    assert lengths[-1] > learning.baseline + 0.1
    assert engine.target_sha256() == before


def test_new_policy_weights_keep_the_draft_and_exactness(engine) -> None:
    before, updates = engine.target_sha256(), engine.drafts().learning.updates

    def perturb(policy) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in policy.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)

    engine.update(perturb)
    assert engine.target_sha256() != before
    assert engine.drafts().learning.learned_batch == 0
    for t in (1.0, 0.5):
        exact(engine, t)
    learning = engine.drafts().learning
    assert learning.updates > updates and learning.learned_batch == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "eagle3_reduced", "dflash"])
def test_a_head_learns(speculating, deep: Path, request: pytest.FixtureRequest, name: str) -> None:
    """A head reads the target's hidden states, and borrows its embeddings, which stay as they are."""
    head, method = request.getfixturevalue(f"{name}_head"), name.removesuffix("_reduced")
    tts = TestTimeSpeculation(enabled=True, lr=3e-3, max_cost_share=1.0, baseline_rounds=200)
    engine = speculating(deep, Speculation(method=method, draft=str(head), tokens=K, tts=tts), head, f"test-tts-{name}")
    before = engine.target_sha256()
    for _ in range(6):
        exact(engine, 0.5)
    start = engine.acceptance()
    exact(engine, 0.5)
    since, learning = engine.acceptance().minus(start), engine.drafts().learning
    print(name, "acceptance length", 1 + since.accepted / since.rounds, learning)
    assert learning.updates > 20 and learning.kills == 0
    assert 1 + since.accepted / since.rounds > learning.baseline + 0.1
    assert engine.target_sha256() == before
