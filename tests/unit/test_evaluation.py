"""Evaluating an agent: the same results for any number of workers, an agent that stays, videos."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformReward
from torch import nn

from rlpool import (
    Agent,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    VectorGymEnv,
    WorkerError,
    WorkerStartupError,
    evaluate,
    sample_categorical,
)

from support.agents import StepCounter
from support.envs import AncestorCountingEnv, CountingEnv, create_counting
from support.vector_envs import OwnVectorEnv


class Policy(nn.Module, Agent):
    """Greedy with ``agent_info["is_greedy"]``; its layers tell training from evaluation."""

    n_noise = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.was_training: list[bool] = []

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, history: Any = None):
        self.was_training.append(self.training)
        logits = self.layers(observation["frame"])
        action, _ = sample_categorical(logits, observation["noise"])
        if agent_info is not None:
            action = torch.where(agent_info["is_greedy"], logits.argmax(-1), action)
        return DictTensor(), DictTensor({"action": action}), DictTensor()


def create_cartpole(seed: int, n_envs: int = 2) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def test_results_are_the_same_for_any_number_of_workers() -> None:
    policy = Policy()
    info = {"is_greedy": torch.arange(21) % 2 == 0}
    results = [
        evaluate(policy, create_cartpole, 21, n_workers=n, seeds=3, agent_info=info)
        for n in (0, 1, 3)
    ]
    first = results[0]
    assert first.returns.shape == (21,)
    assert torch.equal(first.returns.long(), first.lengths)
    assert len(set(first.seeds.tolist())) == 21
    assert first.successes is None
    for other in results[1:]:
        for name in ("returns", "lengths", "seeds"):
            assert torch.equal(getattr(first, name), getattr(other, name))
    again = evaluate(policy, create_cartpole, 21, seeds=4, agent_info=info)
    assert not torch.equal(again.seeds, first.seeds)


@pytest.mark.parametrize("seed", [0, 3])
def test_no_episode_is_one_that_a_batcher_with_the_same_seed_has_run(seed: int) -> None:
    evaluation = evaluate(Policy(), create_cartpole, 40, seeds=seed)
    arguments: Any = {"create_env": create_cartpole, "n_workers": 0, "seeds": seed}
    with EpisodeBatcher(500, 80, Policy, **arguments) as batcher:
        batcher.execute(80)
        training = batcher.get()
    assert training is not None
    assert not set(training.info["seed"].tolist()) & set(evaluation.seeds.tolist())


def test_the_agent_and_the_generators_of_the_caller_stay_as_they_were() -> None:
    policy = Policy().train()
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    torch.manual_seed(0)
    random.seed(0)
    drawn = torch.rand(3), random.random()
    torch.manual_seed(0)
    random.seed(0)
    evaluate(policy, create_cartpole, 5)
    assert (policy.training, policy.layers.training) == (True, True)
    assert policy.was_training == []
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    assert all(value.grad is None and value.requires_grad for value in policy.parameters())


class Holder(Agent):
    """Holds modules, some of them in other agents and lists; succeeds in evaluation mode only."""

    n_noise = 1

    def __init__(self) -> None:
        self.inner, self.parts = Policy(), [nn.Dropout()]

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, history: Any = None):
        modules = self.inner, self.inner.layers[1], self.parts[0]
        assert not any(module.training for module in modules)
        return self.inner(state, observation, agent_info, history)


@pytest.mark.parametrize("n_threads", [0, 1])
def test_modules_are_in_evaluation_mode_wherever_an_agent_holds_them(n_threads: int) -> None:
    holder = Holder()
    assert evaluate(holder, create_cartpole, 3, n_workers=n_threads).returns.min() > 0
    assert holder.inner.layers[1].training
    assert holder.parts[0].training


class SucceedingEnv(CountingEnv):
    """Observes whether it succeeds: in its second step, or from the second step on."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Dict(
            {key: gymnasium.spaces.MultiBinary(()) for key in [key]}
        )
        self.key = key

    def observation(self) -> Any:
        return {self.key: np.array(self.t == 2, np.int8)}


@pytest.mark.parametrize(
    ("key", "expected"), [("success", [False, True, True]), ("is_success", [False, True, False])]
)
def test_successes_are_what_the_environment_says(key: str, expected: list[bool]) -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([SucceedingEnv(key)], seed)

    result = evaluate(StepCounter(), create_env, 3, env_info={"length": [1, 2, 3]})
    assert result.successes is not None
    assert result.successes.tolist() == expected
    assert result.lengths.tolist() == [1, 2, 3]


