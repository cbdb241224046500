"""Samples from noise: the right distribution, log-probabilities as torch.distributions has them."""

from __future__ import annotations

import math

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


@pytest.fixture
def noise() -> torch.Tensor:
    """Evenly spread over [0, 1): frequencies have no sampling error."""
    return torch.arange(N) / N


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int) -> torch.Tensor:
    """Noise in multiples of 2**-24."""
    return torch.randint(2**24, shape, generator=generator(5)) * 2.0**-24


# Categorical


def test_categorical_frequencies_are_the_probabilities(noise: torch.Tensor) -> None:
    probabilities = torch.tensor([0.1, 0.0, 0.25, 0.4, 0.05, 0.2])
    samples, _ = sample_categorical(probabilities.log().expand(N, -1), noise)
    frequencies = torch.bincount(samples, minlength=6) / N
    assert torch.allclose(frequencies, probabilities, atol=2e-5)


def test_categorical_samples_grow_with_the_noise(noise: torch.Tensor) -> None:
    samples, _ = sample_categorical(torch.randn(7, generator=generator()).expand(N, -1), noise)
    assert (samples.diff() >= 0).all()
    assert (samples[0], samples[-1]) == (0, 6)


def test_categorical_log_probabilities_are_those_of_torch() -> None:
    logits = torch.randn(500, 9, generator=generator()) * 4
    samples, log_probability = sample_categorical(logits, uniform(500, 1))
    expected = Categorical(logits=logits).log_prob(samples)
    assert samples.dtype == torch.int64
    assert torch.equal(samples, sample_categorical(logits, uniform(500))[0])  # without a column
    assert samples.shape == log_probability.shape == (500,)
    assert torch.allclose(log_probability, expected, atol=1e-5)
    assert torch.allclose(categorical_log_probability(logits, samples), expected, atol=1e-5)


@pytest.mark.parametrize("extreme", [0.0, 0.5, LAST])
@pytest.mark.parametrize("masked", [slice(0), slice(1), slice(-1, None), slice(1, None, 2)])
def test_an_impossible_category_is_never_drawn(extreme: float, masked: slice) -> None:
    for n_actions in (2, 3, 10, 100, 1000):
        logits = torch.randn(1000, n_actions, generator=generator()) * 3
        logits[:, masked] = -torch.inf
        samples, log_probability = sample_categorical(logits, torch.full((1000,), extreme))
        assert logits.gather(1, samples.unsqueeze(1)).isfinite().all(), n_actions
        assert log_probability.isfinite().all(), n_actions


def test_gradients_flow_through_the_log_probability_of_a_category() -> None:
    logits = torch.randn(5, 4, generator=generator(), requires_grad=True)
    samples, log_probability = sample_categorical(logits, uniform(5))
    log_probability.sum().backward()
    expected = torch.nn.functional.one_hot(samples, 4) - logits.detach().softmax(-1)
    assert logits.grad is not None
    assert torch.allclose(logits.grad, expected, atol=1e-6)


# Normal


def test_normal_samples_follow_the_inverse_distribution_function(noise: torch.Tensor) -> None:
    middle = noise[1:, None]
    samples, _ = sample_normal(torch.tensor([[2.0]]), torch.tensor([[math.log(3.0)]]), middle)
    assert torch.allclose(Normal(2.0, 3.0).cdf(samples), middle, atol=1e-5)


def test_normal_log_probabilities_are_those_of_torch() -> None:
    mean = torch.randn(300, 5, generator=generator())
    log_std = torch.randn(300, 5, generator=generator(1)) * 0.5
    samples, log_probability = sample_normal(mean, log_std, uniform(300, 5))
    expected = Independent(Normal(mean, log_std.exp()), 1).log_prob(samples)
    assert log_probability.shape == (300,)
    assert torch.allclose(log_probability, expected, atol=1e-4)
    assert torch.allclose(normal_log_probability(mean, log_std, samples), expected, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (300, 1), (300, 5)])
def test_log_std_is_broadcast_to_the_mean(shape: tuple[int, ...]) -> None:
    mean = torch.randn(300, 5, generator=generator())
    log_std = torch.full(shape, -0.7)
    samples, log_probability = sample_normal(mean, log_std, uniform(300, 5))
    expected = Independent(Normal(mean, log_std.exp().expand(300, 5)), 1).log_prob(samples)
    assert torch.allclose(log_probability, expected, atol=1e-4)


@pytest.mark.parametrize("sample", [sample_normal, sample_tanh_normal])
@pytest.mark.parametrize("extreme", [0.0, LAST, 0.5])
def test_extreme_noise_gives_finite_normal_samples(sample: object, extreme: float) -> None:
    mean, log_std = torch.zeros(4, 2), torch.zeros(2)
    samples, log_probability = sample(mean, log_std, torch.full((4, 2), extreme))  # type: ignore[operator]
    assert samples.isfinite().all()
    assert log_probability.isfinite().all()


def test_the_extremes_of_the_noise_lie_symmetrically() -> None:
    samples, _ = sample_normal(torch.zeros(2, 1), torch.zeros(1), torch.tensor([[0.0], [LAST]]))
    assert samples[0].item() == -samples[1].item()
    assert 5.0 < samples[1].item() < 6.0


def test_normal_samples_are_differentiable_in_both_parameters() -> None:
    mean = torch.zeros(3, 2, requires_grad=True)
    log_std = torch.zeros(2, requires_grad=True)
    samples, _ = sample_normal(mean, log_std, uniform(3, 2))
    samples.sum().backward()
    assert mean.grad is not None
    assert log_std.grad is not None
    assert (mean.grad == 1).all()
    assert torch.allclose(log_std.grad, samples.detach().sum(0))


# Squashed normal


def test_tanh_normal_log_probabilities_are_those_of_torch() -> None:
    mean = torch.randn(300, 3, generator=generator()).double()
    log_std = torch.full((3,), -0.5).double()
    samples, log_probability = sample_tanh_normal(mean, log_std, uniform(300, 3).double())
    base = Normal(mean, log_std.exp().expand(300, 3))
    squashed = Independent(TransformedDistribution(base, [TanhTransform()]), 1)
    assert torch.allclose(log_probability, squashed.log_prob(samples), atol=1e-6)
    assert samples.abs().max() < 1


def test_tanh_normal_is_finite_where_it_saturates() -> None:
    mean = torch.tensor([[50.0], [-50.0]])
    samples, log_probability = sample_tanh_normal(mean, torch.zeros(1), torch.full((2, 1), 0.3))
    assert samples.abs().max() <= 1
    assert log_probability.isfinite().all()
