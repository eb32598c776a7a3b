import argparse
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import form


def test_alternate_runs_sides_in_turn_and_back():
    order = []
    sides = {name: (lambda name=name: order.append(name) or len(order)) for name in ("a", "b")}
    kept = form.alternate(sides, repeats=2, warmup=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert kept == {"a": [4, 5], "b": [3, 6]}


def test_timed_waits_for_the_device():
    matrix = jnp.ones((512, 512))
    run = form.timed(lambda: matrix @ matrix)
    assert 0 < run() < 60


def test_first_call_returns_value_and_time():
    first = form.first_call(lambda: jnp.arange(3).sum())
    assert int(first.value) == 3 and first.seconds > 0


def test_ratio_of_known_pairs():
    found = form.ratio([2.0, 4.0, 6.0] * 3, [1.0, 2.0, 3.0] * 3)
    assert found == form.Ratio(2.0, 2.0, 2.0)
    assert found.results("speed") == {"speed": 2.0, "speed_low": 2.0, "speed_high": 2.0}


def test_ratio_interval_covers_the_true_median():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        other = np.exp(rng.normal(0, 0.2, 12))
        ours = other / 1.3 * np.exp(rng.normal(0, 0.1, 12))
        low, high = form.ratio(other, ours, seed=trial)[1:]
        covered += low <= 1.3 <= high
    assert 175 <= covered <= 200  # a percentile bootstrap of 12 pairs covers about 95 %


@pytest.mark.parametrize("pairs", [([1.0], [1.0, 2.0]), ([], []), ([1.0], [0.0])])
def test_ratio_refuses_what_is_no_pair(pairs):
    with pytest.raises(ValueError):
        form.ratio(*pairs)


def test_pairs_gives_speed_up_and_needs_eight():
    assert form.pairs(lambda: 1.0, lambda: 3.0).median == 3.0
    with pytest.raises(ValueError, match="repeats=3"):
        form.pairs(lambda: 1.0, lambda: 1.0, repeats=3)


def test_parser_refuses_too_few_repeats_and_unknown_flags(capsys):
    flags = form.parser("Bench.")
    assert flags.parse_args(["--repeats=5"]).repeats == 5
    for bad in (["--repeats=2"], ["--repeat=5"], ["--unknown=1"]):
        with pytest.raises(SystemExit):
            flags.parse_args(bad)
    assert "repeats=2 must be >= 3" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError):
        form.repeat_count("1")


def test_finish_writes_the_form_and_prints_the_table(tmp_path, capsys):
    path = tmp_path / "deep" / "form.json"
    results = {"speed": np.float32(2.5), "ids": np.arange(3), "same": True, "hf": None, "broken": float("nan")}
    form.finish("demo", {"model": "tiny", "shape": (4, 4)}, results, path, notes={"hf": "no transformers"})
    written = json.loads(path.read_text())
    assert list(written) == ["bench", "config", "machine", "versions", "results"]
    assert written["results"] == {"speed": 2.5, "ids": [0, 1, 2], "same": True, "hf": None, "broken": None}
    assert written["config"] == {"model": "tiny", "shape": [4, 4], "notes": {"hf": "no transformers"}}
    assert written["machine"]["cores"] >= 1 and written["versions"]["jax"]
    shown = capsys.readouterr().out
    assert "speed   2.5" in shown and "not measured" in shown and "hf: no transformers" in shown
    assert not list(path.parent.glob("*.tmp"))


def test_long_lists_and_tables_are_left_to_the_json():
    text = form.table("demo", {"rows": [{"a": 1.0}] * 50, "slopes": {f"name {i}": 0.5 for i in range(9)}, "few": {"a": 1}})
    assert "50 rows, see the JSON" in text and "9 entries, see the JSON" in text and "{'a': 1}" in text


def test_finish_refuses_what_json_cannot_hold(tmp_path):
    with pytest.raises(TypeError, match="object"):
        form.finish("demo", {}, {"what": object()}, tmp_path / "form.json")
    assert not (tmp_path / "form.json").exists()


def test_peak_rss_is_that_of_this_process_not_of_its_parent():
    ballast = np.ones(60_000_000)  # 480 MB resident here, not in the child
    child = "from experiments.bench import form; print(form.peak_rss_mb())"
    measured = float(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout)
    assert 20 < measured < 450 + 0 * ballast[0]
    assert form.peak_rss_mb() > 480


def test_matmul_peak_is_plausible():
    assert 1e8 < form.matmul_peak(sizes=[(64, 64, 64)], repeats=3) < 1e15


def test_where_the_peers_pythons_lie_is_not_written(tmp_path):
    form.finish("x", {"peer": "hf", "peer_python": "hf=/somewhere/python"}, {"a": 1}, tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text())["config"] == {"peer": "hf"}
