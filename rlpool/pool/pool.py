"""``Pool``: a replay store of transitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlpool.arguments import names_arguments
from rlpool.batch.batcher_base import check_count
from rlpool.data.named_tensors import listed_keys
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, UsageError
from rlpool.memory.storage import Array
from rlpool.pool.checkpoint import from_tensors, read_file, state_of, to_tensors, write_file
from rlpool.pool.collection import EpisodeRunner
from rlpool.pool.intake import intake_of, specs_of
from rlpool.pool.pool_reader import PoolReader
from rlpool.pool.priorities import checked_indexes, checked_powers, checked_priorities
from rlpool.pool.reader import check_number
from rlpool.pool.ring import WindowRules
from rlpool.pool.transition import (
    ACTION_KEY,
    DONE_KEY,
    REWARD_KEY,
    specs_of_arrays,
    trajectory_of,
    transition_of,
)
from rlpool.pool.writer import TransitionWriter
from rlpool.seeding import root_from
from rlpool.slots.blocks import successor_key
from rlpool.specs import DEFAULT_OBSERVATION_KEY
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, FailurePolicy
from rlpool.workers.stack_dumps import DumpsStacks

_FIVE_KEYS = (
    DEFAULT_OBSERVATION_KEY,
    ACTION_KEY,
    successor_key(DEFAULT_OBSERVATION_KEY),
    REWARD_KEY,
    DONE_KEY,
)


_MOST_TRANSITIONS = 2**48
"""More than any memory or disk has room for."""


class Pool(TransitionWriter, DumpsStacks):
    """A bounded store of transitions: the most recent ones, to be sampled for learning.

    Filled in three ways, which may be mixed as long as transitions have the same keys:
    ``extend(trajectories)`` takes what a batcher returned, ``store()`` runs an episode in each of
    its own environments, and ``pool(s, a, next_s, r, done)`` adds a single transition. Rewards are
    stored in float32, whichever way they come in.

    The pool is divided into ``processes`` sub-pools whose capacities add up to ``pool_size``. Each
    keeps its newest transitions: when one is added to a full one, the oldest goes, or with
    ``window_size`` all but the newest ``window_size``. Adding costs the same however full the pool
    is, and never moves what is there.

    Not for use by several threads at once. Other processes may read a pool with
    ``storage="shared"``: send it through a pipe, a queue or the arguments of a process, once it
    holds a transition, and what arrives is a ``PoolReader``. In a forked process it is the pool
    itself, which only reads there.

    Args:
        env: Environments for ``store()``, one per process; see ``store``.
        processes: Number of sub-pools, and of processes of ``store()``. By default as many as there
            are environments, or 1.
        pool_size: Transitions to hold in all.
        window_size: What a sub-pool keeps when it overflows, at most its capacity.
        clearing_freq: After every so many transitions added to a sub-pool, drop its
            ``window_size_`` oldest.
        window_size_: See ``clearing_freq``; only together with it.
        random: Whether a transition of ``store()`` goes to a sub-pool at random, with probability
            proportional to 1 / (its length + 1); otherwise to that of its process. Where
            transitions of several processes mix, none is known to follow another: each keeps its
            next state, sequences and n-step returns end with it.
        policy: For ``store()`` with Gymnasium environments: called in the workers with a state for
            an action. By default the action space is sampled.
        seed: Root of the randomness of sampling, of distributing and of ``store()``; ``None`` draws
            one.
        keys: Keys of trajectories to store, by default all.
        storage: ``"local"``, ``"shared"`` (for readers in other processes) or ``"memmap"`` (a file
            without a name, for pools beyond memory).
        directory: Where the file of ``"memmap"`` lies, by default where temporary files do.
        priority_exponent: Sample in proportion to priorities to this power (alpha in the paper),
            see ``update_priorities``; by default uniformly.
        timeout: Seconds without a step after which a process of ``store()`` counts as hanging.
        start_method: How processes of ``store()`` are started, as for ``EpisodeBatcher``.

    Raises:
        SpecError: For sizes below 1, one of ``clearing_freq`` and ``window_size_`` without the
            other, another number of environments than of processes, or an unknown storage.

    Example:
        >>> pool = Pool(pool_size=1000, seed=0)
        >>> for step in range(20):
        ...     pool([step], 0, [step + 1], 1.0, step == 19)
        >>> len(pool), pool.sample(4)["_frame"].shape
        (20, torch.Size([4, 1]))
    """

    @names_arguments
    def __init__(
        self,
        env: Sequence[Any] | None = None,
        processes: int | None = None,
        pool_size: int | None = None,
        window_size: int | None = None,
        clearing_freq: int | None = None,
        window_size_: int | None = None,
        random: bool = True,
        *,
        policy: Any = None,
        seed: int | None = None,
        keys: Sequence[str] | None = None,
        storage: str = "local",
        directory: str | Path | None = None,
        priority_exponent: float | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        start_method: str = "auto",
    ) -> None:
        if processes is None:
            processes = max(1, len(env)) if isinstance(env, Sequence) else 1
        check_count("processes", processes, 1)
        if pool_size is None:
            raise SpecError("pool_size is missing", fix="say how many transitions to hold")
        check_count("pool_size", pool_size, processes)
        if pool_size > _MOST_TRANSITIONS:
            raise SpecError(f"pool_size should be at most {_MOST_TRANSITIONS}, got {pool_size}")
        if not isinstance(random, bool | np.bool_):
            raise SpecError(f"random is {random!r}", fix="pass True or False")
        rules = WindowRules.checked(window_size, clearing_freq, window_size_)
        if priority_exponent is not None:
            check_number("priority_exponent", priority_exponent, np.inf)
        if seed is not None:
            check_count("seed", seed, 0)
            seed = int(seed)
        if keys is not None:
            keys = listed_keys(keys)
            if not keys:
                raise SpecError("keys are empty", fix="leave keys out to store all")
        FailurePolicy(start_method=start_method)  # checked, whether or not it is used
        self._runner = None
        if env is not None:
            self._runner = EpisodeRunner(
                env, processes, seed, policy, timeout=timeout, start_method=start_method
            )
        super().__init__(
            int(pool_size),
            int(processes),
            rules,
            random=bool(random),
            root=root_from(seed),
            keys=keys,
            storage=storage,
            directory=directory,
            alpha=priority_exponent,
        )

    # Adding ----------------------------------------------------------------------------------

    def extend(self, trajectories: TemporalDictTensor, index: int | None = None) -> None:
        """Add every step of some trajectories, in row-then-time order.

        Values after a step that follow from the next step, such as ``_frame``, are not stored
        twice. Nothing refers to the trajectories afterwards. Their ``info`` is not stored, nor are
        keys that the transitions before did not have.

        Args:
            trajectories: ``[B, T, ...]`` with the keys of the pool, on any device.
            index: The sub-pool to add to. By default each trajectory goes to one that is drawn with
                probability proportional to 1 / (its length + 1).

        Raises:
            SpecError: If keys, shapes or dtypes are not those that the pool holds, or a disk or the
                memory is full. Nothing that was stored is lost.
        """
        if not isinstance(trajectories, TemporalDictTensor):
            raise SpecError(
                f"extend() takes a TemporalDictTensor, got {type(trajectories).__name__}",
                fix="use TemporalDictTensor.from_packed(transitions, lengths) on transitions",
            )
        index = self._checked_index(index)
        if not trajectories.n_elems() or not int(trajectories.lengths.sum()):
            return
        with self._first_decides():
            schema = self._admit(specs_of(trajectories, self._known_keys()), "the trajectories")
            intake = intake_of(trajectories, schema)
            if index is not None or len(self._rings) == 1:
                self._add(index or 0, intake)
                return
            sizes = trajectories.lengths.cpu().numpy()
            sizes = sizes[sizes > 0]
            of_ring = np.repeat(self._routes(sizes.tolist()), sizes)
            for ring in np.unique(of_ring).tolist():
                self._add(ring, intake.part(np.flatnonzero(of_ring == ring)))

    def pool(
        self,
        s: Any,
        a: Any,
        next_s: Any,
        r: Any,
        done: Any,
        index: int | None = None,
        *,
        terminated: Any = None,
    ) -> None:
        """Add a single transition; calling the pool does the same.

        Transitions that are added one after the other and follow from each other are known to be
        of one episode, and ``next_s`` is then not stored.

        Args:
            s: The state ``[*S]``, an array, tensor or number; copied.
            a: The action ``[*A]``.
            next_s: The state after it ``[*S]``.
            r: The reward, a number; stored in float32.
            done: Whether the episode ended.
            terminated: Whether it ended by itself, and was not cut off; by default ``done``.
            index: The sub-pool to add to. By default one at random, or the emptiest one with
                ``random=False``.

        Raises:
            SpecError: If something does not fit what the pool holds.
        """
        index = self._checked_index(index)
        values = transition_of(s, a, next_s, r, done, done if terminated is None else terminated)
        # In a sub-pool that was drawn, the one before is of the same episode by chance at best.
        may_go_on = index is not None or not self._random or len(self._rings) == 1
        with self._first_decides():
            schema = self._admit(specs_of_arrays(values, self._known_keys()), "the transition")
            if index is None:
                index = self._route() if self._random else int(np.argmin(self.lengths))
            self._add_one(index, values, schema, may_go_on=may_go_on)

    __call__ = pool

    def store(self) -> None:
        """Run one episode in each environment, each in its own process, and add them.

        Returns when all episodes have ended. Environments follow one of two protocols. Those of
        Gymnasium: actions come from ``policy`` or the action space. Those that choose their own
        actions: ``reset() -> (state, action)`` and ``step(action) -> (action, next_state, reward,
        done)``, where the action stored is the one that ``step`` returns. The processes live until
        ``close``; environments keep what they remember, unless they are changed here.

        Raises:
            UsageError: Without environments, or after ``close``.
            EnvError, AgentError: If an environment or the policy fails; nothing of this run is
                added, and the next run starts anew.
            WorkerStartupError, WorkerDiedError, WorkerTimeoutError: If a process cannot start,
                dies or hangs; likewise.
        """
        episodes = self._open_runner().run()
        trajectories = [trajectory_of(episode) for episode in episodes]
        if not self._random or len(self._rings) == 1:
            for number, trajectory in enumerate(trajectories):
                self.extend(trajectory, number)
            return
        with self._first_decides():
            self._scatter(trajectories)

    def update_priorities(self, index: Any, priorities: Any) -> None:
        """Set the priorities of transitions, usually their absolute errors and a bit.

        New transitions have the largest priority so far, so that each is soon seen.

        Args:
            index: int64 ``[n]``, as ``sample`` gave it. Transitions that are gone are left out.
            priorities: ``[n]``, finite and not negative.

        Raises:
            UsageError: If the pool samples uniformly.
            SpecError: For other shapes or values.
        """
        if self._alpha is None:
            raise UsageError(
                "the pool samples uniformly and has no priorities",
                fix="make it with priority_exponent=0.6, for instance",
            )
        index, priorities = checked_indexes(index), checked_priorities(priorities)
        if index.shape != priorities.shape:
            raise SpecError(
                f"index has shape {list(index.shape)}, priorities have {list(priorities.shape)}"
            )
        powers = checked_powers(priorities, self._alpha)
        self._sync.refuse_others()
        if self._tree is None or not index.size:
            return
        numbers, rings = np.divmod(index, len(self._rings))
        oldest, after = self._sync.numbers[rings].T
        is_held = (oldest <= numbers) & (numbers < after)
        numbers, rings = numbers[is_held], rings[is_held]
        powers = powers[is_held]
        self._tree.set(self._offsets[rings] + numbers % self._capacities[rings], powers)
        self._max_priority = max(self._max_priority, float(powers.max(initial=0.0)))

    # What there is ---------------------------------------------------------------------------

    def get_pool(self) -> tuple[Array, Array, Array, Array, Array]:
        """States, actions, next states, rewards and ends of all transitions, in sub-pool order.

        Returns:
            Copies ``[N, *S]``, ``[N, *A]``, ``[N, *S]``, float32 ``[N]``, ``[N]``, oldest first
            within each sub-pool; empty arrays before the first transition.

        Raises:
            UsageError: If the transitions have no ``frame``, ``action``, ``_frame``, ``_reward``
                or ``_done``.
        """
        if not len(self):
            empty = np.zeros(0, np.float32)
            return empty, empty.copy(), empty.copy(), empty.copy(), np.zeros(0, bool)
        missing = [key for key in _FIVE_KEYS if key not in self.specs]
        if missing:
            raise UsageError(
                f"the pool has no {missing}, it has {list(self.specs)}",
                fix="use transitions(), which gives every key",
            )
        every = self.transitions(_FIVE_KEYS)
        s, a, next_s, r, done = (every[key].numpy() for key in _FIVE_KEYS)
        return s, a, next_s, r, done

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows that were written so far, bookkeeping and priorities included."""
        if self._store is None:
            return 0
        n_rows = sum(min(ring.next, ring.capacity) for ring in self._rings)
        tree = 0 if self._tree is None else self._tree.nbytes
        return self._store.n_bytes(n_rows) + tree

    @property
    def pool_size(self) -> int:
        """Transitions that fit in."""
        return self._pool_size

    # Keeping it ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next samples depend on, what environments remember left out.

        Returns:
            Tensors and a text, which ``torch.save`` writes and ``torch.load(weights_only=True)``
            reads. The tensors are views: save them, or copy them, before the pool is changed.
        """
        return to_tensors(*state_of(self, self._more()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what another pool was; from here on both give the same samples.

        Args:
            state: What its ``state_dict`` returned; copied.

        Raises:
            SpecError: If the sizes, rules or ``priority_exponent`` that this pool was made with
                differ from the saved one's, or the keys that it was restricted to or holds. It
                is as before then. ``seed`` and ``storage`` may differ.
        """
        self._resume(from_tensors(self, state))

    def save(self, path: str | Path) -> None:
        """Write the pool to a file, without needing memory for that.

        The file is in the safetensors format and holds no code. What was at the path stays until
        all is written.

        Args:
            path: The file.

        Raises:
            SpecError: If the disk is full or the path cannot be written.
        """
        write_file(path, *state_of(self, self._more()))

    def load(self, path: str | Path) -> None:
        """Become what a saved pool was; from here on this one gives the samples that it would give.

        Args:
            path: A file that ``save`` wrote. If this pool is not empty, there has to be room for
                what it holds and for what the file holds.

        Raises:
            SpecError: If the file cannot be read or is damaged, or for the reasons of
                ``load_state_dict``. This pool is as before then.
        """
        self._resume(read_file(self, path))

    def _more(self) -> dict[str, Any]:
        return {"runner": None if self._runner is None else self._runner.state_dict()}

    def _resume(self, state: Mapping[str, Any]) -> None:
        if self._runner is not None and state["runner"] is not None:
            self._runner.load_state_dict(state["runner"])

    def __reduce__(self) -> tuple[Any, ...]:
        if self._store is None:
            raise UsageError(
                "the pool cannot be sent before it has a transition: its keys are not known",
                fix="add the first transitions, then send it",
            )
        return PoolReader.attached, self._shared_parts()

    def _open_runner(self) -> EpisodeRunner:
        if self._runner is None:
            raise UsageError("the pool has no environments", fix="pass env=[...], or use extend()")
        if self._runner.closed:
            raise UsageError("the pool was closed", fix="make another one, close it later")
        return self._runner

    def _stacks(self) -> str:
        return self._open_runner().stacks()

    def close(self) -> None:
        """End the processes of ``store()``. What is stored stays. May be repeated."""
        if self._runner is not None:
            self._runner.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        keys = ", ".join(f"{key} {spec}" for key, spec in self.specs.items())
        return f"Pool({len(self)} of {self._pool_size} transitions; {keys or 'nothing yet'})"
