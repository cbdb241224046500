"""DictTensor, masked_tensor and masked_dicttensor: what they do, and what they refuse."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from rlpool.data.dict_tensor import DictTensor, masked_dicttensor, masked_tensor
from rlpool.errors import SpecError


def make_batch(n: int = 4) -> DictTensor:
    """Row i holds i in every key."""
    number = torch.arange(n)
    return DictTensor(
        {
            "frame": number.float().unsqueeze(1).expand(n, 3).clone(),
            "action": number.clone(),
            "is_new": number % 2 == 0,
        }
    )


def numbers(batch: DictTensor) -> list[int]:
    """The numbers of the rows that ``make_batch`` gave, after checking that all keys agree."""
    found = batch["action"].tolist()
    assert batch["frame"].tolist() == [[float(i)] * 3 for i in found]
    assert batch["is_new"].tolist() == [i % 2 == 0 for i in found]
    return found


# Construction


def test_constructor_copies_the_dict_but_not_the_tensors() -> None:
    tensors = {"x": torch.zeros(2)}
    batch = DictTensor(tensors)
    tensors["y"] = torch.zeros(5)
    assert list(batch.keys()) == ["x"]
    assert batch["x"] is tensors["x"]


def test_constructor_takes_a_dict_tensor() -> None:
    batch = make_batch()
    again = DictTensor(batch)
    again.set("more", torch.zeros(4))
    assert "more" not in batch
    assert again["frame"] is batch["frame"]


def test_wrap_keeps_the_very_dict() -> None:
    tensors = {"x": torch.zeros(2)}
    batch = DictTensor._wrap(tensors)
    batch.set("y", torch.ones(2))
    assert tensors["y"] is batch["y"]


def test_different_first_dimensions_are_refused_naming_both_keys() -> None:
    with pytest.raises(SpecError, match=r"'b' is float32 \[3\], key 'a' is float32 \[2, 5\]"):
        DictTensor({"a": torch.zeros(2, 5), "b": torch.zeros(3)})


def test_different_devices_are_refused_naming_both_keys() -> None:
    with pytest.raises(SpecError, match=r"'b' is float32 \[2\] on meta, key 'a'"):
        DictTensor({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")})


@pytest.mark.parametrize("value", [1.0, [1, 2], None, np.zeros(2)])
def test_value_that_is_no_tensor_is_refused_naming_the_key(value: object) -> None:
    with pytest.raises(SpecError, match=r"key 'a' is .* not a tensor"):
        DictTensor({"a": value})  # type: ignore[dict-item]
    with pytest.raises(SpecError, match=r"key 'a' is .* not a tensor"):
        DictTensor().set("a", value)  # type: ignore[arg-type]


def test_key_that_is_no_string_is_refused() -> None:
    with pytest.raises(SpecError, match="key 3 is no string"):
        DictTensor({3: torch.zeros(2)})  # type: ignore[dict-item]
    with pytest.raises(SpecError, match="key 3 is no string"):
        DictTensor().set(3, torch.zeros(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [DictTensor(), DictTensor(None), DictTensor({})])
def test_empty_has_no_rows_and_no_device(batch: DictTensor) -> None:
    assert batch.empty()
    assert batch.n_elems() == 0
    assert batch.device() is None
    assert batch.specs() == {}
    assert batch.unfold() == []


def test_scalars_are_accepted_and_have_no_rows() -> None:
    losses = DictTensor({"policy": torch.tensor(0.5), "value": torch.tensor(2.0)})
    assert losses.n_elems() == 0
    assert not losses.empty()
    assert losses.specs() == {
        "policy": {"size": torch.Size([]), "dtype": torch.float32},
        "value": {"size": torch.Size([]), "dtype": torch.float32},
    }
    with pytest.raises(SpecError, match="key 'policy' is 0-d"):
        losses.unfold()


def test_scalar_beside_rows_is_named_when_rows_are_selected() -> None:
    batch = DictTensor({"loss": torch.tensor(0.5), "x": torch.zeros(2)})
    assert batch.n_elems() == 2
    other = batch.clone()
    rows = torch.tensor([0])
    for select in (
        lambda: batch[0],
        lambda: batch[:1],
        lambda: batch[rows],
        lambda: batch.unfold(),
        lambda: DictTensor.cat([batch, other]),
        lambda: batch.copy_(other, rows, rows),
        lambda: masked_dicttensor(batch, other, torch.ones(2)),
    ):
        with pytest.raises(SpecError, match="key 'loss' is 0-d"):
            select()


def test_has_no_dict_of_attributes() -> None:
    assert not hasattr(DictTensor(), "__dict__")


# As a dict


def test_reads_like_a_dict() -> None:
    batch = make_batch()
    assert list(batch) == list(batch.keys()) == ["frame", "action", "is_new"]
    assert dict(batch) == dict(batch.items())
    assert {**batch}["action"] is batch["action"]
    assert next(iter(batch.values())) is batch["frame"]
    assert "frame" in batch
    assert "reward" not in batch
    assert 0 not in batch


def test_missing_key_raises_key_error_that_lists_the_keys() -> None:
    with pytest.raises(KeyError, match=r"no key 'reward', there are \['frame', 'action'"):
        make_batch()["reward"]
    with pytest.raises(KeyError, match="no key 'reward'"):
        make_batch().get(["frame", "reward"])


def test_specs_describe_one_row_also_without_rows() -> None:
    expected = {
        "frame": {"size": torch.Size([3]), "dtype": torch.float32},
        "action": {"size": torch.Size([]), "dtype": torch.int64},
        "is_new": {"size": torch.Size([]), "dtype": torch.bool},
    }
    assert make_batch().specs() == make_batch(0).specs() == expected


def test_get_shares_tensors_unless_told_to_clone() -> None:
    batch = make_batch()
    kept = batch.get(["is_new", "frame"])
    assert list(kept) == ["is_new", "frame"]
    assert kept["frame"] is batch["frame"]
    copied = batch.get(["frame"], clone=True)
    assert copied["frame"].data_ptr() != batch["frame"].data_ptr()
    assert batch.get([]).empty()


def test_get_of_a_plain_string_is_refused() -> None:
    with pytest.raises(SpecError, match=r"pass \['frame'\]"):
        make_batch().get("frame")


# Rows


def test_int_drops_the_batch_dimension_and_is_a_view() -> None:
    batch = make_batch()
    for row in (batch[2], batch.index(2), batch.slice(2), batch[-2], batch[np.int64(2)]):
        assert row["frame"].shape == (3,)
        assert row["action"].shape == ()
        assert row["action"].item() == 2
        assert row["frame"].data_ptr() == batch["frame"][2].data_ptr()
    assert batch[torch.tensor(2)]["action"].item() == 2


def test_slice_keeps_the_batch_dimension_and_is_a_view() -> None:
    batch = make_batch()
    for rows in (batch[1:3], batch.index(slice(1, 3)), batch.slice(1, 3)):
        assert numbers(rows) == [1, 2]
        assert rows["frame"].data_ptr() == batch["frame"][1].data_ptr()
    assert numbers(batch[-2:]) == [2, 3]
    assert numbers(batch[::2]) == [0, 2]
    assert numbers(batch.slice(2, 99)) == [2, 3]
    assert numbers(batch.slice(3, 1)) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_int_tensor_selects_rows_and_copies(dtype: torch.dtype) -> None:
    batch = make_batch()
    rows = batch[torch.tensor([3, 0, -1, 0], dtype=dtype)]
    assert numbers(rows) == [3, 0, 3, 0]
    rows["frame"].zero_()
    assert numbers(batch) == [0, 1, 2, 3]
    assert numbers(batch[torch.tensor([], dtype=dtype)]) == []


def test_bool_mask_selects_rows_and_copies() -> None:
    batch = make_batch()
    assert numbers(batch[torch.tensor([True, False, False, True])]) == [0, 3]
    assert numbers(batch[torch.zeros(4, dtype=torch.bool)]) == []
    assert numbers(batch[batch["is_new"]]) == [0, 2]


@pytest.mark.parametrize("row", [4, -5, torch.tensor([0, 4]), torch.tensor([-5])])
def test_row_that_does_not_exist_raises_index_error(row: object) -> None:
    with pytest.raises(IndexError):
        make_batch()[row]  # type: ignore[call-overload]
    with pytest.raises(IndexError):  # torch checks no index where there are no values
        DictTensor({"no_features": torch.zeros(4, 0)})[row]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(torch.tensor([True, False]), id="mask too short"),
        pytest.param(torch.ones(5, dtype=torch.bool), id="mask too long"),
        pytest.param(torch.ones(4, 3, dtype=torch.bool), id="mask of two dimensions"),
        pytest.param(torch.tensor(True), id="bool scalar"),
        pytest.param(torch.ones(4, dtype=torch.uint8), id="uint8, mask or index"),
        pytest.param(torch.tensor([]), id="empty float tensor"),
        pytest.param(torch.tensor([1.0]), id="float tensor"),
        pytest.param(torch.tensor([[0, 1]]), id="index of two dimensions"),
        pytest.param(True, id="bool"),
        pytest.param(None, id="None"),
        pytest.param(1.0, id="float"),
        pytest.param([0, 1], id="list"),
        pytest.param((0, 1), id="tuple"),
        pytest.param(slice(None, None, -1), id="backward slice"),
    ],
)
def test_other_selections_are_refused(rows: object) -> None:
    with pytest.raises(SpecError, match="cannot select from 4 rows"):
        make_batch()[rows]  # type: ignore[call-overload]


def test_any_selection_of_an_empty_one_is_empty() -> None:
    for rows in (0, slice(0, 2), torch.tensor([5]), torch.ones(3, dtype=torch.bool)):
        assert DictTensor()[rows].empty()


def test_indexing_passes_gradients() -> None:
    weight = torch.ones(3, requires_grad=True)
    batch = DictTensor({"x": weight * 2})
    batch[torch.tensor([0, 0, -1])]["x"].sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 0.0, 2.0]


def test_unfold_gives_views_of_one_row() -> None:
    batch = make_batch()
    rows = batch.unfold()
    assert [numbers(row) for row in rows] == [[0], [1], [2], [3]]
    assert rows[1]["frame"].data_ptr() == batch["frame"][1].data_ptr()
    assert make_batch(0).unfold() == []


# Whole batches


def test_cat_of_unfold_is_the_batch() -> None:
    batch = make_batch()
    joined = DictTensor.cat(row for row in batch.unfold())
    assert numbers(joined) == [0, 1, 2, 3]
    assert joined.specs() == batch.specs()
    assert joined["frame"].data_ptr() != batch["frame"].data_ptr()


def test_cat_of_nothing_is_empty() -> None:
    assert DictTensor.cat([]).empty()
    assert DictTensor.cat([DictTensor(), DictTensor()]).empty()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param({"y": torch.zeros(2, 3)}, r"'x': part 1 has \['y'\]", id="other key"),
        pytest.param({}, "'x': part 1 has", id="missing key"),
        pytest.param({"x": torch.zeros(2, 3), "y": torch.zeros(2)}, "'y': part 1", id="more keys"),
        pytest.param({"x": torch.zeros(2, 4)}, r"'x' is float32 \[2, 4\] in part 1", id="shape"),
        pytest.param({"x": torch.zeros(0)}, r"'x' is float32 \[0\] in part 1", id="dimensions"),
        pytest.param({"x": torch.zeros(2, 3).double()}, "'x' is float64", id="dtype"),
        pytest.param({"x": torch.zeros(2, 3, device="meta")}, "on meta in part 1", id="device"),
    ],
)
def test_cat_of_unlike_parts_is_refused_naming_the_key(
    other: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        DictTensor.cat([DictTensor({"x": torch.zeros(2, 3)}), DictTensor(other)])


def test_cat_of_other_things_is_refused() -> None:
    with pytest.raises(SpecError, match="pass a list of DictTensor"):
        DictTensor.cat([{"x": torch.zeros(2)}])  # type: ignore[list-item]
    with pytest.raises(SpecError, match="pass a list of DictTensor"):
        DictTensor.cat(make_batch())  # type: ignore[arg-type]


def test_clone_copies_every_tensor() -> None:
    batch = make_batch()
    copied = batch.clone()
    copied["frame"].fill_(7)
    copied.set("more", torch.zeros(4))
    assert numbers(batch) == [0, 1, 2, 3]


def test_to_the_same_device_is_the_same_object() -> None:
    batch = make_batch()
    assert batch.to("cpu") is batch
    assert batch.to(torch.device("cpu")) is batch
    assert DictTensor().to("meta").empty()


def test_to_moves_every_tensor() -> None:
    moved = make_batch().to("meta")
    assert moved.device() == torch.device("meta")
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}
    assert moved.specs() == make_batch().specs()


def test_set_adds_and_replaces_in_place() -> None:
    batch = make_batch()
    reward = torch.ones(4)
    batch.set("reward", reward)
    assert batch["reward"] is reward
    batch.set("action", torch.zeros(4, 2))
    assert batch.specs()["action"]["size"] == (2,)
    assert list(batch) == ["frame", "action", "is_new", "reward"]


def test_set_works_on_an_empty_one() -> None:
    batch = DictTensor()
    batch.set("x", torch.zeros(5, 2))
    assert batch.n_elems() == 5


def test_set_of_a_wrong_size_is_refused_and_changes_nothing() -> None:
    batch = make_batch()
    with pytest.raises(SpecError, match=r"'reward' is float32 \[5\], key 'frame' is float32 \[4"):
        batch.set("reward", torch.zeros(5))
    only = DictTensor({"x": torch.zeros(4)})
    with pytest.raises(SpecError, match="'x'"):
        only.set("x", torch.zeros(5))
    assert "reward" not in batch
    assert only.n_elems() == 4


def test_set_on_another_device_is_refused() -> None:
    with pytest.raises(SpecError, match="on meta"):
        make_batch().set("reward", torch.zeros(4, device="meta"))


def test_prepend_and_truncate_are_inverse_and_share_tensors() -> None:
    batch = make_batch()
    prefixed = batch.prepend_key("agent_info/")
    assert list(prefixed) == ["agent_info/frame", "agent_info/action", "agent_info/is_new"]
    assert dict(prefixed.truncate_key("agent_info/")) == dict(batch)


def test_truncate_drops_keys_without_the_prefix() -> None:
    batch = DictTensor({"_frame": torch.zeros(2), "frame_": torch.zeros(2)})
    assert list(batch.truncate_key("_")) == ["frame"]
    assert batch.truncate_key("other").empty()


def test_sum_is_the_union_and_shares_tensors() -> None:
    first, second = make_batch().get(["frame"]), make_batch().get(["action"])
    both = first + second
    assert list(both) == ["frame", "action"]
    assert both["action"] is second["action"]
    assert list(DictTensor() + first) == list(first + DictTensor()) == ["frame"]


def test_sum_with_a_common_key_is_refused() -> None:
    with pytest.raises(SpecError, match=r"both sides have the keys \['action'\]"):
        make_batch() + make_batch().get(["action"])


@pytest.mark.parametrize("other", [torch.zeros(5), torch.zeros(4, device="meta")])
def test_sum_with_other_rows_or_device_is_refused(other: torch.Tensor) -> None:
    with pytest.raises(SpecError, match="'y' is float32"):
        make_batch() + DictTensor({"y": other})


def test_sum_with_something_else_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        make_batch() + {"x": torch.zeros(4)}  # type: ignore[operator]


# copy_


def test_copy_keeps_storage_and_copies_rows() -> None:
    batch, source = make_batch(), make_batch(6)
    before = batch["frame"].data_ptr()
    batch.copy_(source, torch.tensor([5, 4]), torch.tensor([0, -1]))
    assert numbers(batch) == [5, 1, 2, 4]
    assert batch["frame"].data_ptr() == before


def test_copy_takes_masks_and_ignores_further_keys_of_the_source() -> None:
    batch, source = make_batch(), make_batch(2)
    source.set("more", torch.zeros(2))
    batch.copy_(source, torch.tensor([True, True]), torch.tensor([False, False, True, True]))
    assert numbers(batch) == [0, 1, 0, 1]


def test_copy_from_itself_reads_before_it_writes() -> None:
    batch = make_batch()
    batch.copy_(batch, torch.arange(4), torch.tensor([3, 2, 1, 0]))
    assert numbers(batch) == [3, 2, 1, 0]


def test_copy_into_an_empty_one_does_nothing() -> None:
    batch = DictTensor()
    batch.copy_(make_batch(), torch.tensor([0]), torch.tensor([0]))
    assert batch.empty()


@pytest.mark.parametrize("rows", [torch.tensor([0, 4]), torch.tensor([0, -5])])
def test_copy_of_rows_that_do_not_exist_writes_nothing(rows: torch.Tensor) -> None:
    batch, source = make_batch(), make_batch()[torch.tensor([3, 2, 1, 0])]
    good = torch.tensor([0, 1])
    with pytest.raises(IndexError, match="does not exist, there are 4"):
        batch.copy_(source, good, rows)
    with pytest.raises(IndexError, match="does not exist, there are 4"):
        batch.copy_(source, rows, good)
    assert numbers(batch) == [0, 1, 2, 3]


def test_copy_refuses_what_does_not_fit() -> None:
    batch, one, two = make_batch(), torch.tensor([0]), torch.tensor([0, 1])
    with pytest.raises(SpecError, match="1 source rows for 2 destination rows"):
        batch.copy_(make_batch(), one, two)
    with pytest.raises(SpecError, match=r"'is_new': source has \['frame', 'action'\]"):
        batch.copy_(make_batch().get(["frame", "action"]), one, one)
    wrong = make_batch()
    wrong.set("action", wrong["action"].int())
    with pytest.raises(SpecError, match="'action' is int32"):
        batch.copy_(wrong, one, one)
    wrong.set("action", torch.zeros(4, 1, dtype=torch.int64))
    with pytest.raises(SpecError, match=r"'action' is int64 \[4, 1\]"):
        batch.copy_(wrong, one, one)
    with pytest.raises(SpecError, match="use an int64 tensor"):
        batch.copy_(make_batch(), 0, one)  # type: ignore[arg-type]
    assert numbers(batch) == [0, 1, 2, 3]


# Masks


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (2, 3, 4), (2, 1, 3, 2)])
def test_masked_tensor_selects_rows_for_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    zeros, ones = torch.zeros(3, *shape), torch.ones(3, *shape)
    chosen = masked_tensor(zeros, ones, torch.tensor([True, False, True]))
    assert torch.equal(chosen, torch.stack([ones[0], zeros[1], ones[2]]))


def test_masked_tensor_does_no_arithmetic() -> None:
    ugly = torch.tensor([float("inf"), float("nan"), -0.0, 1e-45])
    plain = torch.ones(4)
    assert torch.equal(masked_tensor(ugly, plain, torch.ones(4)), plain)
    kept = masked_tensor(ugly, plain, torch.zeros(4))
    assert kept.view(torch.int32).tolist() == ugly.view(torch.int32).tolist()
    large = torch.tensor([2**53 + 1, -(2**62) - 1])  # float32 and float64 would round them
    assert torch.equal(
        masked_tensor(large, -large, torch.tensor([1, 0])), large * large.new_tensor([-1, 1])
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_masked_tensor_takes_bool_and_zero_one_masks_and_keeps_dtypes(dtype: torch.dtype) -> None:
    mask = torch.tensor([1, 0]).to(dtype)
    for values in (torch.tensor([True, False]), torch.tensor([5, 7], dtype=torch.uint8)):
        chosen = masked_tensor(values, values.flip(0), mask)
        assert chosen.dtype == values.dtype
        assert chosen.tolist() == [values[1].item(), values[1].item()]


@pytest.mark.parametrize(
    ("tensor1", "mask"),
    [
        pytest.param(torch.zeros(2, 1), torch.ones(2), id="other shape"),
        pytest.param(torch.zeros(1, 3), torch.ones(2), id="other rows"),
        pytest.param(torch.zeros(2, 3).double(), torch.ones(2), id="other dtype"),
        pytest.param(torch.zeros(2, 3, device="meta"), torch.ones(2), id="other device"),
        pytest.param(torch.zeros(2, 3), torch.ones(3), id="mask too long"),
        pytest.param(torch.zeros(2, 3), torch.ones(1), id="mask that would broadcast"),
        pytest.param(torch.zeros(2, 3), torch.ones(2, 3), id="mask per element"),
        pytest.param(torch.zeros(2, 3), torch.tensor([0.5, 1.0]), id="mask in between"),
        pytest.param(torch.zeros(2, 3), torch.tensor([2, 1]), id="mask of numbers"),
        pytest.param(torch.zeros(2, 3), [True, False], id="list"),
    ],
)
def test_masked_tensor_refuses_what_does_not_fit(tensor1: torch.Tensor, mask: torch.Tensor) -> None:
    with pytest.raises(SpecError):
        masked_tensor(torch.zeros(2, 3), tensor1, mask)


def test_masked_tensor_of_scalars_is_refused() -> None:
    with pytest.raises(SpecError, match="0-d"):
        masked_tensor(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(True))


def test_masked_dicttensor_selects_rows_of_every_key() -> None:
    chosen = masked_dicttensor(
        make_batch(), make_batch()[torch.tensor([3, 3, 3, 3])], torch.tensor([0, 1, 0, 1])
    )
    assert numbers(chosen) == [0, 3, 2, 3]


def test_masked_dicttensor_of_other_keys_is_refused() -> None:
    batch = make_batch()
    with pytest.raises(SpecError, match="'is_new': the second has"):
        masked_dicttensor(batch, batch.get(["frame", "action"]), torch.ones(4))
    with pytest.raises(SpecError, match="'is_new': the second has"):
        masked_dicttensor(batch.get(["frame", "action"]), batch, torch.ones(4))


# Pickling, copying, pytrees, printing


def test_pickle_keeps_values_dtypes_and_order() -> None:
    again = pickle.loads(pickle.dumps(make_batch()))
    assert isinstance(again, DictTensor)
    assert list(again) == ["frame", "action", "is_new"]
    assert numbers(again) == [0, 1, 2, 3]
    assert again.specs() == make_batch().specs()


@pytest.mark.parametrize(
    "select",
    [
        pytest.param(lambda block: block[:4], id="first rows"),
        pytest.param(lambda block: block[-4:], id="last rows"),
        pytest.param(lambda block: block[::250], id="every 250th row"),
        pytest.param(lambda block: block[:, :1].expand(1000, 8)[:4], id="expanded"),
    ],
)
def test_view_pickles_its_values_and_not_the_storage(select: object) -> None:
    block = torch.arange(8000.0).view(1000, 8)
    view = DictTensor({"x": select(block)})  # type: ignore[operator]
    file = io.BytesIO()
    torch.save(view, file)
    for size in (len(pickle.dumps(view)), file.tell()):
        assert size < 3000  # the block has 32,000 bytes
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(view)), torch.load(file, weights_only=True)):
        assert torch.equal(again["x"], view["x"])
        again["x"].add_(1)  # has its own memory for every value


def test_row_and_scalars_survive_pickling() -> None:
    row = make_batch()[3]
    assert pickle.loads(pickle.dumps(row))["frame"].tolist() == [3.0, 3.0, 3.0]
    losses = DictTensor({"loss": torch.tensor(0.5)})
    assert pickle.loads(pickle.dumps(losses))["loss"].item() == 0.5
    assert pickle.loads(pickle.dumps(DictTensor())).empty()


def test_pickle_of_a_view_keeps_requires_grad() -> None:
    weights = torch.zeros(10, requires_grad=True)
    again = pickle.loads(pickle.dumps(DictTensor({"w": weights[:2]})))
    assert again["w"].requires_grad


def test_copy_shares_tensors_and_deepcopy_does_not() -> None:
    batch = make_batch(8)[:4]
    shallow, deep = copy.copy(batch), copy.deepcopy(batch)
    assert shallow["frame"] is batch["frame"]
    shallow.set("more", torch.zeros(4))
    assert "more" not in batch
    deep["frame"].zero_()
    assert numbers(batch) == [0, 1, 2, 3]


def test_is_a_pytree() -> None:
    batch = make_batch()
    leaves, spec = _pytree.tree_flatten({"batch": batch})
    assert len(leaves) == 3
    again = _pytree.tree_unflatten(leaves, spec)["batch"]
    assert dict(again) == dict(batch)
    doubled = _pytree.tree_map(lambda tensor: tensor * 2, batch)
    assert doubled["action"].tolist() == [0, 2, 4, 6]
    paths = [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(batch)[0]]
    assert paths == ["['frame']", "['action']", "['is_new']"]
    assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec


def test_goes_through_vmap() -> None:
    sums = torch.vmap(lambda row: row["frame"].sum() + row["action"])(make_batch())
    assert sums.tolist() == [0.0, 4.0, 8.0, 12.0]


def test_prints_as_a_table_of_key_shape_and_dtype() -> None:
    assert repr(make_batch()).splitlines() == [
        "DictTensor",
        "  key     shape   dtype",
        "  frame   [4, 3]  float32",
        "  action  [4]     int64",
        "  is_new  [4]     bool",
    ]
    assert repr(DictTensor()) == "DictTensor(empty)"


def test_prints_what_tree_map_made_of_it() -> None:
    shapes = _pytree.tree_map(lambda tensor: tensor.ndim, make_batch())
    assert "int" in repr(shapes)
    assert dict(pickle.loads(pickle.dumps(shapes))) == {"frame": 2, "action": 1, "is_new": 1}


# tensordict


def test_converts_to_tensordict_and_back_without_copying() -> None:
    pytest.importorskip("tensordict")
    batch = make_batch()
    converted = batch.to_tensordict()
    assert converted.batch_size == (4,)
    again = DictTensor.from_tensordict(converted)
    for key, tensor in batch.items():
        assert converted[key].data_ptr() == again[key].data_ptr() == tensor.data_ptr()


def test_converts_what_has_no_rows_to_tensordict() -> None:
    pytest.importorskip("tensordict")
    for batch in (DictTensor({"loss": torch.tensor(0.5)}), make_batch()[1]):
        converted = batch.to_tensordict()
        assert converted.batch_size == ()
        assert list(DictTensor.from_tensordict(converted)) == list(batch)
    assert DictTensor.from_tensordict(DictTensor().to_tensordict()).empty()


def test_nested_tensordict_becomes_keys_with_slashes() -> None:
    tensordict = pytest.importorskip("tensordict")
    nested = tensordict.TensorDict(
        {"a": torch.zeros(2), "b": {"c": torch.ones(2, 3)}}, batch_size=[2]
    )
    assert set(DictTensor.from_tensordict(nested)) == {"a", "b/c"}
