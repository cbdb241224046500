"""Episodes from several nodes are the same as from one machine, whatever happens to the nodes."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import assert_all_equal, wait_until

from rlpool import (
    CrashCapsule,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    VectorGymEnv,
    WorkerDiedError,
    WorkerError,
)
from rlpool.cluster import node_workers
from rlpool.cluster.batchers import ClusterEpisodeBatcher
from rlpool.cluster.dispatch import ClusterDispatcher
from rlpool.cluster.transport import Finished
from rlpool.machine.fingerprint import fingerprint
from rlpool.workers.failure_policy import FailurePolicy

from support import faults
from support.faults import faults_at
from support.fragile import FragileEnv, RecurrentAgent, create_fragile
from support.in_process import InProcess
from support.variants import variants
from support.vector_envs import ArrayEnv, AutoresetMode

pytestmark = [pytest.mark.timeout(200), pytest.mark.promise("I2")]


def make(
    transport: InProcess,
    n_timesteps: int = 4,
    n_slots: int = 30,
    n_threads: int = 1,
    create_agent: Any = RecurrentAgent,
    create_env: Any = create_fragile,
    env_args: Any = None,
    timeout: float | None = 60.0,
    crash_dir: Any = None,
    require_same_bits: bool = False,
    agent_rows: int | None = None,
    **policy: Any,
) -> ClusterEpisodeBatcher:
    return ClusterEpisodeBatcher(
        lambda: transport,
        n_timesteps,
        n_slots,
        create_agent,
        {},
        create_env,
        {"n_lanes": 3, "kind": FragileEnv} if env_args is None else env_args,
        n_threads,
        5,
        timeout,
        FailurePolicy(**policy),
        crash_dir,
        agent_rows,
        require_same_bits=require_same_bits,
    )


def create_array_env(seed: int) -> VectorGymEnv:
    return VectorGymEnv(ArrayEnv(3, AutoresetMode.NEXT_STEP, "all"), seed)


def create_unseeded_env(seed: int) -> VectorGymEnv:
    return VectorGymEnv(ArrayEnv(3, AutoresetMode.NEXT_STEP, "nothing"), seed, seeding="stream")


def collect(batcher: Any, disturb: Callable[[int], None] = lambda _: None) -> list[Any]:
    """Requests, some queued, larger than slots, and with a new policy between them."""
    agent_info = DictTensor({"gain": torch.linspace(0.5, 2.0, 23)})
    env_info = DictTensor({"length": 1 + torch.arange(23) % 13})
    with batcher:
        batcher.execute(23, agent_info, env_info)
        batcher.reexecute()
        disturb(0)
        results = [batcher.get() for _ in range(2)]
        batcher.update(0.5)
        for number, n_episodes in enumerate((40, 1, 100), 1):
            batcher.execute(n_episodes)
            disturb(number)
            results.append(batcher.get())
    return results


@cache
def alone() -> list[Any]:
    arguments = {"n_lanes": 3, "kind": FragileEnv}
    return collect(EpisodeBatcher(4, 30, RecurrentAgent, {}, create_fragile, arguments, 0, 5))


@pytest.mark.parametrize(("n_nodes", "n_threads"), variants([(2, 1)], [(1, 1), (2, 2), (4, 1)]))
def test_any_number_of_nodes_gives_the_same_bits(n_nodes: int, n_threads: int) -> None:
    assert_all_equal(collect(make(InProcess(n_nodes), n_threads=n_threads)), alone())


def test_named_seeds_and_a_fixed_number_of_rows_reach_all_nodes() -> None:
    seeds, info = [7, 3, 7, *range(20)], {"length": 1 + torch.arange(23) % 13}
    agent_info = {"gain": torch.linspace(0.5, 2.0, 23)}
    results = []
    for n_nodes, n_lanes in ((0, 4), (3, 2)):
        arguments = {"n_lanes": n_lanes, "kind": FragileEnv}
        batcher: Any
        if n_nodes:
            batcher = make(InProcess(n_nodes), env_args=arguments, agent_rows=4)
        else:
            given = RecurrentAgent, {}, create_fragile, arguments, 0, 5
            batcher = EpisodeBatcher(4, 30, *given, agent_rows=4)
        with batcher:
            batcher.execute(23, agent_info, info, episode_seeds=seeds)
            results.append([batcher.get()])
            assert results[-1][0].info["seed"].tolist() == seeds
    assert_all_equal(*results)


def test_nodes_that_leave_and_join_change_no_bits() -> None:
    transport = InProcess(2)

    def disturb(number: int) -> None:
        if number == 0:
            transport.remove(0)
        elif number == 1:
            transport.add(0)
        elif number == 3:
            transport.remove(1)
            transport.add(2)

    assert_all_equal(collect(make(transport), disturb), alone())


def test_a_lost_result_is_collected_again() -> None:
    transport = InProcess(2)
    assert_all_equal(collect(make(transport), lambda _: transport.lose_next(1)), alone())


@pytest.mark.parametrize("n_timesteps", variants([4], [20]))
def test_memory_that_is_used_again_is_zero_past_the_end_of_each_row(n_timesteps: int) -> None:
    def padding(batcher: Any) -> list[Any]:
        with batcher:
            found = []
            for longest in (20, 3, 9):
                batcher.execute(12, None, {"length": 1 + torch.arange(12) % longest})
                trajectories = batcher.get()
                found.append({k: trajectories[k].clone() for k in ("frame", "_frame", "reward")})
                del trajectories
        return found

    with_nodes = padding(make(InProcess(2), n_timesteps))
    arguments = RecurrentAgent, {}, create_fragile, {"n_lanes": 3}, 0, 5
    for got, expected in zip(
        with_nodes, padding(EpisodeBatcher(n_timesteps, 30, *arguments)), strict=True
    ):
        for key, value in expected.items():
            assert torch.equal(got[key], value)


@pytest.mark.promise("I8")
def test_no_more_is_in_flight_than_slots_and_two_shards_per_node() -> None:
    transport = InProcess(2)
    in_flight: dict[int, tuple[int, int]] = {}
    most: list[tuple[int, int]] = []
    send, take = transport.send, transport.next_event

    def counted_send(node: int, shard: Any) -> None:
        in_flight[shard.request.number] = node, shard.request.n_rows
        rows = sum(n_rows for _, n_rows in in_flight.values())
        most.append((max(Counter(n for n, _ in in_flight.values()).values()), rows))
        send(node, shard)

    def counted_take() -> Any:
        event = take()
        if isinstance(event, Finished):
            del in_flight[event.number]
        return event

    transport.send, transport.next_event = counted_send, counted_take  # type: ignore[method-assign]
    with make(transport, n_slots=96) as batcher:
        batcher.execute(200)
        batcher.get()
    assert max(n_shards for n_shards, _ in most) == 2
    assert 80 <= max(n_rows for _, n_rows in most) <= 96
    sizes = [shard.request.n_rows for _, shard in transport.sent]
    # Small ones last, so that no node is waited for alone.
    assert sizes == [24, 24, 24, 24, 24, 18, 15, 12, 12, 12, 11]


@pytest.mark.parametrize(
    ("n_episodes", "sizes"),
    [
        (5, [3, 2]),
        (12, [3, 3, 3, 3]),  # two shards for each node
        (60, [15, 12, 12, 12, 9]),  # four episodes for each lane, as far as there are as many
    ],
)
def test_small_requests_are_divided_into_few_shards(n_episodes: int, sizes: list[int]) -> None:
    transport = InProcess(2)
    with make(transport, n_slots=n_episodes) as batcher:
        batcher.execute(n_episodes)
        batcher.get()
    assert [shard.request.n_rows for _, shard in transport.sent] == sizes


def test_a_node_has_a_slot_for_every_episode_of_the_smallest_shard() -> None:
    transport = InProcess(2)
    with make(transport, n_slots=2) as batcher:
        batcher.execute(6)
        batcher.get()
        for node in transport.nodes.values():
            assert node._first._dispatcher._blocks.layout.n_slots == 3  # it had one
    assert [shard.request.n_rows for _, shard in transport.sent] == [3, 3]


def test_the_first_shards_fit_into_the_object_store() -> None:
    transport = InProcess(2, store_bytes=40_000)
    with make(transport, n_slots=400) as batcher:
        batcher.execute(400)
        batcher.get()
        layout = batcher._dispatcher._blocks.layout  # type: ignore[union-attr]
    most = int(40_000 / 8 / (sum(layout.bytes_of_key().values()) / layout.n_slots))
    assert [shard.request.n_rows for _, shard in transport.sent[:2]] == [most // 3 * 3] * 2
    assert 3 < most < 50  # a share of the slots would be 100


def test_parameters_are_published_once_however_many_nodes_and_only_when_used() -> None:
    transport = InProcess(2)
    with make(transport) as batcher:
        for version in range(1, 6):
            batcher.update(float(version))
            batcher.update(0.1 * version)
            batcher.execute(20)
            if version % 2:
                batcher.execute(6)
        versions, references = [], []
        for _ in range(8):
            trajectories = batcher.get()
            versions.append(trajectories.info["policy_version"].unique().item())
            references.append({s.policy.version for _, s in transport.sent})
            assert trajectories["bias"][0, 0].item() == pytest.approx(0.05 * versions[-1])
    assert versions == [2, 2, 4, 6, 6, 8, 10, 10]
    assert transport.n_published == 5
    # No more than two versions at once.
    assert [max(v) for v in references[:4]] == [4, 4, 6, 8]


@pytest.mark.promise("I9")
def test_an_error_names_the_node_and_the_episode_of_the_request(tmp_path: Path) -> None:
    arguments = {"n_lanes": 3, "kind": FragileEnv, "marks": str(tmp_path / "marks")}
    (tmp_path / "marks").mkdir()
    crash_dir = tmp_path / "capsules"
    with make(InProcess(2), n_slots=60, env_args=arguments, crash_dir=crash_dir) as batcher:
        batcher.execute(50, None, faults_at(50, 40, "raise", 2, length=5))
        batcher.execute(7)
        with pytest.raises(EnvError) as caught:
            batcher.get()
        seed = batcher.get().info["seed"][0].item()
        assert batcher.progress == (0, 0)
    where, capsule = caught.value.where, caught.value.capsule
    assert (where.episode, where.step, where.node) in [(40, 2, "node-0"), (40, 2, "node-1")]
    assert f"where: node {where.node}, worker 0, lane 1, episode 40, step 2" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert capsule.where == where
    assert capsule.agent_info == {}
    (file,) = crash_dir.iterdir()
    assert str(file) in str(caught.value)
    assert CrashCapsule.load(file).where == where
    expected = EpisodeBatcher(4, 60, RecurrentAgent, {}, create_fragile, {"n_lanes": 3}, 0, 5)
    with expected:
        expected.execute(50)
        expected.execute(7)
        assert expected.get().info["seed"][40] == where.seed
        assert expected.get().info["seed"][0] == seed


@pytest.mark.parametrize("kind", variants(["raise"], ["os_exit", "wrong_shape"]))
def test_nodes_that_cannot_start_are_an_error_at_once(kind: str) -> None:
    with pytest.raises(WorkerError) as caught:
        make(InProcess(2), create_env=faults.create_env, env_args={"fault": kind})
    assert caught.value.where.node in ("node-0", "node-1")


@pytest.mark.parametrize("wrong", [{"crash_dir": "/proc/nope"}, {"require_same_bits": "yes"}])
def test_wrong_arguments_are_refused_before_nodes_start(wrong: Any) -> None:
    transport = InProcess(2)
    with pytest.raises(SpecError, match=next(iter(wrong))):
        make(transport, **wrong)
    assert not transport.nodes


def test_a_node_that_joins_later_and_cannot_start_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = InProcess(1)
    with make(transport, env_args={"n_lanes": 3}) as batcher:
        transport.refuse_next("no such module")
        transport.add(1)
        batcher.execute(10)
        wait_until(lambda: batcher.progress and "no such module" in caplog.text)
        assert batcher.get().n_elems() == 10


def test_workers_that_die_are_counted_over_all_nodes(tmp_path: Path) -> None:
    arguments = {"n_lanes": 3, "marks": str(tmp_path), "times": 9}
    limits = {"max_restarts": 2, "max_episode_restarts": None}
    with make(InProcess(2), env_args=arguments, **limits) as batcher:
        batcher.execute(20, None, faults_at(20, 7, "sigkill", 1, length=3))
        with pytest.raises(WorkerDiedError, match="restarts in all") as caught:
            batcher.get()
        with pytest.raises(WorkerDiedError):
            batcher.execute(1)
    # Each node tried the episode before it was clear that the episode is to blame.
    assert {failure.where.node for failure in caught.value.history} == {"node-0", "node-1"}
    assert caught.value.where.episode == 7


def test_the_processes_of_nodes_that_die_are_counted_and_named() -> None:
    transport = InProcess(2)
    with make(transport, max_restarts=2) as batcher:
        for number in (0, 1):
            transport.remove(number, is_machine=False)
            transport.add(number)
            batcher.execute(6)
            assert batcher.get().n_elems() == 6
        transport.remove(0, is_machine=False)
        batcher.execute(6)
        with pytest.raises(WorkerDiedError, match="node-0 died after 2 restarts") as caught:
            batcher.get()
    history = [failure.what for failure in caught.value.history]
    assert history == ["node-0 died", "node-1 died", "node-0 died"]


def test_machines_that_leave_are_not_counted() -> None:
    transport = InProcess(2)
    with make(transport, max_restarts=0) as batcher:
        for _ in range(2):
            transport.remove(0)
            transport.add(0)
            batcher.execute(6)
            assert batcher.get().n_elems() == 6


def test_a_node_whose_workers_cannot_be_started_again_is_tried_again() -> None:
    transport = InProcess(2)

    def disturb(number: int) -> None:
        if number == 0:
            transport.remove(0, is_machine=False)
            transport.refuse_next("no memory")
            transport.add(0)
        elif number == 2:  # it has to do everything alone
            wait_until(lambda: 0 in transport.ready)
            transport.remove(1)

    assert_all_equal(collect(make(transport), disturb), alone())


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_a_node_that_cannot_be_started_again_is_given_up_with_its_history(
    n_nodes: int, caplog: pytest.LogCaptureFixture
) -> None:
    transport = InProcess(n_nodes)
    with make(transport) as batcher:
        transport.remove(0, is_machine=False)
        transport.refuse_next("no memory", times=9)
        transport.add(0)
        batcher.execute(10)
        if n_nodes == 2:
            wait_until(lambda: batcher.progress and "3 times before it was ready" in caplog.text)
            assert batcher.get().n_elems() == 10
            return
        with pytest.raises(WorkerDiedError, match="no memory, and is given up") as caught:
            batcher.get()  # and does not wait for timeout
    history = [failure.what for failure in caught.value.history]
    assert history == ["node-0 died", "no memory", "no memory"]


def create_broken(seed: int, marks: str, **arguments: Any) -> Any:
    """Fails as often as there are marks of it."""
    for mark in Path(marks).glob("broken*"):
        mark.unlink()
        raise OSError("no such device")
    return create_fragile(seed, marks=marks, **arguments)


def test_a_node_whose_workers_are_given_up_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport = InProcess(2)
    arguments = {"n_lanes": 3, "kind": FragileEnv, "marks": str(tmp_path)}
    with make(transport, create_env=create_broken, env_args=arguments) as batcher:
        batcher.execute(6)
        batcher.get()
        for number in range(4):
            (tmp_path / f"broken{number}").touch()
        batcher.execute(20, None, faults_at(20, 7, "sigkill", 1, length=3))
        assert batcher.get().n_elems() == 20
        batcher.execute(6)
        wait_until(lambda: batcher.progress and len(batcher._dispatcher._nodes.states) == 2, 20.0)  # type: ignore[union-attr]
        assert "no such device" in caplog.text


def test_an_episode_that_is_given_up_on_a_node_is_told(tmp_path: Path) -> None:
    arguments = {"n_lanes": 3, "marks": str(tmp_path), "times": 99}
    with make(InProcess(2), env_args=arguments, on_env_error="truncate") as batcher:
        for hit in (7, 0, 19):
            batcher.execute(20, None, faults_at(20, hit, "raise", 1, length=3))
            result = batcher.get()
            assert result.info["failed"].nonzero().flatten().tolist() == [hit]
            assert result.lengths.tolist() == [2 if row == hit else 3 for row in range(20)]
            (failure,) = batcher.failures
            assert failure.where.episode == hit
            assert failure.where.node is not None


class SickEnv(FragileEnv):
    """Fails in every episode, as where a device or a library is missing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def step(self, action: Any) -> Any:
        if self.t == 1:
            faults.strike(self.kind)
        return super().step(action)


