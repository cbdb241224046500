"""Whatever is passed to the data structures: taken, or refused with an error of rlpool's own."""

from __future__ import annotations

import itertools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import Array, DictTensor, Pool, TemporalDictTensor, masked_dicttensor, masked_tensor
from rlpool.errors import RlpoolError

NAN = float("nan")
PAIR = torch.zeros(2)
VALUES: list[Any] = [
    *(None, 3, -1, 2**70, -(2**70), 1.5, NAN, float("inf"), 1j, True, "x", "", b"x", Ellipsis),
    *([], (), {}, [1, 2], [[1], [1, 2]], [None], [PAIR], [["a"]], {"a": 1}, {"a": [1]}, {1: PAIR}),
    *(object(), len, slice(None, None, -1), slice("a", None), slice(1.5), torch.float32),
    *(np.int64(2), np.float64(0.5), np.zeros(2), np.array(["a"]), np.array([object()])),
    *(PAIR, torch.zeros(3), torch.zeros(2, 2), torch.tensor(1), torch.tensor(0.5)),
    *(torch.tensor([0, 1]), torch.tensor([5]), torch.tensor([True]), torch.tensor([True, False])),
    *(
        PAIR.to(torch.complex64),
        PAIR.to(torch.bfloat16),
        PAIR.to("meta"),
        torch.tensor(1, device="meta"),
        {"a": PAIR.to("meta")},
    ),
    *(DictTensor(), DictTensor({"a": torch.zeros(5)}), DictTensor({"b": PAIR})),
    *(TemporalDictTensor({}), TemporalDictTensor({"b": torch.zeros(2, 3)})),
    *(Array((2,), "int64"), [DictTensor({"a": PAIR}), 3]),
]
ROWS = torch.tensor([0, 1])
KEY, INDEX, EITHER = (KeyError,), (IndexError,), (KeyError, IndexError)

Use = Callable[[Any], Any]


def batch() -> DictTensor:
    return DictTensor({"a": torch.arange(4.0), "b": torch.zeros(4, 2)})


def steps() -> TemporalDictTensor:
    tensors = {"a": torch.arange(6.0).view(2, 3)}
    return TemporalDictTensor(tensors, torch.tensor([3, 1]), {"i": torch.zeros(2)})


def array() -> Array:
    return Array((3, 2), "int64", (2,), padding=1, full_size=6)


def pool(**options: Any) -> Pool:
    made = Pool(pool_size=10, seed=0, **options)
    for i in range(4):
        made([float(i)] * 3, i, [i + 1.0] * 3, 1.0, i == 3)
    return made


