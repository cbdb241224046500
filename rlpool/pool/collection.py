"""Episodes of a list of environments, each in a worker process of its own.

::

    caller                                     process p, for environment p
    run()
      window requests  ---- Coordinator --->   Rollout.run(WindowPlan) over OneEnv(environment p)
      rows of a window <--- shared memory --   step after step
      ... until every environment's episode has ended
    one ``Transitions`` per process

Workers, watching, errors and the step loop are those of the batchers; what is here decides what
each worker gets and puts the windows of an episode together. A worker has one lane, and a run
restarts all lanes: so it holds exactly one episode of each environment, however long.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from rlpool.batch.batcher_base import DEFAULT_TIMEOUT_S, check_count, check_timeout
from rlpool.batch.coordinator import Coordinator
from rlpool.batch.requests import WindowRequest, as_infos
from rlpool.batch.workforce import WorkersDisagree
from rlpool.envs.one_env import ACTION_KEY, STATE_KEY
from rlpool.errors import (
    AgentError,
    SpecError,
    UsageError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from rlpool.machine.worker_limits import WORKER_DESCRIPTORS, check_workers
from rlpool.ownership import ProcessOwner
from rlpool.pool.acting import Policy, Station
from rlpool.pool.environments import (
    check_environments,
    digest_of,
    pickled_environments,
    pickled_policy,
)
from rlpool.pool.transitions import EpisodeParts, Transitions, is_part
from rlpool.seeding import LaneSeeds, root_from
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.slots.preflight import checked
from rlpool.specs import TensorSpec
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.messages import Setup
from rlpool.workers.shipment import Shipment
from rlpool.workers.supervisor import refuse_during_import
from rlpool.workers.warm_start import memory_of

_LOG = logging.getLogger("rlpool")

_WINDOW_BYTES = 2**22  # per process: a few of them fit into any cache of pages
_SHORTEST_WINDOW, _LONGEST_WINDOW = 16, 1024  # steps: a round trip costs as much as a few steps


class EpisodeRunner(ProcessOwner):
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
        processes: How many there are, to be compared with ``envs``; ``None`` for as many.
        seed: A non-negative int; ``None`` draws one and logs it.
        policy: Called in the workers with a state for an action, for Gymnasium environments;
            ``None`` samples their action spaces. It may be replaced or change between runs.
        timeout: Seconds without a step after which a process counts as hanging, ``None`` for
            never.
        start_method: How processes are started, one of ``restarts.START_METHODS``.

    Attributes:
        envs: The list that was given.
        policy: The policy for the next run.
        n_runs: Runs so far, failed ones included.

    Raises:
        SpecError: For environments that are none, or another number of them.
        WorkerStartupError: If an environment or the policy cannot be pickled.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        processes: int | None = None,
        seed: int | None = None,
        policy: Policy | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        start_method: str = "auto",
    ) -> None:
        self._coordinator: Coordinator | None = None
        self._is_closed = False
        check_environments(envs, processes)
        if policy is not None and not callable(policy):
            raise SpecError(f"policy is {policy!r}", fix="pass a function from state to action")
        if seed is not None:
            check_count("seed", seed, 0)
        check_timeout(timeout)
        self.envs = envs
        self.policy = policy
        self.n_runs = 0
        self._n_processes = len(envs)
        self._timeout_s = timeout
        # An environment of a pool may remember anything from run to run: there is no way back to
        # where it was, so the next run starts with the environments of the caller.
        self._worker_policy = FailurePolicy(on_worker_failure="raise", start_method=start_method)
        self._root = root_from(seed)
        if seed is None:
            _LOG.info("drew the root seed %d", self._root)
        self._sent: list[bytes] = []  # digests of the environments that workers last got
        self._sent_policy = b""
        self._unstable: list[bool] = []  # environments whose pickles differ from time to time
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._owner_pid = os.getpid()
        pickled_environments(envs)  # refused now rather than by the first run
        pickled_policy(policy)

    def run(self) -> list[Transitions]:
        """Run one episode in every environment and wait for all of them.

        Returns:
            The episodes, by number of the process.

        Raises:
            EnvError: If an environment fails. The others' episodes of this run are dropped, and
                the next run starts new episodes everywhere.
            AgentError: If the policy fails; likewise.
            SpecError: If environments disagree about the shapes of states or actions.
            WorkerStartupError: If an environment or the policy cannot be pickled or loaded.
            WorkerDiedError, WorkerTimeoutError: If a process dies or hangs. The next run starts
                new ones, with the environments as they are here.
            UsageError: If the runner is closed, or the script lacks its ``__main__`` guard.
        """
        self._refuse_if_closed()
        number, self.n_runs = self.n_runs, self.n_runs + 1
        try:
            return self._run_agreeing(number)
        except WorkerError as error:
            if isinstance(error, WorkerDiedError | WorkerTimeoutError):
                self._stop()
            reworded = _in_words_of_the_pool(error)
            raise reworded from reworded.__cause__

    def state_dict(self) -> dict[str, int]:
        """What the noise of further runs derives from: ``root`` and ``n_runs``."""
        return {"root": self._root, "n_runs": self.n_runs}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another runner was; the workers start anew.

        Args:
            state: What its ``state_dict`` returned. What environments remember is not in it.
        """
        self._stop()
        self._root, self.n_runs = int(state["root"]), int(state["n_runs"])

    def stacks(self) -> str:
        """What the workers are doing; empty before they are started."""
        self._refuse_if_closed()
        return "" if self._coordinator is None else self._coordinator.stacks()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise UsageError("the runner is closed", fix="make a new one")

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def close(self) -> None:
        """End the workers within a few seconds, whatever they are doing. May be repeated."""
        self._is_closed = True
        self._stop()

    def _has_processes(self) -> bool:
        return getattr(self, "_coordinator", None) is not None

    # Workers --------------------------------------------------------------------------------

    def _run_agreeing(self, number: int) -> list[Transitions]:
        try:
            return self._run(number)
        except WorkersDisagree as error:
            specs = error.specs
        # Of one shape but several dtypes: start again with dtypes that hold them all.
        self._dtypes = _common_dtypes(specs)
        self._stop()
        return self._run(number)

    def _run(self, number: int) -> list[Transitions]:
        coordinator = self._started(number)
        try:
            return self._collected(coordinator, number)
        except BaseException:
            if not coordinator.is_closed:
                coordinator.drop_pending()
            raise

    def _started(self, number: int) -> Coordinator:
        """Workers that have today's environments, and get the policy if it is new."""
        if os.getpid() != self._owner_pid:  # a forked copy: the workers are not its own
            self._coordinator, self._owner_pid = None, os.getpid()
        check_environments(self.envs, self._n_processes)
        pickles, policy = pickled_environments(self.envs), pickled_policy(self.policy)
        digests = self._digests(pickles)
        policy_digest = digest_of(policy)
        coordinator, is_new_policy = self._coordinator, policy_digest != self._sent_policy
        # Before the first step that works, workers know no other policy than they started with.
        can_update = coordinator is not None and (coordinator.specs or not is_new_policy)
        if coordinator is not None and digests == self._sent and can_update:
            if is_new_policy:
                coordinator.update(policy)
                self._sent_policy = policy_digest
            return coordinator
        self._stop()
        refuse_during_import()
        again = pickled_environments(self.envs)
        self._unstable = [a != b for a, b in zip(pickles, again, strict=True)]
        digests = self._digests(pickles)
        if digests != self._sent:
            self._dtypes = {}
        self._sent, self._sent_policy = digests, policy_digest
        advice = "put fewer environments into the pool"
        memory = memory_of(self._worker_policy.start_method)
        check_workers(len(pickles), WORKER_DESCRIPTORS, advice, memory)
        setups = [self._setup(p, env, policy, number) for p, env in enumerate(pickles)]
        self._coordinator = Coordinator(
            setups,
            in_process=False,
            make_layout=_Windows(len(setups)),
            policy=self._worker_policy,
            timeout_s=self._timeout_s,
        )
        return self._coordinator

    def _digests(self, pickles: Sequence[bytes]) -> list[bytes]:
        """What tells whether environments are those that were sent."""
        digests = [digest_of(words) for words in pickles]
        for number, is_unstable in enumerate(self._unstable):
            if is_unstable:  # then only whether it is the same object
                digests[number] = id(self.envs[number]).to_bytes(8, "little")
        return digests

    def _setup(self, process: int, env: bytes, policy: bytes, number: int) -> Setup:
        first_seed = LaneSeeds(self._root, number).seed(process, 0)
        station = Station(process, env, policy, first_seed, self._dtypes)
        functions = cloudpickle.dumps((station.create_env, {}, station.create_agent, {}))
        return Setup(Shipment(functions), process, self._n_processes, self._root)

    def _stop(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.close()

    # Episodes -------------------------------------------------------------------------------

    def _collected(self, coordinator: Coordinator, number: int) -> list[Transitions]:
        """One episode of every lane, window by window."""
        episodes = [EpisodeParts() for _ in range(self._n_processes)]
        lanes, is_first = list(range(self._n_processes)), True
        while lanes:
            request = WindowRequest(
                coordinator.next_number(),
                lanes,
                as_infos(None, None, 0),
                coordinator.policy,
                n_lanes=1,
                n_resets=number,
                n_windows=0,  # environments of a pool never restart on their own
                is_first=is_first,
                root=self._root,
            )
            coordinator.submit(request)
            coordinator.wait(blocking=True)
            window = coordinator.hand_out()
            for row, lane in enumerate(lanes):
                episodes[lane].add(window, row, is_last=lane not in request.lanes_left)
            lanes, is_first = request.lanes_left, False
        return [episode.joined() for episode in episodes]


class _Windows:
    """Makes the layout of windows: one slot per process, of as many steps as are worth while.

    Args:
        n_processes: Number of processes.
    """

    def __init__(self, n_processes: int) -> None:
        self._n_processes = n_processes

    def __call__(self, specs: StepSpecs) -> Layout:
        step_bytes = sum(spec.n_bytes for spec in {**specs.succeeded, **specs.output}.values())
        n_timesteps = min(_LONGEST_WINDOW, max(_SHORTEST_WINDOW, _WINDOW_BYTES // step_bytes))
        return checked(Layout(specs, self._n_processes, n_timesteps, self._n_processes), ())


def _common_dtypes(specs: Sequence[StepSpecs]) -> dict[str, np.dtype[Any]]:
    """Dtypes that hold the values of all environments.

    Raises:
        SpecError: If they disagree about more than dtypes, naming environments and shapes.
    """
    dtypes: dict[str, np.dtype[Any]] = {}
    keys = [{**spec.observation, **spec.output} for spec in specs]
    for name in (STATE_KEY, ACTION_KEY):
        parts = [{k: s for k, s in each.items() if is_part(k, name)} for each in keys]
        for number, part in enumerate(parts):
            if _shapes(part) != _shapes(parts[0]):
                raise SpecError(
                    f"{name} of environment 0 is {_text_of(parts[0])}, "
                    f"that of environment {number} is {_text_of(part)}",
                    fix="put only environments with states and actions of equal shapes into "
                    "one pool",
                )
        for key in parts[0]:
            dtypes[key] = np.result_type(*(part[key].dtype for part in parts))
    return dtypes


def _shapes(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[int, ...]]:
    return {key: spec.shape for key, spec in specs.items()}


def _text_of(specs: Mapping[str, TensorSpec]) -> str:
    if len(specs) == 1:
        return str(next(iter(specs.values())))
    return ", ".join(f"{key} {spec}" for key, spec in specs.items())


def _in_words_of_the_pool(error: WorkerError) -> WorkerError:
    """An error of the workers, without the names of functions that the user never wrote."""
    worker = error.where.worker
    what, fix = error.what, error.fix
    if isinstance(error, AgentError):
        what = what.replace("the agent", "policy", 1).replace("agent.update", "loading policy", 1)
    if "n_threads=0" in fix:
        who = "the policy" if isinstance(error, AgentError) else "reset() and step()"
        fix = f"call {who} of environment {worker} in this process to debug"
    elif "env_info" in fix:
        fix = "let its reset() do without options: a pool passes none"
    return error.reworded(what=what, fix=fix)
