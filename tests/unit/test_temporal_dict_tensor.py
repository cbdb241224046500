"""TemporalDictTensor: what it does with steps, lengths and info, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rlpool import MonoThreadEpisodeBatcher
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError

from support.agents import ConstantAgent
from support.envs import create_counting

LENGTHS = [3, 1, 0, 5]
T = 5


def make_trajectories(
    lengths: list[int] | None = None, n_timesteps: int = T, first: int = 1
) -> TemporalDictTensor:
    """Step t of row b has the value ``100 * (first + b) + t``; ``info`` has ``first + b``."""
    sizes = torch.tensor(LENGTHS if lengths is None else lengths, dtype=torch.int64)
    task = torch.arange(first, first + len(sizes))
    time = torch.arange(n_timesteps)
    action = (100 * task.unsqueeze(1) + time) * (time < sizes.unsqueeze(1))
    frame = action.float().unsqueeze(2).expand(-1, -1, 2).clone()
    return TemporalDictTensor(
        {"frame": frame, "action": action, "is_set": action > 0}, sizes, DictTensor({"task": task})
    )


def rows(batch: TemporalDictTensor) -> list[list[int]]:
    """Each row's actions without padding, after checking every key, the padding and the info."""
    action, found = batch["action"], []
    assert batch["frame"].tolist() == action.float().unsqueeze(2).expand(-1, -1, 2).tolist()
    assert batch["is_set"].tolist() == (action > 0).tolist()
    for row, length in zip(action.tolist(), batch.lengths.tolist(), strict=True):
        assert row[length:] == [0] * (len(row) - length)
        found.append(row[:length])
    assert set(batch.keys()) == {"frame", "action", "is_set"}
    assert batch["frame"].dtype is torch.float32
    assert action.dtype is torch.int64
    assert batch["is_set"].dtype is torch.bool
    assert batch.lengths.dtype is torch.int64
    assert batch.info.n_elems() == batch.n_elems()
    for row, task in zip(found, batch.info["task"].tolist(), strict=True):
        assert {value // 100 for value in row} <= {task}
    return found


EXPECTED = [[100, 101, 102], [200], [], [400, 401, 402, 403, 404]]


# Construction


def test_lengths_default_to_all_steps_and_info_to_an_empty_dict_tensor() -> None:
    batch = TemporalDictTensor({"x": torch.zeros(2, 3)})
    assert batch.lengths.tolist() == [3, 3]
    assert batch.lengths.dtype is torch.int64
    assert isinstance(batch.info, DictTensor)
    assert batch.info.empty()
    assert (batch.n_elems(), batch.n_timesteps()) == (2, 3)


def test_constructor_copies_the_dicts_but_not_the_tensors() -> None:
    tensors, info = {"x": torch.zeros(2, 3)}, DictTensor({"task": torch.zeros(2)})
    lengths = torch.tensor([1, 3])
    batch = TemporalDictTensor(tensors, lengths, info)
    tensors["y"] = torch.zeros(7)
    info.set("more", torch.zeros(2))
    assert list(batch) == ["x"]
    assert list(batch.info) == ["task"]
    assert batch["x"] is tensors["x"]
    assert batch.lengths is lengths
    assert batch.info["task"] is info["task"]


def test_wrap_keeps_the_very_objects() -> None:
    tensors, lengths, info = {"x": torch.zeros(2, 3)}, torch.tensor([1, 3]), DictTensor()
    batch = TemporalDictTensor._wrap(tensors, lengths, info)
    batch.set("y", torch.ones(2, 3))
    assert tensors["y"] is batch["y"]
    assert batch.lengths is lengths
    assert batch.info is info


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([{"a": torch.zeros(2)}], r"'a' is float32 \[2\]", id="no time"),
        pytest.param(
            [{"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}], r"'b' is .*key 'a' is", id="other T"
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}], r"'b' is .*key 'a' is", id="other B"
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3), "b": torch.zeros(2, 3, device="meta")}],
            "'b' is .* on meta",
            id="other device",
        ),
        pytest.param([{"a": 1}], "'a' is int 1, not a tensor", id="no tensor"),
        pytest.param([{"a": torch.zeros(2, 3)}, [1, 2]], "lengths are list", id="list"),
        pytest.param(
            [{"a": torch.zeros(2, 3)}, torch.tensor([1.0, 2.0])], "are float32", id="float lengths"
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3)}, torch.tensor([1, 2]).int()], "are int32", id="int32 lengths"
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3)}, torch.tensor([1])], r"int64 \[1\] for", id="few lengths"
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3)}, torch.tensor([[1, 2]])], r"int64 \[1, 2\]", id="2-d lengths"
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3)}, torch.tensor([0, 4])], "from 0 to 4, T is 3", id="too long"
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3)}, torch.tensor([-1, 3])], "from -1 to 3", id="negative length"
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3)}, torch.zeros(2, dtype=torch.int64, device="meta")],
            "on meta for",
            id="lengths elsewhere",
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3)}, None, DictTensor({"w": torch.zeros(3)})],
            r"info key 'w' is float32 \[3\], lengths are int64 \[2\]",
            id="rows of info",
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3)}, None, DictTensor({"w": torch.tensor(0.0)})],
            "info key 'w'",
            id="scalar info",
        ),
        pytest.param(
            [{"a": torch.zeros(2, 3)}, None, DictTensor({"w": torch.zeros(2, device="meta")})],
            "info key 'w' is .* on meta",
            id="info elsewhere",
        ),
    ],
)
def test_constructor_refuses_what_does_not_fit(arguments: list[Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TemporalDictTensor(*arguments)


def test_without_keys_there_are_still_rows() -> None:
    batch = make_trajectories().get([])
    assert (batch.n_elems(), batch.n_timesteps()) == (4, 5)
    assert batch.mask().shape == (4, 5)
    assert [row.lengths.tolist() for row in batch.unfold()] == [[3], [1], [0], [5]]
    assert batch[1:3].info["task"].tolist() == [2, 3]
    assert TemporalDictTensor({}).n_elems() == 0
    assert TemporalDictTensor({}).full()


def test_lengths_and_info_cannot_be_replaced() -> None:
    batch = make_trajectories()
    with pytest.raises(AttributeError):
        batch.lengths = torch.zeros(4)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        batch.info = DictTensor()  # type: ignore[misc]


# As a dict


def test_reads_like_a_dict() -> None:
    batch = make_trajectories()
    assert list(batch) == list(batch.keys()) == ["frame", "action", "is_set"]
    assert dict(batch.items()) == dict(batch)
    assert next(iter(batch.values())) is batch["frame"]
    assert "action" in batch
    assert "task" not in batch
    with pytest.raises(KeyError, match="no key 'task'"):
        batch["task"]


def test_specs_describe_one_step() -> None:
    batch = make_trajectories()
    expected = {
        "frame": {"size": torch.Size([2]), "dtype": torch.float32},
        "action": {"size": torch.Size([]), "dtype": torch.int64},
        "is_set": {"size": torch.Size([]), "dtype": torch.bool},
    }
    assert batch.specs() == batch[:0].specs() == batch.temporal_slice(0, 0).specs() == expected
    assert batch.index(0).specs() == expected


def test_get_keeps_lengths_and_info_and_shares_tensors() -> None:
    batch = make_trajectories()
    kept = batch.get(["action"])
    assert list(kept) == ["action"]
    assert kept["action"] is batch["action"]
    assert kept.lengths.tolist() == LENGTHS
    assert kept.info["task"] is batch.info["task"]
    kept.info.set("more", torch.zeros(4))
    assert "more" not in batch.info
    assert batch.get(["action"], clone=True)["action"] is not batch["action"]
    with pytest.raises(SpecError, match=r"pass \['action'\]"):
        batch.get("action")
    with pytest.raises(KeyError):
        batch.get(["reward"])


# Masks and lengths


def test_mask_is_float_and_one_for_steps() -> None:
    mask = make_trajectories().mask()
    assert mask.dtype is torch.float32
    assert mask.tolist() == [
        [1, 1, 1, 0, 0],
        [1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1],
    ]


def test_full_is_true_when_every_length_is_t() -> None:
    assert make_trajectories([5, 5]).full()
    assert make_trajectories([], 5).full()
    assert not make_trajectories([5, 4]).full()
    assert not make_trajectories([4, 4]).full()
    assert make_trajectories([4, 4]).shorten().full()


def test_shorten_cuts_to_the_longest_and_gives_views() -> None:
    batch = make_trajectories([3, 1, 0])
    short = batch.shorten()
    assert short.n_timesteps() == 3
    assert rows(short) == EXPECTED[:3]
    assert short["frame"].data_ptr() == batch["frame"].data_ptr()
    assert make_trajectories([0, 0]).shorten()["frame"].shape == (2, 0, 2)
    assert make_trajectories([]).shorten()["frame"].shape == (0, 0, 2)


# Rows


def test_slice_of_one_row_keeps_the_batch_dimension() -> None:
    batch = make_trajectories()
    for row in (batch.slice(1), batch.slice(-3)):
        assert rows(row) == [[200]]
        assert row["frame"].data_ptr() == batch["frame"][1].data_ptr()
    for number in (4, -5):
        with pytest.raises(IndexError, match="does not exist, there are 4"):
            batch.slice(number)


def test_slice_of_rows_is_a_view() -> None:
    batch = make_trajectories()
    for part in (batch.slice(1, 3), batch[1:3], batch.index(slice(1, 3))):
        assert rows(part) == EXPECTED[1:3]
        assert part["frame"].data_ptr() == batch["frame"][1].data_ptr()
    assert rows(batch[::2]) == EXPECTED[::2]
    assert rows(batch.slice(4, 9)) == []


def test_rows_by_int_tensor_or_mask_are_copies() -> None:
    batch = make_trajectories()
    chosen = batch[torch.tensor([3, 0, -1])]
    assert rows(chosen) == [EXPECTED[3], EXPECTED[0], EXPECTED[3]]
    assert rows(batch.index(torch.tensor([True, False, False, True]))) == [
        EXPECTED[0],
        EXPECTED[3],
    ]
    assert rows(batch[torch.tensor([], dtype=torch.int64)]) == []
    chosen["frame"].zero_()
    chosen.lengths.zero_()
    assert rows(batch) == EXPECTED


@pytest.mark.parametrize(
    "selection", [torch.ones(5, dtype=torch.bool), torch.tensor([0.0]), [0], True, None]
)
def test_other_selections_of_rows_are_refused(selection: Any) -> None:
    with pytest.raises(SpecError, match="cannot select from 4 rows"):
        make_trajectories()[selection]
    with pytest.raises(SpecError, match="cannot select from 4 rows"):
        make_trajectories().get([])[selection]


@pytest.mark.parametrize("row", [4, -5, torch.tensor([4]), torch.tensor([-5])])
def test_row_that_does_not_exist_raises_index_error(row: Any) -> None:
    with pytest.raises(IndexError):
        make_trajectories()[row]
    with pytest.raises(IndexError):
        make_trajectories().get([])[row]


def test_int_drops_the_batch_dimension() -> None:
    batch = make_trajectories()
    for row in (batch[0], batch.index(-4), batch[torch.tensor(0)]):
        assert row["frame"].shape == (5, 2)
        assert row["frame"].data_ptr() == batch["frame"].data_ptr()
        assert row.lengths.shape == ()
        assert row.lengths.item() == 3
        assert row.info["task"].item() == 1


def test_single_trajectory_still_knows_its_time() -> None:
    row = make_trajectories()[0]
    assert row.n_timesteps() == 5
    assert row.mask().tolist() == [1, 1, 1, 0, 0]
    assert not row.full()
    assert row.shorten()["action"].tolist() == [100, 101, 102]
    part = row.temporal_slice(1, 5)
    assert part["action"].tolist() == [101, 102, 0, 0]
    assert part.lengths.item() == 2
    assert row.temporal_index(2)["frame"].tolist() == [102, 102]
    assert row.clone().get(["action"])["action"].tolist() == [100, 101, 102, 0, 0]
    assert pickle.loads(pickle.dumps(row)).lengths.item() == 3
    assert "[5, 2]" in repr(row)


def test_single_trajectory_refuses_what_needs_rows() -> None:
    row = make_trajectories()[0]
    one = torch.tensor([0])
    for call in (
        row.n_elems,
        row.unfold,
        row.flatten,
        lambda: row[0],
        lambda: row.slice(0),
        lambda: row.expand(3),
        lambda: row.set("x", torch.zeros(5)),
        lambda: row.temporal_multi_index(one),
        lambda: row.masked_temporal_index(0),
        lambda: row.copy_(make_trajectories(), one, one),
        lambda: TemporalDictTensor.cat([row, row]),
    ):
        with pytest.raises(SpecError, match="no batch dimension"):
            call()


def test_unfold_gives_views_of_one_row() -> None:
    batch = make_trajectories()
    parts = batch.unfold()
    assert [rows(part) for part in parts] == [[row] for row in EXPECTED]
    assert parts[1]["frame"].data_ptr() == batch["frame"][1].data_ptr()
    assert make_trajectories([]).unfold() == []


# Time


def test_temporal_slice_clips_lengths_and_gives_views() -> None:
    batch = make_trajectories()
    part = batch.temporal_slice(1, 4)
    assert rows(part) == [[101, 102], [], [], [401, 402, 403]]
    assert part.lengths.tolist() == [2, 0, 0, 3]
    assert part["frame"].data_ptr() == batch["frame"][:, 1:].data_ptr()
    assert batch.lengths.tolist() == LENGTHS
    assert batch.temporal_slice(5, 5)["frame"].shape == (4, 0, 2)
    assert rows(batch.temporal_slice(0, 5)) == EXPECTED


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 6), (3, 2), (0, -1), (6, 6)])
def test_temporal_slice_out_of_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(SpecError, match=f"steps {start} to {stop} are not within 0 to 5"):
        make_trajectories().temporal_slice(start, stop)


