"""Episodes of a list of environments, each in a worker process of its own: ``Pool.store()``.

A ``Batcher`` of one lane per worker runs them, window by window until all have ended. What is here
gives each worker its environment, and an agent that asks the pool's policy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from rlpool.batch.window_batcher import Batcher
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import DEFAULT_OBSERVATION_KEY
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.info_keys import InfoKeys, info_specs
from rlpool.envs.one_env import ACTION_KEY, STATE_KEY
from rlpool.envs.single_envs import refuse_no_environment
from rlpool.errors import (
    AgentError,
    RlpoolError,
    SpecError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from rlpool.machine.arguments import checked_timeout
from rlpool.machine.limits import WORKER_DESCRIPTORS, refuse_too_many_workers
from rlpool.pool.episode_worker import Policy, WorkerFactory
from rlpool.pool.schema import recognised_frame_stack
from rlpool.pool.transition import DONE_KEY, REWARD_KEY, TERMINATED_KEY, refuse_taken
from rlpool.record.failures import THE_AGENT
from rlpool.seeding import LaneSeeds, root_from
from rlpool.workers.process_start import memory_of
from rlpool.workers.sharing import Parcel, pickled

_LOG = logging.getLogger("rlpool")
_HOW_TO_PICKLE = (
    "make it in the first reset() or call, which runs in the process, or leave it out in "
    "__getstate__"
)
_WINDOW_STEPS = 128  # a round trip costs as much as many steps
# What is stored of a window, in order: first part of its key, name in the pool, prefix of the names
# where there are several. The last action after a step is that step's, whoever chose it.
_STORED = (
    (STATE_KEY, DEFAULT_OBSERVATION_KEY, ""),
    (f"_last_{ACTION_KEY}", ACTION_KEY, f"{ACTION_KEY}/"),
    (f"_{STATE_KEY}", f"_{DEFAULT_OBSERVATION_KEY}", "_"),
    *((key, key, "") for key in (REWARD_KEY, DONE_KEY, TERMINATED_KEY)),
)


def infos_of_steps(names: Iterable[str], info_keys: Any) -> dict[str, Any]:
    """Keys of the infos of steps among those that a pool keeps, with what declares each."""
    declared = info_keys if isinstance(info_keys, Mapping) else {}
    of_rows = ("agent_info", "env_info")
    return {
        name: declared.get(name, np.float32) for name in names if name.split("/")[0] not in of_rows
    }


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
        info_keys: Keys of the environments' ``info`` that become keys of a step, see ``GymEnv``.

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
        info_keys: InfoKeys,
    ) -> None:
        if policy is not None and not callable(policy):
            raise SpecError(f"policy is {policy!r}", fix="pass a function from state to action")
        self.closed = False
        self._info_keys = info_specs(info_keys, keep_float64=True)
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
            every = dict(enumerate(envs))
            self._start(WorkerFactory(every, policy, seeds, self._root, self._info_keys))
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
        names = _names_in_pool(window, self._info_keys)
        flat = window.get(list(names)).flatten()
        steps = DictTensor({name: flat[key] for key, name in names.items()})
        lengths = window.lengths.tolist()
        for lane, length, stop in zip(lanes, lengths, accumulate(lengths), strict=True):
            parts[lane].append(steps.slice(stop - length, stop))
        return [lane for lane in lanes if not parts[lane][-1][DONE_KEY][-1]]

    def _start(self, factory: WorkerFactory) -> None:
        """Start a worker per environment."""
        every = list(factory.envs)
        memory, advice = memory_of(self._start_method), "put fewer environments into the pool"
        refuse_too_many_workers(len(every), WORKER_DESCRIPTORS, advice, memory)
        try:
            self._batchers = [(self._make_batcher(factory), every)]
        except SpecError as error:
            if isinstance(error, WorkerError) or len(every) == 1:
                raise
            # All workers of a batcher have to agree about dtypes, and these do not.
            for number, env in factory.envs.items():
                alone = replace(factory, envs={number: env})
                self._batchers.append((self._make_batcher(alone), [number]))

    def _make_batcher(self, factory: WorkerFactory) -> Batcher:
        return Batcher(
            _WINDOW_STEPS,
            create_agent=factory.create_agent,
            create_env=factory.create_env,
            n_workers=len(factory.envs),
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


def _names_in_pool(window: TemporalDictTensor, info_keys: Iterable[str]) -> dict[str, str]:
    """What a pool calls the keys of a window that it stores, in its order."""
    names: dict[str, str] = {}
    for start, name, prefix in _STORED:
        for key in window:
            first, _, part = key.partition("/")
            if first == start:
                names[key] = prefix + part if part else name
    for key in info_keys:
        names |= {name: name for name in (key, f"_{key}") if name in window}
    refuse_taken([names[key] for key in names if key.split("/")[0] == STATE_KEY], "state")
    return names


def _in_words_of_the_pool(error: WorkerError) -> WorkerError:
    """An error of the workers, without the names of functions that the user never wrote."""
    where, what, fix = error.where._replace(env_info=None), error.what, error.own_fix
    is_policy = isinstance(error, AgentError)
    if is_policy:
        what = f"policy{what.removeprefix(THE_AGENT)}"
    if error.hint and not fix:
        who = "the policy" if is_policy else "reset() and step()"
        fix = f"call {who} of environment {where.worker} in this process to debug"
    return error.reworded(what=what, where=where, fix=fix, hint="")


def _check_environments(envs: Any, processes: int) -> None:
    """Refuse anything but a list of ``processes`` environments."""
    if not isinstance(envs, Sequence) or isinstance(envs, str) or not envs:
        raise SpecError(f"env is {envs!r}", fix="pass a list of one environment per process")
    if len(envs) != processes:
        raise SpecError(
            f"env has {len(envs)} environments, n_workers is {processes}",
            fix="pass one environment per process",
        )
    for number, env in enumerate(envs):
        fix = "pass an object with reset() and step(), such as gymnasium.make(...) returns"
        refuse_no_environment(f"environment {number} is", env, fix)