class TellingEnv(CountingEnv):
    """Its infos tell whether it is in its second step, as an array."""

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"success": np.array([self.t == 2])}


@pytest.mark.parametrize(
    ("key", "expected"), [("success", [False, True, True]), ("is_success", [False, True, False])]
)
def test_successes_may_be_arrays_of_one_element(key: str, expected: list[bool]) -> None:
    class Named(TellingEnv):
        def step(self, action: Any) -> Any:
            *results, info = super().step(action)
            return *results, {key: info["success"]}

    def create_env(seed: int) -> GymEnv:
        return GymEnv([Named()], seed, info_keys={key: (bool, 1)})

    result = evaluate(StepCounter(), create_env, 3, env_info={"length": [1, 2, 3]})
    assert result.successes is not None
    assert result.successes.tolist() == expected


def test_infos_reach_their_episodes_whatever_the_size_of_a_request() -> None:
    n = 3 * 2 * 4 + 1
    lengths = torch.arange(n) % 7 + 1
    result = evaluate(StepCounter(), create_counting, n, env_info={"length": lengths})
    assert torch.equal(result.lengths, lengths)
    assert result.returns.tolist() == [k * (k + 1) / 2 for k in lengths.tolist()]


# Videos ------------------------------------------------------------------------------------------


class ShownEnv(CountingEnv):
    """Renders its step; keeps count of the frames that it has rendered."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(
        self, render_mode: str | None = "rgb_array", shows: Any = None, grows: bool = False
    ) -> None:
        super().__init__()
        self.render_mode, self.shows, self.grows = render_mode, shows, grows

    def render(self) -> Any:
        if self.shows is not None:
            return self.shows
        if self.grows:
            return np.zeros((17 + self.t, 34, 3), np.uint8)
        return np.full((17, 34, 3), 20 * self.t, np.uint8)


def create_shown(seed: int, **options: Any) -> GymEnv:
    return GymEnv([ShownEnv(**options) for _ in range(2)], seed)


@pytest.fixture
def moviepy() -> None:
    pytest.importorskip("moviepy", reason='needs moviepy: pip install "rlpool[video]"')


def frames_of(path: Path) -> list[int]:
    """The step that every frame of a film shows, in order."""
    from moviepy.config import FFMPEG_BINARY

    options = ["-v", "error", "-f", "rawvideo", "-pix_fmt", "gray", "-"]
    command = [FFMPEG_BINARY, "-i", str(path), *options]
    shown = np.frombuffer(subprocess.check_output(command), np.uint8)
    return [round(frame.mean() / 20) for frame in shown.reshape(-1, 18, 34)]


@pytest.mark.usefixtures("moviepy")
@pytest.mark.parametrize("n_threads", [0, 2])
def test_films_are_those_of_their_episodes(n_threads: int, tmp_path: Path) -> None:
    info = {"length": [1, 2, 3, 4, 5, 6]}
    options: Any = {"env_info": info, "n_threads": n_threads}
    films = tmp_path / "deep" / "films"
    result = evaluate(StepCounter(), create_shown, 6, video=films, video_episodes=[5, 1], **options)
    names = [
        f"episode-{n:03d}-seed-{int(result.seeds[n])}-return-{r}.mp4" for n, r in [(1, 3), (5, 21)]
    ]
    assert [path.name for path in result.videos] == names
    assert sorted(path.name for path in films.iterdir()) == names
    assert frames_of(result.videos[0]) == [0, 1, 2]
    assert frames_of(result.videos[1]) == [0, 1, 2, 3, 4, 5, 6]
    plain = evaluate(StepCounter(), create_shown, 6, **options)
    assert torch.equal(plain.returns, result.returns)
    assert plain.videos == ()


@pytest.mark.usefixtures("moviepy")
def test_the_log_names_episodes_that_were_not_filmed_since_a_record_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"record": tmp_path / "run.jsonl", "video": tmp_path, "video_episodes": [1, 2]}
    assert len(evaluate(StepCounter(), create_shown, 3, **options).videos) == 2
    assert caplog.text == ""
    assert evaluate(StepCounter(), create_shown, 3, **options).videos == ()
    assert "no film of episodes [1, 2]: they failed, or the record had them" in caplog.text


class OldShownEnv(AncestorCountingEnv):
    """For the old gym, with another interface altogether or with a reset of today's arguments."""

    render_mode, render = "rgb_array", ShownEnv.render
    shows, grows = None, False
    observation_space, action_space = CountingEnv.observation_space, CountingEnv.action_space


class GymnasiumsOldShownEnv(OldShownEnv, gymnasium.Env):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset()


