"""Environments in worker processes, the policy in the caller's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlpool.envs.info_keys import InfoKeys, info_specs
from rlpool.errors import SpecError, WorkerError
from rlpool.machine.arguments import (
    checked_timeout,
    whole_number,
)
from rlpool.machine.imports import refuse_during_import
from rlpool.manager.env_workers import EnvWorkers
from rlpool.manager.process_lanes import ProcessLanes
from rlpool.workers.failure_policy import (
    DEFAULT_TIMEOUT_S,
    FailurePolicy,
    PolicyOptions,
    takes_policy,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ParallelEnvManager(ProcessLanes):
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
        **policy: Unpack[PolicyOptions],
    ) -> None:
        refuse_during_import()
        failure_policy = FailurePolicy(**policy)
        env_fns = _checked_functions(env_fns)
        whole_number("envs_per_worker", envs_per_worker, 1)
        timeout = checked_timeout(timeout)
        for name, number in (("min_ready", min_ready), ("max_episode_steps", max_episode_steps)):
            if number is not None:
                whole_number(name, number, 1)
        super().__init__(len(env_fns), seed)
        self.auto_reset = auto_reset
        self.min_ready = min_ready
        self._env_fns = env_fns
        self._options: dict[str, Any] = {
            "max_episode_steps": max_episode_steps,
            "keep_float64": keep_float64,
            "info_keys": info_specs(info_keys, keep_float64=keep_float64),
        }
        given = timeout, failure_policy
        self._use(EnvWorkers(env_fns, envs_per_worker, self._root, self._options, *given))

    @property
    def failures(self) -> Mapping[int, WorkerError]:
        """Lane to why its episode was given up; see ``on_env_error``.

        Until the lane's next reset or, with ``auto_reset``, until its next step. A batcher over a
        manager decides itself what becomes of failures, by its own ``on_env_error``, and has them.
        """
        return dict(self._workers.failures)


def _checked_functions(env_fns: Any) -> list[Callable[[], Any]]:
    """A copy of a list of functions that make environments.

    Raises:
        SpecError: If it is not one, or empty.
    """
    functions = list(env_fns) if isinstance(env_fns, Iterable) else []
    bad = [f"[{n}] is {each!r}" for n, each in enumerate(functions) if not callable(each)]
    if bad or not functions:
        raise SpecError(
            f"env_fns{bad[0]}, not a function"
            if bad
            else f"env_fns is {env_fns!r}, not a list of functions",
            fix="pass functions without arguments that make one environment each, "
            "such as [lambda: gymnasium.make('CartPole-v1')] * 4",
        )
    return functions
