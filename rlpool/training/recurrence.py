"""Sums along time that stop where an episode ends, for all steps at once.

All returns, advantages and targets are such sums::

    y[t] = x[t] + factor[t] * y[t + 1]        factor is 0 at ends of episodes

They are computed for all steps at once: what *n* steps add up to, and how *n* more follow, gives
*2n* steps, so T steps take log2(T) rounds. A factor of 0 lets nothing through, not even NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlpool.data.rows import kind
from rlpool.errors import SpecError
from rlpool.machine.arguments import real_number

Discount = float | Tensor

_DTYPES = (torch.float32, torch.float64)


class Steps:
    """The steps of a window, checked.

    Args:
        reward: See ``gae``, and so on.
        **like_reward: Further tensors that have to be like ``reward``.

    Attributes:
        n_timesteps: T.
        reward: As given.
        factor: What the sum from the next step on is multiplied with: the discount, 0 where an
            episode or a row ends.
        future: Discounted value of what each step led to, 0 where it is terminated.
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
        """The rewards, with what follows them where a sum of rewards ends."""
        return self.reward + self.future.masked_fill(self.factor != 0, 0)

    def finished(self, result: Tensor) -> Tensor:
        """A result, zero in the padding if it is known where that is."""
        if self._is_padding is None:
            return result
        return result.masked_fill_(self._is_padding, 0)


class Sum(NamedTuple):
    """What some steps from each step on add up to.

    Attributes:
        n: How many steps.
        total: ``[..., T]``: what they add up to, of those within the window.
        factor: ``[..., T - n]``: what is multiplied with all that follows them.
    """

    n: int
    total: Tensor
    factor: Tensor


def then(first: Sum, second: Sum) -> Sum:
    """Some steps, and those that follow them."""
    n, n_timesteps = first.n + second.n, first.total.shape[-1]
    is_end = first.factor == 0  # 0 * NaN is NaN
    following = (first.factor * second.total[..., first.n :]).masked_fill_(is_end, 0)
    total = first.total.clone()
    total[..., : n_timesteps - first.n] += following
    n_left = max(0, n_timesteps - n)
    factor = first.factor[..., :n_left] * second.factor[..., first.n :]
    return Sum(n, total, factor.masked_fill_(is_end[..., :n_left], 0))


def repeated(one: Sum, n: int) -> Sum:
    """The sum of ``n`` steps, from 1, in as many rounds as ``n`` has binary digits."""
    result = None
    while True:
        if n & 1:
            result = one if result is None else then(result, one)
        n >>= 1
        if not n and result is not None:
            return result
        one = then(one, one)


def over_all_steps(terms: Tensor, factor: Tensor) -> Tensor:
    """``y[t] = terms[t] + factor[t] * y[t + 1]`` to the end of the window."""
    n_timesteps = terms.shape[-1]
    if n_timesteps < 2:
        return terms.clone()
    # A power of two takes the fewest rounds; past the end there is nothing.
    return repeated(Sum(1, terms, factor[..., :-1]), 1 << (n_timesteps - 1).bit_length()).total


def check_reward(reward: object) -> None:
    """Refuse rewards that are no float32 or float64 ``[..., T]``."""
    if not isinstance(reward, Tensor) or reward.dtype not in _DTYPES or not reward.ndim:
        fix = "pass tensors whose last dimension is time, such as window['_reward']"
        if isinstance(reward, Tensor) and reward.ndim:
            fix = "convert it: reward.float()"
        raise SpecError(f"reward is {kind(reward)}, not float32 or float64 [..., T]", fix=fix)


def _check_like(name: str, tensor: object, reward: Tensor, dtype: torch.dtype) -> None:
    """Refuse a tensor that has another shape, dtype or device than it should have."""
    if not isinstance(tensor, Tensor) or tensor.shape != reward.shape:
        what = f"{name} is {kind(tensor)}, reward is {kind(reward)}"
        raise SpecError(what, fix="give one element per step: squeeze(-1) drops a last dimension")
    if tensor.dtype != dtype:
        convert = {torch.bool: "bool()", torch.float32: "float()"}.get(dtype, "double()")
        what = f"{name} has dtype {tensor.dtype}, {dtype} was expected"
        raise SpecError(what, fix=f"convert it: {name}.{convert}")
    if tensor.device != reward.device:
        what = f"{name} is on {tensor.device}, reward on {reward.device}"
        raise SpecError(what, fix="move both to the same device")


def _ends_of_rows(lengths: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
    """Where padding is, and the last steps of rows: bool ``[..., T]``."""
    is_int = isinstance(lengths, Tensor) and lengths.dtype == torch.int64
    if not is_int or lengths.shape != reward.shape[:-1]:
        what = f"lengths is {kind(lengths)}, reward is {kind(reward)}"
        raise SpecError(what, fix=f"give an int64 {list(reward.shape[:-1])}")
    n_timesteps = reward.shape[-1]
    if lengths.device.type == "cpu" and lengths.numel():  # reading others would wait for a device
        low, high = map(int, lengths.aminmax())
        if low < 0 or high > n_timesteps:
            what = f"lengths go from {low} to {high}, rows have {n_timesteps} steps"
            raise SpecError(what, fix="give how many steps of each row are no padding")
    step = torch.arange(n_timesteps, device=reward.device)
    last = lengths.to(reward.device).unsqueeze(-1) - 1
    return step > last, step == last
