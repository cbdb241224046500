"""info_keys: values from Gymnasium's infos as keys of a step."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from rlpool import (
    Batcher,
    DictTensor,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    VectorGymEnv,
)

from support.agents import BinaryAgent, StepCounter
from support.envs import CountingEnv
from support.vector_envs import ArrayEnv, OwnVectorEnv


class InfoEnv(CountingEnv):
    """Environment that reports a task at resets, a success at the end, and the step otherwise.

    Args:
        length: Length of its episodes.
        extra: Additional entries in the info of every step.
    """

    def __init__(self, length: int = 3, extra: Any = None) -> None:
        super().__init__(length)
        self.extra = extra or {}

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset(**arguments)[0], {"task": 7}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *results, _ = super().step(action)
        info = {"t": self.t, "part": {"t": self.t, "none": None}, **self.extra}
        return *results, info | ({"success": 1.0} if self.t == self.length else {})


@pytest.mark.parametrize("kind", [EpisodeBatcher, Batcher])
@pytest.mark.parametrize("mode", ["DISABLED", "NEXT_STEP", "SAME_STEP"])
def test_vector_environments_report_infos_before_and_after_a_step(mode: str, kind: Any) -> None:
    def create_env(seed: int) -> VectorGymEnv:
        lanes = [partial(InfoEnv, length) for length in (3, 4, 5)]
        keys = {"success": bool, "part/t": float, "t": int, "task": int}
        options: Any = {"seeding": None if mode == "DISABLED" else "request", "auto_reset": True}
        return VectorGymEnv(
            OwnVectorEnv(lanes, AutoresetMode[mode]), seed, info_keys=keys, **options
        )

    with kind(6, 4, StepCounter, {}, create_env, n_workers=0, seeds=3) as batcher:
        if kind is Batcher:
            batcher.reset()
        for _ in range(2):
            batcher.execute(*[6] * (kind is EpisodeBatcher))
        results = [batcher.get() for _ in range(2)]
    for result in results:
        is_step = torch.arange(result["done"].shape[1]) < result.lengths[:, None]
        before, after = result["frame"][..., 0], result["_frame"][..., 0]
        for key in ("t", "part/t"):
            assert torch.equal(result[key], before.to(result[key].dtype))
            assert torch.equal(result[f"_{key}"], after.to(result[key].dtype))
        assert torch.equal(result["task"], 7 * ((before == 0) & is_step))
        assert torch.equal(result["_success"], result["_done"] & is_step)
        assert not any(result[key].any() for key in ("success", "_task"))


class MaskedInfos(ArrayEnv):
    """Environment that reports values for every other lane, and meaningless ones for the rest."""

    convert: Any = np.asarray

    def step(self, actions: Any) -> Any:
        *results, _ = super().step(actions)
        says = np.arange(self.num_envs) % 2 == 0
        values, known = self.convert(np.where(says, 2.0, np.nan)), self.convert(says)
        part = {"y": values, "names": np.array(["a"] * self.num_envs)}
        return *results, {"x": values, "_x": known, "p": part, "_p": known}


@pytest.mark.parametrize(
    "convert", [np.asarray, torch.as_tensor]
)  # as returned by simulators on a GPU
def test_vector_environment_masks_mark_the_lanes_that_have_a_value(convert: Any) -> None:
    inner = MaskedInfos(4)
    inner.convert = convert
    env = VectorGymEnv(inner, 0, info_keys={"x": float, "p/y": "int8"})
    assert not env.reset()[0]["x"].any()
    stepped = env.step(DictTensor({"action": torch.zeros(4).long()}))[0][0]
    assert stepped["x"].tolist() == stepped["p/y"].tolist() == [2, 0, 2, 0]


def one(keys: Any, extra: Any = None) -> Any:
    env = GymEnv([InfoEnv(extra=extra)], 0, info_keys=keys)
    env.reset()
    return env.step(DictTensor({"action": torch.zeros(1).long()}))[0][0]


@pytest.mark.parametrize(
    ("keys", "given", "dtype", "stored"),
    [
        ({"x": torch.float16}, 0.5, torch.float16, 0.5),
        ({"x": (bool, (2,))}, np.array([0, 1]), torch.bool, [False, True]),
        ({"x": ("int8", 2)}, (3, 4), torch.int8, [3, 4]),
        ({"x": (float, 2)}, torch.ones(2, requires_grad=True), torch.float32, [1, 1]),
        ({"x": float}, None, torch.float32, 0),
        ({"x": float}, float("nan"), torch.float32, float("nan")),
        (["x"], 0.1, torch.float32, np.float32(0.1)),
        (["x/y/z"], {"y": {"z": 3}}, torch.float32, 3),
    ],
)
def test_values_and_dtypes_are_those_of_the_infos(
    keys: Any, given: Any, dtype: torch.dtype, stored: Any
) -> None:
    value = one(keys, {"x": given})[next(iter(keys))][0]
    assert value.dtype == dtype
    np.testing.assert_array_equal(value.numpy(), stored)


@pytest.mark.parametrize(
    ("keys", "given"),
    [
        (["x"], "text"),
        (["x"], {"y": 1}),
        (["x"], 2**24 + 1),
        ({"x": int}, 0.5),
        ({"x": bool}, 2),
        ({"x": (float, 2)}, [[1], [2, 3]]),
    ],
)
def test_invalid_input_is_refused(keys: Any, given: Any) -> None:
    with pytest.raises(EnvSpecError, match="info 'x'") as caught:
        one(keys, {"x": given})
    assert caught.value.where.lane == 0


@pytest.mark.parametrize(
    ("create", "n_workers"),
    [
        (lambda seed, **keys: GymEnv([InfoEnv()], seed, **keys), 2),
        (lambda seed, **keys: VectorGymEnv(OwnVectorEnv([InfoEnv] * 2), seed, **keys), 0),
        (lambda seed, **keys: ParallelEnvManager([InfoEnv] * 2, seed=seed, **keys), 0),
    ],
)
def test_a_key_that_never_appears_is_warned_about_once(
    create: Any, n_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def create_env(seed: int) -> Any:
        return create(seed, info_keys={"succes": bool, "t": float})

    with (
        caplog.at_level(logging.WARNING, "rlpool"),
        EpisodeBatcher(5, 8, BinaryAgent, {}, create_env, {}, n_workers, seeds=1) as batcher,
    ):
        batcher.execute(8)
        assert not batcher.get()["_succes"].any()
    (text,) = [text for text in caplog.messages if "'succes'" in text]
    assert "'success'" in text
