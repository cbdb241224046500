"""A real Ray cluster of two nodes: bit-identical results after any kill, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from process.watching import assert_all_equal, wait_until

from rlpool import (
    DictTensor,
    EnvError,
    EpisodeBatcher,
    SpecError,
    UsageError,
    VectorGymEnv,
    WorkerDiedError,
    WorkerStartupError,
)
from rlpool.cluster import RayEpisodeBatcher
from rlpool.errors import RemoteTraceback

from support.agents import ConstantAgent
from support.faults import faults_at
from support.fragile import FragileEnv, RecurrentAgent, create_fragile
from support.vector_envs import ArrayEnv, AutoresetMode

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlpool[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils")
placement_groups = pytest.importorskip("ray.util.placement_group")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200), pytest.mark.promise("I2")]

STORE_BYTES = 100 * 2**20


def add_node(cluster: Any, **options: Any) -> Any:
    return cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES, **options)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        add_node(cluster)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def our_processes() -> list[psutil.Process]:
    """Return this cluster's actors with their templates and workers, without this process's own."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_ours = process.name().startswith(("ray::NodeActor", "rlpool-"))
            if is_ours and process.ppid() != os.getpid():
                found.append(process)
    return found


def all_is_given_back() -> bool:
    """Whether no process or reservation is left."""
    groups = placement_groups.placement_group_table().values()
    return not our_processes() and all(group["state"] == "REMOVED" for group in groups)


@pytest.fixture(autouse=True)
def no_process_left_behind(cluster: Any) -> Iterator[None]:
    """Override: Ray keeps its own processes running, but ours must be gone."""
    yield
    wait_until(all_is_given_back, 10.0)


def make(n_nodes: int | None = 2, **options: Any) -> RayEpisodeBatcher:
    arguments: dict[str, Any] = {
        "n_timesteps": 4,
        "n_slots": 30,
        "create_agent": RecurrentAgent,
        "create_env": create_fragile,
        "env_args": {"n_lanes": 3, "kind": FragileEnv},
        "n_nodes": n_nodes,
        "seeds": 5,
    }
    return RayEpisodeBatcher(**{**arguments, **options})


def make_local(**options: Any) -> EpisodeBatcher:
    arguments = {"n_lanes": 3, "kind": FragileEnv}
    return EpisodeBatcher(4, 30, RecurrentAgent, {}, create_fragile, arguments, 0, 5, **options)


def kill_one(name: str) -> None:
    """Kill the first process with this name."""
    next(process for process in our_processes() if process.name().startswith(name)).kill()


def collect(batcher: Any, disturb: Callable[[int], None] = lambda _: None) -> list[Any]:
    """Collect requests, some queued, larger than slots, with new policies in between."""
    agent_info = DictTensor({"gain": torch.linspace(0.5, 2.0, 23)})
    env_info = DictTensor({"length": 1 + torch.arange(23) % 13})
    with batcher:
        batcher.execute(23, agent_info, env_info)
        batcher.execute(23, agent_info, env_info, episode_seeds=[7, 3, 7, *range(20)])
        batcher.update(0.5)  # a queued request keeps the policy it was made with
        batcher.execute(20)
        disturb(0)
        results = [batcher.get() for _ in range(3)]
        batcher.update(0.25)
        disturb(1)  # right after an update
        for number, n_episodes in enumerate((40, 1, 100), 2):
            batcher.execute(n_episodes)
            disturb(number)
            results.append(batcher.get())
        assert batcher.policy_version == 2
    return results


@cache
def alone() -> list[Any]:
    return collect(make_local())


def test_results_are_bit_identical_after_any_kill() -> None:
    victims = ["ray::NodeActor", "ray::NodeActor", "rlpool-worker", "rlpool-template"]
    victims.append("ray::NodeActor")
    batcher = make()
    assert_all_equal(collect(batcher, lambda number: kill_one(victims[number])), alone())


def test_results_are_bit_identical_while_nodes_leave_and_return(cluster: Any) -> None:
    nodes = list(cluster.worker_nodes)

    def disturb(number: int) -> None:
        if number == 1:
            cluster.remove_node(nodes[0], allow_graceful=False)
        elif number == 3:
            add_node(cluster)

    assert_all_equal(collect(make(n_nodes=None), disturb), alone())


def test_agent_rows_and_seeking_give_bit_identical_results() -> None:
    with make(agent_rows=7, n_workers=2) as batcher, make_local(agent_rows=7) as local:
        for first, n_episodes in ((0, 30), (11, 9), (3, 1)):
            for each in (batcher, local):
                each.seek(first)
                each.execute(n_episodes)
            assert_all_equal([batcher.get()], [local.get()])
            assert batcher.next_episode == local.next_episode


def test_a_restored_state_continues_with_the_unreturned_episodes() -> None:
    with make(1) as batcher, make(1, seeds=6) as other:
        for _ in range(2):
            batcher.execute(20)
        batcher.get()
        state = batcher.state_dict()
        with pytest.raises(UsageError, match="pending"):
            batcher.load_state_dict(state)
        other.load_state_dict(state)
        other.execute(20)
        assert_all_equal([other.get()], [batcher.get()])


