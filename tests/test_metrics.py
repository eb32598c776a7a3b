"""Log files: strict JSON, no step twice after a resume, compilation apart from work."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.metrics import CompileClock, JsonLines, MetricLog, Stopwatch, plain, read_lines


def test_lines_are_strict_json_and_numbers_without_a_value_are_null(tmp_path):
    lines = JsonLines(tmp_path / "a" / "x.jsonl")
    lines.append(
        {"a": np.float32(1.5), "b": float("nan"), "c": jnp.arange(2), "d": {"e": (np.int64(3), float("inf"))}, "f": "ü"}
    )
    lines.close()
    text = (tmp_path / "a" / "x.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda _: 1 / 0) == {
        "a": 1.5,
        "b": None,
        "c": [0, 1],
        "d": {"e": [3, None]},
        "f": "ü",
    }


def test_a_resumed_file_is_cut_back_to_the_checkpoint_even_within_a_line(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = JsonLines(path)
    lines.append({"step": 1})
    at_checkpoint = lines.length()
    lines.append({"step": 2})
    lines.close()
    with path.open("a") as file:
        file.write('{"step": 3, "hal')  # what kill -9 may leave
    again = JsonLines(path, at_checkpoint)
    again.append({"step": 2, "again": True})
    again.close()
    assert read_lines(path) == [{"step": 1}, {"step": 2, "again": True}]


def test_a_file_shorter_than_the_checkpoint_says_is_reported(tmp_path, caplog):
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n')
    with caplog.at_level("WARNING"):
        JsonLines(path, 500).close()
    assert "shorter" in caplog.text and read_lines(path) == [{"step": 1}]


def test_metric_log_writes_lines_and_event_files(tmp_path):
    metrics = MetricLog(tmp_path / "metrics.jsonl", tmp_path / "tb")
    metrics.write("train", 3, {"reward/mean": jnp.float32(0.25), "name": "x", "gap": float("nan")})
    metrics.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"phase": "train", "step": 3, "reward/mean": 0.25, "name": "x", "gap": None}
    ]
    events = list((tmp_path / "tb" / "train").glob("events.*"))
    assert len(events) == 1 and b"reward/mean" in events[0].read_bytes() and b"gap" not in events[0].read_bytes()


def test_stopwatch_keeps_compilation_out_of_phases():
    clock = CompileClock()
    watch = Stopwatch(clock)

    @jax.jit
    def slow_to_compile(x):
        for _ in range(150):
            x = jnp.sin(x) @ jnp.cos(x)
        return x

    start = time.perf_counter()
    with watch.phase("work"):
        jax.block_until_ready(slow_to_compile(jnp.eye(3)))
        time.sleep(0.05)
    wall = time.perf_counter() - start
    times = watch.metrics()
    assert clock.programs >= 1 and times["compile/programs"] == clock.programs
    assert 0.05 <= times["time/work"] < wall
    assert times["time/compile"] > 0
    assert abs(times["time/work"] + times["time/compile"] - wall) < 0.05
    again = Stopwatch(clock)
    with again.phase("work"):
        jax.block_until_ready(slow_to_compile(jnp.eye(3)))
    assert again.metrics()["time/compile"] == 0


def test_phases_of_one_name_add_up():
    watch = Stopwatch(CompileClock())
    for _ in range(2):
        with watch.phase("reward"):
            time.sleep(0.02)
    assert watch.metrics()["time/reward"] >= 0.04


def test_plain_leaves_text_and_bools_alone():
    assert plain({"a": True, "b": "nan", "c": None}) == {"a": True, "b": "nan", "c": None}
