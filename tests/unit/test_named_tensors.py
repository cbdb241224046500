"""DictTensor, TemporalDictTensor and masks: views and copies, errors, pickles, pytrees, cost.

The property tests compare the selected rows and steps with a model.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from rlpool import DictTensor, SpecError, TemporalDictTensor, masked_dicttensor, masked_tensor

LENGTHS = [3, 1, 0, 5]
T = 5
ZERO = torch.zeros
ONE = torch.tensor([0])
META = torch.zeros(2, 3, device="meta")


def leaves(batch: Any) -> list[Any]:
    """Return all tensors of a batch of either kind."""
    if isinstance(batch, DictTensor):
        return list(batch.values())
    return [*batch.values(), batch.lengths, *batch.info.values()]


def batch_of(n: int = 4) -> DictTensor:
    """Return a batch whose row i holds i in every key."""
    number = torch.arange(n)
    frame = number.float().unsqueeze(1).expand(n, 3).clone()
    return DictTensor({"frame": frame, "action": number.clone(), "is_new": number % 2 == 0})


def steps_of(lengths: list[int] = LENGTHS, n_timesteps: int = T) -> TemporalDictTensor:
    """Return steps with value ``100 * (1 + b) + t`` at step t of row b, and ``info`` ``1 + b``."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    task = torch.arange(1, 1 + len(sizes))
    time = torch.arange(n_timesteps)
    action = (100 * task.unsqueeze(1) + time) * (time < sizes.unsqueeze(1))
    frame = action.float().unsqueeze(2).expand(-1, -1, 2).clone()
    return TemporalDictTensor({"frame": frame, "action": action}, sizes, {"task": task})


def address(tensor: Any) -> int:
    return int(tensor.data_ptr())


both = pytest.mark.parametrize("make", [batch_of, steps_of])


# Dicts of tensors that are not copied -------------------------------------------------------------


@both
def test_constructors_and_copies_own_the_dict_and_share_the_tensors(make: Any) -> None:
    batch = make()
    given = dict(batch)
    again = type(batch)(given)
    given["more"] = ZERO(7)
    for other in (again, type(batch)(batch), copy.copy(batch), batch.get(list(batch))):
        assert list(other) == list(other.keys()) == list(batch)
        assert all(other[key] is batch[key] for key in batch)
        other.set("new", ZERO(4, T))
        assert "new" in other
        assert "new" not in batch
    assert 0 not in batch
    assert not hasattr(batch, "__dict__")
    with pytest.raises(KeyError, match=r"no key 'reward', there are \['frame', 'action'"):
        batch["reward"]


def test_lengths_and_info_belong_to_the_batch() -> None:
    assert TemporalDictTensor({"x": ZERO(2, 3)}).lengths.tolist() == [3, 3]
    assert TemporalDictTensor({"x": ZERO(2, 3)}).info.empty()
    batch = steps_of()
    for name in ("lengths", "info"):
        with pytest.raises(AttributeError):
            setattr(batch, name, None)
    kept = batch.get(["action"])
    assert kept.lengths.tolist() == LENGTHS
    for other in (kept, copy.copy(batch)):
        other.info.set("more", ZERO(4))
        assert list(batch.info) == ["task"]


def test_batches_without_keys_are_supported() -> None:
    for empty in (DictTensor(), DictTensor.cat([])):
        assert (empty.n_elems(), empty.device(), empty.specs(), empty.unfold()) == (0, None, {}, [])
        for rows in (0, slice(0, 2), torch.tensor([5]), torch.ones(3, dtype=torch.bool)):
            assert empty[rows].empty()
    keyless = steps_of().get([])  # there are still rows
    assert (keyless.n_elems(), keyless.n_timesteps()) == (4, 5)
    assert [row.lengths.tolist() for row in keyless.unfold()] == [[3], [1], [0], [5]]
    keyless.set("x", ZERO(4, 6))
    assert keyless.n_timesteps() == 6
    unsized = TemporalDictTensor({})
    unsized.set("x", ZERO(2, 3))
    assert unsized.lengths.tolist() == [3, 3]
    assert TemporalDictTensor.cat([]).n_elems() == 0


