"""Which policy runs after any sequence of calls, and which one the result says ran."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from rlpool import (
    Agent,
    AgentError,
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    RlpoolError,
    SpecError,
    UsageError,
)
from rlpool.data.storage import Memory

from support.envs import CountingEnv

N_LANES, N_TIMESTEPS = 2, 3


class Refused(Exception):
    """What a failing update raises."""


class VersionedAgent(Agent):
    """Outputs the last number that it was updated with."""

    def __init__(self, raises: list[type[BaseException]]) -> None:
        self._raises = raises
        self._version = 0

    def __call__(
        self, state: Any, observation: DictTensor, agent_info: Any = None, history: Any = None
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        version = torch.full((observation.n_elems(),), self._version)
        return DictTensor(), DictTensor({"action": version * 0, "version": version}), DictTensor()

    def update(self, info: int) -> None:
        if info < 0:
            raise Refused
        if self._raises:
            raise self._raises.pop()
        self._version = info


class SteeredEnv(CountingEnv):
    """Raises in the step ``fails_at`` of its episodes, an option; with ``raises`` only interrupts.

    Args:
        interrupts: What is raised then, and taken from the list.
    """

    def __init__(self, interrupts: list[type[BaseException]]) -> None:
        super().__init__()
        self.interrupts = interrupts

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.options = dict(options or {})
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.t == self.options.get("fails_at", -1):
            if not self.options["raises"]:
                raise ValueError
            if self.interrupts:
                raise self.interrupts.pop()
        return super().step(action)


class Life:
    """A batcher in this process and a plain model of it.

    ``pending`` has for each request the version of the policy that ran, or the error.
    """

    def __init__(self, kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.update_raises: list[type[BaseException]] = []
        self.interrupts: list[type[BaseException]] = []
        self.is_windowed = kind is Batcher
        env_kind = GymEnvInf if self.is_windowed else GymEnv
        self.batcher = kind(
            n_timesteps=N_TIMESTEPS,
            n_slots=4,
            create_agent=lambda: VersionedAgent(self.update_raises),
            create_env=lambda seed: env_kind(
                [SteeredEnv(self.interrupts) for _ in range(N_LANES)], seed
            ),
            n_threads=0,
            seeds=0,
        )
        self.monkeypatch = monkeypatch
        self.pending: deque[int | type[RlpoolError]] = deque()
        self.version, self.refused = 0, set[int]()
        self.is_reset = not self.is_windowed
        self.n_windows, self.raises = 0, None
        self.kept: list[Any] = []  # so that every request needs a new block

    def update(self) -> None:
        self.version += 1
        self.batcher.update(self.version)

    def update_that_fails(self) -> None:
        self.version += 1
        self.refused.add(self.version)
        self.batcher.update(-1)

    def update_that_is_interrupted(self) -> None:
        self.update()
        self.update_raises[:] = [KeyboardInterrupt]

    def reset(self, raises: int | None = None) -> None:
        """Begin new windows, the second of which raises."""
        self.batcher.reset(env_info=self.infos(raises, 1000, N_TIMESTEPS + 1))
        self.pending.clear()
        self.is_reset = True
        self.n_windows, self.raises = 0, raises

    def infos(self, raises: int | None, length: int, fails_at: int) -> DictTensor:
        columns = {"length": length, "fails_at": fails_at, "raises": raises or 0}
        if raises is None:
            columns["fails_at"] = -1
        return DictTensor({key: torch.full((N_LANES,), n) for key, n in columns.items()})

    def execute(self, raises: int | None = None) -> None:
        """Request episodes that raise, or the next window."""
        if self.is_windowed:
            if not self.is_reset:
                with pytest.raises(UsageError):
                    self.batcher.execute()
                return
            self.n_windows += 1
            raises = self.raises if self.n_windows == 2 else None
            self.batcher.execute()
        else:
            self.batcher.execute(N_LANES, env_info=self.infos(raises, 5, 2))
        outcome: int | type[RlpoolError] = self.version
        if raises == 0:
            outcome = EnvError
        if self.version in self.refused:
            outcome = AgentError
        self.pending.append(outcome)

    def fail(self) -> None:
        self.reset(0) if self.is_windowed else self.execute(0)

    def interrupt(self) -> None:
        """Let what comes be interrupted once, which drops all that is in flight."""
        self.interrupts[:] = [KeyboardInterrupt]
        self.reset(1) if self.is_windowed else self.execute(1)

    def execute_without_memory(self) -> None:
        if self.pending or self.is_windowed:
            return  # what has to wait for slots is sent by a later call

        def refuse(n_bytes: int) -> Memory:
            raise MemoryError

        with self.monkeypatch.context() as patch:
            patch.setattr(Memory, "local", refuse)
            self.execute()
        self.pending[-1] = SpecError

    def get(self) -> None:
        if not self.pending:
            with pytest.raises(UsageError):
                self.batcher.get()
            return
        expected = self.pending.popleft()
        try:
            result = self.batcher.get()
        except KeyboardInterrupt:
            self.pending.clear()
            self.is_reset = not self.is_windowed
            with pytest.raises(UsageError, match="nothing is pending: the last call was interr"):
                self.batcher.get()
        except RlpoolError as error:
            assert type(error) is expected  # noqa: PT017
            if self.is_windowed:
                self.pending.clear()
                self.is_reset = False
        else:
            assert set(result.info["policy_version"].tolist()) == {expected}
            assert set(result["version"][result.mask() > 0].tolist()) == {expected}
            self.kept.append(result)


@pytest.mark.promise("I2")
@pytest.mark.parametrize("kind", [EpisodeBatcher, Batcher])
@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 60))]
)
def test_the_policy_that_ran_is_the_one_that_was_asked_for_and_named(
    kind: type[Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    life = Life(kind, monkeypatch)
    calls: list[Callable[[], None]] = [life.execute, life.get, life.update] * 4
    calls += [life.reset] * 2 * life.is_windowed
    calls += [life.fail, life.interrupt, life.execute_without_memory]
    calls += [life.update_that_fails, life.update_that_is_interrupted]
    with life.batcher:
        for _ in range(60):
            rng.choice(calls)()
