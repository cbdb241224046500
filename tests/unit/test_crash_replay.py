"""Episodes that failed, repeated: the same failure in the user's own frame, or why not."""

from __future__ import annotations

import io
import logging
import pdb  # noqa: T100  (what is tested)
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
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
    AgentError,
    Batcher,
    CrashCapsule,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    Learner,
    Replay,
    SpecError,
    UsageError,
    WorkerDiedError,
    WorkerError,
    replay_crash,
)
from rlpool.errors import Where
from rlpool.loop import crash_scene
from rlpool.record import tape as tapes

from support.agents import ConstantAgent, FunctionAgent, StepCounter, zeros
from support.envs import AncestorCountingEnv, CountingEnv, FailingEnv
from support.meta import Storage
from support.unlucky import UnluckyEnv, UnluckyError, create_unlucky


def frames(error: BaseException) -> list[str]:
    """Names of the functions that an exception went through, the innermost last."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def crash(
    create_env: Callable[..., Any],
    agent: Any = None,
    n_episodes: int = 40,
    env_args: Any = None,
    infos: Any = None,
    **arguments: Any,
) -> WorkerError:
    """The error of episodes, in this process unless said otherwise."""
    given = {"n_timesteps": 5, "n_slots": 3, "seeds": 0, "n_threads": 0, **arguments}
    batcher = EpisodeBatcher(
        create_agent=lambda: agent or StepCounter(),
        create_env=create_env,
        env_args=env_args,
        **given,
    )
    with batcher:
        batcher.execute(n_episodes, **(infos or {}))
        with pytest.raises(WorkerError) as caught:
            batcher.get()
    return caught.value


def run_windows(batcher: Batcher) -> None:
    """Windows until one of them fails."""
    for _ in range(1000):
        batcher.execute()
        batcher.get()


def create_failing(seed: int, step: int = 7, call: str = "step") -> GymEnv:
    """Fails in the second episode, with the options ``id: 1``."""
    error = KeyError("goal")
    return GymEnv([FailingEnv(error, call, step=step, length=20) for _ in range(2)], seed)


def ids(n: int = 40) -> dict[str, Any]:
    return {"env_info": DictTensor({"id": torch.arange(n)})}


SPACES: dict[str, Any] = {
    "nested": spaces.Dict(
        a=spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))),
        b=spaces.MultiBinary(2),
    ),
    "tuple": spaces.Tuple((spaces.MultiDiscrete([3, 3]), spaces.Box(-1, 1, (), np.float64))),
    "wide": spaces.Box(-1, 1, (2, 2), np.float64),
    "flat": spaces.Box(-1, 1, (), np.float32),
}


def random_agent(space: Any) -> FunctionAgent:
    """Draws the actions of a space from its noise."""

    def actions(part: Any, key: str, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        if isinstance(part, spaces.Dict | spaces.Tuple):
            inner = part.spaces.items() if isinstance(part, spaces.Dict) else enumerate(part)
            found: dict[str, torch.Tensor] = {}
            for name, space in inner:
                found |= actions(space, f"{key}/{name}", noise)
            return found
        shape = (len(noise), *(part.shape or ()))
        drawn = noise[:, : int(np.prod(shape[1:]))].reshape(shape)
        if isinstance(part, spaces.Box):
            return {key: drawn}
        dtype = torch.from_numpy(np.zeros(0, part.dtype)).dtype
        return {key: (2 * drawn).to(dtype)}

    def act(state: Any, observation: Any, *_: Any) -> Any:
        return (
            DictTensor(),
            DictTensor(actions(space, "action", observation["noise"])),
            DictTensor(),
        )

    return FunctionAgent(act, n_noise=4)


# The same again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_a_failure_that_depends_on_everything_comes_again(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    infos = {"env_info": DictTensor({"task": torch.arange(40)})}
    env_args = {"chance": 0.02, "n_envs": 3}
    agent = random_agent(spaces.Discrete(1000))
    error = crash(create_unlucky, agent, env_args=env_args, seeds=seed, infos=infos, n_slots=9)
    text = error.what.removeprefix("env.step raised UnluckyError: ")
    assert text.isdigit()
    path = error.capsule.save(tmp_path / "x")
    for given in (error, error.capsule, path, str(path)):
        with pytest.raises(UnluckyError) as caught:
            replay_crash(given, create_unlucky, env_args)
        assert str(caught.value) == text
        assert frames(caught.value)[-2:] == ["step", "drawn"]
        assert caught.value.__cause__ is None
    assert not caplog.records  # rewards and the last observation were the same


def test_failing_resets_come_again() -> None:
    env_args = {"reset_chance": 0.2, "chance": 0.0, "n_envs": 3}
    error = crash(create_unlucky, env_args=env_args)
    assert error.capsule.call == "reset"
    with pytest.raises(UnluckyError) as caught:
        replay_crash(error, create_unlucky, env_args)
    assert str(caught.value) in error.what
    assert frames(caught.value)[-2:] == ["reset", "drawn"]


@pytest.mark.parametrize("seed", range(8))
def test_failures_in_windows_of_lanes_that_restart_come_again(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    env_args = {
        "restarts": True,
        "n_envs": 3,
        "chance": 0.02,
        "end": 0.1,
        "reset_chance": 0.05 * (seed % 2),
    }
    batcher = Batcher(
        n_timesteps=4,
        create_agent=lambda: random_agent(spaces.Discrete(1000)),
        create_env=create_unlucky,
        env_args=env_args,
        n_threads=0,
        seeds=seed,
    )
    with batcher:
        batcher.reset()
        with pytest.raises(EnvError) as caught:
            run_windows(batcher)
    error = caught.value
    with pytest.raises(UnluckyError) as again:
        replay_crash(error, create_unlucky, env_args)
    assert error.what.endswith(f": {again.value}")
    assert not caplog.records


@pytest.mark.parametrize("name", SPACES)
def test_actions_of_every_structure_come_again(name: str) -> None:
    space = SPACES[name]
    env_args = {"action_space": space, "dtype": np.float64}
    error = crash(create_unlucky, random_agent(space), env_args=env_args)
    with pytest.raises(UnluckyError) as caught:
        replay_crash(error, create_unlucky, env_args)
    assert error.what.endswith(f": {caught.value}")
    # One environment alone will do, and takes the same actions.
    with pytest.raises(UnluckyError, match=str(caught.value)):
        replay_crash(error, lambda: UnluckyEnv(**env_args))


def test_observations_that_are_stored_as_float64_are_compared_as_such(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([UnluckyEnv(dtype=np.float64)], seed, keep_float64=True)

    with pytest.raises(UnluckyError):
        replay_crash(crash(create_env), lambda: UnluckyEnv(dtype=np.float64))
    assert not caplog.records


def test_failures_of_a_learners_rollouts_come_again(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [3, 4, 5]
    agent = random_agent(spaces.Discrete(1000))
    learner = Learner(agent, Storage(), None, tasks, AGENT_ARCHS.Memory, seed=5)
    envs = GymEnv([UnluckyEnv() for _ in range(3)])
    with pytest.raises(EnvError) as caught:
        learner.collect_rollouts_parallel(50, parallel_env=envs)
    found = caught.value.capsule
    assert found.where == caught.value.where
    assert found.options["task"] in tasks
    for create_env in (UnluckyEnv, lambda: GymEnv([UnluckyEnv() for _ in range(3)])):
        with pytest.raises(UnluckyError) as again:
            replay_crash(caught.value, create_env)
        assert caught.value.what.endswith(f": {again.value}")
    assert not caplog.records


def test_environments_without_spaces_come_again() -> None:
    class Old(AncestorCountingEnv):
        def step(self, action: Any) -> Any:
            if self.t == 7:
                raise KeyError(f"goal {action!r} {self.seeds[-1]}")
            return super().step(action)

    error = crash(lambda seed: GymEnv([Old(9), Old(9)], seed), ConstantAgent(4))
    for create_env in (lambda seed: GymEnv([Old(9), Old(9)], seed), lambda: Old(9)):
        with pytest.raises(KeyError) as caught:
            replay_crash(error, create_env)
        assert error.what.endswith(f"KeyError: {caught.value}")
    assert "goal 4" in error.what


def test_gymnasiums_own_environments_come_again(caplog: pytest.LogCaptureFixture) -> None:
    def act(state: Any, observation: Any, *_: Any) -> Any:
        # Not an action of CartPole's once the pole leans.
        leans = observation["frame"][:, 2].abs() > 0.05
        return DictTensor(), DictTensor({"action": zeros(observation) + 7 * leans}), DictTensor()

    def create_env(seed: int) -> GymEnv:
        return GymEnv([gymnasium.make("CartPole-v1") for _ in range(2)], seed)

    error = crash(create_env, FunctionAgent(act))
    for function in (create_env, lambda: gymnasium.make("CartPole-v1")):
        with pytest.raises(AssertionError) as caught:
            replay_crash(error, function)
        assert frames(caught.value)[-1] == "step"
    assert not caplog.records


def test_wrong_values_come_again() -> None:
    class Wrong(CountingEnv):
        def observation(self) -> Any:
            return np.zeros(3 if self.t == 2 else 2, np.float32)

    error = crash(lambda seed: GymEnv([Wrong()], seed))
    with pytest.raises(SpecError, match=r"should have shape \[2\], got \[3\]"):
        replay_crash(error, lambda: Wrong())

    class Short(CountingEnv):
        def step(self, action: Any) -> Any:
            return super().step(action)[:4]

    error = crash(lambda seed: GymEnv([Short()], seed))
    with pytest.raises(SpecError, match="five values"):
        replay_crash(error, lambda: Short())


def test_the_causes_of_the_users_exception_are_left_alone() -> None:
    class Chained(FailingEnv):
        def step(self, action: Any) -> Any:
            try:
                return super().step(action)
            except KeyError as error:
                raise ValueError("no goal") from error

    def create_env(seed: int) -> GymEnv:
        return GymEnv([Chained(KeyError("goal"), step=2)], seed)

    with pytest.raises(ValueError, match="no goal") as caught:
        replay_crash(crash(create_env, infos=ids()), create_env)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_process_that_exits_is_told_as_such() -> None:
    class Leaving(FailingEnv):
        pass

    def create_env(seed: int) -> GymEnv:
        return GymEnv([Leaving(SystemExit(3), step=2)], seed)

    with pytest.raises(SystemExit):
        replay_crash(crash(create_env, infos=ids()), create_env)


# The agent ----------------------------------------------------------------------------------------


class Fragile(StepCounter):
    """Fails when ``agent_info["x"]`` is 30 in step 7, unless it was mended."""

    is_mended = False

    def __call__(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> Any:
        is_bad = (observation["frame"][:, 0] == 7) & (agent_info["x"] == 30)
        if bool(is_bad.any()) and not self.is_mended:
            observation["frame"].zero_()
            raise KeyError("policy")
        return super().__call__(state, observation, agent_info, history)


def agent_crash(**arguments: Any) -> WorkerError:
    infos = {
        "env_info": DictTensor({"length": torch.full((8,), 20), "id": torch.arange(8)}),
        "agent_info": DictTensor({"x": torch.arange(8) * 10}),
    }
    return crash(create_counting, Fragile(), 8, infos=infos, **arguments)


def create_counting(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(), CountingEnv()], seed)


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_failing_agent_leaves_the_environment_at_its_step(is_saved: bool, tmp_path: Path) -> None:
    error = agent_crash()
    assert isinstance(error, AgentError)
    given = error.capsule.save(tmp_path / "x") if is_saved else error
    replay = replay_crash(given, create_counting)
    assert isinstance(replay, Replay)
    lane = replay.lane
    assert (replay.step, lane, replay.diverged_at) == (7, error.where.lane, None)
    assert replay.env.current["frame"][lane].tolist() == [7, error.where.episode]
    # All that the agent was called with: the call can be repeated, and the episode go on.
    agent = Fragile()
    assert replay.observation["frame"].tolist() == [[7, 2], [7, 3]]
    with pytest.raises(KeyError, match="policy"):
        agent(replay.state.clone(), replay.observation.clone(), replay.agent_info)
    agent.is_mended = True
    _, output, _ = agent(replay.state, replay.observation, replay.agent_info)
    assert output["action"].tolist() == [8, 8]
    replay.env.step_lanes([lane], {"action": output["action"].numpy()})
    assert replay.env.current["frame"][lane].tolist() == [8, error.where.episode]
    replay.env.close()


def test_a_single_environment_will_do_for_the_agent_as_well() -> None:
    error = agent_crash()
    replay = replay_crash(error, CountingEnv)
    assert (replay.lane, replay.env.n_lanes) == (0, 1)
    assert replay.env.current["frame"].tolist() == [[7, error.where.episode]]
    assert replay.observation["frame"].tolist() == [[7, 2], [7, 3]]


def test_an_agent_that_fails_at_once_leaves_the_first_observation() -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("policy")

    error = crash(create_counting, FunctionAgent(fails), 4, infos=ids(4))
    replay = replay_crash(error, create_counting)
    assert (replay.step, replay.diverged_at, replay.state) == (0, None, None)
    assert replay.observation["frame"].tolist() == [[0, 0], [0, 1]]
    assert replay.agent_info is None
    assert replay.env.current["frame"][0].tolist() == [0, 0]


# Another way --------------------------------------------------------------------------------------


def test_an_episode_that_does_not_fail_again_says_so() -> None:
    error = crash(create_failing, infos=ids())
    env = CountingEnv(20)
    with pytest.raises(WorkerError, match=r"did not fail again: step 7 went through\. ") as caught:
        replay_crash(error, lambda: env)
    assert "another way" not in str(caught.value)
    assert "KeyError: 'goal'" in str(caught.value)
    assert "fix:" in str(caught.value)
    assert "in step" in str(caught.value.__cause__)  # the traceback of the failure itself
    assert caught.value.capsule is error.capsule
    assert env.is_closed
    error = crash(create_failing, env_args={"call": "reset"}, infos=ids())
    with pytest.raises(WorkerError, match="did not fail again: reset went through"):
        replay_crash(error, CountingEnv)


class Drifting(FailingEnv):
    """Has other rewards, observations or an end from a step on."""

    def __init__(self, kind: str = "", at: int = 4) -> None:
        super().__init__(KeyError("goal"), step=7, length=20)
        self.kind, self.at = kind, at

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.t > self.at and self.kind == "reward":
            reward += 1
        if self.t > self.at and self.kind == "end":
            truncated = True
        if self.t > self.at and self.kind == "observation":
            observation = observation + 1
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("reward", r"another way from step 4 on \(the reward is 106.0, it was 105.0\)"),
        ("end", r"ended before step 7, .* another way from step 4 on \(the episode ended\)"),
        ("observation", r"another way from step 7 on \('frame' is not what it was"),
    ],
)
def test_an_episode_that_goes_another_way_says_where(kind: str, says: str) -> None:
    def create_env(seed: int, kind: str = "", **changes: Any) -> GymEnv:
        env = Drifting(kind)
        vars(env).update(changes)
        return GymEnv([env], seed)

    error = crash(create_env, infos=ids())
    with pytest.raises(WorkerError, match=says):
        replay_crash(error, create_env, {"kind": kind, "fails_at": -1})


def test_a_failure_on_another_way_is_raised_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = crash(lambda seed: GymEnv([Drifting()], seed), infos=ids())
    with caplog.at_level(logging.WARNING, "rlpool"), pytest.raises(KeyError):
        replay_crash(error, lambda: Drifting("reward"))
    assert "another way: from step 4 on (the reward is 106.0" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rlpool"), pytest.raises(TypeError):
        replay_crash(error, lambda: FailingEnv(TypeError("x"), step=2, length=20))
    assert "failed in another way" in caplog.text


def test_an_agents_replay_says_where_it_went_another_way() -> None:
    error = agent_crash()
    assert replay_crash(error, lambda: Drifting("reward", 2)).diverged_at == 2


# What is left alone -------------------------------------------------------------------------------


class Global(CountingEnv):
    """Fails in its fourth step, and says what its constructor drew from global generators."""

    def __init__(self) -> None:
        super().__init__(9)
        self.base = [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002

    def step(self, action: Any) -> Any:
        if self.t == 3:
            raise KeyError(str(self.base))
        return super().step(action)


@pytest.mark.parametrize("n_threads", [0, 1])
def test_generators_are_seeded_as_in_a_worker_and_left_as_they_were(n_threads: int) -> None:
    error = crash(lambda seed: GymEnv([Global()], seed), n_threads=n_threads)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    with pytest.raises(KeyError) as caught:
        replay_crash(error, Global)
    assert error.what.endswith(f"KeyError: {caught.value}")
    drawn = random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()))  # noqa: NPY002


def test_create_env_gets_what_it_got_in_the_worker() -> None:
    seeds: list[int] = []

    def create_env(seed: int, step: int) -> GymEnv:
        seeds.append(seed)
        return create_failing(seed, step)

    error = crash(create_env, env_args={"step": 3}, infos=ids())
    with pytest.raises(KeyError):
        replay_crash(error, create_env, {"step": 3})
    assert seeds[0] == seeds[1] == error.capsule.worker_seed


# The debugger -------------------------------------------------------------------------------------


def test_debug_opens_pdb_where_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(pdb, "post_mortem", seen.append)
    error = crash(create_failing, infos=ids())
    with pytest.raises(KeyError):
        replay_crash(error, create_failing, debug=True)
    (found,) = seen
    while found.tb_next is not None:
        found = found.tb_next
    assert found.tb_frame.f_code.co_name == "step"
    assert isinstance(found.tb_frame.f_locals["self"], FailingEnv)


@pytest.mark.parametrize(("call", "step"), [("step", 7), ("reset", 0)])
def test_debug_before_stops_before_the_failing_call(
    call: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    error = crash(create_failing, env_args={"call": call}, infos=ids())
    env = FailingEnv(KeyError("goal"), call, step=7, length=20)
    env.t = -1
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(env.t))
    with pytest.raises(KeyError):
        replay_crash(error, lambda: env, debug="before")
    assert seen == [7 if call == "step" else -1]


REACHED = "p 'reached', len(self.course), chance\nq\nq\n"


def reached(where: Where) -> str:
    """What pdb prints for that in the frame of the environment that failed."""
    # The options, an observation per reset and step, and an action per step.
    return f"('reached', {2 + 2 * where.step + 1}, 0.05)"


def test_a_debugger_lands_in_the_users_frame(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = crash(create_unlucky)
    monkeypatch.setattr(sys, "stdin", io.StringIO(REACHED))
    with pytest.raises(UnluckyError):
        replay_crash(error, UnluckyEnv, debug=True)
    assert reached(error.where) in capsys.readouterr().out


def test_a_program_that_replays_a_crash_can_be_run_in_a_debugger(tmp_path: Path) -> None:
    error = crash(create_unlucky)
    path = error.capsule.save(tmp_path / "x")
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from rlpool import replay_crash\n"
        "from support.unlucky import UnluckyEnv\n"
        "replay_crash(sys.argv[1], UnluckyEnv)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pdb", "-c", "continue", str(script), str(path)],
        input=REACHED,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert reached(error.where) in done.stdout


# What is refused ----------------------------------------------------------------------------------


def test_what_is_no_capsule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no crash capsule"):
        replay_crash(3, CountingEnv)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="nowhere' cannot be read: No such file"):
        replay_crash(tmp_path / "nowhere", CountingEnv)
    with pytest.raises(UsageError, match="carries no capsule: it died"):
        replay_crash(WorkerDiedError("it died", exitcode=1), CountingEnv)


def test_what_makes_no_environment_is_refused() -> None:
    error = crash(create_failing, infos=ids())
    with pytest.raises(SpecError, match="create_env is 3"):
        replay_crash(error, 3)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="returned NoneType, not an environment"):
        replay_crash(error, lambda: None)
    with pytest.raises(SpecError, match="debug should be"):
        replay_crash(error, CountingEnv, debug="after")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="lane 1 failed, and create_env made 1 env"):
        replay_crash(error, lambda: GymEnv([CountingEnv()]))
    with pytest.raises(SpecError, match=r"had the actions \['action'\], this environment takes"):
        replay_crash(error, lambda: UnluckyEnv(action_space=SPACES["nested"]))
    with pytest.raises(ZeroDivisionError):
        replay_crash(error, lambda: 1 / 0)


def test_episodes_whose_beginning_was_not_kept_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crash_scene, "MOST_BYTES", 100)
    monkeypatch.setattr(tapes, "_CHUNK_BYTES", 1)
    infos = {"env_info": DictTensor({"id": torch.tensor([1]), "length": torch.tensor([99])})}
    error = crash(create_failing, None, 1, {"step": 60}, infos)
    with pytest.raises(UsageError, match=r"first .* actions of this episode were not kept"):
        replay_crash(error, create_failing)


def test_a_capsule_with_another_seed_is_another_episode() -> None:
    error = crash(create_unlucky)
    found: CrashCapsule = replace(error.capsule, seed=1)
    with pytest.raises((WorkerError, UnluckyError)) as caught:
        replay_crash(found, create_unlucky)
    assert str(caught.value) not in error.what
