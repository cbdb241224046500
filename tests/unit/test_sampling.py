"""Samples from noise: the right distribution, log-probabilities as torch.distributions has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, TanhTransform
from torch.distributions.transformed_distribution import TransformedDistribution

from rlpool import (
    SpecError,
    categorical_log_probability,
    normal_log_probability,
    sample_categorical,
    sample_normal,
    sample_tanh_normal,
)

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


@pytest.mark.parametrize("shape", [(), (5,), (300, 1)])
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


# Every dtype --------------------------------------------------------------------------------------

HALVES = [torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
every_pair = pytest.mark.parametrize(
    ("dtype", "of_noise"),
    [
        (torch.float16, torch.float32),
        (torch.float64, torch.bfloat16),
    ],
)


def extremes(dtype: torch.dtype) -> torch.Tensor:
    """The smallest noise, the middle, and the largest below 1, which rounding may make 1."""
    largest = 1.0 - torch.finfo(dtype).eps / 2
    return torch.tensor([0.0, 0.5, largest, 1.0 if dtype in HALVES else largest], dtype=dtype)


def wider(dtype: torch.dtype, *others: torch.dtype) -> torch.dtype:
    """What results are computed in."""
    return torch.float64 if torch.float64 in (dtype, *others) else torch.float32


@every_pair
def test_categories_are_as_frequent_as_torch_says(
    dtype: torch.dtype, of_noise: torch.dtype
) -> None:
    for seed, n in enumerate((2, 7, 100)):
        logits = (normal(1, n, seed=seed) * 3).to(dtype)
        logits[0, 1] = -torch.inf
        noise = torch.arange(2**14, dtype=torch.float64).div(2**14).to(of_noise)
        samples, log_probability = sample_categorical(logits.expand(2**14, -1), noise)
        expected = Categorical(logits=logits[0].double())
        frequency = torch.bincount(samples, minlength=n) / 2**14
        assert (frequency - expected.probs).abs().max() < torch.finfo(of_noise).eps + 1e-4
        assert frequency[1] == 0
        precision = 1e-12 if dtype == torch.float64 else 1e-4
        close = (log_probability - expected.log_prob(samples)).abs() < precision
        assert close.all()


@every_pair
def test_extreme_noise_draws_no_masked_category(dtype: torch.dtype, of_noise: torch.dtype) -> None:
    noise = extremes(of_noise)
    for n in (2, 3, 1000):
        for masked in (slice(n // 2), slice(n // 2, None), slice(1, None, 2), slice(1, n)):
            logits = torch.cat([normal(50, n).mul(3)] * len(noise)).to(dtype)
            logits[:, masked] = -torch.inf
            samples, log_probability = sample_categorical(logits, noise.repeat_interleave(50))
            assert log_probability.isfinite().all()
            assert logits.gather(1, samples.unsqueeze(1)).isfinite().all()


@every_pair
@pytest.mark.parametrize("sample", [sample_normal, sample_tanh_normal])
def test_extreme_noise_of_any_dtype_gives_finite_samples(
    sample: Any, dtype: torch.dtype, of_noise: torch.dtype
) -> None:
    noise = extremes(of_noise)
    mean, log_std = torch.zeros(len(noise), 1, dtype=dtype), torch.zeros(1, dtype=dtype)
    mean.requires_grad_()
    values, log_probability = sample(mean, log_std, noise.unsqueeze(1))
    assert values.dtype == log_probability.dtype == wider(dtype, of_noise)
    assert values.isfinite().all()
    assert log_probability.isfinite().all()
    assert values.diff(dim=0).ge(0).all()
    assert torch.allclose(values[0], -values[-1])
    (gradient,) = torch.autograd.grad(log_probability.sum() + values.sum(), mean)
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()


def test_noise_of_float64_reaches_its_last_bit() -> None:
    noise = 1.0 - torch.arange(1, 1000, dtype=torch.float64).unsqueeze(1) * 2.0**-53
    samples, _ = sample_normal(torch.zeros_like(noise), torch.zeros(1).double(), noise)
    assert samples.diff(dim=0).lt(0).all()
    tail = torch.special.ndtr(-samples)
    assert torch.allclose(tail, 1.0 - noise - 2.0**-54, rtol=1e-3)


@every_pair
def test_normal_samples_are_the_quantiles_of_torch(
    dtype: torch.dtype, of_noise: torch.dtype
) -> None:
    step = torch.finfo(of_noise).eps / 4  # noise is uniform in multiples of twice this
    noise = torch.arange(1, 2**10, dtype=torch.float64).div(2**10).to(of_noise).unsqueeze(1)
    mean = torch.full_like(noise, 0.5).to(dtype)
    log_std = torch.tensor([-0.25], dtype=dtype)
    exact = Normal(mean.double(), log_std.double().exp())
    samples, log_probability = sample_normal(mean, log_std, noise)
    precision = 1e-12 if dtype == of_noise == torch.float64 else 2e-6
    middle = noise.double().clamp(max=1 - 2 * step) + step
    assert torch.allclose(exact.cdf(samples.double()), middle, atol=precision, rtol=precision)
    expected = exact.log_prob(samples.double()).sum(-1)
    assert torch.allclose(log_probability.double(), expected, atol=1e-5)


@every_dtype
def test_log_probabilities_and_gradients_are_those_of_torch_in_float64(dtype: torch.dtype) -> None:
    precise = wider(dtype)
    tolerance = {"atol": 1e-9, "rtol": 1e-9} if dtype == torch.float64 else {"atol": 2e-3}
    if dtype in HALVES:
        tolerance = {"atol": 8 * torch.finfo(dtype).eps, "rtol": 2 * torch.finfo(dtype).eps}
    given = [(normal(200, 4, seed=i) / 2).to(dtype).requires_grad_() for i in range(3)]
    logits, mean, log_std = given
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    action = normal(200, 4, seed=3).to(dtype)
    chosen = torch.arange(200) % 4
    sums = (
        categorical_log_probability(logits, chosen),
        normal_log_probability(mean, log_std, action),
    )
    expected = (
        Categorical(logits=exact[0]).log_prob(chosen),
        Independent(Normal(exact[1], exact[2].exp()), 1).log_prob(action.double()),
    )
    for one, other in zip(sums, expected, strict=True):
        assert one.dtype == precise
        assert torch.allclose(one.double(), other, atol=1e-9 if precise == torch.float64 else 2e-5)
    found = torch.autograd.grad(sum(each.sum() for each in sums), given)
    right = torch.autograd.grad(sum(each.sum() for each in expected), exact)
    for one, other in zip(found, right, strict=True):
        assert one.dtype == dtype
        assert torch.allclose(one.double(), other, **tolerance)


@every_dtype
def test_squashed_samples_are_those_of_torch(dtype: torch.dtype) -> None:
    mean, log_std = normal(300, 3).to(dtype), torch.full((3,), -0.5, dtype=dtype)
    samples, log_probability = sample_tanh_normal(mean, log_std, uniform(300, 3))
    base = Normal(mean.double(), log_std.double().exp().expand(300, 3))
    squashed = Independent(TransformedDistribution(base, [TanhTransform()]), 1)
    inside = samples.double().abs().amax(-1) < 0.99  # further out, float32 has few bits left
    expected = squashed.log_prob(samples.double().clamp(-0.999, 0.999))
    assert torch.allclose(log_probability.double()[inside], expected[inside], atol=2e-4)
    exact = sample_tanh_normal(mean.double(), log_std.double(), uniform(300, 3).double())
    assert torch.allclose(log_probability.double(), exact[1], atol=1e-4)


def test_under_autocast_log_probabilities_are_float32() -> None:
    network = torch.nn.Linear(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean = network(normal(5, 3))
        assert mean.dtype == torch.bfloat16
        samples, of_category = sample_categorical(mean, uniform(5, 1))
        actions, of_action = sample_normal(mean, torch.zeros(4), uniform(5, 4))
        again = (
            categorical_log_probability(mean, samples),
            normal_log_probability(mean, torch.zeros(4), actions),
        )
    assert torch.equal(again[0], of_category)
    assert torch.equal(again[1], of_action)
    assert actions.dtype == of_category.dtype == of_action.dtype == torch.float32


def test_actions_of_any_int_dtype_are_taken_and_others_refused() -> None:
    logits, action = normal(4, 5), torch.tensor([0, 1, 4, 2])
    expected = categorical_log_probability(logits, action)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        assert torch.equal(categorical_log_probability(logits, action.to(dtype)), expected)
    for wrong in (action.float(), action > 0, action.tolist()):
        with pytest.raises(SpecError, match="give logits"):
            categorical_log_probability(logits, wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="noise is int64"):
        sample_categorical(logits, action)
