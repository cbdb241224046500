"""Actions from an agent's noise: samples and their log-probabilities.

A stochastic agent declares ``n_noise`` and finds that many uniform numbers per row in
``observation["noise"]``. These functions turn them into samples without touching any global
random state, with a fraction of the operations of ``torch.distributions``.

Computations and results are float32, or float64 if an argument is float64; half precisions, such as
the outputs of networks under ``torch.autocast``, are widened first. Shapes that do not match are
refused, not broadcast. Do not convert the noise to half precision: only 256 (bfloat16) or 2,048
(float16) distinct values, and as many distinct samples, would be left.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlpool.data.rows import kind
from rlpool.errors import SpecError

_WIDE = (torch.float32, torch.float64)
_HALF_STEPS = {
    dtype: torch.finfo(dtype).eps / 2.0 for dtype in (*_WIDE, torch.float16, torch.bfloat16)
}
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def sample_categorical(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Sample from a categorical distribution by inverting its cumulative distribution.

    Args:
        logits: Unnormalised log-probabilities, float ``[B, n]``.
        noise: Uniform in [0, 1), float ``[B]`` or ``[B, 1]``, such as ``observation["noise"]`` of
            an agent with ``n_noise = 1``.

    Returns:
        Samples int64 ``[B]`` from 0 to n - 1, and their log-probabilities ``[B]``, differentiable
        in ``logits``: float64 if ``logits`` are, else float32.

    Raises:
        SpecError: If shapes do not match these, or ``noise`` is not float.

    Example:
        >>> logits = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
        >>> sample_categorical(logits, noise=torch.tensor([0.2, 0.3]))
        (tensor([0, 1]), tensor([-1.3863, -0.2877]))
    """
    # In line: this runs once per step.
    fits = isinstance(logits, Tensor) and isinstance(noise, Tensor) and logits.ndim == 2
    if not fits or noise.shape not in (logits.shape[:1], (*logits.shape[:1], 1)):
        raise _unlike("give logits [B, n] and noise [B]", logits=logits, noise=noise)
    if logits.dtype not in _WIDE or noise.dtype not in _WIDE:
        logits, noise = _widened(logits), _widened_noise(noise)
    log_probabilities = torch.log_softmax(logits, -1)
    cumulative = log_probabilities.detach().exp().cumsum(-1)
    # Scaled by the rounded sum, so that a category of probability 0 is never drawn.
    threshold = noise.reshape(-1, 1) * cumulative[:, -1:]
    samples = (cumulative[:, :-1] <= threshold).sum(-1)
    return samples, log_probabilities.gather(-1, samples.unsqueeze(-1)).squeeze(-1)


def categorical_log_probability(logits: Tensor, action: Tensor) -> Tensor:
    """Return the log-probability of actions under a categorical distribution.

    Args:
        logits: Unnormalised log-probabilities, float ``[..., n]``.
        action: Ints ``[...]`` from 0 to n - 1.

    Returns:
        Log-probabilities ``[...]``, differentiable in ``logits``: float64 if ``logits`` are, else
        float32.

    Raises:
        SpecError: If shapes do not match these, or ``action`` is not of an integer dtype.

    Example:
        >>> logits = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
        >>> categorical_log_probability(logits, torch.tensor([0, 1])).exp()
        tensor([0.2500, 0.7500])
    """
    fits = isinstance(logits, Tensor) and isinstance(action, Tensor) and logits.ndim > 0
    fits = fits and action.shape == logits.shape[:-1] and action.dtype in _INTS
    if not fits:
        fix = "give logits [B, n] and an int64 action [B]"
        raise _unlike(fix, logits=logits, action=action)
    places = action.long().unsqueeze(-1)
    return torch.log_softmax(_widened(logits), -1).gather(-1, places).squeeze(-1)


