"""Rows come from files and task folders of every kind, from any row on; damage is a clear error."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from swerl.core.errors import InputError, TaskError
from swerl.tasks.rows import file_rows, splits_in
from swerl.tasks.task_folders import MAX_BYTES


def rows(count: int) -> list[dict[str, object]]:
    return [{"id": str(number), "FAIL_TO_PASS": ["t"] * number} for number in range(count)]


def write_parquet(path: Path, table_rows: list[dict[str, object]], group: int = 60) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(table_rows), path, row_group_size=group)


def write_archive(path: Path, files: Mapping[str, bytes], mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def test_the_files_of_a_folder_are_read_one_after_the_other(tmp_path: Path) -> None:
    all_rows = rows(209)
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in all_rows[:3]))
    write_parquet(tmp_path / "sub" / "b.parquet", all_rows[3:203])
    (tmp_path / "sub" / "c.jsonl").write_text("\n".join(map(json.dumps, all_rows[203:])))
    assert list(file_rows(tmp_path)) == all_rows


def lines_of(count: int) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows(count)).encode()


def zstd(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("rows.jsonl.gz", gzip.compress),
        ("rows.jsonl.zst", zstd),
        ("rows.jsonl", lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")),
        ("rows.json", lambda data: json.dumps([*map(json.loads, data.split(b"\n")[:-1])]).encode()),
        ("rows.json", lambda data: json.dumps(rows(40), indent=1).encode()),
    ],
    ids=["gzip", "zstd", "windows", "list", "pretty-list"],
)
def test_lines_are_read_however_they_are_packed(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / name).write_bytes(pack(lines_of(40)))
    assert list(file_rows(tmp_path / name)) == rows(40)


def test_numbers_that_json_lacks_are_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"hints": NaN, "id": "a"}\n{"id": NaN\n[{"id": -Infinity}]\n')
    first, bad, listed_row = file_rows(path)
    assert first == {"hints": None, "id": "a"}
    assert isinstance(bad, TaskError) and isinstance(listed_row, TaskError)
    (tmp_path / "rows.json").write_text('[{"id": NaN}, 7]')
    first, bad = file_rows(tmp_path / "rows.json")
    assert first == {"id": None} and isinstance(bad, TaskError)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("rows.jsonl.gz", gzip.compress(lines_of(4000))[:-200], "cannot read rows"),
        ("rows.jsonl.gz", b"\x1f\x8b nothing", "cannot read rows"),
        ("rows.json", b'[{"id": 1}, {', "not a JSON list"),
        (
            "rows.jsonl",
            b"version https://git-lfs.github.com/spec/v1\noid",
            "only a Git LFS pointer",
        ),
        (
            "rows.parquet",
            b"version https://git-lfs.github.com/spec/v1\noid",
            "only a Git LFS pointer",
        ),
        ("rows.parquet", b"no parquet", "rows.parquet"),
        ("rows.tar.gz", b"no archive", "cannot be unpacked"),
        ("rows.csv", b"id\n1\n", "neither JSONL nor Parquet"),
    ],
)
def test_files_that_cannot_be_read_are_one_clear_error(
    tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=reason):
        list(file_rows(tmp_path / name))


def test_a_folder_like_the_hubs_is_read_split_by_split(tmp_path: Path) -> None:
    all_rows = rows(6)
    (tmp_path / "data").mkdir()
    for part in range(2):
        name = f"test-0000{part}-of-00002.parquet"
        write_parquet(tmp_path / "data" / name, all_rows[2 * part :][:2])
    write_parquet(tmp_path / "data" / "dev-00000-of-00001-0123456789abcdef.parquet", all_rows[4:])
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "train.jsonl").write_text("{}\n")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert splits_in(tmp_path) == ["dev", "test"]
    assert list(file_rows(tmp_path, split="test")) == all_rows[:4]
    assert list(file_rows(tmp_path, split="dev")) == all_rows[4:]


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("data", "train", "has no split train"),
        ("data/dev.jsonl", "test", "is not a folder"),
        ("none", "", "does not exist"),
        ("empty", "", "no rows and no task folders"),
    ],
)
def test_a_place_without_the_rows_is_one_clear_error(
    tmp_path: Path, name: str, split: str, message: str
) -> None:
    for folder in ("data", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / "dev.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=message) as caught:
        list(file_rows(tmp_path / name, split=split))
    assert caught.value.hint


def test_parquet_columns_of_any_writer_are_text(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = pa.array(["a", "b"])
    columns = {
        "bytes": texts.cast(pa.binary()),
        "large": texts.cast(pa.large_binary()),
        "dictionary": texts.dictionary_encode(),
        "listed": pa.array([[b"a"], [b"b"]], pa.list_(pa.binary())),
    }
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    first, second = file_rows(tmp_path / "rows.parquet")
    assert first == {"bytes": "a", "large": "a", "dictionary": "a", "listed": ["a"]}
    assert second == {"bytes": "b", "large": "b", "dictionary": "b", "listed": ["b"]}


def test_a_parquet_row_that_is_no_utf8_is_rejected_alone(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = pyarrow.array([b"a", b"\xff", b"c"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"id": data}), tmp_path / "rows.parquet")
    first, bad, last = file_rows(tmp_path / "rows.parquet")
    assert (first, last) == ({"id": "a"}, {"id": "c"})
    assert isinstance(bad, TaskError) and "not UTF-8" in str(bad)


def test_damaged_parquet_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(path, rows(300))
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"rows\.parquet"):
        list(file_rows(path))


def test_task_folders_become_rows(tmp_path: Path) -> None:
    for name in ("b", "deep/a", ".hidden/c"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "instruction.md").write_text("Do it.")
        (tmp_path / name / "tests" / "data.bin").write_bytes(b"\x00\xff")
    files = {"instruction.md": "Do it.", "tests/data.bin": "data:;base64,AP8="}
    assert list(file_rows(tmp_path)) == [
        {"task_id": "b", "files": files},
        {"task_id": "a", "files": files},
    ]
    assert list(file_rows(tmp_path / "b")) == [{"task_id": "b", "files": files}]


def test_a_link_in_a_task_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "instruction.md").write_text("Do it.")
    (tmp_path / "secret").symlink_to("/etc/passwd")
    (found,) = file_rows(tmp_path)
    assert isinstance(found, TaskError) and "link secret" in str(found)


@pytest.mark.parametrize("prefix", ["", "./", "data/", "/"])
@pytest.mark.parametrize("name", ["tasks.tar.gz", "tasks.tgz", "tasks.tar"])
def test_an_archive_of_tasks_becomes_rows(tmp_path: Path, prefix: str, name: str) -> None:
    parts = ("instruction.md", "tests/a/b")
    files = {f"{prefix}t{number}/{part}": b"x" for number in range(3) for part in parts}
    mode = "w" if name.endswith(".tar") else "w:gz"
    write_archive(tmp_path / name, {f"{prefix}README": b"x", **files}, mode)
    expected = [
        {"task_id": f"t{number}", "files": dict.fromkeys(parts, "x")} for number in range(3)
    ]
    assert list(file_rows(tmp_path / name)) == expected
    assert list(file_rows(tmp_path)) == expected


def test_a_huge_task_is_rejected_without_holding_it(tmp_path: Path) -> None:
    (tmp_path / "instruction.md").write_text("Do it.")
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(MAX_BYTES)
    (found,) = file_rows(tmp_path)
    assert isinstance(found, TaskError) and "over 64 MiB" in str(found)
