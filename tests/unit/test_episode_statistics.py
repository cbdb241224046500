"""Returns and lengths of episodes, including those that span windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlpool import (
    Batcher,
    EpisodeStatistics,
    SpecError,
    TemporalDictTensor,
    episode_lengths,
    episode_returns,
)

from support.agents import StepCounter
from support.envs import create_counting


def random_windows(
    n_windows: int, n_lanes: int, n_timesteps: int, stops: bool
) -> list[TemporalDictTensor]:
    """Draw windows in which episodes end anywhere; with ``stops``, lanes vanish after an end."""
    draw = torch.Generator().manual_seed(n_timesteps)
    lanes, windows = torch.arange(n_lanes), []
    for _ in range(n_windows):
        shape = len(lanes), n_timesteps
        done = torch.rand(shape, generator=draw) < 0.15
        lengths = torch.randint(0, n_timesteps + 1, shape[:1], generator=draw)
        if stops:
            is_over = done.any(1)
            lengths = torch.where(is_over, done.int().argmax(1) + 1, n_timesteps)
        steps = {"_reward": torch.randn(shape, generator=draw), "_done": done}
        steps["_success"] = torch.rand(shape, generator=draw) < 0.5
        windows.append(TemporalDictTensor(steps, lengths, {"episode": lanes}))
        if stops:
            lanes = lanes[~is_over]
    return windows


@pytest.mark.parametrize(
    ("n_lanes", "n_timesteps", "stops", "key"),
    [(40, 5, False, "_success"), (40, 5, True, "_reward")],
)
def test_windows_add_up_to_episodes(n_lanes: int, n_timesteps: int, stops: bool, key: str) -> None:
    statistics, sums, counts = EpisodeStatistics(key), [0.0] * n_lanes, [0] * n_lanes
    for window in random_windows(6, n_lanes, n_timesteps, stops):
        got, expected = statistics.update(window), []
        for t in range(n_timesteps):
            for row, lane in enumerate(window.info["episode"].tolist()):
                if t >= window.lengths[row]:
                    continue
                sums[lane] += window[key][row, t].item()
                counts[lane] += 1
                if window["_done"][row, t]:
                    expected.append((sums[lane], counts[lane], row))
                    sums[lane], counts[lane] = 0.0, 0
        returns, lengths, rows = map(list, zip(*expected, strict=True)) if expected else ([],) * 3
        assert (got.lengths.tolist(), got.rows.tolist()) == (lengths, rows)
        assert got.returns.tolist() == pytest.approx(returns)
        assert got.returns.dtype == torch.float32


def windows_of_a_batcher(n_windows: int, reset_before: int = 0) -> list[Any]:
    """Return the returns, lengths and rows of the episodes that end in each window."""
    env_args = {"n_envs": 2, "restarts": True}
    statistics, ended = EpisodeStatistics(), []
    arguments: dict[str, Any] = {"n_threads": 0, "seeds": 0, "env_args": env_args}
    with Batcher(3, None, StepCounter, {}, create_counting, **arguments) as batcher:
        for number in range(n_windows):
            if number in (0, reset_before):
                batcher.reset(env_info={"length": [4, 7], "id": [1, 0]})
            batcher.execute()
            ended.append([part.tolist() for part in statistics.update(batcher.get())])
    return ended


# Rewards are 1, 2, ... per step, and 100 more in the episodes with the id 1.
NONE, FIRST = [[], [], []], [[410.0], [4], [0]]


def test_statistics_restart_for_lanes_that_were_reset() -> None:
    assert windows_of_a_batcher(3) == [NONE, FIRST, [[28.0, 410.0], [7, 4], [1, 0]]]
    assert windows_of_a_batcher(3, reset_before=1) == [NONE, NONE, FIRST]


def test_reset_discards_running_episodes() -> None:
    statistics = EpisodeStatistics()
    unfinished = {"_reward": torch.ones(2, 3), "_done": torch.zeros(2, 3, dtype=torch.bool)}
    statistics.update(TemporalDictTensor(unfinished))
    statistics.reset()
    ends = TemporalDictTensor({**unfinished, "_done": torch.tensor([[False, False, True]] * 2)})
    assert statistics.update(ends).returns.tolist() == [3.0, 3.0]
    assert statistics.update(ends.slice(1, 2)).lengths.tolist() == [3]


def test_complete_episodes_are_summed_up() -> None:
    reward = torch.tensor([[1.0, 2.0, 7.0], [1.0, 2.0, 3.0]])  # padding does not count
    done = torch.tensor([[False, True, False], [False, False, True]])
    trajectories = TemporalDictTensor({"_reward": reward, "_done": done}, torch.tensor([2, 3]))
    assert episode_returns(trajectories).tolist() == [3.0, 6.0]
    for dtype in (torch.bfloat16, torch.float64):  # no reward of a long episode is lost
        long = TemporalDictTensor({"_reward": torch.full((1, 5000, 1), 20.0, dtype=dtype)})
        returns = episode_returns(long)
        assert returns.tolist() == [100_000.0]
        assert returns.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert episode_returns(trajectories, key="_done").tolist() == [1.0, 1.0]
    assert episode_lengths(trajectories).tolist() == [2, 3]
    assert reward[0].tolist() == [1.0, 2.0, 7.0]  # it is unchanged


STEPS = TemporalDictTensor({"_reward": torch.ones(2, 3), "_frame": torch.ones(2, 3, 4)})


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: episode_returns(STEPS, "_cost"), "'_cost'"),
        (lambda: episode_returns(STEPS, "_frame"), "'_frame'"),
        (lambda: EpisodeStatistics().update(STEPS), "'_done'"),
        (lambda: EpisodeStatistics().update(None), "NoneType"),  # type: ignore[arg-type]
    ],
)
def test_unsummable_input_is_named(call: Any, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        call()
