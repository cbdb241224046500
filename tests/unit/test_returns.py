"""Returns and advantages: compared with plain loops, across ends of episodes and of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import booleans, integers, sampled_from
from torch import Tensor

from rlpool import SpecError, discounted_returns, gae, n_step_returns, vtrace

LAMBDA = 0.8


class Window:
    """Random steps in which episodes end anywhere, terminated or truncated."""

    def __init__(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        draw = torch.Generator().manual_seed(seed)
        drawn = torch.randn(4, *shape, generator=draw, dtype=dtype)
        self.reward, self.value, self.next_value, self.log_ratio = drawn
        self.done = torch.rand(shape, generator=draw) < 0.2
        self.terminated = self.done & (torch.rand(shape, generator=draw) < 0.5)
        self.lengths = torch.randint(0, shape[-1] + 1, shape[:-1], generator=draw)
        self.discount = torch.rand(shape if seed % 2 else (), generator=draw, dtype=dtype)

    def changed(self, **tensors: Tensor) -> Window:
        changed = Window(1, 1)
        changed.__dict__ = {**vars(self), **tensors}
        return changed


def discounted(w: Window, **options: Any) -> Tensor:
    ends = {"next_value": w.next_value, "terminated": w.terminated}
    return discounted_returns(w.reward, w.done, w.discount, **ends, **options)


def n_step(w: Window, **options: Any) -> Tensor:
    return n_step_returns(w.reward, w.next_value, w.terminated, w.done, w.discount, 3, **options)


def advantage(w: Window, **options: Any) -> Tensor:
    ends = w.terminated, w.done
    return gae(w.reward, w.value, w.next_value, *ends, w.discount, LAMBDA, **options)


def traces(w: Window, **options: Any) -> Tensor:
    values = w.reward, w.value, w.next_value
    given = values, (w.terminated, w.done), (w.discount, LAMBDA)
    clips = {"rho_clip": 1.2, "c_clip": 0.9}
    return torch.stack(vtrace(w.log_ratio, *(x for g in given for x in g), **clips, **options))


def plain_loop(w: Window, row: int, kind: str, length: int) -> Any:
    """Compute the same for one row, step by step."""
    discount = w.discount.expand_as(w.reward)
    columns = w.reward, w.value, w.next_value, w.terminated, w.done, discount, w.log_ratio.exp()
    each = (column[row, :length].tolist() for column in columns)
    results: dict[int, Any] = {}
    after = above = None
    for t, *step in reversed([*zip(range(length), *each, strict=True)]):
        reward, value, next_value, terminated, done, discount, ratio = step
        ends = done or t == length - 1
        future = 0.0 if terminated else discount * next_value
        difference = reward + future - value
        if kind == "discounted":
            results[t] = reward + (future if ends else discount * after)
        elif kind == "n_step":  # after 1, 2 and 3 steps
            ahead = [future] * 3 if ends else [future, discount * after[0], discount * after[1]]
            results[t] = [reward + later for later in ahead]
        elif kind == "advantage":
            results[t] = difference + (0 if ends else discount * LAMBDA * after)
        else:
            rho, cut = min(1.2, ratio), LAMBDA * min(0.9, ratio)
            ahead = 0 if ends else after[0] - above
            target = value + rho * difference + discount * cut * ahead
            results[t] = target, rho * (difference + discount * ahead)
        after, above = results[t], value
    return {t: each[2] for t, each in results.items()} if kind == "n_step" else results


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "discounted": discounted,
    "n_step": n_step,
    "advantage": advantage,
    "traces": traces,
}
every_function = pytest.mark.parametrize("kind", FUNCTIONS)


@given(
    kind=sampled_from(sorted(FUNCTIONS)),
    n_timesteps=integers(1, 40),
    has_lengths=booleans(),
    seed=integers(0, 2**32),
)
def test_results_equal_a_plain_loop(
    kind: str, n_timesteps: int, has_lengths: bool, seed: int
) -> None:
    w = Window(5, n_timesteps, seed=seed)
    got = FUNCTIONS[kind](w, **({"lengths": w.lengths} if has_lengths else {}))
    expected = torch.zeros_like(got)
    for row in range(5):
        length = int(w.lengths[row]) if has_lengths else n_timesteps
        for t, result in plain_loop(w, row, kind, length).items():
            expected[..., row, t] = torch.tensor(result, dtype=torch.float64)
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


@every_function
def test_any_leading_shape_and_float32_give_the_same_constants(kind: str) -> None:
    deep = Window(2, 3, 20)
    got = FUNCTIONS[kind](deep)
    tensors = vars(deep).items()
    row = deep.changed(**{k: t[1, 2] for k, t in tensors if t.ndim == 3})
    assert torch.allclose(FUNCTIONS[kind](row), got[..., 1, 2, :], rtol=1e-12)
    values = {k: t.float().requires_grad_() for k, t in tensors if t.dtype == torch.float64}
    single = FUNCTIONS[kind](deep.changed(**values))
    assert (single.dtype, single.requires_grad) == (torch.float32, False)
    assert torch.allclose(single.double(), got, rtol=1e-4, atol=1e-5)


@every_function
def test_nothing_propagates_across_the_end_of_an_episode(kind: str) -> None:
    clean = Window(3, 12)
    clean.done[:, 4], clean.terminated[:, 4] = True, torch.tensor([True, False, False])
    dirty = clean.changed(**{k: t.clone() for k, t in vars(clean).items()})
    for tensor in (dirty.reward, dirty.value, dirty.next_value, dirty.log_ratio):
        tensor[:, 5:] = float("nan")
    got, expected = FUNCTIONS[kind](dirty), FUNCTIONS[kind](clean)
    assert torch.equal(got[..., :5], expected[..., :5])
    # Where a row stops within an episode, its length marks the end.
    clean.done[:, 4] = dirty.done[:, 4] = clean.terminated[:, 4] = dirty.terminated[:, 4] = False
    lengths = torch.tensor([5, 5, 0])
    got = FUNCTIONS[kind](dirty, lengths=lengths)
    assert torch.equal(got, FUNCTIONS[kind](clean, lengths=lengths))
    assert not got[..., 5:].any()
    assert not got[..., 2, :].any()


def test_factors_of_the_next_episode_do_not_affect_the_previous_one() -> None:
    # Without clipping, factors of later terms may become infinite, or be infinite or NaN.
    one, done = torch.ones(1, 6), torch.tensor([[False, True, False, False, False, False]])
    for garbage in (30.0, 300.0, float("nan")):
        ratio = torch.zeros(1, 6)
        ratio[:, 2:] = garbage
        clips = {"rho_clip": float("inf"), "c_clip": float("inf")}
        both = vtrace(ratio, one, one, one, done, done, 0.5, **clips)
        assert both.target[0, :2].tolist() == [1.5, 1.0]
        assert both.advantage[0, :2].tolist() == [0.5, 0.0]
    discount = torch.full((1, 6), 0.5)
    discount[:, 2:] = float("nan")
    assert gae(one, one, one, done, done, discount, 0.5)[0, :2].tolist() == [0.5, 0.0]


def test_nothing_follows_the_end_of_a_row_without_next_values() -> None:
    reward, done = torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool)
    assert discounted_returns(reward, done, 0.5).tolist() == [[1.75, 1.5, 1.0]]


def test_unclipped_ratios_multiplied_by_zero_traces_are_finite() -> None:
    reward, value = torch.arange(4.0)[None], torch.ones(1, 4)
    ratio = torch.tensor([[1.0, 100.0, -200.0, 1e4]])  # the exponentials of two are infinite
    ends = torch.tensor([[False, True, False, False]])
    given = ratio, reward, value, value, ends, ends, 0.9
    cut, uncut = (vtrace(*given, 0.0, c_clip=clip) for clip in (1.0, float("inf")))
    assert torch.equal(torch.stack(cut), torch.stack(uncut))
    for lambda_, c_clip, rho_clip in (1.0, 100.0, 1.0), (0.0, float("inf"), 2.0):
        both = vtrace(*given, lambda_, c_clip=c_clip, rho_clip=rho_clip)
        assert torch.stack(both).isfinite().all()


WRONG: list[tuple[str, Any]] = [
    *(("value", torch.zeros(2, 6, 1)), ("value", torch.zeros(2, 6).double())),
    *(("next_value", None), ("done", torch.zeros(2, 6)), ("reward", torch.tensor(1.0))),
    *(("discount", 1.5), ("discount", torch.full((6,), 0.9)), ("lambda_", float("nan"))),
    *(("lengths", torch.zeros(6, dtype=torch.int64)), ("lengths", torch.tensor([3, 9]))),
]


def test_invalid_input_is_refused_by_name() -> None:
    flags = {key: torch.zeros(2, 6, dtype=torch.bool) for key in ("terminated", "done")}
    given: dict[str, Any] = {key: torch.zeros(2, 6) for key in ("reward", "value", "next_value")}
    given |= {**flags, "discount": 0.9, "lambda_": 0.9}
    for name, value in WRONG:
        with pytest.raises(SpecError, match=f"{name} (is|has|should|go)"):
            gae(**{**given, name: value})
    reward, done = given["reward"], given["done"]
    with pytest.raises(SpecError, match="terminated"):
        discounted_returns(reward, done, 0.9, next_value=reward)
    with pytest.raises(SpecError, match="n_step"):
        n_step_returns(reward, reward, done, done, 0.9, 0)
