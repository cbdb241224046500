"""What a pool holds after whatever was added, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlpool import (
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    Pool,
    SpecError,
    TemporalDictTensor,
    UsageError,
)
from rlpool.slots.trajectories import Slice, StepTensors

from support.agents import StepCounter
from support.envs import CountingEnv, assert_same_tensors, create_counting

SPARSE = torch.ones(1).to_sparse()


def filled(n: int = 6, pool_size: int = 10, **options: Any) -> Pool:
    """A pool with an episode of n steps: the state counts from 0, the reward is the state."""
    pool = Pool(pool_size=pool_size, seed=0, **options)
    for step in range(n):
        pool([float(step)] * 3, step, [step + 1.0] * 3, float(step), step == n - 1)
    return pool


# Single transitions -----------------------------------------------------------------------------


def test_values_of_single_transitions_keep_what_they_are() -> None:
    pool = Pool(pool_size=5)
    pool.pool(0, 0, 0.5, np.int64(2**60 + 1), False)  # next states may have fractions
    pool(1e39, 0, 1, torch.tensor(0.1, dtype=torch.float64), False)  # beyond float32
    s, _, next_s, rewards, _ = pool.get_pool()
    assert (s.tolist(), next_s.tolist()) == ([0.0, 1e39], [0.5, 1.0])
    assert s.dtype == next_s.dtype == np.float64
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [np.float32(2**60), np.float32(0.1)]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([[0.0], [1.0, 2.0]], 0, [1.0], 0.0, False), "'frame'"),
        ((SPARSE, 0, SPARSE, 0.0, False), "object"),
        (([0.0], 0, [1.0, 2.0], 0.0, False), "next_s has"),
        (([0.0, 0.0], 0, [1.0, 0.0], 0.0, False), "'frame'"),
        (({"x": [0.0]}, 0, {"x": [0.0]}, 0.0, False), "frame"),
        (({"_done": [0.0]}, 0, {"_done": [0.0]}, 0.0, False), "taken: .'_done'"),
        (([0.0], 0.5, [1.0], 0.0, False), "'action'"),
        (([0.0], 300, [1.0], 0.0, False), "'action' should fit int8, got 300"),
        (([0.0], 0, [1.0], None, False), "'_reward'"),
        (([0.0], 0, [1.0], [1.0, 2.0], False), "r should"),
        (([0.0], 0, [1.0], 1e39, False), "'_reward' should fit float32, got 1e"),
        (([0.0], 0, [1.0], 10**39, False), "'_reward'"),
        (([0.0], 0, [1.0], 0.0, "yes"), "done should"),
        (([0.0], 0, [1.0], 0.0, float("nan")), "done should be True or False"),
        (([0.0], 0, [1.0], 0.0, False, None, True), "terminated is true, but done"),
        (([0.0], 0, [1.0], 0.0, False, 1), "index should be"),
        (([0.0], 0, [1.0], 0.0, False, True), "index should be"),
    ],
)
def test_a_single_transition_that_does_not_fit_is_refused_and_nothing_is_lost(
    arguments: Any, name: str
) -> None:
    pool = Pool(pool_size=5, seed=0)
    pool([0.0], np.int8(3), [1.0], 1.0, False)
    before = pool.transitions()
    *given, terminated = arguments if len(arguments) == 7 else (*arguments, None)
    with pytest.raises(SpecError, match=name):
        pool(*given, terminated=terminated)
    pool([1.0], np.int64(4), [2.0], 2.0, True)
    assert pool.transitions().index(slice(0, 1))["_frame"].equal(before["_frame"])
    assert pool.transitions()["frame"].tolist() == [[0.0], [1.0]]
    assert pool.get_pool()[1].dtype == np.int8
    assert max(pool.sample_sequences(2, 2).lengths.max() for _ in range(20)) == 2


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
    with pytest.raises(UsageError, match=r"transitions\(\)"):
        pool.get_pool()


# Windows ----------------------------------------------------------------------------------------


def kept(n_added: int, pool_size: int, at_once: int = 1, **options: int) -> list[int]:
    """Numbers of the transitions that a pool holds after so many were added."""
    pool = Pool(pool_size=pool_size, seed=0, **options)
    for start in range(0, n_added, at_once):
        numbers = torch.arange(start, min(n_added, start + at_once))
        pool.extend(TemporalDictTensor({"number": numbers[None]}))
    got: list[int] = pool.transitions()["number"].tolist()
    return got


@pytest.mark.parametrize("at_once", [1, 4, 12])
def test_examples_of_the_document(at_once: int) -> None:
    assert kept(12, 10, at_once) == list(range(2, 12))
    assert kept(12, 10, at_once, window_size=3) == [8, 9, 10, 11]
    assert kept(12, 10, at_once, clearing_freq=5, window_size_=2) == list(range(4, 12))


# Trajectories -----------------------------------------------------------------------------------


def stored(tensors: dict[str, Tensor], lengths: list[int] | None = None) -> Any:
    """What a pool of its own holds after trajectories were added to it."""
    trajectories = TemporalDictTensor(tensors, None if lengths is None else torch.tensor(lengths))
    pool = Pool(pool_size=100, seed=0)
    pool.extend(trajectories)
    assert_same_tensors(pool.transitions(), trajectories.flatten())
    return pool


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float16, torch.float64])
def test_dtypes_are_kept_but_for_rewards(dtype: torch.dtype) -> None:
    rewards = torch.tensor([[0.0, 1.0]]).to(dtype)
    pool = stored({"frame": torch.randint(2, (2, 3, 12)).to(dtype), "_done": torch.zeros(2, 3) > 0})
    assert pool.sample(3)["frame"].dtype == pool.sample_sequences(3, 2)["frame"].dtype == dtype
    pool = Pool(pool_size=5)
    pool.extend(TemporalDictTensor({"reward": rewards, "_reward": rewards}))
    assert pool.transitions()["_reward"].dtype == pool.transitions()["reward"].dtype
    assert pool.transitions()["_reward"].equal(torch.tensor([0.0, 1.0]))


def test_empty_rows_add_nothing_and_keys_that_are_not_held_are_left_out() -> None:
    pool = stored({"number": torch.arange(12).view(3, 4)}, [0, 2, 0])
    pool.extend(TemporalDictTensor({"number": torch.arange(12).view(3, 4)}, torch.zeros(3).long()))
    pool.extend(TemporalDictTensor({"number": torch.zeros(0, 4).long()}))
    pool.extend(TemporalDictTensor({}))
    assert len(pool) == 2
    pool.extend(TemporalDictTensor({"number": torch.ones(1, 2).long(), "more": torch.ones(1, 2)}))
    assert list(pool.sample(4).keys()) == ["number"]


def test_tensors_that_need_gradients_or_are_inferred_are_stored() -> None:
    with torch.inference_mode():
        inferred = torch.rand(2, 3, 4)
    pool = Pool(pool_size=10)
    pool.extend(TemporalDictTensor({"frame": torch.rand(2, 3, 4).requires_grad_(), "x": inferred}))
    batch = pool.sample(4)
    assert not batch["frame"].requires_grad
    assert not batch["x"].is_inference()


def test_a_change_in_place_before_the_successor_is_looked_at_is_refused_and_nothing_is_lost() -> (
    None
):
    pool = Pool(pool_size=100)
    with EpisodeBatcher(4, 8, StepCounter, {}, create_counting, n_threads=0) as batcher:
        for _ in range(3):
            batcher.execute(3)
        first, second, third = (batcher.get() for _ in range(3))
    pool.extend(first)
    second["frame"].zero_()
    with pytest.raises(UsageError, match="in place"):
        pool.extend(second)
    pool.extend(third)
    flat = DictTensor.cat([first.flatten(), third.flatten()])
    assert_same_tensors(pool.transitions(), flat)


def test_steps_behind_which_lengths_were_cut_keep_the_value_that_followed_them() -> None:
    frame = torch.arange(24.0).view(2, 4, 3)
    lengths, finals = np.array([4, 4]), np.full((2, 3), -1, np.float32)
    part = Slice({"frame": frame.numpy()}, {"frame": finals}, lengths, lengths)
    steps = StepTensors(["frame", "_frame"], lambda: part)
    trajectories = TemporalDictTensor._wrap(steps, torch.tensor([4, 2]), DictTensor())
    pool = Pool(pool_size=10)
    pool.extend(trajectories)
    after = pool.transitions()["_frame"]
    assert torch.equal(after[:4], torch.cat([frame[0, 1:], torch.full((1, 3), -1.0)]))
    assert torch.equal(after[4:], frame[1, 1:3])


def test_the_next_frame_is_stored_once_and_room_for_last_ones_is_used_again() -> None:
    pool, size = Pool(pool_size=200), 84 * 84
    for _ in range(20):
        frame = torch.randint(256, (2, 26, size), dtype=torch.uint8)
        steps = {"frame": frame[:, :-1], "_frame": frame[:, 1:], "_reward": torch.zeros(2, 25)}
        pool.extend(TemporalDictTensor(steps))
    # A frame more per episode, and some bytes per transition.
    assert pool.nbytes <= (200 + 10) * size + 200 * (4 + 1 + 4)


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"pool_size": None}, "pool_size"),
        ({"pool_size": True}, "pool_size"),
        ({"processes": 0}, "n_workers"),
        ({"processes": 11}, "pool_size should be an int of at least 11"),
        ({"window_size": 0}, "window_size"),
        ({"clearing_freq": 1, "window_size_": 0}, "window_size_"),
        ({"clearing_freq": 1}, "window_size_ is None"),
        ({"window_size_": 1}, "clearing_freq is None"),
        ({"storage": "shared"}, "storage should be .*, got 'shared'"),
        ({"frame_stack": 1}, "frame_stack"),
        ({"directory": "/tmp"}, "directory"),
        ({"storage": "memmap", "directory": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"priority_exponent": float("nan")}, "priority_exponent"),
        ({"seed": -1}, "seed"),
        ({"keys": "frame"}, "keys"),
        ({"keys": []}, "keys"),
        ({"env": []}, "env should be a list"),
        ({"env": "CartPole"}, "env should be a list"),
        ({"env": [1]}, "environment 0"),
        ({"env": [CountingEnv()], "processes": 2}, "list of 2 environments"),
        ({"env": [CountingEnv]}, "environment 0"),
        ({"env": [GymEnv([CountingEnv()])]}, "environment 0"),
        ({"env": [CountingEnv()], "policy": 3}, "policy is 3"),
        ({"env": [CountingEnv()], "timeout": -1.0}, "timeout"),
        ({"start_method": "fork"}, "start_method"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(SpecError, match=name):
        Pool(**{"pool_size": 10, **changes})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda steps: steps.pop("_reward"), "_reward"),
        (lambda steps: steps.update(frame=torch.zeros(1, 2, 4)), "frame"),
        (lambda steps: steps.update(frame=torch.zeros(1, 2, 3, dtype=torch.bfloat16)), "frame"),
        (lambda steps: steps.update(action=torch.full((1, 2), 0.5)), "action"),
        (lambda steps: steps.update(_done=torch.full((1, 2), 0.5)), "_done"),
        (
            lambda steps: steps.update(_reward=torch.full((1, 2), 1e39, dtype=torch.float64)),
            "_reward",
        ),
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
    assert_same_tensors(pool.transitions(), before)


def test_keys_and_sub_pools_that_are_not_there_are_named() -> None:
    pool = filled()
    for keys, name in (["frame", "nothing_like_it"], "nothing_like_it"), ("frame", "keys is str"):
        with pytest.raises(SpecError, match=name):
            pool.transitions(keys)
    for index in (1, -1, 0.0, True, [0]):
        with pytest.raises(SpecError, match="index should be"):
            pool.extend(TemporalDictTensor({"frame": torch.zeros(1, 2, 3)}), index)
    with pytest.raises(SpecError, match="TemporalDictTensor"):
        pool.extend(DictTensor({}))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="env="):
        pool.store()
    number = np.uint8(7)  # NumPy's integers are as good as Python's
    assert Pool(processes=number, pool_size=number, seed=number).lengths == [0] * 7


@pytest.mark.parametrize("key", ["index", "n_step_return"])
def test_a_key_that_samples_use_is_refused_and_can_be_left_out(key: str) -> None:
    trajectories = TemporalDictTensor({"frame": torch.zeros(1, 2), key: torch.zeros(1, 2)})
    with pytest.raises(SpecError, match=key):
        Pool(pool_size=5).extend(trajectories)
    pool = Pool(pool_size=5, keys=["frame"])
    pool.extend(trajectories)
    assert list(pool.sample(2)) == ["frame"]


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pool_is_not_copied_by_accident(make_copy: Any) -> None:
    with pytest.raises(UsageError, match="state_dict"):
        make_copy(filled())


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
