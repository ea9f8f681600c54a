import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.algos.logprobs import selective_logprobs

INF = math.inf


def dense(logits_TV, targets_T, temperature):
    """The same by the plain route, in the precision of ``logits_TV``."""
    log_softmax_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    chosen_T = log_softmax_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
    return chosen_T, -torch.xlogy(log_softmax_TV.exp(), log_softmax_TV.exp()).sum(-1)


def random_case(rows=5, vocabulary=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits_TV = 3 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    return logits_TV.to(dtype).requires_grad_(), torch.randint(vocabulary, (rows,), generator=generator)


def test_literal_values():
    # softmax(0, ln 3) = (1/4, 3/4); entropy = -(1/4 ln 1/4 + 3/4 ln 3/4) = 0.5623351446
    # at temperature 2 the odds are 1 : sqrt 3, so p(1) = sqrt 3 / (1 + sqrt 3)
    logits_TV = torch.tensor([[0.0, math.log(3)]] * 2)
    logprobs_T, entropy_T = selective_logprobs(logits_TV, torch.tensor([0, 1]))
    torch.testing.assert_close(logprobs_T, torch.tensor([math.log(0.25), math.log(0.75)]))
    torch.testing.assert_close(entropy_T, torch.full((2,), 0.5623351446))
    warm_T, _ = selective_logprobs(logits_TV, torch.tensor([0, 1]), temperature=2.0)
    torch.testing.assert_close(warm_T[1], torch.tensor(math.log(math.sqrt(3) / (1 + math.sqrt(3)))))


def test_literal_gradient():
    # d log p(y) / d logit = (1[v = y] - p(v)) / temperature, with p = (1/4, 3/4), y = 0, temperature 1; times the incoming 2
    logits_TV = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    logprobs_T, _ = selective_logprobs(logits_TV, torch.tensor([0]))
    (2 * logprobs_T).sum().backward()
    torch.testing.assert_close(logits_TV.grad, torch.tensor([[1.5, -1.5]]))


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_matches_finite_differences_and_the_dense_form(chunk, temperature):
    logits_TV, targets_T = random_case()

    def logprobs(logits_TV):
        return selective_logprobs(logits_TV, targets_T, temperature=temperature, chunk=chunk)[0]

    assert torch.autograd.gradcheck(logprobs, logits_TV)
    found = selective_logprobs(logits_TV, targets_T, temperature=temperature, chunk=chunk)
    assert found[0].dtype == torch.float64
    for got_T, expected_T in zip(found, dense(logits_TV, targets_T, temperature), strict=True):
        torch.testing.assert_close(got_T, expected_T, rtol=0, atol=1e-14)


def test_chunks_change_nothing_but_the_order_of_summation():
    logits_TV, targets_T = random_case(rows=7, vocabulary=1000, dtype=torch.float32)
    results = []
    for chunk in (1000, 333, 64, 1):
        logprobs_T, entropy_T = selective_logprobs(logits_TV, targets_T, temperature=0.8, chunk=chunk)
        (grad_TV,) = torch.autograd.grad(logprobs_T.sum(), logits_TV)
        results.append((logprobs_T.detach(), entropy_T, grad_TV))
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)


def test_bfloat16_logits_are_computed_in_float32():
    logits_TV, targets_T = random_case(rows=6, vocabulary=300, dtype=torch.bfloat16)
    logprobs_T, entropy_T = selective_logprobs(logits_TV, targets_T, temperature=0.9, chunk=128)
    assert (logprobs_T.dtype, entropy_T.dtype) == (torch.float32, torch.float32)
    wide_TV = logits_TV.detach().double().requires_grad_()
    expected_T, expected_entropy_T = dense(wide_TV, targets_T, 0.9)
    torch.testing.assert_close(logprobs_T.double(), expected_T, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy_T.double(), expected_entropy_T, rtol=1e-6, atol=1e-6)
    logprobs_T.sum().backward()
    expected_T.sum().backward()
    assert logits_TV.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits_TV.grad.double(), wide_TV.grad, rtol=2**-8, atol=1e-6)  # half a bfloat16 ulp, doubled


