"""Normalisers track the moments of all values, regardless of batching."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlpool import Batcher, GymEnvInf, RewardNormalizer, RunningNormalizer, SpecError

from support.agents import ConstantAgent
from support.envs import CountingEnv

NAN = float("nan")


def test_moments_do_not_depend_on_batching() -> None:
    # Far from zero, where sums of squares would lose all digits in float32.
    values = 1e4 + torch.randn(7, 11, 3, 2, generator=torch.Generator().manual_seed(1))
    normalizer = RunningNormalizer((3, 2), clip=1.5)
    for batch in values.split([1, 4, 2]):
        normalizer.update(batch)
    normalizer.update(values[:0])
    flat = values.reshape(-1, 3, 2).double()
    assert normalizer.count == 77
    torch.testing.assert_close(normalizer.mean, flat.mean(0))
    torch.testing.assert_close(normalizer.variance, flat.var(0, correction=0))
    wanted = ((flat - flat.mean(0)) / flat.std(0, correction=0)).clamp(-1.5, 1.5)
    found = normalizer(values)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.reshape(-1, 3, 2), wanted.float(), atol=2e-3, rtol=0)
    assert found.min() == -1.5
    torch.testing.assert_close(normalizer(values.double()).reshape(-1, 3, 2), wanted)


def test_masked_values_do_not_count() -> None:
    masked, short = RunningNormalizer(1), RunningNormalizer(1)
    batch = torch.tensor([[[1.0], [2.0], [NAN]], [[5.0], [NAN], [NAN]]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    masked.update(batch, mask)
    masked.update(batch, mask.bool())
    short.update(torch.tensor([1.0, 2, 5, 1, 2, 5])[:, None])
    assert masked.state_dict() == short.state_dict()
    masked.update(batch, torch.zeros(2, 3))
    assert masked.count == 6


def test_values_are_unchanged_before_the_first_update() -> None:
    values = torch.tensor([[-2, 0], [9, 11]])
    assert RunningNormalizer(2)(values).tolist() == [[-2, 0], [9, 10]]


def test_statistics_are_in_the_state_dict_and_frozen_in_evaluation_mode() -> None:
    one, other = RunningNormalizer(2), RunningNormalizer(2)
    one.update(torch.randn(5, 2))
    other.load_state_dict(one.state_dict())
    one.eval().update(torch.ones(3, 2))
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])
    rewards = RewardNormalizer(2, 0.9).eval()
    rewards.update(torch.ones(2, 3), torch.zeros(2, 3).bool())
    assert not rewards.discounted_return.any()
    assert not rewards.statistics.count


def test_rewards_are_divided_by_the_standard_deviation_of_running_returns() -> None:
    env_args: Any = {"n_envs": 3}

    def create_env(seed: int, n_envs: int) -> GymEnvInf:
        return GymEnvInf([CountingEnv(length=4) for _ in range(n_envs)], seed)

    with Batcher(5, None, ConstantAgent, {}, create_env, env_args, 0, 1) as batcher:
        batcher.reset()
        normalizer, returns = RewardNormalizer(3, 0.5, clip=1.2), []
        earned = [0.0] * 3
        for _ in range(3):
            batcher.execute()
            window = batcher.get()
            reward, done = window["_reward"], window["_done"]
            normalizer.update(reward, done)
            for step in range(5):
                for lane in range(3):
                    earned[lane] = 0.5 * earned[lane] + float(reward[lane, step])
                    returns.append(earned[lane])
                    earned[lane] *= not done[lane, step]
    assert normalizer.discounted_return.tolist() == earned
    deviation = torch.tensor(returns, dtype=torch.float64).std(correction=0).float()
    found = normalizer(reward)
    torch.testing.assert_close(found, (reward / deviation).clamp(max=1.2))
    assert found.max() == torch.tensor(1.2)


REFUSED: list[tuple[Any, str]] = [
    (lambda: RunningNormalizer((2, -1)), "shape"),
    (lambda: RunningNormalizer(2, clip=0), "clip"),
    (lambda: RunningNormalizer(2)(torch.ones(2, 3)), "values is float32"),
    (lambda: RunningNormalizer((4, 2))(torch.ones(2)), "values is float32"),
    (lambda: RunningNormalizer(2).update(torch.ones(3, 2), torch.ones(2)), "mask is float32"),
    (lambda: RunningNormalizer(2).update([1.0, 2.0]), "batch is list"),  # type: ignore[arg-type]
    (lambda: RewardNormalizer(0, 0.9), "n_lanes"),
    (lambda: RewardNormalizer(1, 1.1), "discount"),
    (lambda: RewardNormalizer(2, 0.9).update(torch.ones(1, 3), torch.ones(1, 3)), "reward is"),
    (lambda: RewardNormalizer(1, 0.9).update(torch.ones(1, 3), torch.ones(1, 2)), "done is"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_invalid_input_is_refused(call: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        call()


def test_nonfinite_values_change_nothing() -> None:
    normalizer, rewards = RunningNormalizer(2), RewardNormalizer(1, 0.9)
    with pytest.raises(SpecError, match="not finite"):
        normalizer.update(torch.tensor([[1.0, NAN]]))
    with pytest.raises(SpecError, match="not finite"):
        rewards.update(torch.tensor([[1.0, float("inf")]]), torch.tensor([[False, False]]))
    assert not normalizer.count
    assert not rewards.discounted_return.any()
