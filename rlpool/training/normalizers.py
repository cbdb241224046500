"""Normalisation of observations and rewards by running statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlpool.data.rows import instance, kind
from rlpool.errors import SpecError
from rlpool.machine.arguments import real_number, whole_number

_EPSILON = 1e-8
"""Added to variances, so that constant values are not divided by zero."""


class RunningNormalizer(nn.Module):
    """Normalises values by the mean and variance of all values passed to ``update``.

    In an agent, its statistics are part of the agent's ``state_dict()``: workers use those of the
    learner at the last ``batcher.update``, and evaluations those of the agent.

    Args:
        shape: Shape of one value, such as ``env.observation_space.shape``.
        clip: Normalised values are clipped to ``[-clip, clip]``.

    Attributes:
        mean: float64 ``[*shape]``, a buffer; 0 at first.
        variance: float64 ``[*shape]``, a buffer: population variance; 1 at first.
        count: float64 ``[]``, a buffer: number of values seen.

    Raises:
        SpecError: If a size is not an int of at least 0, or ``clip`` is not above 0.

    Example:
        >>> normalizer = RunningNormalizer(2)
        >>> normalizer.update(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))
        >>> normalizer(torch.tensor([2.0, 30.0]))
        tensor([0., 1.])
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: int | Sequence[int], clip: float = 10.0) -> None:
        super().__init__()
        sizes = [shape] if isinstance(shape, int) else list(shape)
        self._shape = torch.Size(whole_number("shape", size, 0) for size in sizes)
        self._clip = real_number("clip", clip, "above 0")
        self.register_buffer("mean", torch.zeros(self._shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(self._shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        """Normalise values.

        Args:
            values: ``[..., *shape]``.

        Returns:
            A new tensor of the same shape and dtype, float32 for integers.

        Raises:
            SpecError: If the shape does not match.
        """
        self._check("values", values)
        if not values.is_floating_point():
            values = values.float()
        deviation = (self.variance + _EPSILON).sqrt().to(values.dtype)
        return ((values - self.mean.to(values.dtype)) / deviation).clamp(-self._clip, self._clip)

    @torch.no_grad()
    def update(self, batch: Tensor, mask: Tensor | None = None) -> None:
        """Add values to the statistics; does nothing after ``eval()``.

        Args:
            batch: ``[..., *shape]``.
            mask: ``[...]``, bool or zeros and ones: the values to count, such as
                ``episodes.mask()``. By default all.

        Raises:
            SpecError: If a shape does not match, or values are not finite. Nothing has changed.

        Reference:
            Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
            sample variances".
        """
        self._check("batch", batch)
        values = batch.reshape(-1, *self._shape)
        if mask is not None:
            leading = batch.shape[: batch.ndim - len(self._shape)]
            if instance(mask, Tensor, "mask").shape != leading:
                fix = f"one number for each value: {list(leading)}"
                raise SpecError(f"mask is {kind(mask)}, batch is {kind(batch)}", fix=fix)
            values = values[mask.reshape(-1).bool()]
        if not self.training or not len(values):
            return
        variance, mean = torch.var_mean(values.double(), 0, correction=0)
        if not variance.isfinite().all():
            fix = "exclude padding with mask, and find their source with check_env"
            raise SpecError("batch has values that are not finite", fix=fix)
        n, count, difference = len(values), self.count, mean - self.mean
        squares = self.variance * count + variance * n + difference**2 * (count * n / (count + n))
        self.variance.copy_(squares / (count + n))
        self.mean += difference * (n / (count + n))
        self.count += n

    def _check(self, name: str, values: Tensor) -> None:
        n = instance(values, Tensor, name).ndim - len(self._shape)
        if n < 0 or values.shape[n:] != self._shape:
            fix = f"pass values of shape {list(self._shape)}, after any number of dimensions"
            raise SpecError(f"{name} is {kind(values)}", fix=fix)


class RewardNormalizer(nn.Module):
    """Divides rewards by the running standard deviation of the lanes' discounted returns.

    For windows of a ``Batcher`` whose lanes restart (``GymEnvInf``). A lane's return at a step is
    the sum of its episode's rewards so far, each discounted by the steps since. It continues from
    one window to the next.

    Args:
        n_lanes: Rows of a window.
        discount: From 0 to 1.
        clip: Normalised rewards are clipped to ``[-clip, clip]``.

    Attributes:
        discounted_return: float64 ``[n_lanes]``, a buffer: each lane's return so far; 0 where an
            episode begins. Not part of ``state_dict()``, since a resumed ``Batcher`` begins new
            episodes. Call ``discounted_return.zero_()`` after a ``reset``.
        statistics: The ``RunningNormalizer`` of these returns.

    Raises:
        SpecError: If a number is out of range.

    Reference:
        Engstrom et al. 2020, "Implementation matters in deep policy gradients", section 3.

    Example:
        >>> normalizer = RewardNormalizer(n_lanes=1, discount=0.5)
        >>> reward, done = torch.tensor([[4.0, 2.0, 4.0]]), torch.tensor([[False, True, False]])
        >>> normalizer.update(reward, done)  # returns of 4, 4 and, after an end, 4
        >>> normalizer.discounted_return
        tensor([4.], dtype=torch.float64)
    """

    discounted_return: Tensor

    def __init__(self, n_lanes: int, discount: float, clip: float = 10.0) -> None:
        super().__init__()
        n_lanes = whole_number("n_lanes", n_lanes, 1)
        self._discount = real_number("discount", discount, "from 0 to 1")
        self._clip = real_number("clip", clip, "above 0")
        self.statistics = RunningNormalizer(())
        zeros = torch.zeros(n_lanes, dtype=torch.float64)
        self.register_buffer("discounted_return", zeros, persistent=False)

    def forward(self, reward: Tensor) -> Tensor:
        """Return normalised rewards, a new tensor of the shape and dtype of ``reward``."""
        deviation = (self.statistics.variance + _EPSILON).sqrt().to(reward.dtype)
        return (reward / deviation).clamp(-self._clip, self._clip)

    @torch.no_grad()
    def update(self, reward: Tensor, done: Tensor) -> None:
        """Add the next window to the statistics; does nothing after ``eval()``.

        Args:
            reward: ``[n_lanes, T]``, the reward of each step (``_reward``).
            done: bool ``[n_lanes, T]``, True where a step ended its episode (``_done``).

        Raises:
            SpecError: If a shape does not match, or rewards are not finite. Nothing has changed.
        """
        n_lanes = len(self.discounted_return)
        for name, tensor in (("reward", reward), ("done", done)):
            if tensor.ndim != 2 or len(tensor) != n_lanes or tensor.shape != reward.shape:
                fix = f"pass windows of {n_lanes} lanes: [{n_lanes}, T]"
                raise SpecError(f"{name} is {kind(tensor)}", fix=fix)
        if not self.training:
            return
        earned, returns = self.discounted_return, list[Tensor]()
        for step in range(reward.shape[1]):
            earned = earned * self._discount + reward[:, step]
            returns.append(earned)
            earned = earned.masked_fill(done[:, step], 0.0)
        if returns:
            self.statistics.update(torch.stack(returns))
        self.discounted_return.copy_(earned)
