"""info_keys: keys of Gymnasium's info as keys of a step."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import DictInfoToList
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordVectorStatistics
from process.watching import assert_equal

from rlpool import (
    Batcher,
    DictTensor,
    EnvError,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    Pool,
    SpecError,
    TemporalDictTensor,
    VecEnv,
    VectorGymEnv,
    replay_agent,
)
from rlpool.testing import check_env

from support.agents import BinaryAgent
from support.telling import KEYS, MaskedAgent, TellingEnv, create_telling
from support.vector_envs import ArrayEnv

TOGETHER = ("NEXT_STEP", "SAME_STEP")
GYMNASIUM = tuple(map(int, gymnasium.__version__.split(".")[:2]))


def episodes(kind: str = "gym", n_threads: int = 0, n: int = 6, **extra: Any) -> TemporalDictTensor:
    with EpisodeBatcher(
        5, 4, MaskedAgent, {}, create_telling, {"kind": kind, **extra}, n_threads, seeds=3
    ) as batcher:
        batcher.execute(n)
        return batcher.get()


def windows(kind: str, n_threads: int) -> list[TemporalDictTensor]:
    with Batcher(
        6,
        create_agent=MaskedAgent,
        agent_args={},
        create_env=create_telling,
        env_args={"kind": kind, "restarts": True},
        n_threads=n_threads,
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


@pytest.mark.parametrize("kind", ["gym", *TOGETHER])
def test_a_key_holds_what_was_known_before_the_step_and_after_it(kind: str) -> None:
    result = episodes(kind)
    assert len({int(length) for length in result.lengths}) > 1
    check_values(result)


@pytest.mark.parametrize(
    ("kind", "n_threads"), [("gym", 2), ("manager", 0), ("sync", 0), ("async", 0)]
)
def test_the_bits_do_not_depend_on_where_lanes_run(kind: str, n_threads: int) -> None:
    assert_equal(episodes(), episodes(kind, n_threads))


@pytest.mark.parametrize(
    ("kind", "n_threads"), [("gym", 0), ("gym", 1), ("manager", 0), ("sync", 0), ("NEXT_STEP", 0)]
)
def test_windows_keep_the_last_info_of_an_episode(kind: str, n_threads: int) -> None:
    results = windows(kind, n_threads)
    for result in results:
        check_values(result)
    if kind != "NEXT_STEP":
        for result, expected in zip(results, windows("gym", 0), strict=True):
            assert_equal(result, expected)


def test_windows_that_restart_within_a_step_show_the_first_info_of_the_next_episode() -> None:
    for result in windows("SAME_STEP", 0):
        check_values(result)


def test_infos_may_be_a_list_of_one_dict_per_lane_where_lanes_restart_within_a_step() -> None:
    def create_env(seed: int, wrapper: Any) -> VecEnv:
        vector = SyncVectorEnv([TellingEnv] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
        return VectorGymEnv(wrapper(vector), seed, seeding="request", info_keys=KEYS)

    results = []
    for wrapper in (VectorWrapper, DictInfoToList):
        env_args = {"wrapper": wrapper}
        with EpisodeBatcher(5, 9, MaskedAgent, {}, create_env, env_args, 0, seeds=1) as batcher:
            batcher.execute(9)
            results.append(batcher.get())
    check_values(results[1])
    assert_equal(*results)


class Recorded(TellingEnv):
    def __new__(cls) -> Any:
        return RecordEpisodeStatistics(TellingEnv())


@pytest.mark.parametrize("kind", ["gym", "sync", *TOGETHER, "list"])
def test_statistics_of_episodes_are_in_their_last_step(kind: str) -> None:
    if kind in ("SAME_STEP", "list") and GYMNASIUM < (1, 4):
        pytest.skip("before 1.4, Gymnasium's wrapper misses a step of every later episode there")
    keys = {"episode/l": int, "episode": {"r": float}, "action_mask": None}

    def create_env(seed: int) -> VecEnv:
        if kind == "gym":
            return GymEnv([Recorded() for _ in range(3)], seed, info_keys=keys)
        if kind == "sync":
            return VectorGymEnv(SyncVectorEnv([Recorded] * 3), seed, info_keys=keys)
        mode = AutoresetMode.SAME_STEP if kind == "list" else AutoresetMode[kind]
        vector = SyncVectorEnv([TellingEnv] * 3, autoreset_mode=mode)
        recorded: Any = RecordVectorStatistics(vector)
        if kind == "list":  # one info per lane
            recorded = DictInfoToList(recorded)
        return VectorGymEnv(recorded, seed, seeding="request", info_keys=keys)

    with EpisodeBatcher(5, 9, MaskedAgent, {}, create_env, {}, 0, seeds=1) as batcher:
        batcher.execute(9)
        result = batcher.get()
    for key in ("episode/l", "episode/r"):
        assert torch.equal(result[f"_{key}"].sum(1).long(), result.lengths)
        assert torch.equal(result[f"_{key}"] > 0, result["_done"])
        assert not result[key].any()


def test_statistics_of_a_vector_wrapper_that_loses_lanes_are_refused() -> None:
    recorded: Any = RecordVectorStatistics(SyncVectorEnv([TellingEnv] * 2))
    with pytest.raises(SpecError, match=r"(?s)'episode/l' is counted by a wrapper.*fix: "):
        VectorGymEnv(recorded, info_keys={"episode/l": int})


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
    env = VectorGymEnv(kind(4), 0, info_keys={"x": None, "p": {"y": "int8"}})
    assert not env.reset()[0]["x"].any()
    stepped = env.step(DictTensor({"action": torch.zeros(4).long()}))[0][0]
    assert stepped["x"].tolist() == [1, 0, 1, 0]
    assert stepped["p/y"].tolist() == [2, 0, 2, 0]


def test_mujoco() -> None:
    pytest.importorskip("mujoco")
    env = GymEnv([gymnasium.make("HalfCheetah-v5")], 0, info_keys=["x_velocity", "x_position"])
    env.reset()
    action = torch.full((1, 6), 0.3)
    stepped = env.step(DictTensor({"action": action}))[0][0]
    assert stepped["x_velocity"].dtype == torch.float32
    assert stepped["x_velocity"] != 0


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


@pytest.mark.parametrize("kind", ["gym", "manager"])
def test_masked_actions_are_not_tried(kind: str) -> None:
    check_values(episodes(kind, refuses=True))


def test_masked_actions_are_not_tried_in_vector_environments() -> None:
    vector = SyncVectorEnv([lambda: TellingEnv(refuses=True)] * 8)
    assert "cost" in VectorGymEnv(vector, 0, info_keys=["cost"]).current


def test_learning_resets_again_only_if_a_step_was_needed() -> None:
    for keys, n_resets in (
        ({"cost": float}, 1),
        (["task", "action_mask"], 1),
        (("cost",), 2),
    ):
        inner = TellingEnv(refuses=True)
        env = GymEnv([inner], 0, info_keys=keys)
        observation, _ = env.reset()
        assert inner.n_resets == n_resets
        assert observation["frame"].item() == 0


@pytest.mark.parametrize(
    ("declared", "given", "dtype", "stored"),
    [
        (None, 0.5, torch.float32, 0.5),
        (None, True, torch.bool, True),
        (None, np.uint8(3), torch.uint8, 3),
        (None, [1, 2], torch.int64, [1, 2]),
        (None, torch.ones(2, requires_grad=True), torch.float32, [1, 1]),
        (bool, 1.0, torch.bool, True),
        (bool, np.bool_(True), torch.bool, True),
        (int, 2.0, torch.int64, 2),
        (float, np.int64(2), torch.float32, 2),
        (float, 0.1, torch.float32, np.float32(0.1)),
        (np.float64, 0.1, torch.float64, 0.1),
        (gymnasium.spaces.Box(0, 1, (), np.float64), 0.1, torch.float64, 0.1),
        (torch.float16, 0.5, torch.float16, 0.5),
        ("uint8", 255, torch.uint8, 255),
        ((bool, (2,)), np.array([0, 1]), torch.bool, [False, True]),
        (("int8", 2), (3, 4), torch.int8, [3, 4]),
        (gymnasium.spaces.Box(0, 1, (2,)), np.ones(2), torch.float32, [1, 1]),
        (gymnasium.spaces.Discrete(3), 2, torch.int64, 2),
        (float, None, torch.float32, 0),
        (float, float("nan"), torch.float32, float("nan")),
    ],
)
def test_values_and_dtypes(declared: Any, given: Any, dtype: torch.dtype, stored: Any) -> None:
    value = one({"x": declared}, {"x": given})["x"][0]
    assert value.dtype == dtype
    np.testing.assert_array_equal(value.numpy(), stored)


def test_all_keys_that_are_missing_are_in_the_fix() -> None:
    with pytest.raises(EnvSpecError, match=r"keys=\{'nix': np.float32, 'no': np.float32\}"):
        one(["nix", "cost", "no"], {})


def test_float64_can_be_kept() -> None:
    env = GymEnv([TellingEnv()], 0, keep_float64=True, info_keys={"cost": None, "x": float})
    observation = env.reset()[0]
    assert observation["cost"].dtype == observation["x"].dtype == torch.float64


@pytest.mark.parametrize(
    ("keys", "given", "told"),
    [
        (["succes"], 1, "info has no 'succes'.*'action_mask', 'cost', 'flat/t', 'part/d'"),
        (["nix", "cost", "no"], 1, "info has no 'nix', 'no': a reset and a step gave 'action_"),
        (["x"], "text", "info 'x' should be a number.*'text'"),
        (["x"], np.longdouble(1.5), "info 'x' should be a number.*1.5"),
        (["x"], object(), "info 'x' should be a number.*object"),
        ({"x": int}, 0.5, r"info 'x' should fit int64, got 0.5"),
        ({"x": int}, float("nan"), "info 'x'"),
        ({"x": bool}, 2, "info 'x' should fit bool, got 2"),
        ({"x": "uint8"}, 256, "info 'x' should fit uint8, got 256"),
        ({"x": float}, np.ones(3), r"info 'x' should be float32\[\], got float64\[3\]"),
        ({"x": (float, 2)}, 1.0, r"info 'x' should be float32\[2\]"),
        ({"x": (float, 2)}, [[1], [2, 3]], "info 'x'"),
        ({"x": float}, "text", "info 'x'"),
        ({"x": float}, {"y": 1, "z": {"w": 2}}, "a dict of 'x/y', 'x/z/w'"),
    ],
)
def test_what_does_not_fit_is_refused(keys: Any, given: Any, told: str) -> None:
    with pytest.raises(EnvSpecError, match=f"(?s){told}.*where: lane 0.*fix: "):
        one(keys, {"x": given})


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("success", "info_keys should be a dict or a list"),
        (5, "info_keys should be a dict or a list"),
        ({"x": str}, r"info_keys\['x'\] should be a dtype"),
        ({"x": "nix"}, r"info_keys\['x'\] should be a dtype"),
        ({"x": (float, -1)}, r"info_keys\['x'\] should be a dtype"),
        ({"x": torch.bfloat16}, r"info_keys\['x'\] should be a dtype"),
        ({1: bool}, "should be a name, got 1"),
        (["x", "x"], "'x' twice"),
        ({"reward": float}, "'reward' is given by rlpool and by info_keys"),
        ({"frame": float}, "'frame' is given by the observation and by info_keys"),
    ],
)
def test_bad_info_keys_are_refused(keys: Any, told: str) -> None:
    with pytest.raises(SpecError, match=f"(?s){told}.*fix: "):
        GymEnv([TellingEnv()], 0, info_keys=keys)


def test_a_dict_where_numbers_should_be_is_named_in_vector_environments() -> None:
    vector = SyncVectorEnv([lambda: TellingEnv(extra={"x": {"y": 1, "z": {"w": 2}}})] * 2)
    env = VectorGymEnv(vector, 0, info_keys={"x": float})
    env.reset()
    with pytest.raises(EnvSpecError, match=r"(?s)a dict of 'x/y', 'x/z/w'.*fix: +name its parts"):
        env.step(DictTensor({"action": torch.zeros(2).long()}))


@pytest.mark.parametrize(("kind", "lane"), [("gym", 0), ("manager", 0), ("sync", 0)])
def test_errors_say_where_a_value_did_not_fit(kind: str, lane: int) -> None:
    with pytest.raises(EnvError, match=r"info 'pair' should be float32\[2\], got") as caught:
        episodes(kind, pair=[1, 2, 3])
    assert caught.value.where.lane == lane
    assert caught.value.where.step == 0


@pytest.mark.parametrize(("kind", "n_threads"), [("gym", 0), ("gym", 2), ("sync", 0)])
def test_a_key_that_never_appears_is_warned_of_once(
    kind: str, n_threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    def create_env(seed: int) -> VecEnv:
        keys = {"succes": bool, "cost": float}
        if kind == "gym":
            return GymEnv([TellingEnv()], seed, info_keys=keys)
        return VectorGymEnv(SyncVectorEnv([TellingEnv] * 2), seed, info_keys=keys)

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
    assert check_env(create_telling).ok
    assert set(KEYS) - {"part"} <= set(episodes(n=1).keys())
