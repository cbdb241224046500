"""Episodes from several nodes are the same as from one machine, whatever happens to the nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from process.watching import assert_all_equal

from rlpool import DictTensor, EpisodeBatcher
from rlpool.cluster.batchers import ClusterEpisodeBatcher
from rlpool.cluster.in_process import InProcess
from rlpool.workers.failure_policy import FailurePolicy

from support.fragile import FragileEnv, RecurrentAgent, create_fragile

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
    )


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


@pytest.mark.parametrize(("n_nodes", "n_threads"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_any_number_of_nodes_gives_the_same_bits(n_nodes: int, n_threads: int) -> None:
    assert_all_equal(collect(make(InProcess(n_nodes), n_threads=n_threads)), alone())


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
