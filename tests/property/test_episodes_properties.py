"""Episodes of random lengths through lanes and slots of random numbers, against values by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rlpool import Batcher, DictTensor, EnvError, EpisodeBatcher, GymEnv

from support.agents import InitialStateCounter, NoisyAgent, StepCounter
from support.envs import (
    CountingEnv,
    FailingEnv,
    assert_same_tensors,
    counting_trajectories,
    create_counting,
)

# All but explaining, which traces every line and takes minutes.
PHASES = [phase for phase in Phase if phase is not Phase.explain]

agents = st.sampled_from([StepCounter, InitialStateCounter])
lengths_of_episodes = st.lists(st.integers(1, 15), min_size=1, max_size=14)
how_they_end = st.integers(0, 2**30)  # the digits to base 3 say how each episode ends


def ends_of(number: int, n_episodes: int) -> list[str]:
    return [CountingEnv.ENDS[number // 3**k % 3] for k in range(n_episodes)]


def make(n_timesteps: int, n_slots: int, agent: Any, create_env: Any, seeds: int = 0) -> Any:
    return EpisodeBatcher(n_timesteps, n_slots, agent, {}, create_env, {}, n_threads=0, seeds=seeds)


def counting(n_envs: int) -> Any:
    return lambda seed: create_counting(seed, n_envs=n_envs)


def info_of(lengths: list[int], first: int, ends: list[str]) -> DictTensor:
    return DictTensor(
        {
            "length": torch.tensor(lengths),
            "id": torch.arange(first, first + len(lengths)),
            "ends": torch.tensor([CountingEnv.ENDS.index(end) for end in ends]),
        }
    )


@pytest.mark.promise("I1")
@settings(max_examples=80, phases=PHASES)
@given(
    requests=st.lists(st.tuples(lengths_of_episodes, how_they_end), min_size=1, max_size=4),
    n_envs=st.integers(1, 6),
    n_slots=st.integers(1, 12),
    n_timesteps=st.integers(1, 16),
    n_ahead=st.integers(1, 3),
    blocking=st.booleans(),
    keep=st.booleans(),
    agent=agents,
)
def test_row_i_is_episode_i_exactly_once(
    requests: list[tuple[list[int], int]],
    n_envs: int,
    n_slots: int,
    n_timesteps: int,
    n_ahead: int,
    blocking: bool,
    keep: bool,
    agent: Any,
) -> None:
    kept: list[Any] = []
    waiting = list(enumerate(requests))
    pending: list[Any] = []
    with make(n_timesteps, n_slots, agent, counting(n_envs)) as batcher:
        while waiting or pending:
            while waiting and len(pending) < n_ahead:
                number, (lengths, how) = waiting.pop(0)
                ends, first = ends_of(how, len(lengths)), 100 * number
                batcher.execute(len(lengths), env_info=info_of(lengths, first, ends))
                pending.append((lengths, range(first, first + len(lengths)), ends))
            lengths, ids, ends = pending.pop(0)
            got = batcher.get(blocking)
            for _ in range(1000):
                got = got if got is not None else batcher.get(blocking)
            assert got is not None
            assert got.lengths.tolist() == lengths
            assert got.info["episode"].tolist() == list(range(len(lengths)))
            assert got.info["env_info/id"].tolist() == list(ids)
            expected = counting_trajectories(lengths, ids, ends)
            assert_same_tensors(got, expected)
            if keep:
                kept.append((got, expected))
    for got, expected in kept:
        assert_same_tensors(got, expected)


@pytest.mark.promise("I3")
@settings(max_examples=60, phases=PHASES)
@given(
    requests=st.lists(
        st.tuples(
            lengths_of_episodes, st.none() | st.tuples(st.integers(0, 13), st.integers(0, 14))
        ),
        min_size=1,
        max_size=5,
    ),
    call=st.sampled_from(["reset", "step"]),
    n_envs=st.integers(1, 4),
    n_slots=st.integers(1, 16),
    n_timesteps=st.integers(1, 16),
    agent=agents,
)
def test_a_request_that_fails_disturbs_no_other(
    requests: list[tuple[list[int], tuple[int, int] | None]],
    call: str,
    n_envs: int,
    n_slots: int,
    n_timesteps: int,
    agent: Any,
) -> None:
    envs = [FailingEnv(OSError("lost"), call) for _ in range(n_envs)]
    with make(n_timesteps, n_slots, agent, lambda seed: GymEnv(envs, seed)) as batcher:
        for lengths, failure in requests:
            row, step = failure if failure is not None else (99, 0)
            fails = row < len(lengths) and (call == "reset" or step < lengths[row])
            for env in envs:
                env.fails_at, env.fails_in = row + 1, step
            batcher.execute(len(lengths), env_info=info_of(lengths, 1, ends_of(0, len(lengths))))
            if fails:
                with pytest.raises(EnvError) as caught:
                    batcher.get()
                where = caught.value.where
                assert (where.episode, where.lane) == (row, row % n_envs)
                assert where.step == (step if call == "step" else 0)
            else:
                ids = range(1, len(lengths) + 1)
                assert_same_tensors(batcher.get(), counting_trajectories(lengths, ids))


@pytest.mark.promise("I2")
@settings(max_examples=40, phases=PHASES)
@given(
    lengths=lengths_of_episodes,
    shapes=st.tuples(*[st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, 16))] * 2),
    root=st.integers(0, 2**40),
)
def test_noise_and_seeds_do_not_depend_on_lanes_and_slots(
    lengths: list[int], shapes: Any, root: int
) -> None:
    results = []
    for n_envs, n_slots, n_timesteps in shapes:
        with make(n_timesteps, n_slots, NoisyAgent, counting(n_envs), root) as batcher:
            ends = ends_of(0, len(lengths))
            batcher.execute(len(lengths), env_info=info_of(lengths, 0, ends))
            batcher.reexecute()
            both = [batcher.get(), batcher.get()]
        results.append([(r["noise"].tolist(), r.info["seed"].tolist()) for r in both])
    assert results[0] == results[1]
    noise = [str(row[:n]) for rows, _ in results[0] for row, n in zip(rows, lengths, strict=True)]
    assert len(set(noise)) == 2 * len(lengths)


@settings(max_examples=60, phases=PHASES)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    how=how_they_end,
    n_timesteps=st.integers(1, 14),
    n_windows=st.integers(1, 5),
    restarts=st.booleans(),
    n_resets=st.integers(1, 2),
    agent=agents,
)
def test_joined_windows_are_whole_episodes(
    lengths: list[int],
    how: int,
    n_timesteps: int,
    n_windows: int,
    restarts: bool,
    n_resets: int,
    agent: Any,
) -> None:
    n_lanes, n_steps = len(lengths), n_timesteps * n_windows
    ids, ends = range(1, n_lanes + 1), ends_of(how, n_lanes)
    episodes = counting_trajectories(lengths, ids, ends)
    whole = {key: tensor.tolist() for key, tensor in episodes.items()}
    with Batcher(
        n_timesteps,
        create_agent=agent,
        create_env=create_counting,
        env_args={"n_envs": n_lanes, "restarts": restarts},
        n_threads=0,
        seeds=0,
    ) as batcher:
        for _ in range(n_resets):
            batcher.reset(env_info=info_of(lengths, 1, ends))
            joined: dict[str, list[list[Any]]] = {key: [[] for _ in lengths] for key in whole}
            for _ in range(n_windows):
                batcher.execute()
                window = batcher.get()
                if window is None:
                    assert batcher.all_stopped
                    break
                assert set(window.keys()) == set(whole)
                for key in whole:
                    for row, lane in enumerate(window.info["episode"].tolist()):
                        length = int(window.lengths[row])
                        assert 1 <= length <= n_timesteps
                        joined[key][lane] += window[key][row, :length].tolist()
                        assert not window[key][row, length:].any()
            for key, rows in whole.items():
                for lane, length in enumerate(lengths):
                    n_repeats = n_steps if restarts else 1
                    expected = (rows[lane][:length] * n_repeats)[:n_steps]
                    assert joined[key][lane] == expected, key
