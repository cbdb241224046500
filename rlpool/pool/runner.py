"""Episodes of a list of environments, each in a worker process of its own: ``Pool.store()``.

A ``Batcher`` of one lane per worker runs them, window by window until all have ended. What is here
gives each worker its environment, and an agent that asks the pool's policy.
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from gymnasium.utils import seeding

from rlpool.agents.agent import Agent, AgentStep
from rlpool.batch.batcher import Batcher
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.columns import Columns
from rlpool.envs.one_env import ACTION_KEY, STATE_KEY, OneEnv
from rlpool.envs.vec_env import Options
from rlpool.errors import AgentError, SpecError, WorkerDiedError, WorkerError, WorkerTimeoutError
from rlpool.machine.arguments import check_timeout
from rlpool.machine.pickling import pickled
from rlpool.pool.ingest import DONE_KEY, REWARD_KEY, TERMINATED_KEY, refuse_taken
from rlpool.record.failures import MISSES_OPTIONS
from rlpool.seeding import LaneSeeds, root_from, worker_seed
from rlpool.specs import (
    DEFAULT_OBSERVATION_KEY,
    TensorSpec,
    structure_of_space,
    structure_of_value,
    with_dtypes,
)

_LOG = logging.getLogger("rlpool")
_HOW_TO_PICKLE = (
    "make it in the first reset() or call, which runs in the process, or leave it out in "
    "__getstate__"
)
_WINDOW_STEPS = 128  # a round trip costs as much as many steps

Policy = Callable[[Any], Any]
"""State to action, both as the environment hands them out and takes them."""


class EpisodeRunner:
    """Runs one episode in every environment, all at the same time, as often as it is asked to.

    Environment p always runs in process p, which is started by the first ``run`` and keeps the
    environment, with whatever it remembers, until ``close``. If an environment of the list was
    changed or replaced since it was sent there, the next run starts with the new ones.

    The noise of an episode derives from ``seed``, the number of the run and that of the process:
    it is handed to environments that take seeds, and seeds the action space and the process's
    ``random``, NumPy and torch generators. With the same seed, the same sequence of runs gives
    the same data.

    Args:
        envs: One environment per process, of either protocol (see ``rlpool.envs.one_env``).
        processes: How many there have to be.
        seed: A non-negative int; ``None`` draws one and logs it.
        policy: Called in the workers with a state for an action, for Gymnasium environments;
            ``None`` samples their action spaces. It may change between runs.
        timeout: Seconds without a step after which a process counts as hanging, ``None`` for
            never.
        start_method: How processes are started, as for ``Batcher``.

    Attributes:
        closed: Whether ``close`` was called.

    Raises:
        SpecError: For environments that are none, or another number of them.
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
        check_timeout(timeout)
        self.closed = False
        self._envs, self._n_processes, self._policy = envs, processes, policy
        self._timeout, self._start_method = timeout, start_method
        self._root, self._n_runs = root_from(seed), 0
        if seed is None:
            _LOG.info("drew the root seed %d", self._root)
        self._batcher: Batcher | None = None
        self._has_worked = False  # the workers have completed a run
        self._sent: tuple[list[bytes], bytes] = ([], b"")
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._pickled()  # refused now rather than by the first run

    def run(self) -> list[DictTensor]:
        """Run one episode in every environment and wait for all of them.

        Returns:
            The steps of each episode ``[n, ...]``, with the keys of a pool: ``frame`` or those of
            the state's parts, ``action``, ``_reward``, ``_done``, ``_terminated``.

        Raises:
            EnvError, AgentError: If an environment or the policy fails. The others' episodes of
                this run are dropped, and the next run starts new episodes everywhere.
            SpecError: If environments disagree about the shapes of states or actions.
            WorkerStartupError: If an environment or the policy cannot be pickled or loaded.
            WorkerDiedError, WorkerTimeoutError: If a process dies or hangs. The next run starts
                new ones, with the environments as they are here.
        """
        number, self._n_runs = self._n_runs, self._n_runs + 1
        try:
            return self._run(number)
        except BaseException as error:
            if not self._has_worked or isinstance(error, WorkerDiedError | WorkerTimeoutError):
                self._stop()
            if isinstance(error, WorkerError):
                reworded = _in_words_of_the_pool(error)
                raise reworded from reworded.__cause__
            if isinstance(error, SpecError):
                what = str(error).replace("lower n_threads", "put fewer environments into the pool")
                raise SpecError(what) from error
            raise

    def state_dict(self) -> dict[str, int]:
        """What the noise of further runs derives from: ``root`` and ``n_runs``."""
        return {"root": self._root, "n_runs": self._n_runs}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another runner was; the workers start anew.

        Args:
            state: What its ``state_dict`` returned. What environments remember is not in it.
        """
        self._stop()
        self._root, self._n_runs = state["root"], state["n_runs"]

    def dump_stacks(self, file: Any) -> str:
        """What the workers are doing; empty before they are started."""
        return "" if self._batcher is None else self._batcher.dump_stacks(file)

    def close(self) -> None:
        """End the workers within a few seconds, whatever they are doing. May be repeated."""
        self.closed = True
        self._stop()

    # Workers --------------------------------------------------------------------------------

    def _stop(self) -> None:
        batcher, self._batcher = self._batcher, None
        self._has_worked = False
        if batcher is not None:
            batcher.close()

    def _pickled(self) -> tuple[list[bytes], bytes]:
        """The environments and the policy."""
        _check_environments(self._envs, self._n_processes)
        envs = [
            pickled({f"env[{number}]": env}, env, fix=_HOW_TO_PICKLE, what=f"environment {number}")
            for number, env in enumerate(self._envs)
        ]
        return envs, pickled({"policy": self._policy}, self._policy, fix=_HOW_TO_PICKLE)

    def _run(self, number: int) -> list[DictTensor]:
        envs, policy = self._pickled()
        if envs != self._sent[0]:
            self._stop()
            self._dtypes = {}
        elif self._batcher is not None and policy != self._sent[1]:
            self._batcher.update(policy)
        self._sent = envs, policy
        lane_seeds = LaneSeeds(self._root, number)
        seeds = [lane_seeds.seed(process, 0) for process in range(len(envs))]
        factory = WorkerFactory(envs, policy, seeds, self._root, self._dtypes)
        try:
            return self._episodes(factory)
        except SpecError as error:
            if isinstance(error, WorkerError) or self._dtypes or len(envs) == 1:
                raise
            # They disagree, and may share dtypes that hold the values of all.
            self._stop()
            self._dtypes = self._common_dtypes(factory)
            return self._episodes(replace(factory, dtypes=self._dtypes))

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

    def _episodes(self, factory: WorkerFactory) -> list[DictTensor]:
        """The steps of one episode of every environment, put together from windows."""
        if self._batcher is None:
            self._batcher = self._make_batcher(factory)
        self._batcher.reset(env_info={"seed": factory.seeds})
        parts: list[list[DictTensor]] = [[] for _ in factory.seeds]
        running = list(range(len(parts)))
        while running:
            window = _next_window(self._batcher)
            names = {key: name for key in window if (name := _name_in_pool(key))}
            refuse_taken([names[key] for key in names if key.split("/")[0] == STATE_KEY], "state")
            flat = window.get(list(names)).flatten()
            steps = DictTensor({name: flat[key] for key, name in names.items()})
            lengths = window.lengths.tolist()
            for lane, length, stop in zip(running, lengths, accumulate(lengths), strict=True):
                parts[lane].append(steps.slice(stop - length, stop))
            running = [lane for lane in running if not parts[lane][-1][DONE_KEY][-1]]
        self._has_worked = True
        return [DictTensor.cat(part) for part in parts]

    def _common_dtypes(self, factory: WorkerFactory) -> dict[str, np.dtype[Any]]:
        """Dtypes that hold the values of all environments, each of which makes steps for that.

        Raises:
            SpecError: If they disagree about more than dtypes, naming environments and shapes.
        """
        found: list[dict[str, TensorSpec]] = []
        for env, seed in zip(factory.envs, factory.seeds, strict=True):
            with self._make_batcher(replace(factory, envs=[env], seeds=[seed])) as batcher:
                batcher.reset(env_info={"seed": [seed]})
                window = _next_window(batcher)
            found.append(
                {
                    key.removeprefix("last_"): TensorSpec(tuple(t.shape[2:]), t.numpy().dtype)
                    for key, t in window.items()
                    if key.split("/")[0] in (STATE_KEY, f"last_{ACTION_KEY}")
                }
            )
        shapes = [{key: spec.shape for key, spec in specs.items()} for specs in found]
        texts = [", ".join(f"{key} {spec}" for key, spec in specs.items()) for specs in found]
        for process, text in enumerate(texts):
            if shapes[process] != shapes[0]:
                raise SpecError(
                    f"environment 0 has {texts[0]}; environment {process} has {text}",
                    fix="put only environments with states and actions of equal shapes into a pool",
                )
        return {key: np.result_type(*(specs[key].dtype for specs in found)) for key in found[0]}


def _next_window(batcher: Batcher) -> TemporalDictTensor:
    batcher.execute()
    window = batcher.get()
    if window is None:
        raise LookupError("an episode runs, and there is no window of it")
    return window


def _name_in_pool(key: str) -> str:
    """What a pool calls a key of a window, ``""`` if it has no use for it."""
    if key in (REWARD_KEY, DONE_KEY, TERMINATED_KEY):
        return key
    name, _, part = key.partition("/")
    if name == f"_last_{ACTION_KEY}":  # the action of the step, whoever chose it
        return f"{ACTION_KEY}/{part}" if part else ACTION_KEY
    if name.removeprefix("_") == STATE_KEY:
        return name.removesuffix(STATE_KEY) + (part or DEFAULT_OBSERVATION_KEY)
    return ""


def _in_words_of_the_pool(error: WorkerError) -> WorkerError:
    """An error of the workers, without the names of functions that the user never wrote."""
    error.where = error.where._replace(env_info=None)
    what, fix, is_policy = error.what, error.fix, isinstance(error, AgentError)
    what = what.replace("create_env", f"loading environment {error.where.worker}", 1)
    if is_policy:
        what = what.replace("the agent", "policy", 1).replace("agent.update", "loading policy", 1)
    what = what.replace("create_agent", "loading policy", 1)
    if "env_info" in fix or ("env.reset" in what and MISSES_OPTIONS.search(what)):
        fix = "let its reset() do without options: a pool passes none"
    elif "n_threads=0" in fix:
        who = "the policy" if is_policy else "reset() and step()"
        fix = f"call {who} of environment {error.where.worker} in this process to debug"
    return error.reworded(what=what, fix=fix)


def _check_environments(envs: Any, processes: int) -> None:
    """Refuse what is no list of environments, or one of another length than ``processes``."""
    if not isinstance(envs, Sequence) or isinstance(envs, str) or not envs:
        raise SpecError(f"env is {envs!r}", fix="pass a list of one environment per process")
    if len(envs) != processes:
        raise SpecError(
            f"env has {len(envs)} environments, processes is {processes}",
            fix="pass one environment per process",
        )
    for number, env in enumerate(envs):
        has_methods = all(callable(getattr(env, name, None)) for name in ("reset", "step"))
        if isinstance(env, type) or not has_methods:
            raise SpecError(
                f"environment {number} is {env!r}, not an object with reset() and step()",
                fix="pass what gymnasium.make(...) returns, for instance",
            )


# In the workers -----------------------------------------------------------------------------------


@dataclass
class WorkerFactory:
    """Makes the environment and the agent of a worker, out of what was pickled for all.

    Attributes:
        envs: The environments, pickled.
        policy: The policy or ``None``, pickled.
        seeds: Seeds of their first episodes.
        root: The root seed, from which follows the seed that each worker gets.
        dtypes: Key to dtype, where it is not the environment's own.
    """

    envs: list[bytes]
    policy: bytes
    seeds: list[int]
    root: int
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)

    def create_env(self, seed: int) -> OneEnv:
        """The environment of the worker that is created with a seed."""
        _derive_entropy_from_process()
        root = root_from(self.root)
        process = [worker_seed(root, worker) for worker in range(len(self.envs))].index(seed)
        env = pickle.loads(self.envs[process])
        self._env = PoolEnv(env, self.seeds[process], dtypes=self.dtypes, owns_process=True)
        return self._env

    def create_agent(self) -> ActionChooser:
        """The agent of that environment."""
        return ActionChooser(self._env, pickle.loads(self.policy), self.dtypes)


class PoolEnv(OneEnv):
    """An environment whose episodes have the seeds that the runner draws."""

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        given = [
            seed if row is None else row["seed"] for seed, row in zip(seeds, options, strict=True)
        ]
        super()._reset_lanes(lanes, given, options)


PoolEnv.__name__ = OneEnv.__name__  # by which crash capsules know how to make it


class ActionChooser(Agent):
    """Actions for one environment: of the policy, random ones, or those that it takes itself.

    Args:
        env: The environment, which the agent asks what its actions look like.
        policy: Called with one state for one action; ``None`` samples the action space.
        dtypes: Key to dtype, where actions shall be stored in another one than their own.
    """

    def __init__(
        self, env: OneEnv, policy: Policy | None, dtypes: Mapping[str, np.dtype[Any]] | None = None
    ) -> None:
        self._env = env
        self._policy = policy
        self._dtypes = dict(dtypes or {})
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
            # Whatever is said here, the environment does what it wants.
            leaves = self._env.action_leaves or {}
            actions = {key: observation[f"last_{key}"] for key in leaves}
        elif self._env.is_fresh and self._first is not None:
            actions = self._first  # asked for once, although the loop looks at the first one early
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
            structure = with_dtypes(structure, self._dtypes, ACTION_KEY)
            self._columns = Columns({ACTION_KEY: structure}, "", 1, widens=True)
        try:
            self._columns.write((0,), ({ACTION_KEY: action},))
        except ValueError as error:
            raise SpecError(
                f"{ACTION_KEY!r} should fit {space}, got {action!r} ({error})",
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
