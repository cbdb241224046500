"""Episodes that failed, repeated: the same failure in the user's own frame, or why not."""

from __future__ import annotations

import io
import logging
import random
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    AGENT_ARCHS,
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    Learner,
    SpecError,
    UsageError,
    WorkerDiedError,
    WorkerError,
    replay_crash,
)

from support.agents import ConstantAgent, FunctionAgent, StepCounter
from support.envs import AncestorCountingEnv, CountingEnv, FailingEnv
from support.meta import Storage
from support.unlucky import UnluckyEnv, UnluckyError, create_unlucky

pytestmark = pytest.mark.promise("I9")


def frames(error: BaseException) -> list[str]:
    """Names of the functions that an exception went through, the innermost last."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def crash(
    create_env: Any, agent: Any = None, env_args: Any = None, n_threads: int = 0, seeds: int = 0
) -> WorkerError:
    """The error of episodes with their number as option ``id``, and ten times it as ``x``."""
    create_agent = lambda: agent or StepCounter()  # noqa: E731
    numbers, length = torch.arange(40), torch.full((40,), 20)
    with EpisodeBatcher(
        5, 9, create_agent, {}, create_env, env_args, n_threads=n_threads, seeds=seeds
    ) as batcher:
        batcher.execute(40, {"x": numbers * 10}, {"id": numbers, "length": length})
        with pytest.raises(WorkerError) as caught:
            batcher.get()
    return caught.value


def create_failing(seed: int, step: int = 7, call: str = "step") -> GymEnv:
    """Fails in the second episode, with the options ``id: 1``."""
    return GymEnv([FailingEnv(KeyError("goal"), call, step=step, length=20) for _ in range(2)])


NESTED = spaces.Dict(a=spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))))
WIDE = spaces.Box(-1, 1, (2, 2), np.float64)


def random_agent(*keys: str) -> FunctionAgent:
    """Draws actions from its noise: ints, or floats for the keys that say their shape."""

    def act(state: Any, observation: Any, *_: Any) -> Any:
        noise, actions = observation["noise"], {}
        for key in keys:
            name, _, shape = key.partition(":")
            size = [int(n) for n in shape.split(",")] if shape else []
            drawn = noise[:, : int(np.prod(size))].reshape(len(noise), *size)
            actions[name] = drawn if shape else (2 * drawn).long()
        return DictTensor(), DictTensor(actions), DictTensor()

    return FunctionAgent(act, n_noise=4)


# The same again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reset_chance", [0.0, 0.2])
def test_a_failure_that_depends_on_everything_comes_again(
    reset_chance: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env_args = {"chance": 0.02 * (not reset_chance), "reset_chance": reset_chance, "n_envs": 3}
    error = crash(create_unlucky, random_agent("action"), env_args, seeds=3)
    call = "reset" if reset_chance else "step"
    assert error.capsule.call == call
    path = error.capsule.save(tmp_path / "x")
    for given in (error, error.capsule, path, str(path)):
        with pytest.raises(UnluckyError) as caught:
            replay_crash(given, create_unlucky, env_args)
        assert error.what == f"env.{call} raised UnluckyError: {caught.value}"
        assert frames(caught.value)[-2:] == [call, "drawn"]
        assert caught.value.__cause__ is None
    assert not caplog.records  # rewards and the last observation were the same
    with pytest.raises((WorkerError, UnluckyError)) as caught_other:
        replay_crash(replace(error.capsule, seed=1), create_unlucky, env_args)
    assert str(caught_other.value) not in error.what


@pytest.mark.parametrize("reset_chance", [0.0, 0.05])
def test_failures_in_windows_of_lanes_that_restart_come_again(
    reset_chance: float, caplog: pytest.LogCaptureFixture
) -> None:
    env_args = {"restarts": True, "n_envs": 3, "chance": 0.02, "end": 0.1}
    env_args["reset_chance"] = reset_chance
    create_agent = lambda: random_agent("action")  # noqa: E731
    with Batcher(
        4, None, create_agent, {}, create_unlucky, env_args, n_threads=0, seeds=3
    ) as batcher:
        batcher.reset()
        with pytest.raises(EnvError) as caught:  # noqa: PT012
            while True:
                batcher.execute()
                batcher.get()
    with pytest.raises(UnluckyError) as again:
        replay_crash(caught.value, create_unlucky, env_args)
    assert caught.value.what.endswith(f": {again.value}")
    assert not caplog.records


@pytest.mark.parametrize(
    ("space", "keys"), [(NESTED, ["action/a/0", "action/a/1:2"]), (WIDE, ["action:2,2"])]
)
def test_actions_of_every_structure_come_again(
    space: Any, keys: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    env_args = {"action_space": space, "dtype": np.float64}
    error = crash(create_unlucky, random_agent(*keys), {**env_args, "keep_float64": True})
    for create_env in (create_unlucky, lambda **given: UnluckyEnv(**env_args)):
        with pytest.raises(UnluckyError) as caught:
            replay_crash(error, create_env, {**env_args, "keep_float64": True})
        assert error.what.endswith(f": {caught.value}")
    assert not caplog.records  # float64 observations are compared as such


def test_failures_of_a_learners_rollouts_come_again(caplog: pytest.LogCaptureFixture) -> None:
    learner = Learner(random_agent("action"), Storage(), None, [3, 4], AGENT_ARCHS.Memory, seed=5)
    with pytest.raises(EnvError) as caught:
        learner.collect_rollouts_parallel(50, parallel_env=GymEnv([UnluckyEnv() for _ in "abc"]))
    assert caught.value.capsule.options["task"] in (3, 4)
    for create_env in (UnluckyEnv, lambda: GymEnv([UnluckyEnv() for _ in "abc"])):
        with pytest.raises(UnluckyError) as again:
            replay_crash(caught.value, create_env)
        assert caught.value.what.endswith(f": {again.value}")
    assert not caplog.records


class Old(AncestorCountingEnv):
    def step(self, action: Any) -> Any:
        if self.t == 3:
            raise KeyError(f"goal {action!r} {self.seeds[-1]}")
        return super().step(action)


class Wide(CountingEnv):
    def observation(self) -> Any:
        return np.zeros(3 if self.t == 2 else 2, np.float32)


class Chained(FailingEnv):
    def step(self, action: Any) -> Any:
        try:
            return super().step(action)
        except KeyError as error:
            raise ValueError("no goal") from error


def make_cart_pole() -> Any:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize(
    ("make", "agent", "kind", "says"),
    [
        (lambda: Old(9), ConstantAgent(4), KeyError, "goal 4"),
        # Not an action of CartPole's.
        (make_cart_pole, ConstantAgent(7), AssertionError, "7"),
        (Wide, None, SpecError, r"should have shape \[2\], got \[3\]"),
        (lambda: Chained(KeyError("goal"), step=2), None, ValueError, "no goal"),
    ],
)
def test_every_kind_of_failure_comes_again(
    make: Any, agent: Any, kind: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = crash(lambda seed: GymEnv([make(), make()], seed), agent)
    for create_env in (lambda seed: GymEnv([make(), make()], seed), make):
        with pytest.raises(kind, match=says) as caught:
            replay_crash(error, create_env)
        assert str(caught.value).partition("\n")[0] in error.what
        assert isinstance(caught.value.__cause__, KeyError) == (kind is ValueError)
    assert not caplog.records


# The agent ----------------------------------------------------------------------------------------


class Fragile(StepCounter):
    """Fails when ``agent_info["x"]`` is 30 in a step, unless it was mended."""

    def __init__(self, step: int = 7) -> None:
        super().__init__()
        self.fails_at: int | None = step

    def __call__(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> Any:
        if bool(((observation["frame"][:, 0] == self.fails_at) & (agent_info["x"] == 30)).any()):
            observation["frame"].zero_()
            raise KeyError("policy")
        return super().__call__(state, observation, agent_info, history)


def create_counting(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(), CountingEnv()], seed)


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_failing_agent_leaves_the_environment_at_its_step(is_saved: bool, tmp_path: Path) -> None:
    error = crash(create_counting, Fragile())
    given = error.capsule.save(tmp_path / "x") if is_saved else error
    replay = replay_crash(given, create_counting)
    lane = replay.lane
    assert (replay.step, lane, replay.diverged_at) == (7, error.where.lane, None)
    assert replay.env.current["frame"][lane].tolist() == [7, error.where.episode]
    # All that the agent was called with: the call can be repeated, and the episode go on.
    agent = Fragile()
    assert replay.observation["frame"].tolist() == [[7, 2], [7, 3]]
    with pytest.raises(KeyError, match="policy"):
        agent(replay.state.clone(), replay.observation.clone(), replay.agent_info)
    agent.fails_at = None
    _, output, _ = agent(replay.state, replay.observation, replay.agent_info)
    assert output["action"].tolist() == [8, 8]
    replay.env.step_lanes([lane], {"action": output["action"].numpy()})
    assert replay.env.current["frame"][lane].tolist() == [8, error.where.episode]
    alone = replay_crash(given, CountingEnv)  # a single environment will do
    assert (alone.lane, alone.env.current["frame"].tolist()) == (0, [[7, error.where.episode]])
    assert alone.observation["frame"].tolist() == [[7, 2], [7, 3]]


# Another way --------------------------------------------------------------------------------------


class Drifting(FailingEnv):
    """Has other rewards, observations or an end from step 4 on."""

    def __init__(self, kind: str = "", fails_at: int = 1) -> None:
        super().__init__(KeyError("goal"), step=7, length=20, fails_at=fails_at)
        self.kind = kind

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.t > 4:
            reward += self.kind == "reward"
            truncated = truncated or self.kind == "end"
            observation = observation + (self.kind == "observation")
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("", r"step 7 went through\. It had failed with: env.step raised KeyError: 'goal'"),
        ("reward", r"another way from step 4 on \(the reward is 106.0, it was 105.0\)"),
        ("end", r"ended before step 7, .* another way from step 4 on \(the episode ended\)"),
        ("observation", r"another way from step 7 on \('frame' is not what it was"),
    ],
)
def test_an_episode_that_does_not_fail_again_says_so(kind: str, says: str) -> None:
    error = crash(lambda seed: GymEnv([Drifting()], seed))
    env = Drifting(kind, fails_at=-1)
    with pytest.raises(WorkerError, match=says) as caught:
        replay_crash(error, lambda: env)
    assert ("another way" in str(caught.value)) == bool(kind)
    assert "fix:" in str(caught.value)
    assert "in step" in str(caught.value.__cause__)  # the traceback of the failure itself
    assert caught.value.capsule is error.capsule
    assert env.is_closed


def test_a_failure_on_another_way_is_raised_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    error = crash(lambda seed: GymEnv([Drifting()], seed))
    with caplog.at_level(logging.WARNING, "rlpool"), pytest.raises(KeyError):
        replay_crash(error, lambda: Drifting("reward"))
    assert "another way: from step 4 on (the reward is 106.0" in caplog.text
    with caplog.at_level(logging.WARNING, "rlpool"), pytest.raises(TypeError):
        replay_crash(error, lambda: FailingEnv(TypeError("x"), step=2, length=20))
    assert "failed in another way" in caplog.text
    replay = replay_crash(crash(create_counting, Fragile()), lambda: Drifting("reward", -1))
    assert replay.diverged_at == 4


# What is left alone, and the debugger -------------------------------------------------------------


class Global(CountingEnv):
    """Fails in its fourth step, and says what its constructor drew from global generators."""

    def __init__(self) -> None:
        super().__init__(9)
        self.base = draw()

    def step(self, action: Any) -> Any:
        if self.t == 3:
            raise KeyError(str(self.base))
        return super().step(action)


def draw() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002


def seed_all() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)


@pytest.mark.parametrize("n_threads", [0, 1])
def test_generators_and_seeds_are_those_of_the_worker(n_threads: int) -> None:
    seeds: list[int] = []

    def create_env(seed: int) -> GymEnv:
        seeds.append(seed)
        return GymEnv([Global()], seed)

    error = crash(create_env, n_threads=n_threads)
    seed_all()
    with pytest.raises(KeyError) as caught:
        replay_crash(error, create_env)
    assert error.what.endswith(f"KeyError: {caught.value}")
    assert seeds[-1] == error.capsule.worker_seed
    drawn = draw()  # as if nothing had been repeated
    seed_all()
    assert drawn == draw()


@pytest.mark.parametrize(("call", "expected"), [("step", 7), ("reset", -1)])
def test_debug_before_stops_before_the_failing_call(
    call: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    error = crash(create_failing, env_args={"call": call})
    env = FailingEnv(KeyError("goal"), call, step=7, length=20)
    env.t = -1
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(env.t))
    with pytest.raises(KeyError):
        replay_crash(error, lambda: env, debug="before")
    assert seen == [expected]


def test_a_debugger_lands_in_the_users_frame(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = crash(create_unlucky)
    monkeypatch.setattr(sys, "stdin", io.StringIO("p 'reached', len(self.course), chance\nq\nq\n"))
    with pytest.raises(UnluckyError):
        replay_crash(error, UnluckyEnv, debug=True)
    # The options, an observation per reset and step, and an action per step.
    assert f"('reached', {2 + 2 * error.where.step + 1}, 0.05)" in capsys.readouterr().out


# What is refused ----------------------------------------------------------------------------------


def test_what_is_no_capsule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="not a crash capsule"):
        replay_crash(3, CountingEnv)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="nowhere' cannot be read: No such file"):
        replay_crash(tmp_path / "nowhere", CountingEnv)
    with pytest.raises(UsageError, match="carries no capsule: it died"):
        replay_crash(WorkerDiedError("it died", exitcode=1), CountingEnv)
    late = replace(crash(create_failing).capsule, first_step=5)
    with pytest.raises(UsageError, match="first 5 actions of this episode were not kept"):
        replay_crash(late, create_failing)


@pytest.mark.parametrize(
    ("create_env", "debug", "says"),
    [
        (3, False, "create_env is 3"),
        (lambda: None, False, "returned None, not a single environment"),
        (CountingEnv, "after", "debug should be"),
        (lambda: GymEnv([CountingEnv()]), False, "lane 1 failed, and create_env made 1 env"),
        (lambda: UnluckyEnv(action_space=NESTED), False, r"had the actions \['action'\], this env"),
    ],
)
def test_what_makes_no_environment_is_refused(create_env: Any, debug: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        replay_crash(crash(create_failing), create_env, debug=debug)
