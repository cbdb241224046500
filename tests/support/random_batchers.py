"""Batchers with random arguments, environments and agents."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from rlpool import (
    Batcher,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    ParallelEnvManager,
    VectorGymEnv,
)

from support.by_hand import ObservedEnv
from support.meta import LaggingLanes
from support.scripted import ACTED, INFOS, OBSERVED, ScriptedAgent, ScriptedEnv
from support.vector_envs import ArrayEnv

MODES = ("NextStep", "SameStep", "Disabled")
CAN_FAIL = ("gym", "lagging", "manager")
"""Lanes whose environments raise in the steps that ``env_info`` names."""


class Setting(SimpleNamespace):
    """Random arguments of a batcher, drawn by ``any_setting``."""

    def agent(self) -> ScriptedAgent:
        state = self.keeps, self.history, self.spoils, self.agent_reuses
        if self.over in ("array", "together"):
            return ScriptedAgent(ArrayEnv.single_action_space, None, self.n_noise, *state)
        return ScriptedAgent(self.acts, self.observes, self.n_noise, *state)

    def env_fn(self) -> Any:
        return partial(ScriptedEnv, self.observes, self.acts, self.reuses)

    def observed_env(self) -> ObservedEnv:
        """Return one environment for hand-written loops."""
        if self.over == "array":
            return ObservedEnv(OneLane(), {}, self.keep_float64, self.limit)
        real = np.float64 if self.keep_float64 else np.float32
        specs: dict[str, Any] = {}
        if self.infos == "named":
            specs = dict.fromkeys(INFOS["named"], (np.float32, ()))
        if self.infos == "declared":
            specs = {"score": (real, ()), "hits": (np.int16, ()), "deep/on": (np.bool_, ())}
            specs["pair"] = np.float64, (2,)
        return ObservedEnv(self.env_fn()(), specs, self.keep_float64, self.limit, self.truncates)

    def lanes(self, seed: int = 0) -> Any:
        """Return the lanes of one worker."""
        fns = [self.env_fn()] * self.n_lanes
        options: dict[str, Any] = {
            "max_episode_steps": self.limit,
            "keep_float64": self.keep_float64,
            "info_keys": INFOS[self.infos],
        }
        if self.over in ("array", "together"):
            options |= {"info_keys": None}
            seeding = "episode" if self.over == "array" else self.seeding
            env = self.arrays()
            return VectorGymEnv(env, seed, seeding=seeding, auto_reset=self.restarts, **options)
        if self.over == "manager":
            options |= {"auto_reset": self.restarts, "min_ready": self.min_ready}
            return ParallelEnvManager(fns, seed=seed, envs_per_worker=2, **options)
        envs = [make() for make in fns]
        if self.over == "lagging":
            lagging = LaggingLanes(envs, self.min_ready or 1, seed, **options)
            lagging.auto_reset = self.restarts
            return lagging
        return (GymEnvInf if self.restarts else GymEnv)(envs, seed, **options)

    def arrays(self) -> ArrayEnv:
        """Return vectorised lanes that are reset one by one or together."""
        if self.over == "array":
            return ArrayEnv(self.n_lanes)
        return ArrayEnv(self.n_lanes, AutoresetMode(self.mode), seeds="all")

    @property
    def seeding(self) -> Any:
        """Return the declared seeding of lanes reset together, ``None`` to detect it."""
        return [None, "request"][self.seeds % 2]

    def batcher(self, windows: bool) -> Any:
        kind = Batcher if windows else EpisodeBatcher
        make = self.agent, {}, self.lanes, {}
        numbers = self.n_threads, self.seeds
        options: Any = {"agent_rows": self.agent_rows}
        if self.truncates:
            options["on_env_error"] = "truncate"
        # Any number of workers may be killed.
        options |= {"max_restarts": None, "max_episode_restarts": None}
        return kind(self.n_timesteps, self.n_slots, *make, *numbers, **options)

    @property
    def n_rows(self) -> int:
        """Number of rows that the agent is called with."""
        return self.agent_rows or self.n_lanes

    @property
    def n_workers(self) -> int:
        """Number of workers, 1 if the calling process is the only one."""
        return max(1, self.n_threads)

    @property
    def n_all_lanes(self) -> int:
        """Number of lanes of all workers."""
        return self.n_lanes * self.n_workers


class OneLane(gymnasium.Env[Any, Any]):
    """One lane of an ``ArrayEnv`` as an environment."""

    observation_space = ArrayEnv.single_observation_space
    action_space = ArrayEnv.single_action_space

    def __init__(self) -> None:
        self.lanes = ArrayEnv(1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.lanes.reset(seed=[seed], options=options)[0][0], {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        results = self.lanes.step(np.array([action]))
        return *(each[0] for each in results[:4]), {}


def any_setting(rng: random.Random, over: str | None = None, n_threads: int = 0) -> Setting:
    """Draw the arguments of ``ScriptedEnv``, ``ScriptedAgent`` and ``EpisodeBatcher``.

    Args:
        rng: Source of randomness.
        over: Kind of lanes, by default in this process. ``"gym"``, ``"lagging"`` ones with
            ``min_ready``, ``"manager"``; vector environments ``"array"`` and ``"together"`` (whose
            lanes are reset together) with an autoreset ``mode``.
        n_threads: Number of workers.
    """
    over = over or rng.choice(["gym"] * 4 + ["lagging", "array", "together"])
    together = over == "together"
    mode = rng.choice(MODES[: 2 + (not together)])
    n_lanes = rng.randint(1, 5)
    history = over != "lagging" and rng.random() < 0.25
    n_slots = rng.choice([rng.randint(1, 9), rng.randint(1, 9), 40])
    if together:  # all lanes need one
        n_slots = max(n_slots, n_lanes * max(1, n_threads))
    spoils = rng.random() < 0.4
    # A failing step returns the previous values, which such an agent has overwritten.
    can_truncate = over in CAN_FAIL and not history
    return Setting(
        observes=rng.choice(list(OBSERVED)),
        acts=rng.choice(list(ACTED)),
        infos=rng.choice(["none", "none", *INFOS]),
        reuses=rng.random() < 0.3,
        keep_float64=rng.random() < 0.3,
        limit=rng.choice([None, None, 1, 4]),
        n_noise=rng.choice([0, 1, 3]),
        keeps=rng.choice(["nothing", "state", "initial"]),
        history=history,
        spoils=spoils,
        agent_reuses=rng.random() < 0.3,
        over=over,
        mode=mode,
        restarts=rng.random() < 0.5,  # lanes of windows, on their own
        min_ready=rng.randint(1, 3) if over in ("lagging", "manager") else None,
        n_lanes=n_lanes,
        n_timesteps=rng.randint(1, 8),
        n_slots=n_slots,
        n_threads=n_threads,
        seeds=rng.randrange(2**40),
        agent_rows=rng.choice([None, None, rng.randint(1, 7)]),
        truncates=can_truncate and rng.random() < 0.4,  # episodes whose environment raises
    )
