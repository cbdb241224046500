"""info_keys: keys of Gymnasium's info as keys of a step."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordVectorStatistics

from rlpool import (
    Batcher,
    DictTensor,
    EnvError,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    Pool,
    TemporalDictTensor,
    VecEnv,
    VectorGymEnv,
    replay_agent,
)
from rlpool.testing import check_env

from support.agents import BinaryAgent
from support.telling import KEYS, MaskedAgent, TellingEnv, create_telling
from support.vector_envs import ArrayEnv, OwnVectorEnv

TOGETHER = ("NEXT_STEP", "SAME_STEP")


def episodes(kind: str = "gym", n_threads: int = 0, n: int = 6, **extra: Any) -> TemporalDictTensor:
    with EpisodeBatcher(
        5, 4, MaskedAgent, {}, create_telling, {"kind": kind, **extra}, n_threads, seeds=3
    ) as batcher:
        batcher.execute(n)
        return batcher.get()


def windows(kind: str) -> list[TemporalDictTensor]:
    with Batcher(
        6,
        create_agent=MaskedAgent,
        agent_args={},
        create_env=create_telling,
        env_args={"kind": kind, "restarts": True},
        n_threads=0,
        seeds=3,
    ) as batcher:
        batcher.reset()
        results = []
        for _ in range(2):
            batcher.execute()
            results.append(batcher.get())
        return [result for result in results if result is not None]


def check_values(result: TemporalDictTensor) -> None:
    """Compare with what a ``TellingEnv`` says."""
    specs = {
        "success": (torch.bool, ()),
        "pair": (torch.float32, (2,)),
        "cost": (torch.float32, ()),
        "task": (torch.int64, ()),
        "action_mask": (torch.int8, (3,)),
        "part/d": (torch.float32, ()),
        "flat/t": (torch.int64, ()),
    }
    for key, (dtype, shape) in specs.items():
        for name in (key, f"_{key}"):
            assert result[name].dtype == dtype
            assert result[name].shape[2:] == shape
    is_step = torch.arange(result["done"].shape[1]) < result.lengths[:, None]
    before, after = result["frame"][..., 0], result["_frame"][..., 0]
    starts, ends = (before == 0) & is_step, result["_done"] & is_step
    for prefix, t in (("", before), ("_", after)):
        assert torch.equal(result[f"{prefix}cost"], t / 2)
        assert torch.equal(result[f"{prefix}part/d"], t)
        assert torch.equal(result[f"{prefix}flat/t"], t.long())
    assert torch.equal(result["task"], 7 * starts)
    assert not result["_task"].any()
    assert not result["success"].any()
    assert torch.equal(result["_success"], ends)
    assert torch.equal(result["_pair"], ends[..., None] * torch.tensor([1, 2.5]))
    assert (result["action_mask"][starts] == torch.tensor([1, 0, 1])).all()
    chosen = result["action_mask"].gather(2, result["action"][..., None])[..., 0]
    assert torch.equal(chosen == 1, is_step)


@pytest.mark.parametrize("kind", ["gym", "DISABLED", *TOGETHER])
def test_a_key_holds_what_was_known_before_the_step_and_after_it(kind: str) -> None:
    result = episodes(kind)
    assert len({int(length) for length in result.lengths}) > 1
    check_values(result)


@pytest.mark.parametrize("kind", ["DISABLED", *TOGETHER])
def test_windows_keep_the_last_info_of_an_episode_and_show_the_first_of_the_next(kind: str) -> None:
    for result in windows(kind):
        check_values(result)


class Recorded(TellingEnv):
    def __new__(cls) -> Any:
        return RecordEpisodeStatistics(TellingEnv())


@pytest.mark.parametrize("kind", ["gym", "NEXT_STEP"])
def test_statistics_of_episodes_are_in_their_last_step(kind: str) -> None:
    keys = {"episode/l": int, "episode/r": float, "action_mask": (np.int8, 3)}

    def create_env(seed: int) -> VecEnv:
        if kind == "gym":
            return GymEnv([Recorded() for _ in range(3)], seed, info_keys=keys)
        recorded: Any = RecordVectorStatistics(OwnVectorEnv([TellingEnv] * 3, AutoresetMode[kind]))
        return VectorGymEnv(recorded, seed, seeding="request", info_keys=keys)

    with EpisodeBatcher(5, 9, MaskedAgent, {}, create_env, {}, 0, seeds=1) as batcher:
        batcher.execute(9)
        result = batcher.get()
    for key in ("episode/l", "episode/r"):
        assert torch.equal(result[f"_{key}"].sum(1).long(), result.lengths)
        assert torch.equal(result[f"_{key}"] > 0, result["_done"])


class MaskedInfos(ArrayEnv):
    """Says something about every other lane, and what has no meaning about the rest."""

    def step(self, actions: Any) -> Any:
        *results, _ = super().step(actions)
        says = np.arange(self.num_envs) % 2 == 0
        part = {"y": np.where(says, 2.0, np.nan), "names": np.array(["a"] * self.num_envs)}
        return *results, {"x": np.where(says, 1.0, np.nan), "_x": says, "p": part, "_p": says}


class TensorInfos(MaskedInfos):
    """The same as tensors, as simulators on a GPU give them."""

    def step(self, actions: Any) -> Any:
        *results, infos = super().step(actions)
        part = {"y": torch.from_numpy(infos["p"]["y"])}
        masks = {key: torch.from_numpy(infos[key]) for key in ("x", "_x", "_p")}
        return *results, {**masks, "p": part}


@pytest.mark.parametrize("kind", [MaskedInfos, TensorInfos])
def test_masks_of_vector_environments_say_which_lanes_have_a_value(kind: Any) -> None:
    env = VectorGymEnv(kind(4), 0, info_keys={"x": float, "p/y": "int8"})
    assert not env.reset()[0]["x"].any()
    stepped = env.step(DictTensor({"action": torch.zeros(4).long()}))[0][0]
    assert stepped["x"].tolist() == [1, 0, 1, 0]
    assert stepped["p/y"].tolist() == [2, 0, 2, 0]


def test_they_reach_pools_and_replaying_agents() -> None:
    result = episodes()
    pool = Pool(pool_size=40, seed=0)
    pool.extend(result)
    batch = pool.sample(16)
    assert torch.equal(batch["_cost"], batch["_frame"][:, 0] / 2)
    assert batch["_action_mask"].dtype == torch.int8
    again = replay_agent(MaskedAgent(), result)
    assert torch.equal(again["action"], result["action"])


def one(keys: Any, extra: Any = None) -> Any:
    env = GymEnv([TellingEnv(extra=extra)], 0, info_keys=keys)
    env.reset()
    return env.step(DictTensor({"action": torch.zeros(1).long()}))[0][0]


@pytest.mark.parametrize(
    ("declared", "given", "dtype", "stored"),
    [
        (np.float64, 0.1, torch.float64, 0.1),
        (torch.float16, 0.5, torch.float16, 0.5),
        ((bool, (2,)), np.array([0, 1]), torch.bool, [False, True]),
        (("int8", 2), (3, 4), torch.int8, [3, 4]),
        ((float, 2), torch.ones(2, requires_grad=True), torch.float32, [1, 1]),
        (float, None, torch.float32, 0),
        (float, float("nan"), torch.float32, float("nan")),
    ],
)
def test_values_and_dtypes(declared: Any, given: Any, dtype: torch.dtype, stored: Any) -> None:
    value = one({"x": declared}, {"x": given})["x"][0]
    assert value.dtype == dtype
    np.testing.assert_array_equal(value.numpy(), stored)


@pytest.mark.parametrize(
    ("given", "stored"),
    [(True, 1), (2, 2), (0.1, np.float32(0.1)), (np.float64(2.5), 2.5), (None, 0), ("missing", 0)],
)
def test_a_name_alone_means_a_float32_number(given: Any, stored: Any) -> None:
    value = one(["x", "part/d"], {} if given == "missing" else {"x": given})
    assert value["x"].dtype == torch.float32
    assert value["x"].tolist() == [stored]
    assert value["part/d"].tolist() == [1]


def test_float64_can_be_kept() -> None:
    env = GymEnv([TellingEnv()], 0, keep_float64=True, info_keys={"cost": float, "x": np.float64})
    observation = env.reset()[0]
    assert observation["cost"].dtype == observation["x"].dtype == torch.float64


BAD_VALUES: list[tuple[Any, Any]] = [
    (["x"], "text"),
    (["x"], object()),
    (["x"], {"y": 1}),
    (["x"], [1.0]),
    (["x"], 2**24 + 1),
    ({"x": int}, 0.5),
    ({"x": int}, float("nan")),
    ({"x": bool}, 2),
    ({"x": "uint8"}, 256),
    ({"x": float}, np.ones(3)),
    ({"x": (float, 2)}, 1.0),
    ({"x": (float, 2)}, [[1], [2, 3]]),
]


@pytest.mark.parametrize(("keys", "given"), BAD_VALUES)
def test_what_does_not_fit_is_refused(keys: Any, given: Any) -> None:
    with pytest.raises(EnvSpecError, match="info 'x' should") as caught:
        one(keys, {"x": given})
    assert caught.value.where.lane == 0
    assert caught.value.fix


@pytest.mark.parametrize(("kind", "lane"), [("gym", 0), ("manager", 0), ("DISABLED", 0)])
def test_errors_say_where_a_value_did_not_fit(kind: str, lane: int) -> None:
    with pytest.raises(EnvError, match=r"info 'pair' should be float32\[2\], got") as caught:
        episodes(kind, pair=[1, 2, 3])
    assert caught.value.where.lane == lane
    assert caught.value.where.step == 0


@pytest.mark.parametrize(
    ("kind", "n_threads"), [("gym", 0), ("gym", 2), ("vector", 0), ("manager", 0)]
)
def test_a_key_that_never_appears_is_warned_of_once(
    kind: str, n_threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    def create_env(seed: int) -> VecEnv:
        keys = {"succes": bool, "cost": float}
        if kind == "gym":
            return GymEnv([TellingEnv()], seed, info_keys=keys)
        if kind == "manager":
            return ParallelEnvManager([TellingEnv] * 2, seed=seed, info_keys=keys)
        return VectorGymEnv(OwnVectorEnv([TellingEnv] * 2), seed, info_keys=keys)

    with (
        caplog.at_level(logging.WARNING, "rlpool"),
        EpisodeBatcher(5, 8, BinaryAgent, {}, create_env, {}, n_threads, seeds=1) as batcher,
    ):
        batcher.execute(8)
        assert not batcher.get()["_succes"].any()
    told = [record.getMessage() for record in caplog.records if "succes" in record.getMessage()]
    assert len(told) == 1
    assert "no 'succes' in any info" in told[0]
    assert "'success'" in told[0]


def test_checks_of_environments_know_them() -> None:
    check_env(create_telling)
    assert set(KEYS) <= set(episodes(n=1).keys())
