"""Episodes of a list of environments, each in a worker process of its own: ``Pool.store()``.

A ``Batcher`` of one lane per worker runs them, window by window until all have ended. What is here
gives each worker its environment, and an agent that asks the pool's policy.
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from gymnasium.utils import seeding

from rlpool.agents.agent import Agent, AgentStep
from rlpool.batch.window_batcher import Batcher
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.columns import Columns
from rlpool.envs.gym_env import refuse_no_environment
from rlpool.envs.one_env import ACTION_KEY, STATE_KEY, OneEnv
from rlpool.errors import (
    AgentError,
    RlpoolError,
    SpecError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from rlpool.machine.arguments import checked_timeout
from rlpool.memory.sharing import Parcel, pickled
from rlpool.pool.ingest import DONE_KEY, REWARD_KEY, TERMINATED_KEY, refuse_taken
from rlpool.pool.schema import recognised_frame_stack
from rlpool.record.failures import MISSES_OPTIONS
from rlpool.seeding import LaneSeeds, root_from, worker_seed
from rlpool.specs import (
    DEFAULT_OBSERVATION_KEY,
    structure_of_space,
    structure_of_value,
)

_LOG = logging.getLogger("rlpool")
_HOW_TO_PICKLE = (
    "make it in the first reset() or call, which runs in the process, or leave it out in "
    "__getstate__"
)
_TOO_MANY = "lower n_threads"  # the advice of a batcher for more workers than the machine takes
_WINDOW_STEPS = 128  # a round trip costs as much as many steps
# What is stored of a window, in order: first part of its key, name in the pool, prefix of the names
# where there are several. The last action after a step is that step's, whoever chose it.
_STORED = (
    (STATE_KEY, DEFAULT_OBSERVATION_KEY, ""),
    (f"_last_{ACTION_KEY}", ACTION_KEY, f"{ACTION_KEY}/"),
    (f"_{STATE_KEY}", f"_{DEFAULT_OBSERVATION_KEY}", "_"),
    *((key, key, "") for key in (REWARD_KEY, DONE_KEY, TERMINATED_KEY)),
)

Policy = Callable[[Any], Any]
"""State to action, both as the environment hands them out and takes them."""


class EpisodeRunner:
    """Runs one episode per environment, all at the same time, as often as needed.

    Environment p always runs in process p, which is started by the first ``run`` and keeps the
    environment, with whatever it remembers, until ``close``. If an environment of the list was
    changed or replaced since it was sent there, the next run starts with the new ones.

    The noise of an episode derives from ``seed``, the number of the run and that of the process:
    it is handed to environments that take seeds, and seeds the action space and the process's
    ``random``, NumPy and torch generators. With the same seed, the same sequence of runs gives
    the same data.

    Args:
        envs: One environment per process, of either protocol (see ``rlpool.envs.one_env``).
        processes: The number of environments.
        seed: A non-negative int; ``None`` draws one and logs it.
        policy: Called in the workers with a state for an action, for Gymnasium environments;
            ``None`` samples their action spaces. It may change between runs.
        timeout: Seconds without a step after which a process counts as hanging, ``None`` for
            never.
        start_method: How processes are started, as for ``Batcher``.

    Attributes:
        closed: Whether ``close`` was called.
        n_runs: Runs that are over, to be counted once their steps are stored.
        frame_stack: Frames that Gymnasium's wrapper stacks in all environments, ``None`` if it is
            around none.

    Raises:
        SpecError: For another number of environments, and for objects that are none.
        WorkerStartupError: If an environment or the policy cannot be pickled.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        processes: int,
        seed: int | None,
        policy: Policy | None,
        timeout: float | None,
        start_method: str,
    ) -> None:
        if policy is not None and not callable(policy):
            raise SpecError(f"policy is {policy!r}", fix="pass a function from state to action")
        self.closed = False
        self._envs, self._n_processes, self._policy = envs, processes, policy
        self._timeout, self._start_method = checked_timeout(timeout), start_method
        self._root, self.n_runs = root_from(seed), 0
        if seed is None:
            _LOG.info("drew the root seed %d", self._root)
        # One batcher for all environments, or one for each; with the numbers of the environments.
        self._batchers: list[tuple[Batcher, list[int]]] = []
        self._has_worked = False  # the workers have completed a run
        self._sent: tuple[list[Parcel], Parcel | None] = ([], None)
        self._pickled()  # refused now rather than by the first run
        self.frame_stack = recognised_frame_stack(envs)

    def run(self) -> tuple[DictTensor, list[int]]:
        """Run one episode in every environment and wait for all of them.

        Returns:
            Their steps ``[n, ...]``, environment by environment, and how many each made: the state
            (``frame``, or its parts by name), ``action``, the next state, ``_reward``, ``_done``
            and ``_terminated``. Where dtypes differ, they are what holds the values of all.

        Raises:
            EnvError, AgentError: If an environment or the policy fails. The others' episodes of
                this run are dropped, and the next run starts new episodes everywhere.
            SpecError: If environments disagree about the shapes of states or actions.
            WorkerStartupError: If an environment or the policy cannot be pickled or loaded.
            WorkerDiedError, WorkerTimeoutError: If a process dies or hangs. The next run starts
                new ones, with the environments as they are here.
        """
        try:
            return self._run(self.n_runs)
        except BaseException as error:
            self.n_runs += isinstance(error, RlpoolError)  # one that was interrupted is run again
            if not self._has_worked or isinstance(error, WorkerDiedError | WorkerTimeoutError):
                self._stop()
            if isinstance(error, WorkerError):
                reworded = _in_words_of_the_pool(error)
                raise reworded from reworded.__cause__
            if isinstance(error, SpecError):
                what = str(error).replace(_TOO_MANY, "put fewer environments into the pool")
                raise SpecError(what) from error
            raise

    def state_dict(self) -> dict[str, int]:
        """What the noise of further runs derives from: ``root`` and ``n_runs``."""
        return {"root": self._root, "n_runs": self.n_runs}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where another runner was; the workers start anew.

        Args:
            state: What its ``state_dict`` returned. What environments remember is not in it.
        """
        self._stop()
        self._root, self.n_runs = state["root"], state["n_runs"]

    def stacks(self) -> str:
        """What the workers are doing; empty before they are started."""
        return "".join(batcher.dump_stacks(None) for batcher, _ in self._batchers)

    def close(self) -> None:
        """End the workers within a few seconds, whatever they are doing. May be repeated."""
        self.closed = True
        self._stop()

    # Workers --------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._has_worked, self._sent = False, ([], None)
        for batcher, _ in self._batchers:
            batcher.close()
        self._batchers = []

    def _pickled(self) -> tuple[list[Parcel], Parcel]:
        """The environments and the policy."""
        _check_environments(self._envs, self._n_processes)
        envs = [
            pickled({f"env[{number}]": env}, env, fix=_HOW_TO_PICKLE, what=f"environment {number}")
            for number, env in enumerate(self._envs)
        ]
        return envs, pickled({"policy": self._policy}, self._policy, fix=_HOW_TO_PICKLE)

    def _run(self, number: int) -> tuple[DictTensor, list[int]]:
        """The steps of one episode of every environment, put together from windows."""
        envs, policy = self._pickled()
        is_new = policy != self._sent[1]
        if envs != self._sent[0] or (is_new and policy.shared.has_descriptors):
            self._stop()
        elif is_new:
            for batcher, _ in self._batchers:
                batcher.update(policy.data)
        self._sent = envs, policy
        lane_seeds = LaneSeeds(self._root, number)
        seeds = [lane_seeds.seed(process, 0) for process in range(len(envs))]
        if not self._batchers:
            self._start(WorkerFactory(envs, policy, seeds, self._root))
        for batcher, processes in self._batchers:
            batcher.reset(env_info={"seed": [seeds[process] for process in processes]})
        parts: list[list[DictTensor]] = [[] for _ in seeds]
        running = self._batchers
        while running:
            for batcher, _ in running:
                batcher.execute()
            left = [(each[0], self._add_window(*each, parts)) for each in running]
            running = [(batcher, lanes) for batcher, lanes in left if lanes]
        self._has_worked = True
        return _joined(parts)

    def _add_window(
        self, batcher: Batcher, lanes: list[int], parts: list[list[DictTensor]]
    ) -> list[int]:
        """Add the next window to the parts of episodes; returns the lanes that have not ended."""
        try:
            window: Any = batcher.get()
        except WorkerError as error:
            if len(self._batchers) > 1:
                error.where = error.where._replace(worker=lanes[0])
            raise
        names = _names_in_pool(window)
        flat = window.get(list(names)).flatten()
        steps = DictTensor({name: flat[key] for key, name in names.items()})
        lengths = window.lengths.tolist()
        for lane, length, stop in zip(lanes, lengths, accumulate(lengths), strict=True):
            parts[lane].append(steps.slice(stop - length, stop))
        return [lane for lane in lanes if not parts[lane][-1][DONE_KEY][-1]]

    def _start(self, factory: WorkerFactory) -> None:
        """Start a worker per environment."""
        every = list(range(len(factory.envs)))
        try:
            self._batchers = [(self._make_batcher(factory), every)]
        except SpecError as error:
            is_about_values = not isinstance(error, WorkerError) and _TOO_MANY not in str(error)
            if not is_about_values or len(every) == 1:
                raise
            # All workers of a batcher have to agree about dtypes, and these do not.
            for process, env in enumerate(factory.envs):
                alone = replace(factory, envs=[env], seeds=[factory.seeds[process]])
                self._batchers.append((self._make_batcher(alone), [process]))

    def _make_batcher(self, factory: WorkerFactory) -> Batcher:
        return Batcher(
            _WINDOW_STEPS,
            create_agent=factory.create_agent,
            create_env=factory.create_env,
            n_threads=len(factory.envs),
            seeds=self._root,
            timeout=self._timeout,
            on_worker_failure="raise",
            start_method=self._start_method,
        )


def _joined(parts: list[list[DictTensor]]) -> tuple[DictTensor, list[int]]:
    """Episodes one after the other, in dtypes that hold the values of all, and their lengths.

    Raises:
        SpecError: If their keys or shapes differ, naming environments and shapes.
    """
    shapes = [{key: list(t.shape[1:]) for key, t in episode[0].items()} for episode in parts]
    for process, each in enumerate(shapes):
        if each != shapes[0]:
            raise SpecError(
                f"environment 0 has {shapes[0]}; environment {process} has {each}",
                fix="put only environments with states and actions of equal shapes into a pool",
            )
    every = [part for episode in parts for part in episode]
    arrays = {key: np.concatenate([part[key].numpy() for part in every]) for key in shapes[0]}
    lengths = [sum(part.n_elems() for part in episode) for episode in parts]
    return DictTensor({key: torch.from_numpy(array) for key, array in arrays.items()}), lengths


def _names_in_pool(window: TemporalDictTensor) -> dict[str, str]:
    """What a pool calls the keys of a window that it stores, in its order."""
    names: dict[str, str] = {}
    for start, name, prefix in _STORED:
        for key in window:
            first, _, part = key.partition("/")
            if first == start:
                names[key] = prefix + part if part else name
    refuse_taken([names[key] for key in names if key.split("/")[0] == STATE_KEY], "state")
    return names


def _in_words_of_the_pool(error: WorkerError) -> WorkerError:
    """An error of the workers, without the names of functions that the user never wrote."""
    error.where = error.where._replace(env_info=None)
    process, what, fix = error.where.worker, error.what, error.fix
    names = {"create_env": f"loading environment {process}", "create_agent": "loading policy"}
    if isinstance(error, AgentError):
        names |= {"the agent": "policy", "agent.update": "loading policy"}
    for name, meaning in names.items():
        what = what.replace(name, meaning, 1)
    if "env_info" in fix or ("env.reset" in what and MISSES_OPTIONS.search(what)):
        fix = "let its reset() do without options: a pool passes none"
    elif "n_threads=0" in fix:
        who = "the policy" if isinstance(error, AgentError) else "reset() and step()"
        fix = f"call {who} of environment {process} in this process to debug"
    return error.reworded(what=what, fix=fix, hint="")


def _check_environments(envs: Any, processes: int) -> None:
    """Refuse anything but a list of ``processes`` environments."""
    if not isinstance(envs, Sequence) or isinstance(envs, str) or not envs:
        raise SpecError(f"env is {envs!r}", fix="pass a list of one environment per process")
    if len(envs) != processes:
        raise SpecError(
            f"env has {len(envs)} environments, processes is {processes}",
            fix="pass one environment per process",
        )
    for number, env in enumerate(envs):
        fix = "pass an object with reset() and step(), such as gymnasium.make(...) returns"
        refuse_no_environment(f"environment {number} is", env, fix)


# In the workers -----------------------------------------------------------------------------------


@dataclass
class WorkerFactory:
    """Makes the environment and the agent of a worker from pickles that all workers get.

    Attributes:
        envs: The environments, pickled.
        policy: The policy or ``None``, pickled.
        seeds: Seeds of their first episodes.
        root: The root seed, from which follows the seed that each worker gets.
    """

    envs: list[Parcel]
    policy: Parcel
    seeds: list[int]
    root: int

    def create_env(self, seed: int) -> OneEnv:
        """The environment of the worker that is created with a seed."""
        _derive_entropy_from_process()
        root = root_from(self.root)
        process = [worker_seed(root, worker) for worker in range(len(self.envs))].index(seed)
        env = self.envs[process].load()
        self._env = OneEnv(env, self.seeds[process], owns_process=True)
        return self._env

    def create_agent(self) -> ActionChooser:
        """The agent of that environment."""
        return ActionChooser(self._env, self.policy.load())


class ActionChooser(Agent):
    """Actions for one environment: of the policy, random ones, or those that it takes itself.

    Args:
        env: The environment, which the agent asks what its actions look like.
        policy: Called with one state for one action; ``None`` samples the action space.
    """

    def __init__(self, env: OneEnv, policy: Policy | None) -> None:
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
            # The environment follows its own actions, whatever it is given.
            leaves = self._env.action_leaves or {}
            actions = {key: observation[f"last_{key}"] for key in leaves}
        elif self._env.is_fresh and self._first is not None:
            actions = self._first  # the loop asks twice: before the episode, too
        else:
            actions = self._chosen(observation)
            self._first = actions if self._env.is_fresh else None
        return DictTensor(), DictTensor(actions), DictTensor()

    def update(self, info: bytes) -> None:
        """Take over another policy.

        Args:
            info: The policy or ``None``, pickled.
        """
        self._policy = pickle.loads(info)
        self._first = None

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
                structure = structure_of_value(action, keep_float64=True, name=ACTION_KEY)
            else:
                structure = structure_of_space(space, keep_float64=True, name="action_space")
            self._columns = Columns({ACTION_KEY: structure}, "", 1, widens=True)
        try:
            self._columns.write((0,), ({ACTION_KEY: action},))
        except ValueError as error:
            raise SpecError(
                f"'action' should fit {space}, got {action!r} ({error})",
                fix="return actions of the action space's shape and kind",
            ) from error
        return {key: torch.from_numpy(array.copy()) for key, array in self._columns.arrays.items()}


def _derive_entropy_from_process() -> None:
    """Let Gymnasium's generators that nobody seeds be seeded by ``random``, which is.

    Environments that choose their own actions often wrap one of Gymnasium's, and reset it and
    sample its actions without a seed.
    """
    original = seeding.np_random

    def np_random(seed: int | None = None) -> tuple[np.random.Generator, int]:
        return original(random.getrandbits(31) if seed is None else seed)

    seeding.np_random = np_random
