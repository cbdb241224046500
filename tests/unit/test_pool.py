"""Content of a pool after additions, refusals, and accepted states."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

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


def filled(n: int = 6, **options: Any) -> Pool:
    """Return a pool with an episode of n steps; states count from 0, rewards equal the state."""
    pool = Pool(**{"pool_size": 10, "seed": 0, **options})
    for step in range(n):
        pool([step] * 3, np.int8(step), [step + 1] * 3, float(step), step == n - 1)
    return pool


# Single transitions -----------------------------------------------------------------------------


def test_values_of_single_transitions_are_stored_exactly() -> None:
    pool = Pool(pool_size=5)
    pool.pool(0, 0, 0.5, np.int64(2**60 + 1), False)  # next states may have fractions
    pool(1e39, 0, 1, torch.tensor(0.1, dtype=torch.float64), False)  # beyond float32
    s, _, next_s, rewards, _ = pool.get_pool()
    assert (s.tolist(), next_s.tolist()) == ([0.0, 1e39], [0.5, 1.0])
    assert s.dtype == next_s.dtype == np.float64
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [np.float32(2**60), np.float32(0.1)]


def test_nested_states_and_actions_are_stored_under_their_names() -> None:
    pool, loaded = Pool(pool_size=5, seed=0), Pool(pool_size=5)
    for step in range(3):
        s, after = (
            {"eye": [step + k] * 9, "body": {"speed": step + k}, "nothing": []} for k in (0, 1)
        )
        pool(s, {"turn": step, "push": 0.5}, after, 1.0, step == 2)
    loaded.load_state_dict(pool.state_dict())
    every = loaded.transitions()
    assert set(every.keys()) == {
        *("eye", "_eye", "body/speed", "_body/speed", "nothing", "_nothing"),
        *("action/turn", "action/push", "_reward", "_done", "_terminated"),
    }
    assert every["_eye"][:, 0].tolist() == every["_body/speed"].tolist() == [1, 2, 3]
    assert every["nothing"].shape == (3, 0)
    with pytest.raises(UsageError):
        pool.get_pool()


# Trajectories -----------------------------------------------------------------------------------


def test_dtypes_are_kept_except_for_rewards() -> None:
    for dtype in (torch.bool, torch.int16, torch.float16, torch.float64):
        pool, rewards = Pool(pool_size=5, seed=0), torch.tensor([[0.0, 1.0]]).to(dtype)
        frame = torch.randint(2, (1, 2, 12)).to(dtype)
        pool.extend(TemporalDictTensor({"frame": frame, "reward": rewards, "_reward": rewards}))
        every = pool.transitions()
        assert every["frame"].dtype == pool.sample(2)["frame"].dtype == dtype
        assert every["frame"].equal(frame[0])
        assert every["_reward"].equal(torch.tensor([0.0, 1.0]))
        assert every["_reward"].dtype == every["reward"].dtype


def test_tensors_with_gradients_or_from_inference_mode_are_stored_and_other_keys_omitted() -> None:
    with torch.inference_mode():
        inferred = torch.rand(2, 3, 4)
    pool = Pool(pool_size=10, keys=["frame", "x"])
    steps = {"frame": torch.rand(2, 3, 4).requires_grad_(), "x": inferred, "index": inferred}
    pool.extend(TemporalDictTensor({}))
    pool.extend(TemporalDictTensor(steps))
    batch = pool.sample(4)
    assert list(batch) == ["frame", "x"]
    assert not batch["frame"].requires_grad
    assert not batch["x"].is_inference()


def test_an_in_place_change_before_the_next_transition_is_refused() -> None:
    pool = Pool(pool_size=100)
    with EpisodeBatcher(4, 8, StepCounter, {}, create_counting, n_threads=0) as batcher:
        batcher.execute(3)
        result = batcher.get()
    result["frame"].zero_()
    with pytest.raises(UsageError, match="in place"):
        pool.extend(result)
    assert len(pool) == 0


def test_steps_at_a_shortened_end_keep_their_next_value() -> None:
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


def test_next_frames_are_stored_once_and_space_for_last_ones_is_reused() -> None:
    pool, size = Pool(pool_size=200), 84 * 84
    for _ in range(20):
        frame = torch.randint(256, (2, 26, size), dtype=torch.uint8)
        steps = {"frame": frame[:, :-1], "_frame": frame[:, 1:], "_reward": torch.zeros(2, 25)}
        pool.extend(TemporalDictTensor(steps))
    # One more frame per episode, and some bytes per transition.
    assert pool.nbytes <= (200 + 10) * size + 200 * (4 + 1 + 4)


# Refusals ---------------------------------------------------------------------------------------

NAN = float("nan")


def single(pool: Pool, terminated: Any = None, index: Any = None, **changes: Any) -> None:
    values = {"s": [0] * 3, "a": 0, "next_s": [1] * 3, "r": 1.0, "done": False}
    pool(
        *(changes.get(name, value) for name, value in values.items()), index, terminated=terminated
    )


def extend(pool: Pool, **changes: Any) -> None:
    """Add two of the existing steps with different tensors."""
    steps = {key: tensor[None, :2] for key, tensor in pool.transitions().items()}
    steps = {key: value for key, value in {**steps, **changes}.items() if value is not None}
    pool.extend(TemporalDictTensor(steps))


ZEROS, HALVES = torch.zeros(1, 2), torch.full((1, 2), 0.5)
REFUSED: list[tuple[Any, Any, str]] = [
    (lambda pool: single(pool, s=[[0.0], [1.0, 2.0], [3.0]]), SpecError, "'frame'"),
    (lambda pool: single(pool, s=[0] * 2, next_s=[1] * 2), SpecError, "'frame'"),
    (lambda pool: single(pool, s={"x": 0}, next_s={"x": 0}), SpecError, "frame"),
    (lambda pool: single(pool, s={"_done": 0}, next_s={"_done": 0}), SpecError, "'_done'"),
    (lambda pool: single(pool, a=0.5), SpecError, "'action'"),
    (lambda pool: single(pool, a=300), SpecError, "'action'"),
    (lambda pool: single(pool, r=[1.0, 2.0]), SpecError, "r "),
    (lambda pool: single(pool, r=10**39), SpecError, "'_reward'"),
    (lambda pool: single(pool, done=NAN), SpecError, "done"),
    (lambda pool: single(pool, terminated=True), SpecError, "terminated"),
    (lambda pool: single(pool, index=1), SpecError, "index"),
    (lambda pool: extend(pool, _reward=None), SpecError, "_reward"),
    (lambda pool: extend(pool, frame=torch.zeros(1, 2, 4)), SpecError, "frame"),
    (lambda pool: extend(pool, action=HALVES), SpecError, "action"),
    (lambda pool: extend(pool, _reward=HALVES.double() * 1e39), SpecError, "_reward"),
    (lambda pool: extend(pool, _done=ZEROS * NAN), SpecError, "'_done'"),
    (lambda pool: extend(pool, _truncated=ZEROS * NAN), SpecError, "'_truncated'"),
    (lambda pool: extend(pool, initial_state=ZEROS * NAN), SpecError, "'initial_state'"),
    (lambda pool: pool.extend(TemporalDictTensor({}), 1), SpecError, "index"),
    (lambda pool: pool.extend(DictTensor({})), SpecError, "TemporalDictTensor"),
    (lambda pool: pool.transitions(["frame", "nothing"]), SpecError, "nothing"),
    (lambda pool: pool.store(), UsageError, "env"),
    (lambda pool: pool.sample(0), SpecError, "batch_size"),
    (lambda pool: pool.sample_sequences(2, 0), SpecError, "length"),
    (lambda pool: pool.sample(2, n_step=0), SpecError, "n_step"),
    (lambda pool: pool.update_priorities([0, 1], [1.0]), SpecError, "priorities"),
    (lambda pool: pool.update_priorities([0], [-1.0]), SpecError, "priorities"),
    (lambda pool: pool.update_priorities([0], [NAN]), SpecError, "priorities"),
    (lambda pool: pool.update_priorities([0], [1e200]), SpecError, "priorities"),
    (lambda pool: filled().update_priorities([0], [1.0]), UsageError, "priority_exponent"),
    *(
        (lambda pool, n=n: pool.load_state_dict(damaged()[n]), SpecError, "state|format|shape")
        for n in range(6)
    ),
    (copy.deepcopy, UsageError, "state_dict"),
    (pickle.dumps, UsageError, "state_dict"),
]


def damaged() -> list[Any]:
    """Yield parts of a state with states in which they are missing or damaged."""
    whole = filled(priority_exponent=2.0).state_dict()
    arrays = dict(whole["store"]["arrays"])
    missing = {k: arrays[k] for k in arrays if k != "columns/frame/0.0"}
    cut = {**arrays, "columns/frame/0.0": arrays["columns/frame/0.0"][1:]}
    return [
        *({"format": 5}, {}, {**whole, "format": 4}, {**whole, "generator": {}}),
        *({**whole, "store": {**whole["store"], "arrays": each}} for each in (missing, cut)),
    ]


@pytest.mark.parametrize(("use", "error", "named"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_input_is_refused_by_name_and_nothing_is_lost(
    use: Any, error: type[Exception], named: str
) -> None:
    pool, twin = (filled(priority_exponent=2.0) for _ in range(2))
    with pytest.raises(error, match=named):
        use(pool)
    for each in (pool, twin):
        single(each, a=np.int64(7), done=True)
    assert_same_tensors(pool.transitions(), twin.transitions())
    assert_same_tensors(pool.sample(7), twin.sample(7))
    assert_same_tensors(pool.sample_sequences(7, 7), twin.sample_sequences(7, 7))


def rows_of(pool: Pool, **changes: Any) -> None:
    steps = {"frame": torch.zeros(1, 2, 1), "_reward": ZEROS, "_done": ZEROS, **changes}
    pool.extend(TemporalDictTensor({key: each for key, each in steps.items() if each is not None}))
    pool.sample(2, n_step=2)


@pytest.mark.parametrize(
    ("options", "use", "named"),
    [
        ({"pool_size": None}, None, "pool_size"),
        ({"processes": 0}, None, "n_workers"),
        ({"processes": 11}, None, "pool_size"),
        ({"window_size": 0}, None, "window_size"),
        ({"clearing_freq": 1}, None, "window_size_"),
        ({"window_size_": 1}, None, "clearing_freq"),
        ({"storage": "shared"}, None, "storage"),
        ({"frame_stack": 1}, None, "frame_stack"),
        ({"directory": "/tmp"}, None, "directory"),
        ({"storage": "memmap", "directory": "/nowhere/at/all"}, None, "/nowhere/at/all"),
        ({"priority_exponent": NAN}, None, "priority_exponent"),
        ({"seed": -1}, None, "seed"),
        ({"keys": []}, None, "keys"),
        ({"info_keys": "agent_info"}, None, "info_keys"),
        ({"env": [CountingEnv()], "processes": 2}, None, "2 environments"),
        ({"env": [CountingEnv]}, None, "environment 0"),
        ({"env": [GymEnv([CountingEnv()])]}, None, "environment 0"),
        ({"env": [CountingEnv()], "policy": 3}, None, "policy"),
        ({}, lambda pool: rows_of(pool, index=ZEROS), "index"),
        ({}, lambda pool: rows_of(pool, n_step_return=ZEROS), "n_step_return"),
        ({}, lambda pool: rows_of(pool, _done=None), "_done"),
        ({}, lambda pool: rows_of(pool, _reward=torch.zeros(1, 2, 2)), "'_reward'"),
        ({}, lambda pool: filled().sample(2, n_step=2, discount=1.1), "discount"),
        ({}, lambda pool: filled(priority_exponent=1).sample(2, beta=-0.1), "beta"),
        ({"info_keys": ["agent_info"]}, rows_of, "'agent_info'"),
        # The state of another pool:
        ({"pool_size": 11}, lambda pool: pool.load_state_dict(filled().state_dict()), "pool_size"),
        ({"random": False}, lambda pool: pool.load_state_dict(filled().state_dict()), "random"),
        ({"keys": ["frame"]}, lambda pool: pool.load_state_dict(filled().state_dict()), "keys"),
        ({"info_keys": ["x"]}, lambda pool: pool.load_state_dict(filled().state_dict()), "info"),
    ],
    ids=str,
)
def test_an_invalid_argument_is_named(options: dict[str, Any], use: Any, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        use(Pool(**{"pool_size": 10, **options}))
