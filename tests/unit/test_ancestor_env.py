"""Environments written for the old gym, and other signatures of ``reset``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.wrappers import TimeLimit

from rlpool import DictTensor, EpisodeBatcher, GymEnv, GymEnvInf, Pool, SpecError
from rlpool.envs.ancestor_env import AncestorEnv
from rlpool.envs.former_generator import FormerGenerator

from support.agents import StepCounter
from support.envs import (
    AncestorCountingEnv,
    AncestorInfoEnv,
    AncestorWrapper,
    CountingEnv,
    EchoEnv,
    InfoEnv,
    SpacedAncestorEnv,
    assert_same_tensors,
    counting_trajectories,
)

KINDS = [AncestorCountingEnv, SpacedAncestorEnv]
both_kinds = pytest.mark.parametrize("kind", KINDS)


def action(*values: Any) -> DictTensor:
    return DictTensor({"action": torch.tensor(values)})


def collect(make_env: Any, n_episodes: int, n_envs: int = 2, **arguments: Any) -> Any:
    """Episodes of a ``StepCounter``, in this process."""
    infos = arguments.pop("infos", {})
    with EpisodeBatcher(
        n_timesteps=2,
        n_slots=4,
        create_agent=StepCounter,
        create_env=lambda seed: GymEnv([make_env() for _ in range(n_envs)], seed, **arguments),
        n_threads=0,
        seeds=0,
    ) as batcher:
        batcher.execute(n_episodes, **infos)
        return batcher.get()


@both_kinds
def test_reset_and_step_work_as_with_a_modern_environment(kind: Any) -> None:
    env = GymEnv([kind(length=1, number=3), kind(length=2, number=4)], seed=0)
    observation, running = env.reset()
    assert running.tolist() == [0, 1]
    assert observation["frame"].tolist() == [[0, 3], [0, 4]]
    assert observation["frame"].dtype == torch.float32
    assert observation["initial_state"].tolist() == [True, True]
    (observation, ran), (after, running) = env.step(action(8, 9))
    assert ran.tolist() == [0, 1]
    assert running.tolist() == [1]
    assert observation["frame"].tolist() == [[1, 3], [1, 4]]
    assert observation["reward"].tolist() == [301, 401]
    assert observation["terminated"].tolist() == [True, False]
    assert observation["truncated"].tolist() == [False, False]
    assert observation["done"].tolist() == [True, False]
    assert observation["last_action"].tolist() == [8, 9]
    assert after["frame"].tolist() == [[1, 4]]


@both_kinds
def test_a_batcher_gives_the_same_trajectories_as_for_modern_environments(kind: Any) -> None:
    trajectories = collect(lambda: kind(length=5, number=2), 3)
    assert_same_tensors(trajectories, counting_trajectories([5, 5, 5], [2, 2, 2]))


@both_kinds
def test_every_reset_is_seeded_before(kind: Any) -> None:
    inner = kind(length=1)
    env = GymEnvInf([inner], seed=0)
    env.reset()
    for _ in range(3):
        env.step(action(0))
    assert len(inner.seeds) == 4
    assert len(set(inner.seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in inner.seeds)
    np.random.RandomState(inner.seeds[0])


def test_the_same_seed_seeds_ancestors_alike() -> None:
    first, second = SpacedAncestorEnv(), SpacedAncestorEnv()
    GymEnv([first], seed=4).reset()
    GymEnv([second], seed=4).reset()
    assert first.seeds == second.seeds


def test_an_environment_without_seed_method_works() -> None:
    class Env:
        def reset(self) -> float:
            return 0.5

        def step(self, action: Any) -> tuple[float, int, bool, dict[str, Any]]:
            return 1.5, 1, True, {}

    env = GymEnv([Env()], seed=0)
    observation, _ = env.reset()
    assert observation["frame"].tolist() == [0.5]
    assert observation["frame"].dtype == torch.float32
    (observation, _), (_, running) = env.step(action(0))
    assert observation["frame"].tolist() == [1.5]
    assert running.tolist() == []
    env.close()


def test_a_time_limit_that_the_info_reports_is_a_truncation() -> None:
    env = GymEnv([SpacedAncestorEnv(length=1, is_limited=True)], seed=0)
    env.reset()
    (observation, _), _ = env.step(action(0))
    assert observation["truncated"].tolist() == [True]
    assert observation["terminated"].tolist() == [False]
    assert observation["done"].tolist() == [True]


@both_kinds
def test_a_time_limit_can_be_put_on_top(kind: Any) -> None:
    trajectories = collect(lambda: kind(length=9), 2, max_episode_steps=4)
    assert trajectories.lengths.tolist() == [4, 4]
    assert_same_tensors(trajectories, counting_trajectories([4, 4], [0, 0], ["truncated"] * 2))


@both_kinds
def test_ancestors_restart_on_their_own(kind: Any) -> None:
    env = GymEnvInf([kind(length=2)], seed=0)
    env.reset()
    env.step(action(1))
    (observation, _), (after, running) = env.step(action(1))
    assert running.tolist() == [0]
    assert observation["frame"].tolist() == [[2, 0]]
    assert observation["done"].tolist() == [True]
    assert after["frame"].tolist() == [[0, 0]]
    assert after["reward"].tolist() == [0]
    assert after["initial_state"].tolist() == [True]
    assert after["done"].tolist() == [False]


@both_kinds
def test_ancestors_are_closed(kind: Any) -> None:
    inner = kind()
    GymEnv([inner], seed=0).close()
    assert inner.is_closed


def test_without_an_action_space_the_last_action_takes_its_shape_from_the_first() -> None:
    env = GymEnv([AncestorCountingEnv(), AncestorCountingEnv()], seed=0)
    env.reset()
    (observation, _), _ = env.step(DictTensor({"action": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}))
    assert observation["last_action"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([3]), 3),
        (torch.tensor([1.5]), 1.5),
        (torch.tensor([[1.5, 2.5]]), [1.5, 2.5]),
    ],
)
def test_without_an_action_space_actions_arrive_as_numbers_or_arrays(
    tensor: torch.Tensor, expected: Any
) -> None:
    given: list[Any] = []

    class Env(AncestorCountingEnv):
        def step(self, action: Any) -> Any:
            given.append(action)
            return super().step(action)

    env = GymEnv([Env()], seed=0)
    env.reset()
    env.step(DictTensor({"action": tensor}))
    if isinstance(expected, list):
        assert isinstance(given[0], np.ndarray)
        assert given[0].dtype == np.float32
        assert given[0].tolist() == expected
    else:
        assert type(given[0]) is type(expected)
        assert given[0] == expected


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (3, {"frame": ("int64", 3)}),
        (2.5, {"frame": ("float32", 2.5)}),
        ([1, 2], {"frame": ("int64", [1, 2])}),
        (np.arange(2, dtype=np.uint8), {"frame": ("uint8", [0, 1])}),
        ((1, 2.5), {"frame/0": ("int64", 1), "frame/1": ("float32", 2.5)}),
        ({"a": 1, "b": {"c": [0.5]}}, {"a": ("int64", 1), "b/c": ("float32", [0.5])}),
    ],
)
def test_undeclared_observations_are_described_by_the_first(first: Any, expected: Any) -> None:
    class Env(AncestorCountingEnv):
        def reset(self) -> Any:
            super().reset()
            return first

        def step(self, action: Any) -> Any:
            return (first, *super().step(action)[1:])

    env = GymEnv([Env(), Env()], seed=0)
    (observation, _), _ = env.reset(), env.step(action(0, 0))
    for key, (dtype, value) in expected.items():
        assert str(observation[key].numpy().dtype) == dtype
        assert observation[key].tolist() == [value, value]


def test_undeclared_observations_that_change_are_refused() -> None:
    class Env(AncestorCountingEnv):
        def step(self, action: Any) -> Any:
            return (np.zeros(3, np.float32), *super().step(action)[1:])

    env = GymEnv([Env()], seed=0)
    env.reset()
    with pytest.raises(SpecError, match=r"'frame' should have shape \[2\], got \[3\]"):
        env.step(action(0))


# env_info


def test_a_reset_that_takes_env_info_gets_it_at_every_reset() -> None:
    envs = [AncestorInfoEnv(length=1), AncestorInfoEnv(length=1)]
    env = GymEnvInf(envs, seed=0)
    env.reset(DictTensor({"id": torch.tensor([5, 6])}))
    env.step(action(0, 0))
    assert [inner.infos for inner in envs] == [[{"id": 5}] * 2, [{"id": 6}] * 2]


class DefaultInfoEnv(AncestorCountingEnv):
    """Cannot do without its ``env_info``, for which it has a default."""

    def reset(self, env_info: Any = {"id": 8}) -> Any:  # type: ignore[override]  # noqa: B006
        self.number = env_info["id"]
        return super().reset()


class DefaultOptionsEnv(CountingEnv):
    """Likewise with ``options``."""

    def reset(  # type: ignore[override]
        self,
        *,
        seed: Any = None,
        options: Any = {"id": 8},  # noqa: B006
    ) -> Any:
        return super().reset(seed=seed, options={"id": options["id"]})


class DefaultTaskEnv(CountingEnv):
    """Likewise with ``task``."""

    def reset(self, *, task: Any = 8, **arguments: Any) -> Any:  # type: ignore[override]
        return super().reset(options={"id": task})


class NumberedTask(DefaultTaskEnv):
    """Takes a seed as well."""

    def reset(self, *, seed: Any = None, task: Any = 8) -> Any:  # type: ignore[override]
        return super().reset(task=task)


defaults = pytest.mark.parametrize(
    "kind", [DefaultInfoEnv, DefaultOptionsEnv, DefaultTaskEnv, NumberedTask]
)
layers = pytest.mark.parametrize("is_wrapped", [False, True])


def made(kind: Any, is_wrapped: bool) -> Any:
    env = kind(length=1)
    return (
        gymnasium.wrappers.TimeLimit(env, 5)
        if is_wrapped and isinstance(env, gymnasium.Env)
        else env
    )


@defaults
@layers
@pytest.mark.parametrize("info", [None, DictTensor({}), DictTensor()])
def test_without_env_info_an_environments_own_default_applies(
    kind: Any, is_wrapped: bool, info: Any
) -> None:
    env = GymEnvInf([made(kind, is_wrapped)], seed=0)
    observation, _ = env.reset(info)
    assert observation["frame"].tolist() == [[0, 8]]
    _, (after, _) = env.step(action(0))  # which resets it
    assert after["frame"].tolist() == [[0, 8]]
    key = "task" if "Task" in kind.__name__ else "id"
    observation, _ = env.reset(DictTensor({key: torch.tensor([5])}))
    assert observation["frame"].tolist() == [[0, 5]]
    observation, _ = env.reset(info)
    assert observation["frame"].tolist() == [[0, 8]]


@defaults
@layers
@pytest.mark.parametrize("infos", [{}, {"env_info": DictTensor({})}])
def test_in_a_batcher_too_an_environments_own_default_applies(
    kind: Any, is_wrapped: bool, infos: Any
) -> None:
    trajectories = collect(lambda: made(kind, is_wrapped), 3, infos=infos)
    assert_same_tensors(trajectories, counting_trajectories([1] * 3, [8] * 3))


def test_a_modern_reset_gets_no_dict_of_options_without_env_info() -> None:
    env = EchoEnv()
    lanes = GymEnv([env], seed=0)
    lanes.reset()
    lanes.reset(DictTensor({}))
    assert [options for _, options in env.resets] == [None, None]


def test_env_info_reaches_ancestors_in_a_batcher() -> None:
    info = DictTensor({"length": torch.tensor([3, 1, 5]), "id": torch.tensor([7, 8, 9])})
    trajectories = collect(AncestorInfoEnv, 3, infos={"env_info": info})
    assert_same_tensors(trajectories, counting_trajectories([3, 1, 5], [7, 8, 9]))


def test_env_info_is_seen_through_gymnasiums_wrappers() -> None:
    class Env(gymnasium.Env[Any, Any]):
        observation_space = spaces.Box(-9, 9, (1,), np.float32)
        action_space = spaces.Discrete(2)
        got: Any = None

        def reset(self, env_info: Any = None) -> Any:  # type: ignore[override]
            Env.got = env_info
            return np.zeros(1, np.float32)

        def step(self, action: Any) -> Any:
            return np.zeros(1, np.float32), 0.0, True, {}

    wrapped = gymnasium.wrappers.TimeLimit(gymnasium.wrappers.FlattenObservation(Env()), 10)
    env = GymEnv([wrapped], seed=0)
    env.reset(DictTensor({"task": torch.tensor([4])}))
    assert Env.got == {"task": 4}
    (observation, _), _ = env.step(action(0))
    assert observation["terminated"].tolist() == [True]


def test_a_modern_reset_that_also_takes_env_info_gets_it_there() -> None:
    inner = InfoEnv()
    observation, _ = GymEnv([inner], seed=0).reset(DictTensor({"id": torch.tensor([4])}))
    assert inner.infos == [{"id": 4}]
    assert observation["frame"].tolist() == [[0, 4]]


def test_a_reset_that_takes_env_info_and_anything_else_gets_it_there() -> None:
    class Env(CountingEnv):
        got: Any = None

        def reset(self, env_info: Any = None, **arguments: Any) -> Any:  # type: ignore[override]
            Env.got = env_info
            return super().reset()

    GymEnv([Env()], seed=0).reset(DictTensor({"task": torch.tensor([4])}))
    assert Env.got == {"task": 4}


@pytest.mark.parametrize("names", ["", "seed", "options", "seed options"])
def test_a_reset_gets_what_it_takes_of_seed_and_options(names: str) -> None:
    got: dict[str, Any] = {}

    class NoArguments(CountingEnv):
        def reset(self) -> Any:  # type: ignore[override]
            return super().reset()

    class Seed(CountingEnv):
        def reset(self, seed: Any = None) -> Any:  # type: ignore[override]
            got["seed"] = seed
            return super().reset(seed=seed)

    class Options(CountingEnv):
        def reset(self, options: Any = None) -> Any:  # type: ignore[override]
            got["options"] = options
            return super().reset(options=options)

    class Both(CountingEnv):
        def reset(self, seed: Any = None, options: Any = None) -> Any:  # type: ignore[override]
            got.update(seed=seed, options=options)
            return super().reset(seed=seed, options=options)

    kinds = {"": NoArguments, "seed": Seed, "options": Options, "seed options": Both}
    env = GymEnv([kinds[names]()], seed=0)
    observation, _ = env.reset(DictTensor({"id": torch.tensor([4])}))
    assert observation["frame"].tolist() == [[0, 4 if "options" in names else 0]]
    assert set(got) == set(names.split())
    assert got.get("options", {"id": 4}) == {"id": 4}
    assert got.get("seed", 1) is not None


# Wrappers of the same age


def test_an_old_wrapper_around_an_old_environment_works() -> None:
    env = GymEnv([AncestorWrapper(SpacedAncestorEnv(length=2, number=1))], seed=0)
    observation, _ = env.reset()
    assert observation["frame"].tolist() == [[0, 1]]
    (observation, _), _ = env.step(action(0))
    assert observation["frame"].tolist() == [[1, 1]]
    (observation, _), (_, running) = env.step(action(0))
    assert observation["terminated"].tolist() == [True]
    assert running.tolist() == []


def test_an_old_time_limit_around_an_old_environment_truncates() -> None:
    inner = AncestorCountingEnv(length=9)
    env = GymEnv([AncestorWrapper(inner, max_episode_steps=2)], seed=0)
    env.reset()
    env.step(action(0))
    (observation, _), _ = env.step(action(0))
    assert observation["truncated"].tolist() == [True]
    assert len(inner.seeds) == 1


def test_old_wrappers_in_a_batcher_give_right_trajectories() -> None:
    trajectories = collect(lambda: AncestorWrapper(AncestorWrapper(AncestorCountingEnv(5))), 3)
    assert_same_tensors(trajectories, counting_trajectories([5, 5, 5], [0, 0, 0]))


def test_a_time_limit_can_be_put_on_an_old_wrapper() -> None:
    env = GymEnv([AncestorWrapper(AncestorCountingEnv(length=9))], seed=0, max_episode_steps=1)
    env.reset()
    (observation, _), _ = env.step(action(0))
    assert observation["truncated"].tolist() == [True]


class TaskWrapper(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Takes a task, though what it wraps does not."""

    def reset(self, *, task: Any = None, **arguments: Any) -> Any:
        self.task = task
        self.given = arguments
        return self.env.reset(**arguments)