DICT_TENSOR: dict[str, tuple[Use, tuple[type[Exception], ...]]] = {
    "DictTensor(v)": (DictTensor, ()),
    "DictTensor({a: v})": (lambda v: DictTensor({"a": v}), ()),
    "DictTensor({.., b: v})": (lambda v: DictTensor({"a": PAIR, "b": v}), ()),
    "batch[v]": (lambda v: batch()[v], EITHER),
    "get(v)": (lambda v: batch().get(v), KEY),
    "get([v])": (lambda v: batch().get([v]), KEY),
    "index(v)": (lambda v: batch().index(v), INDEX),
    "slice(v)": (lambda v: batch().slice(v), INDEX),
    "slice(v, 3)": (lambda v: batch().slice(v, 3), INDEX),
    "slice(0, v)": (lambda v: batch().slice(0, v), INDEX),
    "cat(v)": (DictTensor.cat, ()),
    "cat([.., v])": (lambda v: DictTensor.cat([batch(), v]), ()),
    "to(v)": (lambda v: batch().to(v), ()),
    "set(c, v)": (lambda v: batch().set("c", v), ()),
    "set(v, ..)": (lambda v: batch().set(v, torch.zeros(4)), ()),
    "prepend_key(v)": (lambda v: batch().prepend_key(v), ()),
    "truncate_key(v)": (lambda v: batch().truncate_key(v), ()),
    "batch + v": (lambda v: batch() + v, (TypeError,)),
    "copy_(v)": (lambda v: batch().copy_(v, ROWS, ROWS), INDEX),
    "copy_(.., v, ..)": (lambda v: batch().copy_(batch(), v, ROWS), INDEX),
    "copy_(.., .., v)": (lambda v: batch().copy_(batch(), ROWS, v), INDEX),
    "v in batch": (lambda v: v in batch(), ()),
    "masked_tensor(v)": (lambda v: masked_tensor(v, PAIR, ROWS), ()),
    "masked_tensor(.., v)": (lambda v: masked_tensor(PAIR, v, ROWS), ()),
    "masked_tensor(.., .., v)": (lambda v: masked_tensor(PAIR, PAIR, v), ()),
    "masked_dicttensor(v)": (lambda v: masked_dicttensor(v, batch(), torch.ones(4)), ()),
    "masked_dicttensor(.., v)": (lambda v: masked_dicttensor(batch(), v, torch.ones(4)), ()),
    "masked_dicttensor(.., .., v)": (lambda v: masked_dicttensor(batch(), batch(), v), ()),
    "from_tensordict(v)": (DictTensor.from_tensordict, ()),
}
TEMPORAL: dict[str, tuple[Use, tuple[type[Exception], ...]]] = {
    "T(v)": (TemporalDictTensor, ()),
    "T({a: v})": (lambda v: TemporalDictTensor({"a": v}), ()),
    "T(.., v)": (lambda v: TemporalDictTensor({"a": torch.zeros(2, 3)}, v), ()),
    "T({}, v)": (lambda v: TemporalDictTensor({}, v), ()),
    "T(.., .., v)": (lambda v: TemporalDictTensor({"a": torch.zeros(2, 3)}, None, v), ()),
    "from_packed(v)": (lambda v: TemporalDictTensor.from_packed(v, ROWS), ()),
    "from_packed({a: v})": (lambda v: TemporalDictTensor.from_packed({"a": v}, ROWS), ()),
    "from_packed(.., v)": (lambda v: TemporalDictTensor.from_packed({"a": PAIR}, v), ()),
    "from_packed(.., .., v)": (
        lambda v: TemporalDictTensor.from_packed({"a": torch.zeros(1)}, ROWS, v),
        (),
    ),
    "batch[v]": (lambda v: steps()[v], EITHER),
    "get(v)": (lambda v: steps().get(v), KEY),
    "get([v])": (lambda v: steps().get([v]), KEY),
    "index(v)": (lambda v: steps().index(v), INDEX),
    "slice(v)": (lambda v: steps().slice(v), INDEX),
    "slice(v, 2)": (lambda v: steps().slice(v, 2), INDEX),
    "slice(0, v)": (lambda v: steps().slice(0, v), INDEX),
    "temporal_slice(v, 3)": (lambda v: steps().temporal_slice(v, 3), ()),
    "temporal_slice(0, v)": (lambda v: steps().temporal_slice(0, v), ()),
    "temporal_index(v)": (lambda v: steps().temporal_index(v), ()),
    "temporal_multi_index(v)": (lambda v: steps().temporal_multi_index(v), ()),
    "masked_temporal_index(v)": (lambda v: steps().masked_temporal_index(v), ()),
    "cat(v)": (TemporalDictTensor.cat, ()),
    "cat([.., v])": (lambda v: TemporalDictTensor.cat([steps(), v]), ()),
    "expand(v)": (lambda v: steps().expand(v), ()),
    "to(v)": (lambda v: steps().to(v), ()),
    "set(c, v)": (lambda v: steps().set("c", v), ()),
    "set(v, ..)": (lambda v: steps().set(v, torch.zeros(2, 3)), ()),
    "set of an empty one": (lambda v: TemporalDictTensor({}).set("c", v), ()),
    "batch + v": (lambda v: steps() + v, (TypeError,)),
    "copy_(v)": (lambda v: steps().copy_(v, ROWS, ROWS), INDEX),
    "copy_(.., v, ..)": (lambda v: steps().copy_(steps(), v, ROWS), INDEX),
    "copy_(.., .., v)": (lambda v: steps().copy_(steps(), ROWS, v), INDEX),
    "from_tensordict(v)": (TemporalDictTensor.from_tensordict, ()),
}
ARRAY: dict[str, tuple[Use, tuple[type[Exception], ...]]] = {
    **{
        f"Array({name}=v)": (
            lambda v, n=name: Array(**{"batch_shape": (3,), "dtype": "int64", n: v}),
            (),
        )
        for name in ("batch_shape", "dtype", "feature_shape", "padding", "full_size", "storage")
    },
    "Array(directory=v)": (lambda v: Array((3,), "i8", storage="memmap", directory=v), ()),
    "Array((v,))": (lambda v: Array((v,), "int64"), ()),
    "array[v]": (lambda v: array()[v], INDEX),
    "array[0, v]": (lambda v: array()[0, v], INDEX),
    "array[v] = 0": (lambda v: operator.setitem(array(), v, 0), INDEX),
    "array[0] = v": (lambda v: operator.setitem(array(), 0, v), ()),
    "array[[0, 1]] = v": (lambda v: operator.setitem(array(), [0, 1], v), ()),
}
SINGLE = ([0.0] * 3, 0, [1.0] * 3, 1.0, False, None)
POOL: dict[str, tuple[Use, tuple[type[Exception], ...]]] = {
    **{
        f"Pool({name}=v)": (lambda v, n=name: Pool(**{"pool_size": 10, n: v}), ())
        for name in (
            *("env", "processes", "pool_size", "window_size", "clearing_freq", "window_size_"),
            *("random", "policy", "seed", "keys", "storage", "priority_exponent", "timeout"),
        )
    },
    "Pool(directory=v)": (lambda v: Pool(pool_size=10, storage="memmap", directory=v), ()),
    "Pool([v])": (lambda v: Pool([v], 1, 10), ()),
    "Pool(keys=[v])": (lambda v: Pool(pool_size=10, keys=[v]), ()),
    **{
        f"pool(..v..) number {place}": (
            lambda v, p=place: pool().pool(*SINGLE[:p], v, *SINGLE[p + 1 :]),
            (),
        )
        for place in range(len(SINGLE))
    },
    **{
        f"first pool(..v..) number {place}": (
            lambda v, p=place: Pool(pool_size=3).pool(*SINGLE[:p], v, *SINGLE[p + 1 :]),
            (),
        )
        for place in range(len(SINGLE))
    },
    "pool(terminated=v)": (lambda v: pool()(*SINGLE[:4], True, terminated=v), ()),
    "extend(v)": (lambda v: pool().extend(v), ()),
    "extend(.., v)": (lambda v: pool().extend(TemporalDictTensor({"a": torch.zeros(1, 2)}), v), ()),
    "sample(v)": (lambda v: pool().sample(v), ()),
    "sample(n_step=v)": (lambda v: pool().sample(2, n_step=v), ()),
    "sample(discount=v)": (lambda v: pool().sample(2, n_step=2, discount=v), ()),
    "sample(beta=v)": (lambda v: pool(priority_exponent=0.5).sample(2, beta=v), ()),
    "sample_sequences(v, 2)": (lambda v: pool().sample_sequences(v, 2), ()),
    "sample_sequences(2, v)": (lambda v: pool().sample_sequences(2, v), ()),
    "batches(v)": (lambda v: next(pool().batches(v)), ()),
    "batches(2, v)": (lambda v: list(itertools.islice(pool().batches(2, v), 2)), ()),
    "transitions(v)": (lambda v: pool().transitions(v), ()),
    "transitions([v])": (lambda v: pool().transitions([v]), ()),
    "update_priorities(v, ..)": (
        lambda v: pool(priority_exponent=1).update_priorities(v, [1.0, 1.0]),
        (),
    ),
    "update_priorities(.., v)": (
        lambda v: pool(priority_exponent=1).update_priorities([0, 1], v),
        (),
    ),
    "load_state_dict(v)": (lambda v: pool().load_state_dict(v), ()),
    "load_state_dict({metadata: v})": (lambda v: pool().load_state_dict({"metadata": v}), ()),
    "load_state_dict({.., key: v})": (
        lambda v: pool().load_state_dict({**pool().state_dict(), "columns/frame/0.0": v}),
        (),
    ),
    "load(v)": (lambda v: pool().load(v), ()),
}
USES = {
    f"{kind}: {name}": use
    for kind, uses in (("dict", DICT_TENSOR), ("time", TEMPORAL), ("array", ARRAY), ("pool", POOL))
    for name, use in uses.items()
}


