"""The state of a pool as named arrays and a text: for ``state_dict`` and for files.

A file is in the safetensors format, written and read by streaming: eight bytes with the length of a
JSON header, the header, then the bytes of every array. It holds no code, and the ``safetensors``
library reads it. Rows are written as they lie in memory, so saving needs no memory of its own.

The last array of a file holds checksums, of the header and of every other array. (Files of format
1, which version 0.1 wrote, have none.) Everything is read into a new store, which replaces the
pool's only after it was found sound: loading into a pool that is in use needs room for both.

Reference:
    https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from rlpool.data.specs import TensorSpec
from rlpool.data.storage import NDArray
from rlpool.errors import RlpoolError, SpecError, described
from rlpool.machine.files import file_at, replaced
from rlpool.pool.ingest import converted
from rlpool.pool.store import Store

FORMAT = 2
_TEXT_KEY, _CHECKSUMS_KEY = "metadata", "checksums"
_CHUNK_BYTES = 2**20  # written or read at a time: the checksum finds them in the cache
_MAX_HEADER_BYTES = 100 * 2**20  # as in the safetensors library
_PAD = 8  # the header's length is a multiple of it, so that arrays are aligned
_KINDS = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1"]
_DTYPES = {"BOOL": np.dtype(bool)}
_DTYPES |= {f"{kind[0].upper()}{8 * int(kind[1])}": np.dtype(kind) for kind in _KINDS}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Saved(NamedTuple):
    """A saved pool, in memory or in an open file.

    Attributes:
        name: What errors call it.
        text: Everything but the arrays, as JSON.
        specs: Dtypes and whole shapes of its arrays.
        read: Copies a named array into another one of its shape and dtype; SpecError if damaged.
    """

    name: str
    text: str
    specs: Mapping[str, TensorSpec]
    read: Callable[[str, NDArray], None]

    def header(self, expected: Mapping[str, Any]) -> dict[str, Any]:
        """The parsed text.

        Args:
            expected: The arguments that the saved pool must have been made with.

        Raises:
            SpecError: If it was made with others, or by a later version.
        """
        header: dict[str, Any] = json.loads(self.text)
        found, version = {name: header[name] for name in expected}, header["format"]
        if version not in (FORMAT, FORMAT - 1):
            raise damaged(self.name, f"this rlpool does not know its format {version!r}")
        for name, value in expected.items():
            if found[name] != value:
                raise SpecError(
                    f"the saved pool has {name} {found[name]}, this one has {value}",
                    fix="load it into a pool that is made with the same arguments",
                )
        return header

    def fill(self, store: Store, header: Mapping[str, Any]) -> None:
        """Fill an empty store, which is of no use afterwards if this raises.

        Raises:
            SpecError: If something is missing or damaged, or a disk is full.
        """

        def read(targets: Mapping[str, NDArray]) -> None:
            for name in targets.keys() | self.specs.keys():
                shapes = [a[name].shape if name in a else None for a in (targets, self.specs)]
                if shapes[0] != shapes[1]:
                    what = f"{name!r} has shape {shapes[1]} instead of {shapes[0]}"
                    raise damaged(self.name, what)
            store.reserve(store.sub_pools.pieces(), *store.n_extra)
            for name, target in targets.items():
                dtype = self.specs[name].dtype
                if dtype == target.dtype:
                    self.read(name, target)
                else:  # version 0.1 stored rewards in their own dtype
                    wide = np.empty(target.shape, dtype)
                    self.read(name, wide)
                    target[...] = converted(name.rpartition("/")[2], wide, target.dtype)

        store.become(header, read)


def take_over(store: Store, other: Store) -> None:
    """Let a store hold what another one of the same schema holds."""
    store.reserve(other.sub_pools.pieces(), *other.n_extra)
    values = other.arrays_in_use()

    def copy(targets: Mapping[str, NDArray]) -> None:
        for name, target in targets.items():
            target[...] = values[name]

    store.become(other.counts, copy)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Raise ``SpecError`` for whatever goes wrong while something is loaded that may be damaged."""
    try:
        yield
    except RlpoolError:
        raise
    except Exception as error:
        raise damaged(name, described(error)) from error


def damaged(name: str, why: str) -> SpecError:
    """The error for what cannot be loaded."""
    return SpecError(
        f"{name} cannot be read, is damaged, or not the state of a pool: {why}",
        fix="load another copy of what save() or state_dict() gave; this pool is as it was",
    )


# state_dict ---------------------------------------------------------------------------------------