@pytest.mark.parametrize("is_limited", [False, True])
def test_a_task_among_the_options_reaches_a_reset_that_takes_one(is_limited: bool) -> None:
    wrapper = TaskWrapper(CountingEnv())
    env: Any = gymnasium.wrappers.TimeLimit(wrapper, 5) if is_limited else wrapper
    vec_env = GymEnv([env])
    vec_env.reset_lanes([0], [3], [{"task": 4, "length": 9}])
    assert (wrapper.task, wrapper.given) == (4, {"seed": 3, "options": {"length": 9}})
    vec_env.reset_lanes([0], [3], [{"task": 5}])
    assert (wrapper.task, wrapper.given) == (5, {"seed": 3, "options": None})
    vec_env.reset_lanes([0], [3], [None])
    assert (wrapper.task, wrapper.given) == (None, {"seed": 3, "options": None})


def test_a_task_stays_an_option_of_a_reset_that_takes_none() -> None:
    env = EchoEnv()
    GymEnv([env]).reset_lanes([0], [3], [{"task": 4}])
    assert env.resets == [(3, {"task": 4})]


# Generators of the former gym


class OldNoiseEnv(gymnasium.Env[Any, Any]):
    """Draws by the names that generators had in the former gym."""

    def __init__(self, keeps: str = "np_random") -> None:
        self.keeps = keeps

    def seed(self, seed: Any = None) -> None:
        generator, _ = seeding.np_random(seed)
        setattr(self, self.keeps, generator)

    def reset(self) -> Any:  # type: ignore[override]
        rng = getattr(self, self.keeps)
        self.drawn = [rng.rand(), rng.randn(), rng.randint(3, 9), rng.random_sample()]
        self.drawn += [*rng.rand(2), *rng.randn(1, 2)[0], rng.uniform(), rng.integers(5)]
        return self.drawn[0]

    def step(self, action: Any) -> Any:
        return getattr(self, self.keeps).rand(), 0.0, True, {}


