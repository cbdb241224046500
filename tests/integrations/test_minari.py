"""Minari itself: episodes become its datasets and come back, and repeat bit by bit."""

from __future__ import annotations

import gc
import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlpool import (
    Agent,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    TemporalDictTensor,
)

from support.drifting import Drift
from support.programs import run_block

pytest.importorskip("minari", reason='needs the extra: pip install "rlpool[minari]"')
pytest.importorskip("h5py", reason='needs the extra: pip install "rlpool[minari]"')

import minari
from minari.data_collector import EpisodeBuffer

from rlpool.integrations import minari as adapter
from rlpool.integrations.minari import from_minari, to_minari

HAS_ARROW = importlib.util.find_spec("pyarrow") is not None
needs_arrow = pytest.mark.skipif(not HAS_ARROW, reason="Minari's format needs pyarrow")
FORMATS = ["hdf5", pytest.param("arrow", marks=needs_arrow)]
needs_images = pytest.mark.skipif(
    not adapter._IS_LOSSLESS, reason="before 0.5.4, Minari makes all images JPEG"
)
INFO_KEYS = {"cost": np.float32, "score/total": np.int64, "score/both": (np.int64, 2)}


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's datasets are."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


class UniformAgent(Agent):
    """Actions of any space, and a state and an output of its own."""

    def __init__(self, space: Any) -> None:
        self.space = space
        self.n_noise = 3

    def __call__(
        self, state: Any, observation: DictTensor, agent_info: Any = None, history: Any = None
    ) -> Any:
        noise, space = observation["noise"], self.space
        n = len(noise)
        if state is None:
            state = DictTensor({"memory": torch.zeros(n, 2)})
        if isinstance(space, gym.spaces.Box):
            low, high = (torch.as_tensor(b) for b in (space.low, space.high))
            action = low + noise[:, : len(low)] * (high - low)
        elif isinstance(space, gym.spaces.Discrete):
            action = (noise[:, 0] * int(space.n)).long()
        else:
            action = (noise[:, : len(space.nvec)] * torch.as_tensor(space.nvec)).long()
        output = DictTensor({"action": action, "value": noise[:, 0]})
        return state, output, DictTensor({"memory": state["memory"] + 1})


def create_env(seed: int, kind: type[GymEnv], make: Any, **options: Any) -> GymEnv:
    return kind([make() for _ in range(4)], seed, **options)


def episodes_of(make: Any, n: int = 10, env_info: Any = None, **options: Any) -> TemporalDictTensor:
    env_args = {"kind": GymEnv, "make": make, **options}
    agent_args = {"space": make().action_space}
    with EpisodeBatcher(
        300, n, UniformAgent, agent_args, create_env, env_args, n_threads=0, seeds=3
    ) as batcher:
        batcher.execute(n, env_info=env_info)
        return batcher.get().clone()


def starts(n: int = 10) -> dict[str, Any]:
    return {"start": torch.linspace(-1.9, 1.9, n)}


def episodes_and_env(observation: str, action: str = "box") -> tuple[TemporalDictTensor, Any]:
    def make() -> Drift:
        return Drift(observation, action)

    return episodes_of(make, env_info=starts(), info_keys=INFO_KEYS, keep_float64=True), make()


def assert_same(got: TemporalDictTensor, wanted: TemporalDictTensor, keys: Any) -> None:
    assert torch.equal(got.lengths, wanted.lengths)
    for key in keys:
        assert got[key].dtype == wanted[key].dtype, key
        assert torch.equal(got[key], wanted[key]), key


