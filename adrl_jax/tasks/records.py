"""Records from JSON Lines and Parquet files; every fault names its file, line and field."""

import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

FORMATS = (".jsonl", ".json", ".parquet")


def read_records(path: str | os.PathLike, fields: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All records of a file.

    Args:
        path: a `.jsonl` (or `.json` with one object a line) or `.parquet` file.
        fields: names that every record must have, with a value other than null.

    Raises:
        ValueError: unknown format; the file is missing or empty; a line is no JSON object; a field is missing or null. Lines
            are counted from 1 (rows, in Parquet), blank ones included.
        ImportError: a Parquet file, but pyarrow is not installed.
    """
    path = pathlib.Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"data file {str(path)!r} has format {path.suffix!r}; choose one of {', '.join(FORMATS)}")
    if not path.is_file():
        raise ValueError(f"data file {str(path)!r} does not exist")
    numbered = _parquet_rows(path) if path.suffix == ".parquet" else _json_lines(path)
    records = []
    for line, record in numbered:
        for field in fields:
            if record.get(field) is None:
                state = "is null" if field in record else "is missing"
                raise ValueError(
                    f"{path}, line {line}: field {field!r} {state}; the record has {', '.join(sorted(record)) or 'none'}"
                )
        records.append(record)
    if not records:
        raise ValueError(f"data file {str(path)!r} is empty")
    return records


def _json_lines(path: pathlib.Path) -> Iterator[tuple[int, dict]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"data file {str(path)!r} is not UTF-8 text: {e}") from e
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as e:
            raise ValueError(f"{path}, line {number}: not JSON ({e.msg} at column {e.colno}): {line[:80]!r}") from e
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: a record must be a JSON object, got {type(record).__name__}")
        yield number, record


def _parquet_rows(path: pathlib.Path) -> Iterator[tuple[int, dict]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise ImportError(f"reading {str(path)!r} needs pyarrow: pip install pyarrow") from e
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as e:
        raise ValueError(f"data file {str(path)!r} is no Parquet file: {e}") from e
    yield from enumerate(rows, start=1)
