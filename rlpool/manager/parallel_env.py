"""Environments in worker processes, the policy in the caller's.

The caller's rollout loop runs over a ``ParallelEnvManager`` as over any other ``VecEnv``: a step
of all lanes is one wake-up of each worker and one back, and everything else lies in shared memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlpool.arguments import names_arguments
from rlpool.batch.batcher_base import check_count, check_timeout
from rlpool.envs.columns import Columns
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.errors import EnvError, SpecError, Where
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.manager.arena import ArenaLayout
from rlpool.manager.env_crew import EnvCrew
from rlpool.manager.env_messages import Call
from rlpool.manager.orders import Orders, lane_failure
from rlpool.manager.remotes import Remote, WorkerHandle
from rlpool.manager.watched_crew import placed
from rlpool.memory.storage import Array
from rlpool.ownership import ProcessOwner
from rlpool.record.crash_files import CrashDir
from rlpool.specs import (
    Leaf,
    Structure,
    TensorSpec,
    leaves_of,
)
from rlpool.workers.failure_policy import DEFAULT_MAX_RESTARTS, FailurePolicy
from rlpool.workers.stack_dumps import DumpsStacks
from rlpool.workers.supervisor import refuse_during_import

DEFAULT_TIMEOUT_S = 600.0
"""Without progress for so long, a worker counts as hanging: far beyond any slow ``step``."""

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

    Environments without an observation space are reset once when they are made, to see what they
    show, or, if they cannot be reset without options, by the first reset that brings some.

    Environments of lanes whose next episodes are known may be reset for them as soon as an
    episode ends, which saves the way there and back.

    A call in which a signal's handler raises may be repeated with the same arguments; what it had
    begun is not done twice. Any other call first finishes what was begun.

    A worker that dies or hangs is replaced. Its environments are reset with the same seeds and
    options and given the same actions again, which are kept for that until the next reset; for
    environments that these determine the caller sees the same bits and no exception. A lane whose
    environment turns out to do something else then raises ``EnvError`` and needs a reset.

    Args:
        env_fns: Functions without arguments that make one environment each, in the workers.
            Lambdas, closures and classes defined in a script or notebook are fine.
        envs_per_worker: Environments of each worker process, which steps them one after another.
        seed: Root of the seeds of ``reset`` and of remotes. A batcher brings its own seeds.
        timeout: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        max_episode_steps: Truncate episodes after so many steps.
        keep_float64: Store float64 as it is, by default it becomes float32.
        auto_reset: Whether lanes of a ``Batcher`` or of ``step`` restart on their own.
        min_ready: How many lanes a batcher's loop waits for; the default is all of them. With
            fewer, lanes that are slow do not hold the others, the agent is called more often, and
            results are the same. Agents that require a history always wait for all.
        on_worker_failure: ``"restart"`` replaces a worker that died or hangs, ``"raise"`` raises
            ``WorkerDiedError`` or ``WorkerTimeoutError``, after which the manager is of no use.
        max_restarts: How many replacements of failed workers there may be in all, ``None`` for no
            limit. One more failure raises ``WorkerDiedError``, whose ``history`` has them all.
        on_env_error: ``"raise"`` raises ``EnvError`` where an environment raises, ``"restart"``
            replaces its worker as if it had died, and lets it try again.
        max_episodes_per_worker: Replace a worker, which is no failure, at the reset after so many
            episodes of its lanes; ``None`` for never. Other lanes of the worker that are in the
            middle of an episode are brought back to where they were.
        max_rss_bytes: The same for a worker whose resident memory is larger than so many bytes.
        start_method: ``"auto"`` forks workers from a template process where that is safe,
            ``"spawn"`` always spawns them, see docs/start_methods.md.
        crash_dir: A directory, made if it is missing: if an environment fails, this process
            writes what ``rlpool.replay_crash`` needs into a file there, which the message of the
            error names. A batcher over the environments knows more (``agent_info`` and rewards):
            give it to the batcher instead.

    Attributes:
        num_envs: Number of environments, ``n_lanes`` by another name.
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
    """

    @names_arguments
    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        envs_per_worker: int = 1,
        seed: int | Sequence[int] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        max_episode_steps: int | None = None,
        keep_float64: bool = False,
        auto_reset: bool = False,
        min_ready: int | None = None,
        on_worker_failure: str = "restart",
        max_restarts: int | None = DEFAULT_MAX_RESTARTS,
        on_env_error: str = "raise",
        max_episodes_per_worker: int | None = None,
        max_rss_bytes: int | None = None,
        start_method: str = "auto",
        crash_dir: CrashDir = None,
    ) -> None:
        refuse_during_import()
        policy = FailurePolicy(
            on_worker_failure,
            max_restarts,
            on_env_error,
            max_episodes_per_worker,
            max_rss_bytes,
            start_method,
        )
        env_fns = _checked_functions(env_fns)
        check_count("envs_per_worker", envs_per_worker, 1)
        check_timeout(timeout)
        for name, number in (("min_ready", min_ready), ("max_episode_steps", max_episode_steps)):
            if number is not None:
                check_count(name, number, 1)
        super().__init__(len(env_fns), seed)
        self.auto_reset = auto_reset
        self.min_ready = min_ready
        self._env_fns = env_fns
        self._options: dict[str, Any] = {
            "max_episode_steps": max_episode_steps,
            "keep_float64": keep_float64,
        }
        self._crew = EnvCrew(
            env_fns, envs_per_worker, self._root, self._options, timeout, policy, crash_dir
        )
        try:
            self._agree()
        except BaseException:
            self._crew.close()
            raise
        self.num_envs = self.n_lanes
        self.workers = [WorkerHandle(self._crew, w) for w in range(self._crew.n_workers)]
        self.remotes = [
            Remote(self._crew, self._orders, lane, self.action_space)
            for lane in range(self.n_lanes)
        ]

    def _agree(self) -> None:
        """Take over what the workers report, which must be the same, and make the arena."""
        first, crew = self._crew.reports[0], self._crew
        shown = [report.observation for report in crew.reports if report.observation is not None]
        structure = shown[0] if shown else None
        for worker, report in enumerate(crew.reports):
            observed = structure if report.observation is None else report.observation
            for name, mine, theirs in (
                ("observation_space", structure, observed),
                ("action_space", first.action, report.action),
            ):
                if mine != theirs:
                    raise SpecError(
                        f"{name} of environment {crew.lanes_of[worker][0]} is {theirs}, "
                        f"that of environment 0 is {mine}",
                        fix="put only environments with equal spaces into one manager",
                    )
        crew.capsules.bind(first.action, first.native_action)
        self.observation_space, self.action_space = pickle.loads(first.spaces)
        self.n_tasks, self.horizon_bamdp = first.n_tasks, first.horizon_bamdp
        self.all_tasks = first.all_tasks
        self._is_declared = first.is_declared
        self._action_leaves = None
        if first.action is not None:
            self._action_leaves = leaves_of({"action": first.action}, "")
        leaves = {} if structure is None else self._declare_structure(structure).leaves
        layout = ArenaLayout(self.n_lanes, crew.n_workers, leaves, first.native_action or {})
        arena = crew.map(layout)
        self._arena = arena
        self._orders = Orders(crew)
        self.place(arena.observation, arena.reward, arena.flags)
        self._handed = arena.action  # where actions are handed over
        self._copied: dict[str, Array] = {}  # last actions that are kept elsewhere
        self._announced: tuple[list[int], dict[str, Array]] = ([], {})
        # What a signal's handler interrupted:
        self._begun_reset: tuple[Sequence[int], Sequence[int], Sequence[Options]] | None = None
        self._reset_number: int | None = None  # of ``reset``
        self._half_step: tuple[dict[str, Array], Any] | None = None  # of ``step``
        self._is_in_step = False
        if structure is not None and len(shown) < crew.n_workers:
            self._map_observations(structure)

    def _map_observations(self, structure: Structure) -> None:
        """Tell all workers what observations look like, and where they are kept."""
        columns = self._declare_structure(structure)
        self._crew.map_observations(structure)
        columns.place(self._arena.observation)
        self.current.update(columns.arrays)

    def _learn_observations(self, lane: int, seed: int, options: Options) -> None:
        """Let an environment show what observations look like, since no space says it.

        Raises:
            LaneFailure: If its reset fails.
        """
        crew = self._crew
        crew.options[lane] = options
        reply, value = crew.ask(lane, "describe", (seed, options))
        if reply == "structure":
            self._map_observations(value)
            return
        where = Where(crew.worker_of[lane], lane, step=0, seed=seed, env_info=options or None)
        error = crew.capsules.of_remote(placed(value, where), Call(lane, "reset", (seed, options)))
        raise lane_failure(error, lane, "reset", where)

    # The lane contract ---------------------------------------------------------------------

    @property
    def columns(self) -> Columns | None:
        """The observations' columns, ``None`` before the first reset of undeclared spaces."""
        return self._columns

    def forget(self) -> None:
        """Be as before the first reset, see ``VecEnv.forget``."""
        super().forget()
        if not self._is_declared:
            self._forget_columns()

    @property
    def action_leaves(self) -> dict[str, Leaf] | None:
        """Keys of the actions, ``None`` if the environments declare no action space."""
        return self._action_leaves

    def announce_episodes(self, seeds: Sequence[int], env_info: Mapping[str, Array]) -> None:
        """Let the workers know which episodes will come, so that they begin them on their own."""
        self._begin()
        announced = (list(seeds), dict(env_info))
        self._orders.announce(seeds, env_info)
        self._announced = announced

    def _action_arrays(self, specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
        if not self._handed:  # no action space: what the agent gives is what there is
            self._handed = self._crew.map_actions(specs)
        arrays = super()._action_arrays(specs)
        for key, array in self._handed.items():
            if key in specs and array.dtype == specs[key].dtype:
                arrays[key] = array  # the last action is where it was handed over
        self._copied = {k: a for k, a in arrays.items() if a is not self._handed.get(k)}
        return arrays

    def _begin(self, to_reset: Sequence[int] = ()) -> None:
        """What every call begins with: refuse to go on, or finish what was interrupted.

        Args:
            to_reset: Lanes that the call will reset itself.
        """
        self._orders.begin()
        begun = self._begun_reset
        if begun is not None and not set(to_reset).issuperset(begun[0]):
            self._reset_number = None
            super().reset_lanes(*begun)
            self._begun_reset = None

    def reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        """Start an episode on some lanes, see ``VecEnv.reset_lanes``."""
        self._begin(lanes)
        if not self._is_in_step:
            self._half_step = None
        super().reset_lanes(lanes, seeds, options)
        self._begun_reset = None

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        crew = self._crew
        crew.refuse_bad_lanes(lanes)
        self._orders.settle(lanes)
        if self._columns is None:
            self._learn_observations(lanes[0], seeds[0], options[0])
        with InterruptsHeld():
            crew.recycle(lanes)
            workers = self._begin_episodes(lanes, seeds, options)
            self._begun_reset = lanes, seeds, options
        try:
            self._orders.wait_for_resets(workers)
        except EnvError:
            self._begun_reset = None
            raise

    def _begin_episodes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> list[int]:
        """Let lanes begin episodes; returns the workers that have to be waited for."""
        crew, arena = self._crew, self._arena
        rest, begun = [], []
        for row, lane in enumerate(lanes):
            number = int(arena.is_ahead[lane])
            if number >= 0 and self._is_announced(number, seeds[row], options[row]):
                begun.append(lane)
                crew.options[lane] = options[row]
            else:
                rest.append(row)
        if begun:
            for key, array in arena.observation.items():
                array[begun] = arena.ahead[key][begun]
            arena.is_ahead[begun] = -1
            rows = [list(lanes).index(lane) for lane in begun]
            self._orders.note_begun(
                begun, [seeds[row] for row in rows], [options[row] for row in rows]
            )
        if not rest:
            return []
        return self._orders.reset(
            [lanes[row] for row in rest],
            [seeds[row] for row in rest],
            [options[row] for row in rest],
        )

    def _is_announced(self, number: int, seed: int, options: Options) -> bool:
        """Whether an episode that is begun already is the one that is asked for."""
        seeds, env_info = self._announced
        if seeds[number] != seed:
            return False
        announced = {key: array[number].tolist() for key, array in env_info.items()}
        return (options or {}) == announced

    def in_this_process(self, lane: int) -> GymEnv:
        """Another environment like that of a lane, made here, for debuggers."""
        return GymEnv([self._env_fns[lane]()], **self._options)

    def step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> list[int]:
        """Step some lanes, those of all workers at the same time.

        If a signal's handler raises in it, it may be called again with the same lanes and actions:
        the step is made once. Whatever is called instead waits for the step if it was begun.

        Args:
            lanes: Ascending lane numbers.
            actions: Action key to array ``[n_lanes, ...]``; only the rows of ``lanes`` are read.

        Returns:
            The lanes whose episode ended with this step.

        Raises:
            EnvError: If an environment raises or returns what does not fit; it is a ``LaneError``,
                too. Its lane, and with several environments per worker the lanes of the same
                worker that took part, need a reset, without which they are refused; all others
                have made their step.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
            UsageError: If the manager is closed.
        """
        self._begin()
        if type(lanes) is not list:
            lanes = list(lanes)
        all_step = len(lanes) == self.n_lanes
        orders = self._orders
        if not self._is_in_step:
            self._half_step = None
        if orders.open is not None and not self._is_repeated(lanes, actions, is_waited_for=True):
            orders.close_step()
        if orders.open is None:
            self._hand_over(lanes, actions, all_step)
        if self._some_lane_is_initial:
            self._initial_state[_ALL if all_step else lanes] = False
            self._some_lane_is_initial = not all_step
        done: list[int] = []
        if orders.step(lanes):
            done = np.flatnonzero(self.current["done"]).tolist()
            if not all_step:
                done = sorted(set(done).intersection(lanes))
        if not self._is_in_step:
            orders.open = None
        return done

    def step_some(
        self,
        min_ready: int = 1,
        lanes: Sequence[int] = (),
        actions: Mapping[str, Array] | None = None,
    ) -> list[int]:
        """Let some lanes step, and return those that are ready, whoever they are.

        Lanes that are slow do not hold the others: they are returned by a later call::

            ready = list(range(manager.num_envs))
            while True:
                actions = policy(manager.current, ready)  # rows of lanes that step are in motion
                ready = manager.step_some(4, ready, actions)

        With several environments per worker, all those of a worker that step are ready together.
        If a signal's handler raises in it, it may be called again with the same arguments.

        Args:
            min_ready: Wait until so many of the lanes that are stepping are ready, or all of them
                if they are fewer. 0 does not wait.
            lanes: Ascending numbers of lanes to step that are not stepping; none, by default.
            actions: Their actions as for ``step_lanes``.

        Returns:
            Lanes that have made their step, ascending; ``current["done"]`` tells whose episode
            ended. No lane is returned twice for one step.

        Raises:
            EnvError: As ``step_lanes``. What became of lanes of other workers is told by the next
                call.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
            UsageError: If one of the lanes is stepping, or the manager is closed.
        """
        crew, orders = self._crew, self._orders
        self._begin()
        check_count("min_ready", min_ready, 0)
        self._half_step = None
        lanes = list(lanes)
        is_begun = orders.open is not None and self._is_repeated(
            lanes, actions or {}, is_waited_for=False
        )
        if not is_begun:
            orders.close_step()
        if lanes and not is_begun:
            crew.refuse_bad_lanes(lanes)
            orders.refuse_stepping(lanes)
            self._hand_over(lanes, actions or {}, False)
            self._initial_state[lanes] = False
            orders.begin_some(lanes)
        elif not min_ready:
            orders.look()
        return orders.take_ready(min_ready)

    def _is_repeated(
        self, lanes: list[int], actions: Mapping[str, Array], *, is_waited_for: bool
    ) -> bool:
        """Whether a step that was interrupted is asked for again."""
        step = self._orders.open
        if step is None or (step.lanes, step.is_waited_for) != (lanes, is_waited_for):
            return False
        return _are_equal(self._handed, actions, lanes)

    def _hand_over(
        self, lanes: Sequence[int], actions: Mapping[str, Array], all_step: bool
    ) -> None:
        """Put actions where the workers read them."""
        try:
            if not self._handed:
                self.declare_actions(_specs_of(actions))
            for arrays in (self._handed, self._copied):
                for key, array in arrays.items():
                    values = actions[key]
                    if values.shape != array.shape:
                        raise ValueError(f"got shape {list(values.shape)}")
                    if not np.can_cast(values.dtype, array.dtype, "same_kind"):
                        raise TypeError(f"{key!r} is {values.dtype}, {array.dtype} is taken")
                    if all_step:
                        np.copyto(array, values, "same_kind")
                    else:
                        array[lanes] = values[lanes]
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            wanted = {key: [self.n_lanes, *a.shape[1:]] for key, a in self._handed.items()}
            raise SpecError(
                f"actions should be arrays of the shapes {wanted}: {error}",
                fix="pass one row per lane, also for lanes that do not step",
            ) from error

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> Any:
        raise NotImplementedError  # step_lanes does all of it: results are in the arena already

    # Life and end --------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or every environment was closed by its remote."""
        return self._crew.closed

    def reset(self, *arguments: Any, **named: Any) -> Any:
        """Reset all environments, see ``VecEnv.reset``; may be repeated after an interruption."""
        self._begin(range(self.n_lanes))
        if self._reset_number is not None:
            self._n_resets = self._reset_number
        self._half_step = None
        self._reset_number = self._n_resets
        try:
            result = super().reset(*arguments, **named)
        except EnvError:
            self._reset_number = None
            raise
        self._reset_number = None
        return result

    def step(self, *arguments: Any, **named: Any) -> Any:
        """Step the running environments, see ``VecEnv.step``; may be repeated likewise."""
        self._begin()
        self._reset_number = None
        self._is_in_step = True
        try:
            result = super().step(*arguments, **named)
        except EnvError:
            self._half_step = None
            raise
        finally:
            self._is_in_step = False
        self._half_step = None
        return result

    def _stepped(self, actions: dict[str, Array]) -> Any:
        half = self._half_step
        if half is None or not _are_equal(half[0], actions, self._running):
            half = self._half_step = actions, super()._stepped(actions)
        self._orders.open = None
        return half[1]

    def _stacks(self) -> str:
        if self._crew.closed:
            self._crew.check_open()  # which says so
        self._crew.refuse_forked_copy()
        return self._crew.worker_stacks()

    def close(self) -> None:
        """Close all environments and end the workers, within a few seconds. May be repeated."""
        self._crew.close()

    def _has_processes(self) -> bool:
        return "_crew" in self.__dict__


def _checked_functions(env_fns: Any) -> list[Callable[[], Any]]:
    try:
        functions = list(env_fns)
    except TypeError:
        functions = []
    bad = [number for number, function in enumerate(functions) if not callable(function)]
    if not functions or bad:
        what = f"env_fns[{bad[0]}] is {functions[bad[0]]!r}" if bad else f"env_fns is {env_fns!r}"
        raise SpecError(
            f"{what}, not a list of functions",
            fix="pass functions without arguments that make one environment each, "
            "such as [lambda: gymnasium.make('CartPole-v1')] * 4",
        )
    return functions


def _are_equal(some: Mapping[str, Array], others: Mapping[str, Array], lanes: list[int]) -> bool:
    """Whether actions of lanes are the same, as far as they can be told apart."""
    try:
        return all(
            array[lanes].tobytes() == others[key][lanes].astype(array.dtype).tobytes()
            for key, array in some.items()
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return False


def _specs_of(actions: Mapping[str, Array]) -> dict[str, TensorSpec]:
    """Specs of actions for which there is no space."""
    return {
        key: TensorSpec(array.shape[1:], array.dtype)
        for key, array in actions.items()
        if key == "action" or key.startswith("action/")
    }