@pytest.mark.filterwarnings("ignore:env_spec is None")
@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize(
    ("observation", "action"),
    [
        ("vector", "box"),
        ("double", "discrete"),
        ("number", "many"),
        ("dict", "box"),
        pytest.param("nested", "box", marks=needs_images),
        pytest.param("image", "box", marks=needs_images),
    ],
)
def test_episodes_come_back_as_they_were(observation: str, action: str, data_format: str) -> None:
    episodes, env = episodes_and_env(observation, action)
    assert len(set(episodes.lengths.tolist())) > 2
    to_minari(episodes, "drift/any-v0", env, data_format=data_format)
    got = from_minari(minari.load_dataset("drift/any-v0"), keep_float64=True)
    own = {"value", "noise", "last_action", "_last_action", "_initial_state"}
    assert set(got) == set(episodes) - own | {"_initial_state"}
    assert_same(got, episodes, set(episodes) - own)
    for key in ("seed", "episode", "env_info/start"):
        assert torch.equal(got.info[key].to(episodes.info[key].dtype), episodes.info[key])


@pytest.mark.filterwarnings("ignore:env_spec is None")
@pytest.mark.parametrize("data_format", FORMATS)
def test_options_come_back_exactly(data_format: str) -> None:
    thirds = torch.arange(4, dtype=torch.float64)[:, None] / 3
    kinds = {
        "start": (starts(4)["start"], torch.float64),
        "double": (thirds, torch.float64),
        "half": (thirds.half(), torch.float64),
        "single": (thirds.float().expand(4, 2), torch.float64),
        "small": (torch.arange(4, dtype=torch.uint8), torch.int64),
        "large": (torch.arange(4) + 2**53, torch.int64),
        "flag": (torch.arange(4) > 1, torch.bool),
    }
    episodes = episodes_of(Drift, 4, {key: tensor for key, (tensor, _) in kinds.items()})
    to_minari(episodes, "drift-v0", Drift(), data_format=data_format)
    got = from_minari(minari.load_dataset("drift-v0")).info
    for key, (tensor, dtype) in kinds.items():
        assert got[f"env_info/{key}"].dtype == dtype
        assert got[f"env_info/{key}"].tolist() == tensor.tolist()


