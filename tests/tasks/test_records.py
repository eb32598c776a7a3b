import pyarrow
import pyarrow.parquet
import pytest

from adrl_jax.tasks.records import read_records

GOOD = '{"question": "1+1?", "answer": "#### 2"}'


def write(path, text):
    path.write_text(text)
    return path


def test_reads_json_lines_and_skips_blank_ones(tmp_path):
    other = GOOD.replace("1+1", "a\u2028b")  # a line separator within a string does not end the line
    path = write(tmp_path / "a.jsonl", f"\ufeff{GOOD}\n\n{other}\n")
    records = read_records(path, ("question", "answer"))
    assert [r["question"] for r in records] == ["1+1?", "a\u2028b?"]


def test_reads_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a", "b"], "answer": ["1", None]}), path)
    assert read_records(path) == [{"question": "a", "answer": "1"}, {"question": "b", "answer": None}]
    with pytest.raises(ValueError, match=r"line 2: field 'answer' is null"):
        read_records(path, ("answer",))
    write(tmp_path / "b.parquet", "no parquet")
    with pytest.raises(ValueError, match=r"b\.parquet.* is no Parquet file"):
        read_records(tmp_path / "b.parquet")


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_an_empty_file_is_an_error(tmp_path, text):
    with pytest.raises(ValueError, match=r"a\.jsonl' is empty"):
        read_records(write(tmp_path / "a.jsonl", text))


@pytest.mark.parametrize(
    "line, match",
    [
        ('{"question": ', "line 3: not JSON"),
        ("[1]", "line 3: a record must be a JSON object, got list"),
        ('{"question": "1+1?"}', "line 3: field 'answer' is missing; the record has question"),
        ('{"question": "1+1?", "answer": null}', "line 3: field 'answer' is null"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, match):
    path = write(tmp_path / "a.jsonl", f"{GOOD}\n\n{line}\n")
    with pytest.raises(ValueError, match=match):
        read_records(path, ("question", "answer"))


def test_missing_files_and_unknown_formats_are_errors(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_records(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"'\.csv'; choose one of \.jsonl"):
        read_records(write(tmp_path / "a.csv", "x"))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_records(tmp_path / "b.jsonl")
