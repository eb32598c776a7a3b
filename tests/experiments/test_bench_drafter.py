"""Benches and ablations of the drafter: what they set up. Figures are theirs; here it is what is compared with what."""

import json

import jax
import numpy as np
import pytest

from adrl_jax.models.transformer import init_params
from adrl_jax.speculation.eagle import Eagle
from experiments import config, schema
from experiments.ablations import adaptive_drafter, drafter_objectives
from experiments.bench import checkpoint, drafter, packing


def test_both_sides_of_the_packing_benchmark_train_on_the_same():
    samples = packing.samples_of(7, 128, 25.0, 0.8)
    sides = packing.packed(samples, 2, 128), packing.padded(samples, 3)
    for lessons in sides:
        assert sum(x.tokens for x in lessons) == sum(s.length for s in samples)
        found = np.concatenate([x.batch.target_ids[x.batch.target_mask] for x in lessons])
        assert sorted(found) == sorted(np.concatenate([s.rollout.response_ids for s in samples]))
    assert all((x.batch.segment_ids.max(axis=1) == 1).all() for x in sides[1])
    params = init_params(packing.CONFIG, jax.random.key(0))
    assert packing.difference(params, Eagle(packing.CONFIG).init_params(jax.random.key(1)), *sides) < 1e-5


def test_the_checkpoint_benchmark_writes_its_form(tmp_path, monkeypatch):
    small = packing.CONFIG
    monkeypatch.setattr(checkpoint, "SMOLLM2", small)
    path = tmp_path / "checkpoint.json"
    checkpoint.main([f"--json={path}", f"--folder={tmp_path}"])
    results = json.loads(path.read_text())["results"]
    assert all(results[f"{name}_ms"] > 0 for name in ("sync_full", "async_full", "async_selective"))
    world_bytes = small.vocab_size * small.hidden_size * 4 / 2**20
    assert results["full_mb"] - results["selective_mb"] == pytest.approx(world_bytes)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.json"]


@pytest.mark.parametrize("small", [False, True])
def test_settings_of_the_warm_up_benchmark_are_legal(small):
    for name in drafter.SETS:
        c = drafter.settings(name, "smollm2", "somewhere", drafter.SMALL if small else {})
        assert c.generation.temperatures == "0.7,1.0" and c.evaluation.depth == 5
        assert c.task.path == ("somewhere" if name == "gsm8k" else "")


def test_objectives_differ_in_nothing_but_loss_and_architecture():
    found = {name: drafter_objectives.settings(name, "smollm2", 5, {}) for name in drafter_objectives.OBJECTIVES}
    fields = {"architecture", "feature_weight", "token_weight", "overlap_weight", "depths"}
    for c in found.values():
        changed = {path for path, _, _ in schema.differences(found["both"], c)}
        assert changed <= {f"training.{name}" for name in fields}
    assert len({str(c.training) for c in found.values()}) == len(found)


def test_the_adaptive_ablation_compares_runs_that_differ_in_the_drafter_alone():
    frozen, adaptive = (adaptive_drafter.settings(when, 60, 5, {}) for when in ("off", "joint"))
    assert [path for path, _, _ in schema.differences(frozen, adaptive)] == ["drafter.when"]
    small = adaptive_drafter.settings("spot", 3, 2, adaptive_drafter.SMALL | {"drafter.spot_steps": 8})
    assert small.bandit.arm == "eagle-d2" and small.train.steps == 3


def test_the_adaptive_ablation_names_fields_that_do_not_exist_and_folders_of_other_settings(tmp_path, capsys):
    for given, message in (
        ("drafter.optimiser", 'Key "optimiser" does not exist'),
        ("drafter.optimizer", "must be str, one of adamw"),
    ):
        with pytest.raises(SystemExit):
            adaptive_drafter.main(["--small", f"--workdir={tmp_path}", f'--changes={{"{given}": "sgd"}}'])
        assert message in capsys.readouterr().err
    made = adaptive_drafter.settings("off", 0, 5, adaptive_drafter.SMALL | {"drafter.optimizer": "adamw"})
    (tmp_path / "start").mkdir()
    config.save(made, tmp_path / "start" / "config.json")
    with pytest.raises(SystemExit):
        adaptive_drafter.main(["--small", f"--workdir={tmp_path}"])
    assert "was made with drafter.optimizer='adamw', this run has 'muon'" in capsys.readouterr().err


def test_unknown_names_end_the_run(capsys):
    for main, flag in ((drafter.main, "--prompts=chess"), (drafter_objectives.main, "--objectives=hinge")):
        with pytest.raises(SystemExit):
            main([flag])
        assert "is unknown; choose among" in capsys.readouterr().err
