"""Calls of a ParallelVectorEnv in two halves, as Gymnasium's AsyncVectorEnv has them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlpool import EnvError, ParallelVectorEnv, SpecError
from rlpool.errors import CallTimeoutError, PendingCallError

from support.restarting import RestlessEnv, assert_same_bits
from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left", "short_patience"),
    pytest.mark.timeout(60),
]

N = 3
PATIENCE_S = 30.0

Make = Callable[..., ParallelVectorEnv]


class GatedEnv(gymnasium.Env[Any, Any]):
    """Waits in ``step`` and ``reset`` as long as a file is there; episodes end at step 3."""

    observation_space = spaces.Box(0, 100, (), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, gate: Path) -> None:
        self._gate, self._n_steps = gate, 0

    def wait(self) -> int:
        while self._gate.exists():
            os.sched_yield()
        return self._n_steps

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.wait()
        self._n_steps = 0
        return np.float32(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.wait()
        if action == 1 and self._n_steps == 1:
            raise KeyError("one")
        self._n_steps += 1
        return np.float32(self._n_steps), float(action), self._n_steps == 3, False, {}


class LongEnv(gymnasium.Env[Any, Any]):
    """Shows the action that it was given, a text of any length."""

    observation_space = spaces.Text(10**7)
    action_space = spaces.Text(10**7)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._n_steps = 0
        return "", {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._n_steps += 1
        return f"{self._n_steps}:{action}", float(len(action)), False, False, {}


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that makes vector environments of three in two workers, closed afterwards."""
    made = []

    def make(env_fn: Any = RestlessEnv, **named: Any) -> ParallelVectorEnv:
        made.append(ParallelVectorEnv([env_fn] * N, **{"envs_per_worker": 2, **named}))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that keeps environments waiting, once it is there."""
    return tmp_path / "gate"


@pytest.fixture
def gated(make: Make, gate: Path) -> Iterator[ParallelVectorEnv]:
    yield make(lambda: GatedEnv(gate), autoreset_mode="Disabled")
    gate.unlink(missing_ok=True)


def test_halves_give_the_bits_of_whole_calls(make: Make) -> None:
    halves, whole = make(), SyncVectorEnv([RestlessEnv] * N)
    halves.action_space.seed(3)
    halves.reset_async(seed=5)
    assert_same_bits(halves.reset_wait(), whole.reset(seed=5))
    for step in range(30):
        actions = halves.action_space.sample()
        halves.step_async(actions)
        if step == 9:
            os.kill(halves.manager.workers[0].pid or 0, signal.SIGKILL)
        assert_same_bits(halves.step_wait(timeout=PATIENCE_S), whole.step(actions))
        halves.call_async("add", 3)
        assert halves.call_wait() == whole.call("add", 3)
    mask = np.array([False, True, False])
    halves.reset_async(options={"reset_mask": mask})
    assert_same_bits(halves.reset_wait(PATIENCE_S), whole.reset(options={"reset_mask": mask}))


HALVES: dict[str, tuple[Any, ...]] = {"reset": (), "step": ([0, 0, 0],), "call": ("wait",)}


def begin(envs: ParallelVectorEnv, kind: str) -> None:
    getattr(envs, f"{kind}_async")(*HALVES[kind])


@pytest.mark.parametrize("kind", HALVES)
def test_nothing_else_is_called_while_a_call_is_pending(
    kind: str, gated: ParallelVectorEnv
) -> None:
    gated.reset()
    begin(gated, kind)
    others = [other for other in HALVES if other != kind]
    calls: list[Callable[[], Any]] = [lambda other=other: begin(gated, other) for other in HALVES]
    calls += [gated.reset, lambda: gated.step([0] * N), lambda: gated.call("wait"), gated.render]
    calls += [lambda: gated.get_attr("spec"), lambda: gated.set_attr("x", 1)]
    for call in calls:
        with pytest.raises(
            PendingCallError, match=rf"(?s)^\w+\(\) was called while a {kind}.*{kind}_wait"
        ) as caught:
            call()
        assert isinstance(caught.value, AlreadyPendingCallError)
        assert caught.value.name == pickle.loads(pickle.dumps(caught.value)).name == kind
    for other in others:
        with pytest.raises(NoAsyncCallError, match=f"no {other} is pending"):
            getattr(gated, f"{other}_wait")()
    getattr(gated, f"{kind}_wait")(timeout=PATIENCE_S)
    with pytest.raises(NoAsyncCallError, match=f"{kind}_async"):
        getattr(gated, f"{kind}_wait")()
    gated.step([0] * N)


@pytest.mark.parametrize("kind", variants(["step"], HALVES))
def test_a_wait_ends_after_its_timeout_and_the_next_call_works(
    kind: str, gated: ParallelVectorEnv, gate: Path
) -> None:
    gated.reset()
    gate.touch()
    begin(gated, kind)
    for timeout in -1, "soon", float("nan"):
        with pytest.raises(SpecError, match="timeout"):
            getattr(gated, f"{kind}_wait")(timeout=timeout)
    with pytest.raises(multiprocessing.TimeoutError, match=r"0\.05 s") as caught:
        getattr(gated, f"{kind}_wait")(timeout=0.05)
    assert isinstance(caught.value, CallTimeoutError)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(NoAsyncCallError):
        getattr(gated, f"{kind}_wait")()
    gate.unlink()
    observation, *_ = gated.step([0] * N)  # the same actions as before: another step
    assert observation.tolist() == [2 if kind == "step" else 1] * N


def test_the_end_of_an_episode_is_known_after_a_wait_that_timed_out(
    gated: ParallelVectorEnv, gate: Path
) -> None:
    gated.reset()
    for _ in range(2):
        gated.step([0] * N)
    gate.touch()
    gated.step_async([0] * N)
    with pytest.raises(TimeoutError):
        gated.step_wait(0)
    gate.unlink()
    with pytest.raises(RuntimeError, match="have ended"):
        gated.step_async([0] * N)
    gated.reset()


@pytest.mark.parametrize("timeout", variants([PATIENCE_S], [None]))
def test_failures_in_halves_are_those_of_whole_calls(
    timeout: float | None, gated: ParallelVectorEnv
) -> None:
    gated.reset()
    gated.step([0] * N)
    gated.step_async([0, 0, 1])
    with pytest.raises(EnvError, match="KeyError") as caught:
        gated.step_wait(timeout)
    assert caught.value.where.lane == 2
    gated.reset()
    gated.call_async("missing")
    with pytest.raises(AttributeError, match="missing"):
        gated.call_wait(timeout)
    with pytest.raises(SpecError):
        gated.step_async([5, 5, 5, 5])
    gated.step([0] * N)


def test_closing_gives_a_pending_call_up_with_gymnasiums_warning(
    gated: ParallelVectorEnv, gate: Path
) -> None:
    gated.reset()
    gate.touch()
    gated.step_async([0] * N)
    with pytest.warns(UserWarning, match="a step is pending"):
        gated.close(terminate=True)
    for call in (gated.reset_async, gated.reset_wait, gated.step_wait, gated.call_wait):
        with pytest.raises(ClosedEnvironmentError):
            call()


def test_actions_and_observations_without_a_fixed_shape_may_be_of_any_length(make: Make) -> None:
    envs = make(LongEnv)
    envs.reset(seed=0)
    sizes = [(0, 8180, 3), (8192, 1, 30_000), (2_000_000, 0, 16_382), (1, 2, 3)]
    for number, lengths in enumerate(sizes, 1):
        actions = tuple("ab\0"[lane] * length for lane, length in enumerate(lengths))
        envs.step_async(actions)
        if number == 3:
            for worker in envs.manager.workers:
                os.kill(worker.pid or 0, signal.SIGKILL)
        observations, rewards, *_ = envs.step_wait()
        assert observations == tuple(f"{number}:{action}" for action in actions)
        assert rewards.tolist() == list(lengths)


@pytest.mark.parametrize("name", variants(["graph"], ["sequence", "text"]))
def test_long_values_of_every_space_without_a_fixed_shape_arrive(name: str, make: Make) -> None:
    space: spaces.Space[Any] = {
        "graph": spaces.Graph(spaces.Box(-1, 1, (50,)), None),
        "sequence": spaces.Sequence(spaces.Box(-1, 1, (50,)), stack=False),
        "text": spaces.Text(20_000, min_length=10_000),
    }[name]

    class Echo(LongEnv):
        observation_space = space
        action_space = space

        def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
            super().reset(**arguments)
            self.observation_space.seed(1)
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return action, 0.0, False, False, {}

    envs = make(Echo, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=0)
    envs.action_space.seed(0)
    space.seed(2)
    many = {"graph": 200, "sequence": 200}.get(name)
    rows = []
    for _ in range(N):
        if name == "graph":
            rows.append(space.sample(num_nodes=many))  # type: ignore[call-arg]
        elif name == "sequence":
            one = spaces.Box(-1, 1, (50,), seed=len(rows))
            rows.append(tuple(one.sample() for _ in range(many or 0)))
        else:
            rows.append(space.sample())
    assert min(len(pickle.dumps(row)) for row in rows) > 8192
    observations, *_ = envs.step(tuple(rows))
    assert_same_bits(observations, tuple(rows))


def test_actions_without_dimensions_are_the_numbers_that_gymnasium_hands_out(make: Make) -> None:
    class Kinds(LongEnv):
        action_space = spaces.Dict(
            {
                "x": spaces.Box(-1, 1, ()),
                "y": spaces.Tuple([spaces.Box(-1, 1, ()), spaces.Discrete(2)]),
            }
        )

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            kinds = [type(part).__name__ for part in (action["x"], *action["y"])]
            return " ".join(kinds), 0.0, False, False, {}

    envs, whole = make(Kinds), SyncVectorEnv([Kinds] * N)
    for each in envs, whole:
        each.reset(seed=0)
    actions = envs.action_space.sample()
    assert envs.step(actions)[0] == whole.step(actions)[0]