def to_tensors(text: str, arrays: Mapping[str, NDArray]) -> dict[str, Any]:
    """A dict of tensors, views, and one text."""
    tensors = {name: torch.from_numpy(a) for name, a in arrays.items()}
    # Where a view has no bytes another one may begin, and torch.save wants one dtype per place.
    return {_TEXT_KEY: text, **{n: t if t.numel() else t.clone() for n, t in tensors.items()}}


def from_tensors(state: Mapping[str, Any]) -> Saved:
    """What ``to_tensors`` returned, on any device."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    arrays = {name: tensor.numpy(force=True) for name, tensor in tensors.items()}
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}

    def read(name: str, target: NDArray) -> None:
        target[...] = arrays[name]

    return Saved("the state", state[_TEXT_KEY], specs, read)


# Files --------------------------------------------------------------------------------------------


def write_file(path: Any, text: str, arrays: Mapping[str, NDArray]) -> None:
    """Write a safetensors file, which replaces what was at the path when it is complete.

    Raises:
        SpecError: If the disk is full or the path cannot be written; what was there is kept.
    """
    try:
        with replaced(file_at(path)) as unfinished, open(unfinished, "wb") as file:
            _write(file, text, arrays)
    except (OSError, TypeError, ValueError) as error:
        raise SpecError(
            f"the pool could not be saved to {str(path)!r}: {error}",
            fix="make room there, or choose another path",
        ) from error


def _write(file: BinaryIO, text: str, arrays: Mapping[str, NDArray]) -> None:
    checksums = np.zeros(1 + len(arrays), np.int64)
    entries: dict[str, Any] = {"__metadata__": {_TEXT_KEY: text}}
    start = 0
    for name, array in {**arrays, _CHECKSUMS_KEY: checksums}.items():
        place = [start, start := start + array.nbytes]
        entries[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": place}
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % _PAD)
    encoded = struct.pack("<Q", len(encoded)) + encoded
    file.write(encoded)
    checksums[0] = zlib.crc32(encoded)
    for number, array in enumerate(arrays.values(), 1):
        for chunk in _chunks(array):
            checksums[number] = zlib.crc32(chunk, checksums[number])
            file.write(chunk)
    file.write(checksums.data)


@contextmanager
def opened_file(path: Any) -> Iterator[Saved]:
    """A file that ``write_file`` wrote, open within this.

    Raises:
        SpecError: If the file cannot be read or is damaged.
    """
    with loading(repr(str(path))), open(file_at(path), "rb", buffering=0) as file:
        yield _saved(file, repr(str(path)))


def _saved(file: BinaryIO, name: str) -> Saved:
    """The pool in a file, once its header has been checked."""
    size, prefix = os.fstat(file.fileno()).st_size, file.read(8)
    length = int.from_bytes(prefix, "little")
    encoded = file.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    entries = json.loads(encoded)
    text = str(entries.pop("__metadata__")[_TEXT_KEY])
    specs: dict[str, TensorSpec] = {}
    starts, end = {}, 8 + length
    for key, entry in entries.items():
        specs[key] = TensorSpec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
        starts[key] = 8 + length + entry["data_offsets"][0]
        if starts[key] != end or min(entry["shape"], default=0) < 0:
            raise damaged(name, f"{key!r} does not lie where the array before it ends")
        end += specs[key].n_bytes
    if end != size:
        raise damaged(name, f"{end} bytes were written, {size} are there")
    checksums: dict[str, int] = {}

    def read(key: str, target: NDArray) -> None:
        file.seek(starts[key])
        checksum = 0
        for chunk in _chunks(target):
            if file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
                raise damaged(name, "it ended while it was read")
            checksum = zlib.crc32(chunk, checksum)
        if checksums.get(key, checksum) != checksum:
            raise damaged(name, f"the values of {key!r} are not what was written")

    if _CHECKSUMS_KEY in specs:
        expected = np.zeros(len(specs), np.int64)
        if specs.pop(_CHECKSUMS_KEY) != TensorSpec(expected.shape, expected.dtype):
            raise damaged(name, "its checksums are missing")
        read(_CHECKSUMS_KEY, expected)
        checksums.update(zip(specs, expected[1:].tolist(), strict=True))
        if expected[0] != zlib.crc32(encoded, zlib.crc32(prefix)):
            raise damaged(name, "its header is not what was written")
    return Saved(name, text, specs, read)


def _chunks(array: NDArray) -> Iterator[memoryview]:
    view = array.reshape(-1).view(np.uint8).data
    for begin in range(0, len(view), _CHUNK_BYTES):
        yield view[begin : begin + _CHUNK_BYTES]
