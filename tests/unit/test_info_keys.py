"""info_keys: keys of Gymnasium's info as keys of a step."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import (
    Batcher,
    DictTensor,
    EnvError,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    TemporalDictTensor,
    VectorGymEnv,
)
from rlpool.testing import check_env

from support.agents import BinaryAgent
from support.telling import MaskedAgent, TellingEnv, create_telling
from support.vector_envs import ArrayEnv, OwnVectorEnv

TOGETHER = ("NEXT_STEP", "SAME_STEP")


def episodes(kind: str, **extra: Any) -> TemporalDictTensor:
    with EpisodeBatcher(
        5, 4, MaskedAgent, {}, create_telling, {"kind": kind, **extra}, n_workers=0, seeds=3
    ) as batcher:
        batcher.execute(6)
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
        for _ in range(2):
            batcher.execute()
        return [batcher.get() for _ in range(2)]


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


@pytest.mark.parametrize("kind", ["DISABLED", *TOGETHER])
def test_a_key_holds_what_was_known_before_the_step_and_after_it(kind: str) -> None:
    result = episodes(kind)
    assert len({int(length) for length in result.lengths}) > 1
    check_values(result)


@pytest.mark.parametrize("kind", ["DISABLED", *TOGETHER])
def test_windows_keep_the_last_info_of_an_episode_and_show_the_first_of_the_next(kind: str) -> None:
    for result in windows(kind):
        check_values(result)


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


def one(keys: Any, extra: Any = None) -> Any:
    env = GymEnv([TellingEnv(extra=extra)], 0, info_keys=keys)
    env.reset()
    return env.step(DictTensor({"action": torch.zeros(1).long()}))[0][0]


@pytest.mark.parametrize(
    ("keys", "given", "dtype", "stored"),
    [
        ({"x": np.float64}, 0.1, torch.float64, 0.1),
        ({"x": torch.float16}, 0.5, torch.float16, 0.5),
        ({"x": (bool, (2,))}, np.array([0, 1]), torch.bool, [False, True]),
        ({"x": ("int8", 2)}, (3, 4), torch.int8, [3, 4]),
        ({"x": (float, 2)}, torch.ones(2, requires_grad=True), torch.float32, [1, 1]),
        ({"x": float}, None, torch.float32, 0),
        ({"x": float}, float("nan"), torch.float32, float("nan")),
        (["x"], True, torch.float32, 1),
        (["x"], 0.1, torch.float32, np.float32(0.1)),
        (["x"], None, torch.float32, 0),
        (["x/y/z"], {"y": {"z": 3}}, torch.float32, 3),
    ],
)
def test_values_and_dtypes(keys: Any, given: Any, dtype: torch.dtype, stored: Any) -> None:
    value = one(keys, {"x": given})[next(iter(keys))][0]
    assert value.dtype == dtype
    np.testing.assert_array_equal(value.numpy(), stored)


@pytest.mark.parametrize(
    ("keys", "given"),
    [
        (["x"], "text"),
        (["x"], {"y": 1}),
        (["x"], [1.0]),
        (["x"], 2**24 + 1),
        ({"x": int}, 0.5),
        ({"x": int}, float("nan")),
        ({"x": bool}, 2),
        ({"x": "uint8"}, 256),
        ({"x": (float, 2)}, 1.0),
        ({"x": (float, 2)}, [[1], [2, 3]]),
    ],
)
def test_what_does_not_fit_is_refused(keys: Any, given: Any) -> None:
    with pytest.raises(EnvSpecError, match="info 'x'") as caught:
        one(keys, {"x": given})
    assert caught.value.where.lane == 0


def test_errors_of_vector_environments_say_where_a_value_did_not_fit() -> None:
    with pytest.raises(EnvError, match="info 'pair'") as caught:
        episodes("DISABLED", pair=[1, 2, 3])
    assert (caught.value.where.lane, caught.value.where.step) == (0, 0)


@pytest.mark.parametrize(
    ("create", "n_workers"),
    [
        (lambda seed, **keys: GymEnv([TellingEnv()], seed, **keys), 2),
        (lambda seed, **keys: VectorGymEnv(OwnVectorEnv([TellingEnv] * 2), seed, **keys), 0),
        (lambda seed, **keys: ParallelEnvManager([TellingEnv] * 2, seed=seed, **keys), 0),
    ],
)
def test_a_key_that_never_appears_is_warned_of_once(
    create: Any, n_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def create_env(seed: int) -> Any:
        return create(seed, info_keys={"succes": bool, "cost": float})

    with (
        caplog.at_level(logging.WARNING, "rlpool"),
        EpisodeBatcher(5, 8, BinaryAgent, {}, create_env, {}, n_workers, seeds=1) as batcher,
    ):
        batcher.execute(8)
        assert not batcher.get()["_succes"].any()
    (text,) = [text for text in caplog.messages if "'succes'" in text]
    assert "'success'" in text


def test_checks_of_environments_know_them() -> None:
    check_env(create_telling)
