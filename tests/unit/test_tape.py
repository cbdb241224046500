"""Tapes replay the same steps, regardless of how an episode was recorded and split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpool import GymEnv, NotRepeatedError, VectorGymEnv, Where
from rlpool.record.repeat import take_over
from rlpool.record.tape import LaneTapes, Tape

from support.envs import CountingEnv
from support.vector_envs import OwnVectorEnv

N_LANES = 3


def steps(*actions: float, rewards: Sequence[float] | None = None) -> dict[str, np.ndarray]:
    """Return a chunk of steps."""
    chunk: dict[str, Any] = {"action": np.array(actions)}
    return chunk if rewards is None else {**chunk, "reward": np.array(rewards, np.float32)}


# One tape ---------------------------------------------------------------------------------------


def test_steps_are_kept_in_order_however_they_arrive() -> None:
    tape, expected = Tape(5), list(range(100))
    for number in range(100):
        tape.add(steps(number))
    others = np.array([0.5]), np.arange(20_000), np.array([7]), np.array([[1, 2]])
    for actions in others:  # of different dtypes and shapes: no bit changes
        tape.add({"action": actions})
        expected += actions.tolist()
    assert len(tape.chunks) < 45
    assert tape.n_steps == len(expected)
    found = [step.tolist() for chunk in tape.chunks for step in chunk["action"]]
    assert found == expected
    before = tape.without_last()
    assert before.n_steps == tape.n_steps - 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(8, 4000))
def test_the_bound_holds_after_every_chunk_and_the_latest_steps_are_kept(
    lengths: list[int], most_bytes: int
) -> None:
    tape, n_steps = Tape(5), 0
    for length in lengths:
        tape.add({"action": np.arange(n_steps, n_steps + length)}, most_bytes)
        n_steps += length
        kept = tape.actions["action"]
        assert kept.nbytes <= most_bytes or len(tape.chunks) == 1
        assert kept.tolist() == list(range(tape.first_step, n_steps))
        assert tape.n_steps == n_steps


# Replaying --------------------------------------------------------------------------------------


def make_env() -> GymEnv:
    return GymEnv([CountingEnv() for _ in range(2)], 0)


def recorded(n_steps: int) -> Tape:
    """Record an episode of a ``CountingEnv`` in lane 1."""
    env = make_env()
    options = {"length": 20, "id": 3}
    env.reset_lanes([1], [7], [options])
    actions: list[int] = []
    rewards: list[float] = []
    for step in range(n_steps):
        env.step_lanes([1], {"action": np.array([0, step % 2])})
        actions.append(step % 2)
        rewards.append(env.current["reward"][1])
    after = {key: np.array(array[1]) for key, array in env.current.items()}
    chunks = [steps(*actions, rewards=rewards)] if actions else []
    return Tape(7, options, chunks=chunks, observation=after)


@pytest.mark.parametrize(
    "makes", [make_env, lambda: VectorGymEnv(OwnVectorEnv([CountingEnv] * 2, "Disabled"))]
)
def test_lanes_are_replayed_together_and_finish_at_the_same_time(makes: Any) -> None:
    env, tapes = makes(), {0: recorded(2), 1: recorded(5)}
    tapes[1].chunks[0]["reward"][3] = np.nan  # not known
    where = {lane: Where(0, lane) for lane in tapes}
    progress = [0]
    take_over(env, tapes, where, progress)
    for lane, tape in tapes.items():
        for key in ("frame", "reward", "initial_state"):
            assert env.current[key][lane].tobytes() == tape.observation[key].tobytes()
    assert progress == [2 + 5]  # resets of both, and steps of the longest
    env.step_lanes([0, 1], {"action": np.zeros(2, np.int64)})
    assert env.current["frame"][:, 0].tolist() == [3, 6]
    tapes[0].chunks[0]["reward"][1] += 1
    tapes[1].observation["frame"][0] += 1
    for lane, step in ((0, 1), (1, 4)):
        with pytest.raises(NotRepeatedError) as caught:
            take_over(env, tapes, where, progress)
        assert (caught.value.where.lane, caught.value.where.step) == (lane, step)
        del tapes[lane]


# Rows of the shared buffers of a manager ----------------------------------------------------------


def bound(**arguments: Any) -> tuple[LaneTapes, np.ndarray[Any, Any]]:
    """Return tapes and the buffer of actions."""
    action = np.zeros((N_LANES, 2))
    tapes = LaneTapes(N_LANES, **arguments)
    tapes.bind({"action": action})
    return tapes, action


def first_of(tapes: LaneTapes, lane: int) -> list[float]:
    """Return the first number of every action on a lane's tape."""
    tape = tapes.tape(lane)
    assert tape is not None
    found = tape.actions.get("action", np.zeros((0, 1)))[:, 0].tolist()
    assert len(found) == tape.n_steps
    return found


lanes = st.integers(0, N_LANES - 1)
events = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["reset", "look", "forget"]), lanes),
        st.tuples(st.just("step"), st.lists(lanes, min_size=1, unique=True).map(sorted)),
    ),
    max_size=80,
)


@pytest.mark.promise("I3")
@given(events, st.integers(1, 5))
def test_the_tapes_of_lanes_match_lists_of_actions(
    script: Sequence[tuple[str, Any]], n_times: int
) -> None:
    tapes, action = bound()
    expected: dict[int, list[float]] = {}
    for number, (what, who) in enumerate(script * n_times):
        if what == "reset":
            options = {"number": [number]}
            tapes.record_reset(who, number, options)
            options["number"].append(-1)  # a change by the caller, afterwards
            expected[who] = []
        elif what == "step":
            action[:] = np.arange(N_LANES)[:, None] + 10 * number
            tapes.record_step(who)
            for lane in set(who) & set(expected):
                expected[lane].append(lane + 10 * number)
        elif what == "forget":
            tapes.forget(who)
            expected.pop(who, None)
        elif who in expected:
            tapes.tape(who)
    for lane in range(N_LANES):
        tape = tapes.tape(lane)
        assert (tape is None) == (lane not in expected)
        if tape is not None:
            assert tape.options == {"number": [tape.seed]}
            assert first_of(tapes, lane) == expected[lane]


def test_the_latest_steps_of_an_overlong_episode_among_short_ones_are_kept() -> None:
    tapes, action = bound(most_bytes=3 * 2**14)
    for lane in range(N_LANES):
        tapes.record_reset(lane, lane, None)
    for step in range(10_000):
        action[:] = step
        tapes.record_step(range(N_LANES))
        tapes.record_reset(1, step, None)
    tape = tapes.tape(0)
    assert tape is not None
    assert tape.actions["action"][:, 0].tolist() == list(range(tape.first_step, 10_000))
    assert tape.first_step > 0
    assert tape.why_lost
    assert first_of(tapes, 1) == []
