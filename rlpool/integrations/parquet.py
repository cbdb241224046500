"""Trajectories as Parquet files, one row per episode, and back.

::

    column            type                            holds
    length            int64                           steps of the episode
    reward, ...       list<float>                     one number per step
    frame, ...        list<fixed_size_list<float>>    one array per step, flattened
    image, ...        list<large_binary>              the bytes of one image per step
    info/seed, ...    int64, fixed_size_list<...>     one value per episode

Columns have the names and dtypes of the keys, and no nulls. Images are steps of uint8 with two or
more dimensions: number by number, they would take four times as long, and more than twice the
memory. Shapes are in the schema's metadata under ``rlpool``, as JSON. pandas, polars and
``datasets`` read all but that.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlpool.data.dict_tensor import check_alike
from rlpool.data.rows import kind, listed
from rlpool.data.specs import fitted
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.machine.files import file_at, replaced
from rlpool.machine.imports import import_extra

__all__ = ["from_parquet", "to_parquet"]

FilePath: TypeAlias = str | os.PathLike[str]

_LENGTH = "length"
_METADATA, _N_TIMESTEPS = "rlpool", "rlpool_n_timesteps"
_GROUP_BYTES = 2**25
"""Bytes of the steps in a row group, about: what writing and reading hold several times."""

_DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64"),
)
"""What torch, NumPy and Parquet have, by the name that files use."""


def to_parquet(
    trajectories: TemporalDictTensor | Iterable[TemporalDictTensor], path: FilePath
) -> None:
    """Write trajectories into a Parquet file, one row per episode.

    Every bit of the steps, of ``lengths`` and of ``info`` is kept; padding is not written. Rows are
    written in groups of about 32 MiB, so that little is held twice. ``_frame`` is as large as
    ``frame``: leave it out with ``get(keys)`` where the file should be small.

    Args:
        trajectories: ``[B, T, ...]`` on any device; or an iterable of them, such as a generator
            that collects them, with the same keys, dtypes and shapes.
        path: The file. One that exists is replaced, when the new one is complete; of a link, the
            file that it leads to.

    Raises:
        ImportError: If pyarrow is not installed.
        OSError: If the file cannot be written.
        SpecError: If there is nothing to write, parts differ, a dtype is none of Parquet's (such as
            bfloat16), two columns would have the same name, ``path`` is no path, or there is a
            named pipe or a device.

    Example:
        >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
        >>> to_parquet(batch, "episodes.parquet")
        >>> from_parquet("episodes.parquet")["reward"]
        tensor([[1., 1., 1.],
                [1., 0., 0.]])
    """
    arrow, parquet = _pyarrow()
    _check(path)
    if Path(path).is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a directory, not the name of a file")
    try:
        target = file_at(path)
    except ValueError as error:
        what = f"{str(path)!r} cannot be written: {error}"
        raise SpecError(what, fix="choose another path") from None
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {str(target.parent)!r} for the file")
    is_one = isinstance(trajectories, TemporalDictTensor)
    parts = _alike([trajectories] if is_one else trajectories)
    first = next(parts, None)
    if first is None or not first.keys():
        raise SpecError("there are no keys to write", fix="pass at least one batch with steps")
    contents = _Contents.of(first)
    schema = contents.schema(arrow)
    n_timesteps = first.n_timesteps()
    # A dictionary is for values that repeat, which most observations do not.
    options = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    with (
        replaced(target) as unfinished,
        parquet.ParquetWriter(unfinished, schema, **options) as writer,
    ):
        for part in itertools.chain([first], parts):
            n_timesteps = max(n_timesteps, part.n_timesteps())
            for rows in _groups(part):
                writer.write_table(_table(arrow, schema, part[rows]))
        writer.add_key_value_metadata(_with_checksum(_N_TIMESTEPS, str(n_timesteps)))


def from_parquet(path: FilePath) -> TemporalDictTensor:
    """Read what ``to_parquet`` wrote.

    Args:
        path: The file.

    Returns:
        All episodes, ``[B, T, ...]`` with the keys, dtypes and bits that were written, ``lengths``
        and ``info``. T is that of what was written, the largest if there were several parts.
        Padding is zero.

    Raises:
        ImportError: If pyarrow is not installed.
        FileNotFoundError: If there is no file.
        SpecError: If it is damaged, or not a file of ``to_parquet``.
    """
    arrow, parquet = _pyarrow()
    _check(path)
    try:
        with parquet.ParquetFile(file_at(path), page_checksum_verification=True) as file:
            return _read(arrow, file, repr(str(path)))
    except (FileNotFoundError, SpecError):
        raise
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise SpecError(
            f"{str(path)!r} cannot be read as a Parquet file: {error}",
            fix="write it again with to_parquet, it is damaged or of another kind",
        ) from error


def _check(path: Any) -> None:
    if not isinstance(path, str | os.PathLike):
        raise SpecError(f"path is {kind(path)}", fix='pass a file, such as "episodes.parquet"')


def _pyarrow() -> tuple[Any, Any]:
    return import_extra("pyarrow", "parquet"), import_extra("pyarrow.parquet", "parquet")


# What a file holds --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Contents:
    """Name of the dtype and shape, of a step or of a row of ``info``, by key."""

    steps: dict[str, tuple[str, list[int]]]
    info: dict[str, tuple[str, list[int]]]

    @classmethod
    def of(cls, batch: TemporalDictTensor) -> _Contents:
        """What a batch holds; ``SpecError`` if Parquet cannot."""
        contents = cls(_described(batch.items(), 2), _described(batch.info.items(), 1))
        taken = [key for key in contents.steps if key == _LENGTH or key in contents.info_columns]
        if taken:
            raise SpecError(f"key {taken[0]!r} is the name of another column", fix="rename it")
        return contents

    @property
    def info_columns(self) -> dict[str, tuple[str, list[int]]]:
        """The same as ``info``, by column."""
        return {f"info/{key}": value for key, value in self.info.items()}

    def schema(self, arrow: Any) -> Any:
        """The schema of a file with these contents; what has no values has no column."""

        def required(name: str, kind: Any) -> Any:
            return arrow.field(name, kind, nullable=False)

        def values(dtype: str, shape: list[int]) -> Any:
            if dtype == "uint8" and len(shape) > 1:
                return arrow.large_binary()
            number = arrow.from_numpy_dtype(np.dtype(dtype))
            return arrow.list_(required("element", number), math.prod(shape)) if shape else number

        columns = {_LENGTH: arrow.int64()}
        for key, (dtype, shape) in self.steps.items():
            if 0 not in shape:
                columns[key] = arrow.list_(required("element", values(dtype, shape)))
        for name, (dtype, shape) in self.info_columns.items():
            if 0 not in shape:
                columns[name] = values(dtype, shape)
        fields = [required(name, kind) for name, kind in columns.items()]
        return arrow.schema(fields, metadata=_with_checksum(_METADATA, json.dumps(asdict(self))))


def _described(
    tensors: Iterable[tuple[str, Tensor]], n_leading: int
) -> dict[str, tuple[str, list[int]]]:
    described = {}
    for key, tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise SpecError(
                f"key {key!r} is {kind(tensor)}, which Parquet does not have",
                fix="convert it, for example with Tensor.float",
            )
        described[key] = name, list(tensor.shape[n_leading:])
    return described


def _with_checksum(key: str, text: str) -> dict[str, str]:
    """An entry of the metadata, which Parquet has no checksums for, and its own."""
    return {key: text, f"{key}_crc32": str(zlib.crc32(text.encode()))}


def _checked(metadata: Mapping[bytes, bytes] | None, key: str) -> bytes | None:
    """An entry of the metadata; ``ValueError`` if it is not what was written."""
    metadata = metadata or {}
    text, checksum = metadata.get(key.encode()), metadata.get(f"{key}_crc32".encode())
    if checksum is not None and checksum != str(zlib.crc32(text or b"")).encode():
        raise ValueError(f"{key!r} of its metadata is not what was written")
    return text


# Writing ------------------------------------------------------------------------------------------


def _alike(parts: Any) -> Iterator[TemporalDictTensor]:
    """Parts, each checked against the first when it is asked for."""
    if not isinstance(parts, Iterable):
        raise SpecError(f"trajectories are {kind(parts)}", fix="pass a TemporalDictTensor")
    first = None
    for number, part in enumerate(parts):
        (part,) = listed([part], TemporalDictTensor, "trajectories")
        part.n_elems()  # refuses a single trajectory
        first = part if first is None else first
        check_alike(first, part, 2, f"part {number}")
        check_alike(first.info, part.info, 1, f"the info of part {number}")
        yield part


def _groups(batch: TemporalDictTensor) -> Iterator[slice]:
    """Rows of ``_GROUP_BYTES`` of steps, or single ones that are larger."""
    n_bytes = sum(t.element_size() * math.prod(t.shape[2:]) for t in batch.values())
    ends = np.cumsum(batch.lengths.cpu().numpy()) * max(1, n_bytes)
    inner = np.flatnonzero(np.diff(ends // _GROUP_BYTES)) + 1
    for start, stop in itertools.pairwise([0, *inner.tolist(), batch.n_elems()]):
        if stop > start:
            yield slice(start, stop)


def _table(arrow: Any, schema: Any, batch: TemporalDictTensor) -> Any:
    """A row group; Arrow shares the arrays of numbers that are cut out of the padding."""
    lengths = batch.lengths.cpu().numpy()
    is_step = np.arange(batch.n_timesteps()) < lengths[:, None]
    offsets = arrow.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
    columns = []
    for field in schema:
        if field.name == _LENGTH:
            columns.append(arrow.array(lengths))
        elif field.name in batch:
            numbers = batch[field.name].numpy(force=True)[is_step]
            values = _values(arrow, numbers, field.type.value_type)
            columns.append(arrow.ListArray.from_arrays(offsets, values, type=field.type))
        else:
            numbers = batch.info[field.name.removeprefix("info/")].numpy(force=True)
            columns.append(_values(arrow, numbers, field.type))
    return arrow.Table.from_arrays(columns, schema=schema)


def _values(arrow: Any, numbers: NDArray, kind: Any) -> Any:
    """Numbers ``[N]``, or arrays ``[N, ...]`` flattened to lists of a fixed size, or to bytes."""
    flat = numbers.reshape(-1)
    if arrow.types.is_large_binary(kind):
        bounds = np.arange(len(numbers) + 1) * math.prod(numbers.shape[1:])
        buffers = [None, arrow.py_buffer(bounds), arrow.py_buffer(flat)]
        return arrow.Array.from_buffers(kind, len(numbers), buffers)
    if arrow.types.is_fixed_size_list(kind):
        return arrow.FixedSizeListArray.from_arrays(arrow.array(flat), type=kind)
    return arrow.array(flat)


# Reading ------------------------------------------------------------------------------------------


def _read(arrow: Any, file: Any, name: str) -> TemporalDictTensor:
    """All episodes of an open file, one row group after another."""
    contents = _contents_of(arrow, file.schema_arrow, name)
    lengths = np.array(file.read([_LENGTH])[_LENGTH].to_numpy())
    # It is missing where another program has written the file again: rows are as long as needed.
    told = _checked(file.metadata.metadata, _N_TIMESTEPS) or b"0"
    n_timesteps = max(int(lengths.max(initial=0)), int(told))
    size = (len(lengths), n_timesteps)
    steps = {k: np.zeros((*size, *shape), dtype) for k, (dtype, shape) in contents.steps.items()}
    info = {k: np.zeros((size[0], *shape), dtype) for k, (dtype, shape) in contents.info.items()}
    n_rows = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    if not len(lengths) == sum(n_rows) == file.metadata.num_rows:
        raise ValueError(f"{len(lengths)} episodes in groups of {n_rows}")
    start = 0
    for number in range(file.num_row_groups):
        table = file.read_row_group(number)
        rows = slice(start, start := start + table.num_rows)
        is_step = np.arange(n_timesteps) < lengths[rows, None]
        for key, array in steps.items():
            if 0 in array.shape[2:]:
                continue
            lists = table[key].combine_chunks()
            if not np.array_equal(np.diff(lists.offsets), lengths[rows]):
                what = f"the lists of column {key!r} of {name} are not as long as {_LENGTH!r} says"
                raise SpecError(what, fix="write it again with to_parquet")
            numbers = _numbers(arrow, lists.flatten(), array.shape[2:])
            array[rows][is_step] = fitted(f"column {key!r} of {name}", numbers, array.dtype)
        for key, array in info.items():
            if 0 not in array.shape[1:]:
                values = table[f"info/{key}"].combine_chunks()
                numbers = _numbers(arrow, values, array.shape[1:])
                array[rows] = fitted(f"info {key!r} of {name}", numbers, array.dtype)
    return TemporalDictTensor(
        {key: torch.from_numpy(array) for key, array in steps.items()},
        torch.from_numpy(lengths),
        {key: torch.from_numpy(array) for key, array in info.items()},
    )


def _contents_of(arrow: Any, schema: Any, name: str) -> _Contents:
    """What the metadata of a file tells, which is what it has columns for."""
    fix = "read it with pandas or pyarrow, and make a TemporalDictTensor with from_packed"
    told = _checked(schema.metadata, _METADATA)
    if told is None:
        raise SpecError(f"{name} was not written by to_parquet: it has no shapes of steps", fix=fix)
    try:
        contents = _Contents(**json.loads(told))
        is_same = schema.equals(contents.schema(arrow))
    except (AttributeError, KeyError, TypeError, ValueError):
        is_same = False
    if not is_same:
        what = f"the columns of {name} are not those that its metadata tells: {schema.names}"
        raise SpecError(what, fix=fix)
    return contents


def _numbers(arrow: Any, values: Any, shape: tuple[int, ...]) -> Any:
    """An array ``[N, *shape]`` of numbers, of lists of a fixed size, or of bytes."""
    if arrow.types.is_large_binary(values.type):
        return np.frombuffer(b"".join(values.to_pylist()), np.uint8).reshape(-1, *shape)
    numbers = values.flatten() if arrow.types.is_fixed_size_list(values.type) else values
    return numbers.to_numpy(zero_copy_only=False).reshape(-1, *shape)