def create_on_sick_node(seed: int, sick: str, marks: str, **arguments: Any) -> Any:
    """Nodes have seeds of their own: the first one that starts is sick, or both are."""
    with suppress(FileExistsError):
        (Path(marks) / "seed").symlink_to(str(seed))
    if sick.startswith("all") or os.readlink(Path(marks) / "seed") == str(seed):
        return GymEnv([SickEnv(sick.removeprefix("all ")) for _ in range(3)], seed)
    return create_fragile(seed, n_lanes=3)


@pytest.mark.parametrize(
    ("kind", "max_restarts"),
    variants([("sigkill", 16)], itertools.product(["raise", "sigkill"], [0, 1, 16])),
)
def test_a_node_on_which_episodes_fail_that_succeed_elsewhere_is_left_aside(
    kind: str, max_restarts: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport = InProcess(2)
    arguments = {"sick": kind, "marks": str(tmp_path)}
    batcher = make(
        transport,
        create_env=create_on_sick_node,
        env_args=arguments,
        max_restarts=max_restarts,
        on_env_error="restart",
    )
    assert_all_equal(collect(batcher), alone())
    assert caplog.text.count("is left aside: episodes that fail there succeed on node") == 1
    assert len(transport.nodes) <= 1


@pytest.mark.parametrize("kind", variants(["raise"], ["sigkill"]))
def test_episodes_that_fail_on_all_nodes_are_no_fault_of_a_node(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"sick": f"all {kind}", "marks": str(tmp_path)}
    with make(
        InProcess(2),
        create_env=create_on_sick_node,
        env_args=arguments,
        max_restarts=2,
        on_env_error="restart",
    ) as batcher:
        batcher.execute(20)
        with pytest.raises(WorkerDiedError) as caught:
            batcher.get()
    assert len(caught.value.history) >= 3
    assert {failure.where.step for failure in caught.value.history} == {1}
    assert "left aside" not in caplog.text


def test_a_lost_node_is_an_error_if_nothing_is_to_be_restarted() -> None:
    transport = InProcess(2)
    with make(transport, on_worker_failure="raise") as batcher:
        batcher.execute(60)
        transport.remove(1)
        with pytest.raises(WorkerDiedError, match="node-1"):
            batcher.get()


def test_a_cluster_without_nodes_is_an_error_after_a_while() -> None:
    transport = InProcess(1)
    with make(transport, timeout=0.5) as batcher:
        batcher.execute(60)
        transport.remove(0)
        with pytest.raises(WorkerDiedError, match=r"0 of 1 nodes are ready after 0\.5 s"):
            batcher.get()


@pytest.mark.parametrize("require", [False, True])
def test_nodes_with_other_processors_are_told(
    require: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = iter(range(2))
    monkeypatch.setattr(
        node_workers, "fingerprint", lambda: {"torch's CPU capability": f"{next(numbers)}"}
    )
    if require:
        with pytest.raises(SpecError, match="ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, MKL_CBWR"):
            make(InProcess(2), require_same_bits=True)
        return
    with make(InProcess(2)) as batcher:
        batcher.execute(4)
        batcher.get()
    told = re.search(
        r"may compute different bits: torch's CPU capability: '(\d)' and '(\d)'", caplog.text
    )
    assert told, caplog.text
    assert sorted(told.groups()) == ["0", "1"]  # in the order in which the nodes joined


@pytest.mark.parametrize(
    ("name", "require"),
    variants(
        [("torch", False)],
        itertools.product(["rlpool", "torch", "Python"], [False, True]),
    ),
)
def test_nodes_with_other_versions_than_the_caller_are_told(
    name: str, require: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {**fingerprint(), name: "0.1"}
    monkeypatch.setattr(node_workers, "fingerprint", lambda: theirs)
    expected = f"the calling process and node-0 may compute different bits: {name}: .* and '0.1'"
    if require:
        with pytest.raises(SpecError, match=expected):
            make(InProcess(1), require_same_bits=True)
    else:
        with make(InProcess(1)):
            assert re.search(expected, caplog.text)


def test_simulators_that_only_nodes_have_are_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = {**fingerprint(), "some-simulator": "1.0"}
    monkeypatch.setattr(node_workers, "fingerprint", lambda: theirs)
    make(InProcess(2), require_same_bits=True).close()


@pytest.mark.parametrize("where", variants(["wait"], ["reserve", "start"]))
def test_nodes_end_with_a_constructor_that_is_interrupted(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = InProcess(2)
    interrupt_at(transport, where, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        make(transport)
    assert not transport.nodes


def test_nodes_end_with_a_constructor_that_is_interrupted_when_they_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = InProcess(2)

    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    # The constructor looks at it last.
    control = property(interrupted, lambda *_: None)
    monkeypatch.setattr(ClusterDispatcher, "control", control, raising=False)
    with pytest.raises(KeyboardInterrupt):
        make(transport)
    assert not transport.nodes


def interrupt_at(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, n_before: int = 0) -> None:
    """Let a call be interrupted."""
    original, numbers = getattr(owner, name), itertools.count()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(numbers) == n_before:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, interrupted)


def test_a_close_that_is_interrupted_does_the_rest_when_it_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = InProcess(2)
    batcher = make(transport)
    interrupt_at(transport, "close", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        batcher.close()
    batcher.close()
    assert not transport.nodes


def test_progress_counts_up_and_a_get_that_does_not_block_waits_for_all() -> None:
    with make(InProcess(2)) as batcher:
        assert batcher.progress == (0, 0)
        batcher.execute(60)
        seen = []
        while (trajectories := batcher.get(blocking=False)) is None:
            seen.append(batcher.progress)
        assert trajectories.n_elems() == 60
    assert [n for n, _ in seen] == sorted(n for n, _ in seen)
    assert {n_rows for _, n_rows in seen} == {60}
    trajectories["frame"].add_(1)  # writable, and still there


def test_lanes_that_are_reset_together_give_the_same_bits_on_any_node() -> None:
    def results(disturb: bool) -> list[Any]:
        transport = InProcess(2)
        found = []
        with make(transport, n_slots=60, create_env=create_array_env, env_args={}) as batcher:
            for n_episodes in (20, 7, 30):
                batcher.execute(n_episodes)
                if disturb and n_episodes == 20:
                    transport.remove(0)
                found.append(batcher.get())
        return found

    assert_all_equal(results(disturb=True), results(disturb=False))


@pytest.mark.parametrize("n_nodes", variants([1], [2]))
def test_unseeded_lanes_can_be_reproduced_on_one_node_only_and_until_it_is_replaced(
    n_nodes: int,
) -> None:
    transport = InProcess(n_nodes)
    with make(transport, create_env=create_unseeded_env, env_args={}) as batcher:
        for is_undisturbed in (True, False):
            batcher.execute(20)
            expected = is_undisturbed and n_nodes == 1
            assert batcher.get().info["reproducible"].tolist() == [expected] * 20
            transport.remove(0)
            transport.add(0)


def test_a_shard_that_is_given_up_when_it_is_complete_gives_its_slots_to_the_next() -> None:
    with EpisodeBatcher(20, 3, RecurrentAgent, {}, create_fragile, {"n_lanes": 3}, 1, 5) as batcher:
        requests = batcher._open()
        for _ in range(2):  # the second has to wait for the slots of the first
            batcher.execute(3)
        first = requests.pending[0]
        wait_until(lambda: requests.look() or first.is_complete)
        requests.drop(first)
        wait_until(lambda: batcher.get(blocking=False) is not None, 20.0)


def test_stats_are_told_by_node() -> None:
    transport = InProcess(2)
    with make(transport, n_threads=2) as batcher:
        batcher.execute(40)
        n_steps = int(batcher.get().lengths.sum())
        stats = batcher.stats()
        assert (stats.name, stats.pid) == ("ClusterEpisodeBatcher", os.getpid())
        assert (stats.n_episodes, stats.n_steps, stats.restarts) == (40, n_steps, 0)
        assert list(stats.nodes) == ["node-0", "node-1"]
        for node in stats.nodes.values():
            assert [worker.worker for worker in node.workers] == [0, 1]
            assert all(
                worker.state == "alive" and len(worker.lanes) == 3 for worker in node.workers
            )
        assert sum(node.n_steps for node in stats.nodes.values()) == n_steps
        assert len(stats.workers) == 4
        batcher.execute(40)
        (request,) = batcher.stats().requests
        assert (request.n_episodes, 0 <= request.n_finished <= 40) == (40, True)
        transport.remove(1)
        batcher.get()
        assert list(batcher.stats().nodes) == ["node-0"]
