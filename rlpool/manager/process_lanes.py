"""The lanes of a ``ParallelEnvManager``: steps and resets of environments in worker processes.

A step of all lanes is a number written for each worker and one back, all else lies in shared
memory, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import TensorSpec, leaves_of
from rlpool.data.storage import NDArray
from rlpool.envs.vec_env import Observed, Options, VecEnv
from rlpool.errors import EnvError, SpecError
from rlpool.machine.arguments import whole_number
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.manager.buffers import (
    action_specs,
    are_equal,
    hand_over,
    observation_specs,
    specs_of,
)
from rlpool.manager.env_workers import EnvWorkers
from rlpool.manager.messages import Report
from rlpool.manager.remotes import Remote, WorkerHandle
from rlpool.manager.stepper import Command, Kind, Stepper
from rlpool.observe.stats import Stats, StatsReader
from rlpool.workers.process_owner import ProcessOwner

_ALL = slice(None)


class ProcessLanes(ProcessOwner, VecEnv):
    """Environments in worker processes, see ``ParallelEnvManager``, which makes them."""

    shares_current = True  # with the workers
    _env_fns: Sequence[Callable[[], Any]]
    _options: Mapping[str, Any]  # of GymEnv

    def _use(self, workers: EnvWorkers) -> None:
        """Run over these workers, whose environments have to agree.

        Raises:
            SpecError: If they do not.
        """
        self._workers = workers
        self._one_thread = workers.one_thread
        try:
            self._agree()
        except BaseException:
            workers.close()
            raise
        self.num_envs = self.n_lanes
        workers.processes.control.name = type(self).__name__
        self._stats_reader = StatsReader(workers.processes.control)
        self.workers = [WorkerHandle(workers, w) for w in range(workers.n_workers)]
        self.remotes = [
            Remote(workers, self._stepper, lane, self.action_space) for lane in range(self.n_lanes)
        ]

    def _agree(self) -> None:
        """Adopt what the workers report, which must agree, and map the buffers."""
        workers = self._workers
        reports = [workers.reports[worker] for worker in range(workers.n_workers)]
        first = reports[0]
        shown = [report.declaration for report in reports if report.declaration is not None]
        declaration = shown[0] if shown else None
        for worker, report in enumerate(reports):
            mine, theirs = declaration, report.declaration or declaration
            for name, ours, others in (
                ("action_space", first.action, report.action),
                ("observation_space", mine and mine.observation, theirs and theirs.observation),
                ("the info", mine and mine.infos, theirs and theirs.infos),
            ):
                if ours != others:
                    raise SpecError(
                        f"{name} of environment {workers.lanes_of[worker][0]} is "
                        f"{_declared(report, name) or others}, that of environment 0 is "
                        f"{_declared(first, name) or ours}",
                        fix="put only environments with equal spaces and infos into one manager",
                    )
        self.observation_space, self.action_space = pickle.loads(first.spaces)
        self.n_tasks, self.horizon_bamdp, self.all_tasks = first.tasks
        self.is_declared = first.is_declared
        if first.action is not None:
            self._action_leaves = leaves_of({"action": first.action}, "")
        known = action_specs(first.native_action or {}, self.n_lanes)
        if declaration is not None:
            known |= observation_specs(self.declare(declaration).leaves, self.n_lanes)
        workers.begin(known, None if first.is_declared else declaration)
        buffers = self._buffers = workers.buffers
        self._stepper = Stepper(workers)
        self.place(buffers.observation, buffers.reward, buffers.flags)
        self._copied: dict[str, NDArray] = {}  # last actions that are kept elsewhere
        self._half_step: tuple[dict[str, NDArray], Any] | None = None  # of an interrupted ``step``
        self._is_in_step = False

    def _learn_observations(self, lane: int, seed: int, options: Options) -> None:
        """Learn from a reset what observations and infos are, since nothing declares it.

        Raises:
            LaneFailure: If its reset fails.
        """
        declaration = self.remotes[lane].describe(seed, options)
        with InterruptsHeld():
            columns = self.declare(declaration)
            specs = observation_specs(columns.leaves, self.n_lanes)
            self._workers.map("observations", specs, declaration)
            columns.place(self._buffers.observation)
            self.current.update(columns.arrays)

    # The lane contract ---------------------------------------------------------------------

    def report_failures(self) -> None:
        """See ``VecEnv``: then ``on_env_error`` ends no episodes here."""
        self._workers.reports_failures = True

    def announce_episodes(
        self, seeds: Sequence[int], env_info: Mapping[str, NDArray], first: int = 0
    ) -> None:
        """Announce the next episodes, so that the workers can begin them ahead of time."""
        self._workers.check_open()
        self._stepper.announce(seeds, env_info, first)

    def _action_arrays(self, specs: Mapping[str, TensorSpec]) -> dict[str, NDArray]:
        if not self._buffers.action:  # no action space: the agent's actions show what they are
            self._workers.map("actions", action_specs(specs, self.n_lanes))
        handed = self._buffers.action
        arrays = super()._action_arrays(specs)
        for key, array in handed.items():
            if key in specs and array.dtype == specs[key].dtype:
                array[...] = 0  # of steps made by hand before
                arrays[key] = array  # the last action is where it was handed over
        self._copied = {k: a for k, a in arrays.items() if a is not handed.get(k)}
        return arrays

    def reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        """Start an episode on some lanes, see ``VecEnv.reset_lanes``."""
        self._workers.check_open()
        self._stepper.refuse_bad_lanes(lanes)
        if not self._is_in_step:
            self._half_step = None
        self._stepper.settle(lanes)
        if self._columns is None:
            self._learn_observations(lanes[0], seeds[0], options[0])
        with InterruptsHeld():
            super().reset_lanes(lanes, seeds, options)
            if not self._is_in_step:  # which tells why the episodes ended that it lets restart
                self._workers.forget_failures(lanes)
        self._stepper.finish_command()

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        self._stepper.reset(lanes, seeds, options)

    def step_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> list[int]:
        """Step some lanes, those of all workers at the same time.

        If a signal handler raises in it, it may be called again with the same lanes and actions:
        the step is made once. Any other call waits for the step if it was begun.

        Args:
            lanes: Ascending lane numbers.
            actions: Action key to array ``[n_lanes, ...]``; only the rows of ``lanes`` are read.

        Returns:
            The lanes whose episode ended with this step.

        Raises:
            EnvError: If an environment raises or returns what does not fit; it is also a
                ``LaneError``. The lanes of that worker that took part need a reset, without which
                they are refused; all others have made their step.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
            UsageError: If the manager is closed.
        """
        self._workers.check_open()
        if type(lanes) is not list:
            lanes = list(lanes)
        stepper = self._stepper
        if not self._is_in_step:
            self._half_step = None
        command = stepper.command
        if command is None or not self._is_repeated("step", lanes, actions):
            command = self._begin("step", lanes, actions)
        done: list[int] = []
        if stepper.finish(command.workers):
            done = self.current["done"].nonzero()[0].tolist()
            if len(lanes) < self.n_lanes:
                done = sorted(set(done).intersection(lanes))
        if not self._is_in_step:
            stepper.command = None
        return done

    def step_some(
        self,
        min_ready: int = 1,
        lanes: Sequence[int] = (),
        actions: Mapping[str, NDArray] | None = None,
    ) -> list[int]:
        """Let some lanes step, and return whichever lanes are ready.

        Slow lanes do not hold up the others: a later call returns them::

            ready = list(range(manager.num_envs))
            while True:
                actions = policy(manager.current, ready)  # rows of stepping lanes are undefined
                ready = manager.step_some(4, ready, actions)

        With several environments per worker, the lanes of a worker that step are ready together,
        and a step of others of its lanes begins when they are.
        If a signal handler raises in it, it may be called again with the same arguments.

        Args:
            min_ready: How many of the stepping lanes to wait for, or all of them if they are fewer.
                0 does not wait.
            lanes: Ascending numbers of lanes to step, none of which is stepping.
            actions: Their actions as for ``step_lanes``.

        Returns:
            Lanes that have made their step, ascending; ``current["done"]`` says whose episode
            ended. No lane is returned twice for one step.

        Raises:
            EnvError: As for ``step_lanes``. The next call returns lanes of other workers.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
            UsageError: If one of the lanes is stepping, or the manager is closed.
        """
        stepper = self._stepper
        self._workers.check_open()
        whole_number("min_ready", min_ready, 0)
        self._half_step = None
        lanes = list(lanes)
        is_begun = self._is_repeated("some", lanes, actions or {})
        if lanes and not is_begun:
            self._begin("some", lanes, actions or {})
        elif not min_ready:
            stepper.look()
        ready, left = stepper.take_ready(min_ready)
        stepper.pending, stepper.command = left, None  # the last act, as in step()
        return ready

    def _is_repeated(self, kind: Kind, lanes: list[int], actions: Mapping[str, NDArray]) -> bool:
        """Whether an interrupted step is asked for again; any other command is given up."""
        step = self._stepper.command
        is_same = step is not None and (step.kind, step.lanes) == (kind, lanes)
        if is_same and are_equal(self._buffers.action, actions, lanes):
            return True
        self._stepper.drop_command()
        return False

    def _begin(self, kind: Kind, lanes: list[int], actions: Mapping[str, NDArray]) -> Command:
        """Let lanes that may step do so, with actions that are put where their workers look."""
        workers = self._stepper.workers_of(lanes)
        if self._workers.failures:
            self._workers.forget_failures(lanes)
        if not self._buffers.action:
            self.declare_actions(specs_of(actions))
        hand_over(actions, lanes, self._buffers.action, self._copied)
        if self._some_lane_is_initial:
            all_step = len(lanes) == self.n_lanes
            self._initial_state[_ALL if all_step else lanes] = False
            self._some_lane_is_initial = not all_step
        return self._stepper.issue(kind, lanes, workers)

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> Any:
        raise NotImplementedError  # step_lanes does all of it: results are in the buffers already

    # Life and end --------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or every environment was closed by its remote."""
        return self._workers.closed

    def reset(self, *arguments: Any, **named: Any) -> Any:
        """Reset all environments, see ``VecEnv.reset``; may be repeated after an interruption."""
        self._workers.check_open()
        number = self._n_resets
        try:
            return super().reset(*arguments, **named)
        except EnvError:
            raise
        except BaseException:
            self._n_resets = number  # so that the same seeds follow
            raise

    def step(self, policy_output: DictTensor) -> tuple[Observed, Observed]:
        """Step the running environments, see ``VecEnv.step``; may be repeated, too."""
        self._workers.check_open()
        self._is_in_step = True
        try:
            result, running = self._made_step(policy_output)
        except EnvError:
            self._half_step = None
            raise
        finally:
            self._is_in_step = False
        # Nothing is called from here on, so that no handler runs before the caller has it.
        self._running, self._half_step = running, None
        return result

    def _stepped(self, actions: dict[str, NDArray]) -> Any:
        half = self._half_step
        if half is None or not are_equal(half[0], actions, self._running):
            half = self._half_step = actions, super()._stepped(actions)
        self._stepper.command = None
        return half[1]

    def stats(self) -> Stats:
        """What the workers are doing, see ``Batcher.stats``; without episodes, lanes and waiting.

        Only time in steps counts as that of the environments; all the rest is not told apart.

        Raises:
            UsageError: If the manager is closed.
        """
        self._workers.refuse_closed()
        return self._stats_reader.read()

    def close(self) -> None:
        """Close all environments and end the workers, within a few seconds. May be repeated."""
        self._workers.close()

    def _has_processes(self) -> bool:
        return "_workers" in self.__dict__


def _declared(report: Report, name: str) -> Any:
    """A space as the environments declare it, ``None`` if they do not, or it is no space."""
    observation, action = pickle.loads(report.spaces)
    return {"observation_space": observation, "action_space": action}.get(name)
