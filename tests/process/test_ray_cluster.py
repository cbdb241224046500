"""A real Ray cluster of two nodes: the same bits whoever is killed, and nothing left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from process import test_cluster_windows as windows
from process.test_cluster import alone, collect, interrupt_at
from process.watching import assert_all_equal, wait_until

import rlpool
from rlpool import (
    EnvError,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    WorkerDiedError,
    WorkerStartupError,
)
from rlpool.cluster import RayBatcher, RayEpisodeBatcher
from rlpool.errors import RemoteTraceback

from support.agents import ConstantAgent
from support.envs import SpaceEnv
from support.faults import faults_at
from support.fragile import FragileEnv, RecurrentAgent, create_fragile

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlpool[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils")
placement_groups = pytest.importorskip("ray.util.placement_group")
ray_transport = pytest.importorskip("rlpool.cluster.ray_transport")
node_actor = pytest.importorskip("rlpool.cluster.node_actor")
ray_reservation = pytest.importorskip("rlpool.cluster.ray_reservation")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200), pytest.mark.promise("I2")]

STORE_BYTES = 100 * 2**20

FRAME = gymnasium.spaces.Box(0, 255, (100_000,), np.uint8)


class LoggingFragileEnv(FragileEnv):
    def reset(self, **arguments: Any) -> Any:
        logging.getLogger("fragile").info("reset")
        return super().reset(**arguments)


def raise_at_once() -> Any:
    raise KeyError("goal")


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)


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
    """Actors of this test's cluster, with their templates and workers; not this process's own."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_ours = process.name().startswith(("ray::NodeActor", "rlpool-"))
            if is_ours and process.ppid() != os.getpid():
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def no_process_left_behind(cluster: Any) -> Iterator[None]:
    """Ray keeps processes of its own; ours have to be gone."""
    before = {process.pid for process in our_processes()}
    yield
    wait_until(lambda: {process.pid for process in our_processes()} <= before, 10.0)


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


def kill_one(name: str) -> None:
    """Kill the first process of a name."""
    next(process for process in our_processes() if process.name().startswith(name)).kill()


def test_the_same_bits_whatever_is_killed() -> None:
    victims = {0: "ray::NodeActor", 1: "rlpool-worker", 2: "rlpool-template", 3: "ray::NodeActor"}
    batcher = make()
    assert_all_equal(collect(batcher, lambda number: kill_one(victims[number])), alone())


def test_the_same_bits_while_nodes_leave_and_join(cluster: Any) -> None:
    nodes = list(cluster.worker_nodes)

    def disturb(number: int) -> None:
        if number == 0:
            cluster.remove_node(nodes[0], allow_graceful=False)
        elif number == 1:
            add_node(cluster)

    batcher = make(n_nodes=None, max_restarts=0)  # machines that leave do not count
    assert_all_equal(collect(batcher, disturb), alone())