def test_temporal_index_is_one_step_of_every_row() -> None:
    batch = make_trajectories()
    step = batch.temporal_index(1)
    assert isinstance(step, DictTensor)
    assert step["action"].tolist() == [101, 0, 0, 401]
    assert step["frame"].shape == (4, 2)
    assert step["frame"].data_ptr() == batch["frame"][0, 1].data_ptr()


@pytest.mark.parametrize("step", [-1, 5])
def test_step_out_of_range_is_refused(step: int) -> None:
    batch = make_trajectories()
    with pytest.raises(SpecError, match=f"step {step} is not within 0 to 4"):
        batch.temporal_index(step)
    with pytest.raises(SpecError, match=f"step {step} is not within 0 to 4"):
        batch.masked_temporal_index(step)
    with pytest.raises(SpecError, match=f"step {step} is not within 0 to 4"):
        batch.temporal_multi_index(torch.tensor([0, 1, step, 2]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_temporal_multi_index_is_another_step_of_every_row(dtype: torch.dtype) -> None:
    steps = make_trajectories().temporal_multi_index(torch.tensor([2, 0, 4, 3], dtype=dtype))
    assert steps["action"].tolist() == [102, 200, 0, 403]
    assert steps["frame"].tolist() == [[102, 102], [200, 200], [0, 0], [403, 403]]
    empty = make_trajectories([]).temporal_multi_index(torch.zeros(0, dtype=dtype))
    assert empty["frame"].shape == (0, 2)


@pytest.mark.parametrize(
    "steps",
    [
        torch.tensor([0, 1]),
        torch.tensor(0),
        torch.tensor([[0], [0], [0], [0]]),
        torch.zeros(4),
        torch.ones(4, dtype=torch.bool),
        [0, 0, 0, 0],
    ],
)
def test_temporal_multi_index_of_other_steps_is_refused(steps: Any) -> None:
    with pytest.raises(SpecError, match=r"use an int64 \[4\]"):
        make_trajectories().temporal_multi_index(steps)


def test_masked_temporal_index_gives_the_running_rows_and_their_numbers() -> None:
    batch = make_trajectories()
    step, numbers = batch.masked_temporal_index(1)
    assert step["action"].tolist() == [101, 401]
    assert numbers.tolist() == [0, 3]
    assert numbers.dtype is torch.int64
    step, numbers = make_trajectories([0, 0]).masked_temporal_index(0)
    assert step["frame"].shape == (0, 2)
    assert numbers.tolist() == []


# Transitions


def test_flatten_is_row_then_time_without_padding() -> None:
    flat = make_trajectories().flatten()
    assert isinstance(flat, DictTensor)
    assert flat["action"].tolist() == [value for row in EXPECTED for value in row]
    assert flat["frame"].shape == (9, 2)
    assert flat["frame"][:, 1].tolist() == flat["action"].float().tolist()
    assert flat["is_set"].dtype is torch.bool


def test_flatten_copies_also_when_there_is_no_padding() -> None:
    batch = make_trajectories([5, 5])
    batch.flatten()["frame"].zero_()
    assert rows(batch) == [[100, 101, 102, 103, 104], [200, 201, 202, 203, 204]]


def test_flatten_can_repeat_the_info() -> None:
    flat = make_trajectories().flatten(with_info=True)
    assert flat["task"].tolist() == [value // 100 for value in flat["action"].tolist()]
    batch = make_trajectories()
    batch.set("task", batch["action"])
    with pytest.raises(SpecError, match=r"both sides have the keys \['task'\]"):
        batch.flatten(with_info=True)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda block: block[:, :T], id="slots with one more row"),
        pytest.param(lambda block: block[:, 1 : T + 1], id="shifted by one step"),
        pytest.param(lambda block: block[::2, :T], id="every other row"),
        pytest.param(lambda block: block[:, :T].transpose(2, 3), id="transposed features"),
        pytest.param(lambda block: block.transpose(0, 1)[:T].transpose(0, 1), id="as it lies"),
        pytest.param(lambda block: block.transpose(0, 1).clone().transpose(0, 1)[:, :T], id="T B"),
        pytest.param(lambda block: block[:1, :T].expand(4, -1, -1, -1), id="one row repeated"),
        pytest.param(lambda block: block[:, :1].expand(-1, T, -1, -1), id="one step repeated"),
        pytest.param(lambda block: block[:, :, 0, 0].unfold(1, 3, 1)[:, :T], id="windows"),
        pytest.param(lambda block: block[:, :T].requires_grad_(), id="with gradients"),
        pytest.param(lambda block: block[:, :T, :0], id="no features"),
        pytest.param(lambda block: block[:, ::2], id="every other step"),
        pytest.param(lambda block: block[:, ::3], id="pitch that is no multiple of a step"),
    ],
)
def test_steps_are_found_in_any_memory_layout(view: Callable[[Any], Any]) -> None:
    block = torch.arange(8 * 10 * 2 * 3.0).view(8, 10, 2, 3)
    tensor = view(block)
    lengths = torch.arange(tensor.shape[0]) % (tensor.shape[1] + 1)
    batch = TemporalDictTensor({"x": tensor}, lengths)
    expected = [tensor[b, t] for b, length in enumerate(lengths.tolist()) for t in range(length)]
    assert torch.equal(batch.flatten()["x"], torch.stack(expected))
    last = (lengths - 1).clamp(min=0)
    expected = [tensor[b, t] for b, t in enumerate(last.tolist())]
    assert torch.equal(batch.temporal_multi_index(last)["x"], torch.stack(expected))


