"""Trajectories in Parquet files: every bit comes back, and other libraries read them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpool import DictTensor, SpecError, TemporalDictTensor
from rlpool.integrations import parquet as module
from rlpool.integrations.parquet import from_parquet, to_parquet

from support.collected import (
    assert_same_bits,
    counting_episodes,
    counting_window,
    episodes_of_parts,
)
from support.programs import blocks_of, run_source

pyarrow = pytest.importorskip("pyarrow", reason='needs PyArrow: pip install "rlpool[parquet]"')
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "episodes.parquet"


# There and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("collect", [episodes_of_parts, counting_episodes, counting_window])
def test_what_a_batcher_returned_comes_back_bit_by_bit(collect: Any, path: Path) -> None:
    episodes = collect()
    to_parquet(episodes, path)
    got = from_parquet(path)
    assert_same_bits(got, episodes)
    assert list(got) == list(episodes)


dtypes = st.sampled_from([getattr(torch, name) for name in module._DTYPES])
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
names = st.sampled_from(["frame", "_frame", "pose/0", "a b", "info/task", "lengths", "length.x"])


@st.composite
def batches(draw: st.DrawFn) -> TemporalDictTensor:
    """Random bits of any dtype: every NaN there is, both zeros, infinities."""
    lengths = torch.tensor(draw(st.lists(st.integers(0, 6), max_size=5)), dtype=torch.int64)
    n_timesteps = draw(st.integers(int(lengths.max()) if len(lengths) else 0, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))

    def bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.from_numpy(random.random(shape) < 0.5)
        kind = np.dtype(str(dtype).removeprefix("torch."))
        content = random.bytes(int(np.prod(shape)) * kind.itemsize)
        return torch.from_numpy(np.frombuffer(bytearray(content), kind).reshape(shape))

    def padded(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = bits(dtype, (len(lengths), n_timesteps, *shape)).numpy().copy()
        tensor[np.arange(n_timesteps) >= lengths.numpy()[:, None]] = 0
        return torch.from_numpy(tensor)

    steps = draw(st.dictionaries(names, st.tuples(dtypes, shapes), min_size=1))
    info = draw(st.dictionaries(st.sampled_from(["seed", "e/x"]), st.tuples(dtypes, shapes)))
    return TemporalDictTensor(
        {key: padded(*spec) for key, spec in steps.items()},
        lengths,
        {key: bits(dtype, (len(lengths), *shape)) for key, (dtype, shape) in info.items()},
    )


@given(batches(), st.sampled_from([1, 100, 2**25]))
def test_any_trajectories_come_back_bit_by_bit_from_groups_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, batch: TemporalDictTensor, group_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_GROUP_BYTES", group_bytes)
        to_parquet(batch, path)
    assert_same_bits(from_parquet(path), batch)


def test_large_results_are_written_in_groups_of_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = TemporalDictTensor({"frame": torch.rand(100, 10, 16)})  # 640 bytes per row
    monkeypatch.setattr(module, "_GROUP_BYTES", 6_400)
    to_parquet(batch, path)
    file = pq.ParquetFile(path)
    rows = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    assert sum(rows) == 100
    assert max(rows) <= 11
    assert len(rows) <= 12
    assert_same_bits(from_parquet(path), batch)


def test_parts_are_written_as_they_come(path: Path) -> None:
    every = counting_episodes()
    is_written_at: list[int] = []

    def parts() -> Iterator[TemporalDictTensor]:
        for row in every.unfold():
            is_written_at.append(sum(file.stat().st_size for file in path.parent.iterdir()))
            yield row.shorten()

    to_parquet(parts(), path)
    assert is_written_at[0] == 0 < is_written_at[1] < is_written_at[2]
    assert_same_bits(from_parquet(path), every)


def test_the_longest_part_says_how_many_steps_rows_have(path: Path) -> None:
    short, padded = (
        TemporalDictTensor({"reward": torch.zeros(1, n)}, torch.tensor([1])) for n in (1, 7)
    )
    to_parquet([short, padded], path)
    assert from_parquet(path)["reward"].shape == (2, 7)


def test_a_file_that_arrow_has_written_again_is_read(path: Path) -> None:
    episodes = counting_episodes()
    to_parquet(episodes, path)
    pq.write_table(pq.read_table(path).slice(0, 2), path)
    assert_same_bits(from_parquet(path), episodes.slice(0, 2))


# Other libraries ----------------------------------------------------------------------------------


def assert_reads(path: Path, read: Any, *, keeps_dtype: bool = True) -> None:
    """What another library reads, as cells by column, is what the episodes are."""
    episodes = episodes_of_parts()
    to_parquet(episodes, path)
    columns = read(path)
    assert list(columns["length"]) == [3, 3, 3]
    np.testing.assert_array_equal(columns["info/seed"], episodes.info["seed"])
    for key in ("image", "_image", "pose/1", "is_open", "_reward", "_done"):
        for row, expected in enumerate(episodes[key].numpy()):
            cell = columns[key][row]
            is_image = isinstance(cell[0], bytes)
            got = np.frombuffer(b"".join(cell), np.uint8) if is_image else np.stack(cell)
            assert got.dtype == expected.dtype or not keeps_dtype, key
            np.testing.assert_array_equal(got.reshape(expected.shape), expected)


def test_pandas_reads_it(path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is to read the file")
    assert_reads(path, pandas.read_parquet)


def test_polars_reads_it(path: Path) -> None:
    polars = pytest.importorskip("polars", reason="polars is to read the file")

    def read(path: Path) -> Any:
        frame = polars.read_parquet(path)
        images = {name: frame[name].to_list() for name in ("image", "_image")}
        return {**{column.name: column.to_numpy() for column in frame}, **images}

    assert_reads(path, read)


def test_datasets_reads_it(path: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is to read the file")

    def read(path: Path) -> Any:
        rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
        assert rows.features["_reward"].feature.dtype == "float32"
        return rows[:]  # as lists of Python

    assert_reads(path, read, keeps_dtype=False)


# What is refused ----------------------------------------------------------------------------------


def test_a_missing_pyarrow_is_asked_for_by_extra(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'rlpool\[parquet\]'"):
        to_parquet(counting_episodes(), path)
    with pytest.raises(ImportError, match=r"pip install 'rlpool\[parquet\]'"):
        from_parquet(path)


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([], "no keys to write"),
        (TemporalDictTensor({}), "no keys to write"),
        (DictTensor({"frame": torch.zeros(2)}), "'frame'.* pass a TemporalDictTensor"),
        (5, "trajectories are int 5"),
        (TemporalDictTensor({"frame": torch.zeros(2, 3)}).index(0), "no batch dimension"),
        (TemporalDictTensor({"a": torch.zeros(1, 1, dtype=torch.bfloat16)}), "'a' is bfloat16"),
        (TemporalDictTensor({"length": torch.zeros(2, 3)}), "'length' is the name of another"),
        (
            TemporalDictTensor({"info/a": torch.zeros(1, 1)}, None, {"a": torch.zeros(1)}),
            "'info/a' is the name of another",
        ),
        (
            [
                TemporalDictTensor({"a": torch.zeros(1, 1)}),
                TemporalDictTensor({"b": torch.zeros(1, 1)}),
            ],
            r"part 1 has the keys \['b'\]",
        ),
    ],
)
def test_what_a_file_cannot_hold_is_refused_and_leaves_no_file(
    trajectories: Any, message: str, path: Path
) -> None:
    with pytest.raises(SpecError, match=f"(?s){message}"):
        to_parquet(trajectories, path)
    assert list(path.parent.iterdir()) == []


def test_a_failure_in_the_middle_keeps_the_file_that_was_there(path: Path) -> None:
    episodes = counting_episodes()
    to_parquet(episodes, path)

    def parts() -> Iterator[TemporalDictTensor]:
        yield episodes
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_parquet(parts(), path)
    assert list(path.parent.iterdir()) == [path]
    assert_same_bits(from_parquet(path), episodes)


def test_a_place_where_no_file_can_be_is_named_before_anything_is_collected(path: Path) -> None:
    def parts() -> Iterator[TemporalDictTensor]:
        pytest.fail("collected for nothing")
        yield

    with pytest.raises(IsADirectoryError, match=str(path.parent)):
        to_parquet(parts(), path.parent)
    missing = path.parent / "missing" / "episodes.parquet"
    with pytest.raises(FileNotFoundError, match=str(missing.parent)):
        to_parquet(parts(), missing)
    for wrong in (None, 5):
        with pytest.raises(SpecError, match="path is"):
            to_parquet(parts(), wrong)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="path is"):
            from_parquet(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["pipe", "/dev/null"])
def test_pipes_and_devices_are_neither_waited_for_nor_replaced(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / name)

    def parts() -> Iterator[TemporalDictTensor]:
        pytest.fail("collected for nothing")
        yield

    for path in (tmp_path / name, tmp_path / "link"):
        with pytest.raises(SpecError, match="cannot be written: it is not a file"):
            to_parquet(parts(), path)
        with pytest.raises(SpecError, match="it is not a file"):
            from_parquet(path)
        assert not path.is_file()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_and_the_file_that_it_leads_to_is_written(
    is_there: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path, link = folder / "episodes.parquet", tmp_path / "link"
    link.symlink_to(path)
    if is_there:
        path.write_text("something else")
    to_parquet(counting_episodes(), link)
    assert link.is_symlink()
    assert not path.is_symlink()
    assert_same_bits(from_parquet(path), counting_episodes())
    assert [*folder.iterdir()] == [path]


def test_a_missing_file_is_no_bad_file(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        from_parquet(path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[200:1000] = bytes(800)
    path.write_bytes(content)


def without_metadata(path: Path) -> None:
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)


def without_a_column(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["action"]), path)


def with_a_shorter_list(path: Path) -> None:
    table = pq.read_table(path)
    field = table.schema.field("action")
    lists = pyarrow.array([[1, 2], [3], [4], [5]], type=field.type)
    pq.write_table(table.set_column(table.schema.get_field_index("action"), field, lists), path)


def with_strange_metadata(path: Path) -> None:
    pq.write_table(pq.read_table(path).replace_schema_metadata({"rlpool": "[1, 2]"}), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "cannot be read as a Parquet file"),
        (flipped, "cannot be read as a Parquet file"),
        (lambda path: path.write_text("frame,action\n"), "cannot be read as a Parquet file"),
        (lambda path: [path.unlink(), path.mkdir()], "cannot be read as a Parquet file"),
        (without_metadata, "was not written by to_parquet"),
        (with_strange_metadata, "not those that its metadata tells"),
        (without_a_column, "not those that its metadata tells"),
        (with_a_shorter_list, "'action' of .* are not as long as 'length' says"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(damage: Any, message: str, path: Path) -> None:
    to_parquet(counting_episodes(), path)
    damage(path)
    with pytest.raises(SpecError, match=message) as caught:
        from_parquet(path)
    assert str(path) in str(caught.value)
    assert "fix:" in str(caught.value)
    shutil.rmtree(path, ignore_errors=True)


def test_no_bit_that_flips_changes_what_is_read(path: Path) -> None:
    steps = {"frame": torch.rand(2, 5, 3), "image": torch.ones(2, 5, 2, 2, dtype=torch.uint8)}
    batch = TemporalDictTensor({**steps, "empty": torch.zeros(2, 5, 0, 2)}, torch.tensor([4, 2]))
    to_parquet(batch, path)
    expected = from_parquet(path)
    content = path.read_bytes()
    places = [place for place in range(len(content)) if place % 9 == 0]
    for key in (b"rlpool", b"rlpool_n_timesteps"):  # and what says shapes and padding
        start = content.rindex(key) - 4
        places += range(start, start + 40)
    n_refused = 0
    for number, place in enumerate(places):
        damaged = bytearray(content)
        damaged[place] ^= 1 << number % 8
        path.write_bytes(damaged)
        try:
            got = from_parquet(path)
        except SpecError:
            n_refused += 1
        else:
            assert_same_bits(got, expected)
    assert n_refused > len(places) / 3


def test_files_without_checksums_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_with_checksum", lambda key, text: {key: text})
    write = pq.ParquetWriter

    def plain(*arguments: Any, write_page_checksum: bool, **options: Any) -> Any:
        return write(*arguments, **options)

    monkeypatch.setattr(pq, "ParquetWriter", plain)
    to_parquet(counting_window(), path)
    assert_same_bits(from_parquet(path), counting_window())


# The page -----------------------------------------------------------------------------------------


def test_the_programs_of_the_page_run(
    program_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas", reason="pandas is to read the file")
    for source in blocks_of("docs/neighbours/parquet.md"):
        run_source(source, program_folder)
    output = capfd.readouterr().out
    assert re.search(r"frame +float32 \[96, \d+, 4\]", output)
    assert re.search(r"average return: \d\d", output)