@pytest.mark.parametrize("kind", ["end", "restart"])
def test_windows_of_killed_nodes_go_on_with_the_same_bits(kind: str) -> None:
    def disturb(when: str, number: int) -> None:
        if (when, number) in (("during", 1), ("before", 7)):
            kill_one("ray::NodeActor")

    *options, seeds = windows.arguments(kind, windows.N_WORKERS // 2, {})
    batcher = RayBatcher(*options, 2, seeds)
    assert_all_equal(windows.collect(batcher, kind, disturb), windows.alone(kind))


def test_several_batchers_are_waited_for_by_their_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nodes are not asked what they do: only their answers end the wait.
    monkeypatch.setattr("rlpool.cluster.nodes._LOOK_EVERY_S", 100.0)
    with make(1) as one, make(1) as other:
        waiting = [one, other]
        for batcher in waiting:
            batcher.execute(20)
        started_s = time.monotonic()
        while waiting:
            for batcher in rlpool.wait(waiting, timeout=100):
                assert len(batcher.get(timeout=0)) == 20
                waiting.remove(batcher)
        assert time.monotonic() - started_s < 60.0  # no wait came to its end


def test_a_process_that_dies_while_the_caller_learns_is_replaced() -> None:
    arguments = RecurrentAgent, {}, create_fragile, {"n_lanes": 3}, 0, 5
    got, expected = [], []
    with make() as batcher, EpisodeBatcher(4, 30, *arguments) as local:
        for number in range(2):
            if number:  # and no call is in flight
                kill_one("ray::NodeActor")
                time.sleep(1.0)  # Ray knows it
            for each, results in ((batcher, got), (local, expected)):
                each.execute(25)
                results.append(each.get())
    assert_all_equal(got, expected)


def test_processes_of_nodes_that_die_are_the_history_of_the_error() -> None:
    with make(n_nodes=1, max_restarts=1) as batcher:
        for _ in range(2):
            batcher.execute(4)
            batcher.get()
            kill_one("ray::NodeActor")
        batcher.execute(4)
        with pytest.raises(WorkerDiedError, match="after 1 restarts in all") as caught:
            batcher.get()
    assert [failure.where.node for failure in caught.value.history] == [caught.value.where.node] * 2


def create_deadly(seed: int) -> GymEnv:
    """Ends the process of its node, as Ray does if memory is short."""
    for process in psutil.Process().parents():
        if process.name().startswith("ray::NodeActor"):
            process.kill()
    return create_fragile(seed)


def test_processes_of_nodes_that_die_in_their_start_are_an_error_that_says_why() -> None:
    begin_s = time.monotonic()
    with pytest.raises(WorkerDiedError, match="3 times before it was ready") as caught:
        make(n_nodes=1, create_env=create_deadly, env_args={})
    assert time.monotonic() - begin_s < 60.0
    assert len(caught.value.history) == 3
    assert "worker process has died" in str(caught.value.__cause__)  # what Ray says


STARTER = """
import sys
import ray
from process.test_ray_cluster import make

if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"working_dir": "s3://no/no.zip"})
    try:
        make()
    except Exception as error:
        print(type(error).__name__, error, error.__cause__)
"""


def test_a_runtime_env_that_cannot_be_set_up_is_an_error_at_once(
    cluster: Any, tmp_path: Path
) -> None:
    begin_s = time.monotonic()
    said = run_script(STARTER, cluster, tmp_path).communicate(timeout=100.0)[0].decode()
    assert time.monotonic() - begin_s < 50.0
    assert said.startswith("WorkerStartupError a node's process could not be created")
    assert "RuntimeEnvSetupError" in said
    assert "ModuleNotFoundError: No module named 'boto3'" in said


def references() -> int:
    """Objects of Ray that this process refers to."""
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def create_frames(seed: int) -> GymEnv:
    actions = gymnasium.spaces.Discrete(2)
    return GymEnv([SpaceEnv(FRAME, actions, 20) for _ in range(4)], seed)


def test_results_larger_than_the_store_are_collected_and_pin_nothing() -> None:
    arguments = {"create_env": create_frames, "create_agent": ConstantAgent, "env_args": {}}
    with make(**arguments, n_timesteps=20, n_slots=48) as batcher:
        # The calls that nodes wait in are objects as well: one per node, which may not wait yet.
        batcher.execute(8)
        batcher.get()
        n_most = references() + len(ray.nodes())
        batcher.execute(3 * STORE_BYTES // (20 * FRAME.shape[0]))
        trajectories = batcher.get()
        wait_until(lambda: references() <= n_most)
    frames = trajectories["frame"]
    assert frames.nbytes > 2.5 * STORE_BYTES
    frames.add_(1)  # writable, and still there
    assert frames[:, :, 0].float().mean().isfinite()


def test_errors_logs_and_stacks_name_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    arguments = {"n_lanes": 3, "kind": LoggingFragileEnv, "marks": str(tmp_path)}
    with make(env_args=arguments, crash_dir=tmp_path / "capsules") as batcher:
        text, stats = batcher.dump_stacks(file=None), batcher.stats()
        batcher.execute(30, None, faults_at(30, 20, "raise", 2, length=5))
        with pytest.raises(EnvError) as caught:
            batcher.get()
        batcher.execute(8)
        assert batcher.get().n_elems() == 8
        assert batcher.progress == (0, 0)
    where = caught.value.where
    assert (where.worker, where.lane, where.episode, where.step) == (0, 2, 20, 2)
    assert text.count(f"node {where.node}:") == 1
    assert [len(node.workers) for node in stats.nodes.values()] == [1, 1]
    assert where.node in stats.nodes
    assert text.count("rlpool/batch/worker.py") >= 2
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert list((tmp_path / "capsules").iterdir())
    said = [record for record in caplog.records if record.name == "fragile"]
    assert {record.getMessage() for record in said} == {"reset"}
    assert {record.node for record in said} >= {where.node}  # type: ignore[attr-defined]


def test_what_the_cluster_cannot_give_is_an_error() -> None:
    with pytest.raises(SpecError, match="3 free processors on a node"):
        make(n_nodes=1, n_threads=3)
    with pytest.raises(SpecError, match="1 free processors on 3 nodes"):
        make(n_nodes=3)
    with pytest.raises(WorkerStartupError, match="cannot be pickled"):
        make(env_args={"lock": threading.Lock()})
    with pytest.raises(WorkerStartupError, match="create_agent raised") as caught:
        make(create_agent=raise_at_once)
    assert caught.value.where.node
    # Nothing is reserved any more.
    wait_until(all_processors_are_free, 10.0)


def create_with_gpu(seed: int) -> GymEnv:
    if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("0", "1"):
        raise OSError("this worker has no GPU")
    return create_fragile(seed)


def test_nodes_reserve_resources_and_have_labels(cluster: Any) -> None:
    options = {"num_cpus": 2, "object_store_memory": STORE_BYTES}
    elsewhere = cluster.add_node(
        num_gpus=1, resources={"emulator": 4}, labels={"zone": "c"}, **options
    )
    node = cluster.add_node(num_gpus=2, resources={"emulator": 4}, labels={"zone": "a"}, **options)
    cluster.wait_for_nodes()
    resources = {"GPU": 1, "memory": 2**20, "emulator": 3, "labels": {"zone": "in(a,b)"}}
    try:
        arguments = {"create_env": create_with_gpu, "env_args": {}, "resources": resources}
        with make(n_nodes=None, **arguments) as batcher:
            free = ray._private.state.available_resources_per_node()[node.node_id]
            assert [free[name] for name in ("CPU", "GPU", "emulator")] == [1.0, 1.0, 1.0]
            kill_one("ray::NodeActor")  # its successor has them, too
            batcher.execute(10)
            assert batcher.get().n_elems() == 10
        with pytest.raises(SpecError, match=r"1 free processors, 5 emulator on a node \(.*2, 4"):
            make(n_nodes=None, resources={"emulator": 5})
        with pytest.raises(SpecError, match=r"1 free processors, zone=!c on 4 nodes .*zone=a"):
            make(n_nodes=4, resources={"labels": {"zone": "!c"}})
    finally:
        cluster.remove_node(node)
        cluster.remove_node(elsewhere)


@pytest.mark.parametrize(
    ("resources", "what"),
    [
        ({"CPU": 1}, "resources has 'CPU'"),
        ({"GPU": 0}, r"resources\['GPU'\] should be a number above 0"),
        ({"emulator": "one"}, r"resources\['emulator'\] should be a number"),
        ([1], r"resources is \[1\]"),
        ({"labels": {"zone": 1}}, r"resources\['labels'\] is"),
    ],
)
def test_wrong_resources_are_refused(resources: Any, what: str) -> None:
    with pytest.raises(SpecError, match=what):
        make(resources=resources)


def all_processors_are_free() -> bool:
    """Whether nothing is reserved, which Ray's sums over nodes that came and left do not say."""
    groups = placement_groups.placement_group_table().values()
    return all(group["state"] == "REMOVED" for group in groups)


@pytest.mark.parametrize(
    ("owner", "name", "n_before"),
    [
        (placement_groups.PlacementGroup, "wait", 0),
        (ray_reservation, "all_nodes", 1),  # to see how large their stores are
        (ray_transport.RayTransport, "start", 0),
        (ray_transport.RayTransport, "wait", 2),
    ],
)
def test_a_constructor_that_is_interrupted_gives_the_processors_back(
    owner: Any, name: str, n_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(owner, name, monkeypatch, n_before)
    with pytest.raises(KeyboardInterrupt):
        make()
    wait_until(all_processors_are_free, 10.0)


def test_a_close_that_is_interrupted_gives_the_processors_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batcher = make()
    assert not all_processors_are_free()
    with monkeypatch.context() as patch:
        interrupt_at(ray, "wait", patch)
        with pytest.raises(KeyboardInterrupt):
            batcher.close()
    wait_until(all_processors_are_free, 10.0)
    batcher.close()


def test_processes_that_cannot_be_created_are_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unloadable:
        def __init__(self, *_: Any) -> None:
            make()  # this module is not on the nodes

        def begin(self, *_: Any) -> None:
            raise LookupError

    monkeypatch.setattr(node_actor, "NodeActor", Unloadable)
    with pytest.raises(WorkerStartupError, match="could not be created") as caught:
        make()
    assert "ModuleNotFoundError" in str(caught.value.__cause__)


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


def run_script(text: str, cluster: Any, folder: Path) -> subprocess.Popen[bytes]:
    """A program of its own that is told the address of the cluster."""
    script = folder / "caller.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), cluster.address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def test_nothing_is_left_of_a_caller_that_is_killed(cluster: Any, tmp_path: Path) -> None:
    with run_script(CALLER, cluster, tmp_path) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"collects\n"
        assert len(our_processes()) >= 4
        caller.kill()
    wait_until(lambda: not our_processes(), 10.0)
    wait_until(all_processors_are_free, 10.0)


@pytest.mark.slow
def test_the_same_bits_for_a_minute_of_kills(cluster: Any) -> None:
    draws = random.Random(3)
    stop_s = time.monotonic() + 60.0
    kill_s = leave_s = time.monotonic() + 3.0
    requests = [draws.randrange(1, 300) for _ in range(20)]
    with EpisodeBatcher(4, 30, RecurrentAgent, {}, create_fragile, {"n_lanes": 3}, 0, 5) as alone:
        for n_episodes in requests:
            alone.execute(n_episodes)
        expected = [alone.get() for _ in requests]
    while time.monotonic() < stop_s:
        with make(n_nodes=None, max_restarts=None) as batcher:
            for n_episodes in requests:
                batcher.execute(n_episodes)
            got = []
            while len(got) < len(requests):
                if (trajectories := batcher.get(blocking=False)) is not None:
                    got.append(trajectories)
                now_s = time.monotonic()
                if now_s > kill_s:  # a node takes seconds to start
                    kill_s = now_s + 8.0 * draws.random()
                    kind = draws.choice(["ray::NodeActor", "rlpool-worker", "rlpool-template"])
                    with contextlib.suppress(StopIteration, psutil.Error):
                        kill_one(kind)
                if now_s > leave_s:
                    leave_s = now_s + 20.0
                    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
                    add_node(cluster)
            assert_all_equal(got, expected)
