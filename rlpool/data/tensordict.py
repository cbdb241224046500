"""Conversion to and from ``tensordict.TensorDict`` without copying."""

from __future__ import annotations

import importlib
from typing import Any

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, compose


def dict_tensor_to_tensordict(data: DictTensor) -> Any:
    """See ``DictTensor.to_tensordict``."""
    sizes = {tensor.shape[:1] for tensor in data.values()}
    batch_size = list(sizes.pop()) if len(sizes) == 1 else [] if sizes else [0]
    return _tensordict_class()(dict(data.items()), batch_size=batch_size)


def dict_tensor_from_tensordict(tensordict: Any) -> DictTensor:
    """See ``DictTensor.from_tensordict``."""
    try:
        tensors = dict(tensordict.items(include_nested=True, leaves_only=True))
    except (AttributeError, TypeError):
        raise _not_one(tensordict) from None
    return DictTensor({"/".join(_path(key)): tensor for key, tensor in tensors.items()})


def temporal_dict_tensor_to_tensordict(data: TemporalDictTensor) -> Any:
    """See ``TemporalDictTensor.to_tensordict``."""
    make, n_elems = _tensordict_class(), data.n_elems()
    parts = {
        "steps": make(dict(data.items()), batch_size=[n_elems, data.n_timesteps()]),
        "lengths": data.lengths,
        "info": make(dict(data.info.items()), batch_size=[n_elems]),
    }
    return make(parts, batch_size=[n_elems])


def temporal_dict_tensor_from_tensordict(tensordict: Any) -> TemporalDictTensor:
    """See ``TemporalDictTensor.from_tensordict``."""
    if not callable(getattr(tensordict, "keys", None)):
        raise _not_one(tensordict)
    entries = list(tensordict.keys())
    if "steps" not in entries or "lengths" not in entries:
        raise SpecError(
            f"the TensorDict has the entries {entries}",
            fix="it needs steps [B, T], lengths [B] and optionally info [B]",
        )
    steps = dict_tensor_from_tensordict(tensordict["steps"])
    info = tensordict.get("info", None)
    return TemporalDictTensor(
        dict(steps.items()),
        tensordict["lengths"],
        None if info is None else dict_tensor_from_tensordict(info),
    )


def _not_one(value: object) -> SpecError:
    return SpecError(f"got {type(value).__name__}", fix="pass a TensorDict")


def _tensordict_class() -> Any:
    try:
        return importlib.import_module("tensordict").TensorDict
    except ImportError as error:
        raise ImportError(
            compose("tensordict is not installed", fix="pip install 'rlpool[tensordict]'")
        ) from error


def _path(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key