@pytest.mark.parametrize("keeps", ["np_random", "rng"])
@layers
def test_generators_of_old_environments_have_their_former_names(
    keeps: str, is_wrapped: bool
) -> None:
    drawn = []
    for seed in (3, 3, 4):
        inner = OldNoiseEnv(keeps)
        env = GymEnv([TimeLimit(inner, 5) if is_wrapped else inner], seed=seed)
        env.reset()
        (observation, _), _ = env.step(action(0))
        drawn.append([*inner.drawn, *observation["frame"].tolist()])
    assert drawn[0] == drawn[1] != drawn[2]
    assert type(drawn[0][0]) is float


def test_former_names_draw_what_the_names_of_today_draw() -> None:
    inner = OldNoiseEnv()
    AncestorEnv(inner, set()).reset(seed=7)
    same = np.random.default_rng(7)
    expected = [same.random(), same.standard_normal(), same.integers(3, 9), same.random()]
    expected += [*same.random(2), *same.standard_normal(2), same.uniform(), same.integers(5)]
    assert inner.drawn == expected


def test_an_old_reset_without_a_seed_method_draws_by_the_seed_of_the_episode() -> None:
    class Env(gymnasium.Env[Any, Any]):
        def reset(self) -> Any:  # type: ignore[override]
            return self.np_random.rand()  # type: ignore[attr-defined]

        def step(self, action: Any) -> Any:
            return 0.0, 0.0, True, {}

    first, again, other = (GymEnv([Env()], seed=s).reset()[0]["frame"] for s in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_generators_of_environments_of_today_are_left_alone() -> None:
    env = CountingEnv()
    GymEnv([env], seed=0).reset()
    assert type(env.np_random) is np.random.Generator
    assert type(seeding.np_random(3)[0]) is np.random.Generator


def test_a_former_generator_can_be_seeded_copied_and_pickled() -> None:
    rng = FormerGenerator(np.random.PCG64(3))
    rng.rand()
    for other in (copy.deepcopy(rng), pickle.loads(pickle.dumps(rng))):
        assert type(other) is FormerGenerator
        state = rng.get_state()
        assert other.rand() == rng.rand()
        rng.set_state(state)
    rng.seed(3)
    assert rng.rand() == FormerGenerator(np.random.PCG64(3)).rand()
    assert {rng.random_integers(1, 2) for _ in range(50)} == {1, 2}
    assert {rng.random_integers(2) for _ in range(50)} == {1, 2}


class LateFormerEnv(gymnasium.Env[Any, Any]):
    """As of gym 0.22 to 0.25: ``reset`` takes a seed and options, and returns the observation."""

    observation_space = spaces.Box(0, 100, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, return_info: bool = False, options: Any = None
    ) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.array([0.0, 7.0], np.float32)

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.array([self.t, 7.0], np.float32), 1.0, self.t == 3, {}


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TimeLimit(env, 2)])
def test_an_environment_that_takes_a_seed_and_returns_the_observation_alone_works(
    wrap: Any,
) -> None:
    length = 2 if isinstance(wrap(LateFormerEnv()), TimeLimit) else 3
    result = collect(lambda: wrap(LateFormerEnv()), 4)
    assert result.lengths.tolist() == [length] * 4
    assert result["_frame"][:, length - 1].tolist() == [[float(length), 7.0]] * 4
    assert result["terminated"].any() == result["truncated"].any()
    assert result["_truncated"][:, length - 1].all() == (length == 2)
    with Pool([wrap(LateFormerEnv())], 1, 10) as pool:
        pool.store()
        assert pool.get_pool()[0][:, 0].tolist() == list(range(length))
