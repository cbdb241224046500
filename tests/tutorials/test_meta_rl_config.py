"""The configuration that tutorials/meta_rl.py reads."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


@pytest.fixture(scope="module")
def meta_rl() -> Any:
    spec = importlib.util.spec_from_file_location("meta_rl", TUTORIALS / "meta_rl.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["meta_rl"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_keys_of_both_sections_are_read(meta_rl: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sections = {
        "env": {"env_name": "AntDir", "num_parallel_workers": 6, "max_rollouts_per_task": 3},
        "train": {"num_rollouts_per_iter": 12, "seed": 4},
    }
    path.write_text(json.dumps(sections), encoding="utf-8")
    config = meta_rl.read_config(path)
    assert config == meta_rl.Config(
        env_name="AntDir",
        num_parallel_workers=6,
        max_rollouts_per_task=3,
        num_rollouts_per_iter=12,
        seed=4,
    )


def test_the_yaml_beside_the_tutorial_holds_its_defaults(meta_rl: Any) -> None:
    pytest.importorskip("yaml")
    assert meta_rl.read_config(TUTORIALS / "meta_rl.yaml") == meta_rl.Config()


def test_a_key_that_nobody_knows_is_named(meta_rl: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"env": {"num_workers": 6}}', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"unknown keys \['num_workers'\]"):
        meta_rl.read_config(path)


@pytest.mark.parametrize(("n_workers", "n_lanes"), [(1, 4), (0, 4), (-1, 4)])
def test_one_worker_or_less_means_no_process(meta_rl: Any, n_workers: int, n_lanes: int) -> None:
    config = meta_rl.Config(num_parallel_workers=n_workers, envs_per_worker=n_lanes)
    with meta_rl.environments(config, oracle=False) as (train_env, parallel_env):
        assert parallel_env is None
        assert train_env.n_envs() == n_lanes


def test_tasks_of_the_ant_are_directions(meta_rl: Any) -> None:
    from rlpool import make_env

    env = make_env(meta_rl.AntDir, 2, 0, oracle=True, max_episode_steps=5, num_eval_tasks=3)
    observation, _ = env.reset(task=1)
    assert env.horizon_bamdp == 10
    assert env.n_tasks == 83
    direction = env.get_current_task()
    assert observation[-3:-1].tolist() == direction.tolist()
    _, reward, _, _, info = env.step(env.action_space.sample())
    velocity = info["x_velocity"] * direction[0] + info["y_velocity"] * direction[1]
    assert reward == pytest.approx(velocity + info["reward_survive"] + info["reward_ctrl"])
    env.close()