def test_extreme_logits_keep_their_digits():
    # odds 1 : e^-1 : e^-20000 = 0, so log p = -ln(1 + e^-1) = -0.3132616875 and -1.3132616875;
    # a log-sum-exp of 1e4 in float32 would be right to 1e-3 only
    logits_TV = torch.tensor([[1e4, 1e4 - 1, -1e4]] * 3, requires_grad=True)
    logprobs_T, entropy_T = selective_logprobs(logits_TV, torch.tensor([0, 1, 2]), chunk=2)
    torch.testing.assert_close(logprobs_T[:2], torch.tensor([-0.3132616875, -1.3132616875]), rtol=1e-6, atol=0)
    torch.testing.assert_close(logprobs_T[2], torch.tensor(-20000.3132617))
    # entropy of (0.7310586, 0.2689414) = 0.5822031
    torch.testing.assert_close(entropy_T, torch.full((3,), 0.5822031), rtol=1e-6, atol=0)
    logprobs_T.sum().backward()
    # three rows, each 1[v = y] - p
    torch.testing.assert_close(logits_TV.grad[2], torch.tensor([-0.7310586, -0.2689414, 1.0]))


@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_impossible_tokens(chunk):
    # (0, -inf, 0) is (1/2, 0, 1/2); the whole first chunk may be impossible
    logits_TV = torch.tensor([[-INF, -INF, 0.0, -INF, 0.0]] * 2, requires_grad=True)
    logprobs_T, entropy_T = selective_logprobs(logits_TV, torch.tensor([2, 4]), chunk=chunk)
    torch.testing.assert_close(logprobs_T, torch.full((2,), math.log(0.5)))
    torch.testing.assert_close(entropy_T, torch.full((2,), math.log(2)))
    logprobs_T.sum().backward()
    torch.testing.assert_close(logits_TV.grad[0], torch.tensor([0.0, 0.0, 0.5, 0.0, -0.5]))
    impossible_T, _ = selective_logprobs(logits_TV.detach(), torch.tensor([0, 1]), chunk=chunk)
    assert impossible_T.tolist() == [-INF, -INF]


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_broken_logits_are_not_hidden(bad):
    logits_TV = torch.tensor([[0.0, bad, 0.0], [0.0, 0.0, 0.0]])
    logprobs_T, entropy_T = selective_logprobs(logits_TV, torch.tensor([0, 0]), chunk=2)
    assert not math.isfinite(logprobs_T[0]) and not math.isfinite(entropy_T[0])
    torch.testing.assert_close(logprobs_T[1], torch.tensor(-math.log(3)))


def test_entropy_is_detached_and_alone_moves_nothing():
    logits_TV, targets_T = random_case()
    logprobs_T, entropy_T = selective_logprobs(logits_TV, targets_T)
    assert logprobs_T.requires_grad and not entropy_T.requires_grad


def test_no_rows():
    logprobs_T, entropy_T = selective_logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert logprobs_T.shape == entropy_T.shape == (0,)


def test_memory_is_a_chunk_forward_and_one_gradient_backward():
    rows, vocabulary, chunk = 8, 512, 64
    logits_TV, targets_T = random_case(rows, vocabulary, torch.float32)
    kept = {}  # keeps every storage alive, so that no address is used twice

    class Storages(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, list | tuple) else [result]:
                if isinstance(tensor, torch.Tensor):
                    kept[tensor.untyped_storage().data_ptr()] = tensor
            return result

    def large():
        return [s for s in (t.untyped_storage() for t in kept.values()) if s.nbytes() > rows * chunk * 4]

    with Storages():
        logprobs_T, _ = selective_logprobs(logits_TV, targets_T, chunk=chunk)
    kept.pop(logits_TV.untyped_storage().data_ptr(), None)
    assert large() == []
    with Storages():
        (grad_TV,) = torch.autograd.grad(logprobs_T.sum(), logits_TV)
    kept.pop(logits_TV.untyped_storage().data_ptr(), None)
    assert [s.data_ptr() for s in large()] == [grad_TV.untyped_storage().data_ptr()]


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="temperature: got"):
        selective_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), temperature=temperature)


def test_chunk_must_be_positive():
    with pytest.raises(ValueError, match="chunk: got 0"):
        selective_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), chunk=0)
