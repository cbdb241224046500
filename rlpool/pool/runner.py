"""Episodes of a list of environments, each in a separate worker process: ``Pool.store()``.

A ``Batcher`` with one lane per worker runs them window by window until all have ended. This module
gives each worker its environment, and an agent that calls the pool's policy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.utils import seeding

from rlpool.agents.agent import Agent, AgentStep
from rlpool.batch.window_batcher import Batcher
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import DEFAULT_OBSERVATION_KEY, structure_of_space, structure_of_value
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.columns import Columns
from rlpool.envs.one_env import ACTION_KEY, STATE_KEY, OneEnv
from rlpool.envs.single_envs import check_is_env
from rlpool.errors import SpecError, UsageError, Where
from rlpool.machine.arguments import checked_timeout
from rlpool.machine.platform import require_linux
from rlpool.pool.ingest import DONE_KEY, REWARD_KEY, TERMINATED_KEY, refuse_taken
from rlpool.seeding import LaneSeeds, root_from, worker_seed
from rlpool.workers.sharing import Parcel, pickled
from rlpool.workers.worker_process import called

_HOW_TO_PICKLE = (
    "make it in the first reset() or call, which runs in the process, or exclude it in __getstate__"
)
_WINDOW_STEPS = 128  # a round trip costs as much as many steps
# Stored keys of a window, in order: first part of the key, name in the pool, prefix of the names if
# there are several. The last action after a step is the action of that step.
_STORED = (
    (STATE_KEY, DEFAULT_OBSERVATION_KEY, ""),
    (f"_last_{ACTION_KEY}", ACTION_KEY, f"{ACTION_KEY}/"),
    (f"_{STATE_KEY}", f"_{DEFAULT_OBSERVATION_KEY}", "_"),
    *((key, key, "") for key in (REWARD_KEY, DONE_KEY, TERMINATED_KEY)),
)


class EpisodeRunner:
    """Runs one episode per environment, all in parallel, as often as needed.

    Environment p always runs in process p, which is started by the first ``run`` and keeps the
    environment and its state until ``close`` or an error.

    The seeds of an episode derive from ``seed``, the number of the run and that of the process.
    They seed environments that accept seeds, the action space, and the process's ``random``, NumPy
    and torch generators. With the same seed, the same sequence of runs gives the same data.

    Args:
        envs: One environment per process, of either protocol (see ``rlpool.envs.one_env``).
        processes: The number of environments.
        seed: A non-negative int; ``None`` draws one.
        policy: A function from state to action for Gymnasium environments, called in the workers;
            ``None`` samples their action spaces.
        timeout: Seconds without a step after which a process counts as hanging, ``None`` for
            never.
        start_method: Start method of the processes, as for ``Batcher``.

    Attributes:
        closed: Whether ``close`` was called.

    Raises:
        SpecError: For a wrong number of environments, and for objects that are not environments.
        WorkerStartupError: If an environment or the policy cannot be pickled.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        processes: int,
        seed: int | None,
        policy: Callable[[Any], Any] | None,
        timeout: float | None,
        start_method: str,
    ) -> None:
        require_linux("Pool(env)", "fill a pool without env from a batcher with n_workers=0")
        if policy is not None and not callable(policy):
            raise SpecError(f"policy is {policy!r}", fix="pass a function from state to action")
        _check_environments(envs, processes)
        self._timeout, self._start_method = checked_timeout(timeout), start_method
        self._root, self._n_runs, self.closed = root_from(seed), 0, False
        self._batcher: Batcher | None = None
        self._envs = [
            pickled({f"env[{number}]": env}, env, fix=_HOW_TO_PICKLE, label=f"environment {number}")
            for number, env in enumerate(envs)
        ]
        self._policy = pickled({"policy": policy}, policy, fix=_HOW_TO_PICKLE)

    def run(self) -> list[DictTensor]:
        """Run one episode in every environment and wait for all of them.

        Returns:
            The steps ``[n, ...]`` of each: the state (``frame``, or its parts by name), ``action``,
            the next state, ``_reward``, ``_done`` and ``_terminated``.

        Raises:
            EnvError, AgentError: If an environment or the policy fails.
            SpecError: If the states or actions of environments differ in structure.
            WorkerStartupError: If an environment or the policy cannot be loaded.
            WorkerDiedError, WorkerTimeoutError: If a process dies or hangs.
        """
        # A run that fails or is interrupted drops its episodes and ends the processes.
        number, self._n_runs = self._n_runs, self._n_runs + 1
        try:
            return self._run(LaneSeeds(self._root, number))
        except UsageError:  # raised while another thread runs, which continues
            raise
        except BaseException:
            self._stop()
            raise

    def state_dict(self) -> dict[str, int]:
        """Return the root of the seeds, and the number of runs: ``root`` and ``n_runs``."""
        return {"root": self._root, "n_runs": self._n_runs}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the state of another runner, with new workers.

        Args:
            state: Its ``state_dict``, which does not contain the state of environments.
        """
        self._stop()
        self._root, self._n_runs = int(state["root"]), int(state["n_runs"])

    def close(self) -> None:
        """End the workers within a few seconds, even if they are busy; repeatable."""
        self.closed = True
        self._stop()

    def _stop(self) -> None:
        if self._batcher is not None:
            self._batcher.close()
        self._batcher = None

    def _run(self, lane_seeds: LaneSeeds) -> list[DictTensor]:
        """Join the steps of one episode of every environment from windows."""
        seeds = [lane_seeds.seed(process, 0) for process in range(len(self._envs))]
        batcher = self._batcher = self._batcher or self._started(seeds)
        batcher.reset(env_info={"seed": seeds})
        parts: list[list[DictTensor]] = [[] for _ in seeds]
        running = parts
        while running:
            batcher.execute()
            window: Any = batcher.get()
            named = {name: window[key] for key, name in _names_in_pool(window).items()}
            for episode, row in zip(
                running, TemporalDictTensor(named, window.lengths).unfold(), strict=True
            ):
                episode.append(row.flatten())
            running = [episode for episode in running if not episode[-1][DONE_KEY][-1]]
        return [DictTensor.cat(episode) for episode in parts]

    def _started(self, seeds: Sequence[int]) -> Batcher:
        """Start a batcher with a worker per environment."""
        factory = WorkerFactory(self._envs, self._policy, seeds, self._root)
        return Batcher(
            _WINDOW_STEPS,
            create_agent=factory.create_agent,
            create_env=factory.create_env,
            n_workers=len(self._envs),
            seeds=self._root,
            timeout=self._timeout,
            on_worker_failure="raise",
            start_method=self._start_method,
        )


def _names_in_pool(window: TemporalDictTensor) -> dict[str, str]:
    """Return a pool's names of the stored keys of a window, in the pool's order."""
    names: dict[str, str] = {}
    for start, name, prefix in _STORED:
        for key in window:
            first, _, part = key.partition("/")
            if first == start:
                names[key] = prefix + part if part else name
    refuse_taken([names[key] for key in names if key.split("/")[0] == STATE_KEY], "state")
    return names


def _check_environments(envs: Any, processes: int) -> None:
    """Refuse anything but a list of ``processes`` environments."""
    if not isinstance(envs, Sequence) or isinstance(envs, str) or len(envs) != processes:
        message = f"env should be a list of {processes} environments, got {envs!r:.60}"
        raise SpecError(message, fix="pass one environment per process (n_workers)")
    for number, env in enumerate(envs):
        fix = "pass an object with reset() and step(), such as gymnasium.make(...)"
        check_is_env(f"environment {number} is", env, fix)


# In the workers ----------------------------------------------------------------------------------


@dataclass
class WorkerFactory:
    """Makes the environment and the agent of a worker from pickles that are sent to all workers.

    Attributes:
        envs: The environments, pickled.
        policy: The policy or ``None``, pickled.
        seeds: Seeds of the first episodes of all environments of the pool.
        root: The root of the workers' seeds.
    """

    envs: Sequence[Parcel]
    policy: Parcel
    seeds: Sequence[int]
    root: int

    def create_env(self, seed: int) -> OneEnv:
        """Load the environment of the worker that is created with this seed."""
        _derive_entropy_from_process()
        root = root_from(self.root)
        number = [worker_seed(root, worker) for worker in range(len(self.envs))].index(seed)
        self._where = Where(worker=number)
        env: OneEnv = called(
            self._where,
            f"loading environment {number}",
            lambda: OneEnv(self.envs[number].load(), self.seeds[number]),
        )
        self._env = env
        return env

    def create_agent(self) -> ActionChooser:
        """Make the agent of that environment."""
        return ActionChooser(self._env, called(self._where, "loading policy", self.policy.load))


class ActionChooser(Agent):
    """Chooses the actions of one environment: the policy's, random ones, or the environment's own.

    Args:
        env: The environment, from which the agent reads the structure of actions.
        policy: A function from one state to one action; ``None`` samples the action space.
    """

    def __init__(self, env: OneEnv, policy: Callable[[Any], Any] | None) -> None:
        self._env = env
        self._policy = policy
        self._columns: Columns | None = None
        self._first: dict[str, torch.Tensor] | None = None

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        """Choose the action of the only row."""
        if self._env.chooses_actions:
            # The environment ignores this and chooses its own action.
            actions = {key: observation[f"last_{key}"] for key in self._env.action_leaves or ()}
        elif self._env.is_fresh and self._first is not None:
            actions = self._first  # the loop calls twice, also before the episode
        else:
            actions = self._chosen(observation)
            self._first = actions if self._env.is_fresh else None
        return DictTensor(), DictTensor(actions), DictTensor()

    def _chosen(self, observation: DictTensor) -> dict[str, torch.Tensor]:
        space = self._env.action_space
        if self._policy is not None:
            action = self._policy(self._env.state_of(dict(observation.items())))
        elif space is not None:
            action = space.sample()
        else:
            raise SpecError(
                "the environment has no action_space to sample from",
                fix="give it one, or pass policy=..., a function from state to action",
            )
        if self._columns is None:
            if space is None:
                structure = structure_of_value(action, name=ACTION_KEY)
            else:
                structure = structure_of_space(space, name="action_space")
            self._columns = Columns(structure, f"{ACTION_KEY}/", 1)
        try:
            self._columns.write((0,), (action,))
        except ValueError as error:
            fix = "return actions of the action space's shape and kind"
            raise SpecError(f"{error}, for {space}", fix=fix) from error
        return {key: torch.from_numpy(array.copy()) for key, array in self._columns.arrays.items()}


def _derive_entropy_from_process() -> None:
    """Seed Gymnasium's unseeded generators from ``random``, which is seeded.

    Environments that choose their own actions often wrap a Gymnasium environment, and reset it and
    sample its actions without a seed.
    """
    original = seeding.np_random

    def np_random(seed: int | None = None) -> tuple[np.random.Generator, int]:
        return original(random.getrandbits(31) if seed is None else seed)

    seeding.np_random = np_random
