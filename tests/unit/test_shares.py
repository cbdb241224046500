"""Lanes that are reset together or not at all: reported seeds, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode

from rlpool import (
    DictTensor,
    EnvSpecError,
    EpisodeBatcher,
    SpecError,
    VectorGymEnv,
)

from support.agents import BinaryAgent
from support.vector_envs import ArrayEnv, Noted

N_LANES = 3


def create_arrays(
    seed: int, mode: str = "NextStep", seeds: str = "all", n_lanes: int = N_LANES, **arguments: Any
) -> VectorGymEnv:
    return VectorGymEnv(ArrayEnv(n_lanes, AutoresetMode(mode), seeds), seed, **arguments)


def test_one_reset_serves_a_request_and_its_seed_is_reported() -> None:
    noted = Noted(ArrayEnv(3, AutoresetMode.NEXT_STEP, "all"))
    with EpisodeBatcher(
        8, 40, BinaryAgent, {}, lambda: VectorGymEnv(noted, 0, seeding="request"), n_threads=0
    ) as batcher:
        noted.resets.clear()
        batcher.execute(14, env_info={"length": 4})
        result = batcher.get()
    assert result is not None
    assert noted.resets == [(int(result.info["seed"][0]), {"length": 4})]
    assert result.lengths[:3].tolist() == [4] * 3


class Uneven(ArrayEnv):
    """Environment whose episodes in lane *k* have ``2 * k + 1`` steps."""

    def _begin(self, lane: int, length: int) -> None:
        super()._begin(lane, 2 * lane + 1)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (AutoresetMode.SAME_STEP, [1, 3, 1, 1, 1, 3, 1, 1, 1]),
        # Each is followed by a step without an episode.
        (AutoresetMode.NEXT_STEP, [1, 3, 1, 1, 3, 1, 1, 3, 1]),
    ],
)
def test_a_ready_lane_takes_the_next_episode(mode: AutoresetMode, expected: list[int]) -> None:
    def create(seed: int) -> VectorGymEnv:
        return VectorGymEnv(Uneven(2, mode, "all"), seed, seeding="request")

    for n_slots in (2, 20):
        with EpisodeBatcher(8, n_slots, BinaryAgent, {}, create, n_threads=0) as batcher:
            for _ in range(2):
                batcher.execute(9)
                assert batcher.get().lengths.tolist() == expected


@pytest.mark.parametrize(
    ("n_slots", "env_info", "named"),
    [(40, {"length": [2, 2, 3]}, r"env_info\['length'\]"), (2, None, "n_slots")],
)
def test_execute_refuses_requests_unsuitable_for_lanes_reset_together(
    n_slots: int, env_info: Any, named: str
) -> None:
    with EpisodeBatcher(8, n_slots, BinaryAgent, {}, create_arrays, n_threads=0) as batcher:
        batcher.execute(2)
        with pytest.raises(SpecError, match=named):
            batcher.execute(3, env_info=env_info)
        assert batcher.get() is not None


def test_lanes_that_never_restart_are_refused() -> None:
    create = lambda: VectorGymEnv(ArrayEnv(3, None, "all"), seeding="request")  # noqa: E731
    with EpisodeBatcher(8, 40, BinaryAgent, {}, create, n_threads=0) as batcher:
        batcher.execute(3)
        with pytest.raises(EnvSpecError, match="restart"):
            batcher.get()


# Windows and reset()/step() -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "restarts"), [(AutoresetMode.NEXT_STEP, True), (AutoresetMode.SAME_STEP, False)]
)
def test_reset_and_step_accept_tensors(mode: AutoresetMode, restarts: bool) -> None:
    vec = create_arrays(3, mode.value, auto_reset=restarts)
    for _ in range(2):
        (observation, running), steps = vec.reset(), torch.zeros(3, dtype=torch.int64)
        assert running.tolist() == [0, 1, 2]
        for _ in range(30):
            assert observation["frame"][:, 0].tolist() == steps[running].tolist()
            action = torch.zeros(len(running), dtype=torch.int64)
            (after, stepped), (observation, running) = vec.step(DictTensor({"action": action}))
            steps[stepped] += 1
            assert after["frame"][:, 0].tolist() == steps[stepped].tolist()
            steps[stepped[after["done"]]] = 0
            if not len(running):
                break
        assert restarts == bool(len(running))
