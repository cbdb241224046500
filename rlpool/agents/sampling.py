"""Actions from an agent's noise: samples and their log-probabilities.

A stochastic agent declares ``n_noise`` and finds that many uniform numbers per row in
``observation["noise"]``. These functions turn them into samples without touching any global
random state, with a fraction of the operations of ``torch.distributions``.
"""

from __future__ import annotations

import math

import torch

_HALF_STEP = 2.0**-25  # half the spacing of the noise: moves [0, 1) into the open interval
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def sample_categorical(
    logits: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from a categorical distribution by inverting its cumulative distribution.

    Args:
        logits: Unnormalised log-probabilities, float ``[B, n]``.
        noise: Uniform in [0, 1), float ``[B]`` or ``[B, 1]``.

    Returns:
        Samples int64 ``[B]`` and their log-probabilities ``[B]``, differentiable in ``logits``.

    Example:
        >>> logits = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
        >>> sample_categorical(logits, noise=torch.tensor([0.2, 0.3]))
        (tensor([0, 1]), tensor([-1.3863, -0.2877]))
    """
    log_probabilities = torch.log_softmax(logits, -1)
    cumulative = log_probabilities.detach().exp().cumsum(-1)
    # Scaled by the rounded sum, so that no impossible category is drawn.
    threshold = noise.reshape(-1, 1) * cumulative[:, -1:]
    samples = (cumulative[:, :-1] <= threshold).sum(-1)
    return samples, log_probabilities.gather(-1, samples.unsqueeze(-1)).squeeze(-1)


def categorical_log_probability(logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Log-probability of actions int64 ``[B]`` under logits float ``[B, n]``.

    Example:
        >>> logits = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
        >>> categorical_log_probability(logits, torch.tensor([0, 1])).exp()
        tensor([0.2500, 0.7500])
    """
    return torch.log_softmax(logits, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def sample_normal(
    mean: torch.Tensor, log_std: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample independent normal variables by inverting their cumulative distribution.

    Args:
        mean: Means, float ``[B, n]``.
        log_std: Logarithms of the standard deviations, float, broadcastable to ``mean``.
        noise: Uniform in [0, 1), float ``[B, n]``.

    Returns:
        Samples ``[B, n]``, differentiable in both parameters, and the log-probabilities ``[B]``
        of whole rows.

    Example:
        >>> mean, log_std = torch.tensor([[1.0]]), torch.tensor([0.0])
        >>> sample, log_probability = sample_normal(mean, log_std, noise=torch.tensor([[0.5]]))
        >>> sample, log_probability.exp()
        (tensor([[1.0000]]), tensor([0.3989]))
    """
    standard = math.sqrt(2.0) * torch.erfinv((2.0 * noise - 1.0) + 2.0 * _HALF_STEP)
    samples = mean + log_std.exp() * standard
    return samples, normal_log_probability(mean, log_std, samples)


def normal_log_probability(
    mean: torch.Tensor, log_std: torch.Tensor, action: torch.Tensor
) -> torch.Tensor:
    """Log-probability ``[B]`` of rows of actions ``[B, n]`` under independent normals.

    Example:
        >>> mean, log_std = torch.zeros(2, 1), torch.zeros(1)
        >>> normal_log_probability(mean, log_std, torch.tensor([[0.0], [1.0]])).exp()
        tensor([0.3989, 0.2420])
    """
    standard = (action - mean) * (-log_std).exp()
    terms = -0.5 * standard * standard - log_std - _LOG_SQRT_2PI
    return terms.expand_as(standard).sum(-1)


def sample_tanh_normal(
    mean: torch.Tensor, log_std: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample normal variables squashed into (-1, 1), as in soft actor-critic.

    Args:
        mean: Means before the squashing, float ``[B, n]``.
        log_std: Logarithms of the standard deviations, broadcastable to ``mean``.
        noise: Uniform in [0, 1), float ``[B, n]``.

    Returns:
        Samples ``[B, n]`` and the log-probabilities ``[B]`` of whole rows.

    Reference:
        Haarnoja et al. 2018, "Soft actor-critic", appendix C, equation 21, in the numerically
        stable form ``log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2 x))``.

    Example:
        >>> mean, log_std = torch.full((2, 3), 10.0), torch.zeros(3)
        >>> sample, log_probability = sample_tanh_normal(mean, log_std, torch.rand(2, 3))
        >>> bool((sample.abs() <= 1).all()), log_probability.shape
        (True, torch.Size([2]))
    """
    samples, log_probability = sample_normal(mean, log_std, noise)
    correction = 2.0 * (math.log(2.0) - samples - torch.nn.functional.softplus(-2.0 * samples))
    return torch.tanh(samples), log_probability - correction.sum(-1)