def test_flatten_passes_gradients() -> None:
    weights = torch.ones(2, 3, requires_grad=True)
    batch = TemporalDictTensor({"x": weights * 2}, torch.tensor([2, 0]))
    batch.flatten()["x"].sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[2, 2, 0], [0, 0, 0]]


def test_from_packed_is_the_inverse_of_flatten() -> None:
    batch = make_trajectories()
    again = TemporalDictTensor.from_packed(batch.flatten(), batch.lengths, batch.info)
    assert rows(again) == EXPECTED
    assert again.n_timesteps() == 5
    assert torch.equal(again["frame"], batch["frame"])


def test_from_packed_takes_a_dict_and_copies() -> None:
    steps = {"x": torch.tensor([1.0, 2.0, 3.0])}
    batch = TemporalDictTensor.from_packed(steps, torch.tensor([0, 2, 1]))
    assert batch["x"].tolist() == [[0, 0], [1, 2], [3, 0]]
    assert batch.info.empty()
    batch["x"].zero_()
    assert steps["x"].tolist() == [1, 2, 3]


def test_from_packed_without_steps() -> None:
    zero = torch.zeros(0, dtype=torch.int64)
    batch = TemporalDictTensor.from_packed({"x": torch.zeros(0, 3)}, zero)
    assert batch["x"].shape == (0, 0, 3)
    batch = TemporalDictTensor.from_packed({"x": torch.zeros(0, 3)}, torch.tensor([0, 0]))
    assert batch["x"].shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("steps", "lengths"),
    [
        (torch.zeros(3), torch.tensor([1, 1])),
        (torch.zeros(3), torch.tensor([4, -1])),
        (torch.zeros(3), torch.tensor([1.0, 2.0])),
        (torch.zeros(3, device="meta"), torch.tensor([1, 2])),
        (torch.tensor(0.0), torch.tensor([1])),
    ],
)
def test_from_packed_refuses_what_does_not_add_up(
    steps: torch.Tensor, lengths: torch.Tensor
) -> None:
    with pytest.raises(SpecError):
        TemporalDictTensor.from_packed({"x": steps}, lengths)


