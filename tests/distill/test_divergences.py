"""Reverse KL over the vocabulary: by hand, against the dense form and finite differences, and what it allocates."""

import math

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.distill.divergences import forward_kl, reverse_kl

INF = math.inf


def dense(student_TV, teacher_TV, temperature):
    student_TV, teacher_TV = ((x / temperature).log_softmax(-1) for x in (student_TV, teacher_TV))
    return (student_TV.exp() * (student_TV - teacher_TV)).sum(-1)


def random_case(rows=5, vocabulary=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    student_TV, teacher_TV = (
        3 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)
    )
    return student_TV.requires_grad_(), teacher_TV


def test_literal_value_and_gradient():
    # π = (1/4, 3/4), π_T = (1/2, 1/2): KL = 1/4 ln(1/2) + 3/4 ln(3/2) = -0.1732868 + 0.3040988 = 0.1308120.
    # dKL/dz_v = π_v (ln(π_v / π_T,v) - KL): 1/4 (-0.6931472 - 0.1308120) = -0.2059898, and the opposite for the other.
    student_TV = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    kl_T = reverse_kl(student_TV, torch.tensor([[5.0, 5.0]]))
    torch.testing.assert_close(kl_T, torch.tensor([0.1308120]))
    (2 * kl_T).sum().backward()
    torch.testing.assert_close(student_TV.grad, torch.tensor([[-0.4119796, 0.4119796]]))


def test_it_is_the_students_direction():
    # The other way, KL(π_T ‖ π) = 1/2 ln 2 + 1/2 ln(2/3) = 0.1438410.
    student_TV, teacher_TV = torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2)
    torch.testing.assert_close(reverse_kl(teacher_TV, student_TV), torch.tensor([0.1438410]))


def test_temperature_divides_both_logits():
    # At temperature 1/2 the odds 1 : 3 become 1 : 9; KL of (1/10, 9/10) to (1/2, 1/2) = 0.1 ln 0.2 + 0.9 ln 1.8 = 0.3680642.
    kl_T = reverse_kl(torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2), temperature=0.5)
    torch.testing.assert_close(kl_T, torch.tensor([0.3680642]))


def test_forward_kl_by_hand():
    # π = (1/4, 3/4), π_T = (1/2, 1/2): KL(π_T ‖ π) = 1/2 ln 2 + 1/2 ln(2/3) = 0.1438410; dKL/dz = π − π_T = (-1/4, 1/4).
    student_TV = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    kl_T = forward_kl(student_TV, torch.tensor([[5.0, 5.0]]))
    torch.testing.assert_close(kl_T, torch.tensor([0.1438410]))
    (2 * kl_T).sum().backward()
    torch.testing.assert_close(student_TV.grad, torch.tensor([[-0.5, 0.5]]))


def test_forward_kl_where_one_of_them_writes_nothing():
    # The teacher's zero adds nothing: KL of (1, 0) to (1/2, 1/2) = ln 2.  The student's zero under a positive teacher: +inf.
    only_first, both = torch.tensor([[0.0, -INF]]), torch.zeros(1, 2)
    torch.testing.assert_close(forward_kl(both, only_first), torch.tensor([math.log(2)]))
    assert forward_kl(only_first, both).item() == INF
    torch.testing.assert_close(forward_kl(only_first, only_first), torch.zeros(1))


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_forward_kl_matches_finite_differences_and_the_dense_form(chunk, temperature):
    student_TV, teacher_TV = random_case()

    def kl(student_TV):
        return forward_kl(student_TV, teacher_TV, temperature=temperature, chunk=chunk)

    assert torch.autograd.gradcheck(kl, student_TV)
    torch.testing.assert_close(kl(student_TV), dense(teacher_TV, student_TV, temperature), rtol=0, atol=1e-13)


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_matches_finite_differences_and_the_dense_form(chunk, temperature):
    student_TV, teacher_TV = random_case()

    def kl(student_TV):
        return reverse_kl(student_TV, teacher_TV, temperature=temperature, chunk=chunk)

    assert torch.autograd.gradcheck(kl, student_TV)
    torch.testing.assert_close(kl(student_TV), dense(student_TV, teacher_TV, temperature), rtol=0, atol=1e-13)


def test_equal_logits_give_exact_zeros():
    student_TV, _ = random_case(vocabulary=1000, dtype=torch.float32)
    kl_T = reverse_kl(student_TV, student_TV.detach(), temperature=0.7, chunk=64)
    (grad_TV,) = torch.autograd.grad(kl_T.sum(), student_TV)
    assert not kl_T.any() and not grad_TV.any()


def test_chunks_change_nothing_but_the_order_of_summation():
    student_TV, teacher_TV = random_case(rows=7, vocabulary=1000, dtype=torch.float32)
    results = []
    for chunk in (1000, 333, 64):
        kl_T = reverse_kl(student_TV, teacher_TV, temperature=0.8, chunk=chunk)
        results.append((kl_T.detach(), *torch.autograd.grad(kl_T.sum(), student_TV)))
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)


