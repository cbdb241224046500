"""Trajectories as Parquet files, one row per episode, and back.

::

    column            type                            holds
    length            int64                           steps of the episode
    reward, ...       list<float>                     one number per step
    frame, ...        list<fixed_size_list<float>>    one array per step, flattened
    info/seed, ...    int64, fixed_size_list<...>     one value per episode

Columns have the names and dtypes of the keys, and no nulls. Shapes of steps, which a list does not
have, are in the schema's metadata under ``rlpool``, as JSON. pandas, polars and ``datasets`` read
all but that.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlpool.data.dict_tensor_base import check_alike, kind, listed
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.machine.extras import import_extra

__all__ = ["from_parquet", "to_parquet"]

FilePath: TypeAlias = str | os.PathLike[str]

_LENGTH = "length"
_METADATA, _N_TIMESTEPS = "rlpool", "rlpool_n_timesteps"
_GROUP_BYTES = 2**26
"""Bytes of the steps in a row group, about: what writing and reading hold twice."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32),
        *(torch.int32, torch.uint64, torch.int64, torch.float16, torch.float32, torch.float64),
    )
}
"""What both torch and Parquet have, by the name that files use."""


def to_parquet(
    trajectories: TemporalDictTensor | Iterable[TemporalDictTensor], path: FilePath
) -> None:
    """Write trajectories into a Parquet file, one row per episode.

    Every bit of the steps, of ``lengths`` and of ``info`` is kept; padding is not written. Rows are
    written in groups of about 64 MiB, so that little is held twice. ``_frame`` is as large as
    ``frame``: leave it out with ``get(keys)`` where the file should be small.

    Args:
        trajectories: ``[B, T, ...]`` on any device; or an iterable of them, such as a generator
            that collects them, with the same keys, dtypes and shapes.
        path: The file. One that exists is replaced, when the new one is complete.

    Raises:
        ImportError: If pyarrow is not installed.
        OSError: If the file cannot be written.
        SpecError: If there is nothing to write, parts differ, a dtype is none of Parquet's (such as
            bfloat16), or two columns would have the same name.

    Example:
        >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
        >>> to_parquet(batch, "episodes.parquet")
        >>> from_parquet("episodes.parquet")["reward"]
        tensor([[1., 1., 1.],
                [1., 0., 0.]])
    """
    arrow, parquet = _pyarrow()
    is_one = isinstance(trajectories, TemporalDictTensor)
    parts = _alike([trajectories] if is_one else trajectories)
    first = next(parts, None)
    if first is None or not first.keys():
        raise SpecError("there are no keys to write", fix="pass at least one batch with steps")
    contents = _Contents.of(first)
    schema = contents.schema(arrow)
    n_timesteps = first.n_timesteps()
    path = Path(path)
    unfinished = path.with_name(f".{uuid.uuid4().hex}")
    try:
        # Dictionaries would take long, and do not tell all NaNs from each other.
        options = {"compression": "zstd", "use_dictionary": False}
        with parquet.ParquetWriter(unfinished, schema, **options) as writer:
            for part in itertools.chain([first], parts):
                n_timesteps = max(n_timesteps, part.n_timesteps())
                for rows in _groups(part):
                    writer.write_table(_table(arrow, schema, part[rows]))
            writer.add_key_value_metadata({_N_TIMESTEPS: str(n_timesteps)})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


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
    try:
        with parquet.ParquetFile(path) as file:
            return _read(arrow, file, repr(str(path)))
    except FileNotFoundError:
        raise
    except (OSError, arrow.ArrowException) as error:
        raise SpecError(
            f"{str(path)!r} cannot be read as a Parquet file: {error}",
            fix="write it again with to_parquet, it is damaged or of another kind",
        ) from error


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
        return arrow.schema(fields, metadata={_METADATA: json.dumps(asdict(self))})

    def empty(self, n_elems: int, n_timesteps: int) -> TemporalDictTensor:
        """Rows of zeros, of length 0."""
        size = (n_elems, n_timesteps)
        return TemporalDictTensor(
            {key: torch.zeros(*size, *s, dtype=_DTYPES[d]) for key, (d, s) in self.steps.items()},
            torch.zeros(n_elems, dtype=torch.int64),
            {key: torch.zeros(n_elems, *s, dtype=_DTYPES[d]) for key, (d, s) in self.info.items()},
        )


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


# Writing ------------------------------------------------------------------------------------------