def test_an_environments_error_names_its_place_and_the_batcher_continues(tmp_path: Path) -> None:
    arguments = {"n_lanes": 3, "kind": FragileEnv, "marks": str(tmp_path)}
    with make(env_args=arguments) as batcher, make_local() as local:
        batcher.execute(30, None, faults_at(30, 20, "raise", 2, length=5))
        batcher.execute(8)
        with pytest.raises(EnvError) as caught:
            batcher.get()
        local.seek(30)
        local.execute(8)
        assert_all_equal([batcher.get()], [local.get()])
    where = caught.value.where
    assert (where.lane, where.row, where.episode, where.step) == (20 % 3, 20, 20, 2)
    assert where.node
    assert isinstance(caught.value.__cause__, RemoteTraceback)


def test_failed_episodes_are_marked_as_on_a_single_machine(tmp_path: Path) -> None:
    arguments = {"n_lanes": 3, "kind": FragileEnv, "marks": str(tmp_path), "times": 99}
    with make(env_args=arguments, on_env_error="truncate") as batcher:
        batcher.execute(30, None, faults_at(30, 20, "raise", 2, length=5))
        assert batcher.get().info["failed"].nonzero().tolist() == [[20]]
        assert [failure.where.row for failure in batcher.failures] == [20]


def test_a_get_that_times_out_loses_nothing() -> None:
    seen = []
    with make() as batcher, make_local() as local:
        batcher.execute(100)
        with pytest.raises(TimeoutError):
            batcher.get(timeout=0)
        while (trajectories := batcher.get(blocking=False)) is None:
            time.sleep(0.01)
        assert_all_equal([trajectories], [first_hundred()])
        batcher.execute(10)
        batcher.get(progress=lambda done, asked: seen.append((done, asked)))
        assert seen == sorted(seen)
        assert seen[-1] == (10, 10)
        assert batcher.environment == local.environment


def first_hundred() -> Any:
    with make_local() as local:
        local.execute(100)
        return local.get()


def test_an_interrupted_call_drops_requests_in_flight() -> None:
    with make() as batcher:
        batcher.execute(3000)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):  # Ray does not propagate other exceptions
            batcher.get()
        with pytest.raises(UsageError, match="interrupted"):
            batcher.get()
        batcher.seek(0)
        batcher.execute(100)
        assert_all_equal([batcher.get()], [first_hundred()])


class FrameEnv(FragileEnv):
    observation_space: Any = gymnasium.spaces.Box(0, 255, (100_000,), np.uint8)

    def observation(self) -> Any:
        return np.full(100_000, self.t, np.uint8)


def test_results_larger_than_the_store_are_collected() -> None:
    n_episodes = 3 * STORE_BYTES // (20 * 100_000)
    arguments = {"n_lanes": 2, "kind": FrameEnv}
    with make(create_agent=ConstantAgent, env_args=arguments) as batcher:
        batcher.execute(n_episodes, None, {"length": 20})
        frames = batcher.get()["frame"]
    assert frames.nbytes > 2.5 * STORE_BYTES
    assert (frames[:, :, 7] == torch.arange(20)).all()
    frames.add_(1)  # writable, and still valid


def create_array_env(seed: int) -> VectorGymEnv:
    return VectorGymEnv(ArrayEnv(3, AutoresetMode.NEXT_STEP, "all"), seed)


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"n_nodes": 3}, SpecError, "nodes"),
    ({"resources": {"GPU": 1}}, SpecError, "GPU"),
    ({"n_timesteps": 0}, SpecError, "n_timesteps"),
    ({"env_args": {"lock": threading.Lock()}}, WorkerStartupError, "lock"),
    ({"create_agent": lambda: 1 // 0}, WorkerStartupError, "create_agent"),
    ({"create_env": create_array_env, "env_args": {}}, SpecError, "one by one"),
]


def test_invalid_arguments_and_calls_are_refused() -> None:
    for options, error, named in REFUSED:
        with pytest.raises(error, match=named):
            make(**{"n_nodes": 1, **options})
    batcher = make(1)
    for call, error, named in (
        (batcher.get, UsageError, "pending"),
        (batcher.stats, UsageError, "other machines"),
        (lambda: batcher.execute(2, {"gain": [1.0]}), SpecError, "gain"),
        (lambda: batcher.update(threading.Lock()), SpecError, "lock"),
        (lambda: batcher.seek(-1), SpecError, "number"),
    ):
        with pytest.raises(error, match=named):
            call()
    batcher.close()
    with pytest.raises(UsageError, match="closed"):
        batcher.execute(2)


def test_permanently_lost_nodes_raise_an_error(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpool.cluster.ray_batcher._PATIENCE_S", 3.0)
    node = add_node(cluster, resources={"doomed": 1})
    with make(1, resources={"doomed": 1}) as batcher:
        cluster.remove_node(node, allow_graceful=False)
        batcher.execute(10**5)
        with pytest.raises(WorkerDiedError, match="gone"):
            batcher.get(timeout=60)


CALLER = """
import sys
import ray
from process.test_ray_cluster import make

if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    batcher = make(env_args={"n_lanes": 3})
    batcher.execute(10**6)
    print("collects", flush=True)
    batcher.get()
"""


def test_nothing_is_left_behind_when_the_caller_is_killed(cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"collects\n"
        assert len(our_processes()) >= 4
        caller.kill()
