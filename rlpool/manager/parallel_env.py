"""Environments in worker processes, the policy in the caller's process.

A step of all lanes is a number written for each worker and one back, all else lies in shared
memory, too.
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

    gives bitwise the same episodes as the same number of environments in a ``GymEnv``. It can also
    be driven by hand: with ``reset`` and ``step``, with ``reset_lanes`` and ``step_lanes``, or one
    environment at a time through ``remotes``. Use it from one thread at a time.

    A task is an option of a reset: ``{"task": task}`` reaches an environment whose ``reset`` takes
    ``task`` there, any other as ``options["task"]``.

    Environments declare both of their spaces: what they take and return has to be known before
    they run.

    If a signal handler raises inside a call, the workers are ended. Then ``reset`` begins with new
    ones, and any other call but ``close`` is refused.

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
        keep_float64: Store float64 as it is, see ``GymEnv``; by default it becomes float32.
        info_keys: Keys of ``info`` that become keys of a step, see ``GymEnv``.
        auto_reset: Whether lanes of a ``Batcher`` or of ``step`` restart on their own.
        min_ready: How many lanes a batcher's loop waits for; the default is all of them. With
            fewer, slow lanes do not hold up the others; the agent is called more often, each time
            with all rows, and the results are the same. With half of them, one half steps while the
            agent is called for the other. Agents that require a history always wait for all.
        **policy: ``on_worker_failure``, ``max_restarts``, ``on_env_error``,
            ``max_episodes_per_worker`` and ``start_method`` as for
            ``EpisodeBatcher``. Healthy workers are replaced at a reset of one of their lanes; lanes
            in the middle of an episode are brought back to where they were.

    Attributes:
        num_envs: Number of environments, the same as ``n_lanes``.
        remotes: One ``Remote`` per environment.
        observation_space: The environments'.
        action_space: The environments'.
        n_tasks: The environments' attribute of that name, ``None`` if they have none.
        horizon_bamdp: The same of that attribute.
        all_tasks: The tasks that the environments know, ``None`` if they have none.

    Raises:
        SpecError: For arguments of the wrong kind, more workers than descriptors or memory
            allow, or environments that differ.
        WorkerStartupError: If an environment cannot be made, or does not declare its spaces.
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
        """Adopt what the workers report, and map the buffers."""
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
        """Lane to why its episode was given up; see ``on_env_error``.

        Until the first step of the lane's next episode. A batcher over a manager decides itself
        what becomes of failures, by its own ``on_env_error``, and has them.
        """
        return {lane: truncation.error for lane, truncation in self._lanes.truncations.items()}

    @property
    def workers(self) -> list[SpawnProcess]:
        """The worker processes, each the last one with its number; none after ``close``."""
        refuse_forked_copy(self._lanes.owner_pid)
        return self._lanes.crew.all_processes()

    # The lane contract ---------------------------------------------------------------------

    def report_failures(self) -> None:
        """See ``VecEnv``: then ``on_env_error`` ends no episodes here."""
        self._lanes.reports_failures = True

    def watch_infos(self, seen: MutableSequence[int] | memoryview) -> None:
        """See ``VecEnv``: infos stay in the workers, so all keys count as seen."""
        seen[0] = -1

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        self._lanes.check_open()
        self._lanes.reset(lanes, seeds, options)
        self._lanes.finish(lanes)

    def _fail(self, call: str, error: BaseException) -> NoReturn:
        raise error  # which says what failed, and in which lane

    reset_lanes = crash_only(VecEnv.reset_lanes)

    @crash_only
    def step_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> list[int]:
        """Step some lanes, those of all workers at the same time.

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
        self._lanes.check_open()
        if type(lanes) is not list:
            lanes = list(lanes)
        self._lanes.step(lanes, actions, self._last_actions)
        self._lanes.finish(lanes)
        ended: list[int] = self.current["done"].nonzero()[0].tolist()
        if ended and len(lanes) < self.n_lanes:
            ended = [lane for lane in ended if lane in lanes]
        return ended

    _step_lanes: Any = step_lanes  # results are in the buffers already

    @crash_only
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
        """Reset all environments, see ``VecEnv.reset``; begins with new workers if need be."""
        self._lanes.refuse_closed()
        if self._lanes.is_interrupted:
            self._lanes.begin_again()
        self._lanes.check_open()
        return super().reset(*arguments, **named)

    @crash_only
    def step(self, policy_output: DictTensor) -> tuple[Observed, Observed]:
        """Step the running environments, see ``VecEnv.step``."""
        self._lanes.check_open()
        return super().step(policy_output)

    def _call(self, method: Any, *arguments: Any) -> Any:
        # Inside a call of this manager, of which it is a part.
        return method.__wrapped__(self, *arguments)

    def stats(self) -> Stats:
        """What the workers are doing, see ``Batcher.stats``; without episodes, lanes and waiting.

        Only time in steps counts as that of the environments; other time is not distinguished.

        Raises:
            UsageError: If the manager is closed.
        """
        self._lanes.refuse_closed()
        return self._lanes.stats_reader.read()

    def close(self) -> None:
        """Close all environments and end the workers, within a few seconds. May be repeated."""
        self._lanes.close()

    def _has_processes(self) -> bool:
        return "_lanes" in self.__dict__


def _checked_functions(env_fns: Any) -> list[Callable[[], Any]]:
    """A copy of a list of functions that make environments.

    Raises:
        SpecError: If it is not one, or empty.
    """
    functions = list(env_fns) if isinstance(env_fns, Iterable) else []
    if not functions or not all(map(callable, functions)):
        raise SpecError(
            f"env_fns is {env_fns!r}, not a list of functions",
            fix="pass functions without arguments that make one environment each, "
            "such as [lambda: gymnasium.make('CartPole-v1')] * 4",
        )
    return functions