def _alike(parts: Any) -> Iterator[TemporalDictTensor]:
    """Parts, each checked against the first when it is asked for."""
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
    """A row group; arrays of numbers are shared with Arrow, not copied."""
    lengths = batch.lengths.cpu().numpy()
    offsets = arrow.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
    steps, columns = batch.flatten(), []
    for field in schema:
        if field.name == _LENGTH:
            columns.append(arrow.array(lengths))
        elif field.name in steps:
            values = _values(arrow, steps[field.name], field.type.value_type)
            columns.append(arrow.ListArray.from_arrays(offsets, values, type=field.type))
        else:
            tensor = batch.info[field.name.removeprefix("info/")]
            columns.append(_values(arrow, tensor, field.type))
    return arrow.Table.from_arrays(columns, schema=schema)


def _values(arrow: Any, tensor: Tensor, kind: Any) -> Any:
    """Numbers ``[N]``, or arrays ``[N, ...]`` flattened to lists of a fixed size."""
    numbers = arrow.array(tensor.numpy(force=True).reshape(-1))
    is_list = arrow.types.is_fixed_size_list(kind)
    return arrow.FixedSizeListArray.from_arrays(numbers, type=kind) if is_list else numbers


# Reading ------------------------------------------------------------------------------------------


def _read(arrow: Any, file: Any, name: str) -> TemporalDictTensor:
    """All episodes of an open file, one row group after another."""
    contents = _contents_of(arrow, file.schema_arrow, name)
    lengths = file.read([_LENGTH])[_LENGTH].to_numpy()
    metadata = file.metadata.metadata or {}
    # It is missing where another program has written the file again: rows are as long as needed.
    n_timesteps = max(int(lengths.max(initial=0)), int(metadata.get(_N_TIMESTEPS.encode(), 0)))
    every, start = contents.empty(len(lengths), n_timesteps), 0
    for number in range(file.num_row_groups):
        part = _part(arrow, file.read_row_group(number), contents, name)
        rows = torch.arange(part.n_elems())
        every.copy_(part, rows, start + rows)
        start += len(rows)
    return every


def _contents_of(arrow: Any, schema: Any, name: str) -> _Contents:
    """What the metadata of a file tells, which is what it has columns for."""
    fix = "read it with pandas or pyarrow, and make a TemporalDictTensor with from_packed"
    if _METADATA.encode() not in (schema.metadata or {}):
        raise SpecError(f"{name} was not written by to_parquet: it has no shapes of steps", fix=fix)
    try:
        contents = _Contents(**json.loads(schema.metadata[_METADATA.encode()]))
        is_same = schema.equals(contents.schema(arrow))
    except (AttributeError, KeyError, TypeError, ValueError):
        is_same = False
    if not is_same:
        what = f"the columns of {name} are not those that its metadata tells: {schema.names}"
        raise SpecError(what, fix=fix)
    return contents


def _part(arrow: Any, table: Any, contents: _Contents, name: str) -> TemporalDictTensor:
    """The episodes of a row group."""
    lengths = table[_LENGTH].to_numpy()
    steps = {}
    for key, (dtype, shape) in contents.steps.items():
        lists = table[key].combine_chunks() if 0 not in shape else None
        if lists is not None and not np.array_equal(np.diff(lists.offsets), lengths):
            what = f"the lists of column {key!r} of {name} are not as long as {_LENGTH!r} says"
            raise SpecError(what, fix="write it again with to_parquet")
        values = None if lists is None else lists.flatten()
        steps[key] = _tensor(arrow, values, int(lengths.sum()), dtype, shape)
    info = {}
    for column, (dtype, shape) in contents.info_columns.items():
        values = table[column].combine_chunks() if 0 not in shape else None
        info[column.removeprefix("info/")] = _tensor(arrow, values, len(lengths), dtype, shape)
    return TemporalDictTensor.from_packed(steps, torch.tensor(lengths), info)


def _tensor(arrow: Any, values: Any, n: int, dtype: str, shape: list[int]) -> Tensor:
    """A tensor ``[n, *shape]`` of the values of a column, ``None`` for no values."""
    if values is None:
        return torch.zeros(n, *shape, dtype=_DTYPES[dtype])
    numbers = values.flatten() if arrow.types.is_fixed_size_list(values.type) else values
    # A copy: torch refuses to share memory that may not be written.
    return torch.from_numpy(np.array(numbers.to_numpy(zero_copy_only=False))).view(n, *shape)
