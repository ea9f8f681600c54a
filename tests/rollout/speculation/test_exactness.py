"""Exactness at length: 3,000 samples per condition, and the same test refuses vLLM's own CPU kernel.  Minutes."""

from pathlib import Path

import pytest

from slipstream.core.speculation import Speculation, TestTimeSpeculation
from slipstream.rollout import engine as engine_module

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = [(1, 4 + i % 10, 5 + i % 7, 6 + i % 13) for i in range(3000)]
TEMPERATURES = (0.5, 1.0)
MODELS = {"draft_model": ("tiny", "small_draft"), "eagle3": ("deep", "eagle3_head"), "dflash": ("deep", "dflash_head")}
LEVEL = 1e-3
REST = 1000
"""More rounds of up to 64 requests than the first answers take, at both temperatures; then the draft may learn."""
UNREPAIRED = """
from vllm.triton_utils.dispatcher import register_kernels
from vllm.utils import cpu_triton_utils
from slipstream.rollout.worker import WorkerExtension

register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": cpu_triton_utils._expand_kernel_impl})

class Unrepaired(WorkerExtension):
    pass
"""


def p_values(engine) -> dict[float, float]:
    return {t: engine.uniformity(PROMPTS, engine.answers(PROMPTS, t), t) for t in TEMPERATURES}


def perturb(policy) -> None:
    for parameter in policy.parameters():
        parameter *= 1.1


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "dflash"])
def test_answers_are_the_policys_own(speculating, request: pytest.FixtureRequest, method: str) -> None:
    """Before any update of the draft, after ten, and after new policy weights with the draft kept."""
    policy, draft = (request.getfixturevalue(name) for name in MODELS[method])
    tts = TestTimeSpeculation(enabled=True, lr=3e-3, max_cost_share=1.0, baseline_rounds=REST)
    speculation = Speculation(method=method, draft=str(draft), tokens=4, tts=tts)
    engine = speculating(policy, speculation, draft, f"test-exact-{method}", max_tokens=8)
    at_rest = p_values(engine)
    assert engine.drafts().learning.updates == 0
    for _ in range(5):
        if engine.drafts().learning.updates < 10:
            engine.answers(PROMPTS)
    assert engine.drafts().learning.updates >= 10
    learnt = p_values(engine)
    engine.update(perturb)
    moved = p_values(engine)
    print("p-values", method, at_rest, learnt, moved)
    assert min(*at_rest.values(), *learnt.values(), *moved.values()) > LEVEL


def test_vllms_own_kernel_is_refused(speculating, tiny: Path, small_draft: Path, tmp_path: Path, monkeypatch) -> None:
    """The same engine without repair 1 of rollout/worker.py."""
    (tmp_path / "unrepaired.py").write_text(UNREPAIRED)
    monkeypatch.syspath_prepend(tmp_path)
    repaired = engine_module.engine_args

    def unrepaired(*arguments, **keywords):
        found = repaired(*arguments, **keywords)
        found.worker_extension_cls = "unrepaired.Unrepaired"
        return found

    monkeypatch.setattr(engine_module, "engine_args", unrepaired)
    speculation = Speculation(method="draft_model", draft=str(small_draft), tokens=4)
    engine = speculating(tiny, speculation, small_draft, "test-unrepaired", max_tokens=8)
    found = engine.uniformity(PROMPTS[:1000], engine.answers(PROMPTS[:1000], 0.5), 0.5)
    assert found < 1e-12
