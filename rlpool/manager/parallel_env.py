"""Environments in worker processes, with the policy in the caller's process.

For a step of all lanes, one number is written for each worker and one back; everything else is in
shared memory too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, NoReturn

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import leaves_of
from rlpool.data.storage import NDArray
from rlpool.envs.info_keys import InfoKeys, info_specs
from rlpool.envs.vec_env import Observed, Options, VecEnv
from rlpool.errors import SpecError, WorkerError
from rlpool.machine.arguments import checked_timeout, optional_number, whole_number
from rlpool.machine.calls import crash_only
from rlpool.machine.imports import refuse_during_import
from rlpool.machine.platform import require_linux
from rlpool.manager.channel import Report
from rlpool.manager.lanes import Lanes
from rlpool.manager.remote import Remote
from rlpool.observe.stats import Stats
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, PolicyOptions, policy_of
from rlpool.workers.process_owner import ProcessOwner, refuse_forked_copy

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ParallelEnvManager(ProcessOwner, VecEnv):
    """Gymnasium environments in worker processes that all step at the same time.

    It is a ``VecEnv``: pass it to a batcher with ``n_workers=0``, whose agent then runs in this
    process, on the whole batch of lanes at once::

        def create_env(seed):
            return ParallelEnvManager([make_env] * 8, seed=seed)


        batcher = EpisodeBatcher(..., create_env=create_env, n_workers=0)

    Episodes are bitwise identical to those of the same number of environments in a ``GymEnv``. It
    can also be used directly: with ``reset`` and ``step``, with ``reset_lanes`` and ``step_lanes``,
    or one environment at a time through ``remotes``. Use it from one thread at a time.

    A task is an option of a reset: ``{"task": task}`` is passed to an environment's ``reset`` as
    ``task`` if it takes that, otherwise as ``options["task"]``.

    Environments must declare both of their spaces, because shapes and dtypes have to be known
    before they run.

    If a signal handler raises inside a call, the workers are ended. ``reset`` then starts new ones;
    any other call except ``close`` is refused.

    A worker that dies or hangs is replaced. Its environments are reset with the same seeds and
    options and stepped with the same actions, which are recorded until the next reset. If these
    determine the episode, the caller sees the same bits and no exception. Otherwise the lane
    raises ``EnvError`` and needs a reset.

    Args:
        env_fns: Functions without arguments that make one environment each, in the workers.
            Lambdas, closures and classes defined in a script or notebook work. Objects that they
            hold are shared or copied like ``agent_args`` of ``EpisodeBatcher``.
        envs_per_worker: Environments of each worker process, which steps them one after another.
        seed: Root of the seeds of ``reset`` and of remotes. A batcher uses its own seeds.
        timeout: Seconds without progress after which a worker counts as hung, ``None`` for never.
        max_episode_steps: Truncate episodes after this many steps.
        keep_float64: Store float64 unchanged, see ``GymEnv``; by default it becomes float32.
        info_keys: Keys of ``info`` that become keys of a step, see ``GymEnv``.
        auto_reset: Whether lanes of a ``Batcher`` or of ``step`` restart on their own.
        min_ready: Number of lanes that a batcher's loop waits for; all by default. With fewer, slow
            lanes do not hold up the others; the agent is called more often, each time with all
            rows, and results are the same. With half of them, one half steps while the agent is
            called for the other. Agents that require a history always wait for all.
        **policy: ``on_worker_failure``, ``max_restarts``, ``on_env_error``,
            ``max_episode_restarts``, ``max_episodes_per_worker`` and ``start_method``, as for
            ``EpisodeBatcher``. Healthy workers are replaced at a reset of one of their lanes; their
            other lanes are restored to the middle of their episodes.

    Attributes:
        num_envs: Number of environments, the same as ``n_lanes``.
        remotes: One ``Remote`` per environment.
        observation_space: Observation space of each environment.
        action_space: Action space of each environment.
        n_tasks: The environments' attribute of that name, ``None`` if they have none.
        horizon_bamdp: Likewise.
        all_tasks: The environments' tasks, ``None`` if they have none.

    Raises:
        SpecError: For arguments of the wrong type, more workers than descriptors or memory
            allow, or environments with different spaces.
        WorkerStartupError: If an environment cannot be made, or does not declare its spaces.
        WorkerDiedError, WorkerTimeoutError: If a worker does not become ready.
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

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        envs_per_worker: int = 1,
        seed: int | Sequence[int] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        max_episode_steps: int | None = None,
        keep_float64: bool | Collection[str] = False,
        info_keys: InfoKeys = None,
        auto_reset: bool = False,
        min_ready: int | None = None,
        **policy: Unpack[PolicyOptions],
    ) -> None:
        refuse_during_import()
        require_linux("ParallelEnvManager", "GymEnv steps its environments in one process")
        failure_policy = policy_of("ParallelEnvManager", policy)
        env_fns = _checked_functions(env_fns)
        whole_number("envs_per_worker", envs_per_worker, 1)
        timeout = checked_timeout(timeout)
        optional_number("max_episode_steps", max_episode_steps, 1)
        super().__init__(len(env_fns), seed)
        self.auto_reset = auto_reset
        self.min_ready = optional_number("min_ready", min_ready, 1)
        options: dict[str, Any] = {
            "max_episode_steps": max_episode_steps,
            "keep_float64": keep_float64,
            "info_keys": info_specs(info_keys, keep_float64=keep_float64),
        }
        lanes = Lanes(env_fns, envs_per_worker, self._root, options, timeout, failure_policy)
        self._lanes = self._calls = lanes
        try:
            self._begin(lanes.report)
        except BaseException:
            lanes.close()
            raise
        self.num_envs = self.n_lanes
        self.remotes = [Remote(lanes, lane) for lane in range(self.n_lanes)]

    def _begin(self, report: Report) -> None:
        """Use the workers' report, and map the buffers."""
        self.observation_space, self.action_space = pickle.loads(report.spaces)
        self.n_tasks, self.horizon_bamdp, self.all_tasks = report.tasks
        self.state_keepers, self.description = report.state_keepers, report.description
        self.action_leaves = leaves_of({"action": report.action}, "")
        leaves = self.declare(report.declaration).leaves
        self._lanes.begin({key: leaf.spec for key, leaf in leaves.items()}, report.native_action)
        buffers = self._lanes.buffers
        self.place(buffers.observation, buffers.reward, buffers.flags)

    @property
    def failures(self) -> Mapping[int, WorkerError]:
        """Errors of truncated episodes by lane, see ``on_env_error``.

        An entry lasts until the first step of the lane's next episode. A batcher over a manager
        handles failures by its own ``on_env_error``, and has them in its own ``failures``.
        """
        return {lane: truncation.error for lane, truncation in self._lanes.truncations.items()}

    @property
    def workers(self) -> list[SpawnProcess]:
        """The worker processes, or the last one of each number; none after ``close``."""
        refuse_forked_copy(self._lanes.owner_pid)
        return self._lanes.crew.all_processes()

    # The lane contract ---------------------------------------------------------------------

    def report_failures(self) -> None:
        """Leave failures to the caller, so that ``on_env_error`` ends no episodes here."""
        self._lanes.reports_failures = True

    def watch_infos(self, seen: MutableSequence[int] | memoryview) -> None:
        """Mark all keys as seen, because infos stay in the workers."""
        seen[0] = -1

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        self._lanes.check_open()
        self._lanes.reset(lanes, seeds, options)
        self._lanes.finish(lanes)

    def _fail(self, call: str, error: BaseException) -> NoReturn:
        raise error  # it names the failure and the lane

    reset_lanes = crash_only(VecEnv.reset_lanes)

    @crash_only
    def step_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> list[int]:
        """Step some lanes, in all workers at the same time.

        Args:
            lanes: Ascending lane numbers.
            actions: Action key to array ``[n_lanes, ...]``; only the rows of ``lanes`` are read.

        Returns:
            The lanes whose episode ended with this step.

        Raises:
            EnvError: If an environment raises or returns a value that does not fit; also a
                ``LaneError``. That worker's lanes that took part need a reset before their next
                step; all others have made their step.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hung.
            UsageError: If the manager is closed.
        """
        self._lanes.check_open()
        if type(lanes) is not list:
            lanes = list(lanes)
        self._lanes.step(lanes, actions, self._last_actions)
        self._lanes.finish(lanes)
        ended: list[int] = self.current["done"].nonzero()[0].tolist()
        if ended and len(lanes) < self.n_lanes:
            ended = [lane for lane in ended if lane in lanes]
        return ended

    _step_lanes: Any = step_lanes  # results are already in the buffers

    @crash_only
    def step_some(
        self,
        min_ready: int = 1,
        lanes: Sequence[int] = (),
        actions: Mapping[str, NDArray] | None = None,
    ) -> list[int]:
        """Begin a step of some lanes, and return the lanes that are ready.

        Slow lanes do not hold up the others: a later call returns them::

            ready = list(range(manager.num_envs))
            while True:
                actions = policy(manager.current, ready)  # rows of stepping lanes are undefined
                ready = manager.step_some(4, ready, actions)

        With several environments per worker, the stepping lanes of a worker become ready together,
        and a step of its other lanes begins after that.

        Args:
            min_ready: Number of stepping lanes to wait for, or all of them if there are fewer.
                0 does not wait.
            lanes: Ascending numbers of lanes to step, none of which is already stepping.
            actions: Their actions as for ``step_lanes``.

        Returns:
            Lanes that have made their step, ascending; ``current["done"]`` marks ended episodes. No
            lane is returned twice for one step.

        Raises:
            EnvError: As for ``step_lanes``. The next call returns lanes of other workers.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hung.
            UsageError: If one of the lanes is already stepping, or the manager is closed.
        """
        self._lanes.check_open()
        whole_number("min_ready", min_ready, 0)
        if lanes:
            lanes = list(lanes)
            self._lanes.step(lanes, actions or {}, self._last_actions)
            self._lanes.let_go(lanes)
        return self._lanes.take_ready(min_ready)

    # Life and end --------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or every environment was closed by its remote."""
        return self._lanes.closed

    @crash_only
    def reset(self, *arguments: Any, **named: Any) -> Any:
        """Reset all environments like ``VecEnv.reset``, with new workers after an interruption."""
        self._lanes.refuse_closed()
        if self._lanes.is_interrupted:
            self._lanes.begin_again()
        self._lanes.check_open()
        return super().reset(*arguments, **named)

    @crash_only
    def step(self, policy_output: DictTensor) -> tuple[Observed, Observed]:
        """Step the running environments like ``VecEnv.step``."""
        self._lanes.check_open()
        return super().step(policy_output)

    def _call(self, method: Any, *arguments: Any) -> Any:
        # Without the check for concurrent calls, since it is part of a call of this manager.
        return method.__wrapped__(self, *arguments)

    def stats(self) -> Stats:
        """Read the workers' activity like ``Batcher.stats``, without episodes, lanes and waiting.

        Only time in steps counts as time of the environments; other time is not broken down.

        Raises:
            UsageError: If the manager is closed.
        """
        self._lanes.refuse_closed()
        return self._lanes.stats_reader.read()

    def close(self) -> None:
        """Close all environments and end the workers within a few seconds. Can be repeated."""
        self._lanes.close()

    def _has_processes(self) -> bool:
        return "_lanes" in self.__dict__


def _checked_functions(env_fns: Any) -> list[Callable[[], Any]]:
    """Copy a list of functions that make environments.

    Raises:
        SpecError: If it is not a list of functions, or empty.
    """
    functions = list(env_fns) if isinstance(env_fns, Iterable) else []
    if not functions or not all(map(callable, functions)):
        raise SpecError(
            f"env_fns is {env_fns!r}, not a list of functions",
            fix="pass functions without arguments that make one environment each, "
            "such as [lambda: gymnasium.make('CartPole-v1')] * 4",
        )
    return functions
