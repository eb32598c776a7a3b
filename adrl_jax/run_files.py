"""What a run's folder holds, for whoever reads it afterwards."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from adrl_jax.metrics import read_lines


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What a run's folder holds; lists are empty and the summary is `{}` where a file is absent."""

    name: str
    metrics: list[dict[str, Any]]
    arms: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    summary: dict[str, Any]

    def phase(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.metrics if row["phase"] == name]


def read(workdir: Path) -> RunFiles:
    summary = workdir / "summary.json"
    return RunFiles(
        workdir.resolve().name,
        read_lines(workdir / "metrics.jsonl"),
        read_lines(workdir / "arms.jsonl"),
        read_lines(workdir / "samples.jsonl"),
        json.loads(summary.read_text()) if summary.exists() else {},
    )
