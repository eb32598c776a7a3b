import json

import numpy as np
import pytest

from experiments.bench import bandit as bench

SMALL = {
    "name": "small",
    "source": "made up",
    "arms": [{"drafter": "none", "depth": 0}, {"drafter": "eagle", "depth": 1}, {"drafter": "eagle", "depth": 2}],
    "batch_buckets": [1, 4],
    "seconds_per_round": {
        "off": {"1": 0.01, "4": 0.02},
        "eagle-d1": {"1": {"128": 0.012, "512": 0.015}, "4": 0.03},
        "eagle-d2": {"1": 0.013, "4": 0.04},
    },
    "acceptance": {"eagle": [0.8, 0.7]},
    "world": {"requests": 4, "shocks": [{"at": 20, "eagle": -2.0}]},
}


def write(folder, **changes):
    path = folder / "small.json"
    path.write_text(json.dumps({k: v for k, v in (SMALL | changes).items() if v is not None}))
    return path


def test_a_table_becomes_a_world(tmp_path):
    table = bench.read_table(write(tmp_path))
    world = table.world
    assert [s.name for s in table.strategies] == ["off", "eagle-d1", "eagle-d2"]
    assert table.thresholds == (1, 3) and table.batch_buckets == (1, 4)
    assert world.caches.tolist() == [128, 512] and world.seconds.shape == (2, 2, 3)
    np.testing.assert_allclose(world.seconds[0, :, 1], [0.012, 0.015])
    np.testing.assert_allclose(world.seconds[1, :, 1], 0.03)
    np.testing.assert_allclose(1 / (1 + np.exp(-world.logit)), [[0.8, 0.7]], rtol=1e-6)
    assert world.shock_at[0] == 20 and world.shock[:2].tolist() == [[0.0], [-2.0]]
    np.testing.assert_allclose(world.drop, bench.DEFAULTS["drop"])


def test_trees_have_their_own_curve_and_their_drafters_drift(tmp_path):
    tree = {"drafter": "eagle", "depth": 2, "width": 2, "verify_tokens": 5}
    seconds = SMALL["seconds_per_round"] | {"eagle-d2-w2-v5": {"1": 0.02, "4": 0.05}}
    path = write(
        tmp_path,
        arms=[*SMALL["arms"], tree],
        seconds_per_round=seconds,
        acceptance={"eagle": [0.8, 0.7], "eagle-w2-v5": [0.9, 0.85]},
        world=SMALL["world"] | {"drop": {"eagle": 1.5}},
    )
    world = bench.read_table(path).world
    np.testing.assert_allclose(1 / (1 + np.exp(-world.logit)), [[0.8, 0.7], [0.9, 0.85]], rtol=1e-6)
    assert world.drop.tolist() == [1.5, 1.5] and world.shock[1].tolist() == [-2.0, -2.0]


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"source": None}, "source is missing"),
        ({"world": {"rain": 1}}, "world.rain is unknown"),
        ({"world": {"requests": 5}}, "must reach world.requests=5"),
        ({"acceptance": {"eagle": [0.8]}}, "acceptance.eagle must have 2"),
        ({"acceptance": {}}, "acceptance.eagle must have 2"),
        ({"acceptance": {"eagle": [0.8, 1.0]}}, "between 0 and 1"),
        ({"seconds_per_round": {k: v for k, v in SMALL["seconds_per_round"].items() if k != "off"}}, "lacks off"),
        ({"seconds_per_round": SMALL["seconds_per_round"] | {"off": {"1": 0.01}}}, "lacks a batch"),
        ({"seconds_per_round": SMALL["seconds_per_round"] | {"off": {"1": 0.01, "4": -1}}}, "must be positive"),
    ],
)
def test_tables_that_do_not_fit_are_errors(tmp_path, changes, match):
    with pytest.raises(ValueError, match=f"small.json: .*{match}"):
        bench.read_table(write(tmp_path, **changes))


@pytest.mark.parametrize("path", sorted(bench.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_the_shipped_tables_are_legal_and_say_where_they_come_from(path):
    table = bench.read_table(path)
    assert table.name == path.stem and len(json.loads(path.read_text())["source"]) > 40
    for name in bench.CONTROLLERS:
        bench.controller(name, table)


def test_summary_of_known_values():
    found = bench.summary(np.asarray([1.0, 2.0, 3.0, 4.0]))
    assert found["mean"] == 2.5 and found["sd"] == pytest.approx(np.std([1, 2, 3, 4], ddof=1))
    assert 1.0 <= found["low"] < 2.5 < found["high"] <= 4.0


def test_the_benchmark_writes_its_form_and_picture(tmp_path):
    path, picture = tmp_path / "out.json", tmp_path / "out.svg"
    form = bench.main(
        [f"--tables={write(tmp_path)}", "--seeds=2", "--decisions=60", f"--json={path}", f"--plot={picture}"]
        + ["--controllers=off,beg,goodput"]
    )
    assert json.loads(path.read_text()) == json.loads(json.dumps(form))
    results = form["results"]
    for name in ("off", "beg", "goodput"):
        entry = results["regret"][name]["small"]
        assert entry["mean"] >= 0 and entry["sd"] >= 0 and entry["low"] <= entry["mean"] <= entry["high"]
        assert 0 <= results["recovery_decisions"][name]["small"]["slowest"] <= 40
    beg = results["regret"]["beg"]["small"]["mean"]
    assert results["bar"]["small"] == pytest.approx(max(0.01, beg / 2))
    assert results["within_bar"]["small"] == (results["regret"]["goodput"]["small"]["mean"] <= results["bar"]["small"])
    assert picture.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize("flags", [["--controllers=oracle"], ["--seeds=1"], ["--only=nowhere"]])
def test_senseless_flags_end_the_run(flags, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main([f"--tables={write(tmp_path)}", *flags])
    assert flags[0].split("=")[0][2:] in capsys.readouterr().err or "nowhere" in flags[0]