@pytest.mark.usefixtures("moviepy")
@pytest.mark.parametrize("kind", [OldShownEnv, GymnasiumsOldShownEnv])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_environments_of_the_old_gym_are_filmed(
    kind: Any, is_wrapped: bool, tmp_path: Path
) -> None:
    def create_env(seed: int) -> GymEnv:
        env = kind(is_limited=True)
        if is_wrapped and isinstance(env, gymnasium.Env):
            env = TransformReward(env, lambda reward: reward)
        return GymEnv([env], seed)

    result = evaluate(StepCounter(), create_env, 2, video=tmp_path, video_episodes=1)
    (path,) = result.videos
    assert path.name.endswith("-return-6.mp4")
    assert frames_of(path) == [0, 1, 2, 3]


@pytest.mark.usefixtures("moviepy")
def test_names_of_films_have_the_return_in_full(tmp_path: Path) -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([TransformReward(ShownEnv(), lambda reward: reward * 617_283.625)], seed)

    (path,) = evaluate(StepCounter(), create_env, 1, video=tmp_path).videos
    assert path.name.endswith("-return-3703701.75.mp4")


@pytest.mark.usefixtures("moviepy")
def test_a_film_ends_with_the_last_step_whatever_its_length(tmp_path: Path) -> None:
    lengths = [4, 6, 9, 10]  # moviepy alone drops a frame of some of them
    info: Any = {"length": lengths}
    result = evaluate(
        StepCounter(), create_shown, 4, env_info=info, video=tmp_path, video_episodes=4
    )
    for length, path in zip(lengths, result.videos, strict=True):
        film = frames_of(path)
        assert film[: length + 1] == list(range(length + 1))
        assert film[length:] in ([length], [length, length])


@pytest.mark.usefixtures("moviepy")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"render_mode": None}, WorkerStartupError, "(?s)render_mode is None.*render_mode='rgb_"),
        ({"render_mode": "human"}, WorkerStartupError, "render_mode is 'human'"),
        ({"shows": [1, 2]}, EnvError, r"render\(\) returned int64 \(2,\), not uint8"),
        ({"grows": True}, EnvError, "requires all images to be the same size"),
    ],
)
def test_what_cannot_be_filmed_is_refused(
    options: Any, error: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        evaluate(StepCounter(), create_shown, 2, env_args=options, video=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("moviepy")
def test_only_environments_of_a_gym_env_can_be_filmed(tmp_path: Path) -> None:
    def create_env(seed: int) -> VectorGymEnv:
        return VectorGymEnv(OwnVectorEnv([CountingEnv] * 2, "Disabled"), seed)

    assert evaluate(StepCounter(), create_env, 3).returns.tolist() == [6.0] * 3
    with pytest.raises(WorkerError, match="video needs the environments of a GymEnv"):
        evaluate(StepCounter(), create_env, 3, video=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": StepCounter}, r"(?s)agent is the class StepCounter.*StepCounter\(...\)"),
        ({"agent": len}, "(?s)agent is a builtin_function_or_method, not an Agent.*fix"),
        ({"n_episodes": 0}, "n_episodes should be an int of at least 1"),
        ({"seeds": -1}, "seeds should be an int of at least 0"),
        ({"video": "films", "video_episodes": [2]}, "has episode 2, there are 2"),
        ({"video": True}, "(?s)video is True, not a path.*fix: +pass a directory"),
        ({"video": False}, "video is False, not a path"),
        ({"env_info": {"length": [1]}}, "'length' in env_info has 1 rows, 2 were expected"),
        ({"create_env": None}, "create_env is None"),
        ({"num_workers": 2}, "pass n_workers"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    changes: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"agent": StepCounter(), "create_env": create_counting, "n_episodes": 2, **changes}
    with pytest.raises(SpecError, match=message):
        evaluate(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_films_need_moviepy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moviepy", None)
    with pytest.raises(SpecError, match=r"(?s)video needs moviepy.*pip install rlpool\[video\]"):
        evaluate(StepCounter(), create_shown, 2, video=tmp_path / "films")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("moviepy")
def test_films_that_cannot_be_written_are_told_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(SpecError, match=r"(?s)video is .*/file: .*fix: +pass a directory"):
        evaluate(StepCounter(), create_counting, 2, video=path)


def test_an_agent_that_cannot_be_copied_is_refused() -> None:
    agent = Policy()
    agent.cache = agent.layers[0].weight * 2  # part of a graph
    with pytest.raises(SpecError, match=r"(?s)the agent cannot be copied.*__deepcopy__"):
        evaluate(agent, create_cartpole, 2)
