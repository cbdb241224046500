"""The state of a pool as named arrays and a text: for ``state_dict`` and for files.

A file is in the safetensors format, written and read by streaming: eight bytes with the length of a
JSON header, the header, then the bytes of every array. It holds no code, and the ``safetensors``
library reads it. Rows are written as they lie in memory, in at most two pieces per sub-pool and
key, so that saving needs no memory of its own.

The last array of a file holds checksums, of the header and of every other array. (Files of format
1 have none, and are checked as far as that goes.) A pool is changed when everything was read and
found right. What it holds stays until then: loading into a pool that is not empty needs room for
both.

Reference:
    https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from rlpool.errors import SpecError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.memory.storage import Array, allocate, carve, carved_bytes
from rlpool.pool.intake import Schema, converted, stored_spec
from rlpool.pool.writer import TransitionWriter
from rlpool.slots.blocks import successor_key
from rlpool.specs import TensorSpec

METADATA_KEY = "metadata"
_CHECKSUMS_KEY = "checksums"
_FORMAT, _FORMAT_WITHOUT_CHECKSUMS = 2, 1
_CHUNK_BYTES = 2**20  # how much is written or read at a time: the checksum finds it in the cache
_MAX_HEADER_BYTES = 100 * 2**20  # as in the safetensors library
_MOST = 2**62  # of anything that is counted; sums of two fit into an int64
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
"""Copies a named array into another one of its shape and dtype; SpecError if it is damaged."""


class Saved(NamedTuple):
    """A saved pool, wherever it is.

    Attributes:
        name: What errors call it.
        text: The text of ``state_of``.
        formats: Which formats it may be in.
        specs: Dtypes and whole shapes of its arrays.
        read: Gives the arrays.
    """

    name: str
    text: str
    formats: tuple[int, ...]
    specs: Mapping[str, TensorSpec]
    read: Read

    def damaged(self, why: str) -> SpecError:
        """The error for a state that cannot be that of a pool."""
        return _damaged(self.name, why)


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


def restore(pool: TransitionWriter, saved: Saved) -> dict[str, Any]:
    """Make a pool what another one was.

    Args:
        pool: The pool.
        saved: What the other one was.

    Returns:
        The text, parsed.

    Raises:
        SpecError: If the pool has other sizes or rules, holds other keys, or if something is
            missing or damaged. The pool is as before then, whatever happens.
        UsageError: In a process that was forked from the pool's.
    """
    pool._sync.refuse_others()
    state = _checked(pool, saved)
    try:
        with pool._first_decides():
            targets = _targets(pool, state, saved)
            # Where nothing is held, nothing can be lost.
            staged = _staged(pool, targets) if len(pool) else targets
            try:
                _fill(staged, state, saved)
                with InterruptsHeld(), pool._sync.writing():
                    for ring in pool._rings:
                        pool._drop(ring, ring.oldest, ring.next)
                    if staged is not targets:
                        for name, target in targets.items():
                            target[...] = staged.pop(name)
                    _take_over(pool, state)
            except BaseException:
                _wipe(pool, state)
                raise
    except MemoryError as error:
        raise SpecError(
            f"there is not enough memory to load {saved.name}",
            fix="clear() the pool first: what it holds is kept until everything was read",
        ) from error
    return state


def _targets(pool: TransitionWriter, state: Mapping[str, Any], saved: Saved) -> dict[str, Array]:
    """Where the arrays of a state go, with room for them; refuses what does not fit."""
    schema = None if state["schema"] is None else _schema(state["schema"])
    expected = {} if schema is None else _specs(pool, schema, state)
    for name in expected.keys() | saved.specs.keys():
        if expected.get(name) != saved.specs.get(name):
            raise saved.damaged(
                f"{name!r} is {saved.specs.get(name, 'missing')}, its text says "
                f"{expected.get(name, 'nothing of it')}"
            )
    if schema is None:
        return {}
    columns = {key: stored_spec(key, spec) for key, spec in schema.columns.items()}
    schema = replace(schema, columns=columns)
    mine = pool._admit(schema.specs, "the saved pool")
    if mine != schema:
        raise SpecError(
            f"the saved pool holds {_keys(schema)}; this one holds {_keys(mine)}",
            fix="load it into a pool that holds the same, or nothing yet",
        )
    store = pool._store
    if store is not None:
        for ring, (oldest, after) in zip(pool._rings, state["rings"], strict=True):
            store.reserve(ring.pieces(oldest, after), 0)
        store.reserve([], max(0, state["n_finals"] - store.n_finals))
    return _arrays(pool, state)


def _staged(pool: TransitionWriter, targets: Mapping[str, Array]) -> dict[str, Array]:
    """Room for arrays like others, where they can wait."""
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in targets.items()}
    n_bytes = sum(carved_bytes(specs, 1).values())
    is_on_disk = pool._storage == "memmap"
    directory = pool._directory if is_on_disk else None
    memory = allocate("memmap" if is_on_disk else "local", n_bytes, directory=directory)
    memory.reserve(0, n_bytes)
    return {name: array[0] for name, array in carve(memory.root(), specs, 1).items()}


def _fill(arrays: Mapping[str, Array], state: Mapping[str, Any], saved: Saved) -> None:
    """Read arrays, and refuse those that no pool has."""
    n_finals = state["n_finals"]
    for name, array in arrays.items():
        kind, _, piece = name.partition("/")
        dtype = saved.specs[name].dtype
        if dtype == array.dtype:
            saved.read(name, array)
        else:  # rewards, which were kept as they came once
            wide = np.empty(array.shape, dtype)
            saved.read(name, wide)
            array[...] = converted("_reward", wide, array.dtype)
        if dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
            raise saved.damaged(f"{name!r} has values that are neither true nor false")
        if kind == "priorities" and not ((array >= 0) & np.isfinite(array)).all():
            raise saved.damaged(f"{name!r} has values that are no priorities")
        if kind == "final_row":
            rows = array[arrays[f"is_last/{piece}"]]
            if rows.size and not 0 <= rows.min() <= rows.max() < n_finals:
                raise saved.damaged(f"{name!r} has rows that do not exist")
    newest = {index: array for index, array in _by_ring(arrays, "is_last") if array.size}
    if not all(array[-1] for array in newest.values()):
        raise saved.damaged("the newest transition is followed by another one")


def _by_ring(arrays: Mapping[str, Array], kind: str) -> Iterator[tuple[str, Array]]:
    """Sub-pool and array of every piece of a kind, in order."""
    for name, array in arrays.items():
        if name.startswith(f"{kind}/"):
            yield name.partition("/")[2].partition(".")[0], array


def _wipe(pool: TransitionWriter, state: Mapping[str, Any]) -> None:
    """Leave no trace in an empty pool of what was read into it."""
    if pool._store is None or len(pool):
        return
    for ring, (oldest, after) in zip(pool._rings, state["rings"], strict=True):
        for piece in ring.pieces(oldest, after):
            pool._store.is_last[piece] = False
            if pool._tree is not None:
                pool._tree.fill(piece, 0.0)


def _names(
    pool: TransitionWriter, state: Mapping[str, Any], kinds: Iterable[str]
) -> Iterator[tuple[str, str, slice]]:
    """Name, kind and rows of every array that has a value per transition."""
    kinds = list(kinds)
    for index, (oldest, after) in enumerate(state["rings"]):
        for number, piece in enumerate(pool._rings[index].pieces(oldest, after)):
            for kind in kinds:
                yield f"{kind}/{index}.{number}", kind, piece


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
    arrays = {name: whole[kind][piece] for name, kind, piece in _names(pool, state, whole)}
    for key, array in store.finals.items():
        arrays[f"finals/{key}"] = array[: state["n_finals"]]
    return arrays


def _specs(
    pool: TransitionWriter, schema: Schema, state: Mapping[str, Any]
) -> dict[str, TensorSpec]:
    """What the arrays of a state should be, by the same names."""
    whole = {f"columns/{key}": spec for key, spec in schema.columns.items()}
    whole["is_last"] = TensorSpec((), np.dtype(bool))
    if schema.paired:
        whole["final_row"] = TensorSpec((), np.dtype(np.int32))
    if pool._alpha is not None:
        whole["priorities"] = TensorSpec((), np.dtype(np.float64))
    specs = {
        name: TensorSpec((piece.stop - piece.start, *whole[kind].shape), whole[kind].dtype)
        for name, kind, piece in _names(pool, state, whole)
    }
    for key in schema.paired:
        spec = schema.columns[key]
        specs[f"finals/{key}"] = TensorSpec((state["n_finals"], *spec.shape), spec.dtype)
    return specs


def _take_over(pool: TransitionWriter, state: Mapping[str, Any]) -> None:
    """Set everything but the arrays, which are there."""
    windows = [(ring, *window) for ring, window in zip(pool._rings, state["rings"], strict=True)]
    pieces = [piece for ring, *window in windows for piece in ring.pieces(*window)]
    if pool._store is not None:
        pool._store.recover_finals(state["n_finals"], pieces)
    if pool._tree is not None:
        for piece in pieces:
            # Filled in again, for the sums above them.
            pool._tree.fill(piece, pool._tree.leaves[piece].copy())
    pool._fed = list(state["fed"])
    pool._open_rows = {int(index): row for index, row in state["open_rows"].items()}
    pool._generator.bit_generator.state = state["sampling"]
    pool._router.bit_generator.state = state["routing"]
    pool._max_priority = float(state["max_priority"])
    for ring, oldest, after in windows:
        ring.move(oldest, after)


def _checked(pool: TransitionWriter, saved: Saved) -> dict[str, Any]:
    """The parsed text, if it is a pool's and fits this one."""
    try:
        state: dict[str, Any] = json.loads(saved.text)
        found = {name: state[name] for name in ("format", *_arguments(pool))}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SpecError(
            f"{saved.name} is not the state of a pool",
            fix="use what save() or state_dict() of a pool gave",
        ) from error
    if found.pop("format") not in saved.formats:
        raise saved.damaged(
            f"its format is {state['format']!r}, not one of {list(saved.formats)}, unless it comes "
            "from a later version of rlpool"
        )
    expected = _arguments(pool)
    if pool._keys is None:
        expected["keys"] = found["keys"]  # it takes what comes
    for name, value in expected.items():
        if found[name] != value:
            raise SpecError(
                f"the saved pool has {name} {found[name]}, this one has {value}",
                fix="load it into a pool that is made with the same arguments",
            )
    for name, is_sound in _SOUND.items():
        try:
            sound = is_sound(pool, state)
        except Exception:  # whatever a text that nobody wrote leads to
            sound = False
        if not sound:
            raise saved.damaged(f"its {name!r} make no sense")
    return state


