"""Minari: episodes round-trip through its datasets and replay bit for bit."""

from __future__ import annotations

import gc
import importlib.util
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlpool import EpisodeBatcher, GymEnv, SpecError, TemporalDictTensor

from support.drifting import Drift
from support.programs import run_block
from support.scripted import ScriptedAgent

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
    """Directory of this test's datasets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


def create_env(seed: int, make: Any, **options: Any) -> GymEnv:
    return GymEnv([make() for _ in range(4)], seed, **options)


def episodes_of(
    make: Any = Drift, n: int = 4, env_info: Any = None, **options: Any
) -> TemporalDictTensor:
    agent_args = {"acts": make().action_space, "n_noise": 3, "keeps": "state"}
    env_args = {"make": make, **options}
    with EpisodeBatcher(
        300, n, ScriptedAgent, agent_args, create_env, env_args, n_workers=0, seeds=3
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
def test_episodes_round_trip_unchanged(observation: str, action: str, data_format: str) -> None:
    def make() -> Drift:
        return Drift(observation, action)

    episodes = episodes_of(make, 10, starts(10), info_keys=INFO_KEYS, keep_float64=True)
    assert len(set(episodes.lengths.tolist())) > 2
    dataset = to_minari(episodes, "drift/any-v0", make(), data_format=data_format)
    got = from_minari(dataset, keep_float64=True)
    own = {"chosen", "row", "value", "noise", "last_action", "_last_action", "_initial_state"}
    assert set(got) == set(episodes) - own | {"_initial_state"}
    assert_same(got, episodes, set(episodes) - own)
    for key in ("seed", "episode", "env_info/start"):
        assert torch.equal(got.info[key].to(episodes.info[key].dtype), episodes.info[key])
    if observation == "double":
        assert from_minari(dataset)["frame"].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:env_spec is None")
@pytest.mark.parametrize("data_format", FORMATS)
def test_options_round_trip_exactly(data_format: str) -> None:
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
def test_a_dataset_replays_bit_for_bit_in_its_recovered_environment(name: str) -> None:
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


# Datasets from other sources ---------------------------------------------------------------------


def collected(env: gym.Env[Any, Any], n: int, **options: Any) -> Any:
    """Return a dataset from Minari's own collector."""
    pytest.importorskip("jax", reason="Minari's own collector needs jax")
    with warnings.catch_warnings():
        # The collector abandons folders that it has created without removing them.
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
def test_a_dataset_from_minaris_own_collector_can_be_read(data_format: str) -> None:
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
        if data_format == "hdf5":  # Minari does not read nested data in the other format
            wanted["_score/total"] = infos["score"]["total"][1:]
            wanted["score/both"] = infos["score"]["both"][:-1]
        for key, values in wanted.items():
            np.testing.assert_array_equal(got[key][row, :n].numpy(), values, key)
        assert not got["_done"][row, n:].any()


def a_dataset(info: Any = None, n_observations: int = 4, reward: float = 1.0) -> Any:
    """Return a dataset of one episode, written in another way."""
    buffer = EpisodeBuffer(
        observations=np.zeros((n_observations, 3), np.float32),
        actions=np.zeros(3, np.int64),
        rewards=[reward] * 3,
        terminations=[False] * 3,
        truncations=[False] * 3,
        infos=info,
    )
    spaces = {"observation_space": Drift().observation_space}
    spaces["action_space"] = gym.spaces.Discrete(3)
    with pytest.warns(UserWarning, match="is set to None"):
        return minari.create_dataset_from_buffers("odd-v0", [buffer], **spaces)


# Refusals ----------------------------------------------------------------------------------------


def test_data_that_would_be_lost_is_refused_and_nothing_is_written(datasets: Path) -> None:
    episodes, wide = episodes_of(), Drift()
    wide.observation_space = gym.spaces.Box(-1, 1, (4,))
    refused: list[tuple[Any, Any, str]] = [
        (episodes.temporal_slice(0, 2), Drift(), "complete"),
        (episodes.temporal_slice(1, episodes.n_timesteps()), Drift(), "complete"),
        (episodes.get([key for key in episodes if key != "_done"]), Drift(), "_done"),
        (episodes, Drift("dict"), "place"),
        (episodes, wide, "'frame'"),
        (episodes, Drift(action="discrete"), "'action'"),
        (episodes, None, "env"),
    ]
    for written, env, named in refused:
        with pytest.raises(SpecError, match=named):
            to_minari(written, "drift-v0", env)
    assert not list(datasets.iterdir())
    to_minari(episodes_of(CartPole, 4), "cartpole-v0", "CartPole-v1")
    with pytest.raises(SpecError, match="'cartpole-v0'"):  # it exists
        to_minari(episodes_of(CartPole, 3), "cartpole-v0", "CartPole-v1")
    assert minari.load_dataset("cartpole-v0").total_episodes == 4


@pytest.mark.filterwarnings("ignore:env_spec is None")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: a_dataset().filter_episodes(lambda _: False), "no episodes"),
        (lambda: a_dataset(n_observations=3), "episode 0"),
        (lambda: a_dataset(reward=1e300), "rewards of episode 0"),
        (lambda: a_dataset({"cost": np.full(4, 1e300)}), "'cost'"),
        (lambda: "cartpole-v0", "MinariDataset"),
    ],
)
def test_incompatible_datasets_are_refused(make: Any, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        from_minari(make())


def test_the_example_in_the_docs_runs(program_folder: Path, capfd: Any) -> None:
    run_block("docs/integrations.md", 2, program_folder)
    output, errors = capfd.readouterr()
    assert errors == ""
    assert "Pool" in output