def test_bfloat16_logits_are_computed_in_float32():
    student_TV, teacher_TV = random_case(rows=6, vocabulary=300, dtype=torch.bfloat16)
    kl_T = reverse_kl(student_TV, teacher_TV, temperature=0.9, chunk=128)
    wide_TV = student_TV.detach().double().requires_grad_()
    expected_T = dense(wide_TV, teacher_TV.double(), 0.9)
    assert kl_T.dtype == torch.float32
    torch.testing.assert_close(kl_T.double(), expected_T, rtol=1e-5, atol=1e-6)
    (grad_TV,), (expected_TV,) = (torch.autograd.grad(k.sum(), x) for k, x in ((kl_T, student_TV), (expected_T, wide_TV)))
    assert grad_TV.dtype == torch.bfloat16
    torch.testing.assert_close(grad_TV.double(), expected_TV, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_impossible_tokens(chunk):
    """What the student never writes adds nothing, whatever the teacher thinks; what the teacher alone excludes is infinite."""
    student_TV = torch.tensor([[-INF, -INF, 0.0, 0.0]], requires_grad=True)
    kl_T = reverse_kl(student_TV, torch.tensor([[-INF, 0.0, 0.0, 0.0]]), chunk=chunk)
    torch.testing.assert_close(kl_T, torch.tensor([math.log(3 / 2)]))  # (0, 0, 1/2, 1/2) to (0, 1/3, 1/3, 1/3)
    (grad_TV,) = torch.autograd.grad(kl_T.sum(), student_TV)
    assert not grad_TV.any()  # both sampled tokens lie equally far
    assert reverse_kl(student_TV.detach(), torch.tensor([[0.0, 0.0, 0.0, -INF]]), chunk=chunk).tolist() == [INF]


def test_a_row_that_does_not_count_has_no_gradient_even_where_it_is_infinite():
    student_TV = torch.zeros(2, 2, requires_grad=True)
    kl_T = reverse_kl(student_TV, torch.tensor([[0.0, -INF], [0.0, math.log(3)]]))
    kl_T[1].backward()
    # (1/2, 1/2) to (1/4, 3/4): 1/2 (ln 2 - KL) with KL = 1/2 ln 2 + 1/2 ln(2/3)
    torch.testing.assert_close(student_TV.grad, torch.tensor([[0.0, 0.0], [0.2746531, -0.2746531]]))


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("side", [0, 1])
def test_broken_logits_are_not_hidden(bad, side):
    logits = [torch.zeros(2, 3), torch.zeros(2, 3)]
    logits[side][0, 1] = bad
    kl_T = reverse_kl(*logits, chunk=2)
    assert not math.isfinite(kl_T[0]) and kl_T[1] == 0


def test_the_teacher_gets_no_gradient():
    student_TV, teacher_TV = random_case()
    teacher_TV.requires_grad_()
    reverse_kl(student_TV, teacher_TV).sum().backward()
    assert teacher_TV.grad is None and student_TV.grad.any()


def test_memory_is_a_chunk_forward_and_one_gradient_backward():
    rows, vocabulary, chunk = 8, 512, 64
    student_TV, teacher_TV = random_case(rows, vocabulary, torch.float32)
    given = {x.untyped_storage().data_ptr() for x in (student_TV, teacher_TV)}
    kept = {}  # keeps every storage alive, so that no address is used twice

    class Storages(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, list | tuple) else [result]:
                if isinstance(tensor, torch.Tensor):
                    kept[tensor.untyped_storage().data_ptr()] = tensor
            return result

    def large():
        return [at for at, t in kept.items() if t.untyped_storage().nbytes() > rows * chunk * 4 and at not in given]

    with Storages():
        kl_T = reverse_kl(student_TV, teacher_TV, chunk=chunk)
    assert large() == []
    with Storages():
        (grad_TV,) = torch.autograd.grad(kl_T.sum(), student_TV)
    assert large() == [grad_TV.untyped_storage().data_ptr()]


def test_no_rows():
    assert reverse_kl(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0,)


def test_the_annotation_of_shapes_is_true():
    checked = jaxtyped(reverse_kl, typechecker=beartype)
    checked(torch.zeros(3, 5), torch.zeros(3, 5))
    with pytest.raises(TypeCheckError):
        checked(torch.zeros(3, 5), torch.zeros(4, 5))


@pytest.mark.parametrize(
    ("teacher", "options", "message"),
    [
        ((2, 4), {}, r"logits: got \(2, 3\) of the student and \(2, 4\) of the teacher"),
        ((2, 3), {"temperature": 0.0}, "temperature: got 0.0"),
        ((2, 3), {"temperature": math.nan}, "temperature: got nan"),
        ((2, 3), {"chunk": 0}, "chunk: got 0"),
    ],
)
def test_mistakes(teacher, options, message):
    with pytest.raises(ValueError, match=message):
        reverse_kl(torch.zeros(2, 3), torch.zeros(teacher), **options)
