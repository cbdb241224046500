"""Returns, advantages and targets of value functions, over whole batches of trajectories.

All functions share these conventions:

- The last dimension is time; any dimensions can precede it: ``[B, T]``, ``[T]``.
- ``reward``, ``done`` etc. are those of the step: ``window["_reward"]``, ``window["_done"]``.
- A terminated step has no future. A truncated step bootstraps from ``next_value``, as does the last
  step of a window within an episode.
- ``discount`` is a number from 0 to 1, or a tensor that multiplies the future of each step.
- ``lengths`` (``window.lengths``) is the number of steps of each row, from 0 to T, for rows that
  can end without the end of an episode. Their last step is treated like that of the window, and
  padding becomes zero. Without it, values past the end of an episode do not affect the episode, and
  the results in padding are meaningless.
- Results are constants, without gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlpool.data.rows import kind
from rlpool.errors import SpecError
from rlpool.machine.arguments import real_number, whole_number

Discount = float | Tensor

_DTYPES = (torch.float32, torch.float64)


@torch.no_grad()
def discounted_returns(
    reward: Tensor,
    done: Tensor,
    discount: Discount,
    *,
    next_value: Tensor | None = None,
    terminated: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Sum the discounted rewards from each step to the end of its episode.

    Without ``next_value``, the future after a window or a truncated episode counts as 0.

    Args:
        reward: float32 or float64 ``[..., T]``, the reward of each step.
        done: bool ``[..., T]``, True where a step ended its episode.
        discount: A number from 0 to 1, or a tensor like ``reward``.
        next_value: Like ``reward``: the value of the state after each step. It is used where an
            episode is truncated, and where the window ends.
        terminated: bool ``[..., T]``, True where a step led to a terminal state. Required with
            ``next_value``.
        lengths: int64 ``[...]``: steps of each row, from 0 to T, all by default.

    Returns:
        A new tensor like ``reward``.

    Raises:
        SpecError: If shapes, dtypes or devices differ, or a number is out of range.

    Example:
        >>> reward, done = torch.ones(1, 4), torch.tensor([[False, True, False, False]])
        >>> discounted_returns(reward, done, 0.5)
        tensor([[1.5000, 1.0000, 1.5000, 1.0000]])
    """
    if next_value is not None and terminated is None:
        raise SpecError(
            "next_value without terminated: truncated episodes have a future, terminated ones "
            "do not",
            fix="pass terminated=window['_terminated'], or terminated=done if nothing is truncated",
        )
    if next_value is None:
        check_reward(reward)
        next_value = torch.zeros_like(reward)
    if terminated is None:
        terminated = done
    steps = Steps(reward, done, terminated, next_value, discount, lengths)
    return steps.finished(summed_backwards(steps.reward_and_future_at_ends(), steps.factor))


@torch.no_grad()
def n_step_returns(
    reward: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    discount: Discount,
    n_step: int,
    *,
    lengths: Tensor | None = None,
) -> Tensor:
    """Add up the discounted rewards of ``n_step`` steps and the value of the state after them.

    Fewer steps count where the episode or the window ends earlier. The value is omitted where the
    last step is terminated.

    Args:
        reward: float32 or float64 ``[..., T]``, the reward of each step.
        next_value: Like ``reward``: the value of the state after each step.
        terminated: bool ``[..., T]``, True where a step led to a terminal state.
        done: bool ``[..., T]``, True where a step ended its episode.
        discount: A number from 0 to 1, or a tensor like ``reward``.
        n_step: Maximum number of rewards, at least 1.
        lengths: int64 ``[...]``: steps of each row, from 0 to T, all by default.

    Returns:
        A new tensor like ``reward``.

    Raises:
        SpecError: If shapes, dtypes or devices differ, or a number is out of range.

    Reference:
        Sutton, Barto 2018, "Reinforcement learning: an introduction", equation 7.1.

    Example:
        >>> reward = value = next_value = torch.ones(1, 4)
        >>> terminated = done = torch.tensor([[False, True, False, False]])
        >>> n_step_returns(reward, next_value, terminated, done, 0.5, n_step=2)
        tensor([[1.5000, 1.0000, 1.7500, 1.5000]])
    """
    steps = Steps(reward, done, terminated, next_value, discount, lengths)
    result, terms = steps.reward + steps.future, steps.reward_and_future_at_ends()
    is_end = steps.factor[..., :-1] == 0
    for _ in range(min(whole_number("n_step", n_step, 1), steps.n_timesteps) - 1):
        following = (steps.factor[..., :-1] * result[..., 1:]).masked_fill_(is_end, 0)
        result = terms.clone()
        result[..., :-1] += following
    return steps.finished(result)


