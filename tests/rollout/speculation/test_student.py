"""The trainable copy of a whole model."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from slipstream.rollout.speculation.student import DraftModelStudent, Prefix


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
