"""Environments in worker processes, the policy in the caller's.

The caller's rollout loop runs over a ``ParallelEnvManager`` as over any other ``VecEnv``: a step
of all lanes is a number written for each worker and one back, all else lies in shared memory, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gymnasium.vector import AutoresetMode

from rlpool.data.dict_tensor import DictTensor
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.info_keys import InfoKeys, wanted_infos
from rlpool.envs.vec_env import Observed, Options, VecEnv
from rlpool.errors import EnvError, SpecError, WorkerError
from rlpool.machine.arguments import checked_timeout, names_arguments, whole_number
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.main_guard import refuse_during_import
from rlpool.manager.actions import are_equal, hand_over, specs_of
from rlpool.manager.buffers import action_specs, observation_specs
from rlpool.manager.env_workers import EnvWorkers
from rlpool.manager.messages import Report
from rlpool.manager.remotes import Remote, WorkerHandle
from rlpool.manager.stepper import Kind, Stepper
from rlpool.memory.storage import Array
from rlpool.observe.stats import Stats, StatsReader
from rlpool.record.capsule_files import CrashDir
from rlpool.specs import TensorSpec, leaves_of
from rlpool.workers.failure_policy import (
    DEFAULT_TIMEOUT_S,
    FailurePolicy,
    PolicyOptions,
    takes_policy,
)
from rlpool.workers.process_owner import ProcessOwner
from rlpool.workers.stack_dumps import DumpsStacks

if TYPE_CHECKING:
    from gymnasium import Space
    from typing_extensions import Unpack

    from rlpool.manager.vector_env import ParallelVectorEnv

_ALL = slice(None)


class ParallelEnvManager(ProcessOwner, DumpsStacks, VecEnv):
    """Gymnasium environments in worker processes that all step at the same time.

    It is a ``VecEnv``: pass it to a batcher with ``n_threads=0``, whose agent then runs in this
    process, on the whole batch of lanes at once::

        def create_env(seed):
            return ParallelEnvManager([make_env] * 8, seed=seed)


        batcher = EpisodeBatcher(..., create_env=create_env, n_threads=0)

    gives bitwise the same episodes as the same number of environments in a ``GymEnv``. It can also
    be driven by hand: with ``reset`` and ``step``, with ``reset_lanes`` and ``step_lanes``, or one
    environment at a time through ``remotes``. Use it from one thread at a time.

    A task is an option of a reset: ``{"task": task}`` reaches an environment whose ``reset`` takes
    ``task`` there, any other as ``options["task"]``.

    Environments without an observation space are reset once when they are made, to see what an
    observation looks like; if they cannot be reset without options, the first reset with options
    shows it.

    If a batcher knows the next episodes of a lane, its environment may be reset for the next one
    as soon as an episode ends, which saves a round trip.

    If a signal handler raises inside a call, the call may be repeated with the same arguments;
    what it had begun is not done twice. Any other call first finishes what was begun.

    A worker that dies or hangs is replaced. Its environments are reset with the same seeds and
    options and stepped with the same actions, which are kept until the next reset. If these
    determine the episode, the caller sees the same bits and no exception. Otherwise the lane
    raises ``EnvError`` and needs a reset.

    Args:
        env_fns: Functions without arguments that make one environment each, in the workers.
            Lambdas, closures and classes defined in a script or notebook are fine. What they hold
            is shared or copied as ``agent_args`` of ``EpisodeBatcher`` are.
        envs_per_worker: Environments of each worker process, which steps them one after another.
        seed: Root of the seeds of ``reset`` and of remotes. A batcher brings its own seeds.
        timeout: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        max_episode_steps: Truncate episodes after this many steps.
        keep_float64: Store float64 as it is; by default it becomes float32.
        info_keys: Keys of ``info`` that become keys of a step, see ``GymEnv``.
        auto_reset: Whether lanes of a ``Batcher`` or of ``step`` restart on their own.
        min_ready: How many lanes a batcher's loop waits for; the default is all of them. With
            fewer, slow lanes do not hold up the others; the agent is called more often, each time
            with all rows, and the results are the same. With half of them, one half steps while the
            agent is called for the other. Agents that require a history always wait for all.
        crash_dir: A directory, made if it is missing: if an environment fails, this process
            writes what ``rlpool.replay_crash`` needs into a file there, which the message of the
            error names. A batcher over the environments knows more (``agent_info`` and rewards):
            pass ``crash_dir`` to the batcher instead.
        **policy: ``on_worker_failure``, ``max_restarts``, ``on_env_error``,
            ``max_episodes_per_worker``, ``max_rss_bytes`` and ``start_method`` as for
            ``EpisodeBatcher``. Healthy workers are replaced at a reset of one of their lanes; lanes
            in the middle of an episode are brought back to where they were.

    Attributes:
        num_envs: Number of environments, the same as ``n_lanes``.
        remotes: One ``Remote`` per environment.
        workers: One handle per worker process.
        observation_space: The environments', ``None`` if they declare none.
        action_space: Likewise.
        n_tasks: The environments' attribute of that name, ``None`` if they have none.
        horizon_bamdp: Likewise.
        all_tasks: The tasks that the environments know, ``None`` if they have none.

    Raises:
        SpecError: For arguments of the wrong kind, more workers than descriptors or memory
            allow, or environments that differ.
        WorkerStartupError: If an environment cannot be made.
        WorkerDiedError, WorkerTimeoutError: If a worker does not get ready.
        UsageError: If the script lacks its ``if __name__ == "__main__":`` guard.

    Example:
        >>> with ParallelEnvManager([CountingEnv, CountingEnv], seed=0) as env:
        ...     observation, lanes = env.reset()
        ...     after, _ = env.step(DictTensor({"action": torch.tensor([0, 1])}))
        ...     print(after[0]["frame"], after[1])
        tensor([[1.],
                [1.]]) tensor([0, 1])
    """

    shares_current = True  # with the workers

    @names_arguments
    @takes_policy
    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        envs_per_worker: int = 1,
        seed: int | Sequence[int] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        max_episode_steps: int | None = None,
        keep_float64: bool = False,
        info_keys: InfoKeys = None,
        auto_reset: bool = False,
        min_ready: int | None = None,
        crash_dir: CrashDir = None,
        **policy: Unpack[PolicyOptions],
    ) -> None:
        refuse_during_import()
        failure_policy = FailurePolicy(**policy)
        env_fns = checked_functions(env_fns)
        whole_number("envs_per_worker", envs_per_worker, 1)
        timeout = checked_timeout(timeout)
        for name, number in (("min_ready", min_ready), ("max_episode_steps", max_episode_steps)):
            if number is not None:
                whole_number(name, number, 1)
        super().__init__(len(env_fns), seed)
        self.auto_reset = auto_reset
        self.min_ready = min_ready
        self._env_fns = env_fns
        self._made_with: dict[str, Any] = {
            "envs_per_worker": envs_per_worker,
            "timeout": timeout,
            "max_episode_steps": max_episode_steps,
            **policy,
        }
        self._options: dict[str, Any] = {
            "max_episode_steps": max_episode_steps,
            "keep_float64": keep_float64,
            "info_keys": wanted_infos(info_keys, keep_float64=keep_float64),
        }
        self._workers = EnvWorkers(
            env_fns,
            envs_per_worker,
            self._root,
            self._options,
            timeout,
            failure_policy,
            crash_dir,
        )
        self._one_thread = self._workers.one_thread
        try:
            self._agree()
        except BaseException:
            self._workers.close()
            raise
        self.num_envs = self.n_lanes
        self._workers.processes.control.name = type(self).__name__
        self._stats_reader = StatsReader(self._workers.processes.control)
        self.workers = [WorkerHandle(self._workers, w) for w in range(self._workers.n_workers)]
        self.remotes = [
            Remote(self._workers, self._stepper, lane, self.action_space)
            for lane in range(self.n_lanes)
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
            parts: list[tuple[str, Any, Any]] = [("action_space", first.action, report.action)]
            if mine is not None and theirs is not None:
                parts += [("observation_space", mine.observation, theirs.observation)]
                parts += [("the info", mine.infos, theirs.infos)]
            for name, ours, others in parts:
                if ours != others:
                    raise SpecError(
                        f"{name} of environment {workers.lanes_of[worker][0]} is "
                        f"{_declared(report, name) or others}, that of environment 0 is "
                        f"{_declared(first, name) or ours}",
                        fix="put only environments with equal spaces and infos into one manager",
                    )
        self.observation_space, self.action_space = pickle.loads(first.spaces)
        self.n_tasks, self.horizon_bamdp = first.n_tasks, first.horizon_bamdp
        self.all_tasks = first.all_tasks
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
        self._copied: dict[str, Array] = {}  # last actions that are kept elsewhere
        self._half_step: tuple[dict[str, Array], Any] | None = None  # of an interrupted ``step``
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

    @property
    def failures(self) -> Mapping[int, WorkerError]:
        """Lane to why its episode was given up, until its next reset; see ``on_env_error``.

        Example:
            >>> def make_broken_env():
            ...     return FaultyEnv("raise", at_step=1)
            >>> with ParallelEnvManager([make_broken_env], on_env_error="truncate") as env:
            ...     _ = env.reset()
            ...     for _ in range(2):
            ...         (_, _), (after, _) = env.step(DictTensor({"action": torch.tensor([0])}))
            ...     print(after["truncated"], env.failures[0].what)
            tensor([True]) env.step raised KeyError: 'struck'
        """
        return dict(self._workers.failures)

    # The lane contract ---------------------------------------------------------------------

    def announce_episodes(self, seeds: Sequence[int], env_info: Mapping[str, Array]) -> None:
        """Announce the next episodes, so that the workers can begin them ahead of time."""
        self._workers.check_open()
        self._stepper.announce(seeds, env_info)

    def _action_arrays(self, specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
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
        self._stepper.finish_open()

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        self._stepper.reset(lanes, seeds, options)

    def in_this_process(self, lane: int) -> GymEnv:
        """An environment like a lane's, made in this process for debuggers."""
        return GymEnv([self._env_fns[lane]()], **self._options)

    def step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> list[int]:
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
        all_step = len(lanes) == self.n_lanes
        stepper = self._stepper
        if not self._is_in_step:
            self._half_step = None
        if stepper.open is not None and not self._is_repeated("step", lanes, actions):
            stepper.close_open()
        if stepper.open is None:
            self._hand_over(lanes, actions)
        if self._some_lane_is_initial:
            self._initial_state[_ALL if all_step else lanes] = False
            self._some_lane_is_initial = not all_step
        done: list[int] = []
        if stepper.step(lanes):
            done = self.current["done"].nonzero()[0].tolist()
            if not all_step:
                done = sorted(set(done).intersection(lanes))
        if not self._is_in_step:
            stepper.open = None
        return done

    def step_some(
        self,
        min_ready: int = 1,
        lanes: Sequence[int] = (),
        actions: Mapping[str, Array] | None = None,
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
        is_begun = stepper.open is not None and self._is_repeated("some", lanes, actions or {})
        if not is_begun:
            stepper.close_open()
        if lanes and not is_begun:
            self._stepper.refuse_bad_lanes(lanes)
            stepper.refuse_stepping(lanes)
            self._hand_over(lanes, actions or {})
            self._initial_state[lanes] = False
            stepper.begin_some(lanes)
        elif not min_ready:
            stepper.look()
        ready, left = stepper.take_ready(min_ready)
        stepper.pending, stepper.open = left, None  # the last act, as in step()
        return ready

    def _is_repeated(self, kind: Kind, lanes: list[int], actions: Mapping[str, Array]) -> bool:
        """Whether an interrupted step is asked for again."""
        step = self._stepper.open
        if step is None or (step.kind, step.lanes) != (kind, lanes):
            return False
        return are_equal(self._buffers.action, actions, lanes)

    def _hand_over(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> None:
        """Put actions where the workers read them."""
        if not self._buffers.action:
            self.declare_actions(specs_of(actions))
        hand_over(actions, lanes, self._buffers.action, self._copied)

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> Any:
        raise NotImplementedError  # step_lanes does all of it: results are in the buffers already

    def as_vector_env(
        self,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        *,
        copy: bool = True,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
    ) -> ParallelVectorEnv:
        """Serve these environments as a ``gymnasium.vector.VectorEnv``.

        This manager is closed, and new workers make the environments again, since a vector
        environment restarts them by its own rules and keeps float64: ``ParallelVectorEnv`` is made
        with the ``env_fns``, ``envs_per_worker``, ``timeout``, ``max_episode_steps`` and policy of
        this manager. Make it directly if environments take long to make.

        Args:
            autoreset_mode: When environments restart, see ``ParallelVectorEnv``.
            copy: Whether observations are copies.
            observation_mode: How observation spaces are batched, see ``ParallelVectorEnv``.

        Returns:
            The vector environment, which owns the new workers; close it.

        Raises:
            SpecError, WorkerStartupError, WorkerDiedError, WorkerTimeoutError: See
                ``ParallelVectorEnv``.
            UsageError: If the manager is closed.
        """
        from rlpool.manager.vector_env import ParallelVectorEnv, checked_mode

        self._workers.check_open()
        mode = checked_mode(autoreset_mode)  # before anything is closed
        self.close()
        return ParallelVectorEnv(self._env_fns, copy, observation_mode, mode, **self._made_with)

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

    def _stepped(self, actions: dict[str, Array]) -> Any:
        half = self._half_step
        if half is None or not are_equal(half[0], actions, self._running):
            half = self._half_step = actions, super()._stepped(actions)
        self._stepper.open = None
        return half[1]

    def stats(self) -> Stats:
        """What the workers are doing, see ``Batcher.stats``; without episodes, lanes and waiting.

        Only time in steps counts as that of the environments; all the rest is not told apart.

        Raises:
            UsageError: If the manager is closed.
        """
        self._workers.refuse_closed()
        return self._stats_reader.read()

    def _stacks(self) -> str:
        self._workers.refuse_closed()
        return self._workers.stacks()

    def close(self) -> None:
        """Close all environments and end the workers, within a few seconds. May be repeated."""
        self._workers.close()

    def _has_processes(self) -> bool:
        return "_workers" in self.__dict__


def _declared(report: Report, name: str) -> Any:
    """A space as the environments declare it, ``None`` if they do not, or it is no space."""
    observation, action = pickle.loads(report.spaces)
    return {"observation_space": observation, "action_space": action}.get(name)


def checked_functions(env_fns: Any) -> list[Callable[[], Any]]:
    """A copy of a list of functions that make environments.

    Raises:
        SpecError: If it is not one, or empty.
    """
    try:
        functions = list(env_fns)
    except TypeError:
        functions = []
    bad = [number for number, function in enumerate(functions) if not callable(function)]
    if not functions or bad:
        raise SpecError(
            f"env_fns[{bad[0]}] is {functions[bad[0]]!r}, not a function"
            if bad
            else f"env_fns is {env_fns!r}, not a list of functions",
            fix="pass functions without arguments that make one environment each, "
            "such as [lambda: gymnasium.make('CartPole-v1')] * 4",
        )
    return functions