@pytest.mark.parametrize("use", USES)
def test_what_does_not_fit_is_refused_with_an_error_of_rlpool(use: str) -> None:
    call, also = USES[use]
    bare = []
    for value in VALUES:
        try:
            call(value)
        except (RlpoolError, *also):
            continue
        except Exception as error:  # what is looked for
            bare.append((repr(value)[:60], repr(error)[:120]))
    assert bare == []


def test_a_key_is_never_taken_for_a_row() -> None:
    for keys in ([0], [slice(0, 1)], [torch.tensor([0])]):
        with pytest.raises(RlpoolError, match="no string"):
            batch().get(keys)  # type: ignore[arg-type]
        with pytest.raises(RlpoolError, match="no string"):
            steps().get(keys)  # type: ignore[arg-type]


def test_complex_numbers_do_not_lose_their_imaginary_part_in_an_array() -> None:
    target = Array((2,), "float32")
    for values in (np.ones(2, complex), torch.ones(2, dtype=torch.complex64), [1j, 1j], 1j):
        with pytest.raises(RlpoolError, match="cannot write"):
            target[...] = values
    whole = Array((2,), "complex64")
    whole[...] = [1j, 2j]
    assert whole.to_ndarray().tolist() == [1j, 2j]


def test_an_empty_pool_says_so() -> None:
    empty = Pool(pool_size=3, storage="shared")
    for use in (lambda: empty.sample(1), lambda: empty.sample_sequences(1, 1), empty.store):
        with pytest.raises(RlpoolError):
            use()
    with pytest.raises(RlpoolError, match="before it has a transition"):
        pickle.dumps(empty)
