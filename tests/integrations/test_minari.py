"""Minari itself: episodes become its datasets and come back, and repeat bit by bit."""

from __future__ import annotations

import gc
import importlib.util
import logging
import warnings
from functools import partial
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
CartPole = partial(gym.make, "CartPole-v1")
INFO_KEYS = {"cost": np.float32, "score/total": np.int64, "score/both": (np.int64, 2)}


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's datasets are."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


class UniformAgent(Agent):
    """Actions of any space, and a state and an output of its own."""

    n_noise = 3

    def __init__(self, space: Any) -> None:
        self.space = space

    def __call__(
        self, state: Any, observation: DictTensor, agent_info: Any = None, history: Any = None
    ) -> Any:
        noise, space = observation["noise"], self.space
        if state is None:
            state = DictTensor({"memory": torch.zeros(len(noise), 2)})
        if isinstance(space, gym.spaces.Box):
            low, high = (torch.as_tensor(b) for b in (space.low, space.high))
            action = low + noise[:, : len(low)] * (high - low)
        elif isinstance(space, gym.spaces.Discrete):
            action = (noise[:, 0] * int(space.n)).long()
        else:
            action = (noise[:, : len(space.nvec)] * torch.as_tensor(space.nvec)).long()
        output = DictTensor({"action": action, "value": noise[:, 0]})
        return state, output, DictTensor({"memory": state["memory"] + 1})


def create_env(seed: int, make: Any, **options: Any) -> GymEnv:
    return GymEnv([make() for _ in range(4)], seed, **options)


def episodes_of(
    make: Any = Drift, n: int = 4, env_info: Any = None, **options: Any
) -> TemporalDictTensor:
    agent_args = {"space": make().action_space}
    env_args = {"make": make, **options}
    with EpisodeBatcher(
        300, n, UniformAgent, agent_args, create_env, env_args, n_workers=0, seeds=3
    ) as batcher:
        batcher.execute(n, env_info=env_info)
        return batcher.get().clone()


def starts(n: int) -> dict[str, Any]:
    return {"start": torch.linspace(-1.9, 1.9, n)}


def assert_same(got: TemporalDictTensor, wanted: TemporalDictTensor, keys: Any) -> None:
    assert torch.equal(got.lengths, wanted.lengths)
    for key in keys:
        assert got[key].dtype == wanted[key].dtype, key
        assert torch.equal(got[key], wanted[key]), key


@pytest.mark.filterwarnings("ignore:env_spec is None")
@pytest.mark.parametrize(
    ("observation", "action", "data_format"),
    [
        ("double", "discrete", "hdf5"),
        ("number", "many", "hdf5"),
        pytest.param("nested", "box", "hdf5", marks=needs_images),
        pytest.param("dict", "box", "arrow", marks=needs_arrow),
    ],
)
def test_episodes_come_back_as_they_were(observation: str, action: str, data_format: str) -> None:
    def make() -> Drift:
        return Drift(observation, action)

    episodes = episodes_of(make, 10, starts(10), info_keys=INFO_KEYS, keep_float64=True)
    assert len(set(episodes.lengths.tolist())) > 2
    dataset = to_minari(episodes, "drift/any-v0", make(), data_format=data_format)
    got = from_minari(dataset, keep_float64=True)
    own = {"value", "noise", "last_action", "_last_action", "_initial_state"}
    assert set(got) == set(episodes) - own | {"_initial_state"}
    assert_same(got, episodes, set(episodes) - own)
    for key in ("seed", "episode", "env_info/start"):
        assert torch.equal(got.info[key].to(episodes.info[key].dtype), episodes.info[key])
    if observation == "double":
        assert from_minari(dataset)["frame"].dtype == torch.float32


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
    got = from_minari(to_minari(episodes, "drift-v0", Drift(), data_format=data_format)).info
    for key, (tensor, dtype) in kinds.items():
        assert got[f"env_info/{key}"].dtype == dtype
        assert got[f"env_info/{key}"].tolist() == tensor.tolist()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
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
    env = dataset.recover_environment()
    described = dataset.storage.get_episode_metadata(dataset.episode_indices)
    for episode, of_it in zip(dataset.iterate_episodes(), described, strict=True):
        seen = [env.reset(seed=of_it["seed"], options=of_it.get("options"))[0]]
        results = [env.step(action)[:4] for action in episode.actions]
        observed, rewards, terminated, truncated = map(list, zip(*results, strict=True))
        np.testing.assert_array_equal(episode.observations, np.stack([*seen, *observed]))
        np.testing.assert_array_equal(episode.rewards, np.float32(rewards))
        np.testing.assert_array_equal(episode.terminations, terminated)
        np.testing.assert_array_equal(episode.truncations, truncated)