# Whole batches


def test_cat_pads_time_with_zeros_and_carries_info() -> None:
    first, second = make_trajectories([1, 2], 2), make_trajectories([3, 0, 5], 6, first=3)
    joined = TemporalDictTensor.cat(part for part in (first, second))
    assert joined["frame"].shape == (5, 6, 2)
    assert rows(joined) == [[100], [200, 201], [300, 301, 302], [], [500, 501, 502, 503, 504]]
    assert joined.info["task"].tolist() == [1, 2, 3, 4, 5]


def test_cat_of_unfold_is_the_batch() -> None:
    batch = make_trajectories()
    assert rows(TemporalDictTensor.cat(batch.unfold())) == EXPECTED
    shortened = [row.shorten() for row in batch.unfold()]
    assert rows(TemporalDictTensor.cat(shortened)) == EXPECTED


def test_cat_copies_also_a_single_part() -> None:
    batch = make_trajectories()
    joined = TemporalDictTensor.cat([batch])
    joined["frame"].zero_()
    joined.lengths.zero_()
    joined.info["task"].zero_()
    assert rows(batch) == EXPECTED


def test_cat_of_nothing_is_empty() -> None:
    assert TemporalDictTensor.cat([]).n_elems() == 0
    assert list(TemporalDictTensor.cat([])) == []