def test_operations_return_the_documented_views_or_copies() -> None:
    batch, steps = batch_of(), steps_of()
    row, frame = address(batch["frame"][2]), steps["frame"]
    second, later = address(frame[1]), address(frame[0, 1])
    for part, expected in [
        *((part, row) for part in (batch[-2], batch.slice(2), batch[2::2], batch.unfold()[2])),
        *((batch[index], row) for index in (2, np.int64(2), torch.tensor(2))),
        *((part, second) for part in (steps[1], steps.slice(1), steps[1:3], steps.unfold()[1])),
        *((part, later) for part in (steps.temporal_slice(1, 4), steps.temporal_index(1))),
        (steps.shorten(), address(frame)),
    ]:
        assert address(part["frame"]) == expected
    rows, full = torch.tensor([0, 1, 2, 3], dtype=torch.int32), steps_of([5, 5])
    copies: list[Any] = [copied for part in (batch, steps) for copied in (part[rows], part.clone())]
    copies += [batch[rows >= 0], steps[rows >= 0], copy.deepcopy(batch), copy.deepcopy(steps)]
    copies += [DictTensor.cat([batch]), TemporalDictTensor.cat([steps]), steps.expand(4)]
    copies += [full.flatten(), full.temporal_multi_index(full.lengths - 1)]
    for leaf in itertools.chain(*map(leaves, copies)):
        leaf.zero_()
    for part, unchanged in ((batch, batch_of()), (steps, steps_of()), (full, steps_of([5, 5]))):
        pairs = zip(leaves(part), leaves(unchanged), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_copying_rows_keeps_the_storage_and_reads_before_writing() -> None:
    steps = steps_of()
    before = address(steps["frame"]), address(steps.lengths)
    steps.copy_(steps, torch.arange(4), torch.tensor([3, 2, 1, 0]))
    assert steps["action"].tolist() == steps_of()["action"].flip(0).tolist()
    assert steps.lengths.tolist() == LENGTHS[::-1]
    assert (address(steps["frame"]), address(steps.lengths)) == before
    batch, source = batch_of(), batch_of(2) + DictTensor({"more": ZERO(2)})
    batch.copy_(source, torch.tensor([True, True]), torch.tensor([False, False, True, True]))
    assert batch["action"].tolist() == [0, 1, 0, 1]
    x = torch.arange(3)
    swapped = DictTensor({"a": x, "b": x.flip(0).clone()})
    swapped.copy_(DictTensor({"a": swapped["b"], "b": swapped["a"]}), x, x)
    assert (swapped["a"].tolist(), swapped["b"].tolist()) == ([2, 1, 0], [0, 1, 2])


def test_a_single_trajectory_has_a_length_but_no_rows() -> None:
    row = steps_of()[0]
    assert (row.lengths.item(), row.info["task"].item(), row.n_timesteps()) == (3, 1, 5)
    assert row.mask().tolist() == [1, 1, 1, 0, 0]
    assert row.shorten()["action"].tolist() == [100, 101, 102]
    assert row.temporal_slice(1, 5).lengths.item() == 2
    assert steps_of().temporal_slice(1, 2).lengths.tolist() == [1, 0, 0, 1]
    assert row.temporal_index(2)["frame"].tolist() == [102, 102]
    assert row.specs() == steps_of().specs()
    assert pickle.loads(pickle.dumps(row.clone())).lengths.item() == 3


# Refusals -----------------------------------------------------------------------------------------

X = DictTensor({"x": ZERO(2, 3)})
XT = TemporalDictTensor({"x": ZERO(2, 3)})
ROW = steps_of()[0]
LOSSES = DictTensor({"loss": torch.tensor(0.5), "x": ZERO(2)})  # scalars do not have rows
INT_X, ONE_ROW = DictTensor({"x": ZERO(2, 3).int()}), TemporalDictTensor(X, None, X)
REFUSED: list[tuple[Any, str]] = [
    (lambda: DictTensor({"a": ZERO(2), "b": META}), "'b'"),
    (lambda: TemporalDictTensor(X, torch.tensor([1, 2]).int()), "lengths"),
    (lambda: TemporalDictTensor(X, torch.tensor([0, 4])), "lengths"),
    (lambda: TemporalDictTensor(X, torch.tensor([-1, 3])), "lengths"),
    (lambda: X.get("x"), "keys"),
    (lambda: XT.get([]).set("y", ZERO(2, 2)), "lengths"),
    (lambda: DictTensor.cat([X, X.get([])]), "'x'"),
    (lambda: DictTensor.cat([X, INT_X]), "'x'"),
    (lambda: TemporalDictTensor.cat([XT, ONE_ROW]), "'x'"),
    (lambda: X + X, "'x'"),
    (lambda: X.copy_(X.get([]), ONE, ONE), "'x'"),
    (lambda: steps_of().copy_(TemporalDictTensor(steps_of(), None), ONE, ONE), "'task'"),
    (lambda: steps_of().copy_(steps_of([8], 9), ONE, ONE), "steps"),
    (lambda: XT.expand(1), "1"),
    (lambda: XT.temporal_slice(1, 4), "4"),
    (lambda: XT.temporal_index(-1), "-1"),
    (lambda: XT.temporal_multi_index(torch.tensor([0, 3])), "3"),
    (lambda: masked_tensor(ZERO(2), ZERO(2), torch.tensor([2, 1])), "mask"),
    (lambda: masked_dicttensor(X, X.get([]), torch.ones(2)), "'x'"),
    *(
        (call, "no batch dimension")
        for call in (
            *(ROW.n_elems, ROW.unfold, ROW.flatten, lambda: ROW[0], lambda: ROW.expand(3)),
            *(lambda: ROW.temporal_multi_index(ONE), lambda: ROW.masked_temporal_index(0)),
            *(lambda: ROW.copy_(steps_of(), ONE, ONE), lambda: TemporalDictTensor.cat([ROW, ROW])),
        )
    ),
    *(
        (call, "'loss'")
        for call in (
            *(lambda: LOSSES[0], lambda: LOSSES[:1], lambda: LOSSES[ONE], LOSSES.unfold),
            *(lambda: DictTensor.cat([LOSSES]), lambda: LOSSES.copy_(LOSSES.clone(), ONE, ONE)),
            lambda: masked_dicttensor(LOSSES, LOSSES, torch.ones(2)),
        )
    ),
    *(
        (lambda rows=rows, batch=batch: batch[rows], "4 rows")
        for batch in (batch_of(), steps_of())
        for rows in (
            *(torch.tensor([True, False]), torch.ones(5, dtype=torch.bool), torch.tensor(True)),
            *(torch.ones(4, 3, dtype=torch.bool), torch.ones(4, dtype=torch.uint8)),
            *(torch.tensor([]), torch.tensor([[0, 1]]), True, None, [0, 1], slice(None, None, -1)),
        )
    ),
]


@pytest.mark.parametrize(("use", "named"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_arguments_are_refused_by_name(use: Any, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        use()


def test_a_nonexistent_row_raises_and_nothing_is_written() -> None:
    batch, row = batch_of(), torch.tensor([0, 4])
    # torch does not check indices if there are no values
    for each in (batch, DictTensor({"x": ZERO(4, 0)}), steps_of(), steps_of().get([])):
        for missing in (4, -5, row, torch.tensor([-5])):
            with pytest.raises(IndexError):
                each[missing]
        with pytest.raises(IndexError):
            each.slice(4)
    for read, write in ((row, torch.arange(2)), (torch.arange(2), row)):
        with pytest.raises(IndexError):
            batch.copy_(batch_of().clone(), read, write)
    assert batch["action"].tolist() == [0, 1, 2, 3]


# Values -------------------------------------------------------------------------------------------


def test_masks_do_not_use_arithmetic() -> None:
    ugly = torch.tensor([float("inf"), float("nan"), -0.0, 1e-45])
    plain = torch.ones(4)
    assert torch.equal(masked_tensor(ugly, plain, torch.ones(4)), plain)
    kept = masked_tensor(ugly, plain, ZERO(4))
    assert kept.view(torch.int32).tolist() == ugly.view(torch.int32).tolist()
    large = torch.tensor([2**53 + 1, -(2**62) - 1])  # float32 and float64 would round them
    assert torch.equal(masked_tensor(large, -large, torch.tensor([1, 0])), -large.abs())
    chosen = masked_dicttensor(batch_of(), batch_of()[torch.tensor([3, 2, 1, 0])], torch.ones(4))
    assert chosen["action"].tolist() == [3, 2, 1, 0]
    chosen = masked_dicttensor(batch_of(), chosen, torch.tensor([1, 0, 0, 1]))
    assert (chosen["action"].tolist(), chosen["frame"][:, 2].tolist()) == ([3, 1, 2, 0],) * 2


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "slots with one more row": lambda block: block[:, 1 : T + 1],
    "every other row": lambda block: block[::2, :T],
    "transposed features": lambda block: block[:, :T].transpose(2, 3),
    "one row repeated": lambda block: block[:1, :T].expand(4, -1, -1, -1),
    "one step repeated": lambda block: block[:, :1].expand(-1, T, -1, -1),
    "windows": lambda block: block[:, :, 0, 0].unfold(1, 3, 1)[:, :T],
    "with gradients": lambda block: block[:, :T].requires_grad_(),
    "pitch that is not a multiple of a step": lambda block: block[:, ::3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_found_in_any_memory_layout(layout: str) -> None:
    tensor = LAYOUTS[layout](torch.arange(8 * 10 * 2 * 3.0).view(8, 10, 2, 3))
    lengths = torch.arange(tensor.shape[0]) % (tensor.shape[1] + 1)
    batch = TemporalDictTensor({"x": tensor}, lengths)
    expected = [tensor[b, t] for b, length in enumerate(lengths.tolist()) for t in range(length)]
    assert torch.equal(batch.flatten()["x"], torch.stack(expected))
    last = (lengths - 1).clamp(min=0)
    expected = [tensor[b, t] for b, t in enumerate(last.tolist())]
    assert torch.equal(batch.temporal_multi_index(last)["x"], torch.stack(expected))


def test_gradients_flow_through_operations() -> None:
    weight = torch.ones(3, requires_grad=True)
    DictTensor({"x": weight * 2})[torch.tensor([0, 0, -1])]["x"].sum().backward()
    weights = torch.ones(2, 3, requires_grad=True)
    TemporalDictTensor({"x": weights * 2}, torch.tensor([2, 0])).flatten()["x"].sum().backward()
    assert weight.grad is not None
    assert weights.grad is not None
    assert weight.grad.tolist() == [4, 0, 2]
    assert weights.grad.tolist() == [[2, 2, 0], [0, 0, 0]]


@both
def test_to_moves_everything_or_returns_the_same_object(make: Any) -> None:
    batch = make()
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    assert moved.device() == torch.device("meta")
    assert all(leaf.is_meta for leaf in leaves(moved))
    assert moved.specs() == batch.specs()
    assert steps_of().get([]).to("meta").lengths.is_meta


# Pickles, pytrees, printing -----------------------------------------------------------------------


def test_slices_of_a_window_can_be_joined() -> None:
    window = steps_of([4, 4], 4)
    window.info.set("first_step", torch.tensor([7, 9]))
    parts = [window.temporal_slice(0, 2), window.temporal_slice(2, 4)]
    assert list(TemporalDictTensor.cat(parts).info) == ["task"]
    assert "first_step" in parts[0].info
    assert TemporalDictTensor.cat(parts[:1] * 2).info["first_step"].tolist() == [7, 9, 7, 9]


def test_printing_shows_which_reward_is_which() -> None:
    steps = {"reward": ZERO(1, 2), "_reward": ZERO(1, 2)}
    first = repr(TemporalDictTensor(steps)).splitlines()[1]
    assert first == "  reward   float32 [1, 2]  before the step; _reward: earned by it"
    assert "earned" not in repr(TemporalDictTensor({"reward": ZERO(1, 2)}))


def test_values_of_different_lengths_are_unpadded_views() -> None:
    texts = torch.arange(24).view(2, 3, 4)
    numbers = torch.tensor([[4, 0, 1], [2, 9, 9]])
    steps = TemporalDictTensor(
        {"text": texts, "n": numbers, "n1": numbers[..., None], "value": texts[..., None] / 2},
        torch.tensor([3, 1]),
    )
    for n in ("n", "n1"):
        wanted = [[[0, 1, 2, 3], [], [8]], [[12, 13]]]
        found = steps.unpadded("text", n)
        assert [[text.tolist() for text in row] for row in found] == wanted
        assert address(found[1][0]) == address(texts[1])
    assert steps.unpadded("value", "n")[0][2].tolist() == [[4.0]]
    assert steps[:0].unpadded("text", "n") == []
    for values, n in (("text", "text"), ("text", "value"), ("n", "n"), ("n1", "n")):
        with pytest.raises(SpecError, match=f"'{n}' is "):
            steps.unpadded(values, n)


def test_a_view_pickles_only_its_own_values() -> None:
    block = torch.arange(8000.0).view(1000, 8)
    for view in (
        DictTensor({"x": block[-4:], "y": block[::250]}),
        DictTensor({"x": block[:, :1].expand(1000, 8)[:4]}),
        steps_of([10] * 1000, 10)[3:5].temporal_slice(0, 4),
    ):
        file = io.BytesIO()
        torch.save(view, file)
        assert len(pickle.dumps(view)) < 4000  # the blocks have 32,000 bytes or more
        assert file.tell() < 8000
        file.seek(0)
        for again in (pickle.loads(pickle.dumps(view)), torch.load(file, weights_only=True)):
            for one, other in zip(leaves(again), leaves(view), strict=True):
                assert torch.equal(one, other)
                one.add_(1)  # has separate memory for every value
    weights = ZERO(10, requires_grad=True)
    assert pickle.loads(pickle.dumps(DictTensor({"w": weights[:2]})))["w"].requires_grad


@both
def test_both_classes_are_pytrees(make: Any) -> None:
    batch = make()
    parts, spec = _pytree.tree_flatten(batch)
    again = _pytree.tree_unflatten(parts, spec)
    assert type(again) is type(batch)
    assert all(again[key] is batch[key] for key in batch)
    assert "int" in repr(_pytree.tree_map(lambda tensor: tensor.ndim, batch))
    sums = torch.vmap(lambda row: row["frame"].sum() + row["action"])(batch_of())
    assert sums.tolist() == [0, 4, 8, 12]


def test_conversion_to_tensordict_shares_the_tensors() -> None:
    tensordict = pytest.importorskip("tensordict")
    for batch, size in ((batch_of(), (4,)), (batch_of()[1], ()), (steps_of(), (4,))):
        converted = batch.to_tensordict()
        assert converted.batch_size == size
        again = type(batch).from_tensordict(converted)
        pairs = zip(leaves(again), leaves(batch), strict=True)
        assert all(address(one) == address(other) for one, other in pairs)
    nested = tensordict.TensorDict({"a": ZERO(2), "b": {"c": ZERO(2, 3)}}, batch_size=[2])
    assert set(DictTensor.from_tensordict(nested)) == {"a", "b/c"}
    part = steps_of().to_tensordict().exclude("info")[:2]
    assert TemporalDictTensor.from_tensordict(part).info.empty()
    with pytest.raises(SpecError, match="steps"):
        TemporalDictTensor.from_tensordict(part["steps"])