@torch.no_grad()
def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    discount: Discount,
    lambda_: float,
    *,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute advantages by generalised advantage estimation.

    The target of the value function is ``advantage + value``.

    Rewards ``[..., T, A]`` of many agents with a common end, ``done`` ``[..., T]``, give advantages
    ``[..., T, A]``; values are per agent, or ``[..., T]`` for all. If agents end separately
    (``done`` is ``[..., T, A]``), transpose all tensors to ``[..., A, T]``: the last dimension is
    time.

    Args:
        reward: float32 or float64 ``[..., T]``, the reward of each step.
        value: Like ``reward``: the value of the state before each step.
        next_value: Like ``reward``: the value of the state after each step, which at the end of an
            episode is not the next step's ``value``.
        terminated: bool ``[..., T]``, True where a step led to a terminal state.
        done: bool ``[..., T]``, True where a step ended its episode.
        discount: A number from 0 to 1, or a tensor like ``reward``.
        lambda_: From 0 (one-step TD errors) to 1 (Monte Carlo returns).
        lengths: int64 ``[...]``: steps of each row, from 0 to T, all by default.

    Returns:
        The advantages, a new tensor like ``reward``.

    Raises:
        SpecError: If shapes, dtypes or devices differ, or a number is out of range.

    Reference:
        Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
        estimation", equation 16.

    Example:
        >>> reward = value = next_value = torch.ones(1, 4)
        >>> terminated = done = torch.tensor([[False, True, False, False]])
        >>> advantage = gae(reward, value, next_value, terminated, done, 0.5, 0.5)
        >>> advantage
        tensor([[0.5000, 0.0000, 0.6250, 0.5000]])
        >>> advantage + value
        tensor([[1.5000, 1.0000, 1.6250, 1.5000]])
    """
    if _have_agents(reward, value, done):
        r, v, n, t, d, factor = (
            _by_agent(each, reward, done)
            for each in (reward, value, next_value, terminated, done, discount)
        )
        if isinstance(lengths, Tensor) and lengths.shape == done.shape[:-1]:
            lengths = lengths.unsqueeze(-1).expand(*lengths.shape, reward.shape[-1])
        return gae(r, v, n, t, d, factor, lambda_, lengths=lengths).movedim(-1, -2)
    steps = Steps(reward, done, terminated, next_value, discount, lengths, value=value)
    difference = steps.reward + steps.future - value
    factor = real_number("lambda_", lambda_, "from 0 to 1") * steps.factor
    return steps.finished(summed_backwards(difference, factor))


class VTrace(NamedTuple):
    """Result of ``vtrace``.

    Both are new tensors ``[..., T]`` of the shape, dtype and device of ``reward``, without a
    gradient. With ``lengths``, they are zero in padding.

    Attributes:
        target: Target of the value function at the state before each step.
        advantage: Weight of the gradient of each action's log-probability.

    Example:
        >>> reward = value = next_value = torch.ones(1, 4)
        >>> terminated = done = torch.tensor([[False, True, False, False]])
        >>> target, advantage = vtrace(
        ...     torch.zeros(1, 4), reward, value, next_value, terminated, done, 0.5
        ... )
        >>> advantage
        tensor([[0.5000, 0.0000, 0.7500, 0.5000]])
    """

    target: Tensor
    advantage: Tensor


@torch.no_grad()
def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    discount: Discount,
    lambda_: float = 1.0,
    *,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    lengths: Tensor | None = None,
) -> VTrace:
    """Compute V-trace: off-policy targets from the actions of a behaviour policy.

    Args:
        log_ratio: Like ``reward``: log-probability of each action under the learning policy, minus
            that under the behaviour policy.
        reward: float32 or float64 ``[..., T]``, the reward of each step.
        value: Like ``reward``: the value of the state before each step.
        next_value: Like ``reward``: the value of the state after each step.
        terminated: bool ``[..., T]``, True where a step led to a terminal state.
        done: bool ``[..., T]``, True where a step ended its episode.
        discount: A number from 0 to 1, or a tensor like ``reward``.
        lambda_: From 0 to 1; multiplies the ratios of the traces.
        rho_clip: Upper limit of the ratios of TD errors, above 0, ``float("inf")`` for none. It
            determines the policy whose value function is learned.
        c_clip: Upper limit of the ratios of the traces, above 0.
        lengths: int64 ``[...]``: steps of each row, from 0 to T, all by default.

    Returns:
        Target and advantage, new tensors like ``reward``.

    Raises:
        SpecError: If shapes, dtypes or devices differ, or a number is out of range.

    Reference:
        Espeholt et al. 2018, "IMPALA: scalable distributed deep-RL with importance weighted
        actor-learner architectures", equation 1, remark 2 and section 4.2.

    Example:
        >>> reward = value = next_value = torch.ones(1, 4)
        >>> terminated = done = torch.tensor([[False, True, False, False]])
        >>> same_policy = torch.zeros(1, 4)
        >>> vtrace(same_policy, reward, value, next_value, terminated, done, 0.5).target
        tensor([[1.5000, 1.0000, 1.7500, 1.5000]])
    """
    given = {"value": value, "log_ratio": log_ratio}
    steps = Steps(reward, done, terminated, next_value, discount, lengths, **given)
    ratio = log_ratio.exp().clamp(max=torch.finfo(log_ratio.dtype).max)  # times 0 it is 0
    rho = ratio.clamp(max=real_number("rho_clip", rho_clip, "above 0"))
    decay = real_number("lambda_", lambda_, "from 0 to 1")
    cut = ratio.clamp(max=real_number("c_clip", c_clip, "above 0")) * decay
    difference = rho * (steps.reward + steps.future - value)
    correction = steps.finished(summed_backwards(difference, cut * steps.factor))
    target = value + correction
    # The next step's target minus its value, 0 at the end of an episode.
    following = torch.zeros_like(correction)
    following[..., :-1] = steps.factor[..., :-1] * correction[..., 1:]
    following.masked_fill_(steps.factor == 0, 0)
    advantage = rho * (steps.reward + steps.future + following - value)
    return VTrace(steps.finished(target), steps.finished(advantage))


def _have_agents(reward: Any, value: Any, done: Any) -> bool:
    """Whether rewards have an agent dimension after time; a single agent is detected by values."""
    if not all(isinstance(each, Tensor) for each in (reward, value, done)):
        return False
    has_more = reward.ndim > 1 and reward.shape[:-1] == done.shape
    return bool(has_more and (reward.shape[-1] > 1 or value.shape == reward.shape))


def _by_agent(value: Any, reward: Tensor, done: Tensor) -> Any:
    """Transpose values ``[..., T, A]``, or ``[..., T]`` for all agents, to ``[..., A, T]``."""
    if isinstance(value, Tensor) and value.shape == done.shape:
        value = value.unsqueeze(-1).expand(reward.shape)
    is_like = isinstance(value, Tensor) and value.ndim == reward.ndim
    return value.movedim(-1, -2) if is_like else value


# Checks and sums ----------------------------------------------------------------------------------


class Steps:
    """The steps of a window, checked.

    Args:
        reward: As in ``gae``, like the other arguments.
        **like_reward: Further tensors that have to be like ``reward``.

    Attributes:
        n_timesteps: T.
        reward: As given.
        factor: Factor of the sum from the next step on: the discount, 0 where an episode or a row
            ends.
        future: Discounted value of the state after each step, 0 where it is terminated.
    """

    def __init__(
        self,
        reward: Tensor,
        done: Tensor,
        terminated: Tensor,
        next_value: Tensor,
        discount: Discount,
        lengths: Tensor | None,
        **like_reward: Tensor,
    ) -> None:
        check_reward(reward)
        like_reward["next_value"] = next_value
        if isinstance(discount, Tensor) and discount.ndim:
            like_reward["discount"] = discount
        else:
            discount = real_number("discount", discount, "from 0 to 1")
        for name, tensor in like_reward.items():
            _check_like(name, tensor, reward, reward.dtype)
        _check_like("done", done, reward, torch.bool)
        _check_like("terminated", terminated, reward, torch.bool)
        done = done | terminated
        self.reward, self.n_timesteps = reward, reward.shape[-1]
        self._is_padding: Tensor | None = None
        if lengths is not None:
            self._is_padding, is_last = _ends_of_rows(lengths, reward)
            done = done | is_last
        self.factor = torch.zeros_like(reward)
        self.factor += discount
        self.factor.masked_fill_(done, 0)
        self.factor[..., -1:] = 0
        self.future = (discount * next_value).masked_fill_(terminated, 0)

    def reward_and_future_at_ends(self) -> Tensor:
        """Return the rewards, plus the future where a sum of rewards ends."""
        return self.reward + self.future.masked_fill(self.factor != 0, 0)

    def finished(self, result: Tensor) -> Tensor:
        """Return a result with zeros in the padding, if ``lengths`` were given."""
        if self._is_padding is None:
            return result
        return result.masked_fill_(self._is_padding, 0)


def summed_backwards(terms: Tensor, factor: Tensor) -> Tensor:
    """Compute ``y[t] = terms[t] + factor[t] * y[t + 1]``; a factor of 0 also blocks NaN.

    Args:
        terms: ``[..., T]``.
        factor: Like ``terms``, 0 in the last step.
    """
    total, totals = torch.zeros_like(terms[..., 0]), list[Tensor]()
    steps = zip(terms.unbind(-1), factor.unbind(-1), (factor == 0).unbind(-1), strict=True)
    for term, multiplier, is_end in reversed(list(steps)):
        total = torch.addcmul(term, multiplier, total.masked_fill(is_end, 0))
        totals.append(total)
    return torch.stack(totals[::-1], -1)


def check_reward(reward: object) -> None:
    """Refuse rewards that are not float32 or float64 ``[..., T]``."""
    if not isinstance(reward, Tensor) or reward.dtype not in _DTYPES or not reward.ndim:
        message = f"reward is {kind(reward)}, not float32 or float64 [..., T]"
        raise SpecError(message, fix="pass tensors such as window['_reward'], converted by float()")


def _check_like(name: str, tensor: Any, reward: Tensor, dtype: torch.dtype) -> None:
    """Refuse a tensor unless it has the shape and device of ``reward``, and ``dtype``."""
    is_like = isinstance(tensor, Tensor) and tensor.shape == reward.shape
    if not is_like or tensor.dtype != dtype or tensor.device != reward.device:
        wanted = f"{str(dtype).removeprefix('torch.')} {list(reward.shape)} on {reward.device}"
        message = f"{name} is {kind(tensor)}, but should be {wanted}"
        raise SpecError(message, fix="give one element per step, like reward")


def _ends_of_rows(lengths: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of the padding and of the last steps of rows, bool ``[..., T]``."""
    is_int = isinstance(lengths, Tensor) and lengths.dtype == torch.int64
    if not is_int or lengths.shape != reward.shape[:-1]:
        message = f"lengths is {kind(lengths)}, reward is {kind(reward)}"
        raise SpecError(message, fix=f"give an int64 {list(reward.shape[:-1])}")
    n_timesteps = reward.shape[-1]
    if lengths.device.type == "cpu" and lengths.numel():  # else reading would synchronise
        low, high = map(int, lengths.aminmax())
        if low < 0 or high > n_timesteps:
            message = f"lengths go from {low} to {high}, rows have {n_timesteps} steps"
            raise SpecError(message, fix="pass the number of valid (unpadded) steps per row")
    step = torch.arange(n_timesteps, device=reward.device)
    last = lengths.to(reward.device).unsqueeze(-1) - 1
    return step > last, step == last
