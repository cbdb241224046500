"""Collects rollouts, each with a task of its own, into the storage of a learner."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np

from rlpool.agents.agent import Agent
from rlpool.envs.gym_env import GymEnv, all_tasks
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import AgentError, EnvError, SpecError, UsageError, WorkerError
from rlpool.loop.rollout import Rollout
from rlpool.manager.dispatch import ENV_HINT
from rlpool.manager.parallel_env import ParallelEnvManager
from rlpool.meta.agents import ActingAgent, RandomAgent, check_agent
from rlpool.meta.rollouts import MAX_CHUNK, NO_TASK, RolloutData, RolloutPlan
from rlpool.meta.rows import RowsEnv
from rlpool.meta.trials import TASK_OPTION
from rlpool.record.failures import DEBUG_HINT, LOCAL_HINT
from rlpool.seeding import episode_seeds, noise_keys, probe_seed, root_from, task_draws
from rlpool.slots.blocks import Layout

BATCH_ROWS = 16
"""Rows of the policy's batch unless told otherwise: as many as most machines have cores."""


_SAMPLE_COLUMNS = ("observation", "action", "reward", "terminal", "next_observation")
_EPISODE_COLUMNS = ("observations", "actions", "rewards", "terminals", "next_observations")


class AGENT_ARCHS(str, Enum):  # noqa: N801  (the name that its users know)
    """How a learner's agent decides, and thereby what its storage takes.

    Attributes:
        Markov: By the observation; stored transition by transition.
        Memory: By all that it saw in the rollout; stored rollout by rollout.
        Memory_Markov: By the observation, while what learns from it has a memory; stored rollout
            by rollout.
    """

    Markov = "markov"
    Memory = "memory"
    Memory_Markov = "memory_markov"


