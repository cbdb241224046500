"""The step loop, seen from its two ends: which lane runs which episode, what ends where.

Whatever the loop is made of, the environments and the agent must see exactly these calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlpool import (
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    Where,
)

from support.agents import Recorder, StepCounter
from support.envs import (
    CountingEnv,
    FailingEnv,
    assert_same_tensors,
    counting_trajectories,
)


def info_of(lengths: list[int]) -> DictTensor:
    return DictTensor({"length": torch.tensor(lengths), "id": torch.arange(len(lengths))})


def make(envs: list[Any], agent: Any = None, **arguments: Any) -> EpisodeBatcher:
    given = {"n_timesteps": 4, "n_slots": 50, "seeds": 0, **arguments}
    return EpisodeBatcher(
        create_agent=lambda: agent or StepCounter(),
        create_env=lambda seed: GymEnv(envs, seed),
        n_threads=0,
        **given,
    )


class Logged(CountingEnv):
    """Notes every call in ``log``: ``(lane, "reset" or action, id)``."""

    def __init__(self, lane: int, log: list[Any]) -> None:
        super().__init__()
        self.lane, self.log = lane, log

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, options=options)
        self.log.append((self.lane, "reset", self.number))
        return result

    def step(self, action: Any) -> Any:
        self.log.append((self.lane, action, self.number))
        return super().step(action)


def calls(n_lanes: int, lengths: list[int], **arguments: Any) -> list[Any]:
    """All calls that the environments get for one request."""
    log: list[Any] = []
    with make([Logged(lane, log) for lane in range(n_lanes)], **arguments) as batcher:
        log.clear()
        batcher.execute(len(lengths), env_info=info_of(lengths))
        trajectories = batcher.get()
        assert trajectories is not None
        assert trajectories.lengths.tolist() == lengths
    return log


def test_a_lane_that_ends_starts_its_next_episode_at_once() -> None:
    log = calls(2, [2, 3, 1, 1])
    # Lane 0 runs episodes 0 and 2, lane 1 runs 1 and 3: one batched step after the other.
    assert log[:2] == [(0, "reset", 0), (1, "reset", 1)]
    assert log[2:] == [
        (0, 1, 0),
        (1, 1, 1),
        (0, 2, 0),
        (1, 2, 1),
        (0, "reset", 2),
        (0, 1, 2),
        (1, 3, 1),
        (1, "reset", 3),
        (1, 1, 3),
    ]


def test_the_agent_is_called_with_the_same_rows_whatever_the_slots() -> None:
    def observed(n_timesteps: int, n_slots: int) -> list[Any]:
        agent = Recorder(StepCounter())
        envs = [CountingEnv() for _ in range(3)]
        arguments = {"n_timesteps": n_timesteps, "n_slots": n_slots}
        with make(envs, agent, **arguments) as batcher:
            agent.calls.clear()
            batcher.execute(6, env_info=info_of([4, 2, 7, 3, 3, 1]))
            batcher.get()
        return [call.observation["frame"].tolist() for call in agent.calls]

    assert observed(100, 100) == observed(2, 100) == observed(1, 100) == observed(3, 8)


# Errors


@pytest.mark.parametrize("call", ["reset", "step"])
@pytest.mark.parametrize("n_timesteps", [2, 100])
def test_an_environments_error_says_where(call: str, n_timesteps: int) -> None:
    envs = [FailingEnv(KeyError("goal"), call, fails_at=3, step=4) for _ in range(2)]
    with make(envs, n_timesteps=n_timesteps) as batcher:
        batcher.execute(6, env_info=info_of([6, 2, 3, 9, 5, 5]))
        with pytest.raises(EnvError) as caught:
            batcher.get()
        for env in envs:
            env.fails_at = 99
        batcher.execute(6, env_info=info_of([6, 2, 3, 9, 5, 5]))
        assert_same_tensors(
            batcher.get(), counting_trajectories([6, 2, 3, 9, 5, 5], [0, 1, 2, 3, 4, 5])
        )
    with make([CountingEnv(), CountingEnv()], n_timesteps=n_timesteps) as batcher:
        batcher.execute(6)
        seed = batcher.get().info["seed"][3].item()
    step = 4 if call == "step" else 0
    info = {"length": 9, "id": 3}
    assert caught.value.where == Where(0, 1, 3, 3, step, seed, info)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "raise self.error" in caught.value.traceback_text
    first, where, fix = str(caught.value).splitlines()
    assert first == f"env.{call} raised KeyError: 'goal'"
    assert where == (
        f"  where: worker 0, lane 1, row 3, episode 3, step {step}, seed {seed}, env_info {info}"
    )
    assert fix.startswith("  fix:   ")