def check_repeats(dataset: Any, env: gym.Env[Any, Any], n: int) -> None:
    """Every episode of a dataset, repeated with what is stored of it, is the same bit by bit."""
    metadata = list(dataset.storage.get_episode_metadata(dataset.episode_indices))
    for episode, described in zip(dataset.iterate_episodes(), metadata, strict=True):
        options = described.get("options")
        observation, _ = env.reset(seed=described["seed"], options=options)
        steps = [(observation, 0.0, False, False)]
        for t in range(len(episode)):
            action = episode.actions[t]
            observation, *rest, _ = env.step(action)
            steps.append((observation, *rest))
        seen, rewards, terminated, truncated = (list(part) for part in zip(*steps, strict=True))
        stacked = gym.vector.utils.concatenate(
            env.observation_space,
            seen,
            gym.vector.utils.create_empty_array(env.observation_space, len(seen)),
        )
        for got, wanted in zip(leaves(episode.observations), leaves(stacked), strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(episode.rewards, np.float32(rewards[1:]))
        np.testing.assert_array_equal(episode.terminations, terminated[1:])
        np.testing.assert_array_equal(episode.truncations, truncated[1:])
        n -= 1
    assert n == 0


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [np.asarray(value)]


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0"])
def test_a_dataset_is_repeated_bit_by_bit_in_its_recovered_environment(name: str) -> None:
    env_info = None
    if name == "CartPole-v1":
        env_info = {"low": torch.full((6,), -0.02), "high": torch.linspace(0, 0.2, 6)}

    def make() -> gym.Env[Any, Any]:
        return gym.make(name, max_episode_steps=40)

    episodes = episodes_of(make, 6, env_info, keep_float64=True)
    written = to_minari(episodes, "some/random-v0", make(), algorithm_name="uniform")
    assert (written.total_episodes, written.total_steps) == (6, int(episodes.lengths.sum()))
    dataset = minari.load_dataset("some/random-v0")
    assert dataset.spec.env_spec.max_episode_steps == 40
    check_repeats(dataset, dataset.recover_environment(), 6)


@pytest.mark.filterwarnings("ignore:env_spec is None")
@pytest.mark.parametrize(
    ("entry_point", "kwargs"),
    [(Drift, {}), ("support.drifting:Drift", {"limit": np.int64(7)})],
)
def test_an_environment_that_json_cannot_describe_is_written_without_its_spec(
    entry_point: Any, kwargs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gym.register("Described-v0", entry_point, kwargs=kwargs)
    try:
        with caplog.at_level(logging.WARNING, "rlpool"):
            to_minari(episodes_of(Drift), "described-v0", "Described-v0")
    finally:
        del gym.registry["Described-v0"]
    assert "cannot make its environment 'Described-v0' again" in caplog.text
    dataset = minari.load_dataset("described-v0")
    assert dataset.spec.env_spec is None
    assert dataset.observation_space == Drift().observation_space
    assert from_minari(dataset).n_elems() == 10


def test_float64_observations_are_what_the_batcher_made_of_them() -> None:
    def make() -> Drift:
        return Drift("double")

    with pytest.warns(UserWarning, match="env_spec is None"):
        dataset = to_minari(episodes_of(make), "double-v0", make())
    frame = dataset[0].observations
    assert frame.dtype == np.float64
    np.testing.assert_array_equal(frame, np.float32(frame))
    assert from_minari(dataset)["frame"].dtype == torch.float32
    assert from_minari(dataset, keep_float64=True)["frame"].dtype == torch.float64


# Datasets of others ------------------------------------------------------------------------------


def collected(env: gym.Env[Any, Any], n: int = 4, **options: Any) -> tuple[Any, list[Any]]:
    """A dataset of Minari's own collector, and what the environment returned."""
    pytest.importorskip("jax", reason="Minari's own collector needs jax")
    told = []
    with warnings.catch_warnings():
        # The collector drops folders that it has made without removing them.
        warnings.simplefilter("ignore", ResourceWarning)
        collector = minari.DataCollector(env, record_infos=True, **options)
        for _ in range(n):
            observation, info = collector.reset()
            steps: list[Any] = [(observation, info, None)]
            is_over = False
            while not is_over:
                action = collector.action_space.sample()
                observation, reward, *flags, info = collector.step(action)
                steps.append((observation, info, (action, reward, *flags)))
                is_over = any(flags)
            told.append(steps)
        with pytest.warns(UserWarning, match="is set to None"):
            dataset = collector.create_dataset("others/random-v0")
        collector.close()
        del collector
        gc.collect()
    return dataset, told


@pytest.mark.filterwarnings("ignore:env_spec is None")
@pytest.mark.parametrize("data_format", FORMATS)
def test_a_dataset_of_minaris_collector_is_read(data_format: str) -> None:
    dataset, told = collected(Drift("dict", limit=5), data_format=data_format)
    got = from_minari(dataset)
    assert got.lengths.tolist() == [len(steps) - 1 for steps in told]
    metadata = list(dataset.storage.get_episode_metadata(range(4)))
    assert [seed % 2**64 for seed in got.info["seed"].tolist()] == [m["seed"] for m in metadata]
    for row, steps in enumerate(told):
        for t, (observation, info, taken) in enumerate(steps[1:]):
            before = steps[t][0]
            assert torch.equal(got["place"][row, t], torch.from_numpy(before["place"]))
            assert torch.equal(got["_place"][row, t], torch.from_numpy(observation["place"]))
            assert got["_number"][row, t] == observation["number"]
            action, reward, terminated, truncated = taken
            assert torch.equal(got["action"][row, t], torch.from_numpy(action))
            assert got["_reward"][row, t] == np.float32(reward)
            assert got["_terminated"][row, t] == terminated
            assert got["_truncated"][row, t] == truncated
            assert got["_done"][row, t] == (terminated or truncated)
            assert got["initial_state"][row, t] == (t == 0)
            assert got["_cost"][row, t] == info["cost"]
            if data_format == "hdf5":  # Minari does not read nested ones of the other format
                assert got["_score/total"][row, t] == info["score"]["total"]
                assert got["score/both"][row, t].tolist() == steps[t][1]["score"]["both"].tolist()
        assert not got["_done"][row, len(steps) - 1 :].any()


def test_a_part_of_a_dataset_is_read() -> None:
    episodes = episodes_of(lambda: gym.make("CartPole-v1"), 8)
    dataset = to_minari(episodes, "cartpole-v0", "CartPole-v1")
    longer = dataset.filter_episodes(lambda episode: len(episode) > 20)
    rows = (episodes.lengths > 20).nonzero().flatten()
    assert 0 < len(rows) < 8
    got = from_minari(longer)
    assert torch.equal(got.info["episode"], rows)
    wanted = episodes.index(rows).shorten()
    assert_same(got, wanted, ["frame", "_frame", "action", "_reward", "_done"])
    with pytest.raises(SpecError, match="has no episodes"):
        from_minari(dataset.filter_episodes(lambda _: False))


def a_dataset(infos: Any, n_steps: int = 3, n_observations: int = 4, reward: float = 1.0) -> Any:
    """A dataset of two episodes that was written in another way."""
    buffers = [
        EpisodeBuffer(
            observations=np.zeros((n_observations, 3), np.float32),
            actions=np.zeros(n_steps, np.int64),
            rewards=[reward] * n_steps,
            terminations=[False] * n_steps,
            truncations=[False] * n_steps,
            infos=info,
        )
        for info in infos
    ]
    spaces = {"observation_space": Drift().observation_space}
    spaces["action_space"] = gym.spaces.Discrete(3)
    with pytest.warns(UserWarning, match="is set to None"):
        return minari.create_dataset_from_buffers("odd-v0", buffers, **spaces)


@pytest.mark.filterwarnings("ignore:env_spec is None")
def test_infos_that_are_no_numbers_of_every_step_are_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    every = {"speed": np.ones(4), "name": ["a"] * 4, "short": np.ones(2), "reward": np.ones(4)}
    dataset = a_dataset([every, {**every, "once": np.ones(4)}])
    with caplog.at_level(logging.WARNING, "rlpool"):
        got = from_minari(dataset)
    assert "speed" in got
    assert "seed" not in got.info
    assert got["_reward"].sum() == 6
    for name in ("name", "short", "reward", "once"):
        assert repr(name) in caplog.text
    assert "'speed'" not in caplog.text


@pytest.mark.filterwarnings("ignore:env_spec is None")
def test_an_episode_without_its_last_observation_is_named() -> None:
    with pytest.raises(SpecError, match="episode 0 of 'odd-v0' has 3 values of 'frame'"):
        from_minari(a_dataset([None] * 2, n_observations=3))


# What is refused ---------------------------------------------------------------------------------


def with_key(episodes: TemporalDictTensor, key: str, value: torch.Tensor) -> TemporalDictTensor:
    """The same episodes with other values of a key."""
    steps = {**dict(episodes.items()), key: value}
    return TemporalDictTensor(steps, episodes.lengths, episodes.info)


def drift_with(**spaces: Any) -> Drift:
    """A ``Drift`` that declares other spaces."""
    env = Drift()
    vars(env).update(spaces)
    return env


BOX = gym.spaces.Box
WRITING: dict[str, Any] = {
    # what is written of four episodes of Drift, its environment, and what the error names
    "cut at the end": (lambda e: e.temporal_slice(0, 2), Drift(), "complete"),
    "cut at the start": (lambda e: e.temporal_slice(1, e.n_timesteps()), Drift(), "complete"),
    "two in a row": (lambda e: with_key(e, "_done", e["_done"] | True), Drift(), "complete"),
    "no flags": (lambda e: e.get([key for key in e if key != "_done"]), Drift(), "_done"),
    "none": (lambda e: e.slice(0, 0), Drift(), "no episodes"),
    "a dict": (lambda e: {}, Drift(), "TemporalDictTensor"),
    "other keys": (lambda e: e, Drift("dict"), "place"),
    "a text": (lambda e: e, drift_with(observation_space=gym.spaces.Text(5)), "Text"),
    "a shape": (lambda e: e, drift_with(observation_space=BOX(-1, 1, (4,))), "'frame'"),
    "a dtype": (lambda e: e, drift_with(observation_space=BOX(0, 9, (3,), np.uint8)), "'frame'"),
    "an action": (lambda e: e, drift_with(action_space=gym.spaces.Discrete(2)), "'action'"),
    "wide": (
        lambda e: with_key(e, "action", torch.full((*e["action"].shape,), 1000)),
        drift_with(action_space=BOX(-128, 127, (2,), np.int8)),
        "'action'",
    ),
    "large": (
        lambda e: with_key(e, "frame", torch.full((*e["frame"].shape,), 1e5)),
        drift_with(observation_space=BOX(-1, 1, (3,), np.float16)),
        "'frame'",
    ),
    "no environment": (lambda e: e, None, "env"),
    "many environments": (lambda e: e, create_env(0, GymEnv, Drift), "env"),
}


@pytest.mark.parametrize("name", WRITING)
def test_what_would_be_lost_is_refused_and_nothing_is_written(name: str, datasets: Path) -> None:
    change, env, named = WRITING[name]
    with pytest.raises(SpecError, match=named):
        to_minari(change(episodes_of(Drift, 4)), "drift-v0", env)
    assert not list(datasets.iterdir())


def test_an_id_that_exists_is_refused_and_a_failed_try_leaves_nothing_behind() -> None:
    episodes = episodes_of(lambda: gym.make("CartPole-v1"), 4)
    with pytest.raises(ValueError, match="No storage implemented"):
        to_minari(episodes, "cartpole-v0", "CartPole-v1", data_format="other")
    to_minari(episodes, "cartpole-v0", "CartPole-v1")
    with pytest.raises(SpecError, match="'cartpole-v0' already"):
        to_minari(episodes, "cartpole-v0", "CartPole-v1")
    assert minari.load_dataset("cartpole-v0").total_episodes == 4


def test_images_are_refused_by_a_minari_that_would_change_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "_IS_LOSSLESS", False)
    episodes, env = episodes_and_env("nested")
    with pytest.raises(SpecError, match=r"'picture'.*JPEG"):
        to_minari(episodes, "drift-v0", env)


@pytest.mark.filterwarnings("ignore:env_spec is None")
def test_numbers_of_a_dataset_that_float32_does_not_hold_are_refused_or_kept() -> None:
    with pytest.raises(SpecError, match="rewards of episode 0"):
        from_minari(a_dataset([{}], reward=1e300), keep_float64=True)
    minari.delete_dataset("odd-v0")
    dataset = a_dataset([{"cost": np.full(4, 1e300)}])
    with pytest.raises(SpecError, match=r"'cost'(.|\n)*keep_float64"):
        from_minari(dataset)
    assert from_minari(dataset, keep_float64=True)["cost"].tolist() == [[1e300] * 3]


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_observations_named_like_something_else_are_refused() -> None:
    env = drift_with(observation_space=gym.spaces.Dict({"reward": Drift().observation_space}))
    episode = EpisodeBuffer(
        observations={"reward": np.zeros((3, 3), np.float32)},
        actions=np.zeros((2, 2), np.float32),
        rewards=[1.0, 2.0],
        terminations=[False, True],
        truncations=[False, False],
    )
    dataset = minari.create_dataset_from_buffers("drift-v0", [episode], env)
    for given, named in ((dataset, "key 'reward'"), ("cartpole-v0", "MinariDataset")):
        with pytest.raises(SpecError, match=named):
            from_minari(given)


def test_the_program_of_the_page_runs(program_folder: Path, capfd: Any) -> None:
    run_block("docs/neighbours/minari.md", 0, program_folder)
    output, errors = capfd.readouterr()
    assert errors == ""
    assert "the same bits" in output
