"""Pool against a plain model: a list of transitions per sub-pool, with literal rules."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rlpool import NotEnoughDataError, Pool, SpecError, TemporalDictTensor, UsageError
from rlpool.data.dict_tensor import DictTensor
from rlpool.slots.trajectories import Slice, StepTensors

SINGLE_KEYS = ("frame", "action", "_frame", "_reward", "_done", "_terminated")
FRAMES = {  # dtype and shape; the first and the last are stored once, the second one twice
    "vector": (np.float32, (3,)),
    "number": (np.float32, ()),
    "image": (np.uint8, (3, 4)),
    "stack": (np.uint8, (3, 2, 4)),  # of three frames, and stored as single ones
}


@dataclass
class Transition:
    """One transition.

    Attributes:
        values: Its values by key.
        continues: Whether the next one added to its sub-pool belongs to the same episode.
        priority: Its priority to the power of alpha.
    """

    values: dict[str, Any]
    continues: bool = False
    priority: float = 1.0


@dataclass
class SubPool:
    """Content of a sub-pool as a list, with the number of transitions ever appended.

    Attributes:
        last_single: The last one added as a single transition.
        open: The same, if the next single one may continue its episode.
    """

    capacity: int
    kept: list[Transition] = field(default_factory=list)
    n_appended: int = 0
    last_single: Transition | None = None
    open: Transition | None = None


some_keys = st.sampled_from(
    [SINGLE_KEYS, ("frame", "_frame", "_reward", "_done"), ("frame", "action")]
)
all_options = st.fixed_dictionaries(
    {
        "processes": st.integers(1, 3),
        "room": st.integers(0, 21),  # beyond a transition per process
        "window_size": st.none() | st.integers(1, 10),
        "clearing": st.just((None, None)) | st.tuples(st.integers(1, 6), st.integers(1, 6)),
        "random": st.booleans(),
        "storage": st.sampled_from(["local", "local", "memmap"]),
        "alpha": st.sampled_from([None, 0.0, 0.7, 1.0]),
        "keys": st.none() | some_keys,
        "frame": st.sampled_from(sorted(FRAMES)),
        "has_agent_state": st.booleans(),
    }
).map(lambda options: SimpleNamespace(**options, pool_size=options["processes"] + options["room"]))


@dataclass(frozen=True)
class Step:
    """Relation of a trajectory's step to the next one: 'done', 'restart', 'jump' or 'inner'."""

    end: str
    terminated: bool


steps = st.builds(
    Step,
    end=st.sampled_from(["inner", "inner", "inner", "done", "restart", "jump"]),
    terminated=st.booleans(),
)
rows = st.lists(st.lists(steps, max_size=7), min_size=1, max_size=4)


