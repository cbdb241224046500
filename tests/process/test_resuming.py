"""A program that is started again goes on with the same bits as one that was not interrupted."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from process.watching import assert_all_equal

from rlpool import Batcher, EnvError, EpisodeBatcher, SpecError, UsageError, VectorGymEnv

from support import vector_envs
from support.agents import StepCounter
from support.fragile import ChancyEnv, RecurrentAgent, create_fragile
from support.variants import variants

pytestmark = [pytest.mark.timeout(120), pytest.mark.promise("I2")]

Make = Callable[..., Any]


def windows_of(n_threads: int, seeds: Any = 5, n_timesteps: int = 5, **changes: Any) -> Batcher:
    env_args = {"restarts": True, **changes.pop("env_args", {})}
    options = {"create_agent": RecurrentAgent, "agent_args": {}, "create_env": create_fragile}
    options |= {"env_args": env_args, **changes}
    return Batcher(n_timesteps, n_threads=n_threads, seeds=seeds, **options)


def episodes_of(n_threads: int, seeds: Any = 5) -> EpisodeBatcher:
    arguments = 4, 24, RecurrentAgent, {}, create_fragile, {}, n_threads
    return EpisodeBatcher(*arguments, seeds)


def reset(batcher: Batcher) -> None:
    n = batcher.n_lanes
    batcher.reset({"gain": 1 + torch.arange(n) / 10}, {"length": 7 + 3 * torch.arange(n)})


def collect(batcher: Any, numbers: Iterable[int]) -> list[Any]:
    """Windows or episodes, each with parameters of its own, until all lanes have stopped."""
    results = []
    for number in numbers:
        batcher.update(number / 10)
        if isinstance(batcher, EpisodeBatcher):
            batcher.execute(5 + number, {"gain": 1.0})
        else:
            batcher.execute({"gain": 1 + number / 20} if number == 3 else None)
        if (result := batcher.get()) is not None:
            results.append(result)
    return results


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def begin(batcher: Any) -> None:
    if isinstance(batcher, Batcher):
        reset(batcher)


def run(make: Make, interrupted_at: Iterable[int], *others: Make, n: int = 7) -> list[Any]:
    """``n`` results and one after a reset, of batchers each of which goes on from the last."""
    makers, results, state = iter((make, *others)), [], None
    bounds = [0, *interrupted_at, n]
    for start, stop in pairwise(bounds):
        with next(makers)() as batcher:
            if state is None:
                begin(batcher)
            else:
                batcher.load_state_dict(state)
            results += collect(batcher, range(start, stop))
            state = through_a_file(batcher.state_dict())
            if stop == n:
                begin(batcher)
                results += collect(batcher, [0])
    return results


@pytest.mark.parametrize(
    ("n_threads", "restarts"),
    variants(
        [((0, 0, 0), False), ((2, 2, 2), True)],
        [((0, 0, 0), True), ((2, 2, 2), False), ((1, 0, 1), True), ((0, 1, 0), False)],
    ),
)
def test_windows_go_on_where_another_batcher_ended(
    n_threads: tuple[int, ...], restarts: bool
) -> None:
    def maker(n: int) -> Make:
        return lambda: windows_of(n, env_args={"restarts": restarts})

    expected = run(maker(n_threads[0]), ())
    assert_all_equal(run(maker(n_threads[0]), (2, 3), *map(maker, n_threads[1:])), expected)
    assert_all_equal(run(maker(n_threads[0]), (0,), maker(n_threads[1])), expected)


def test_windows_of_one_step_and_of_drawn_seeds_go_on() -> None:
    with windows_of(0, None, 1) as one, windows_of(0, None, 1) as other:
        reset(one)
        collect(one, range(9))
        other.load_state_dict(one.state_dict())
        expected = collect(one, range(9, 20))
        assert_all_equal(collect(other, range(9, 20)), expected)


@pytest.mark.parametrize("n_threads", variants([0], [2]))
def test_episodes_go_on_with_new_seeds(n_threads: int) -> None:
    expected = run(lambda: episodes_of(n_threads), ())
    found = run(lambda: episodes_of(n_threads), (2, 5), lambda: episodes_of(0, None), episodes_of_2)
    assert_all_equal(found, expected)
    with episodes_of(0) as one, episodes_of(0) as other:
        one.execute(3, {"gain": 2.0})
        one.get()
        other.load_state_dict(one.state_dict())
        for batcher in (one, other):
            batcher.reexecute()
        assert_all_equal([other.get()], [one.get()])


def episodes_of_2() -> EpisodeBatcher:
    return episodes_of(2, [1, 2])


# What is refused ---------------------------------------------------------------------------------


def test_no_state_is_loaded_while_results_are_pending() -> None:
    with windows_of(0) as batcher, episodes_of(0) as episodes:
        reset(batcher)
        batcher.execute()
        batcher.execute()
        episodes.execute(1)
        for owner, n in ((batcher, 2), (episodes, 1)):
            with pytest.raises(UsageError, match=f"{n} results are pending") as caught:
                owner.load_state_dict(owner.state_dict())
            assert caught.value.fix == "take them with get() first"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"env_args": {"n_lanes": 3}}, "n_lanes was 2 where the state was saved, it is 3 here"),
        ({"n_threads": 2, "env_args": {"n_lanes": 1}}, "lanes of each worker was 2 .* 1 here"),
        ({"n_timesteps": 4}, "n_timesteps was 5 where the state was saved, it is 4 here"),
        ({"create_agent": StepCounter}, r"agent's states were \{'hidden.* here \{'steps'"),
    ],
)
def test_a_state_of_other_lanes_windows_or_agents_is_refused(changes: Any, text: str) -> None:
    with windows_of(0) as batcher, windows_of(**{"n_threads": 0, **changes}) as other:
        reset(batcher)
        collect(batcher, [0])
        before = other.state_dict()
        with pytest.raises(SpecError, match=text):
            other.load_state_dict(batcher.state_dict())
        assert other.state_dict() == before


@pytest.mark.parametrize("state", [{}, None, {"kind": "EpisodeBatcher"}, {"weight": torch.ones(2)}])
def test_what_is_no_state_of_such_a_batcher_is_refused(state: Any) -> None:
    with windows_of(0) as batcher, pytest.raises(SpecError, match="pass what state_dict"):
        batcher.load_state_dict(state)


@pytest.mark.parametrize("make", [windows_of, episodes_of])
def test_a_state_of_another_format_or_that_lacks_a_key_is_refused(make: Any) -> None:
    with make(0) as batcher:
        state = batcher.state_dict()
        for key in state.keys() - {"kind"}:
            with pytest.raises(SpecError, match=rf"lacks {key}\n") as caught:
                batcher.load_state_dict({k: v for k, v in state.items() if k != key})
            whose = {windows_of: "a Batcher", episodes_of: "an EpisodeBatcher"}[make]
            assert f"state_dict() of {whose} of this version of rlpool" in caught.value.fix
        with pytest.raises(SpecError, match="has format 0, here it is 1"):
            batcher.load_state_dict({**state, "format": 0})
        assert batcher.state_dict() == state
        batcher.load_state_dict(state)


def create_vector(seed: int, seeds: str, seeding: Any) -> VectorGymEnv:
    lanes = vector_envs.ArrayEnv(2, AutoresetMode.NEXT_STEP, seeds)
    return VectorGymEnv(lanes, seed, seeding=seeding, auto_reset=True)


TOGETHER = {"seeds": "all", "seeding": "request"}
STREAM = {"seeds": "nothing", "seeding": "stream"}


@pytest.mark.parametrize(
    ("changes", "text", "is_at_reset"),
    [
        ({"agent_args": {"wants_history": True}}, "requires a history", True),
        ({"create_env": create_vector, "env_args": TOGETHER}, "cannot be reset one by one", True),
        ({"create_env": create_vector, "env_args": STREAM}, "cannot be seeded", False),
    ],
)
def test_episodes_that_cannot_be_repeated_are_told_when_saved_and_refused_when_loaded(
    changes: dict[str, Any], text: str, is_at_reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Batcher:
        return Batcher(3, create_agent=RecurrentAgent, n_threads=0, seeds=1, **options)

    options = {"agent_args": {}, "create_env": create_fragile, **changes}
    with make() as one, make() as other:
        one.reset()
        state = one.state_dict()
        assert bool(state["why_lost"]) is not is_at_reset
        caplog.clear()
        collect(one, [0])
        with caplog.at_level(logging.WARNING, "rlpool"):
            later = one.state_dict()
        (record,) = caplog.records
        assert "this state cannot be resumed" in record.getMessage()
        with pytest.raises(SpecError, match=text) as caught:
            other.load_state_dict(through_a_file(later))
        assert "right after reset()" in str(caught.value)


def test_episodes_whose_first_actions_were_dropped_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlpool.loop.crash_scene.MOST_BYTES", 300)
    with windows_of(0) as one, windows_of(0) as other:
        one.reset(env_info={"length": 100_000})
        collect(one, range(8))
        with pytest.raises(SpecError, match=r"lane 0: the first .* actions of this episode"):
            other.load_state_dict(one.state_dict())


def test_an_environment_that_does_not_repeat_itself_is_told_by_get() -> None:
    env_args = {"kind": ChancyEnv}
    with windows_of(0, env_args=env_args) as one, windows_of(0, env_args=env_args) as other:
        reset(one)
        collect(one, [0])
        other.load_state_dict(one.state_dict())
        with pytest.raises(EnvError, match="did not repeat an episode"):
            collect(other, [1])