@pytest.mark.parametrize(
    ("tensors", "info", "message"),
    [
        pytest.param({"y": torch.zeros(1, 2)}, {}, "'x': part 1 has", id="other key"),
        pytest.param({"x": torch.zeros(1, 2).int()}, {}, "'x' is int32", id="dtype"),
        pytest.param({"x": torch.zeros(1, 2, 3)}, {}, "'x' is float32", id="shape"),
        pytest.param(
            {"x": torch.zeros(1, 2)}, {"w": torch.zeros(1)}, "'w': the info of part 1", id="info"
        ),
    ],
)
def test_cat_of_unlike_parts_is_refused_naming_the_key(
    tensors: dict[str, torch.Tensor], info: dict[str, torch.Tensor], message: str
) -> None:
    part = TemporalDictTensor({"x": torch.zeros(2, 4)})
    with pytest.raises(SpecError, match=message):
        TemporalDictTensor.cat([part, TemporalDictTensor(tensors, None, info)])


def test_cat_of_other_things_is_refused() -> None:
    with pytest.raises(SpecError, match="pass a list of TemporalDictTensor"):
        TemporalDictTensor.cat([DictTensor({"x": torch.zeros(2, 3)})])  # type: ignore[list-item]


def test_expand_adds_empty_rows_of_zeros_and_keeps_dtypes() -> None:
    grown = make_trajectories([3, 5]).expand(4)
    assert rows(grown) == [EXPECTED[0], [200, 201, 202, 203, 204], [], []]
    assert grown.lengths.tolist() == [3, 5, 0, 0]
    assert grown.info["task"].tolist() == [1, 2, 0, 0]


