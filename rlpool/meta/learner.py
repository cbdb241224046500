"""Collection of rollouts, each on its own task, into a learner's storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from rlpool.agents.agent import Agent, as_agent
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.errors import SpecError, UsageError
from rlpool.loop.rollout import Rollout
from rlpool.machine.arguments import whole_number
from rlpool.manager.worker import tasks_of
from rlpool.meta.agents import AGENT_ARCHS, ActingAgent, RandomAgent
from rlpool.meta.rollouts import TASK_OPTION, RolloutColumns, RolloutPlan, store_into
from rlpool.seeding import probe_seed, root_from, task_draws
from rlpool.slots.blocks import Layout

BATCH_ROWS = 16
"""Default number of rows of the policy's batch: the number of cores of most machines."""

MAX_CHUNK = 128
"""Maximum number of steps of a slot, to keep slots of image observations small. Longer rollouts are
copied out in pieces."""


def collect_rollouts_parallel(
    learner: Any,
    num_rollouts: int,
    random_actions: bool = False,
    parallel_env: VecEnv | None = None,
) -> int:
    """Run rollouts, each on a task of ``train_tasks``, and store them.

    Rollout *i* runs in environment ``i % n``: each of the *n* environments gets
    ``num_rollouts // n`` and the first ``num_rollouts % n`` one more; environments without a
    rollout are not reset. The agent is called once per step for all of them. An environment that
    ends a rollout starts its next one while the others continue. The agent's state is reset only at
    the start of a rollout: it is kept through all episodes of a trial.

    Rollouts reach the storage complete and in order. The seed and the noise of a rollout depend
    only on the learner's seed and on the number of rollouts before it in all collections. A drawn
    task depends only on the learner's seed and on the numbers of the collection and of the rollout
    in it. Any number of environments, with or without processes, gives the same bits, provided the
    agent is deterministic or draws from its ``noise`` (draws from torch's global generator depend
    on the draws before).

    Args:
        learner: A ``Learner``, or any object with ``agent``, ``policy_storage``, ``train_env``,
            ``train_tasks`` and ``agent_arch`` (optionally ``seed`` and ``batch_rows``). This
            function can be a method of its class.
        num_rollouts: Number of rollouts, at least 0, each on a drawn task.
        random_actions: Sample the action space instead of calling the agent.
        parallel_env: Parallel environments, such as a ``ParallelEnvManager``. ``None`` runs
            successive rollouts in ``learner.train_env``, in this process.

    Returns:
        The number of environment steps. It is added to ``learner.n_env_steps_total``, and the
        number of rollouts to ``learner.n_rollouts_total``, or to ``_n_env_steps_total`` and
        ``_n_rollouts_total`` if the learner has these, since the public names may then be targets.

    Raises:
        SpecError: For invalid arguments and attributes.
        UsageError: Without any environment, or for an agent without the required memory.
        EnvError, AgentError, WorkerError: If the environment, the agent or a worker fails. The
            rollouts before the first incomplete one are stored and counted.

    Example:
        >>> class Storage(list):
        ...     def add_sample(self, observation, action, reward, terminal, next_observation):
        ...         self.append((observation, action, reward))
        >>> learner = Learner(create_agent(), Storage(), train_tasks=None, seed=0)
        >>> with make_parallel_env("CartPole-v1", 2, n_workers=1) as parallel_env:
        ...     n_steps = collect_rollouts_parallel(learner, 3, parallel_env=parallel_env)
        >>> n_steps == learner.n_env_steps_total == len(learner.policy_storage)
        True
    """
    n_rows = whole_number("batch_rows", getattr(learner, "batch_rows", BATCH_ROWS), 1)
    arch = AGENT_ARCHS(learner.agent_arch)
    store = store_into(learner.policy_storage, arch)
    lanes = _lanes(learner, parallel_env)
    tasks = _tasks(learner, lanes)
    n_rollouts = whole_number("num_rollouts", num_rollouts, 0)
    space = getattr(lanes, "action_space", None)
    if random_actions:
        agent: Agent = RandomAgent(space)
        n_rows = 1  # random actions do not depend on other rows
    elif isinstance(agent := learner.agent, Agent) or (
        callable(agent) and not hasattr(agent, "act")
    ):
        agent = as_agent(agent)
    else:
        agent = ActingAgent(agent, space, needs_memory=arch is AGENT_ARCHS.Memory)
    rollout, lengths = Rollout(agent, lanes, agent_rows=max(lanes.n_lanes, n_rows)), list[int]()

    def deliver(columns: RolloutColumns) -> None:
        store(columns)
        lengths.append(len(columns.rewards))
        for name, n in (("n_env_steps_total", lengths[-1]), ("n_rollouts_total", 1)):
            counter = f"_{name}" if hasattr(learner, f"_{name}") else name
            setattr(learner, counter, getattr(learner, counter, 0) + n)

    root, n_before, options = _draw(learner, n_rollouts, tasks)
    # Environments are reset once per rollout, unless their keys have to be discovered first.
    first = (options[:1] or [None]) * lanes.n_lanes
    steps = rollout.probe([probe_seed(root)], first, None, resets=False)
    n_timesteps = min(int(getattr(lanes, "horizon_bamdp", None) or MAX_CHUNK), MAX_CHUNK)
    layout = Layout(steps, lanes.n_lanes, n_timesteps, 1)
    observed = list(lanes.columns.observed) if lanes.columns is not None else []
    rollout.run(RolloutPlan(layout, observed, root, n_before, options, deliver))
    return sum(lengths)


