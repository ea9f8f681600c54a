"""Who can be a teacher, and who cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slipstream.core import schema
from slipstream.trainer.teacher import require_same_vocabulary


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of another seed: the same tokens, other weights."""
    from slipstream.trainer.model import resolve_model

    return resolve_model(schema.Model(path="builtin:tiny"), 5, tmp_path_factory.mktemp("teachers"))


def test_a_teacher_of_the_same_tokens_is_taken(tiny: Path, other: Path) -> None:
    require_same_vocabulary(other, tiny)


def test_logits_over_another_number_of_tokens_are_refused(tiny: Path, tmp_path: Path) -> None:
    padded = shutil.copytree(tiny, tmp_path / "padded")
    config = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps({**config, "vocab_size": 128}))
    with pytest.raises(
        ValueError, match=r"distill\.teacher: .*padded has a vocabulary of 128 tokens, expected 64 as in the student"
    ):
        require_same_vocabulary(padded, tiny)


def test_a_critic_reads_the_policys_tokens(tiny: Path, tmp_path: Path) -> None:
    padded = shutil.copytree(tiny, tmp_path / "padded")
    config = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps({**config, "vocab_size": 128}))
    with pytest.raises(ValueError, match=r"algo\.critic\.path: .*padded has a vocabulary of 128 tokens, .* as in the policy"):
        require_same_vocabulary(padded, tiny, key="algo.critic.path", ours="policy")


def test_a_tokenizer_that_numbers_its_tokens_otherwise_is_refused(tiny: Path, tmp_path: Path) -> None:
    swapped = shutil.copytree(tiny, tmp_path / "swapped")
    tokenizer = json.loads((swapped / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"differs from the student's .* in 2 tokens: 'a' is 15, not 14, 'b' is 14, not 15"):
        require_same_vocabulary(swapped, tiny)