def test_expand_copies_also_to_the_same_size() -> None:
    batch = make_trajectories()
    batch.expand(4)["frame"].zero_()
    assert rows(batch) == EXPECTED
    with pytest.raises(SpecError, match="cannot expand 4 rows to 3"):
        batch.expand(3)


def test_clone_copies_everything() -> None:
    batch = make_trajectories()
    copied = batch.clone()
    assert rows(copied) == EXPECTED
    copied["frame"].zero_()
    copied.lengths.zero_()
    copied.info["task"].zero_()
    copied.set("more", torch.zeros(4, 5))
    assert rows(batch) == EXPECTED


def test_to_moves_everything_or_is_the_same_object() -> None:
    batch = make_trajectories()
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    assert moved.device() == torch.device("meta")
    assert moved.lengths.is_meta
    assert moved.info["task"].is_meta
    assert moved["frame"].is_meta
    assert batch.get([]).to("meta").device() == torch.device("meta")


def test_set_adds_and_replaces_in_place() -> None:
    batch = make_trajectories()
    reward = torch.ones(4, 5)
    batch.set("reward", reward)
    assert batch["reward"] is reward
    batch.set("frame", torch.zeros(4, 5))
    assert batch["frame"].shape == (4, 5)
    assert batch.info["task"].tolist() == [1, 2, 3, 4]


def test_set_without_keys() -> None:
    batch = TemporalDictTensor({})
    batch.set("x", torch.zeros(2, 3))
    assert batch.lengths.tolist() == [3, 3]
    batch = make_trajectories().get([])
    batch.set("x", torch.zeros(4, 6))
    assert batch.n_timesteps() == 6
    assert batch.lengths.tolist() == LENGTHS
    for wrong in (torch.zeros(4, 4), torch.zeros(3, 6), torch.zeros(4)):
        with pytest.raises(SpecError):
            make_trajectories().get([]).set("x", wrong)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6),
        torch.zeros(3, 5),
        torch.zeros(4),
        torch.zeros(4, 5, device="meta"),
        torch.tensor(0.0),
        1.0,
    ],
)
def test_set_of_a_wrong_size_is_refused_and_changes_nothing(tensor: Any) -> None:
    batch = make_trajectories()
    for key in ("reward", "action"):
        with pytest.raises(SpecError, match=f"'{key}'"):
            batch.set(key, tensor)
    only = batch.get(["action"])
    with pytest.raises(SpecError, match="'action'"):
        only.set("action", tensor)
    assert rows(batch) == EXPECTED


def test_sum_is_the_union_of_keys() -> None:
    batch = make_trajectories()
    both = batch.get(["frame"]) + batch.get(["action", "is_set"])
    assert rows(both) == EXPECTED
    assert both["action"] is batch["action"]
    other = TemporalDictTensor(
        {"reward": torch.zeros(4, 5)}, batch.lengths, {"seed": torch.zeros(4)}
    )
    assert list((batch + other).info) == ["task", "seed"]


