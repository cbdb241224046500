"""What was asked of environments since their resets is written down completely, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlpool.manager.episode_log import EpisodeLog, Reached, RemoteStep, without_last

N_LANES = 3


def bound(action: np.ndarray[Any, Any] | None = None) -> tuple[EpisodeLog, np.ndarray[Any, Any]]:
    """A log, and where the actions are handed over."""
    action = np.zeros((N_LANES, 2)) if action is None else action
    log = EpisodeLog(N_LANES)
    log.bind({"action": action})
    return log, action


def steps_of(reached: Reached | None) -> list[Any]:
    """Every step's action as Python values."""
    assert reached is not None
    steps: list[Any] = []
    for part in reached.steps:
        steps += [part.action] if isinstance(part, RemoteStep) else part["action"].tolist()
    assert len(steps) == reached.n_steps
    return steps


events = st.lists(
    st.one_of(
        st.tuples(st.just("reset"), st.integers(0, N_LANES - 1)),
        st.tuples(st.just("remote"), st.integers(0, N_LANES - 1)),
        st.tuples(st.just("look"), st.integers(0, N_LANES - 1)),
        st.tuples(
            st.just("step"),
            st.lists(st.integers(0, N_LANES - 1), min_size=1, unique=True).map(sorted),
        ),
    ),
    max_size=80,
)


@given(events)
def test_a_log_is_what_lists_of_actions_are(script: Sequence[tuple[str, Any]]) -> None:
    # So large that a block has the fewest rows: they are divided among the lanes many times.
    log, action = bound(np.zeros((N_LANES, 2**13)))
    expected: dict[int, list[Any]] = {}
    for number, (what, who) in enumerate(script):
        if what == "reset":
            log.note_reset(who, number, {"number": number})
            expected[who] = []
        elif what == "remote":
            log.note_remote_step(who, number)
            if who in expected:
                expected[who].append(number)
        elif what == "step":
            action[:] = np.arange(N_LANES)[:, None] + 10 * number
            log.note_step(who, log.next_row())
            for lane in set(who) & set(expected):
                expected[lane].append(lane + 10 * number)
        elif who in expected:
            log.reached(who)
    for lane in range(N_LANES):
        reached = log.reached(lane)
        assert (reached is None) == (lane not in expected)
        if reached is not None:
            assert reached.options == {"number": reached.seed}
            steps = [s[0] if isinstance(s, list) else s for s in steps_of(reached)]
            assert steps == expected[lane]


def test_a_long_episode_is_kept_beside_short_ones_that_are_not() -> None:
    log, action = bound()
    for lane in range(N_LANES):
        log.note_reset(lane, lane, None)
    for step in range(5000):
        action[:] = step
        log.note_step(range(N_LANES), log.next_row())
        log.note_reset(1, step, None)
    assert len(steps_of(log.reached(0))) == 5000
    assert steps_of(log.reached(1)) == []


def test_what_the_caller_changes_afterwards_is_not_changed_in_the_log() -> None:
    log, action = bound()
    options, own = {"goal": [1]}, np.ones(2)
    log.note_reset(0, 5, options)
    log.note_step([0], log.next_row())
    log.note_remote_step(0, own)
    options["goal"].append(2)
    action[:], own[:] = 7, 7
    reached = log.reached(0)
    assert reached is not None
    assert reached.options == {"goal": [1]}
    first, second = steps_of(reached)
    assert first == [0, 0]
    assert second.tolist() == [1, 1]


def test_the_last_step_can_be_taken_off() -> None:
    log, action = bound()
    log.note_reset(0, 5, None)
    for step in range(2):
        action[:] = step
        log.note_step([0], log.next_row())
    reached, last = without_last(log.reached(0) or Reached(0, None))
    assert steps_of(reached) == [[0, 0]]
    assert last["action"].tolist() == [1, 1]
    reached, last = without_last(reached)
    assert steps_of(reached) == []
    assert last["action"].tolist() == [0, 0]


def test_lanes_that_are_forgotten_or_lost_have_no_steps() -> None:
    log, _ = bound()
    log.note_reset(0, 5, None)
    log.note_reset(1, 5, None)
    log.forget(0)
    log.lose(1, "it broke")
    log.lose(2, "it was never reset")
    log.note_step([0, 1], log.next_row())
    assert log.reached(0) is None
    assert log.reached(2) is None
    lost = log.reached(1)
    assert lost is not None
    assert (lost.why_lost, lost.n_steps) == ("it broke", 0)
    assert without_last(lost) == (lost, {})
    log.note_reset(1, 6, None)
    log.note_step([1], log.next_row())
    assert steps_of(log.reached(1)) == [[0, 0]]