@pytest.mark.filterwarnings("ignore:env_spec is None")
def test_an_environment_that_json_cannot_describe_is_written_without_its_spec(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gym.register("Described-v0", "support.drifting:Drift", kwargs={"limit": np.int64(7)})
    try:
        with caplog.at_level(logging.WARNING, "rlpool"):
            dataset = to_minari(episodes_of(), "described-v0", "Described-v0")
    finally:
        del gym.registry["Described-v0"]
    assert "Described-v0" in caplog.text
    assert dataset.spec.env_spec is None
    assert from_minari(dataset).n_elems() == 4


# Datasets of others ------------------------------------------------------------------------------


def collected(env: gym.Env[Any, Any], n: int, **options: Any) -> Any:
    """A dataset of Minari's own collector."""
    pytest.importorskip("jax", reason="Minari's own collector needs jax")
    with warnings.catch_warnings():
        # The collector drops folders that it has made without removing them.
        warnings.simplefilter("ignore", ResourceWarning)
        collector = minari.DataCollector(env, record_infos=True, **options)
        for _ in range(n):
            collector.reset()
            is_over = False
            while not is_over:
                _, _, *flags, _ = collector.step(collector.action_space.sample())
                is_over = any(flags)
        with pytest.warns(UserWarning, match="is set to None"):
            dataset = collector.create_dataset("others/random-v0")
        collector.close()
        del collector
        gc.collect()
    return dataset


@pytest.mark.filterwarnings("ignore:env_spec is None")
@pytest.mark.parametrize("data_format", FORMATS)
def test_a_dataset_of_minaris_collector_is_read(data_format: str) -> None:
    dataset = collected(Drift("dict", limit=5), 4, data_format=data_format)
    got = from_minari(dataset)
    metadata = list(dataset.storage.get_episode_metadata(range(4)))
    assert [seed % 2**64 for seed in got.info["seed"].tolist()] == [m["seed"] for m in metadata]
    for row, episode in enumerate(dataset.iterate_episodes()):
        n, seen, infos = len(episode), episode.observations, episode.infos
        assert got.lengths[row] == n
        wanted = {
            "place": seen["place"][:-1],
            "_place": seen["place"][1:],
            "_number": seen["number"][1:],
            "action": episode.actions,
            "_reward": np.float32(episode.rewards),
            "_terminated": episode.terminations,
            "_truncated": episode.truncations,
            "_done": episode.terminations | episode.truncations,
            "initial_state": np.arange(n) == 0,
            "_cost": infos["cost"][1:],
        }
        if data_format == "hdf5":  # Minari does not read nested ones of the other format
            wanted["_score/total"] = infos["score"]["total"][1:]
            wanted["score/both"] = infos["score"]["both"][:-1]
        for key, values in wanted.items():
            np.testing.assert_array_equal(got[key][row, :n].numpy(), values, key)
        assert not got["_done"][row, n:].any()


def test_a_part_of_a_dataset_is_read() -> None:
    episodes = episodes_of(CartPole, 8)
    dataset = to_minari(episodes, "cartpole-v0", "CartPole-v1")
    rows = (episodes.lengths > 20).nonzero().flatten()
    assert 0 < len(rows) < 8
    got = from_minari(dataset.filter_episodes(lambda episode: len(episode) > 20))
    assert torch.equal(got.info["episode"], rows)
    wanted = episodes.index(rows).shorten()
    assert_same(got, wanted, ["frame", "_frame", "action", "_reward", "_done"])


def a_dataset(infos: Any, n_observations: int = 4, reward: float = 1.0, key: str = "") -> Any:
    """A dataset of one episode per element of the infos, written in another way."""
    box = Drift().observation_space
    observations = np.zeros((n_observations, 3), np.float32)
    buffers = [
        EpisodeBuffer(
            observations={key: observations} if key else observations,
            actions=np.zeros(3, np.int64),
            rewards=[reward] * 3,
            terminations=[False] * 3,
            truncations=[False] * 3,
            infos=info,
        )
        for info in infos
    ]
    spaces = {"observation_space": gym.spaces.Dict({key: box}) if key else box}
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


# What is refused ---------------------------------------------------------------------------------


def with_key(episodes: TemporalDictTensor, key: str, value: float) -> TemporalDictTensor:
    """The same episodes with another value of a key."""
    steps = {**dict(episodes.items()), key: torch.full_like(episodes[key], value)}
    return TemporalDictTensor(steps, episodes.lengths, episodes.info)


def drift_with(**spaces: Any) -> Drift:
    """A ``Drift`` that declares other spaces."""
    env = Drift()
    vars(env).update(spaces)
    return env


BOX = gym.spaces.Box
WRITING: list[tuple[Any, Any, str]] = [
    # what is written of four episodes of Drift, its environment, and what the error names
    (lambda e: e.temporal_slice(0, 2), Drift(), "complete"),
    (lambda e: e.temporal_slice(1, e.n_timesteps()), Drift(), "complete"),
    (lambda e: e.get([key for key in e if key != "_done"]), Drift(), "_done"),
    (lambda e: e, Drift("dict"), "place"),
    (lambda e: e, drift_with(observation_space=gym.spaces.Text(5)), "Text"),
    (lambda e: e, drift_with(observation_space=BOX(-1, 1, (4,))), "'frame'"),
    (lambda e: e, drift_with(action_space=gym.spaces.Discrete(2)), "'action'"),
    (
        lambda e: with_key(e, "frame", 1e5),
        drift_with(observation_space=BOX(-1, 1, (3,), np.float16)),
        "'frame'",
    ),
    (lambda e: e, None, "env"),
    (lambda e: e, create_env(0, Drift), "env"),
]


def test_what_would_be_lost_is_refused_and_nothing_is_written(datasets: Path) -> None:
    episodes = episodes_of()
    for change, env, named in WRITING:
        with pytest.raises(SpecError, match=named):
            to_minari(change(episodes), "drift-v0", env)
    with pytest.raises(ValueError, match="No storage implemented"):
        to_minari(episodes_of(CartPole), "cartpole-v0", "CartPole-v1", data_format="other")
    assert not list(datasets.iterdir())


def test_an_id_that_exists_is_refused() -> None:
    to_minari(episodes_of(CartPole, 4), "cartpole-v0", "CartPole-v1")
    with pytest.raises(SpecError, match="'cartpole-v0'"):
        to_minari(episodes_of(CartPole, 3), "cartpole-v0", "CartPole-v1")
    assert minari.load_dataset("cartpole-v0").total_episodes == 4


def test_images_are_refused_by_a_minari_that_would_change_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "_IS_LOSSLESS", False)
    with pytest.raises(SpecError, match="'picture'"):
        to_minari(episodes_of(lambda: Drift("nested")), "drift-v0", Drift("nested"))


@pytest.mark.filterwarnings("ignore:env_spec is None")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: a_dataset([None] * 2).filter_episodes(lambda _: False), "no episodes"),
        (lambda: a_dataset([None] * 2, n_observations=3), "episode 0"),
        (lambda: a_dataset([{}], reward=1e300), "rewards of episode 0"),
        (lambda: a_dataset([{"cost": np.full(4, 1e300)}]), "'cost'"),
        (lambda: a_dataset([None], key="reward"), "'reward'"),
        (lambda: "cartpole-v0", "MinariDataset"),
    ],
)
def test_datasets_that_do_not_fit_are_refused(make: Any, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        from_minari(make())


def test_the_program_of_the_page_runs(program_folder: Path, capfd: Any) -> None:
    run_block("docs/neighbours/minari.md", 0, program_folder)
    output, errors = capfd.readouterr()
    assert errors == ""
    assert "the same bits" in output