def _is_int(value: Any, least: int, most: float) -> bool:
    return type(value) is int and least <= value <= most


def _are_rings(pool: TransitionWriter, state: Mapping[str, Any]) -> bool:
    return len(state["rings"]) == len(pool._rings) and all(
        _is_int(after, 0, _MOST) and _is_int(oldest, after - ring.capacity, after) and oldest >= 0
        for ring, (oldest, after) in zip(pool._rings, state["rings"], strict=True)
    )


def _are_open_rows(pool: TransitionWriter, state: Mapping[str, Any]) -> bool:
    rings = pool._rings
    return all(
        text == str(int(text))
        and _is_int(row - rings[int(text)].offset, 0, rings[int(text)].capacity - 1)
        for text, row in state["open_rows"].items()
    ) and all(0 <= int(text) < len(rings) for text in state["open_rows"])


def _is_schema(pool: TransitionWriter, state: Mapping[str, Any]) -> bool:
    n_finals = state["n_finals"]
    if state["schema"] is None:
        return n_finals == 0 and not any(after - oldest for oldest, after in state["rings"])
    columns, paired = state["schema"]["columns"], state["schema"]["paired"]
    return (
        _is_int(n_finals, 0, pool._pool_size if paired else 0)
        and len(set(paired)) == len(paired)
        and all(key in columns and successor_key(key) not in columns for key in paired)
        and all(
            text in _DTYPES.values() and all(_is_int(size, 0, _MOST) for size in shape)
            for text, shape in columns.values()
        )
    )