def test_sum_of_other_trajectories_is_refused() -> None:
    batch = make_trajectories()
    action, frame = batch.get(["action"]), batch.get(["frame"])
    with pytest.raises(SpecError, match="both sides have the keys"):
        batch + action
    with pytest.raises(SpecError, match="the lengths differ"):
        action + make_trajectories([3, 1, 0, 4]).get(["frame"])
    with pytest.raises(SpecError, match="key 'frame'"):
        action + make_trajectories(LENGTHS, 6).get(["frame"])
    with pytest.raises(SpecError, match="info key 'task' differs"):
        action + make_trajectories(first=2).get(["frame"])
    with pytest.raises(TypeError):
        frame + DictTensor()  # type: ignore[operator]


# copy_


def test_copy_keeps_storage_and_copies_steps_lengths_and_info() -> None:
    batch, source = make_trajectories(), make_trajectories([2, 4], first=7)
    before = batch["frame"].data_ptr(), batch.lengths.data_ptr()
    batch.copy_(source, torch.tensor([1, 0]), torch.tensor([0, -1]))
    assert rows(batch) == [[800, 801, 802, 803], [200], [], [700, 701]]
    assert batch.info["task"].tolist() == [8, 2, 3, 7]
    assert (batch["frame"].data_ptr(), batch.lengths.data_ptr()) == before


def test_copy_from_a_shorter_batch_pads_with_zeros() -> None:
    batch = make_trajectories([5, 5])
    batch.copy_(make_trajectories([1, 2], 2, first=7), torch.tensor([1]), torch.tensor([0]))
    assert rows(batch) == [[800, 801], [200, 201, 202, 203, 204]]


def test_copy_from_a_longer_batch_takes_what_fits() -> None:
    batch, source = make_trajectories(), make_trajectories([8, 5], 9, first=7)
    batch.copy_(source, torch.tensor([False, True]), torch.tensor([False, True, False, False]))
    assert rows(batch) == [EXPECTED[0], [800, 801, 802, 803, 804], [], EXPECTED[3]]
    with pytest.raises(SpecError, match="a trajectory of 8 steps does not fit into 5"):
        batch.copy_(source, torch.tensor([1, 0]), torch.tensor([2, 3]))
    assert rows(batch) == [EXPECTED[0], [800, 801, 802, 803, 804], [], EXPECTED[3]]


def test_copy_from_itself_reads_before_it_writes() -> None:
    batch = make_trajectories()
    batch.copy_(batch, torch.arange(4), torch.tensor([3, 2, 1, 0]))
    assert rows(batch) == EXPECTED[::-1]


def test_copy_refuses_what_does_not_fit_and_writes_nothing() -> None:
    batch, one = make_trajectories(), torch.tensor([0])
    source = make_trajectories(first=5)
    without_info = TemporalDictTensor(source, source.lengths)
    with pytest.raises(SpecError, match="'task': the info of source has"):
        batch.copy_(without_info, one, one)
    with pytest.raises(SpecError, match="'is_set': source has"):
        batch.copy_(source.get(["frame", "action"]), one, one)
    with pytest.raises(SpecError, match="1 source rows for 4 destination rows"):
        batch.copy_(source, one, torch.arange(4))
    with pytest.raises(IndexError, match="row 4 does not exist"):
        batch.copy_(source, torch.tensor([0, 1]), torch.tensor([0, 4]))
    assert rows(batch) == EXPECTED


# Pickling, copying, pytrees, printing


def test_pickle_keeps_steps_lengths_and_info() -> None:
    assert rows(pickle.loads(pickle.dumps(make_trajectories()))) == EXPECTED


def test_view_pickles_its_values_and_not_the_storage() -> None:
    block = make_trajectories([10] * 1000, 10)
    part = block[3:5].temporal_slice(0, 4)
    file = io.BytesIO()
    torch.save(part, file)
    file_size = file.tell()
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(part)), torch.load(file, weights_only=True)):
        assert rows(again) == [[400, 401, 402, 403], [500, 501, 502, 503]]
    assert len(pickle.dumps(block[3:5])) < 4000  # lengths are a view here
    assert len(pickle.dumps(part)) < 4000  # the block has 178,000 bytes, its lengths 8,000
    assert file_size < 8000


LOADS = """
import sys
import torch
try:
    torch.load(sys.argv[1], weights_only=True)
except Exception as error:
    print(error, file=sys.stderr)
import rlpool
saved = torch.load(sys.argv[1], weights_only=True)
print(saved["trajectories"]["_frame"].sum().item(), saved["epoch"])
print(saved["trajectories"].info["seed"].tolist() == saved["info"]["seed"].tolist())
"""


