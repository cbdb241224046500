"""What a pool stores of trajectories: every step of every key, whatever memory it comes from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlpool import (
    Batcher,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    Pool,
    SpecError,
    TemporalDictTensor,
    UsageError,
)
from rlpool.pool.intake import Source
from rlpool.pool.row_store import RowStore
from rlpool.slots.trajectories import DerivedTensors, Successor

from support.agents import FunctionAgent
from support.envs import COUNTING_SPACE, CountingEnv


def stored(tensors: dict[str, Tensor], lengths: list[int] | None = None) -> Any:
    """What a pool of its own holds after trajectories were added to it."""
    trajectories = TemporalDictTensor(tensors, None if lengths is None else torch.tensor(lengths))
    pool = Pool(pool_size=100, seed=0)
    pool.extend(trajectories)
    flat, got = trajectories.flatten(), pool.transitions()
    assert set(got.keys()) == set(flat.keys())
    for key, tensor in flat.items():
        assert got[key].dtype == tensor.dtype
        assert torch.equal(got[key], tensor), key
    return pool


def test_trajectories_of_one_step_are_stored() -> None:
    stored({"frame": torch.rand(3, 1, 4), "_frame": torch.rand(3, 1, 4)})


def test_steps_that_lie_time_first_are_stored_also_where_there_is_one_step() -> None:
    stored({"frame": torch.arange(24.0).view(1, 6, 4).transpose(0, 1)})
    stored({"frame": torch.arange(24.0).view(6, 1, 4).transpose(0, 1)})
    stored({"frame": torch.arange(24.0).view(2, 3, 4).transpose(0, 1)})


# Memory that trajectories come from ----------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 2, 3])
@pytest.mark.parametrize("n_timesteps", [1, 2, 4])
@pytest.mark.parametrize("feature", [(), (1,), (3,), (2, 3), (0,)])
def test_steps_are_found_in_any_memory(
    n_rows: int, n_timesteps: int, feature: tuple[int, ...]
) -> None:
    whole = torch.arange(4 * n_rows * (n_timesteps + 1) * max(1, int(np.prod(feature))))
    if not all(feature):
        whole = whole[:0]
    own = whole.view(-1)[: n_rows * n_timesteps * int(np.prod(feature))]
    row_first = own.view(n_rows, n_timesteps, *feature)
    expanded = row_first[:, :1].expand(n_rows, n_timesteps, *feature)
    views = {
        "own": row_first,
        "time_first": own.view(n_timesteps, n_rows, *feature).transpose(0, 1),
        "expanded": expanded,
        "expanded_rows": row_first[:1].expand(n_rows, n_timesteps, *feature),
        "flipped": row_first.flip(0),
        "half": row_first.half(),
    }
    if feature and all(feature):
        flat = whole.view(-1)
        size = n_rows * (n_timesteps + 1) * int(np.prod(feature))
        views["slots"] = flat[:size].view(n_rows, n_timesteps + 1, *feature)[:, 1:]
        views["every_other"] = flat[: 2 * n_rows * n_timesteps * int(np.prod(feature))].view(
            n_rows, 2 * n_timesteps, *feature
        )[:, ::2]
        views["feature_first"] = own.view(*reversed((n_rows, n_timesteps, *feature))).permute(
            *reversed(range(2 + len(feature)))
        )
    stored(views)
    stored(views, [n_timesteps, *range(n_rows - 1)][:n_rows] if n_timesteps >= n_rows else None)


def test_steps_are_found_in_arrays_with_steps_between_rows_that_are_no_whole_number() -> None:
    whole = torch.arange(60.0)
    stored({"frame": whole.as_strided((3, 4, 2), (11, 2, 1))})
    stored({"frame": whole.as_strided((3, 4, 2), (2, 2, 1))})  # rows overlap


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    ],
)
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    pool = stored({"frame": torch.randint(2, (2, 3, 12)).to(dtype)})
    assert pool.sample(3)["frame"].dtype == dtype
    assert pool.sample_sequences(3, 2)["frame"].dtype == dtype


def test_every_bit_of_a_float_is_kept() -> None:
    bits = torch.tensor([[0x7FC00001, 0x7F800000, -0x80000000, 0x1]], dtype=torch.int32)
    frame = bits[..., None].expand(1, 4, 3).contiguous()
    trajectories = TemporalDictTensor({"frame": frame.view(torch.float32)})
    pool = Pool(pool_size=4)
    pool.extend(trajectories)
    assert torch.equal(pool.transitions()["frame"].view(torch.int32), frame[0])


def test_nothing_of_the_trajectories_is_kept() -> None:
    frame = torch.rand(2, 3, 4)
    trajectories = TemporalDictTensor({"frame": frame, "_frame": frame.clone()})
    expected = frame.clone()
    pool = Pool(pool_size=10)
    pool.extend(trajectories)
    frame.zero_()
    trajectories["_frame"].zero_()
    assert torch.equal(pool.transitions()["frame"], expected.flatten(0, 1))
    assert torch.equal(pool.transitions()["_frame"], expected.flatten(0, 1))


def test_tensors_that_need_gradients_or_are_inferred_are_stored() -> None:
    with torch.inference_mode():
        inferred = torch.rand(2, 3, 4)
    pool = Pool(pool_size=10)
    pool.extend(TemporalDictTensor({"frame": torch.rand(2, 3, 4).requires_grad_(), "x": inferred}))
    batch = pool.sample(4)
    assert not batch["frame"].requires_grad
    assert not batch["x"].is_inference()


def test_rows_without_steps_add_nothing() -> None:
    pool = stored({"number": torch.arange(12).view(3, 4)}, [0, 2, 0])
    pool.extend(TemporalDictTensor({"number": torch.arange(12).view(3, 4)}, torch.zeros(3).long()))
    pool.extend(TemporalDictTensor({"number": torch.zeros(0, 4).long()}))
    pool.extend(TemporalDictTensor({}))
    assert len(pool) == 2


def test_chosen_keys_only_are_stored() -> None:
    steps = {key: torch.rand(2, 3, 4) for key in ("frame", "_frame", "hidden", "value")}
    pool = Pool(pool_size=10, keys=["_frame", "value"])
    pool.extend(TemporalDictTensor(steps))
    assert set(pool.specs) == set(pool.sample(2).keys()) == {"_frame", "value"}
    assert torch.equal(pool.transitions()["_frame"], steps["_frame"].flatten(0, 1))


def test_a_chosen_key_that_is_not_there_is_named() -> None:
    pool = Pool(pool_size=10, keys=["frame", "hidden"])
    with pytest.raises(SpecError, match="hidden"):
        pool.extend(TemporalDictTensor({"frame": torch.rand(2, 3, 4)}))
    assert len(pool) == 0


def test_trajectories_with_more_keys_than_the_pool_holds_are_stored_without_them() -> None:
    pool = Pool(pool_size=10)
    pool.extend(TemporalDictTensor({"frame": torch.ones(1, 2)}))
    pool.extend(TemporalDictTensor({"frame": torch.ones(1, 2), "value": torch.ones(1, 2)}))
    assert list(pool.sample(4).keys()) == ["frame"]


# What batchers collect -----------------------------------------------------------------------


class ImageEnv(CountingEnv):
    """Frames of uint8, each of another number."""

    observation_space = spaces.Box(0, 255, (4, 5), np.uint8)

    def observation(self) -> Any:
        return np.full((4, 5), self.t, np.uint8)


class DictEnv(CountingEnv):
    """Observations of several parts, one of them nested."""

    observation_space = spaces.Dict(
        {
            "pixels": spaces.Box(0, 255, (3, 4), np.uint8),
            "body": spaces.Dict({"speed": COUNTING_SPACE, "gear": spaces.Discrete(1000)}),
        }
    )

    def observation(self) -> Any:
        body = {"speed": super().observation(), "gear": np.int64(self.t)}
        return {"pixels": np.full((3, 4), self.t, np.uint8), "body": body}


def remember(
    state: DictTensor | None, observation: DictTensor, agent_info: Any, history: Any
) -> tuple[DictTensor, DictTensor, DictTensor]:
    """An agent with a state of five numbers that count the steps since the episode began."""
    n = observation.n_elems()
    if state is None:
        state = DictTensor({"memory": torch.zeros(n, 5)})
    output = {"action": state["memory"][:, 0].long() % 3, "value": state["memory"][:, :1] * 2}
    return state, DictTensor(output), DictTensor({"memory": state["memory"] + 1})


def create_env(seed: int, kind: Any, restarts: bool) -> GymEnv:
    lanes = [kind(length) for length in (3, 5)]
    return (GymEnvInf if restarts else GymEnv)(lanes, seed)


def collected(kind: Any, restarts: bool, n_windows: int = 3) -> list[TemporalDictTensor]:
    """Trajectories of a recurrent agent: whole episodes, or windows that episodes end within."""
    common: dict[str, Any] = {
        "create_agent": FunctionAgent,
        "agent_args": {"function": remember},
        "create_env": create_env,
        "env_args": {"kind": kind, "restarts": restarts},
        "n_threads": 0,
        "seeds": 0,
    }
    results = []
    if restarts:
        with Batcher(4, **common) as batcher:
            batcher.reset()
            for _ in range(n_windows):
                batcher.execute()
                results.append(batcher.get())
    else:
        with EpisodeBatcher(n_timesteps=4, n_slots=8, **common) as batcher:
            for _ in range(n_windows):
                batcher.execute(3)
                results.append(batcher.get())
    return results


kinds_of_envs = pytest.mark.parametrize("kind", [CountingEnv, ImageEnv, DictEnv])


@kinds_of_envs
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("storage", ["local", "shared", "memmap"])
def test_a_pool_holds_what_batchers_collect_bit_by_bit(
    kind: Any, restarts: bool, storage: str
) -> None:
    results = collected(kind, restarts)
    pool = Pool(pool_size=30, storage=storage, seed=0)
    for trajectories in results:
        pool.extend(trajectories)
    expected = DictTensor.cat([trajectories.flatten() for trajectories in results])
    got = pool.transitions()
    n = len(pool)
    assert n == min(30, expected.n_elems()) > 20
    assert set(got.keys()) == set(expected.keys())
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype
        assert torch.equal(got[key], tensor[-n:]), key


@kinds_of_envs
@pytest.mark.parametrize("restarts", [False, True])
def test_sequences_of_batchers_stay_within_episodes_and_hold_the_agents_state(
    kind: Any, restarts: bool
) -> None:
    pool = Pool(pool_size=100, seed=0)
    for trajectories in collected(kind, restarts):
        pool.extend(trajectories)
    batch = pool.sample_sequences(20, 4)
    times = batch["memory"][..., 0]
    for row, length in enumerate(batch.lengths.tolist()):
        first = times[row, 0]
        assert torch.equal(times[row, :length], torch.arange(length) + first)
        assert torch.equal(batch["_memory"][row, :length, 0], torch.arange(length) + first + 1)
        assert not batch["_done"][row, : length - 1].any()


@kinds_of_envs
def test_values_after_a_step_that_nobody_looked_at_are_not_computed(kind: Any) -> None:
    pool = Pool(pool_size=100)
    for trajectories in collected(kind, restarts=False):
        steps = trajectories._steps._tensors
        assert isinstance(steps, DerivedTensors)
        lazy = {key for key in steps if isinstance(steps.derivation(key), Successor)}
        large = {key for key in lazy if pool_pairs(steps, key)}
        assert large
        pool.extend(trajectories)
        assert {key for key in large if steps.derivation(key) is not None} == large


def pool_pairs(steps: DerivedTensors, key: str) -> bool:
    """Whether a pool has no use for the values after the step, they are so large."""
    before = steps[key.removeprefix("_")]
    return before[0, 0].numel() * before.element_size() > 8


def test_a_change_in_place_before_the_successor_is_looked_at_is_refused_and_nothing_is_lost() -> (
    None
):
    pool = Pool(pool_size=100)
    first, second, third = collected(ImageEnv, restarts=False)
    pool.extend(first)
    second["frame"].zero_()
    with pytest.raises(UsageError, match="in place"):
        pool.extend(second)
    pool.extend(third)
    flat = DictTensor.cat([first.flatten(), third.flatten()])
    for key, tensor in pool.transitions().items():
        assert torch.equal(tensor, flat[key])


# What it costs -------------------------------------------------------------------------------


def images(n_episodes: int, length: int, size: int) -> TemporalDictTensor:
    """Episodes of frames whose successors are theirs, but for the last ones."""
    frame = torch.randint(256, (n_episodes, length + 1, size), dtype=torch.uint8)
    done = torch.zeros(n_episodes, length, dtype=torch.bool)
    done[:, -1] = True
    steps = {
        "frame": frame[:, :-1],
        "_frame": frame[:, 1:],
        "action": torch.zeros(n_episodes, length, dtype=torch.int64),
        "_reward": torch.zeros(n_episodes, length),
        "_done": done,
        "_terminated": done,
    }
    return TemporalDictTensor(steps)


def test_the_next_frame_is_stored_once() -> None:
    pool = Pool(pool_size=1000)
    pool.extend(images(10, 100, 84 * 84))
    raw = 1000 * 84 * 84
    assert raw < pool.nbytes <= 1.05 * raw
    # Episodes of a hundred steps: a frame more for each, and some bytes per transition beside it.
    assert pool.nbytes == raw + 10 * 84 * 84 + 1000 * (8 + 4 + 1 + 1 + 1 + 4)


def test_bytes_grow_with_what_is_stored_and_stay_when_the_pool_is_full() -> None:
    pool = Pool(pool_size=200)
    sizes = []
    for _ in range(6):
        pool.extend(images(2, 25, 1000))
        sizes.append(pool.nbytes)
    assert sizes[0] < sizes[1] < sizes[2] < sizes[3] == sizes[4] == sizes[5]


def test_values_after_the_step_are_taken_again_when_their_transitions_go() -> None:
    pool = Pool(pool_size=200)
    for _ in range(50):
        pool.extend(images(2, 25, 1000))
    assert pool._store is not None
    assert pool._store.n_finals <= 10


@pytest.mark.parametrize("fill", [0, 1])
def test_adding_copies_as_many_rows_however_full_the_pool_is(
    fill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(pool_size=5000)
    pool.extend(images(2, 25, 16))
    for _ in range(110 if fill else 0):
        pool.extend(images(2, 25, 16))
    copied: list[int] = []
    copy_to = Source.copy_to

    def counted(self: Source, target: Any, start: int) -> None:
        copied.append(len(target))
        copy_to(self, target, start)

    monkeypatch.setattr(Source, "copy_to", counted)
    trajectories = images(2, 25, 16)
    pool.extend(trajectories)
    assert sum(copied) == 50 * 5  # five columns: the one of _frame is that of frame


@pytest.mark.parametrize("fill", [0, 1])
def test_sampling_reads_as_many_rows_however_full_the_pool_is(
    fill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(pool_size=5000)
    for _ in range(110 if fill else 1):
        pool.extend(images(2, 25, 16))
    taken: list[int] = []
    take_all, take_after = RowStore.take_all, RowStore.take_after

    def counted_all(self: RowStore, rows: Any) -> Any:
        taken.append(len(rows) * len(self.columns))
        return take_all(self, rows)

    def counted_after(self: RowStore, keys: Any, rows: Any, next_rows: Any) -> Any:
        taken.append(len(next_rows) * len(keys))
        return take_after(self, keys, rows, next_rows)

    monkeypatch.setattr(RowStore, "take_all", counted_all)
    monkeypatch.setattr(RowStore, "take_after", counted_after)
    pool.sample(32)
    assert sum(taken) == 32 * 6


def test_a_value_after_the_last_step_that_the_stored_dtype_does_not_hold_is_refused() -> None:
    pool = Pool(pool_size=10)
    steps = {"frame": torch.zeros(1, 2, 12, dtype=torch.uint8)}
    pool.extend(TemporalDictTensor({**steps, "_frame": steps["frame"]}))
    frame, lengths = torch.zeros(1, 2, 12, dtype=torch.int64), np.array([2])
    for final in (300, 200):
        finals = np.full((1, 12), final)
        derived = {"_frame": Successor("frame", frame, finals, lengths)}
        trajectories = TemporalDictTensor._wrap(
            DerivedTensors({"frame": frame}, derived), torch.from_numpy(lengths), DictTensor()
        )
        if final == 300:
            with pytest.raises(SpecError, match="'_frame' has values such as 300"):
                pool.extend(trajectories)
        else:
            pool.extend(trajectories)
    assert pool.transitions()["_frame"][:, 0].tolist() == [0, 0, 0, 200]
    assert pool.transitions()["_frame"].dtype == torch.uint8


def test_flags_may_have_a_dimension_of_one() -> None:
    done = (torch.arange(6) == 2)[None, :, None]
    pool = stored({"number": torch.arange(6)[None], "_done": done, "initial_state": done.roll(1)})
    first = (batch := pool.sample_sequences(6, 6))["number"][:, 0]
    assert torch.equal(batch.lengths, torch.where(first <= 2, 3 - first, 6 - first))


@pytest.mark.parametrize("key", ["_done", "_terminated", "_truncated", "initial_state"])
def test_several_flags_per_step_are_refused(key: str) -> None:
    pool = Pool(pool_size=10)
    with pytest.raises(SpecError, match=f"'{key}' has shape \\[2\\]"):
        pool.extend(TemporalDictTensor({key: torch.zeros(2, 3, 2, dtype=torch.bool)}))
    assert len(pool) == 0


def test_steps_behind_which_lengths_were_cut_keep_the_value_that_followed_them() -> None:
    frame = torch.arange(24.0).view(2, 4, 3)
    lengths = np.array([4, 4])
    derived = {"_frame": Successor("frame", frame, np.full((2, 3), -1, np.float32), lengths)}
    trajectories = TemporalDictTensor._wrap(
        DerivedTensors({"frame": frame}, derived), torch.tensor([4, 2]), DictTensor()
    )
    pool = Pool(pool_size=10)
    pool.extend(trajectories)
    after = pool.transitions()["_frame"]
    assert torch.equal(after[:4], torch.cat([frame[0, 1:], torch.full((1, 3), -1.0)]))
    assert torch.equal(after[4:], frame[1, 1:3])


@pytest.mark.parametrize("width", [3, 4, 5, 10, 17])
def test_a_value_that_does_not_lead_to_the_next_step_ends_a_piece(width: int) -> None:
    frame = torch.rand(2, 6, width, dtype=torch.float32)
    after = torch.cat([frame[:, 1:], torch.rand(2, 1, width)], 1)
    after[0, 2, width - 1] += 1.0  # in the last word
    after[1, 4, 0] += 1.0
    pool = stored({"frame": frame, "_frame": after})
    assert pool._store.is_last[:12].nonzero()[0].tolist() == [2, 5, 10, 11]