class PoolMachine(RuleBasedStateMachine):
    """Performs the same operations on a pool and its model."""

    @initialize(options=all_options, seed=st.integers(0, 2**32))
    def make(self, options: Any, seed: int) -> None:
        self.options = options
        self.seed = seed
        self.pool = self.new_pool(seed)
        share, rest = divmod(options.pool_size, options.processes)
        self.sub_pools = [SubPool(share + (i < rest)) for i in range(options.processes)]
        self.max_priority = 0.0  # that was given
        self.n_frames = 0
        self.has_schema = False

    def new_pool(self, seed: int) -> Pool:
        options = self.options
        clearing_freq, window_size_ = options.clearing
        return Pool(
            processes=options.processes,
            pool_size=options.pool_size,
            window_size=options.window_size,
            clearing_freq=clearing_freq,
            window_size_=window_size_,
            random=options.random,
            seed=seed,
            keys=options.keys,
            storage=options.storage,
            priority_exponent=options.alpha,
            frame_stack=3 if options.frame == "stack" else None,
        )

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()

    # The documented rules, literally ----------------------------------------------------------

    def append(self, number: int, transition: Transition) -> None:
        sub_pool, options = self.sub_pools[number], self.options
        transition.priority = self.max_priority or 1.0
        sub_pool.kept.append(transition)
        sub_pool.n_appended += 1
        sub_pool.open = None
        clearing_freq, window_size_ = options.clearing
        if clearing_freq and sub_pool.n_appended % clearing_freq == 0:
            del sub_pool.kept[:window_size_]
        if len(sub_pool.kept) > sub_pool.capacity:
            if options.window_size is None:
                del sub_pool.kept[0]
            else:
                del sub_pool.kept[: -min(options.window_size, sub_pool.capacity)]

    def route(self, router: np.random.Generator) -> int:
        if self.options.processes == 1:
            return 0
        weights = np.array([1 / (len(sub_pool.kept) + 1) for sub_pool in self.sub_pools])
        return int(router.choice(len(weights), p=weights / weights.sum()))

    # Adding ----------------------------------------------------------------------------------

    def frame(self, number: int) -> Any:
        dtype, shape = FRAMES[self.options.frame]
        if dtype is np.uint8:
            frames = np.arange(number + 3 - shape[0], number + 3, dtype=np.int32)
            images = frames.view(np.uint8).reshape(-1, 1, 4)
            return images.repeat(2, 1) if len(shape) == 3 else images[:, 0]
        return np.full(shape, number, dtype)

    def new_frame(self) -> int:
        self.n_frames += 1
        return self.n_frames

    @rule(
        rows=rows,
        room=st.integers(0, 2),
        layout=st.integers(0, 3),
        is_lazy=st.booleans(),
        index=st.none() | st.integers(0, 2),
    )
    def extend(
        self, rows: list[list[Step]], room: int, layout: int, is_lazy: bool, index: int | None
    ) -> None:
        if index is not None:
            index %= self.options.processes
        episodes = [self.episode(row, only_inner=is_lazy) for row in rows]
        trajectories = self.trajectories(episodes, room, layout, is_lazy=is_lazy)
        router = copy.deepcopy(self.pool._filler.router)
        known = trajectories._steps._tensors
        before = {key: known[key].clone() for key in known if key != "_frame"}
        self.pool.extend(trajectories, index)
        assert all(torch.equal(known[key], tensor) for key, tensor in before.items())
        self.has_schema |= any(episodes)
        for episode in episodes:
            if episode:
                number = self.route(router) if index is None else index
                for transition in episode:
                    self.append(number, transition)
        # Later changes to the trajectories must not affect the pool.
        for tensor in before:
            trajectories[tensor].zero_()

    def episode(self, row: list[Step], *, only_inner: bool) -> list[Transition]:
        """Return the transitions of one row; each frame is new except at inner steps."""
        transitions: list[Transition] = []
        frame, starts = self.new_frame(), True
        for place, step in enumerate(row):
            is_last = place == len(row) - 1
            end = step.end
            if end == "jump" and "_frame" not in self.stored:
                end = "inner"  # a jump without a flag is detected only where frames are compared
            if only_inner and not is_last:
                end = "inner"
            after = self.new_frame()
            values = {
                "frame": self.frame(frame),
                "action": np.int64(self.n_frames),
                "_frame": self.frame(after),
                "_reward": np.float32(self.n_frames % 7 - 3),
                "_done": np.bool_(end == "done"),
                "_terminated": np.bool_(end == "done" and step.terminated),
                "initial_state": np.bool_(starts),
            }
            if self.options.has_agent_state:
                values["hidden"] = np.array([frame, -frame], np.float32)
            continues = end == "inner" and not is_last
            transitions.append(Transition(values, continues))
            starts = end == "restart"
            frame = after if end == "inner" else self.new_frame()
        return transitions

    @property
    def stored(self) -> tuple[str, ...]:
        keys = (*SINGLE_KEYS, "initial_state")
        keys += ("hidden",) if self.options.has_agent_state else ()
        return self.options.keys or keys

    def trajectories(
        self, episodes: list[list[Transition]], room: int, layout: int, *, is_lazy: bool
    ) -> TemporalDictTensor:
        lengths = np.array([len(episode) for episode in episodes])
        shape = (len(episodes), int(lengths.max()) + room)
        specs = {"frame": FRAMES[self.options.frame], "action": (np.int64, ())}
        specs["_frame"] = specs["frame"]
        specs["_reward"] = (np.float32, ())
        for flag in ("_done", "_terminated", "initial_state"):
            specs[flag] = (np.bool_, ())
        if self.options.has_agent_state:
            specs["hidden"] = (np.float32, (2,))
        tensors = {}
        for key, (dtype, feature) in specs.items():
            array = _empty(shape, feature, dtype, layout)
            array[...] = 0
            for row, episode in enumerate(episodes):
                for time, transition in enumerate(episode):
                    array[row, time] = transition.values[key]
            tensors[key] = torch.from_numpy(array)
        if not is_lazy:
            return TemporalDictTensor(tensors, torch.from_numpy(lengths))
        finals = np.zeros((shape[0], *specs["frame"][1]), specs["frame"][0])
        for row, episode in enumerate(episodes):
            if episode:
                finals[row] = episode[-1].values["_frame"]
        del tensors["_frame"]
        rows = {key: tensor.numpy() for key, tensor in tensors.items()}
        part = Slice(rows, {"frame": finals}, lengths, lengths)
        derived = StepTensors([*rows, "_frame"], lambda: part)
        return TemporalDictTensor._wrap(derived, torch.from_numpy(lengths), DictTensor())

    @property
    def can_add_one(self) -> bool:
        return set(self.stored) <= set(SINGLE_KEYS)

    @precondition(lambda self: self.can_add_one)
    @rule(
        index=st.none() | st.integers(0, 2),
        follows=st.sampled_from([True, True, True, False]),
        done=st.sampled_from([False, False, True]),
        terminated=st.none() | st.booleans(),
    )
    def add_one(
        self, index: int | None, follows: bool, done: bool, terminated: bool | None
    ) -> None:
        processes, random = self.options.processes, self.options.random
        may_continue = index is not None or processes == 1
        if index is not None:
            index %= processes
        router = copy.deepcopy(self.pool._filler.router)
        if index is not None:
            number = index
        elif random:
            number = self.route(router)
        else:
            number = int(np.argmin([len(sub_pool.kept) for sub_pool in self.sub_pools]))
        sub_pool = self.sub_pools[number]
        s = self.frame(self.new_frame())
        last = sub_pool.last_single
        if self.options.frame == "stack" and last and last.values["action"] != self.n_frames - 1:
            follows = False  # the other frames of the next stack were added in the meantime
        if follows and last is not None:
            self.n_frames -= self.options.frame == "stack"
            s = sub_pool.last_single.values["_frame"]
            if sub_pool.open is not None and may_continue:
                sub_pool.open.continues = True
        next_s = self.frame(self.new_frame())
        ends = done if terminated is None else terminated and done
        action, reward = self.n_frames, float(self.n_frames % 7 - 3)
        given = {} if terminated is None else {"terminated": ends}
        state = s.copy()
        self.pool(state, action, next_s, reward, done, index, **given)
        state[...] = 0  # copied
        values = dict(
            zip(
                SINGLE_KEYS,
                (s, np.int64(action), next_s, np.float32(reward), np.bool_(done), np.bool_(ends)),
                strict=True,
            )
        )
        transition = Transition(values)
        self.append(number, transition)
        sub_pool.last_single = None if "_frame" not in self.stored else transition
        self.has_schema = True
        if may_continue and not done and "_frame" in self.stored:
            sub_pool.open = transition

    @rule(really=st.sampled_from([False, False, False, True]))
    def clear(self, really: bool) -> None:
        if not really:
            return
        self.pool.clear()
        for sub_pool in self.sub_pools:
            sub_pool.kept.clear()
            sub_pool.open = None

    @rule(in_use=st.booleans())
    def resume(self, in_use: bool) -> None:
        """Continue with a loaded copy that may have had other content before."""
        written = io.BytesIO()
        torch.save(self.pool.state_dict(), written)
        written.seek(0)
        stopped, self.pool = self.pool, self.new_pool(self.seed + 1)
        if in_use:
            tensors = {
                key: torch.zeros(1, 5, *spec.shape, dtype=spec.torch_dtype)
                for key, spec in stopped.specs.items()
            }
            self.pool.extend(TemporalDictTensor(tensors or self.others()), 0)
        self.pool.load_state_dict(torch.load(written, weights_only=True))
        if sum(t.priority for t in self.kept):
            expected, got = (pool.sample(len(self.kept)) for pool in (stopped, self.pool))
            assert set(got.keys()) == set(expected.keys())
            for key, tensor in expected.items():
                assert torch.equal(got[key], tensor), key
        stopped.close()

    def others(self) -> dict[str, torch.Tensor]:
        """Return two steps of different shapes."""
        return {
            key: torch.zeros(1, 2, *((3, 5) if key.endswith("frame") else ()))
            for key in self.stored
        }

    # Drawing ---------------------------------------------------------------------------------

    @property
    def kept(self) -> list[Transition]:
        return [t for sub_pool in self.sub_pools for t in sub_pool.kept]

    def runs(self) -> dict[bytes, list[Transition]]:
        """Return the transitions from each one on known to be of its episode, by its frame."""
        found = {}
        for sub_pool in self.sub_pools:
            run: list[Transition] = []
            for transition in reversed(sub_pool.kept):
                run = [transition, *(run if transition.continues else [])]
                found[transition.values["frame"].tobytes()] = run
        return found

    def check_refused(self, batch_size: int) -> bool:
        """Whether a batch cannot be drawn; checks the error."""
        if batch_size > len(self.kept):
            with pytest.raises(NotEnoughDataError):
                self.pool.sample(batch_size)
            return True
        if self.options.alpha is not None and not sum(t.priority for t in self.kept):
            with pytest.raises(UsageError, match="priorities"):
                self.pool.sample(batch_size)
            return True
        return False

    def check_weights(self, drawn: list[Transition], weights: torch.Tensor, beta: float) -> None:
        priorities = np.array([transition.priority for transition in drawn])
        assert (priorities > 0).all()
        expected = priorities**-beta
        np.testing.assert_allclose(weights.numpy(), expected / expected.max(), rtol=1e-5)

    @rule(more=st.integers(1, 8))
    def sample_too_many(self, more: int) -> None:
        assert self.check_refused(len(self.kept) + more)

    @invariant()
    def draws_the_same(self) -> None:
        """Draw batches of each kind, including one with all transitions."""
        n_kept = len(self.kept) if hasattr(self, "pool") else 0
        if n_kept:
            fewer = 1 + self.n_frames % n_kept
            self.sample(n_kept, 0.4)
            self.sample_n_steps(fewer, 1 + self.n_frames % 5, [0.0, 0.5, 0.99, 1.0][fewer % 4])
            self.sample_sequences(fewer, 1 + self.n_frames % 9)

    def sample(self, batch_size: int, beta: float) -> None:
        if self.check_refused(batch_size):
            return
        batch = self.pool.sample(batch_size, beta=beta)
        runs = self.runs()
        drawn = [runs[frame.tobytes()][0] for frame in batch["frame"].numpy()]
        check_rows(batch, drawn, self.stored)
        if self.options.alpha is not None:
            self.check_weights(drawn, batch["weight"], beta)

    def sample_n_steps(self, batch_size: int, n_step: int, discount: float) -> None:
        if self.check_refused(batch_size):
            return
        if "_reward" not in self.stored:
            with pytest.raises(SpecError, match="_reward"):
                self.pool.sample(batch_size, n_step=n_step)
            return
        batch = self.pool.sample(batch_size, n_step=n_step, discount=discount)
        runs = self.runs()
        steps = [runs[frame.tobytes()][:n_step] for frame in batch["frame"].numpy()]
        ahead = [k for k in self.stored if k.startswith("_") and k != "_reward"]
        check_rows(batch, [run[-1] for run in steps], ahead)
        check_rows(batch, [run[0] for run in steps], [k for k in self.stored if k not in ahead])
        # Flags needed for n-step returns are kept with any requested keys.
        has_terminated = "_terminated" in self.stored or self.options.keys is not None
        end = "_terminated" if has_terminated else "_done"
        for row, run in enumerate(steps):
            total = 0.0
            for transition in reversed(run):
                total = float(transition.values["_reward"]) + discount * total
            assert batch["n_step_return"][row].item() == pytest.approx(total, abs=1e-5)
            factor = 0.0 if run[-1].values[end] else discount ** len(run)
            assert batch["n_step_discount"][row].item() == pytest.approx(factor)

    def sample_sequences(self, batch_size: int, length: int) -> None:
        if self.check_refused(batch_size):
            return
        batch = self.pool.sample_sequences(batch_size, length, beta=1.0)
        runs = self.runs()
        sequences = [runs[frame.tobytes()][:length] for frame in batch["frame"][:, 0].numpy()]
        assert batch.lengths.tolist() == [len(sequence) for sequence in sequences]
        assert batch.n_timesteps() == length
        check_rows(batch.flatten(), [t for sequence in sequences for t in sequence], self.stored)
        for tensor in batch.values():
            assert not tensor[batch.mask() == 0].any()
        if self.options.alpha is not None:
            self.check_weights([run[0] for run in sequences], batch.info["weight"], 1.0)

    @precondition(lambda self: self.options.alpha is not None)
    @rule(
        batch_size=st.integers(1, 8),
        priorities=st.lists(st.sampled_from([0.0, 0.1, 1.0, 5.0]), min_size=8, max_size=8),
        steps_between=st.lists(st.lists(steps, max_size=3), max_size=3),
    )
    def update_priorities(
        self, batch_size: int, priorities: list[float], steps_between: list[list[Step]]
    ) -> None:
        batch_size = max(1, min(batch_size, len(self.kept)))
        if self.check_refused(batch_size):
            return
        batch = self.pool.sample(batch_size)
        runs = self.runs()
        drawn = [runs[frame.tobytes()][0] for frame in batch["frame"].numpy()]
        if steps_between:  # which may have dropped some of those drawn
            self.extend(steps_between, 0, 0, False, 0)
        self.pool.update_priorities(batch["index"], priorities[:batch_size])
        kept = {id(transition) for transition in self.kept}
        alpha = float(self.options.alpha or 0.0)
        for transition, priority in zip(drawn, priorities, strict=False):
            if id(transition) in kept:
                transition.priority = priority**alpha
                self.max_priority = max(self.max_priority, transition.priority)

    # Invariants ------------------------------------------------------------------------------

    @invariant()
    def holds_the_same(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, kept = self.pool, self.kept
        assert pool.lengths == [len(sub_pool.kept) for sub_pool in self.sub_pools]
        assert len(pool) == len(kept) <= self.options.pool_size
        if not self.has_schema:
            assert not pool.nbytes
            return
        every = pool.transitions()
        assert set(every.keys()) == set(self.stored)
        check_rows(every, kept, self.stored)
        if set(SINGLE_KEYS[:5]) <= set(self.stored):
            for key, array in zip(SINGLE_KEYS, pool.get_pool(), strict=False):
                if kept:
                    assert array.tobytes() == every[key].numpy().tobytes()
                assert len(array) == len(kept)


def check_rows(batch: DictTensor, expected: list[Transition], keys: Any) -> None:
    """Check that rows of a batch are these transitions, bit for bit."""
    for key in keys:
        got = batch[key].numpy()
        assert len(got) == len(expected)
        if expected:
            want = np.stack([transition.values[key] for transition in expected])
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            assert got.tobytes() == want.tobytes(), key


def _empty(shape: tuple[int, int], feature: tuple[int, ...], dtype: Any, layout: int) -> Any:
    """Return an array ``[B, T, ...]`` with one of the memory layouts found in practice."""
    n, n_timesteps = shape
    if layout == 0:  # separate
        return np.empty((*shape, *feature), dtype)
    if layout == 1:  # a slot with one more step
        return np.empty((n, n_timesteps + 1, *feature), dtype)[:, 1:]
    if layout == 2:  # time first
        return np.empty((n_timesteps, n, *feature), dtype).swapaxes(0, 1)
    return np.empty((2 * n, 2 * n_timesteps, *feature), dtype)[::2, ::2]


PoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=16, deadline=None)
TestPool = PoolMachine.TestCase
