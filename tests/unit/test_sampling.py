"""Samples from noise: the right distribution, log-probabilities as torch.distributions has them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, TanhTransform
from torch.distributions.transformed_distribution import TransformedDistribution

from rlpool import (
    categorical_log_probability,
    normal_log_probability,
    sample_categorical,
    sample_normal,
    sample_tanh_normal,
)

LAST = 1.0 - 2.0**-24
"""The largest noise there is."""

N = 200_000
EVENLY = torch.arange(N) / N  # frequencies have no sampling error
GENERATOR = torch.Generator()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR.manual_seed(seed))


def uniform(*shape: int) -> torch.Tensor:
    """Noise in multiples of 2**-24."""
    return torch.randint(2**24, shape, generator=GENERATOR.manual_seed(5)) * 2.0**-24


def test_categorical_samples_grow_with_the_noise_and_are_as_frequent_as_they_should_be() -> None:
    probabilities = torch.tensor([0.1, 0.0, 0.25, 0.4, 0.05, 0.2])
    samples, _ = sample_categorical(probabilities.log().expand(N, -1), EVENLY)
    assert torch.allclose(torch.bincount(samples, minlength=6) / N, probabilities, atol=2e-5)
    assert (samples.diff() >= 0).all()


def test_categorical_log_probabilities_are_those_of_torch_and_differentiable() -> None:
    logits = (normal(500, 9) * 4).requires_grad_()
    samples, log_probability = sample_categorical(logits, uniform(500, 1))
    expected = Categorical(logits=logits).log_prob(samples)
    assert (samples.dtype, samples.shape) == (torch.int64, (500,))
    assert torch.equal(samples, sample_categorical(logits, uniform(500))[0])  # without a column
    assert torch.allclose(log_probability, expected, atol=1e-5)
    assert torch.allclose(categorical_log_probability(logits, samples), expected, atol=1e-5)
    (gradient,) = torch.autograd.grad(log_probability.sum(), logits)
    one_hot = torch.nn.functional.one_hot(samples, 9)
    assert torch.allclose(gradient, one_hot - logits.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("extreme", [0.0, 0.5, LAST])
@pytest.mark.parametrize("masked", [slice(1), slice(-1, None), slice(1, None, 2)])
def test_an_impossible_category_is_never_drawn(extreme: float, masked: slice) -> None:
    for n_actions in (2, 3, 10, 1000):
        logits = normal(1000, n_actions) * 3
        logits[:, masked] = -torch.inf
        samples, log_probability = sample_categorical(logits, torch.full((1000,), extreme))
        assert logits.gather(1, samples.unsqueeze(1)).isfinite().all(), n_actions
        assert log_probability.isfinite().all(), n_actions


def test_normal_samples_follow_the_inverse_distribution_function() -> None:
    middle = EVENLY[1:, None]
    mean, log_std = torch.full((N - 1, 1), 2.0), torch.tensor([[math.log(3.0)]])
    samples, _ = sample_normal(mean, log_std, middle)
    assert torch.allclose(Normal(2.0, 3.0).cdf(samples), middle, atol=1e-5)
    first, last = sample_normal(torch.zeros(2, 1), torch.zeros(1), torch.tensor([[0.0], [LAST]]))[0]
    assert 5.0 < last.item() == -first.item() < 6.0


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (300, 1), (300, 5)])
def test_normal_log_probabilities_are_those_of_torch_and_differentiable(shape: Any) -> None:
    mean, log_std = normal(300, 5).requires_grad_(), (normal(*shape, seed=1) / 2).requires_grad_()
    samples, log_probability = sample_normal(mean, log_std, uniform(300, 5))
    expected = Independent(Normal(mean, log_std.exp().expand(300, 5)), 1).log_prob(samples)
    assert torch.allclose(log_probability, expected, atol=1e-4)
    assert torch.allclose(normal_log_probability(mean, log_std, samples), expected, atol=1e-4)
    gradients = torch.autograd.grad(samples.sum(), (mean, log_std))
    assert torch.equal(gradients[0], torch.ones(300, 5))
    of_log_std = (samples - mean).sum_to_size(shape) if shape else (samples - mean).sum()
    assert torch.allclose(gradients[1], of_log_std, atol=1e-3)


def test_tanh_normal_log_probabilities_are_those_of_torch() -> None:
    mean, log_std = normal(300, 3).double(), torch.full((3,), -0.5).double()
    samples, log_probability = sample_tanh_normal(mean, log_std, uniform(300, 3).double())
    base = Normal(mean, log_std.exp().expand(300, 3))
    squashed = Independent(TransformedDistribution(base, [TanhTransform()]), 1)
    assert torch.allclose(log_probability, squashed.log_prob(samples), atol=1e-6)
    assert samples.abs().max() < 1


@pytest.mark.parametrize("sample", [sample_normal, sample_tanh_normal])
@pytest.mark.parametrize("extreme", [0.0, 0.3, LAST])
@pytest.mark.parametrize("mean", [0.0, 50.0, -50.0])
def test_extreme_noise_and_saturation_give_finite_samples(
    sample: Any, extreme: float, mean: float
) -> None:
    given = torch.full((4, 2), mean), torch.zeros(2), torch.full((4, 2), extreme)
    assert all(values.isfinite().all() for values in sample(*given))