class Learner:
    """What collecting rollouts takes; subclass it and write the learning.

    Args:
        agent: An ``rlpool.Agent``, or an object with ``act`` (see ``ActingAgent``).
        policy_storage: Takes what was collected: ``add_sample(observation, action, reward,
            terminal, next_observation)`` for each transition of a Markov agent,
            ``add_episode(observations, actions, rewards, terminals, next_observations)`` for each
            rollout of the others.
        train_env: One environment, or several as a ``VecEnv``, for collection without
            ``parallel_env``.
        train_tasks: The tasks to draw from; ``None`` for all that the environment knows. They
            need not be numbers.
        agent_arch: One of ``AGENT_ARCHS``, or its value.
        seed: Determines tasks, seeds of environments, noise of agents and random actions;
            ``None`` draws fresh entropy.
        batch_rows: Rows of the policy's batch, or the number of environments if that is larger.
            With the same number of rows the results are bitwise the same, however many
            environments there are.

    Attributes:
        n_env_steps_total: Steps of all rollouts that were stored.
        n_rollouts_total: Their number.

    Example::

        train_env = make_env("my_envs:AntDir-v0", episodes_per_task=2)
        learner = Learner(agent, storage, train_env, range(50), AGENT_ARCHS.Memory, seed=0)
        with make_parallel_env("my_envs:AntDir-v0", 2, num_workers="auto") as parallel_env:
            while learner.n_env_steps_total < 1_000_000:
                learner.collect_rollouts_parallel(12, parallel_env=parallel_env)
                ...  # learn from the storage
    """

    def __init__(
        self,
        agent: Any,
        policy_storage: Any,
        train_env: Any = None,
        train_tasks: Sequence[Any] | None = None,
        agent_arch: AGENT_ARCHS | str = AGENT_ARCHS.Markov,
        *,
        seed: int | None = None,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        self.agent = agent
        self.policy_storage = policy_storage
        self.train_env = train_env
        self.train_tasks = train_tasks
        self.agent_arch = agent_arch
        self.seed = seed
        self.batch_rows = batch_rows
        self.n_env_steps_total = 0
        self.n_rollouts_total = 0

    def collect_rollouts_parallel(
        self, num_rollouts: int, random_actions: bool = False, parallel_env: VecEnv | None = None
    ) -> int:
        """See the function ``collect_rollouts_parallel``."""
        return collect_rollouts_parallel(self, num_rollouts, random_actions, parallel_env)


def collect_rollouts_parallel(
    learner: Any,
    num_rollouts: int,
    random_actions: bool = False,
    parallel_env: VecEnv | None = None,
) -> int:
    """Run rollouts, each on a task drawn from ``train_tasks``, and store them.

    Rollout *i* runs in environment ``i % n``, so that each of the *n* environments gets
    ``num_rollouts // n`` and the first ``num_rollouts % n`` one more; environments without a
    rollout are left alone. The agent is called once per step for all of them. An environment that
    ends a rollout starts its next one while the others go on. The agent's state begins anew with
    every rollout, and only there: in a trial of several episodes it lasts from the first to the
    last.

    Rollouts reach the storage complete and in the order of their numbers. Tasks, seeds and noise
    depend on the learner's seed, on the calls that came before, and on the rollout's number, not
    on the environments: one environment or many, with processes or without, give the same bits
    for an agent that is deterministic or draws from its ``noise``. (An agent that draws from
    torch's global generator depends on who draws before it.)

    Args:
        learner: A ``Learner``, or any object with ``agent``, ``policy_storage``, ``train_env``,
            ``train_tasks`` and ``agent_arch`` (and ``seed`` and ``batch_rows``, if they matter).
            A class of such objects can take this function as its method.
        num_rollouts: How many rollouts, at least 0.
        random_actions: Draw actions from the action space, without the agent.
        parallel_env: Environments side by side, such as a ``ParallelEnvManager``. ``None``: one
            rollout after another in ``learner.train_env``, in this process.

    Returns:
        The steps of the environments. They are added to ``learner.n_env_steps_total``, and the
        rollouts to ``learner.n_rollouts_total``; where the learner has ``_n_env_steps_total`` and
        ``_n_rollouts_total``, to these, and to the former only if they count the same.

    Raises:
        SpecError: For arguments that do not fit.
        UsageError: Without any environment, or for an agent without the memory it needs.
        EnvError, AgentError, WorkerError: If the environment, the agent or a worker fails. The
            rollouts that were complete by then are stored and counted.
    """
    n_rollouts = _count("num_rollouts", num_rollouts, 0)
    n_rows = _count("batch_rows", getattr(learner, "batch_rows", BATCH_ROWS), 1)
    arch = _arch(learner.agent_arch)
    store = _storing(learner.policy_storage, arch)
    lanes = _lanes(learner, parallel_env)
    n_rows = max(lanes.n_lanes, n_rows)
    agent = _agent(learner.agent, arch, lanes, random_actions)
    tasks = _tasks(learner, lanes)
    root = _root(learner)
    collection = getattr(learner, "_n_collections", 0)
    n_before = getattr(learner, "_n_rollouts_asked", 0)
    learner._n_collections = collection + 1
    learner._n_rollouts_asked = n_before + n_rollouts

    drawn = [NO_TASK] * n_rollouts
    if tasks is not None:
        drawn = [tasks[i] for i in task_draws(root, collection, n_rollouts, len(tasks))]
    seeds = episode_seeds(root, n_before, n_rollouts)
    keys = noise_keys(root, collection, n_rollouts)
    delivery = _Delivery(learner, store)
    try:
        rows = RowsEnv(lanes, n_rows)
        rollout = Rollout(agent, rows)
        task = None if not drawn or drawn[0] is NO_TASK else {TASK_OPTION: drawn[0]}
        steps = rollout.probe(probe_seed(root), [task] * n_rows, None)
        rows.is_probed = True
        if isinstance(agent, ActingAgent):
            agent.is_probed = True
        horizon = getattr(lanes, "horizon_bamdp", None) or MAX_CHUNK
        layout = Layout(steps, n_rows, min(int(horizon), MAX_CHUNK), 1)
        rollout.run(RolloutPlan(layout, rows, lanes.n_lanes, seeds, keys, drawn, delivery.take))
    except (EnvError, AgentError) as error:
        raise _placed(error, lanes) from error.__cause__
    finally:
        delivery.finish()
    return delivery.n_steps


class _Delivery:
    """Brings rollouts into the order of their numbers, stores and counts them."""

    def __init__(self, learner: Any, store: Callable[[RolloutData], None]) -> None:
        self._learner = learner
        self._store = store
        self._waiting: dict[int, RolloutData] = {}
        self._next = 0
        self.n_steps = 0

    def take(self, data: RolloutData) -> None:
        """Take a complete rollout; store those whose turn it is."""
        self._waiting[data.number] = data
        while self._next in self._waiting:
            self._pass_on(self._next)
            self._next += 1

    def finish(self) -> None:
        """Store what is complete though an earlier rollout failed."""
        for number in sorted(self._waiting):
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        # Forgotten first: a rollout that the storage refuses is not offered twice.
        data = self._waiting.pop(number)
        self._store(data)
        self.n_steps += data.n_steps
        _count_up(self._learner, "n_env_steps_total", data.n_steps)
        _count_up(self._learner, "n_rollouts_total", 1)


def _count_up(learner: Any, name: str, n: int) -> None:
    """Add to a counter, and to the one that has an underscore before its name, if there is one."""
    own = f"_{name}"
    if not hasattr(learner, own):
        setattr(learner, name, getattr(learner, name, 0) + n)
        return
    before = getattr(learner, own)
    goals: frozenset[str] = getattr(learner, "_rlpool_goals", frozenset())
    if getattr(learner, name, before) != before:
        # There it is how far to go, and stays so when that is reached.
        learner._rlpool_goals = goals = goals | {name}
    setattr(learner, own, before + n)
    if name not in goals and getattr(learner, name, before) == before:
        setattr(learner, name, before + n)


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise SpecError(f"{name} should be an int, got {value!r}")
    if value < least:
        raise SpecError(f"{name} should be at least {least}, got {value}")
    return int(value)


def _arch(arch: Any) -> AGENT_ARCHS:
    try:
        return AGENT_ARCHS(arch)
    except ValueError:
        names = ", ".join(f"AGENT_ARCHS.{member.name}" for member in AGENT_ARCHS)
        raise SpecError(f"agent_arch is {arch!r}", fix=f"use one of {names}") from None


def _storing(storage: Any, arch: AGENT_ARCHS) -> Callable[[RolloutData], None]:
    """How a rollout goes into the storage."""
    name = "add_sample" if arch is AGENT_ARCHS.Markov else "add_episode"
    add = getattr(storage, name, None)
    if not callable(add):
        raise SpecError(
            f"policy_storage is a {type(storage).__name__} without {name}(), "
            f"which agent_arch {arch.name} stores with",
            fix=f"define {name}(), or change agent_arch",
        )

    if arch is not AGENT_ARCHS.Markov:
        call = _by_name(add, _EPISODE_COLUMNS)
        return lambda data: call(
            data.observations, data.actions, data.rewards, data.terminals, data.next_observations
        )
    call = _by_name(add, _SAMPLE_COLUMNS)

    def add_samples(data: RolloutData) -> None:
        for step in range(data.n_steps):
            call(
                _at(data.observations, step),
                _at(data.actions, step),
                data.rewards[step, 0],
                data.terminals[step, 0],
                _at(data.next_observations, step),
            )

    return add_samples


def _by_name(add: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Hand columns over by keyword, or in their order where the storage has other names."""
    try:
        inspect.signature(add).bind(**dict.fromkeys(names))
    except TypeError:
        return add
    except ValueError:  # no signature to be had
        pass
    return lambda *columns: add(**dict(zip(names, columns, strict=True)))


def _at(values: Any, step: int) -> Any:
    if isinstance(values, dict):
        return {key: array[step] for key, array in values.items()}
    return values[step]


def _lanes(learner: Any, parallel_env: Any) -> VecEnv:
    """The environments to collect in."""
    if parallel_env is not None:
        if not isinstance(parallel_env, VecEnv):
            raise SpecError(
                f"parallel_env is a {type(parallel_env).__name__}, not a VecEnv",
                fix="use make_parallel_env(...), or GymEnv([...]); "
                "a single environment belongs into train_env",
            )
        return parallel_env
    env = getattr(learner, "train_env", None)
    if env is None:
        raise UsageError(
            "there is no environment to collect in",
            fix="pass parallel_env, or give the learner a train_env",
        )
    if isinstance(env, VecEnv):
        return env
    known = getattr(learner, "_serial_lanes", None)
    if known is None or known[0] is not env:
        known = (env, GymEnv([env]))
        learner._serial_lanes = known
    lanes: VecEnv = known[1]
    return lanes


def _agent(agent: Any, arch: AGENT_ARCHS, lanes: VecEnv, random_actions: bool) -> Agent:
    space = getattr(lanes, "action_space", None)
    if random_actions:
        return RandomAgent(space)
    check_agent(agent, needs_memory=arch is AGENT_ARCHS.Memory)
    if isinstance(agent, Agent):
        return agent
    return ActingAgent(agent, space, wants_memory=arch is AGENT_ARCHS.Memory)


def _tasks(learner: Any, lanes: VecEnv) -> list[Any] | None:
    """The tasks to draw from, ``None`` for environments without."""
    tasks = getattr(learner, "train_tasks", None)
    if tasks is None:
        tasks = _all_tasks(getattr(learner, "train_env", None))
        if tasks is None:
            tasks = _all_tasks(lanes)
        return tasks
    if not isinstance(tasks, Iterable):
        raise SpecError(f"train_tasks is {tasks!r}", fix="give a list of tasks to draw from")
    tasks = list(tasks)
    if not tasks:
        raise SpecError(
            "train_tasks is empty",
            fix="give tasks to draw from, or None for all that the environment knows",
        )
    return tasks


def _all_tasks(env: Any) -> list[Any] | None:
    """The tasks that an environment, or the first of several, knows; ``None`` if it has none."""
    if isinstance(env, ParallelEnvManager):
        return env.all_tasks
    if env is None:
        return None

    def attribute(name: str) -> Any:
        try:
            if isinstance(env, GymEnv):
                return env.attribute(0, name)
            return (
                env.get_wrapper_attr(name)
                if hasattr(env, "get_wrapper_attr")
                else getattr(env, name)
            )
        except AttributeError:
            return None

    return all_tasks(attribute)


def _root(learner: Any) -> int:
    """Root of all that a learner draws, made once per seed."""
    seed = getattr(learner, "seed", None)
    known = getattr(learner, "_rollout_root", None)
    if known is None or known[0] != seed:
        known = (seed, root_from(seed))
        learner._rollout_root = known
    root: int = known[1]
    return root


def _placed(error: EnvError | AgentError, lanes: VecEnv) -> WorkerError:
    """The error of an environment or agent, with its lane in place of the row of the batch."""
    where = error.where
    if where.episode is not None:
        where = where._replace(lane=where.episode % lanes.n_lanes)
    is_remote = isinstance(error, EnvError) and isinstance(lanes, ParallelEnvManager)
    if not is_remote:
        where = where._replace(worker=None)
    fix = error.fix
    if fix in (DEBUG_HINT, ENV_HINT):
        fix = LOCAL_HINT
        if is_remote:
            fix = "run it in this process to debug: parallel_env=None"
    elif "env_info" in fix:
        fix = "if it needs a task, list them in the learner's train_tasks"
    elif "agent_info" in fix:
        fix = "let the agent do without agent_info: rollouts pass none"
    return type(error)(
        error.what,
        where=where,
        fix=fix,
        traceback_text=error.traceback_text,
        capsule=error.capsule and replace(error.capsule, where=where),
    )
