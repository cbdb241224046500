"""The state of a pool as named arrays and a text: for ``state_dict`` and for files.

A file is in the safetensors format, written and read by streaming: eight bytes with the length of a
JSON header, the header, then the bytes of every array. It holds no code, and the ``safetensors``
library reads it. Rows are written as they lie in memory, in at most two pieces per sub-pool and
key, so that saving and loading need no memory of their own.

Reference:
    https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from rlpool.errors import SpecError, compose
from rlpool.pool.intake import Schema
from rlpool.pool.writer import TransitionWriter
from rlpool.specs import TensorSpec
from rlpool.storage import Array

METADATA_KEY = "metadata"
_FORMAT = 1
_CHUNK_BYTES = 2**24  # how much is written or read at a time
_PAD = 8  # the header's length is a multiple of it, so that arrays lie where processors like them
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
}
_NAMES = {np.dtype(text): name for name, text in _DTYPES.items()}

Read = Callable[[str, Array], None]
"""Copies a named array into another one of its shape and dtype."""


def state_of(pool: TransitionWriter, more: Mapping[str, Any]) -> tuple[str, dict[str, Array]]:
    """What a pool consists of.

    Args:
        pool: The pool.
        more: What the caller wants to find again, as plain values.

    Returns:
        A JSON text, and arrays by name, which are views on the pool.
    """
    store, schema = pool._store, pool._schema
    state: dict[str, Any] = {
        "format": _FORMAT,
        **_arguments(pool),
        "rings": [[ring.oldest, ring.next] for ring in pool._rings],
        "fed": pool._fed,
        "open_rows": {str(index): row for index, row in pool._open_rows.items()},
        "max_priority": pool._max_priority,
        "sampling": pool._generator.bit_generator.state,
        "routing": pool._router.bit_generator.state,
        "n_finals": 0 if store is None else store.n_finals,
        "schema": None,
        **more,
    }
    if schema is not None:
        state["schema"] = {
            "columns": {k: [s.dtype.str, list(s.shape)] for k, s in schema.columns.items()},
            "paired": list(schema.paired),
        }
    return json.dumps(state), _arrays(pool, state)


def restore(
    pool: TransitionWriter, text: str, specs: Mapping[str, TensorSpec], read: Read
) -> dict[str, Any]:
    """Make a pool what another one was.

    Args:
        pool: The pool.
        text: The text of ``state_of``.
        specs: Dtypes and whole shapes of its arrays.
        read: Gives the arrays.

    Returns:
        The text, parsed.

    Raises:
        SpecError: If the pool has other sizes or rules, other keys, or if arrays are missing. The
            pool is as before then.
    """
    state = _checked(pool, text)
    with pool._first_decides():
        targets = _targets(pool, state, specs)
    pool.clear()
    with pool._sync.writing():
        for name, target in targets.items():
            read(name, target)
        _take_over(pool, state)
    return state


def _targets(
    pool: TransitionWriter, state: Mapping[str, Any], specs: Mapping[str, TensorSpec]
) -> dict[str, Array]:
    """Where the arrays of a state go, with room for them; refuses what does not fit."""
    if state["schema"] is None:
        return {}
    pool._admit(_schema(state["schema"]).specs, "the saved pool")
    targets = _arrays(pool, state)
    for name, target in targets.items():
        if specs.get(name) != TensorSpec(target.shape, target.dtype):
            raise SpecError(f"the saved pool has {name!r} as {specs.get(name)}: it is damaged")
    store = pool._store
    if store is not None:
        for ring, (oldest, after) in zip(pool._rings, state["rings"], strict=True):
            store.reserve(ring.pieces(oldest, after), 0)
        store.reserve([], max(0, state["n_finals"] - store.n_finals))
    return targets


def _arrays(pool: TransitionWriter, state: Mapping[str, Any]) -> dict[str, Array]:
    """Where a pool has, or will have, the arrays of a state."""
    store, tree = pool._store, pool._tree
    if store is None:
        return {}
    whole = {f"columns/{key}": array for key, array in store.columns.items()}
    whole["is_last"] = store.is_last
    if store.paired:
        whole["final_row"] = store.final_row
    if tree is not None:
        whole["priorities"] = tree.leaves
    arrays = {
        f"{name}/{index}.{number}": array[piece]
        for index, (oldest, after) in enumerate(state["rings"])
        for number, piece in enumerate(pool._rings[index].pieces(oldest, after))
        for name, array in whole.items()
    }
    for key, array in store.finals.items():
        arrays[f"finals/{key}"] = array[: state["n_finals"]]
    return arrays


def _take_over(pool: TransitionWriter, state: Mapping[str, Any]) -> None:
    """Set everything but the arrays, which are there."""
    pieces = []
    for ring, (oldest, after) in zip(pool._rings, state["rings"], strict=True):
        ring.move(oldest, after)
        pieces.extend(ring.pieces(oldest, after))
    pool._fed = list(state["fed"])
    pool._open_rows = {int(index): row for index, row in state["open_rows"].items()}
    pool._generator.bit_generator.state = state["sampling"]
    pool._router.bit_generator.state = state["routing"]
    pool._max_priority = float(state["max_priority"])
    if pool._store is not None:
        pool._store.recover_finals(state["n_finals"], pieces)
    if pool._tree is not None:
        for piece in pieces:
            # Filled in again, for the sums above them.
            pool._tree.fill(piece, pool._tree.leaves[piece].copy())


def _checked(pool: TransitionWriter, text: str) -> dict[str, Any]:
    """The parsed text, if it fits the pool."""
    try:
        state: dict[str, Any] = json.loads(text)
        found = {name: state[name] for name in ("format", *_arguments(pool))}
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError("this is not the state of a pool") from error
    expected = {"format": _FORMAT, **_arguments(pool)}
    if pool._keys is None:
        expected["keys"] = found["keys"]  # it takes what comes
    for name, value in expected.items():
        if found[name] != value:
            raise SpecError(
                compose(
                    f"the saved pool has {name} {found[name]}, this one has {value}",
                    fix="load it into a pool that is made with the same arguments",
                )
            )
    return state


def _arguments(pool: TransitionWriter) -> dict[str, Any]:
    """The arguments of a pool that decide what it holds and draws."""
    rules = pool._rules
    return {
        "pool_size": pool._pool_size,
        "processes": len(pool._rings),
        "window_size": rules.window_size,
        "clearing_freq": rules.clearing_freq,
        "window_size_": rules.clearing_size,
        "random": pool._random,
        "priority_exponent": pool._alpha,
        "keys": pool._keys,
    }


def _schema(state: Mapping[str, Any]) -> Schema:
    columns = {
        key: TensorSpec(tuple(shape), np.dtype(text))
        for key, (text, shape) in state["columns"].items()
    }
    return Schema(columns, tuple(state["paired"]))


# state_dict ---------------------------------------------------------------------------------------


def to_tensors(text: str, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """A dict of tensors, views, and one text."""
    return {METADATA_KEY: text, **{name: torch.from_numpy(a) for name, a in arrays.items()}}


def from_tensors(pool: TransitionWriter, state: Mapping[str, Any]) -> dict[str, Any]:
    """Restore a pool from what ``to_tensors`` returned."""
    text = state.get(METADATA_KEY) if isinstance(state, Mapping) else None
    if not isinstance(text, str):
        raise SpecError(f"this is not the state of a pool: it has no {METADATA_KEY!r}")
    arrays = {
        name: tensor.detach().cpu().numpy()
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    }
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}

    def read(name: str, target: Array) -> None:
        target[...] = arrays[name]

    return restore(pool, text, specs, read)


# Files --------------------------------------------------------------------------------------------


def write_file(path: str | Path, text: str, arrays: Mapping[str, Array]) -> None:
    """Write a safetensors file. What was at the path is replaced when all is written.

    Raises:
        SpecError: If the disk is full or the path cannot be written; what was there is kept.
    """
    path = Path(os.path.realpath(path))  # through a link, to the file that it means
    if path.exists() and not path.is_file():
        raise SpecError(compose(f"{str(path)!r} is not a file", fix="save to another path"))
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        try:
            with open(partial, "wb") as file:
                _write(file, text, arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SpecError(
            compose(
                f"the pool could not be saved to {str(path)!r}: {error.strerror}",
                fix="make room there, or choose another path",
            )
        ) from error


def _write(file: BinaryIO, text: str, arrays: Mapping[str, Array]) -> None:
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: text}}
    start = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _PAD)
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for array in arrays.values():
        view = _bytes(array)
        for begin in range(0, len(view), _CHUNK_BYTES):
            file.write(view[begin : begin + _CHUNK_BYTES])


def read_file(pool: TransitionWriter, path: str | Path) -> dict[str, Any]:
    """Restore a pool from a file.

    Raises:
        SpecError: If the file is damaged or holds another kind of pool; the pool is as before.
        OSError: If it cannot be read.
    """
    with open(path, "rb") as file:
        text, specs, starts = _header(file, path)

        def read(name: str, target: Array) -> None:
            file.seek(starts[name])
            view = _bytes(target)
            for begin in range(0, len(view), _CHUNK_BYTES):
                chunk = view[begin : begin + _CHUNK_BYTES]
                if file.readinto(chunk) != len(chunk):
                    raise OSError(f"{str(path)!r} ended early")

        return restore(pool, text, specs, read)


def _header(file: BinaryIO, path: str | Path) -> tuple[str, dict[str, TensorSpec], dict[str, int]]:
    """Text, specs and places of the arrays of a file."""
    size = os.fstat(file.fileno()).st_size
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length)) if length < size else {}
        text: str = header.pop("__metadata__")[METADATA_KEY]
        specs, starts, end = {}, {}, 8 + length
        for name, entry in header.items():
            dtype = np.dtype(_DTYPES[entry["dtype"]])
            specs[name] = TensorSpec(tuple(entry["shape"]), dtype)
            starts[name] = 8 + length + entry["data_offsets"][0]
            end = max(end, 8 + length + entry["data_offsets"][1])
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise SpecError(f"{str(path)!r} is not a pool's file") from error
    if end > size:
        raise SpecError(f"{str(path)!r} is not whole: {end} bytes were written, {size} are there")
    return text, specs, starts


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
