"""The state of a pool as named arrays and a text: for ``state_dict`` and for files.

A file is in the safetensors format, written and read by streaming: eight bytes with the length of a
JSON header, the header, then the bytes of every array. It holds no code, and the ``safetensors``
library reads it. Rows are written as they lie in memory, so that saving needs no memory of its own.

The last array of a file holds checksums, of the header and of every other array. (Files of format
1, which version 0.1 wrote, have none.) Everything is read into a store of its own, which replaces
the pool's once it was found right: loading into a pool that is in use needs room for both.

Reference:
    https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from rlpool.errors import SpecError
from rlpool.memory.storage import Array
from rlpool.pool.ingest import converted
from rlpool.pool.store import Schema, Store
from rlpool.specs import TensorSpec

FORMAT = 2
_TEXT_KEY, _CHECKSUMS_KEY = "metadata", "checksums"
_CHUNK_BYTES = 2**20  # how much is written or read at a time: the checksum finds it in the cache
_MAX_HEADER_BYTES = 100 * 2**20  # as in the safetensors library
_PAD = 8  # the header's length is a multiple of it, so that arrays lie where processors like them
_KINDS = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1"]
_DTYPES = {"BOOL": np.dtype(bool)}
_DTYPES |= {f"{kind[0].upper()}{8 * int(kind[1])}": np.dtype(kind) for kind in _KINDS}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""What comes of a text that nobody wrote."""


class Saved(NamedTuple):
    """A saved pool, wherever it is.

    Attributes:
        name: What errors call it.
        text: Everything but the arrays, as JSON.
        specs: Dtypes and whole shapes of its arrays.
        read: Copies a named array into another one of its shape and dtype; SpecError if damaged.
    """

    name: str
    text: str
    specs: Mapping[str, TensorSpec]
    read: Callable[[str, Array], None]

    def header(self, expected: Mapping[str, Any]) -> dict[str, Any]:
        """The parsed text.

        Args:
            expected: Names and values of the arguments that the pool has to have been made with.

        Raises:
            SpecError: If it is not a pool's, or that of another kind of pool.
        """
        try:
            header: dict[str, Any] = json.loads(self.text)
            found, version = {name: header[name] for name in expected}, header["format"]
        except UNREADABLE as error:
            raise SpecError(
                f"{self.name} is not the state of a pool",
                fix="use what save() or state_dict() of a pool gave",
            ) from error
        if version not in (FORMAT, FORMAT - 1):
            raise damaged(self.name, f"its format {version!r} is unknown to this rlpool")
        for name, value in expected.items():
            if found[name] != value:
                raise SpecError(
                    f"the saved pool has {name} {found[name]}, this one has {value}",
                    fix="load it into a pool that is made with the same arguments",
                )
        return header

    def fill(self, store: Store, spans: Sequence[Sequence[int]], n_finals: int) -> None:
        """Let an empty store hold what was saved.

        Args:
            store: The store, which is of no use afterwards if this raises.
            spans: ``oldest`` and ``next`` of each sub-pool.
            n_finals: Rows of ``finals`` that are in use.

        Raises:
            SpecError: If something is missing or damaged, or a disk is full.
        """
        targets = store.arrays(spans, n_finals)
        for name in targets.keys() | self.specs.keys():
            shapes = [a[name].shape if name in a else None for a in (targets, self.specs)]
            if shapes[0] != shapes[1]:
                raise damaged(self.name, f"{name!r} has shape {shapes[1]} instead of {shapes[0]}")
        store.reserve_spans(spans, n_finals)
        for name, target in targets.items():
            dtype = self.specs[name].dtype
            if dtype == target.dtype:
                self.read(name, target)
            else:  # rewards were once kept as they came
                wide = np.empty(target.shape, dtype)
                self.read(name, wide)
                target[...] = converted(name, wide, target.dtype)
        store.take_over(spans, n_finals)


def schema_of(header: Mapping[str, Any]) -> Schema | None:
    """The schema that a header tells of, ``None`` if there never was a transition."""
    if header["schema"] is None:
        return None
    columns = {
        key: TensorSpec(tuple(shape), np.dtype(text))
        for key, (text, shape) in header["schema"]["columns"].items()
    }
    paired = tuple(header["schema"]["paired"])
    return Schema.of(Schema(columns, paired).specs)