def _is_generator(state: Any) -> bool:
    np.random.PCG64().state = state  # raises if it is none
    return True


def _is_runner(state: Mapping[str, Any] | None) -> bool:
    return state is None or all(_is_int(state[k], 0, math.inf) for k in ("root", "n_runs"))


_SOUND: Mapping[str, Callable[[TransitionWriter, Mapping[str, Any]], bool]] = {
    "rings": _are_rings,
    "fed": lambda pool, state: (
        len(state["fed"]) == len(pool._rings) and all(type(fed) is bool for fed in state["fed"])
    ),
    "open_rows": _are_open_rows,
    "max_priority": lambda _, state: 0 <= float(state["max_priority"]) < math.inf,
    "sampling": lambda _, state: _is_generator(state["sampling"]),
    "routing": lambda _, state: _is_generator(state["routing"]),
    "runner": lambda _, state: _is_runner(state["runner"]),
    "schema": _is_schema,
}
"""What the text says, and whether that can be."""


def _keys(schema: Schema) -> str:
    return ", ".join(f"{key} {spec}" for key, spec in schema.specs.items())


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
        raise SpecError(
            f"this is not the state of a pool: it has no {METADATA_KEY!r}",
            fix="pass what state_dict() of a pool returned",
        )
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    try:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    except (TypeError, RuntimeError) as error:
        raise _damaged("the state", f"it has tensors that NumPy lacks ({error})") from error
    specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}

    def read(name: str, target: Array) -> None:
        target[...] = arrays[name]

    return restore(
        pool, Saved("the state", text, (_FORMAT_WITHOUT_CHECKSUMS, _FORMAT), specs, read)
    )


