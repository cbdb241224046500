"""What a pool holds after whatever was added, and what it refuses."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlpool import (
    Batcher,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    Pool,
    SpecError,
    TemporalDictTensor,
    UsageError,
)
from rlpool.slots.trajectories import DerivedTensors, Successor

from support.agents import FunctionAgent
from support.envs import COUNTING_SPACE, CountingEnv


def filled(n: int = 6, pool_size: int = 10, **options: Any) -> Pool:
    """A pool with an episode of n steps: the state counts from 0, the reward is the state."""
    pool = Pool(pool_size=pool_size, seed=0, **options)
    for step in range(n):
        pool([float(step)] * 3, step, [step + 1.0] * 3, float(step), step == n - 1)
    return pool


# Single transitions -----------------------------------------------------------------------------


def test_transitions_that_are_added_to_a_chosen_sub_pool_are_joined_to_an_episode() -> None:
    pool = Pool(processes=2, pool_size=20, seed=0)
    for step in range(6):
        for index in (0, 1):
            frame = np.full(3, 10.0 * index + step)
            pool(frame, 0, frame + 1, 1.0, step == 5, index)
    assert sorted(set(pool.sample_sequences(12, 8).lengths.tolist())) == [1, 2, 3, 4, 5, 6]
    assert pool._store is not None
    assert pool._store.n_finals <= 4


def test_a_transition_that_is_cleared_together_with_the_one_that_follows_is_given_back_once() -> (
    None
):
    pool = Pool(processes=2, pool_size=2, clearing_freq=2, window_size_=2, random=False, seed=0)
    frames = np.arange(30.0).reshape(10, 3)
    pool(frames[0], 0, frames[1], 0.0, False, 0)
    pool(frames[1], 0, frames[2], 0.0, False, 0)  # the second one: both go
    assert pool.lengths == [0, 0]
    pool(frames[3], 0, frames[4], 0.0, False, 0)
    pool(frames[5], 0, frames[6], 0.0, False, 1)
    np.testing.assert_array_equal(pool.transitions()["_frame"], frames[[4, 6]])


def test_pool_is_a_method_that_does_what_calling_the_pool_does() -> None:
    one, other = Pool(processes=2, pool_size=6, seed=0), Pool(processes=2, pool_size=6, seed=0)
    for step in range(4):
        arguments = ([float(step)] * 3, step, [step + 1.0] * 3, 1.0, step == 3)
        one.pool(*arguments, index=step % 2)
        other(*arguments, step % 2)
    assert one.lengths == [2, 2]
    for mine, its in zip(one.get_pool(), other.get_pool(), strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize(
    "reward",
    [
        1,
        0.1,
        np.int64(2**60 + 1),
        np.array([0.1]),
        torch.tensor(0.1, dtype=torch.float64),
    ],
    ids=repr,
)
def test_rewards_of_single_transitions_are_float32(reward: Any) -> None:
    pool = Pool(pool_size=5)
    pool.pool([0.0], 0, [1.0], reward, False)
    stored = pool.get_pool()[3]
    assert stored.dtype == np.float32
    assert stored.tolist() == [np.float32(np.asarray(reward).item())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_rewards_of_trajectories_are_float32(dtype: torch.dtype) -> None:
    pool = Pool(pool_size=5)
    rewards = torch.tensor([[0.0, 1.0]]).to(dtype)
    pool.extend(TemporalDictTensor({"reward": rewards, "_reward": rewards}))
    pool.extend(TemporalDictTensor({"reward": rewards.float(), "_reward": rewards.float()}))
    every = pool.transitions()
    assert every["_reward"].dtype == every["reward"].dtype == torch.float32
    assert every["_reward"].tolist() == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("reward", [1e39, -1e39, np.float64(1e300), 10**39])
def test_a_finite_reward_beyond_float32_is_refused(reward: Any) -> None:
    pool = Pool(pool_size=5)
    with pytest.raises(SpecError, match=r"r should|'_reward' has values such as"):
        pool.pool([0.0], 0, [1.0], reward, False)
    assert not pool.specs
    steps = {"_reward": torch.full((1, 2), float(reward), dtype=torch.float64)}
    with pytest.raises(SpecError, match="scale the rewards"):
        pool.extend(TemporalDictTensor(steps))
    assert len(pool) == 0


def test_a_next_state_with_fractions_is_not_cut_down_to_an_integer_state() -> None:
    pool = Pool(pool_size=5)
    pool(0, 0, 0.5, 1.0, False)
    pool(0.5, 0, 1, 1.0, False)
    s, _, next_s, _, _ = pool.get_pool()
    assert s.tolist() == [0.0, 0.5]
    assert next_s.tolist() == [0.5, 1.0]
    assert s.dtype == next_s.dtype == np.float64


def test_a_python_float_that_float32_cannot_hold_is_kept_in_float64() -> None:
    pool = Pool(pool_size=5)
    pool(1e39, 0, 1e39, 0.0, False)
    assert pool.get_pool()[0].tolist() == pool.get_pool()[2].tolist() == [1e39]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([[0.0], [1.0, 2.0]], 0, [1.0], 0.0, False), "s should"),
        ((torch.zeros(1, dtype=torch.bfloat16), 0, [1.0], 0.0, False), "s should"),
        (([0.0], 0, [1.0, 2.0], 0.0, False), "next_s has"),
        (([0.0, 0.0], 0, [1.0, 0.0], 0.0, False), "'frame'"),
        (({"x": [0.0]}, 0, {"x": [0.0]}, 0.0, False), "frame"),
        (([0.0], 0.5, [1.0], 0.0, False), "'action'"),
        (([0.0], 0, [1.0], None, False), "r should"),
        (([0.0], 0, [1.0], [1.0, 2.0], False), "r should"),
        (([0.0], 0, [1.0], 0.0, "yes"), "done should"),
        (([0.0], 0, [1.0], 0.0, float("nan")), "done should be True or False"),
        (([0.0], 0, [1.0], 0.0, 2), "done should be True or False"),
    ],
)
def test_a_single_transition_that_does_not_fit_is_refused_and_nothing_is_lost(
    arguments: Any, name: str
) -> None:
    pool = Pool(pool_size=5, seed=0)
    pool([0.0], 0, [1.0], 1.0, False)
    before = pool.transitions()
    with pytest.raises(SpecError, match=name):
        pool(*arguments)
    pool([1.0], 0, [2.0], 2.0, True)
    assert pool.transitions().index(slice(0, 1))["_frame"].equal(before["_frame"])
    assert pool.transitions()["frame"].tolist() == [[0.0], [1.0]]
    assert max(pool.sample_sequences(2, 2).lengths.max() for _ in range(20)) == 2


def test_a_termination_that_is_not_done_is_refused() -> None:
    pool = filled()
    with pytest.raises(SpecError, match="terminated"):
        pool([0.0] * 3, 0, [1.0] * 3, 0.0, False, terminated=True)
    assert len(pool) == 6


@pytest.mark.parametrize(
    ("dtype", "value"), [(np.int8, 300), (np.uint8, np.uint16(256)), (np.float16, 1e6)]
)
def test_a_value_that_the_stored_dtype_does_not_hold_is_refused(dtype: Any, value: Any) -> None:
    pool = Pool(pool_size=5)
    pool([0.0], dtype(3), [1.0], 0.0, False)
    with pytest.raises(SpecError, match="'action' has values such as"):
        pool([1.0], value, [2.0], 0.0, False)
    with pytest.raises(SpecError, match="'action' has values such as"):
        pool.extend(
            TemporalDictTensor(
                {
                    "frame": torch.zeros(1, 2, 1),
                    "_frame": torch.zeros(1, 2, 1),
                    "action": torch.from_numpy(np.array([[1, value]])),
                    "_reward": torch.zeros(1, 2),
                    "_done": torch.zeros(1, 2, dtype=torch.bool),
                    "_terminated": torch.zeros(1, 2, dtype=torch.bool),
                }
            )
        )
    pool([1.0], np.asarray(value).dtype.type(4), [2.0], 0.0, True)
    assert pool.get_pool()[1].tolist() == [3, 4]
    assert pool.get_pool()[1].dtype == dtype


def test_an_episode_that_is_done_does_not_go_on_even_if_the_states_are_the_same() -> None:
    pool = Pool(pool_size=10, seed=0)
    for _ in range(4):
        pool(np.zeros(3), 0, np.zeros(3), 1.0, True)
    assert pool.sample_sequences(4, 4).lengths.tolist() == [1] * 4


def test_states_and_actions_of_several_parts_are_stored_under_their_names() -> None:
    pool = Pool(pool_size=5, seed=0)
    for step in range(3):
        s, after = ({"eye": [step + k] * 9, "body": {"speed": step + k}} for k in (0, 1))
        pool(s, {"turn": step, "push": 0.5}, after, 1.0, step == 2)
    every = pool.transitions()
    assert set(every.keys()) == {
        *("eye", "_eye", "body/speed", "_body/speed", "action/turn", "action/push"),
        *("_reward", "_done", "_terminated"),
    }
    assert every["_eye"][:, 0].tolist() == every["_body/speed"].tolist() == [1, 2, 3]
    assert sorted(pool.sample_sequences(3, 3).lengths.tolist())[-1] <= 3
    with pytest.raises(UsageError, match=r"transitions\(\)"):
        pool.get_pool()


@pytest.mark.parametrize("key", ["action", "_done", "_x"])
def test_a_state_with_a_key_that_is_taken_is_refused(key: str) -> None:
    state = {"x": [0.0], key: [1.0]}
    with pytest.raises(SpecError, match=f"keys that are taken: .'{key}'"):
        Pool(pool_size=5)(state, 0, state, 0.0, False)


# Windows ----------------------------------------------------------------------------------------


def held(n_added: int, pool_size: int, at_once: int = 1, **options: int) -> list[int]:
    """Numbers of the transitions that a pool holds after so many were added."""
    pool = Pool(pool_size=pool_size, seed=0, **options)
    for start in range(0, n_added, at_once):
        numbers = torch.arange(start, min(n_added, start + at_once))
        pool.extend(TemporalDictTensor({"number": numbers[None]}))
    got: list[int] = pool.transitions()["number"].tolist()
    return got


@pytest.mark.parametrize("at_once", [1, 5, 12])
def test_examples_of_the_document(at_once: int) -> None:
    assert held(12, 10, at_once) == list(range(2, 12))
    assert held(12, 10, at_once, window_size=3) == [8, 9, 10, 11]
    assert held(12, 10, at_once, clearing_freq=5, window_size_=2) == list(range(4, 12))


@pytest.mark.parametrize(
    ("pool_size", "processes", "expected"),
    [(10, 3, [4, 3, 3]), (11, 3, [4, 4, 3]), (9, 3, [3, 3, 3]), (3, 3, [1, 1, 1]), (7, 1, [7])],
)
def test_capacities_add_up_to_the_size_of_the_pool(
    pool_size: int, processes: int, expected: list[int]
) -> None:
    pool = Pool(processes=processes, pool_size=pool_size, seed=0)
    for index in range(processes):
        pool.extend(TemporalDictTensor({"number": torch.arange(2 * pool_size)[None]}), index)
    assert pool.lengths == expected


def test_transitions_go_to_sub_pools_in_inverse_proportion_to_their_length_plus_one() -> None:
    n = 500
    counts = np.zeros(3)
    pool = Pool(processes=3, pool_size=30, seed=3)
    for _ in range(n):
        pool.clear()
        for index, length in enumerate((0, 1, 3)):
            if length:
                pool.extend(TemporalDictTensor({"number": torch.arange(length)[None]}), index)
        before = np.array(pool.lengths)
        pool.extend(TemporalDictTensor({"number": torch.tensor([[9]])}))
        counts += np.array(pool.lengths) - before
    expected = np.array([4, 2, 1]) / 7 * n
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom, 0.001


# Trajectories -----------------------------------------------------------------------------------


def stored(tensors: dict[str, Tensor], lengths: list[int] | None = None) -> Any:
    """What a pool of its own holds after trajectories were added to it."""
    trajectories = TemporalDictTensor(tensors, None if lengths is None else torch.tensor(lengths))
    pool = Pool(pool_size=100, seed=0)
    pool.extend(trajectories)
    flat, got = trajectories.flatten(), pool.transitions()
    assert set(got.keys()) == set(flat.keys())
    for key, tensor in flat.items():
        assert got[key].dtype == tensor.dtype
        assert torch.equal(got[key], tensor), key
    return pool


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int16,
        torch.float16,
        torch.float64,
    ],
)
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    pool = stored({"frame": torch.randint(2, (2, 3, 12)).to(dtype)})
    assert pool.sample(3)["frame"].dtype == dtype
    assert pool.sample_sequences(3, 2)["frame"].dtype == dtype


def test_steps_are_found_in_arrays_with_steps_between_rows_that_are_no_whole_number() -> None:
    whole = torch.arange(60.0)
    stored({"frame": whole.as_strided((3, 4, 2), (11, 2, 1))})
    stored({"frame": whole.as_strided((3, 4, 2), (2, 2, 1))})  # rows overlap


def test_tensors_that_need_gradients_or_are_inferred_are_stored() -> None:
    with torch.inference_mode():
        inferred = torch.rand(2, 3, 4)
    pool = Pool(pool_size=10)
    pool.extend(TemporalDictTensor({"frame": torch.rand(2, 3, 4).requires_grad_(), "x": inferred}))
    batch = pool.sample(4)
    assert not batch["frame"].requires_grad
    assert not batch["x"].is_inference()


def test_rows_without_steps_add_nothing() -> None:
    pool = stored({"number": torch.arange(12).view(3, 4)}, [0, 2, 0])
    pool.extend(TemporalDictTensor({"number": torch.arange(12).view(3, 4)}, torch.zeros(3).long()))
    pool.extend(TemporalDictTensor({"number": torch.zeros(0, 4).long()}))
    pool.extend(TemporalDictTensor({}))
    assert len(pool) == 2


def test_trajectories_with_more_keys_than_the_pool_holds_are_stored_without_them() -> None:
    pool = Pool(pool_size=10)
    pool.extend(TemporalDictTensor({"frame": torch.ones(1, 2)}))
    pool.extend(TemporalDictTensor({"frame": torch.ones(1, 2), "value": torch.ones(1, 2)}))
    assert list(pool.sample(4).keys()) == ["frame"]


class DictEnv(CountingEnv):
    """Observations of several parts, one of them nested."""

    observation_space = spaces.Dict(
        {
            "pixels": spaces.Box(0, 255, (3, 4), np.uint8),
            "body": spaces.Dict({"speed": COUNTING_SPACE, "gear": spaces.Discrete(1000)}),
        }
    )

    def observation(self) -> Any:
        body = {"speed": super().observation(), "gear": np.int64(self.t)}
        return {"pixels": np.full((3, 4), self.t, np.uint8), "body": body}


def remember(
    state: DictTensor | None, observation: DictTensor, agent_info: Any, history: Any
) -> tuple[DictTensor, DictTensor, DictTensor]:
    """An agent with a state of five numbers that count the steps since the episode began."""
    n = observation.n_elems()
    if state is None:
        state = DictTensor({"memory": torch.zeros(n, 5)})
    output = {"action": state["memory"][:, 0].long() % 3, "value": state["memory"][:, :1] * 2}
    return state, DictTensor(output), DictTensor({"memory": state["memory"] + 1})


def create_env(seed: int, kind: Any, restarts: bool) -> GymEnv:
    lanes = [kind(length) for length in (3, 5)]
    return (GymEnvInf if restarts else GymEnv)(lanes, seed)


def collected(kind: Any, restarts: bool, n_windows: int = 3) -> list[TemporalDictTensor]:
    """Trajectories of a recurrent agent: whole episodes, or windows that episodes end within."""
    common: dict[str, Any] = {
        "create_agent": FunctionAgent,
        "agent_args": {"function": remember},
        "create_env": create_env,
        "env_args": {"kind": kind, "restarts": restarts},
        "n_threads": 0,
        "seeds": 0,
    }
    results = []
    if restarts:
        with Batcher(4, **common) as batcher:
            batcher.reset()
            for _ in range(n_windows):
                batcher.execute()
                results.append(batcher.get())
    else:
        with EpisodeBatcher(n_timesteps=4, n_slots=8, **common) as batcher:
            for _ in range(n_windows):
                batcher.execute(3)
                results.append(batcher.get())
    return results


@pytest.mark.parametrize("kind", [CountingEnv, DictEnv])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("storage", ["local", "memmap"])
def test_a_pool_holds_what_batchers_collect_bit_by_bit(
    kind: Any, restarts: bool, storage: str
) -> None:
    results = collected(kind, restarts)
    pool = Pool(pool_size=30, storage=storage, seed=0)
    for trajectories in results:
        pool.extend(trajectories)
    expected = DictTensor.cat([trajectories.flatten() for trajectories in results])
    got = pool.transitions()
    n = len(pool)
    assert n == min(30, expected.n_elems()) > 20
    assert set(got.keys()) == set(expected.keys())
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype
        assert torch.equal(got[key], tensor[-n:]), key


def test_a_change_in_place_before_the_successor_is_looked_at_is_refused_and_nothing_is_lost() -> (
    None
):
    pool = Pool(pool_size=100)
    first, second, third = collected(DictEnv, restarts=False)
    pool.extend(first)
    second["pixels"].zero_()
    with pytest.raises(UsageError, match="in place"):
        pool.extend(second)
    pool.extend(third)
    flat = DictTensor.cat([first.flatten(), third.flatten()])
    for key, tensor in pool.transitions().items():
        assert torch.equal(tensor, flat[key])


def test_steps_behind_which_lengths_were_cut_keep_the_value_that_followed_them() -> None:
    frame = torch.arange(24.0).view(2, 4, 3)
    lengths = np.array([4, 4])
    derived = {"_frame": Successor("frame", frame, np.full((2, 3), -1, np.float32), lengths)}
    trajectories = TemporalDictTensor._wrap(
        DerivedTensors({"frame": frame}, derived), torch.tensor([4, 2]), DictTensor()
    )
    pool = Pool(pool_size=10)
    pool.extend(trajectories)
    after = pool.transitions()["_frame"]
    assert torch.equal(after[:4], torch.cat([frame[0, 1:], torch.full((1, 3), -1.0)]))
    assert torch.equal(after[4:], frame[1, 1:3])


@pytest.mark.parametrize("width", [3, 4, 5, 10, 17])
def test_a_value_that_does_not_lead_to_the_next_step_ends_a_piece(width: int) -> None:
    frame = torch.rand(2, 6, width, dtype=torch.float32)
    after = torch.cat([frame[:, 1:], torch.rand(2, 1, width)], 1)
    after[0, 2, width - 1] += 1.0  # in the last word
    after[1, 4, 0] += 1.0
    pool = stored({"frame": frame, "_frame": after})
    assert pool._store.is_last[:12].nonzero()[0].tolist() == [2, 5, 10, 11]


def images(n_episodes: int, length: int, size: int) -> TemporalDictTensor:
    """Episodes of frames whose successors are theirs, but for the last ones."""
    frame = torch.randint(256, (n_episodes, length + 1, size), dtype=torch.uint8)
    done = torch.zeros(n_episodes, length, dtype=torch.bool)
    done[:, -1] = True
    steps = {
        "frame": frame[:, :-1],
        "_frame": frame[:, 1:],
        "action": torch.zeros(n_episodes, length, dtype=torch.int64),
        "_reward": torch.zeros(n_episodes, length),
        "_done": done,
        "_terminated": done,
    }
    return TemporalDictTensor(steps)


def test_the_next_frame_is_stored_once() -> None:
    pool = Pool(pool_size=1000)
    pool.extend(images(10, 100, 84 * 84))
    raw = 1000 * 84 * 84
    assert raw < pool.nbytes <= 1.05 * raw
    # Episodes of a hundred steps: a frame more for each, and some bytes per transition beside it.
    assert pool.nbytes == raw + 10 * 84 * 84 + 1000 * (8 + 4 + 1 + 1 + 1 + 4)


def test_values_after_the_step_are_taken_again_when_their_transitions_go() -> None:
    pool = Pool(pool_size=200)
    for _ in range(50):
        pool.extend(images(2, 25, 1000))
    assert pool._store is not None
    assert pool._store.n_finals <= 10


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"pool_size": None}, "pool_size"),
        ({"pool_size": True}, "pool_size"),
        ({"processes": 0}, "processes"),
        ({"processes": 11}, "pool_size should be an int of at least 11"),
        ({"window_size": 0}, "window_size"),
        ({"clearing_freq": 1, "window_size_": 0}, "window_size_"),
        ({"clearing_freq": 1}, "window_size_ is None"),
        ({"window_size_": 1}, "clearing_freq is None"),
        ({"storage": "disk"}, "storage 'disk'"),
        ({"directory": "/tmp"}, "directory"),
        ({"storage": "memmap", "directory": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"priority_exponent": float("nan")}, "priority_exponent"),
        ({"seed": -1}, "seed"),
        ({"keys": "frame"}, "keys"),
        ({"keys": []}, "keys"),
        ({"env": []}, "env is"),
        ({"env": "CartPole"}, "env is"),
        ({"env": [1]}, "environment 0"),
        ({"env": [CountingEnv()], "processes": 2}, "1 environments, processes is 2"),
        ({"env": [CountingEnv]}, "environment 0"),
        ({"env": [CountingEnv()], "policy": 3}, "policy is 3"),
        ({"env": [CountingEnv()], "timeout": -1.0}, "timeout"),
        ({"start_method": "fork"}, "start_method"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(SpecError, match=name):
        Pool(**{"pool_size": 10, **changes})


@pytest.mark.parametrize("number", [np.int64(7), np.int32(7), np.uint8(7)])
def test_numpy_integers_are_taken_for_ints(number: Any) -> None:
    pool = Pool(processes=number, pool_size=number, seed=number)
    pool([0.0], 0, [1.0], 0.0, False, number - number)
    assert pool.lengths == [1, 0, 0, 0, 0, 0, 0]
    assert torch.equal(pool.sample(np.int64(1))["frame"], torch.zeros(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("index", [2, -1, 0.0, True, [0]])
def test_a_sub_pool_that_does_not_exist_is_refused(index: Any) -> None:
    pool = Pool(processes=2, pool_size=10, seed=0)
    with pytest.raises(SpecError, match="index should be"):
        pool([0.0], 0, [1.0], 0.0, False, index)
    with pytest.raises(SpecError, match="index should be"):
        pool.extend(TemporalDictTensor({"frame": torch.zeros(1, 2)}), index)
    assert len(pool) == 0
    assert not pool.specs


@pytest.mark.parametrize("wrong", [None, [], {"frame": torch.zeros(2, 3)}, DictTensor({})])
def test_extend_takes_trajectories_only(wrong: Any) -> None:
    pool = filled()
    with pytest.raises(SpecError, match="TemporalDictTensor"):
        pool.extend(wrong)
    assert len(pool) == 6


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda steps: steps.pop("_reward"), "_reward"),
        (lambda steps: steps.update(frame=torch.zeros(1, 2, 4)), "frame"),
        (lambda steps: steps.update(frame=torch.zeros(1, 2, 3, dtype=torch.bfloat16)), "frame"),
        (lambda steps: steps.update(action=torch.zeros(1, 2)), "action"),
        (lambda steps: steps.update(_done=torch.zeros(1, 2)), "_done"),
    ],
)
def test_trajectories_that_do_not_fit_are_refused_and_nothing_is_lost(
    change: Callable[[dict[str, Any]], None], name: str
) -> None:
    pool = filled()
    before = pool.transitions()
    steps = {key: tensor[None, :2] for key, tensor in before.clone().items()}
    change(steps)
    with pytest.raises(SpecError, match=name):
        pool.extend(TemporalDictTensor(steps))
    for key, tensor in pool.transitions().items():
        assert torch.equal(tensor, before[key])


@pytest.mark.parametrize("key", ["index", "n_step_return"])
def test_a_key_that_samples_use_is_refused_and_can_be_left_out(key: str) -> None:
    trajectories = TemporalDictTensor({"frame": torch.zeros(1, 2), key: torch.zeros(1, 2)})
    with pytest.raises(SpecError, match=key):
        Pool(pool_size=5).extend(trajectories)
    pool = Pool(pool_size=5, keys=["frame"])
    pool.extend(trajectories)
    assert list(pool.sample(2)) == ["frame"]


def test_unknown_keys_of_transitions_are_named() -> None:
    with pytest.raises(SpecError, match="nothing_like_it"):
        filled().transitions(["frame", "nothing_like_it"])
    with pytest.raises(SpecError, match="keys is the string"):
        filled().transitions("frame")


def test_store_without_environments_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="env="):
        filled().store()


def test_a_forked_copy_of_a_shared_pool_only_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = filled(storage="shared")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for change in (pool.clear, lambda: pool.pool([0.0] * 3, 0, [1.0] * 3, 0.0, True)):
        with pytest.raises(UsageError, match="filled by the process that made it"):
            change()
    assert len(pool.transitions()["frame"]) == len(pool.sample(6)["frame"]) == 6


@pytest.mark.parametrize("storage", ["local", "shared", "memmap"])
@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_a_pool_is_not_copied_by_accident(storage: str, make_copy: Any) -> None:
    empty, pool = Pool(pool_size=5, storage=storage), filled(storage=storage)
    readers = [] if storage == "local" else [pickle.loads(pickle.dumps(pool))]
    for each in (empty, pool, *readers):
        with pytest.raises(UsageError, match=r"copied(.|\n)*transitions\(\)"):
            make_copy(each)
        with pytest.raises(UsageError, match="copied"):
            make_copy({"pool": each}) if make_copy is copy.deepcopy else make_copy(each)


@pytest.mark.parametrize("key", ["_done", "_terminated", "_truncated", "initial_state"])
def test_trajectories_with_flags_that_are_neither_true_nor_false_are_refused(key: str) -> None:
    steps = {"frame": torch.zeros(1, 2, 3), key: torch.tensor([[0.0, float("nan")]])}
    pool = Pool(pool_size=5)
    with pytest.raises(SpecError, match=f"'{key}' has values"):
        pool.extend(TemporalDictTensor(steps))
    pool.extend(TemporalDictTensor({**steps, key: steps[key].nan_to_num(1.0)}))
    assert len(pool) == 2
    pool.extend(TemporalDictTensor(steps, torch.tensor([1])))  # padding is not looked at
    assert len(pool) == 3