@dataclass(eq=False, repr=False)
class Learner:
    """The attributes for collecting rollouts; subclass it to add the learning.

    Args:
        agent: An ``rlpool.Agent``, a module or another callable like one, or an object with
            ``act`` (see ``ActingAgent``).
        policy_storage: Stores the collected data. It is called with these keywords, or in this
            order if its parameters have other names:
            ``add_sample(observation, action, reward, terminal, next_observation)`` for each
            transition of a Markov agent, ``add_episode(observations, actions, rewards, terminals,
            next_observations)`` for each rollout of the others.
        train_env: One environment, or several as a ``VecEnv``, for collection without
            ``parallel_env``.
        train_tasks: The tasks to draw from, numbers or other objects; ``None`` for all tasks of the
            environment.
        agent_arch: One of ``AGENT_ARCHS``, or its value.
        seed: Determines tasks, seeds of environments, noise of agents and random actions;
            ``None`` draws fresh entropy.
        batch_rows: Rows of the policy's batch, or the number of environments if that is larger.
            With the same number of rows, results are bitwise equal for any number of environments.

    Attributes:
        n_env_steps_total: Steps of all stored rollouts.
        n_rollouts_total: Number of stored rollouts.

    Example:
        >>> class Storage(list):
        ...     def add_sample(self, observation, action, reward, terminal, next_observation):
        ...         self.append((observation, action, reward))
        >>> storage = Storage()
        >>> train_env = make_env("CartPole-v1", episodes_per_task=2)
        >>> learner = Learner(create_agent(), storage, train_env, seed=0)
        >>> n_steps = learner.collect_rollouts_parallel(3)
        >>> learner.n_rollouts_total, n_steps == len(storage)
        (3, True)
    """

    agent: Any
    policy_storage: Any
    train_env: Any = None
    train_tasks: Sequence[Any] | None = None
    agent_arch: AGENT_ARCHS | str = AGENT_ARCHS.Markov
    _: KW_ONLY
    seed: int | Sequence[int] | None = None
    batch_rows: int = BATCH_ROWS
    n_env_steps_total: int = field(default=0, init=False)
    n_rollouts_total: int = field(default=0, init=False)

    collect_rollouts_parallel = collect_rollouts_parallel


def _draw(
    learner: Any, n_rollouts: int, tasks: Sequence[Any] | None
) -> tuple[int, int, list[Options]]:
    """Draw the next rollouts of a learner, which counts the rollouts drawn from its seed.

    Returns:
        Root, number of rollouts drawn from it before, and the options of the next ones.
    """
    seed = getattr(learner, "seed", None)
    fresh = (object(), 0, 0, 0)
    drawn_for, root, collection, n_before = getattr(learner, "_rlpool_drawn", fresh)
    if drawn_for != seed:
        root, collection, n_before = root_from(seed), 0, 0
    learner._rlpool_drawn = (seed, root, collection + 1, n_before + n_rollouts)
    if tasks is None:
        return root, n_before, [None] * n_rollouts
    draws = task_draws(root, collection, n_rollouts, len(tasks))
    return root, n_before, [{TASK_OPTION: tasks[draw]} for draw in draws]


def _lanes(learner: Any, parallel_env: Any) -> VecEnv:
    """Return the environments to collect in."""
    if parallel_env is not None and not isinstance(parallel_env, VecEnv):
        raise SpecError(
            f"parallel_env is a {type(parallel_env).__name__}, not a VecEnv",
            fix="use make_parallel_env(...), or put a single environment into train_env",
        )
    env = getattr(learner, "train_env", None) if parallel_env is None else parallel_env
    if env is None:
        raise UsageError(
            "there is no environment to collect in",
            fix="pass parallel_env, or give the learner a train_env",
        )
    if isinstance(env, VecEnv):
        return env
    # Kept with the learner: an environment is adapted once, and its keys are discovered once.
    if getattr(learner, "_rlpool_train_env", None) is not env:
        learner._rlpool_train_env, learner._rlpool_lanes = env, GymEnv([env])
    lanes: VecEnv = learner._rlpool_lanes
    return lanes


def _tasks(learner: Any, lanes: VecEnv) -> list[Any] | None:
    """Return the tasks to draw from, ``None`` for environments without tasks."""
    tasks = getattr(learner, "train_tasks", None)
    if tasks is None:
        if isinstance(lanes, GymEnv):
            return tasks_of(lanes)[2]
        return getattr(lanes, "all_tasks", None)
    if not isinstance(tasks, Iterable) or not (tasks := list(tasks)):
        raise SpecError(
            f"train_tasks is {tasks!r}",
            fix="pass a list of tasks to draw from, or None for all tasks of the environment",
        )
    return tasks
