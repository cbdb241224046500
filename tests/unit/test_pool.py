"""Pool: what users call, what it holds afterwards, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import DictTensor, Pool, SpecError, TemporalDictTensor, UsageError

SINGLE_KEYS = ["frame", "action", "_frame", "_reward", "_done", "_terminated"]


def filled(n: int = 6, pool_size: int = 10, **options: Any) -> Pool:
    """A pool with an episode of n steps: the state counts from 0, the reward is the state."""
    pool = Pool(pool_size=pool_size, seed=0, **options)
    for step in range(n):
        pool([float(step)] * 3, step, [step + 1.0] * 3, float(step), step == n - 1)
    return pool


# Single transitions --------------------------------------------------------------------------


def test_transitions_that_are_added_to_a_chosen_sub_pool_are_joined_to_an_episode() -> None:
    pool = Pool(processes=2, pool_size=20, seed=0)
    for step in range(6):
        for index in (0, 1):
            frame = np.full(3, 10.0 * index + step)
            pool(frame, 0, frame + 1, 1.0, step == 5, index)
    assert sorted(set(pool.sample_sequences(12, 8).lengths.tolist())) == [1, 2, 3, 4, 5, 6]
    assert pool._store is not None
    assert pool._store.n_finals <= 4


def test_keys_are_also_chosen_from_single_transitions() -> None:
    pool = filled(keys=["frame", "_frame", "_done"])
    assert list(pool.specs) == ["frame", "_done", "_frame"]
    assert pool.transitions()["_frame"][:, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_single_transition_without_a_key_that_is_stored_is_refused() -> None:
    pool = Pool(pool_size=5, keys=["frame", "hidden"])
    with pytest.raises(SpecError, match="hidden"):
        pool([0.0], 0, [1.0], 0.0, False)
    assert len(pool) == 0


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


def test_a_reward_of_one_may_be_followed_by_one_of_a_half() -> None:
    pool = Pool(pool_size=5)
    for reward in (1, 0.5, np.float64(0.25), torch.tensor(2), np.int8(3), True):
        pool([0.0], 0, [1.0], reward, False)
    assert pool.get_pool()[3].tolist() == [0.5, 0.25, 2.0, 3.0, 1.0]
    assert pool.specs["_reward"].dtype == np.float32


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
        True,
        np.float64(0.1),
        np.float16(0.5),
        np.int64(2**60 + 1),
        np.uint8(3),
        np.array(0.1),
        np.array([0.1]),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(7),
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


@pytest.mark.parametrize("reward", [float("inf"), -np.inf, np.float64("nan")])
def test_a_reward_that_is_not_finite_is_kept_as_it_is(reward: float) -> None:
    pool = Pool(pool_size=5)
    pool.pool([0.0], 0, [1.0], reward, False)
    np.testing.assert_array_equal(pool.get_pool()[3], np.array([reward], np.float32))


def test_a_python_float_that_float32_cannot_hold_is_kept_in_float64() -> None:
    pool = Pool(pool_size=5)
    pool(1e39, 0, 1e39, 0.0, False)
    assert pool.get_pool()[0].tolist() == pool.get_pool()[2].tolist() == [1e39]


def test_a_next_state_with_fractions_is_not_cut_down_to_an_integer_state() -> None:
    pool = Pool(pool_size=5)
    pool(0, 0, 0.5, 1.0, False)
    pool(0.5, 0, 1, 1.0, False)
    s, _, next_s, _, _ = pool.get_pool()
    assert s.tolist() == [0.0, 0.5]
    assert next_s.tolist() == [0.5, 1.0]
    assert s.dtype == next_s.dtype == np.float64


def test_the_dtype_of_the_first_state_is_kept() -> None:
    pool = Pool(pool_size=5)
    pool(np.zeros(2, np.float32), 0, np.ones(2), 1.0, False)
    pool(np.zeros(2), 0, np.ones(2, np.float16), 1.0, False)
    s, _, next_s, _, _ = pool.get_pool()
    assert s.dtype == next_s.dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((None, 0, [1.0], 0.0, False), "s should"),
        (("left", 0, [1.0], 0.0, False), "s should"),
        (([[0.0], [1.0, 2.0]], 0, [1.0], 0.0, False), "s should"),
        ((torch.zeros(1, dtype=torch.bfloat16), 0, [1.0], 0.0, False), "s should"),
        (([0.0], 0, [1.0, 2.0], 0.0, False), "next_s has"),
        (([0.0, 0.0], 0, [1.0, 0.0], 0.0, False), "'frame'"),
        (({"x": [0.0]}, 0, {"x": [0.0]}, 0.0, False), "frame"),
        (([0.0], None, [1.0], 0.0, False), "a should"),
        (([0.0], [0, 1], [1.0], 0.0, False), "'action'"),
        (([0.0], 0.5, [1.0], 0.0, False), "'action'"),
        (([0.0], 0, [1.0], None, False), "r should"),
        (([0.0], 0, [1.0], [1.0, 2.0], False), "r should"),
        (([0.0], 0, [1.0], 0.0, "yes"), "done should"),
        (([0.0], 0, [1.0], 0.0, None), "done should"),
        (([0.0], 0, [1.0], 0.0, float("nan")), "done should be True or False"),
        (([0.0], 0, [1.0], 0.0, np.float32("nan")), "done should be True or False"),
        (([0.0], 0, [1.0], 0.0, 0.5), "done should be True or False"),
        (([0.0], 0, [1.0], 0.0, 2), "done should be True or False"),
        (([0.0], 0, [1.0], 0.0, [True, False]), "done should"),
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


# What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"pool_size": None}, "pool_size"),
        ({"pool_size": 0}, "pool_size"),
        ({"pool_size": 1.5}, "pool_size"),
        ({"pool_size": True}, "pool_size"),
        ({"pool_size": "many"}, "pool_size"),
        ({"processes": 0}, "processes"),
        ({"processes": 11}, "pool_size should be an int of at least 11"),
        ({"processes": 2.0}, "processes"),
        ({"window_size": 0}, "window_size"),
        ({"window_size": 1.5}, "window_size"),
        ({"clearing_freq": 0, "window_size_": 1}, "clearing_freq"),
        ({"clearing_freq": 1, "window_size_": 0}, "window_size_"),
        ({"clearing_freq": 1}, "window_size_ is None"),
        ({"window_size_": 1}, "clearing_freq is None"),
        ({"storage": "disk"}, "storage 'disk'"),
        ({"storage": None}, "storage None"),
        ({"directory": "/tmp"}, "directory"),
        ({"storage": "memmap", "directory": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"priority_exponent": -1}, "priority_exponent"),
        ({"priority_exponent": float("nan")}, "priority_exponent"),
        ({"priority_exponent": float("inf")}, "priority_exponent"),
        ({"priority_exponent": "high"}, "priority_exponent"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "0"}, "seed"),
        ({"keys": "frame"}, "keys"),
        ({"keys": []}, "keys"),
        ({"keys": 3}, "keys"),
        ({"env": []}, "env has"),
        ({"env": 3}, "env is 3"),
        ({"env": [1]}, "environment 0"),
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


@pytest.mark.parametrize("index", [2, -1, 0.0, 1.5, "0", True, [0], np.array([0, 1])])
def test_a_sub_pool_that_does_not_exist_is_refused(index: Any) -> None:
    pool = Pool(processes=2, pool_size=10, seed=0)
    with pytest.raises(SpecError, match="index should be the number of a sub-pool"):
        pool([0.0], 0, [1.0], 0.0, False, index)
    with pytest.raises(SpecError, match="index should be the number of a sub-pool"):
        pool.extend(TemporalDictTensor({"frame": torch.zeros(1, 2)}), index)
    assert len(pool) == 0
    assert not pool.specs


def test_a_tensor_names_a_sub_pool() -> None:
    pool = Pool(processes=2, pool_size=10, seed=0)
    for step in range(3):
        pool([float(step)], 0, [step + 1.0], 0.0, False, torch.tensor(1))
    assert pool.lengths == [0, 3]
    assert max(pool.sample_sequences(3, 3).lengths.max() for _ in range(20)) == 3


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
        (lambda steps: steps.update(frame=torch.zeros(1, 2)), "frame"),
        (lambda steps: steps.update(frame=torch.zeros(1, 2, 3, dtype=torch.bfloat16)), "frame"),
        (lambda steps: steps.update(frame=torch.zeros(1, 2, 3, dtype=torch.complex64)), "frame"),
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


@pytest.mark.parametrize("key", ["index", "weight", "n_step_return", "n_step_discount"])
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


@pytest.mark.parametrize("key", ["action", "_reward", "_done", "_terminated", "_x"])
def test_a_state_with_a_key_that_is_taken_is_refused(key: str) -> None:
    state = {"x": [0.0], key: [1.0]}
    with pytest.raises(SpecError, match=f"keys that are taken: .'{key}'"):
        Pool(pool_size=5)(state, 0, state, 0.0, False)


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


def test_transitions_whose_next_states_are_not_stored_are_not_joined() -> None:
    pool = filled(keys=["frame", "action"])
    assert pool.sample_sequences(6, 6).lengths.tolist() == [1] * 6


def test_a_transition_does_not_follow_from_one_that_is_not_the_newest() -> None:
    pool = Pool(pool_size=10, seed=0)
    frames = torch.arange(30.0).view(10, 3)
    pool(frames[0], 0, frames[1], 1.0, False)
    done = torch.tensor([[False, True]])
    steps = {"frame": frames[None, 4:6], "_frame": frames[None, 5:7], "_reward": torch.zeros(1, 2)}
    steps.update(action=torch.zeros(1, 2, dtype=torch.int64), _done=done, _terminated=done)
    pool.extend(TemporalDictTensor(steps))
    pool(frames[1], 0, frames[2], 1.0, False)
    assert sorted(set(pool.sample_sequences(4, 4).lengths.tolist())) in ([1], [1, 2])
    np.testing.assert_array_equal(pool.transitions()["_frame"], frames[[1, 5, 6, 2]])
    batch = pool.sample(4, n_step=4, discount=1.0)
    assert torch.equal(batch["n_step_return"], batch["_reward"])


def test_after_clear_a_transition_follows_from_none() -> None:
    pool = Pool(pool_size=10, seed=0)
    frames = torch.arange(30.0).view(10, 3)
    pool(frames[0], 0, frames[1], 1.0, False)
    pool.clear()
    assert len(pool) == 0
    for start in (1, 3):
        pool(frames[start], 0, frames[start + 1], 1.0, False)
    np.testing.assert_array_equal(pool.transitions()["_frame"], frames[[2, 4]])
    pool(frames[4], 0, frames[5], 1.0, False)
    np.testing.assert_array_equal(pool.transitions()["_frame"], frames[[2, 4, 5]])


def test_an_episode_that_is_done_does_not_go_on_even_if_the_states_are_the_same() -> None:
    pool = Pool(pool_size=10, seed=0)
    for _ in range(4):
        pool(np.zeros(3), 0, np.zeros(3), 1.0, True)
    assert pool.sample_sequences(4, 4).lengths.tolist() == [1] * 4


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


# Resuming ------------------------------------------------------------------------------------


def test_the_state_of_an_empty_pool_empties_a_pool() -> None:
    pool = filled()
    pool.load_state_dict(Pool(pool_size=10).state_dict())
    assert len(pool) == 0
    pool([7.0] * 3, 0, [8.0] * 3, 1.0, True)
    assert pool.transitions()["_frame"].tolist() == [[8.0] * 3]


def test_a_state_that_is_refused_decides_nothing() -> None:
    state = filled().state_dict()
    del state["columns/frame/0.0"]
    pool = Pool(pool_size=10)
    with pytest.raises(SpecError, match="columns/frame"):
        pool.load_state_dict(state)
    pool.extend(TemporalDictTensor({"other": torch.ones(1, 2)}))
    assert list(pool.specs) == ["other"]


@pytest.mark.parametrize("state", [None, 3, {}, {"metadata": 3}, {"metadata": "{}"}, []])
def test_what_is_no_state_of_a_pool_is_refused(state: Any) -> None:
    pool = filled()
    with pytest.raises(SpecError, match="not the state of a pool"):
        pool.load_state_dict(state)
    assert len(pool) == 6
