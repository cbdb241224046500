"""Data structures accept any argument or refuse it with an error of rlpool."""

from __future__ import annotations

from itertools import islice
from operator import setitem
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
SINGLE = ([0.0] * 3, 0, [1.0] * 3, 1.0, False, None)


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


def single(place: int, value: Any) -> tuple[Any, ...]:
    """Return a transition with one of its parts replaced by a value."""
    return (*SINGLE[:place], value, *SINGLE[place + 1 :])


ARRAY_OPTIONS = ("batch_shape", "dtype", "feature_shape", "padding", "full_size", "storage")
POOL_OPTIONS = (
    *("env", "processes", "pool_size", "window_size", "clearing_freq", "window_size_"),
    *("random", "policy", "seed", "keys", "storage", "priority_exponent", "timeout"),
)
PARTS = range(len(SINGLE))

# Expressions with a value v, and the exceptions allowed in addition to errors of rlpool.
USES: dict[str, tuple[type[Exception], ...]] = {
    **dict.fromkeys(
        [
            *("DictTensor(v)", "DictTensor({'a': v})", "DictTensor({'a': PAIR, 'b': v})"),
            *("DictTensor.cat(v)", "DictTensor.cat([batch(), v])", "batch().to(v)"),
            *("batch().set('c', v)", "batch().set(v, torch.zeros(4))", "v in batch()"),
            *("batch().prepend_key(v)", "batch().truncate_key(v)", "DictTensor.from_tensordict(v)"),
            *("masked_tensor(v, PAIR, ROWS)", "masked_tensor(PAIR, v, ROWS)"),
            *("masked_tensor(PAIR, PAIR, v)", "masked_dicttensor(v, batch(), torch.ones(4))"),
            "masked_dicttensor(batch(), v, torch.ones(4))",
            *("masked_dicttensor(batch(), batch(), v)", "TemporalDictTensor(v)"),
            *("TemporalDictTensor({'a': v})", "TemporalDictTensor({'a': torch.zeros(2, 3)}, v)"),
            *("TemporalDictTensor({}, v)", "TemporalDictTensor({'a': torch.zeros(2, 3)}, None, v)"),
            "TemporalDictTensor.from_packed(v, ROWS)",
            "TemporalDictTensor.from_packed({'a': v}, ROWS)",
            "TemporalDictTensor.from_packed({'a': PAIR}, v)",
            "TemporalDictTensor.from_packed({'a': torch.zeros(1)}, ROWS, v)",
            *("TemporalDictTensor.from_tensordict(v)", "TemporalDictTensor.cat(v)"),
            *("TemporalDictTensor.cat([steps(), v])", "TemporalDictTensor({}).set('c', v)"),
            *("steps().temporal_slice(v, 3)", "steps().temporal_slice(0, v)"),
            *("steps().temporal_index(v)", "steps().temporal_multi_index(v)"),
            *("steps().masked_temporal_index(v)", "steps().expand(v)", "steps().to(v)"),
            *("steps().set('c', v)", "steps().set(v, torch.zeros(2, 3))"),
            *(f"Array(**{{'batch_shape': (3,), 'dtype': 'i8', '{n}': v}})" for n in ARRAY_OPTIONS),
            *("Array((3,), 'i8', storage='memmap', directory=v)", "Array((v,), 'int64')"),
            *("setitem(array(), 0, v)", "setitem(array(), [0, 1], v)"),
            *(f"Pool(**{{'pool_size': 10, '{name}': v}})" for name in POOL_OPTIONS),
            *("Pool(pool_size=10, storage='memmap', directory=v)", "Pool([v], 1, 10)"),
            *("Pool(pool_size=10, keys=[v])", "pool()(*SINGLE[:4], True, terminated=v)"),
            *(f"pool().pool(*single({place}, v))" for place in PARTS),
            *(f"Pool(pool_size=3).pool(*single({place}, v))" for place in PARTS),
            *("pool().extend(v)", "pool().extend(TemporalDictTensor({'a': torch.ones(1, 2)}), v)"),
            *("pool().sample(v)", "pool().sample(2, n_step=v)"),
            "pool().sample(2, n_step=2, discount=v)",
            *("pool(priority_exponent=0.5).sample(2, beta=v)", "pool().sample_sequences(v, 2)"),
            *("pool().sample_sequences(2, v)", "next(pool().batches(v))"),
            *("list(islice(pool().batches(2, v), 2))", "pool().transitions(v)"),
            "pool().transitions([v])",
            "pool(priority_exponent=1).update_priorities(v, [1.0, 1.0])",
            "pool(priority_exponent=1).update_priorities([0, 1], v)",
            *("pool().load_state_dict(v)", "pool().load_state_dict({'metadata': v})"),
            "pool().load_state_dict({**pool().state_dict(), 'columns/frame/0.0': v})",
        ],
        (),
    ),
    **dict.fromkeys(
        ["batch().get(v)", "batch().get([v])", "steps().get(v)", "steps().get([v])"], (KeyError,)
    ),
    **dict.fromkeys(["batch()[v]", "steps()[v]"], (KeyError, IndexError)),
    **dict.fromkeys(["batch() + v", "steps() + v"], (TypeError,)),
    **dict.fromkeys(
        [
            *("batch().index(v)", "batch().slice(v)", "batch().slice(v, 3)", "batch().slice(0, v)"),
            *("steps().index(v)", "steps().slice(v)", "steps().slice(v, 2)", "steps().slice(0, v)"),
            *("batch().copy_(v, ROWS, ROWS)", "batch().copy_(batch(), v, ROWS)"),
            *("batch().copy_(batch(), ROWS, v)", "steps().copy_(v, ROWS, ROWS)"),
            *("steps().copy_(steps(), v, ROWS)", "steps().copy_(steps(), ROWS, v)"),
            *("array()[v]", "array()[0, v]", "setitem(array(), v, 0)"),
        ],
        (IndexError,),
    ),
}


@pytest.mark.filterwarnings("ignore:Casting complex values")  # of NumPy, for an Array
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of NumPy 2.0 for torch 2.6
@pytest.mark.parametrize("use", USES)
def test_invalid_values_are_refused_with_an_rlpool_error(use: str) -> None:
    functions = (islice, masked_dicttensor, masked_tensor, setitem)
    names = {**globals(), **{function.__name__: function for function in functions}}
    bare = []
    for value in VALUES:
        try:
            eval(use, names, {"v": value})
        except (RlpoolError, *USES[use]):
            continue
        except Exception as error:  # the row to find
            bare.append((repr(value)[:60], repr(error)[:120]))
    assert bare == []


def test_a_key_is_never_mistaken_for_a_row() -> None:
    for keys in ([0], [slice(0, 1)], [torch.tensor([0])]):
        for rows in (batch(), steps()):
            with pytest.raises(RlpoolError, match="str"):
                rows.get(keys)  # type: ignore[arg-type]