def sample_normal(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Sample independent normal variables by inverting their cumulative distribution.

    Args:
        mean: Means, float ``[B, n]``.
        log_std: Natural logarithms of the standard deviations, float, broadcastable to ``mean``.
        noise: Uniform in [0, 1), float ``[B, n]``, such as ``observation["noise"]`` of an agent
            with ``n_noise = n``.

    Returns:
        Samples ``[B, n]``, and the log-densities ``[B]`` of whole rows. Both are differentiable
        in ``mean`` and ``log_std``; float64 if an argument is, else float32.

    Raises:
        SpecError: If shapes do not match these, or ``noise`` is not float.

    Example:
        >>> mean, log_std = torch.tensor([[1.0]]), torch.tensor([0.0])
        >>> sample, log_probability = sample_normal(mean, log_std, noise=torch.tensor([[0.5]]))
        >>> sample, log_probability.exp()
        (tensor([[1.0000]]), tensor([0.3989]))
    """
    _check_rows(mean, log_std, "noise", noise)
    # Half the spacing of the noise moves [0, 1) into the middle of the open interval.
    step = _HALF_STEPS.get(noise.dtype, 0.0)
    if not (mean.dtype in _WIDE and log_std.dtype in _WIDE and noise.dtype in _WIDE):
        mean, log_std, noise = _widened(mean), _widened(log_std), _widened_noise(noise)
    standard = math.sqrt(2.0) * torch.erfinv((2.0 * noise - 1.0) + step)
    samples = mean + log_std.exp() * standard
    return samples, _log_density(mean, log_std, samples)


def normal_log_probability(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Return the log-density of rows of actions under independent normal distributions.

    Args:
        mean: Means, float ``[B, n]``; further dimensions may come first.
        log_std: Natural logarithms of the standard deviations, float, broadcastable to ``mean``.
        action: Float, of the shape of ``mean``.

    Returns:
        Log-densities ``[B]``, differentiable in all three; float64 if an argument is, else
        float32.

    Raises:
        SpecError: If shapes do not match these.

    Example:
        >>> mean, log_std = torch.zeros(2, 1), torch.zeros(1)
        >>> normal_log_probability(mean, log_std, torch.tensor([[0.0], [1.0]])).exp()
        tensor([0.3989, 0.2420])
    """
    _check_rows(mean, log_std, "action", action)
    return _log_density(_widened(mean), _widened(log_std), _widened(action))


def sample_tanh_normal(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Sample normal variables squashed into (-1, 1), as in soft actor-critic.

    Args:
        mean: Means before the squashing, float ``[B, n]``.
        log_std: Natural logarithms of the standard deviations before the squashing, float,
            broadcastable to ``mean``.
        noise: Uniform in [0, 1), float ``[B, n]``, such as ``observation["noise"]`` of an agent
            with ``n_noise = n``.

    Returns:
        Samples ``[B, n]`` from -1 to 1 (rounding can produce the bounds), and the log-densities
        ``[B]`` of whole rows. Both are differentiable in ``mean`` and ``log_std``; float64 if an
        argument is, else float32.

    Raises:
        SpecError: If shapes do not match these, or ``noise`` is not float.

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


def _log_density(mean: Tensor, log_std: Tensor, values: Tensor) -> Tensor:
    standard = (values - mean) * (-log_std).exp()
    terms = -0.5 * standard * standard - log_std - _LOG_SQRT_2PI
    return terms.expand_as(standard).sum(-1)


# Precision ----------------------------------------------------------------------------------------


def _widened(tensor: Tensor) -> Tensor:
    """Convert half precisions to float32."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _widened_noise(noise: Tensor) -> Tensor:
    """Widen noise; values that half precision rounded up to 1 are clamped below 1."""
    if not noise.is_floating_point():
        raise _unlike("pass observation['noise'], float and uniform in [0, 1)", noise=noise)
    if noise.dtype in _WIDE:
        return noise
    return noise.float().clamp(max=1.0 - torch.finfo(noise.dtype).eps / 2.0)


# Shapes -------------------------------------------------------------------------------------------


def _unlike(fix: str, **given: Any) -> SpecError:
    return SpecError(", ".join(f"{name} is {kind(v)}" for name, v in given.items()), fix=fix)


def _check_rows(mean: Any, log_std: Any, name: str, values: Any) -> None:
    """Refuse values not of the shape of ``mean``, and a ``log_std`` that does not broadcast."""
    fits = isinstance(mean, Tensor) and isinstance(values, Tensor) and isinstance(log_std, Tensor)
    fits = fits and mean.ndim >= 2 and values.shape == mean.shape
    if not fits or not (
        log_std.shape in (mean.shape, mean.shape[1:]) or _broadcasts(log_std.shape, mean.shape)
    ):
        fix = f"give mean and {name} [B, n], and log_std broadcastable to mean"
        raise _unlike(fix, mean=mean, log_std=log_std, **{name: values})


def _broadcasts(shape: torch.Size, wanted: torch.Size) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, most) for size, most in sizes)