# Files --------------------------------------------------------------------------------------------


def write_file(path: str | Path, text: str, arrays: Mapping[str, Array]) -> None:
    """Write a safetensors file. What was at the path is replaced when all is written.

    Raises:
        SpecError: If the disk is full or the path cannot be written; what was there is kept.
    """
    path = Path(os.path.realpath(_named(path)))  # through a link, to the file that it means
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
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: text}}
    start = 0
    for name, array in {**arrays, _CHECKSUMS_KEY: checksums}.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _PAD)
    encoded = struct.pack("<Q", len(encoded)) + encoded
    file.write(encoded)
    checksums[0] = zlib.crc32(encoded)
    for number, array in enumerate(arrays.values(), 1):
        checksum = 0
        for chunk in _chunks(array):
            checksum = zlib.crc32(chunk, checksum)
            file.write(chunk)
        checksums[number] = checksum
    file.write(checksums.data)


def read_file(pool: TransitionWriter, path: str | Path) -> dict[str, Any]:
    """Restore a pool from a file.

    Raises:
        SpecError: If the file cannot be read, is damaged or holds another kind of pool; the pool is
            as before.
    """
    path = _named(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
            raise SpecError(f"{str(path)!r} is not a file", fix="load what save() wrote")
        with open(path, "rb", buffering=0) as file:
            return restore(pool, _saved(file, repr(str(path))))
    except OSError as error:
        raise SpecError(
            f"{str(path)!r} cannot be read: {error.strerror}",
            fix="load what save() wrote; this pool is as it was",
        ) from error


def _saved(file: BinaryIO, name: str) -> Saved:
    """The pool in a file, of which the header was read and found right."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if len(prefix) < 8 or not 0 < struct.unpack("<Q", prefix)[0] <= size - 8:
        raise _damaged(name, "it is no pool's file, or not the whole of one")
    (length,) = struct.unpack("<Q", prefix)
    encoded = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        header = json.loads(encoded)
        text = header.pop("__metadata__")[METADATA_KEY]
        specs, starts, end = _entries(header, 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise _damaged(name, "its header is not that of a pool's file") from error
    if end != size:
        raise _damaged(name, f"{end} bytes were written, {size} are there")
    if not isinstance(text, str):
        raise _damaged(name, "its header is not that of a pool's file")
    expected = None
    if _CHECKSUMS_KEY in specs:
        expected = _checksums(file, specs, starts, name)
        if expected.pop("") != zlib.crc32(encoded, zlib.crc32(prefix)):
            raise _damaged(name, "its header is not what was written")

    def read(key: str, target: Array) -> None:
        file.seek(starts[key])
        checksum = 0
        for chunk in _chunks(target):
            if _read_into(file, chunk) != len(chunk):
                raise _damaged(name, "it ended while it was read")
            checksum = zlib.crc32(chunk, checksum)
        if expected is not None and checksum != expected[key]:
            raise _damaged(name, f"the values of {key!r} are not what was written")

    specs.pop(_CHECKSUMS_KEY, None)
    kind = _FORMAT_WITHOUT_CHECKSUMS if expected is None else _FORMAT
    return Saved(name, text, (kind,), specs, read)


def _entries(
    header: Mapping[str, Any], start: int
) -> tuple[dict[str, TensorSpec], dict[str, int], int]:
    """Specs and places of the arrays of a file, and where they end; raises if they do not fit."""
    specs, starts, end = {}, {}, start
    for name, entry in header.items():
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        first, after = entry["data_offsets"]
        if not all(_is_int(number, 0, math.inf) for number in (*shape, first, after)):
            raise ValueError(name)
        if start + first != end or after - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(name)  # gaps, overlaps, another size than the shape's
        specs[name], starts[name], end = TensorSpec(shape, dtype), end, start + after
    return specs, starts, end


def _checksums(
    file: BinaryIO, specs: Mapping[str, TensorSpec], starts: Mapping[str, int], name: str
) -> dict[str, int]:
    """The checksum of each array, and as ``""`` that of the header."""
    others = [key for key in specs if key != _CHECKSUMS_KEY]
    found = np.zeros(1 + len(others), np.int64)
    file.seek(starts[_CHECKSUMS_KEY])
    if (
        specs[_CHECKSUMS_KEY] != TensorSpec(found.shape, found.dtype)
        or _read_into(file, _bytes(found)) != found.nbytes
    ):
        raise _damaged(name, "its checksums are not there")
    return dict(zip(("", *others), found.tolist(), strict=True))


def _read_into(file: BinaryIO, target: memoryview) -> int:
    """Bytes that were read: all of them, unless the file ends."""
    n_read = 0
    while n_read < len(target):
        n_more = file.readinto(target[n_read:])  # type: ignore[attr-defined]
        if not n_more:
            break
        n_read += n_more
    return n_read


def _chunks(array: Array) -> Iterator[memoryview]:
    view = _bytes(array)
    for begin in range(0, len(view), _CHUNK_BYTES):
        yield view[begin : begin + _CHUNK_BYTES]


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _named(path: Any) -> Path:
    try:
        named = Path(path)
        is_path = "\0" not in str(named)
    except TypeError:
        is_path = False
    if not is_path:
        raise SpecError(f"path is {path!r}", fix="pass the name of a file")
    return named


def _damaged(name: str, why: str) -> SpecError:
    return SpecError(
        f"{name} is damaged: {why}", fix="load another copy of it; this pool is as it was"
    )
