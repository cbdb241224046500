"""``tensordict.TensorDict`` as the named tensors need it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlpool.errors import SpecError, compose


def made(values: Mapping[str, Any], batch_size: Sequence[int]) -> Any:
    """A ``TensorDict`` of these values, not copied."""
    try:
        tensordict = importlib.import_module("tensordict")
    except ImportError as error:
        raise ImportError(
            compose("tensordict is not installed", fix="pip install 'rlpool[tensordict]'")
        ) from error
    return tensordict.TensorDict(dict(values), batch_size=list(batch_size))


def leaves(tensordict: Any) -> dict[str, Tensor]:
    """All tensors of a ``TensorDict``, not copied; nested keys are joined with ``/``."""
    try:
        items = dict(tensordict.items(include_nested=True, leaves_only=True)).items()
    except (AttributeError, TypeError):
        raise SpecError(f"got {type(tensordict).__name__}", fix="pass a TensorDict") from None
    return {key if isinstance(key, str) else "/".join(key): tensor for key, tensor in items}
