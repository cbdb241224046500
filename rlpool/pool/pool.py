"""``Pool``: a replay store of transitions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.rows import instance, listed
from rlpool.data.specs import TensorSpec, refuse_missing
from rlpool.data.storage import NDArray, allocate
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import also_takes, check_choice, real_number, whole_number
from rlpool.machine.interrupts import defer_signals
from rlpool.pool import sampling
from rlpool.pool.filling import Filler
from rlpool.pool.ingest import TRANSITION_KEYS, transition_of
from rlpool.pool.priorities import checked_priorities
from rlpool.pool.runner import EpisodeRunner
from rlpool.pool.store import Settings, Store
from rlpool.pool.sub_pool import WindowRules
from rlpool.seeding import root_from
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, FailurePolicy

_FORMAT = 5  # of state_dict
_SAMPLING, _ROUTING = 1, 2  # purposes of the generators' seeds


class Pool:
    """A bounded replay store of the most recent transitions.

    There are three ways to fill it, which can be mixed if the transitions have the same keys:
    ``extend(trajectories)`` adds a batcher's results, ``store()`` runs an episode in each of the
    pool's own environments, and ``pool(s, a, next_s, r, done)`` adds a single transition. Rewards
    are always stored in float32.

    The pool is divided into ``n_workers`` sub-pools with a total capacity of ``pool_size``. Each
    keeps its newest transitions: when a full one overflows, the oldest transition is dropped, or
    with ``window_size`` all but the newest ``window_size``. The cost of adding does not depend on
    the fill level, and stored transitions are never moved.

    A pool must not be used by several threads at once, or in a forked process.

    Args:
        env: Environments for ``store()``, one per process; see ``store``.
        n_workers: Number of sub-pools, and of processes of ``store()``. By default the number of
            environments, or 1.
        pool_size: Total capacity in transitions.
        window_size: Number of transitions that a sub-pool keeps when it overflows, at most its
            capacity.
        clearing_freq: Whenever this many transitions have been added to a sub-pool, drop its
            ``window_size_`` oldest ones.
        window_size_: Number of transitions to drop; only together with ``clearing_freq``.
        random: Whether a transition of ``store()`` is added to a random sub-pool, with probability
            proportional to 1 / (its length + 1), or to that of its process. If transitions of
            several processes mix, successors are unknown: sequences and n-step returns have a
            single step.
        policy: For ``store()`` with Gymnasium environments: a function from state to action, sent
            to the workers. By default the action space is sampled.
        seed: Root seed of sampling, of the choice of sub-pools and of ``store()``; ``None`` draws
            one.
        keys: Keys of trajectories to store, by default all.
        info_keys: Keys of the trajectories' ``info`` to store with every transition, such as
            ``"env_info/task"`` or ``"seed"``; ``"agent_info"`` means all keys ``agent_info/...``.
            Samples have them among their keys, sequences in their ``info``, from which
            ``replay_agent`` reads ``agent_info``.
        storage: ``"local"``, or ``"memmap"`` (an unnamed file, for pools larger than memory).
        directory: Directory of the file of ``"memmap"``, by default that of temporary files.
        priority_exponent: Sample in proportion to priorities to this power (alpha in the paper),
            see ``update_priorities``; by default uniformly.
        frame_stack: Observations ``[frame_stack, ...]`` are stacks of this many frames, newest
            last; each step drops the oldest. Only the newest frame is stored, a quarter of the
            memory for 4. Samples have complete stacks, bit for bit.
        timeout: Seconds without a step after which a process of ``store()`` counts as hanging.
        start_method: Start method of the processes of ``store()``, as for ``EpisodeBatcher``.

    Raises:
        SpecError: For sizes below 1, only one of ``clearing_freq`` and ``window_size_``, different
            numbers of environments and processes, or an unknown storage.

    Example:
        >>> pool = Pool(pool_size=1000, seed=0)
        >>> for step in range(20):
        ...     pool([step], 0, [step + 1], 1.0, step == 19)
        >>> len(pool), pool.sample(4)["_frame"].shape
        (20, torch.Size([4, 1]))
    """

    @also_takes(processes="n_workers")
    def __init__(
        self,
        env: Sequence[Any] | None = None,
        n_workers: int | None = None,
        pool_size: int | None = None,
        window_size: int | None = None,
        clearing_freq: int | None = None,
        window_size_: int | None = None,
        random: bool = True,
        *,
        policy: Any = None,
        seed: int | None = None,
        keys: Sequence[str] | None = None,
        info_keys: Sequence[str] | None = None,
        storage: str = "local",
        directory: str | Path | None = None,
        priority_exponent: float | None = None,
        frame_stack: int | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        start_method: str = "auto",
    ) -> None:
        if n_workers is None:
            n_workers = max(1, len(env)) if isinstance(env, Sequence) else 1
        n_workers = whole_number("n_workers", n_workers, 1)
        check_choice("random", random, (True, False))
        seed = None if seed is None else whole_number("seed", seed, 0)
        check_choice("storage", storage, ("local", "memmap"))
        allocate(storage, 1, directory=directory)  # checks the arguments now
        FailurePolicy(start_method=start_method)
        settings = Settings(
            whole_number("pool_size", pool_size, n_workers),
            n_workers,
            WindowRules(window_size, clearing_freq, window_size_),
            bool(random),
            None if keys is None else list(dict.fromkeys(listed(keys, str, "keys"))),
            list(dict.fromkeys(listed(info_keys or (), str, "info_keys"))),
            storage,
            directory,
            None
            if priority_exponent is None
            else real_number("priority_exponent", priority_exponent, "from 0 on, and finite"),
            None if frame_stack is None else whole_number("frame_stack", frame_stack, 2),
        )
        if settings.keys == []:
            raise SpecError("keys are empty", fix="omit keys to store all")
        self._settings, root = settings, root_from(seed)
        self._generator, router = (
            np.random.Generator(np.random.PCG64([purpose, root]))
            for purpose in (_SAMPLING, _ROUTING)
        )
        self._filler = Filler(settings, router)
        self._runner = None
        if env is not None:
            self._runner = EpisodeRunner(env, n_workers, seed, policy, timeout, start_method)

    @property
    def _store(self) -> Store:
        return self._filler.store

    # Contents --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of transitions in the pool."""
        return len(self._store)

    @property
    def pool_size(self) -> int:
        """Capacity in transitions."""
        return self._settings.pool_size

    @property
    def lengths(self) -> list[int]:
        """Number of transitions in each sub-pool."""
        return self._store.sub_pools.lengths

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of a transition by key; empty before the first addition."""
        return self._store.schema.specs

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows written so far, including bookkeeping and priorities."""
        return self._store.nbytes

    def transitions(self, keys: Sequence[str] | None = None) -> DictTensor:
        """Return all transitions, sub-pool by sub-pool, oldest first.

        Args:
            keys: The keys, by default all.

        Returns:
            ``[len(pool), ...]``, copies.

        Raises:
            SpecError: For a key that is not stored.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> pool.transitions(["frame", "_done"])["_done"]
            tensor([False, False, False,  True])
        """
        store = self._store
        if not store.has_schema:
            return DictTensor()
        wanted = list(self.specs) if keys is None else listed(keys, str, "keys")
        refuse_missing("the pool", self.specs, wanted, "choose among its keys")
        rows = store.sub_pools.rows()
        arrays = store.take(rows, wanted) | store.take_after(rows, wanted)
        return DictTensor({key: torch.from_numpy(arrays[key]) for key in wanted})

    def get_pool(self) -> tuple[NDArray, NDArray, NDArray, NDArray, NDArray]:
        """Return states, actions, next states, rewards and done flags of all transitions.

        Returns:
            Copies ``[N, *S]``, ``[N, *A]``, ``[N, *S]``, float32 ``[N]``, ``[N]``, sub-pool by
            sub-pool, oldest first; empty arrays before the first transition.

        Raises:
            UsageError: If the transitions have no ``frame``, ``action``, ``_frame``, ``_reward``
                or ``_done``.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> s, a, next_s, r, done = pool.get_pool()
            >>> next_s.ravel(), done
            (array([1, 2, 3, 4]), array([False, False, False,  True]))
        """
        s, a, next_s, r, done = (np.zeros(0, kind) for kind in ["f4"] * 4 + ["?"])
        if len(self):
            if missing := [key for key in TRANSITION_KEYS if key not in self.specs]:
                raise UsageError(
                    f"the pool has no {missing}, it has {list(self.specs)}",
                    fix="use transitions(), which returns all keys",
                )
            every = self.transitions(TRANSITION_KEYS)
            s, a, next_s, r, done = (every[key].numpy() for key in TRANSITION_KEYS)
        return s, a, next_s, r, done

    # Adding ----------------------------------------------------------------------------------

    def extend(self, trajectories: TemporalDictTensor, index: int | None = None) -> None:
        """Add every step of some trajectories, in row-then-time order.

        Each row is a separate stream, which may hold several episodes. Their ends are read from
        ``_done``, from ``_terminated`` and ``_truncated``, or from ``initial_state``, even if these
        are not stored. Without them, n-step returns and sequences are refused until ``clear``. Rows
        of a single step do not need them.

        Windows of a ``Batcher`` are joined by their ``info``, so keep it: samples continue in the
        lane's next window, regardless of the ``index`` of either. They end if that window is not
        stored, or does not begin with the observation after the last step.

        Values after a step that equal those of the next step, such as ``_frame``, are not stored
        twice. The pool does not keep a reference to the trajectories. It stores the ``info_keys``
        of their ``info`` with every transition; keys that earlier transitions did not have are not
        stored.

        Args:
            trajectories: ``[B, T, ...]`` with the keys of the pool, on any device.
            index: The sub-pool to add to. By default one is drawn for each trajectory, with
                probability proportional to 1 / (its length + 1).

        Raises:
            SpecError: If keys or shapes do not match the pool's, a value does not fit its dtype, a
                step does not shift a stack of frames, or disk or memory is full. Stored transitions
                are kept.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.execute(3)
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> pool.extend(batcher.get())
            >>> len(pool), pool.sample(8)["frame"].shape
            (12, torch.Size([8, 1]))
        """
        fix = "convert transitions with TemporalDictTensor.from_packed(transitions, lengths)"
        instance(trajectories, TemporalDictTensor, "the argument of extend()", fix)
        self._filler.extend(trajectories, index)

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

        The transitions of a sub-pool form one stream, as from one environment: a transition that
        starts in the state after the previous one continues its episode unless that was ``done``,
        and the state between them is stored once. Use a different ``index`` for each of several
        environments. Without an index, transitions only continue each other in a pool with a
        single sub-pool.

        Args:
            s: The state ``[*S]``, an array, tensor or number; copied.
            a: The action ``[*A]``.
            next_s: The state after it ``[*S]``.
            r: The reward, a number; stored in float32.
            done: Whether the episode ended by termination or truncation.
            terminated: Whether it ended by termination; by default ``done``.
            index: The sub-pool to add to. By default a random one, or the emptiest one with
                ``random=False``.

        Raises:
            SpecError: If a value does not match the pool's keys, shapes and dtypes.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> pool.pool(s=[0.0], a=1, next_s=[1.0], r=0.5, done=False)
            >>> pool([1.0], 0, [2.0], 0.5, done=True)  # the same, shorter
            >>> len(pool)
            2
        """
        self._filler.add(transition_of(s, a, next_s, r, done, terminated), index)

    __call__ = pool

    def store(self) -> None:
        """Run one episode in each environment, in separate processes, and add them.

        Returns when all episodes have ended. Environments follow one of two protocols. In
        Gymnasium's, actions come from ``policy`` or the action space. Otherwise the environment
        chooses its actions: ``reset() -> (state, action)`` and ``step(action) -> (action,
        next_state, reward, done)``, where the action returned by ``step`` is stored. Environments
        and policy are pickled by the constructor. The processes start with the first call and live
        until ``close`` or an error; their environments keep their state between calls.

        Raises:
            UsageError: Without environments, or after ``close``.
            EnvError, AgentError: If an environment or the policy fails. The episodes of this run
                are dropped, and the next run starts new processes.
            WorkerStartupError, WorkerDiedError, WorkerTimeoutError: If a process cannot start,
                dies or hangs; likewise.

        Example:
            >>> with Pool([CountingEnv(length=3), CountingEnv(length=4)], pool_size=100) as pool:
            ...     pool.store()  # an episode in each of them, in two processes
            ...     print(len(pool))
            7
        """
        if self._runner is None:
            raise UsageError("the pool has no environments", fix="pass env=[...], or use extend()")
        if self._runner.closed:
            raise UsageError("the pool was closed", fix="make a new one, or close it later")
        self._filler.add_run(self._runner.run())

    def clear(self) -> None:
        """Drop all transitions; their keys remain fixed.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> pool.clear()
            >>> len(pool)
            0
        """
        self._store.clear()

    # Drawing ---------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int,
        *,
        n_step: int | None = None,
        discount: float = 0.99,
        beta: float = 0.4,
    ) -> DictTensor:
        """Draw transitions with replacement, uniformly or in proportion to their priorities.

        Args:
            batch_size: Number of transitions, at most the number in the pool.
            n_step: Look this many steps ahead, or fewer if the episode or its stored part ends
                earlier; one warning is logged if shorter rows end within an episode and cannot be
                joined (see ``extend``). Keys with a leading ``_`` except ``_reward`` then have
                their value after the last of these steps. The result also has ``n_step_return``,
                the discounted sum of the rewards of these steps, and ``n_step_discount``, the
                factor of the value of the state after them, both float32 ``[batch_size]``. The
                factor is ``discount ** steps``, or 0 after a termination: ``_terminated`` of the
                trajectories, or if missing ``_done`` without ``_truncated``, even if these are not
                stored. After a truncation, the value of the last observation counts.
            discount: Discount per step, for ``n_step``.
            beta: Exponent of the importance weights, for a pool with priorities: 1 fully corrects
                the bias of prioritised sampling.

        Returns:
            Copies ``[batch_size, ...]`` of every key of a transition. With priorities also
            ``index``, int64, for ``update_priorities``, and ``weight``, float32, at most 1.

        Raises:
            NotEnoughDataError: If there are fewer transitions.
            SpecError: If ``n_step`` is given and ``_reward`` is not stored, or the ends or
                terminations of some episodes are unknown, see ``Pool.extend``.

        Reference:
            Sutton, 1988, for n-step returns; Pardo et al., "Time Limits in Reinforcement Learning",
            ICML 2018, for truncation; Schaul et al., 2016, section 3.4 for the weights.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> batch = pool.sample(2, n_step=3, discount=0.5)
            >>> batch["frame"].shape, batch["n_step_return"].shape
            (torch.Size([2, 1]), torch.Size([2]))
        """
        return sampling.sample(self._store, self._generator, batch_size, n_step, discount, beta)

    def sample_sequences(
        self, batch_size: int, length: int, *, beta: float = 0.4
    ) -> TemporalDictTensor:
        """Draw sequences of consecutive steps of one episode, for recurrent learners.

        A sequence starts at a transition drawn as by ``sample``, and ends after ``length`` steps,
        or earlier if its episode or the stored part of it ends. It continues in the next window,
        see ``extend``.

        Args:
            batch_size: Number of sequences, at most the number of transitions.
            length: Maximum number of steps.
            beta: Exponent of the importance weights, for a pool with priorities.

        Returns:
            Copies ``[batch_size, length, ...]`` of every key, zero-padded past ``lengths``; see
            ``mask()``. The first step of the state's keys is the agent's state at the start of the
            sequence. ``info`` has the pool's ``info_keys``; with priorities also ``index`` and
            ``weight`` of the first steps.

        Raises:
            NotEnoughDataError: If there are fewer transitions.
            SpecError: If the ends of some episodes are unknown, see ``Pool.extend``.

        Reference:
            Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning",
            ICLR 2019, for replaying from stored states.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> pool.sample_sequences(2, length=3)["frame"].shape
            torch.Size([2, 3, 1])
        """
        return sampling.sample_sequences(self._store, self._generator, batch_size, length, beta)

    def batches(
        self, batch_size: int, n_batches: int | None = None, **options: Any
    ) -> Iterator[DictTensor]:
        """Iterate over batches, each drawn on demand.

        Args:
            batch_size: Transitions per batch.
            n_batches: Number of batches, ``None`` for unlimited.
            **options: As for ``sample``.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> [batch["frame"].shape for batch in pool.batches(3, n_batches=2)]
            [torch.Size([3, 1]), torch.Size([3, 1])]
        """
        if n_batches is not None:
            whole_number("n_batches", n_batches, 0)
        for _ in itertools.count() if n_batches is None else range(n_batches):
            yield self.sample(batch_size, **options)

    def update_priorities(self, index: Any, priorities: Any) -> None:
        """Set the priorities of transitions, usually their absolute errors plus a small constant.

        New transitions get the largest priority so far, or 1, so that each is sampled soon.

        Args:
            index: int64 ``[n]``, from ``sample``. Transitions dropped since then are ignored.
            priorities: ``[n]``, finite and not negative.

        Raises:
            UsageError: If the pool samples uniformly.
            SpecError: For other shapes or values.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0, priority_exponent=1.0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> batch = pool.sample(4)
            >>> errors = torch.rand(4)  # how wrong the learner's prediction was
            >>> pool.update_priorities(batch["index"], errors + 1e-6)
        """
        alpha = self._settings.priority_exponent
        if alpha is None:
            raise UsageError(
                "the pool samples uniformly and has no priorities",
                fix="make it with priority_exponent=0.6, for example",
            )
        given, powers = checked_priorities(index, priorities, alpha)
        store = self._store
        if store.tree is None or not given.size:
            return
        rows, present = store.sub_pools.find(given)
        with defer_signals():
            store.tree.set(rows[present], powers[present])
        largest = float(powers[present].max(initial=0.0))
        self._filler.max_priority = max(self._filler.max_priority, largest)

    # Saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next samples depend on, except the state of environments.

        Returns:
            Tensors, numbers and texts for ``torch.save`` and
            ``torch.load(path, weights_only=True)``; loading with ``mmap=True`` does not need
            additional memory. The tensors are views: save or copy them before the pool changes.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> torch.save(pool.state_dict(), "pool.pt")
            >>> other = Pool(pool_size=1000)
            >>> other.load_state_dict(torch.load("pool.pt"))
            >>> len(other)
            4
        """
        return {
            "format": _FORMAT,
            **self._filler.state_dict(),
            "generator": self._generator.bit_generator.state,
            "runner": None if self._runner is None else self._runner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another pool; both then draw the same samples.

        Args:
            state: Its ``state_dict``, which is copied. If this pool is not empty, there must be
                memory for both.

        Raises:
            SpecError: If the state is damaged, or the sizes, rules, keys, ``priority_exponent`` or
                ``frame_stack`` of the other pool differ. This pool is then unchanged. ``seed`` and
                ``storage`` may differ.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> other = Pool(pool_size=1000)
            >>> other.load_state_dict(pool.state_dict())
            >>> torch.equal(pool.sample(3)["frame"], other.sample(3)["frame"])
            True
        """
        try:
            if state["format"] != _FORMAT:
                raise SpecError(f"this rlpool cannot read the pool format {state['format']!r}")
            filler, generator = self._filler.loaded(state), np.random.PCG64()
            generator.state = state["generator"]
            if self._runner is not None and state["runner"] is not None:
                self._runner.load_state_dict(state["runner"])
        except SpecError:
            raise
        except Exception as error:
            raise SpecError(
                f"the state is damaged, or not that of a pool: {error!r:.200}",
                fix="load another copy of state_dict(); this pool is unchanged",
            ) from error
        self._filler, self._generator = filler, np.random.Generator(generator)

    # Lifetime --------------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes of ``store()``; repeatable. Stored transitions are kept.

        Example:
            >>> pool = Pool([CountingEnv()], pool_size=100)
            >>> pool.close()
        """
        if self._runner is not None:
            self._runner.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a pool cannot be copied or pickled",
            fix="copy its transitions(), or use load_state_dict(other.state_dict())",
        )

    def __repr__(self) -> str:
        holds = self._store.schema if self._store.has_schema else "nothing yet"
        return f"Pool({len(self)} of {self.pool_size} transitions; {holds})"
