"""Windows from several nodes are the same as from one machine, whatever happens to the nodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gymnasium.vector import AutoresetMode
from process.watching import assert_all_equal, assert_equal, wait_until, worker_pids

from rlpool import Batcher, EnvError, GymEnv, VectorGymEnv, WorkerDiedError
from rlpool.cluster.batchers import ClusterBatcher
from rlpool.workers.failure_policy import FailurePolicy

from support import vector_envs
from support.faults import faults, strike
from support.fragile import FragileEnv, RecurrentAgent, create_fragile
from support.in_process import InProcess
from support.variants import variants

pytestmark = [pytest.mark.timeout(120), pytest.mark.promise("I2"), pytest.mark.promise("I3")]

N_WORKERS, N_LANES = 4, 8
"""Of all nodes together."""

Disturb = Callable[[str, int], None]


def create_lanes(seed: int, kind: str, **arguments: Any) -> Any:
    """Two lanes that end, that restart, or that restart and have one seed or none."""
    if kind in ("end", "restart"):
        return create_fragile(seed, restarts=kind == "restart", **arguments)
    if kind == "vector":
        return vector_envs.create_lanes(seed, n_lanes=2, restarts=True)
    seeding: Any = {"together": "request", "unseeded": "stream"}[kind]
    seeds = {"together": "all", "unseeded": "nothing"}[kind]
    lanes = vector_envs.ArrayEnv(2, AutoresetMode.NEXT_STEP, seeds)
    return VectorGymEnv(lanes, seed, seeding=seeding, auto_reset=True)


def arguments(kind: str, n_threads: int, agent_args: Any, **env_args: Any) -> tuple[Any, ...]:
    env_args = {"kind": kind, **env_args}
    return 5, None, RecurrentAgent, agent_args, create_lanes, env_args, n_threads, 5


def make(
    transport: InProcess, kind: str = "restart", agent_args: Any = None, **env_args: Any
) -> ClusterBatcher:
    n_threads = N_WORKERS // transport.n_expected
    options = arguments(kind, n_threads, agent_args or {}, **env_args)
    return ClusterBatcher(lambda: transport, *options, 60.0, FailurePolicy())


def reset(batcher: Any, kind: str, hits: dict[int, tuple[str, int]]) -> None:
    gain = {"gain": 1 + torch.arange(N_LANES) / 100}
    # Nodes 1 and 3 of four have no lane left in the third window.
    lengths = torch.tensor([12, 17, 3, 9, 20, 1, 10, 5])
    is_seeded = kind not in ("together", "unseeded")
    batcher.reset(gain, faults(N_LANES, hits, length=lengths) if is_seeded else None)


def collect(
    batcher: Any,
    kind: str = "restart",
    disturb: Disturb = lambda *_: None,
    hits: tuple[Any, Any] = ({}, {}),
) -> list[Any]:
    """Windows of two resets, each with a policy of its own; one is queued, one never fetched."""
    results = []
    with batcher:
        for of_reset in hits:
            reset(batcher, kind, of_reset)
            for number in range(5):
                disturb("before", len(results))
                batcher.execute({"gain": 0.5} if number == 2 else None)
                batcher.update(len(results) / 10)
                if number == 3 and kind != "unseeded":  # where a window may be given up
                    batcher.execute()
                disturb("during", len(results))
                results.append(batcher.get())
    return results


@cache
def alone(kind: str) -> list[Any]:
    return collect(Batcher(*arguments(kind, N_WORKERS, {})), kind)


def at(*what: tuple[str, int, Callable[[], Any]]) -> Disturb:
    """Do something before or during some windows."""

    def disturb(when: str, number: int) -> None:
        for then, window, act in what:
            if (then, window) == (when, number):
                act()

    return disturb


def join(transport: InProcess, node: int) -> None:
    """Let a node join; the batcher hears of it with the next result."""
    transport.add(node)
    wait_until(lambda: node in transport.ready)


KINDS = ("end", "restart", "together", "unseeded")


@pytest.mark.parametrize(
    ("n_nodes", "kind"),
    variants(
        [(4, "restart"), (2, "together")],
        [(1, "restart"), *((2, kind) for kind in KINDS)],
    ),
)
def test_any_number_of_nodes_gives_the_same_bits(n_nodes: int, kind: str) -> None:
    assert_all_equal(collect(make(InProcess(n_nodes), kind), kind), alone(kind))


def curriculum(batcher: Any, disturb: Disturb = lambda *_: None) -> list[Any]:
    """Windows, each with other rows of ``env_info`` for the episodes that begin in it."""
    results = []
    with batcher:
        batcher.reset({"gain": torch.ones(N_LANES)}, {"length": torch.full((N_LANES,), 7)})
        for number, length in enumerate((3, 12, 2, 6)):
            batcher.execute(env_info={"length": length + torch.arange(N_LANES) % 2})
            disturb("during", number)
            results.append(batcher.get())
    return results


@pytest.mark.parametrize("kind", variants(["restart"], ["vector"]))
def test_rows_of_env_info_reach_all_nodes_and_the_successor_of_one(kind: str) -> None:
    transport = InProcess(2)
    disturb = at(
        ("during", 1, lambda: transport.remove(1)), ("during", 2, lambda: transport.add(1))
    )
    results = curriculum(make(transport, kind), disturb)
    assert results[2].info["env_info/length"].tolist() == [2, 3] * (N_LANES // 2)
    ends = [[row.nonzero().flatten().tolist() for row in each["_done"][:2]] for each in results]
    assert ends == [[[2], [3]], [[0], [2]], [[], []], [[2], []]]
    assert_all_equal(results, curriculum(Batcher(*arguments(kind, N_WORKERS, {}))))


@pytest.mark.parametrize(
    ("kind", "when_done"),
    variants([("restart", False)], [("end", False), ("end", True), ("restart", True)]),
)
def test_windows_go_on_with_the_same_bits_where_nodes_leave_and_join(
    kind: str, when_done: bool
) -> None:
    transport = InProcess(2)

    def remove(node: int) -> None:
        transport.remove(node, when_done=when_done)

    disturb = at(
        ("during", 1, lambda: remove(1)),  # node 0 has both parts
        ("during", 2, lambda: join(transport, 2)),  # which gets one of them
        ("during", 3, lambda: remove(0)),
        ("during", 5, lambda: join(transport, 0)),
        ("during", 6, lambda: (remove(0), remove(2))),  # nobody is left
        ("during", 6, lambda: transport.add(1)),
        ("before", 8, lambda: transport.add(0)),
        ("before", 9, lambda: remove(1)),
    )
    assert_all_equal(collect(make(transport, kind), kind, disturb), alone(kind))
    assert {node for node, _ in transport.sent} == {0, 1, 2}


@pytest.mark.parametrize("kind", variants(["restart"], ["end", "vector"]))
def test_a_lost_result_is_collected_again(kind: str) -> None:
    transport = InProcess(2)
    lost = 0, 1, 2
    disturb = at(*(("during", n, lambda n=n: transport.lose_next(n % 2)) for n in lost))
    assert_all_equal(collect(make(transport, kind), kind, disturb), alone(kind))
    assert sum(shard.request.tapes is not None for _, shard in transport.sent) == len(lost[1:])


def test_a_node_gives_back_what_it_had_taken_over_and_ends_the_workers_for_it() -> None:
    transport, before = InProcess(2), worker_pids()
    found = []

    def count() -> None:
        found.append(len(worker_pids() - before))

    disturb = at(
        ("before", 1, lambda: transport.remove(1)),
        ("before", 2, count),
        ("before", 3, lambda: join(transport, 1)),
        ("before", 5, lambda: wait_until(lambda: len(worker_pids() - before) == N_WORKERS)),
    )
    assert_all_equal(collect(make(transport), disturb=disturb), alone("restart"))
    assert found == [N_WORKERS]
    assert [node for node, shard in transport.sent if shard.part == 1][3:6] == [0, 0, 1]


def test_windows_have_the_same_bits_where_workers_of_nodes_and_nodes_die(tmp_path: Path) -> None:
    transport = InProcess(2)
    hits: Any = {1: ("sigkill", 7), 6: ("sigkill", 3)}, {2: ("os_exit", -1), 7: ("sigkill", 1)}
    disturb = at(("before", 2, lambda: transport.remove(0)))
    expected = collect(Batcher(*arguments("end", N_WORKERS, {})), "end", hits=hits)
    mine = make(transport, "end", marks=str(tmp_path))
    assert_all_equal(collect(mine, "end", disturb, hits), expected)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("kind", "agent_args", "when_done"),
    variants(
        [("restart", {"wants_history": True}, False)],
        [
            ("restart", {"wants_history": True}, True),
            *(("unseeded", {}, when_done) for when_done in (False, True)),
        ],
    ),
)
def test_windows_that_cannot_be_repeated_are_given_up_but_not_the_next_reset(
    kind: str, agent_args: Any, when_done: bool
) -> None:
    transport = InProcess(2)
    with make(transport, kind, agent_args) as batcher:
        reset(batcher, kind, {})
        batcher.execute()
        batcher.execute()
        if when_done:
            transport.remove(1, when_done=True)
        assert batcher.get() is not None
        if not when_done:
            transport.remove(1)
        batcher.update(0.5)
        batcher.execute()
        with pytest.raises(WorkerDiedError, match="node-1 died"):
            batcher.get()
        transport.add(1)
        for _ in range(2):
            reset(batcher, kind, {})
            batcher.execute()
            window = batcher.get()
            assert window is not None
            assert window["bias"].unique().tolist() in ([0.5], [0.0, 0.5])  # some rows are shorter
            if kind == "unseeded":
                assert not window.info["reproducible"].any()


def test_results_of_unseeded_lanes_say_that_a_nodes_worker_was_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = worker_pids()
    with make(InProcess(2), "unseeded") as batcher:
        for is_over in (False, True):
            reset(batcher, "unseeded", {})
            batcher.execute()
            window = batcher.get()
            assert window is not None
            assert window.info["reproducible"].tolist() == [not is_over] * N_LANES
            if not is_over:
                psutil.Process(min(worker_pids() - before)).kill()
                batcher.execute()
                with pytest.raises(WorkerDiedError, match="SIGKILL"):
                    batcher.get()
    assert caplog.text.count("cannot be seeded") == 1  # not once more for each node


def test_an_error_names_node_and_lane_and_reset_goes_on(tmp_path: Path) -> None:
    with make(InProcess(2), marks=str(tmp_path)) as mine:
        reset(mine, "restart", {6: ("raise", 2)})
        mine.execute()
        for number in range(5):
            mine.execute()
            mine.update(number / 10)
        with pytest.raises(EnvError, match="struck") as caught:
            mine.get()
        where = caught.value.where
        assert (where.node, where.worker, where.lane) == ("node-1", 1, 0)
        assert (where.episode, where.step) == (6, 2)
        reset(mine, "restart", {})
        mine.execute()
        assert_equal(mine.get(), alone("restart")[5])


def test_a_shard_that_comes_late_is_given_up() -> None:
    transport = InProcess(1)

    def repeat() -> None:
        old = transport.sent[0][1]
        outcome = transport.nodes[0].run(old, lambda: None).result()
        assert "after the next one" in str(outcome.error)

    assert_all_equal(collect(make(transport), disturb=at(("before", 2, repeat))), alone("restart"))


class SickEnv(FragileEnv):
    """Fails at its second step until somebody has healed it."""

    def step(self, action: Any) -> Any:
        if self.t == 1 and not (Path(self._marks or "") / "healed").exists():
            strike("sigkill")
        return super().step(action)


def create_on_sick_node(seed: int, marks: str) -> Any:
    """The node that starts first is sick."""
    with suppress(FileExistsError):
        (Path(marks) / "seed").symlink_to(str(seed))
    is_sick = os.readlink(Path(marks) / "seed") == str(seed)
    kind = SickEnv if is_sick else FragileEnv
    return GymEnv([kind(marks) for _ in range(3)], seed)


def test_a_sick_node_gives_its_lanes_to_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def windows_of(batcher: Any) -> list[Any]:
        results = []
        with batcher:
            batcher.reset()
            for _ in range(2):
                batcher.execute()
            while len(results) < 2:
                if "others try the same episodes" in caplog.text:
                    # Who has the lanes of the sick node now has its seed as well.
                    (tmp_path / "healed").touch()
                if (trajectories := batcher.get(blocking=False)) is not None:
                    results.append(trajectories)
        return results

    healthy = Batcher(5, None, RecurrentAgent, {}, create_fragile, {"n_lanes": 3}, 2, 5)
    transport = InProcess(2)
    options = create_on_sick_node, {"marks": str(tmp_path)}, 1, 5, 60.0, FailurePolicy()
    batcher = ClusterBatcher(lambda: transport, 5, None, RecurrentAgent, {}, *options)
    for got, expected in zip(windows_of(batcher), windows_of(healthy), strict=True):
        assert_equal(got, expected)
    assert "is left aside" in caplog.text


def test_steps_count_once_they_have_arrived() -> None:
    transport, seen = InProcess(2), []
    send = transport.send
    with make(transport, "end") as batcher:
        reset(batcher, "end", {})
        transport.send = lambda node, shard: node or send(node, shard)  # type: ignore[method-assign]
        batcher.execute()
        wait_until(lambda: batcher.progress == (N_LANES // 2, N_LANES))
        assert batcher.get(blocking=False, progress=seen.append) is None
    assert [progress.n_steps for progress in seen] == [5 * N_LANES // 2]
