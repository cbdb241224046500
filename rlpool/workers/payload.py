"""Any picklable object in one piece of memory, with its tensors and arrays readable in place.

Used for objects that are too large for a pipe and the same for all workers: state dicts and infos.
The memory is written once; every worker reads it through a private mapping, so its changes in place
stay private.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from rlpool.data.storage import Memory
from rlpool.workers.sharing import ONLY_AT_START

_ALIGNMENT = 64  # bytes, as for torch's own tensors


Payload = list[tuple[int, int]]
"""Start and size of each part of a packed object: its pickle, and the buffers outside of it."""


class Packed(NamedTuple):
    """A packed object: its description for a message, and the memory that follows the message."""

    payload: Payload
    memory: Memory


def pack(value: Any, allocate: Callable[[int], Memory]) -> Packed:
    """Write an object into new memory.

    Tensors arrive on the CPU and without gradients, whatever their device here.

    Args:
        value: Any object that cloudpickle can pickle.
        allocate: Allocates memory of a given size in bytes.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    protocol = pickle.HIGHEST_PROTOCOL
    _Pickler(stream, protocol=protocol, buffer_callback=buffers.append).dump(value)
    views = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    places, end = [], 0
    for view in views:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append((start, view.nbytes))
        end = start + view.nbytes
    memory = allocate(end)
    root = memory.root()
    for (start, size), view in zip(places, views, strict=True):
        root[start : start + size] = view
    return Packed(places, memory)


def unpack(payload: Payload, memory: Memory) -> Any:
    """Read an object; its tensors are views of the memory and keep it alive."""
    root = memory.root()
    words, *buffers = [root[start : start + size] for start, size in payload]
    return pickle.loads(words.data, buffers=buffers)


def unpacked_copy(packed: Packed) -> Any:
    """Read an object with tensors of its own."""
    memory = Memory.local(packed.memory.n_bytes)
    memory.root()[:] = packed.memory.root()
    return unpack(packed.payload, memory)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with tensor data outside of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce plain tensors to their bytes; leave everything else to cloudpickle."""
        kind = type(value)
        if (kind is torch.Tensor or kind is torch.nn.Parameter) and value.layout is torch.strided:
            words = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            data = words.view(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(data), words.dtype, tuple(words.shape))
        if kind is Connection:  # it would arrive as a descriptor number of this process
            raise TypeError(ONLY_AT_START)
        return super().reducer_override(value)


def _tensor(data: np.ndarray[Any, Any], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)