# state_dict ---------------------------------------------------------------------------------------


def to_tensors(text: str, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """A dict of tensors, views, and one text."""
    return {_TEXT_KEY: text, **{name: torch.from_numpy(a) for name, a in arrays.items()}}


def from_tensors(state: Any) -> Saved:
    """What ``to_tensors`` returned, on whatever device it is now."""
    text = state.get(_TEXT_KEY) if isinstance(state, Mapping) else None
    if not isinstance(text, str):
        raise SpecError(
            f"this is not the state of a pool: it has no {_TEXT_KEY!r}",
            fix="pass what state_dict() of a pool returned",
        )
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    try:
        arrays = {name: tensor.numpy(force=True) for name, tensor in tensors.items()}
    except (TypeError, RuntimeError) as error:
        raise damaged("the state", f"it has tensors that NumPy lacks ({error})") from error
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}

    def read(name: str, target: Array) -> None:
        target[...] = arrays[name]

    return Saved("the state", text, specs, read)


# Files --------------------------------------------------------------------------------------------


def write_file(path: Any, text: str, arrays: Mapping[str, Array]) -> None:
    """Write a safetensors file. What was at the path is replaced when all is written.

    Raises:
        SpecError: If the disk is full or the path cannot be written; what was there is kept.
    """
    path = Path(os.path.realpath(_path(path)))  # through a link, to the file that it means
    if path.exists() and not path.is_file():
        raise SpecError(f"{str(path)!r} is not a file", fix="save to another path")
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
            f"the pool could not be saved to {str(path)!r}: {error.strerror}",
            fix="make room there, or choose another path",
        ) from error


def _write(file: BinaryIO, text: str, arrays: Mapping[str, Array]) -> None:
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
    """A file that ``write_file`` wrote, as long as it is open.

    Raises:
        SpecError: If the file cannot be read or is damaged.
    """
    path = _path(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
            raise SpecError(f"{str(path)!r} is not a file", fix="load what save() wrote")
        with open(path, "rb", buffering=0) as file:
            yield _saved(file, repr(str(path)))
    except OSError as error:
        raise SpecError(
            f"{str(path)!r} cannot be read: {error.strerror}",
            fix="load what save() wrote; this pool is as it was",
        ) from error


def _saved(file: BinaryIO, name: str) -> Saved:
    """The pool in a file, whose header was read and found right."""
    size, prefix = os.fstat(file.fileno()).st_size, file.read(8)
    length = int.from_bytes(prefix, "little")
    encoded = file.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    specs: dict[str, TensorSpec] = {}
    starts, end = {}, 8 + length
    try:
        entries = json.loads(encoded)
        text = str(entries.pop("__metadata__")[_TEXT_KEY])
        for key, entry in entries.items():
            specs[key] = TensorSpec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            starts[key] = 8 + length + entry["data_offsets"][0]
            if starts[key] != end or min(entry["shape"], default=0) < 0:
                raise ValueError(key)
            end += specs[key].n_bytes
        if end != size:
            raise ValueError(f"{end} bytes were written, {size} are there")
    except (*UNREADABLE, MemoryError) as error:
        raise damaged(name, f"it is no pool's file, or not the whole of one ({error})") from error
    checksums: dict[str, int] = {}

    def read(key: str, target: Array) -> None:
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
            raise damaged(name, "its checksums are not there")
        read(_CHECKSUMS_KEY, expected)
        checksums.update(zip(specs, expected[1:].tolist(), strict=True))
        if expected[0] != zlib.crc32(encoded, zlib.crc32(prefix)):
            raise damaged(name, "its header is not what was written")
    return Saved(name, text, specs, read)


def _chunks(array: Array) -> Iterator[memoryview]:
    view = array.reshape(-1).view(np.uint8).data
    for begin in range(0, len(view), _CHUNK_BYTES):
        yield view[begin : begin + _CHUNK_BYTES]


def _path(path: Any) -> Path:
    try:
        named = Path(path)
        if "\0" in str(named):
            raise TypeError
    except TypeError:
        raise SpecError(f"path is {path!r}", fix="pass the name of a file") from None
    return named


def damaged(name: str, why: str) -> SpecError:
    """The error for a state that cannot be that of a pool."""
    return SpecError(
        f"{name} is damaged: {why}", fix="load another copy of it; this pool is as it was"
    )
