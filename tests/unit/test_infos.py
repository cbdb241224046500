"""``agent_info`` and ``env_info`` may be dicts of tensors, arrays, lists and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlpool import DictTensor, GymEnv, MonoThreadEpisodeBatcher, SpecError
from rlpool.data.infos import info_rows
from rlpool.testing import CountingEnv, check_agent

from support.agents import InfoEcho

N = 4
TENSORS = {
    "id": torch.arange(N),
    "length": torch.tensor([2, 3, 2, 1]),
    "goal": torch.arange(2.0 * N).view(N, 2),
    "is_easy": torch.tensor([True, False, True, False]),
}
SAME: list[Any] = [
    DictTensor(TENSORS),
    {key: tensor.numpy() for key, tensor in TENSORS.items()},
    {key: tuple(tensor.tolist()) for key, tensor in TENSORS.items()},
    {key: list(tensor) for key, tensor in TENSORS.items()},
    {key: list(tensor.numpy()) for key, tensor in TENSORS.items()},
]
REFUSED: list[tuple[Any, str]] = [
    *(({"key": value}, "'key' in env_info") for value in ("easy", ["a"] * N, None, {"x": 1})),
    *(({"key": value}, "'key' in env_info") for value in ([[1], [1, 2], [1], [1]], [2**70] * N)),
    *(({"key": value}, "'key' in env_info") for value in (1e300, [0.5, 1e39, 0.0, 0.0])),
    ({"length": 1, "key": torch.zeros(N).bfloat16()}, "'key' in env_info"),
    *(({"key": value}, "'key' in env_info") for value in ([1, 2, 3], torch.zeros(5, 2), [])),
    *((info, "env_info") for info in ([1, 2], torch.arange(N), "task")),
    ({3: [1, 2, 3, 4]}, "key 3 in env_info"),
]


class OptionsEnv(CountingEnv):
    """Environment that keeps the options of its resets."""

    seen: list[Any]

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seen.append(options)
        return super().reset(seed=seed, options=options)


def create_env(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(), CountingEnv()], seed)


def test_all_kinds_of_infos_are_equivalent() -> None:
    for info in SAME:
        rows = info_rows("env_info", info, N)
        assert rows.specs() == DictTensor(TENSORS).specs()
        assert all(torch.equal(rows[key], tensor) for key, tensor in TENSORS.items())


def test_a_number_applies_to_all_rows_and_keeps_its_dtype() -> None:
    values = {
        torch.int64: 3,
        torch.float32: 2.5,
        torch.bool: True,
        torch.float64: np.float64(2.5),
        torch.int32: torch.tensor(3, dtype=torch.int32),
        torch.uint8: np.array(7, np.uint8),
    }
    rows = info_rows("env_info", {str(dtype): value for dtype, value in values.items()}, N)
    for dtype, value in values.items():
        assert rows[str(dtype)].dtype == dtype
        assert rows[str(dtype)].tolist() == [float(value)] * N


@pytest.mark.parametrize(("info", "named"), REFUSED, ids=range(len(REFUSED)))
def test_other_objects_are_refused_by_name(info: Any, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        info_rows("env_info", info, N)


def test_environments_and_checks_accept_dicts_too() -> None:
    envs = [OptionsEnv(), OptionsEnv()]
    GymEnv(envs).reset({"goal": [[1.0, 2.0], [3.0, 4.0]], "is_easy": True})
    goals = [1.0, 2.0], [3.0, 4.0]
    assert [env.seen for env in envs] == [[{"goal": goal, "is_easy": True}] for goal in goals]
    check_agent(InfoEcho, CountingEnv, agent_info={"id": 1})


@pytest.mark.parametrize("convert", [torch.as_tensor, list])
def test_rows_follow_their_episodes_and_later_changes_do_not_affect_a_request(convert: Any) -> None:
    info = {"id": convert([1, 2]), "length": convert([3, 1])}
    with MonoThreadEpisodeBatcher(InfoEcho, {}, create_env, {}, seeds=1) as batcher:
        with pytest.raises(SpecError, match="'id' in agent_info"):
            batcher.execute(2, {"id": [1, 2, 3]}, info)
        batcher.execute(2, info, info)
        for values in info.values():
            values[0] = 9
        first = batcher.get()
        assert first is not None
        first.info["env_info/length"][:] = 7  # the caller's own
        batcher.reexecute()
        for result in (first, batcher.get()):
            assert result is not None
            assert result["info_id"][:, 0].tolist() == [1, 2]
            assert result["_reward"][:, 0].tolist() == [1001, 2001]
            assert result.lengths.tolist() == [3, 1]


def test_options_are_python_values_and_an_empty_info_becomes_none() -> None:
    env = OptionsEnv(length=1)
    task = torch.tensor([4], dtype=torch.int16)
    with MonoThreadEpisodeBatcher(
        InfoEcho, {}, lambda seed: GymEnv([env], seed), {}, seeds=1
    ) as batcher:
        for info in ({}, DictTensor(), None):
            batcher.execute(1, info, info)
            assert batcher.get()["info_id"].tolist() == [[-1]]  # type: ignore[index]
        assert set(map(repr, env.seen)) == {"None"}
        batcher.execute(1, {"id": 0}, {"task": task, "x": np.float32(0.5), "length": 1})
        batcher.get()
    assert repr(env.seen[-1]) == "{'task': 4, 'x': 0.5, 'length': 1}"
    assert task.tolist() == [4]
