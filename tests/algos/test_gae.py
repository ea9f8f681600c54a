import pytest
import torch

from slipstream.algos.gae import gae, value_loss


def run(rewards, values, actions=None, discount=1.0, trace=1.0):
    found = gae(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(actions or [True] * len(rewards)),
        discount=discount,
        trace=trace,
    )
    return [part.tolist() for part in found]


def test_by_hand():
    # δ_1 = 1 + 0 - 0.2 = 0.8; δ_0 = 0 + 0.9 * 0.2 - 0.5 = -0.32; A_0 = -0.32 + 0.9 * 0.5 * 0.8 = 0.04
    advantages, returns = run([0, 1], [0.5, 0.2], discount=0.9, trace=0.5)
    assert advantages == pytest.approx([0.04, 0.8]) and returns == pytest.approx([0.54, 1.0])


def test_the_docstrings_example():
    advantages, returns = run([0, 1], [0.5, 0.2], trace=0.5)
    assert advantages == pytest.approx([0.1, 0.8]) and returns == pytest.approx([0.6, 1.0])


def test_limits():
    rewards, values = [0.1, -0.2, 1.0], [0.5, 0.3, 0.2]
    advantages, returns = run(rewards, values)  # Monte Carlo: rewards to come, 0.9, 0.8, 1
    assert returns == pytest.approx([0.9, 0.8, 1.0]) and advantages == pytest.approx([0.4, 0.5, 0.8])
    advantages, _ = run(rewards, values, trace=0.0)  # one step: 0.1 + 0.3 - 0.5, -0.2 + 0.2 - 0.3, 1 - 0.2
    assert advantages == pytest.approx([-0.1, -0.3, 0.8])
    advantages, returns = run(rewards, values, discount=0.0)  # rewards alone
    assert returns == pytest.approx(rewards)


def test_an_observation_is_no_step():
    """Two actions, two observations, an action: as if the observations were not there, whatever their values; a reward that
    came with an observation belongs to the action before it, and to no other."""
    actions = [True, True, False, False, True]
    with_observations = run([0.5, 0.0, 9.0, 0.25, 1.0], [0.1, 0.5, 7.0, -7.0, 0.2], actions, 0.9, 0.5)
    without = run([0.5, 9.25, 1.0], [0.1, 0.5, 0.2], None, 0.9, 0.5)
    for found, expected in zip(with_observations, without, strict=True):
        assert [found[0], found[1], found[4]] == pytest.approx(expected) and found[2] == found[3] == 0.0


def test_before_the_first_action_nothing_counts_and_without_one_there_is_nothing():
    """The observation's reward of 9 has no action before it; an action that is cut off ends with value 0, like any other."""
    advantages, returns = run([9.0, 1.0], [3.0, 0.25], [False, True])
    assert advantages == pytest.approx([0.0, 0.75]) and returns == pytest.approx([0.0, 1.0])
    assert run([9.0], [3.0], [False]) == [[0.0], [0.0]]
    empty = torch.zeros(0)
    assert [len(part) for part in gae(empty, empty, empty.bool(), discount=1.0, trace=1.0)] == [0, 0]


def test_definition_by_double_sum():
    """A_t = Σ_k (γλ)^k δ_{t+k} over a longer response, written out."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(9, generator=generator, dtype=torch.float64).tolist() for _ in range(2))
    deltas = [r + 0.97 * v_next - v for r, v_next, v in zip(rewards, [*values[1:], 0.0], values, strict=True)]
    expected = [sum((0.97 * 0.9) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(9)]
    assert run(rewards, values, None, 0.97, 0.9)[0] == pytest.approx(expected)


def test_targets_carry_no_gradient():
    values_L = torch.tensor([0.5, 0.2], requires_grad=True)
    for part in gae(torch.tensor([0.0, 1.0]), values_L, torch.tensor([True, True]), discount=1.0, trace=0.9):
        assert not part.requires_grad


@pytest.mark.parametrize(
    ("value", "loss", "slope"),  # old value 1, return 2, clip 0.2
    [
        (1.1, 0.405, -0.9),  # inside: (0.9)^2 / 2
        (1.5, 0.32, 0.0),  # beyond the clip towards the return: (1.2 - 2)^2 / 2, and no gradient
        (0.5, 1.125, -1.5),  # away from it: (0.5 - 2)^2 / 2 is larger than (0.8 - 2)^2 / 2
        (3.5, 1.125, 1.5),  # past the return: (3.5 - 2)^2 / 2 is the larger one
    ],
)
def test_value_clipping(value, loss, slope):
    value_T = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old_T, return_T = torch.tensor([1.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    found_T = value_loss(value_T, old_T, return_T, clip=0.2)
    found_T.sum().backward()
    assert found_T.item() == pytest.approx(loss) and value_T.grad.item() == pytest.approx(slope)
    assert value_loss(value_T, old_T, return_T, clip=None).item() == pytest.approx((value - 2) ** 2 / 2)


def test_value_loss_against_finite_differences():
    old_T, return_T = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), torch.tensor([2.0, 0.3, -1.5], dtype=torch.float64)
    value_T = torch.tensor([1.1, -0.7, 0.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v_T: value_loss(v_T, old_T, return_T, clip=0.2), value_T)
