"""Calls and arguments that batchers refuse by name; a refused call changes nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from rlpool import (
    Batcher,
    EpisodeBatcher,
    ParallelEnvManager,
    SpecError,
    UsageError,
    VectorGymEnv,
)

from support.agents import BinaryAgent, StepCounter
from support.envs import assert_same_tensors, create_counting
from support.needy import create_needy
from support.vector_envs import ArrayEnv

COUNTING: dict[str, Any] = {"create_agent": StepCounter, "create_env": create_counting}


def create_together(seed: int) -> VectorGymEnv:
    """Create lanes that are reset by one call."""
    lanes = ArrayEnv(2, AutoresetMode.NEXT_STEP, "all")
    return VectorGymEnv(lanes, seed, seeding="request", auto_reset=True)


TOGETHER: dict[str, Any] = {"create_agent": BinaryAgent, "create_env": create_together}


def episodes(**changes: Any) -> EpisodeBatcher:
    return EpisodeBatcher(**{"n_timesteps": 4, "n_slots": 8, "n_workers": 0, "seeds": 0, **changes})


def idle() -> EpisodeBatcher:
    return episodes(**COUNTING)


def pending() -> EpisodeBatcher:
    batcher = idle()
    batcher.execute(2)
    return batcher


def idle_together() -> EpisodeBatcher:
    return episodes(**TOGETHER)


def windows() -> Batcher:
    batcher = Batcher(6, n_workers=0, seeds=0, **COUNTING)
    batcher.reset(env_info={"length": [7, 8]})
    return batcher


def windows_together() -> Batcher:
    batcher = Batcher(6, n_workers=0, seeds=0, **TOGETHER)
    batcher.reset(env_info={"length": 4})
    batcher.execute()
    return batcher


STATE = {"root": 5, "next_episode": 3, "policy_version": 1}
NO_STATES = (
    *(None, {}, {**STATE, "last": None}, {"root": 5, "next_episode": 3}),
    *({**STATE, "root": "3"}, {**STATE, "next_episode": 2**63}, {**STATE, "policy_version": -1}),
)
NO_SEEDS = (
    *([1, 2], [1, 2, -3], [1, 2.5, 3], [1, 2, 2**31], np.zeros((3, 1), int)),
    *(torch.tensor(3), "123", {1, 2, 3}),
)
CALLS: list[tuple[Callable[[], Any], Callable[[Any], Any], Any, str | None]] = [
    *((idle, lambda b, n=n: b.execute(n), SpecError, "n_episodes") for n in (0, 1.5, True, "3")),
    (idle, lambda b: b.execute(10**12), SpecError, "seeds"),
    *((idle, lambda b, s=s: b.execute(3, episode_seeds=s), SpecError, "seeds") for s in NO_SEEDS),
    (idle_together, lambda b: b.execute(2, episode_seeds=[1, 2]), SpecError, "lanes"),
    *((idle, lambda b, n=n: b.seek(n), SpecError, "number") for n in (-1, 1.5, 2**62 + 1)),
    *((idle, lambda b, s=s: b.load_state_dict(s), SpecError, None) for s in NO_STATES),
    (idle, lambda b: b.get(), UsageError, "execute"),
    (idle, lambda b: b.get(blocking=False), UsageError, "execute"),
    (idle, lambda b: b.reexecute(), UsageError, "execute"),
    (pending, lambda b: b.seek(0), UsageError, "pending"),
    (pending, lambda b: b.get(blocking="no"), SpecError, "blocking"),
    (pending, lambda b: b.get(progress=3), SpecError, "progress"),
    (windows, lambda b: b.get(), UsageError, "execute"),
    (windows, lambda b: b.execute(env_info={"length": [1, 2, 3]}), SpecError, "env_info"),
    (windows, lambda b: b.reset(env_info={"length": [1, 2, 3]}), SpecError, "env_info"),
    (windows_together, lambda b: b.execute(env_info={"length": [3, 4]}), SpecError, "lanes"),
    (windows_together, lambda b: b.reset(env_info={"length": [3, 4]}), SpecError, "lanes"),
]


@pytest.mark.parametrize("kind", [idle, pending, idle_together, windows, windows_together])
def test_a_refused_call_names_the_reason_and_changes_nothing(kind: Any) -> None:
    calls = [row[1:] for row in CALLS if row[0] is kind]
    with kind() as batcher, kind() as other:
        for call, error, named in calls:
            with pytest.raises(error, match=named):
                call(batcher)
        assert batcher.state_dict() == other.state_dict()
        for each in (batcher, other):
            each.execute(*[2] * isinstance(each, EpisodeBatcher))
        for _ in range(1 + (kind in (pending, windows_together))):
            assert_same_tensors(batcher.get(), dict(other.get().items()))


WRONG = [
    *({"n_timesteps": value} for value in (0, 1.5, None)),
    *({"n_slots": value} for value in (-2, "8")),
    *({"n_workers": value} for value in (-1, None)),
    *({"timeout": 0}, {"agent_rows": 0}, {"progress": "bar"}),
    *({"seeds": value} for value in (-1, [1, -2], "abc", 3.5)),
    *({"seeds": [1, 2], "n_workers": 3}, {"seeds": [], "n_workers": 1}),
    *({name: value} for name in ("create_env", "create_agent") for value in (None, 5)),
    *({"env_args": value} for value in (3, "ab", {1: 2})),
    {"agent_args": [StepCounter]},
]


@pytest.mark.parametrize("kind", [EpisodeBatcher, Batcher])
def test_wrong_arguments_are_refused_by_name(kind: Any) -> None:
    arguments: dict[str, Any] = {"n_timesteps": 4, "n_slots": 8, "n_workers": 0, "seeds": 0}
    for changes in WRONG:
        with pytest.raises(SpecError, match=next(iter(changes))):
            kind(**{**arguments, **COUNTING, **changes})
    gc.collect()  # there is nothing to close


@pytest.mark.linux
@pytest.mark.promise("I8")
def test_blocks_larger_than_the_machine_are_refused_wherever_their_size_becomes_known() -> None:
    sizes = {"n_timesteps": 10**9, "n_slots": 10**6}
    with pytest.raises(SpecError, match="lower n_slots or n_timesteps"):
        episodes(**{**COUNTING, **sizes})
    with episodes(**{**COUNTING, **sizes, "create_env": create_needy}) as needy:
        for _ in range(2):
            needy.execute(2, env_info={"length": [1, 1], "id": [0, 1]})
            with pytest.raises(SpecError, match="lower n_slots or n_timesteps"):
                needy.get()


def test_an_unknown_keyword_is_reported_with_the_class_name() -> None:
    for make, name in (
        (lambda **options: EpisodeBatcher(4, **options), "EpisodeBatcher"),
        (lambda **options: Batcher(4, **options), "Batcher"),
        (lambda **options: ParallelEnvManager([lambda: 1], **options), "ParallelEnvManager"),
    ):
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected .*'num_workerz'"):
            make(num_workerz=2)
