"""Samples from noise: the right distribution, log-probabilities as in torch.distributions."""

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

GENERATOR = torch.Generator()
PAIRS = [(torch.float16, torch.float32), (torch.float64, torch.bfloat16)]
"""Dtypes of what a network gives and of the noise."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR.manual_seed(seed))


def uniform(*shape: int) -> torch.Tensor:
    """Return noise in multiples of 2**-24."""
    return torch.randint(2**24, shape, generator=GENERATOR.manual_seed(5)) * 2.0**-24


def extremes(dtype: torch.dtype) -> torch.Tensor:
    """Return the smallest noise, the middle, and the largest below 1, which may round to 1."""
    largest = 1.0 - torch.finfo(dtype).eps / 2
    return torch.tensor([0.0, 0.5, largest, 1.0 if dtype.itemsize == 2 else largest], dtype=dtype)


def squashed(mean: torch.Tensor, log_std: torch.Tensor) -> Any:
    """Return a tanh-squashed Gaussian in float64."""
    base = Normal(mean.double(), log_std.double().exp().expand(mean.shape))
    return Independent(TransformedDistribution(base, [TanhTransform()]), 1)


@pytest.mark.parametrize(("dtype", "of_noise"), PAIRS)
def test_categories_increase_with_the_noise_and_have_torchs_frequencies(
    dtype: torch.dtype, of_noise: torch.dtype
) -> None:
    for seed, n in enumerate((2, 7, 100)):
        logits = (normal(1, n, seed=seed) * 3).to(dtype)
        logits[0, 1] = -torch.inf
        noise = torch.arange(2**14, dtype=torch.float64).div(2**14).to(of_noise)
        samples, log_probability = sample_categorical(logits.expand(2**14, -1), noise)
        assert samples.dtype is torch.int64
        assert (samples.diff() >= 0).all()
        expected = Categorical(logits=logits[0].double())
        frequency = torch.bincount(samples, minlength=n) / 2**14
        assert (frequency - expected.probs).abs().max() < torch.finfo(of_noise).eps + 1e-4
        assert frequency[1] == 0
        precision = 1e-12 if dtype == torch.float64 else 1e-4
        assert (log_probability - expected.log_prob(samples)).abs().max() < precision
        column = sample_categorical(logits.expand(2**14, -1), noise.unsqueeze(1))
        assert torch.equal(column[0], samples)


def test_extreme_noise_never_draws_a_masked_category() -> None:
    for dtype, of_noise in PAIRS:
        noise = extremes(of_noise)
        for n in (2, 3, 1000):
            for masked in (slice(n // 2), slice(n // 2, None), slice(1, None, 2), slice(1, n)):
                logits = torch.cat([normal(50, n).mul(3)] * len(noise)).to(dtype)
                logits[:, masked] = -torch.inf
                samples, log_probability = sample_categorical(logits, noise.repeat_interleave(50))
                assert log_probability.isfinite().all()
                assert logits.gather(1, samples.unsqueeze(1)).isfinite().all()


@pytest.mark.parametrize("sample", [sample_normal, sample_tanh_normal])
def test_extreme_noise_gives_finite_samples(sample: Any) -> None:
    for dtype, of_noise in PAIRS:
        noise = extremes(of_noise)
        mean = torch.zeros(len(noise), 1, dtype=dtype, requires_grad=True)
        values, log_probability = sample(mean, torch.zeros(1, dtype=dtype), noise.unsqueeze(1))
        wider = torch.float64 if torch.float64 in (dtype, of_noise) else torch.float32
        assert values.dtype == log_probability.dtype == wider
        assert log_probability.isfinite().all()
        assert values.diff(dim=0).ge(0).all()
        assert torch.allclose(values[0], -values[-1])
        (gradient,) = torch.autograd.grad(log_probability.sum() + values.sum(), mean)
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()


def test_float64_noise_uses_every_bit() -> None:
    noise = 1.0 - torch.arange(1, 1000, dtype=torch.float64).unsqueeze(1) * 2.0**-53
    samples, _ = sample_normal(torch.zeros_like(noise), torch.zeros(1).double(), noise)
    assert samples.diff(dim=0).lt(0).all()
    tail = torch.special.ndtr(-samples)
    assert torch.allclose(tail, 1.0 - noise - 2.0**-54, rtol=1e-3)


def test_normal_samples_match_torchs_quantiles() -> None:
    for dtype, of_noise in PAIRS:
        step = torch.finfo(of_noise).eps / 4  # noise is uniform in multiples of twice this
        noise = torch.arange(1, 2**10, dtype=torch.float64).div(2**10).to(of_noise).unsqueeze(1)
        mean = torch.full_like(noise, 0.5).to(dtype)
        log_std = torch.tensor([-0.25], dtype=dtype)
        exact = Normal(mean.double(), log_std.double().exp())
        samples, log_probability = sample_normal(mean, log_std, noise)
        middle = noise.double().clamp(max=1 - 2 * step) + step
        assert torch.allclose(exact.cdf(samples.double()), middle, atol=2e-6, rtol=2e-6)
        expected = exact.log_prob(samples.double()).sum(-1)
        assert torch.allclose(log_probability.double(), expected, atol=1e-5)


def test_gradients_flow_through_samples() -> None:
    logits = (normal(500, 9) * 4).requires_grad_()
    samples, log_probability = sample_categorical(logits, uniform(500, 1))
    (gradient,) = torch.autograd.grad(log_probability.sum(), logits)
    one_hot = torch.nn.functional.one_hot(samples, 9)
    assert torch.allclose(gradient, one_hot - logits.softmax(-1), atol=1e-6)
    mean = normal(300, 5).requires_grad_()
    for shape in ((), (5,), (300, 1)):
        log_std = (normal(*shape, seed=1) / 2).requires_grad_()
        samples, _ = sample_normal(mean, log_std, uniform(300, 5))
        of_mean, of_log_std = torch.autograd.grad(samples.sum(), (mean, log_std))
        assert torch.equal(of_mean, torch.ones(300, 5))
        assert torch.allclose(of_log_std, (samples - mean).sum_to_size(shape), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_log_probabilities_and_gradients_match_torch_in_float64(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    tolerance = {"atol": 8 * eps, "rtol": 2 * eps} if dtype.itemsize == 2 else {"atol": 1e-9}
    given = [(normal(200, 4, seed=i) / 2).to(dtype).requires_grad_() for i in range(3)]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    action, chosen = normal(200, 4, seed=3).to(dtype), torch.arange(200) % 4
    sums = (
        categorical_log_probability(given[0], chosen.byte()),
        normal_log_probability(*given[1:], action),
    )
    expected = (
        Categorical(logits=exact[0]).log_prob(chosen),
        Independent(Normal(exact[1], exact[2].exp()), 1).log_prob(action.double()),
    )
    for one, other in zip(sums, expected, strict=True):
        assert one.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(one.double(), other, atol=1e-9 if dtype == torch.float64 else 2e-5)
    found = torch.autograd.grad(sum(each.sum() for each in sums), given)
    right = torch.autograd.grad(sum(each.sum() for each in expected), exact)
    for one, other in zip(found, right, strict=True):
        assert one.dtype == dtype
        assert torch.allclose(one.double(), other, **tolerance)


def test_squashed_samples_match_torch() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        mean, log_std = normal(300, 3).to(dtype), torch.full((3,), -0.5, dtype=dtype)
        samples, log_probability = sample_tanh_normal(mean, log_std, uniform(300, 3))
        inside = samples.double().abs().amax(-1) < 0.99  # further out, float32 has few bits left
        expected = squashed(mean, log_std).log_prob(samples.double().clamp(-0.999, 0.999))
        assert torch.allclose(log_probability.double()[inside], expected[inside], atol=2e-4)
        _, exact = sample_tanh_normal(mean.double(), log_std.double(), uniform(300, 3).double())
        assert torch.allclose(log_probability.double(), exact, atol=1e-4)


def test_log_probabilities_are_float32_under_autocast() -> None:
    network = torch.nn.Linear(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean = network(normal(5, 3))
        samples, of_category = sample_categorical(mean, uniform(5, 1))
        actions, of_action = sample_normal(mean, torch.zeros(4), uniform(5, 4))
        assert torch.equal(categorical_log_probability(mean, samples), of_category)
        assert torch.equal(normal_log_probability(mean, torch.zeros(4), actions), of_action)
    assert actions.dtype == of_category.dtype == of_action.dtype == torch.float32


def test_actions_and_noise_of_other_dtypes_are_refused() -> None:
    logits, action = normal(4, 5), torch.tensor([0, 1, 4, 2])
    for wrong in (action.float(), action > 0, action.tolist()):
        with pytest.raises(SpecError, match="logits"):
            categorical_log_probability(logits, wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="noise"):
        sample_categorical(logits, action)
