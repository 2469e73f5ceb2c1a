"""Which files a job's paths mean: order, names, what is left out, and what is said when there are none."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkgen.dataset import open_dataset
from bulkgen.errors import InputError


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"id": [name]}), path)
        else:
            path.write_text('{"id": "x"}\n')


def names(base: Path, *paths: str, exclude: tuple[Path, ...] = ()) -> list[str]:
    return [file.name for file in open_dataset(paths, base, exclude).files]


def test_a_folder_is_read_whole_and_in_natural_order(tmp_path: Path) -> None:
    make(tmp_path, "in/part-10.jsonl", "in/part-2.jsonl", "in/b/9.ndjson", "in/b/10.jsonl", "in/a1/x.JSONL")
    make(tmp_path, "in/README.md", "in/part.jsonl.tmp", "in/_SUCCESS", "in/.part.jsonl.crc")
    expected = ["in/a1/x.JSONL", "in/b/9.ndjson", "in/b/10.jsonl", "in/part-2.jsonl", "in/part-10.jsonl"]
    assert names(tmp_path, "in") == expected


def test_paths_keep_their_order_and_a_file_reached_twice_counts_once(tmp_path: Path) -> None:
    make(tmp_path, "b.jsonl", "in/a.jsonl")
    (tmp_path / "in/link.jsonl").symlink_to(tmp_path / "b.jsonl")
    (tmp_path / "in/circle").symlink_to(tmp_path / "in")
    assert names(tmp_path, "b.jsonl", "in", "./b.jsonl") == ["b.jsonl", "in/a.jsonl"]


def test_a_link_is_judged_by_its_own_name(tmp_path: Path) -> None:
    make(tmp_path, "blobs/0a1b")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/data.jsonl").symlink_to(tmp_path / "blobs/0a1b")
    assert names(tmp_path, "in") == ["in/data.jsonl"]


def test_names_are_relative_where_the_users_path_is(tmp_path: Path) -> None:
    make(tmp_path, "data/x.jsonl", "jobs/y.jsonl")
    base = tmp_path / "jobs"
    assert names(base, "../data/x.jsonl") == ["../data/x.jsonl"]
    assert names(base, str(tmp_path / "data/x.jsonl")) == [str(tmp_path / "data/x.jsonl")]
    assert names(base, str(base / "y.jsonl")) == ["y.jsonl"]


def test_equal_names_in_different_folders_stay_apart(tmp_path: Path) -> None:
    make(tmp_path, "in/day=06/data.parquet", "in/day=10/data.parquet")
    assert names(tmp_path, "in") == ["in/day=06/data.parquet", "in/day=10/data.parquet"]


def test_a_name_that_is_no_utf8_is_spelled_out(tmp_path: Path) -> None:
    raw = os.path.join(os.fsencode(tmp_path), b"caf\xe9.jsonl")  # noqa: PTH118  # bytes
    with open(raw, "wb") as file:  # noqa: PTH123
        file.write(b'{"a": 1}\n')
    dataset = open_dataset(["."], tmp_path)
    assert dataset.files[0].name == "caf\\xe9.jsonl"
    assert len(list(dataset.rows(None))) == 1


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("in/*.jsonl", ["in/2.jsonl", "in/10.jsonl"]),
        ("in/**/*.jsonl", ["in/2.jsonl", "in/10.jsonl", "in/sub/1.jsonl"]),
        ("in/s*", ["in/sub/1.jsonl"]),
        ("in/*", ["in/2.jsonl", "in/10.jsonl", "in/sub/1.jsonl"]),
        ("in/_*.jsonl", ["in/_x.jsonl"]),
    ],
)
def test_globs(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    base = tmp_path / "odd[1]"
    make(
        base,
        "in/10.jsonl",
        "in/2.jsonl",
        "in/_x.jsonl",
        "in/sub/1.jsonl",
        "in/notes.txt",
        "in/_bulkgen/p.jsonl",
    )
    assert names(base, pattern) == expected
    assert names(base, str(base.parent / "odd[[]1]" / pattern)) == expected


def test_a_file_whose_name_looks_like_a_glob_is_read_as_named(tmp_path: Path) -> None:
    make(tmp_path, "data[1].jsonl", "data1.jsonl")
    assert names(tmp_path, "data[1].jsonl") == ["data[1].jsonl"]


def test_left_out_data_files_are_told_and_named_ones_are_read(tmp_path: Path) -> None:
    make(tmp_path, "in/a.jsonl", "in/_b.jsonl", "in/_2024/c.jsonl", "in/.d.jsonl", "in/run.bulkgen/p.jsonl")
    make(tmp_path, "in/_bulkgen/q.jsonl", "in/.git/e.jsonl", "in/_SUCCESS")
    dataset = open_dataset(["in"], tmp_path)
    assert [file.name for file in dataset.files] == ["in/a.jsonl"]
    assert dataset.left_out == ("in/.d.jsonl", "in/_2024/c.jsonl", "in/_b.jsonl")
    named = open_dataset(["in", "in/_b.jsonl", "in/_2024"], tmp_path)
    assert [file.name for file in named.files] == ["in/a.jsonl", "in/_b.jsonl", "in/_2024/c.jsonl"]
    assert named.left_out == ("in/.d.jsonl",)


def test_a_folder_with_nothing_but_left_out_files_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "in/_2024/part.jsonl")
    with pytest.raises(InputError, match=r"in: all data files in it \(1: part.jsonl\) are left out"):
        open_dataset(["in"], tmp_path)


def test_the_jobs_own_output_is_never_input(tmp_path: Path) -> None:
    make(tmp_path, "data/part-0.parquet", "data/out/part-0.parquet", "in.jsonl")
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    assert names(tmp_path, "data", exclude=(tmp_path / "data/out",)) == ["data/part-0.parquet"]
    for path, output in [("in.jsonl", "link.jsonl"), ("link.jsonl", "in.jsonl"), ("data", "data")]:
        with pytest.raises(InputError, match="this job's own output"):
            open_dataset([path], tmp_path, exclude=(tmp_path / output,))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.jsonl", "none.jsonl: no such file or folder; looked for .*none.jsonl"),
        ("in/*.parquet", r"in/\*.parquet: no input files match"),
        ("empty", "empty: no data files in this folder; bulkgen reads .parquet"),
        ("in/table.csv", "in/table.csv: not a kind of file that can be read; bulkgen reads .parquet"),
        ("in/data.json", "in/data.json: not a kind"),
        ("broken.jsonl", "broken.jsonl: a link to gone.jsonl, which leads nowhere"),
        ("pipe.jsonl", "pipe.jsonl: not a regular file"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(tmp_path: Path, path: str, message: str) -> None:
    make(tmp_path, "in/table.csv", "in/data.json", "in/good.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.jsonl").symlink_to("gone.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match=message):
        open_dataset(["in/good.jsonl", path], tmp_path)


def test_formats_are_not_mixed_but_blank_files_do_not_count(tmp_path: Path) -> None:
    make(tmp_path, "in/0.parquet", "in/1.parquet")
    (tmp_path / "in/2.jsonl").write_bytes(b"")
    (tmp_path / "in/3.jsonl").write_bytes(b"\n\n")
    assert names(tmp_path, "in") == ["in/0.parquet", "in/1.parquet"]
    make(tmp_path, "in/4.jsonl")
    with pytest.raises(InputError, match=r"in/0.parquet is Parquet and in/4.jsonl is JSON Lines"):
        open_dataset(["in"], tmp_path)


def test_the_fingerprint_changes_with_the_files_and_with_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, "in/a.jsonl", "in/b.jsonl")
    first = open_dataset(["in"], tmp_path).fingerprint
    assert open_dataset(["in/*.jsonl"], tmp_path).fingerprint == first
    os.utime(tmp_path / "in/a.jsonl", ns=(1, 1))
    touched = open_dataset(["in"], tmp_path).fingerprint
    make(tmp_path, "in/c.jsonl")
    assert len({first, touched, open_dataset(["in"], tmp_path).fingerprint}) == 3