def test_a_saved_result_is_loaded_by_a_process_that_has_imported_rlpool(tmp_path: Path) -> None:
    file = tmp_path / "result.pt"
    with MonoThreadEpisodeBatcher(ConstantAgent, {}, create_counting, {}, seeds=1) as batcher:
        batcher.execute(3)
        result = batcher.get()
        assert result is not None
    torch.save({"trajectories": result, "info": result.info, "epoch": 3}, file)

    command = [sys.executable, "-c", LOADS, str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"{result['_frame'].sum().item()} 3\nTrue\n", done.stderr
    # Without it torch tells what it misses.
    assert re.search(r"rlpool\.data\.(.|\n)*add_safe_globals", done.stderr)


def test_copy_shares_tensors_and_deepcopy_does_not() -> None:
    batch = make_trajectories()
    shallow, deep = copy.copy(batch), copy.deepcopy(batch)
    shallow.set("more", torch.zeros(4, 5))
    shallow.info.set("more", torch.zeros(4))
    assert shallow["frame"] is batch["frame"]
    assert "more" not in batch
    assert "more" not in batch.info
    deep["frame"].zero_()
    deep.lengths.zero_()
    assert rows(batch) == EXPECTED


def test_is_a_pytree_with_lengths_and_info() -> None:
    batch = make_trajectories()
    leaves, spec = _pytree.tree_flatten(batch)
    assert len(leaves) == 5
    assert rows(_pytree.tree_unflatten(leaves, spec)) == EXPECTED
    moved = _pytree.tree_map(lambda tensor: tensor.to("meta"), batch)
    assert moved.lengths.is_meta
    assert moved.info["task"].is_meta
    paths = [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(batch)[0]]
    assert paths == ["['frame']", "['action']", "['is_set']", ".lengths", ".info['task']"]
    assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec


def test_prints_as_a_table_of_key_shape_and_dtype() -> None:
    assert repr(make_trajectories()).splitlines() == [
        "TemporalDictTensor",
        "  key        shape      dtype",
        "  frame      [4, 5, 2]  float32",
        "  action     [4, 5]     int64",
        "  is_set     [4, 5]     bool",
        "  lengths    [4]        int64",
        "  info/task  [4]        int64",
    ]


# Cost


class CountingOps(TorchDispatchMode):
    """Counts tensor operations."""

    n_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation and run it."""
        self.n_ops += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(lambda batch: batch.mask(), id="mask"),
        pytest.param(lambda batch: batch.full(), id="full"),
        pytest.param(lambda batch: batch.shorten(), id="shorten"),
        pytest.param(lambda batch: batch.flatten(with_info=True), id="flatten"),
        pytest.param(lambda batch: batch[batch.lengths > 2], id="mask of rows"),
        pytest.param(lambda batch: batch.temporal_slice(1, 3), id="temporal_slice"),
        pytest.param(lambda batch: batch.temporal_index(1), id="temporal_index"),
        pytest.param(lambda batch: batch.masked_temporal_index(1), id="masked_temporal_index"),
        pytest.param(
            lambda batch: batch.temporal_multi_index(batch.lengths - 1), id="temporal_multi_index"
        ),
        pytest.param(lambda batch: batch.expand(100), id="expand"),
        pytest.param(lambda batch: TemporalDictTensor.cat([batch, batch.shorten()]), id="cat"),
        pytest.param(
            lambda batch: batch.copy_(batch, batch.lengths > 2, batch.lengths > 2), id="copy_"
        ),
        pytest.param(
            lambda batch: TemporalDictTensor.from_packed(batch.flatten(), batch.lengths),
            id="from_packed",
        ),
    ],
)
def test_cost_is_in_tensor_operations_whatever_the_size(method: Callable[[Any], Any]) -> None:
    counts = []
    for n_elems, n_timesteps in ((4, 5), (40, 50)):
        lengths = [1 + b % (n_timesteps - 1) for b in range(n_elems)]
        with CountingOps() as counting:
            batch = make_trajectories(lengths, n_timesteps)
            method(batch)
        counts.append(counting.n_ops)
    assert counts[0] == counts[1]


# tensordict


def test_converts_to_tensordict_and_back_without_copying() -> None:
    pytest.importorskip("tensordict")
    batch = make_trajectories()
    converted = batch.to_tensordict()
    assert converted.batch_size == (4,)
    assert converted["steps"].batch_size == (4, 5)
    assert converted["info"].batch_size == (4,)
    again = TemporalDictTensor.from_tensordict(converted)
    assert rows(again) == EXPECTED
    assert again["frame"].data_ptr() == batch["frame"].data_ptr()
    assert again.lengths.data_ptr() == batch.lengths.data_ptr()
    assert again.info["task"].data_ptr() == batch.info["task"].data_ptr()
    # without info, and taken from a part of the TensorDict
    assert TemporalDictTensor.from_tensordict(converted.exclude("info")[:2]).info.empty()
    with pytest.raises(SpecError, match="it needs steps"):
        TemporalDictTensor.from_tensordict(converted["steps"])
