"""The rows of a study, which grow in its JSON file: one that was ended goes on where it was, with the same command."""

import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.bench import form
from experiments.bench.sides import say
from experiments.schema import ConfigError


class Rows:
    """Rows by key, some of which may be in the file already.

    Args:
        bench: the study's name in the form.
        path: the form's file; None keeps nothing.
        asked: the command line, which goes into the form's `config`.
        same: names in `asked` that rows depend on: a file made with other values is refused.
        keys: names of a row's fields that make its key.
        wanted: keys of this run, in the order in which they are run.

    Attributes:
        rows: those there are, found and added.
        missing: keys of `wanted` without a row, in order.

    Raises:
        ConfigError: the file is of another study, or of other settings.
    """

    def __init__(
        self,
        bench: str,
        path: str | None,
        asked: Mapping[str, Any],
        *,
        same: Sequence[str],
        keys: Sequence[str],
        wanted: Sequence[tuple],
    ):
        self.bench, self.path, self.asked, self.keys = bench, path, dict(asked), tuple(keys)
        self.rows: list[dict[str, Any]] = _found(bench, path, asked, same)
        there = {self.key(row) for row in self.rows}
        self.missing = [key for key in wanted if key not in there]
        self._total, self._added, self._began = len(wanted), 0, time.monotonic()
        if there:
            say(f"{path} has {len(wanted) - len(self.missing)} of {len(wanted)} runs")

    def key(self, row: Mapping[str, Any]) -> tuple:
        return tuple(row[name] for name in self.keys)

    def add(self, row: dict[str, Any], told: str) -> None:
        """One more row; the file has it at once. `told` is what the progress line says of it."""
        self.rows.append(row)
        self._added += 1
        left = len(self.missing) - self._added
        seconds = (time.monotonic() - self._began) / self._added * left
        done = self._total - left
        if self.path:
            notes = {"rows": f"{done} of {self._total} runs; the same command goes on"}
            form.write(form.document(self.bench, self.asked, {"rows": self.rows}, notes), self.path)
        say(f"[{done}/{self._total}] {told}" + (f"; {_span(seconds)} to go" if left else ""))


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _found(bench: str, path: str | None, asked: Mapping[str, Any], same: Sequence[str]) -> list[dict[str, Any]]:
    file = pathlib.Path(path) if path else None
    if file is None or not file.exists():
        return []
    try:
        made = json.loads(file.read_text())
        name, config, rows = made["bench"], made["config"], made["results"]["rows"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"--json={path!r} exists and is not a form of this study; name another file") from None
    if name != bench:
        raise ConfigError(f"--json={path!r} holds rows of {name!r}, this is {bench!r}; name another file")
    for field in same:
        if config.get(field) != asked[field]:
            raise ConfigError(
                f"--json={path!r} holds rows made with {field}={config.get(field)!r}, this run has {asked[field]!r}; name another "
                "file, or use the same settings"
            )
    return list(rows)
