"""Episodes of a list of environments, each in a process of its own."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from process.watching import Script, is_running, worker_pids

from rlpool import (
    AgentError,
    EnvError,
    EnvSpecError,
    SpecError,
    UsageError,
    WorkerDiedError,
    WorkerStartupError,
    WorkerTimeoutError,
)
from rlpool.pool.collection import EpisodeRunner
from rlpool.pool.transitions import Transitions

from support.acting_envs import (
    ActingEnv,
    DiaryEnv,
    DuckEnv,
    FailingEnv,
    MeetingEnv,
    NoisyEnv,
    PidEnv,
    Unloadable,
    UnstableEnv,
    WrappingEnv,
    actions,
    states,
)

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(200)]


def assert_same(episode: Sequence[Any], expected: Sequence[Any]) -> None:
    for array, wanted in zip(episode, expected, strict=False):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array, wanted)


def flat(episodes: list[Transitions]) -> list[Any]:
    return [[array.tolist() for array in episode] for episode in episodes]


# What a run returns -----------------------------------------------------------------------------


def test_two_environments_of_ten_steps() -> None:
    envs = [ActingEnv(10, number=p) for p in range(2)]
    with EpisodeRunner(envs, 2) as runner:
        for n_resets in (1, 2, 3):
            episodes = runner.run()
            shapes = [array.shape for array in episodes[0][:5]]
            assert shapes == [(10, 4), (10,), (10, 4), (10,), (10,)]
            for p, episode in enumerate(episodes):
                assert_same(episode, ActingEnv.expected(10, n_resets, number=p))
    assert envs[0].n_resets == 0


@pytest.mark.parametrize("lengths", [[5], [1, 3000, 40]])
def test_episodes_of_any_length(lengths: list[int]) -> None:
    with EpisodeRunner([ActingEnv(n, number=n) for n in lengths], len(lengths)) as runner:
        for n_resets in (1, 2):
            for length, episode in zip(lengths, runner.run(), strict=True):
                assert_same(episode, ActingEnv.expected(length, n_resets, number=length))


def test_episodes_are_the_callers_own() -> None:
    with EpisodeRunner([ActingEnv(600), ActingEnv(3)]) as runner:
        kept = runner.run()
        copies = [[np.array(array) for array in episode] for episode in kept]
        for _ in range(4):
            runner.run()
    for episode, copy in zip(kept, copies, strict=True):
        assert_same(episode, copy)
        episode.state[:] = 0
        episode.reward[:] = 0


def test_all_processes_run_at_the_same_time(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    os.mkfifo(path)
    envs = [MeetingEnv(path, os.O_RDONLY), MeetingEnv(path, os.O_WRONLY)]
    with EpisodeRunner(envs, timeout=30.0) as runner:
        for _ in range(2):
            assert [len(episode.reward) for episode in runner.run()] == [4, 4]


def test_each_environment_keeps_a_process_of_its_own() -> None:
    with EpisodeRunner([PidEnv(3), PidEnv(4)]) as runner:
        pids = [[set(episode.action) for episode in runner.run()] for _ in range(3)]
    assert pids[0] == pids[1] == pids[2]
    assert len(pids[0][0]) == len(pids[0][1]) == 1
    assert len({os.getpid(), *pids[0][0], *pids[0][1]}) == 3


def test_an_environment_is_reset_once_per_episode_and_closed_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "diary"
    with EpisodeRunner([DiaryEnv(str(path))]) as runner:
        runner.run()
        runner.run()
    assert path.read_text().split() == ["reset", "step", "step", "step"] * 2 + ["close"]


def test_large_states_of_several_windows() -> None:
    frames = [np.full((210, 160, 3), k, np.uint8) for k in range(60)]
    with EpisodeRunner([states(*frames)]) as runner:
        (episode,) = runner.run()
    assert episode.state.dtype == np.uint8
    assert (episode.state == np.arange(59).reshape(-1, 1, 1, 1)).all()
    assert (episode.next_state == np.arange(1, 60).reshape(-1, 1, 1, 1)).all()
    assert np.shares_memory(episode.state, episode.next_state)


# Gymnasium ----------------------------------------------------------------------------------------


def leaning(state: Any) -> int:
    return int(state[2] + state[3] > 0)


def test_cartpole_with_random_actions_and_with_a_policy() -> None:
    envs = [gymnasium.make("CartPole-v1") for _ in range(2)]
    with EpisodeRunner(envs, seed=1) as runner:
        for _ in range(3):
            for episode in runner.run():
                assert 8 <= len(episode.reward) < 120
                assert episode.state.dtype == np.float32
                assert episode.action.dtype == np.int64
                assert set(episode.action) == {0, 1}
                np.testing.assert_array_equal(episode.state[1:], episode.next_state[:-1])
                assert episode.done.tolist() == [False] * (len(episode.done) - 1) + [True]
                assert not episode.truncated.any()
        pids = worker_pids()
        runner.policy = leaning
        episodes = runner.run()
        assert worker_pids() == pids
    for episode in episodes:
        assert len(episode.reward) == 500
        assert episode.truncated[-1]
        assert episode.action.tolist() == [leaning(state) for state in episode.state]


def test_a_policy_that_learns_is_sent_again() -> None:
    model = torch.nn.Linear(2, 1)

    def policy(state: Any) -> float:
        return model(torch.as_tensor(state, dtype=torch.float32)).item()

    env = DuckEnv()
    env.action_space = gymnasium.spaces.Box(-100, 100, (), np.float64)
    with EpisodeRunner([env], policy=policy) as runner:
        pids = None
        for bias in (3.0, 5.0, 5.0, 7.0):
            with torch.no_grad():
                model.weight[:] = 0
                model.bias[:] = bias
            assert runner.run()[0].action.tolist() == [bias] * 3
            pids = pids or worker_pids()
            assert worker_pids() == pids


def test_both_protocols_in_one_list() -> None:
    doubles = states(*[np.zeros(4)] * 4)
    ints = states(*[[k] * 4 for k in range(3)])
    with EpisodeRunner([gymnasium.make("CartPole-v1"), doubles, ints], seed=1) as runner:
        for _ in range(2):
            episodes = runner.run()
            assert [episode.state.dtype for episode in episodes] == [np.float64] * 3
            assert [episode.action.dtype for episode in episodes] == [np.int64] * 3
            assert [len(episode.reward) for episode in episodes[1:]] == [3, 2]
            assert episodes[2].next_state.tolist() == [[1] * 4, [2] * 4]
            assert np.abs(episodes[0].state[0]).max() < 0.05


def test_environments_of_other_shapes_are_refused_with_both() -> None:
    with (
        EpisodeRunner([states(*[np.zeros(4)] * 3), DuckEnv()]) as runner,
        pytest.raises(SpecError) as caught,
    ):
        runner.run()
    message = str(caught.value)
    assert "state of environment 0 is float64[4], that of environment 1 is float64[2]" in message
    with (
        EpisodeRunner([actions(0, 0), actions(0, [0, 1])]) as runner,
        pytest.raises(SpecError, match=re.escape("action of environment 0 is int64[]")),
    ):
        runner.run()


# Seeds --------------------------------------------------------------------------------------------


def narrow_cartpole() -> Any:
    """CartPole with states of three numbers, as those of ``NoisyEnv``."""
    space = gymnasium.spaces.Box(-9, 9, (3,))
    env = gymnasium.make("CartPole-v1")
    return gymnasium.wrappers.TransformObservation(env, lambda state: state[:3], space)


def test_the_same_seed_gives_the_same_data_and_every_process_its_own() -> None:
    def data(seed: int, n_processes: int) -> list[Transitions]:
        with EpisodeRunner([WrappingEnv() for _ in range(n_processes)], seed=seed) as runner:
            return [episode for _ in range(2) for episode in runner.run()]

    first, fewer, other = data(3, 2), data(3, 1), data(4, 1)
    assert flat(fewer) == flat(first[::2])
    columns = np.stack([episode.state[0] for episode in (*first, *other)]).T
    assert columns.shape == (8, 6)
    for column in columns:
        assert len(set(column)) == 6


def test_another_runner_goes_on_where_one_stopped() -> None:
    with EpisodeRunner([NoisyEnv(), narrow_cartpole()]) as runner:
        runner.run()
        state = pickle.loads(pickle.dumps(runner.state_dict()))
        expected = flat(runner.run())
    with EpisodeRunner([NoisyEnv(), narrow_cartpole()]) as other:
        other.load_state_dict(state)
        assert flat(other.run()) == expected
        assert other.n_runs == 2


# Environments that change -------------------------------------------------------------------------


def test_environments_that_the_caller_changed_are_sent_again() -> None:
    envs = [ActingEnv(3)]
    with EpisodeRunner(envs) as runner:
        runner.run()
        assert_same(runner.run()[0], ActingEnv.expected(3, n_resets=2))
        envs[0].length = 6
        assert_same(runner.run()[0], ActingEnv.expected(6, n_resets=1))
        envs[0] = ActingEnv(8)
        for n_resets in (1, 2):
            assert_same(runner.run()[0], ActingEnv.expected(8, n_resets))
        envs.append(ActingEnv())
        with pytest.raises(SpecError, match="2 environments, processes is 1"):
            runner.run()


def test_environments_whose_pickles_vary_are_not_sent_again() -> None:
    env = UnstableEnv(3)
    with EpisodeRunner([env]) as runner:
        for n_resets in (1, 2, 3):
            assert_same(runner.run()[0], ActingEnv.expected(3, n_resets))


# Failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_failing_environment_raises_env_error_and_the_next_run_works(step: int) -> None:
    with EpisodeRunner([ActingEnv(40), FailingEnv("raise", step)]) as runner:
        with pytest.raises(EnvError, match="raised KeyError: 'struck'") as caught:
            runner.run()
        where = caught.value.where
        assert (where.worker, where.step) == (1, max(0, step - 1))
        assert "call reset() and step() of environment 1" in str(caught.value)
        assert "in strike" in str(caught.value.__cause__)
        lengths = [len(episode.reward) for episode in runner.run()]
        assert lengths == [40, 5]


def test_a_later_failure_loses_nothing_but_its_run() -> None:
    with EpisodeRunner([ActingEnv(40), FailingEnv("raise", 2, episode=2)]) as runner:
        runner.run()
        with pytest.raises(EnvError, match="worker 1"):
            runner.run()
        assert_same(runner.run()[1], ActingEnv.expected(5, n_resets=3))


def test_a_reset_of_neither_protocol_raises_env_spec_error() -> None:
    env = ActingEnv()
    env.reset = lambda: np.zeros(4)  # type: ignore[assignment, method-assign, return-value]
    with (
        EpisodeRunner([ActingEnv(), env]) as runner,
        pytest.raises(EnvSpecError, match="neither protocol") as caught,
    ):
        runner.run()
    assert caught.value.where.worker == 1


def test_a_failing_policy_raises_agent_error_and_the_next_one_works() -> None:
    with EpisodeRunner([DuckEnv(), DuckEnv()], policy=lambda state: 1 / 0) as runner:
        for _ in range(2):
            with pytest.raises(AgentError, match=r"^policy raised ZeroDivisionError"):
                runner.run()
        runner.policy = lambda state: 3
        assert runner.run()[1].action.tolist() == [3, 3, 3]


@pytest.mark.parametrize("step", [0, 3])
def test_a_dead_process_raises_worker_died_error_and_is_replaced(step: int) -> None:
    envs = [ActingEnv(40), FailingEnv("sigkill", step)]
    with EpisodeRunner(envs) as runner:
        with pytest.raises(WorkerDiedError, match=r"worker 1 died \(SIGKILL\)") as caught:
            runner.run()
        assert caught.value.signal_name == "SIGKILL"
        assert caught.value.where.worker == 1
        assert not worker_pids()
        envs[1] = ActingEnv(4)
        assert [len(episode.reward) for episode in runner.run()] == [40, 4]


def test_a_process_killed_between_runs_raises_and_is_replaced() -> None:
    with EpisodeRunner([PidEnv(3), PidEnv(3)]) as runner:
        pid = int(runner.run()[1].action[0])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            runner.run()
        assert int(runner.run()[1].action[0]) != pid


def test_a_hanging_environment_raises_worker_timeout_error() -> None:
    envs = [ActingEnv(40), FailingEnv("hang")]
    with EpisodeRunner(envs, timeout=0.7) as runner:
        with pytest.raises(WorkerTimeoutError, match="worker 1"):
            runner.run()
        envs[1] = ActingEnv(4)
        assert len(runner.run()[1].reward) == 4


def test_an_interrupted_run_can_be_followed_by_another() -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with EpisodeRunner([ActingEnv(3), FailingEnv("go_on", episode=2)]) as runner:
            runner.run()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Alarm):
                runner.run()
            for n_resets in (3, 4):
                assert_same(runner.run()[1], ActingEnv.expected(5, n_resets))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Lamp:
    def __init__(self) -> None:
        self.wire = threading.Lock()


def test_what_cannot_be_pickled_is_named() -> None:
    env = ActingEnv()
    env.lamp = Lamp()  # type: ignore[attr-defined]
    with pytest.raises(WorkerStartupError) as caught:
        EpisodeRunner([ActingEnv(), env])
    assert "environment 1 cannot be pickled: env[1].lamp.wire is a _thread.lock" in str(
        caught.value
    )
    lock = threading.Lock()
    with pytest.raises(
        WorkerStartupError, match=r"policy cannot be pickled: policy.<closure 'lock'>"
    ):
        EpisodeRunner([DuckEnv()], policy=lambda state: lock)


def test_a_later_pickle_that_fails_leaves_the_processes_alone() -> None:
    env = ActingEnv(3)
    with EpisodeRunner([env]) as runner:
        runner.run()
        env.lamp = Lamp()  # type: ignore[attr-defined]
        with pytest.raises(WorkerStartupError, match=re.escape(".lamp.wire")):
            runner.run()
        del env.lamp  # type: ignore[attr-defined]
        assert_same(runner.run()[0], ActingEnv.expected(3, n_resets=2))


def test_what_cannot_be_loaded_is_named() -> None:
    with EpisodeRunner([ActingEnv(), Unloadable()]) as runner:
        with pytest.raises(WorkerStartupError) as caught:
            runner.run()
        assert not worker_pids()
    assert "environment 1 cannot be loaded" in str(caught.value)
    assert "no module named simulator" in str(caught.value)
    assert caught.value.where.worker == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([ActingEnv()], 2), ("1 environments", "processes is 2")),
        (([ActingEnv()] * 3, 2), ("3 environments", "processes is 2")),
        (([], None), ("no environments",)),
        (([], 0), ("processes", "0")),
        (([ActingEnv()], 1.0), ("processes", "1.0")),
        (([ActingEnv()], True), ("processes", "True")),
        ((ActingEnv(), 1), ("not a list",)),
        (("CartPole-v1", 1), ("not a list",)),
        ((["CartPole-v1"], 1), ("environment 0", "'CartPole-v1'", "reset")),
        (([ActingEnv(), ActingEnv], 2), ("environment 1", "class ActingEnv")),
        (([ActingEnv()], 1, -1), ("seed", "-1")),
        (([ActingEnv()], 1, 0.5), ("seed", "0.5")),
        (([ActingEnv()], 1, None, 3), ("policy", "3")),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: tuple[Any, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as caught:
        EpisodeRunner(*arguments)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_has_to_be_positive(timeout: float) -> None:
    with pytest.raises(SpecError, match="timeout"):
        EpisodeRunner([ActingEnv()], timeout=timeout)


# Life ---------------------------------------------------------------------------------------------


def test_nothing_starts_before_the_first_run() -> None:
    with EpisodeRunner([ActingEnv()]):
        assert not worker_pids()


def test_a_closed_runner_has_no_processes_and_refuses_to_run() -> None:
    runner = EpisodeRunner([ActingEnv(3)])
    runner.run()
    assert len(worker_pids()) == 1
    runner.close()
    runner.close()
    assert runner.closed
    assert not worker_pids()
    with pytest.raises(UsageError, match="closed"):
        runner.run()


def test_a_dropped_runner_ends_its_processes() -> None:
    runner = EpisodeRunner([ActingEnv(3)])
    runner.run()
    pids = worker_pids()
    gc.disable()
    try:
        del runner
        assert not any(map(is_running, pids))
    finally:
        gc.enable()


def test_a_runner_cannot_be_pickled() -> None:
    with EpisodeRunner([ActingEnv()]) as runner, pytest.raises(UsageError, match="processes"):
        pickle.dumps(runner)


SCRIPT = """
import numpy as np
from rlpool.pool.collection import EpisodeRunner

SCALE = 2.0

class Env:
    def __init__(self, length, next_action):
        self.length, self.next_action = length, next_action
        self.n_resets = 0

    def reset(self):
        self.t = 0
        self.n_resets += 1
        return np.zeros(2), 1

    def step(self, action):
        self.t += 1
        return self.next_action(action), np.full(2, SCALE * self.t), self.n_resets, self.t == 3

def main():
    step = 4
    runner = EpisodeRunner([Env(3, lambda action: action + step) for _ in range(2)], 2)
    for n_resets in (1, 2):
        for episode in runner.run():
            assert episode.action.tolist() == [5, 9, 13]
            assert episode.next_state[:, 1].tolist() == [2.0, 4.0, 6.0]
            assert episode.reward.tolist() == [n_resets] * 3
    print("done")

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("mode", ["file", "stdin", "command"])
def test_environments_of_a_script_with_lambdas(
    run_script: Callable[..., Script], mode: str
) -> None:
    script = run_script(SCRIPT, mode=mode)
    script.finish()
    assert script.returncode == 0, script.stderr
    assert script.stdout.split() == ["done"]
    assert script.stderr == ""
