"""What vLLM is told about drafts."""

from pathlib import Path

import pytest

from slipstream.core.speculation import Speculation
from slipstream.rollout.speculation.options import speculative_config


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
