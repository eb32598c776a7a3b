"""The drafter beside RL, in every mode: what trains it, what survives, what is logged."""

import dataclasses
import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from loop_world import by_length, settings

from adrl_jax.checkpoint import Checkpointer
from adrl_jax.drafter import checkpoint as saved
from adrl_jax.drafter.monitor import MonitorConfig, MonitorState
from adrl_jax.drafter.saving import saves
from adrl_jax.metrics import read_lines
from adrl_jax.models.families import ModelConfig
from adrl_jax.runtime import loop
from adrl_jax.runtime.adapting import Adapting, AdaptingConfig
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.strategy import OFF, Strategy
from experiments import adapt, build, resolve
from experiments.schema import ConfigError

FEW = {"compare_repeats": 0, "report": False}
COMMON = {"bandit.name": "fixed", "bandit.arm": "eagle-d2", "learner.minibatches": 1}


def run(workdir, **changes):
    c = settings(**{**COMMON, **changes})
    with build.opened(c) as parts:
        parts = dataclasses.replace(parts, scorer=by_length)
        outcome = loop.run(parts, dataclasses.replace(resolve.loop_config(c), **FEW), workdir)
    rows = [r for r in read_lines(workdir / "metrics.jsonl") if r["phase"] == "train"]
    assert outcome.status == "done"
    return rows


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    return run(tmp_path_factory.mktemp("joint"))


def policies(rows):
    return [r["fingerprint"] for r in rows]


def versions(rows):
    return [r["drafter/version"] for r in rows]


def test_off_leaves_the_drafter_as_the_warm_start_left_it(joint, tmp_path):
    rows = run(tmp_path, **{"drafter.when": "off"})
    assert len({r["drafter/fingerprint"] for r in rows}) == 1 and len(set(versions(rows))) == 1
    assert len({r["drafter/fingerprint"] for r in joint}) == 3
    # The same policy, bit for bit or nearly: what drafts, and whether it learns, is not the policy's business.
    np.testing.assert_allclose([r["reward/mean"] for r in rows], [r["reward/mean"] for r in joint])
    assert all("drafter/loss" not in r and 0 <= r["drafter/acceptance"] <= 1 for r in rows)


def test_spot_on_one_device_trains_after_each_rollout_and_saves_itself(joint, tmp_path):
    rows = run(
        tmp_path, **{"drafter.when": "spot", "drafter.spot_steps": 3, "drafter.save_every": 1, "task.max_prompt_tokens": 6}
    )
    assert [r["drafter/spot_steps"] for r in rows] == [3.0, 3.0, 3.0] and not any(r["drafter/spot_skipped"] for r in rows)
    # The warm start's two updates count too.
    assert versions(rows) == [5, 8, 11] and len({r["drafter/fingerprint"] for r in rows}) == 3
    np.testing.assert_allclose([r["reward/mean"] for r in rows], [r["reward/mean"] for r in joint])
    assert all(r["drafter/buffer_mb"] > 0 and r["drafter/stale"] == 0 for r in rows)
    assert saves(tmp_path / "drafter") == [8, 11]
    c = settings()
    with build.opened(c) as parts:
        _, params, record = saved.load(tmp_path / "drafter" / "11", parts.model_config)
        state = parts.init_learner()
        last = Checkpointer(tmp_path / "checkpoints")
        host = last.host(last.latest())
    assert record["version"] == 11 and record["step"] == 3 and host["fingerprint"] == record["target_fingerprint"]
    assert jax.tree.structure(params) == jax.tree.structure(state.drafter_params)


def test_spot_over_two_devices_learns_in_the_tails_and_changes_no_token(joint, tmp_path):
    rows = run(tmp_path, **{"drafter.when": "spot", "drafter.spot_groups": 2})
    np.testing.assert_allclose([r["reward/mean"] for r in rows], [r["reward/mean"] for r in joint])
    # Nothing is compiled in a tail, so the first one has no steps; how many the others have is the clock's business.
    made = [r["drafter/spot_steps"] for r in rows]
    assert made[0] == 0 and not any(r["drafter/spot_skipped"] for r in rows) and all(r["drafter/buffer_mb"] > 0 for r in rows)
    assert versions(rows) == [2 + sum(made[: i + 1]) for i in range(3)]


def test_on_demand_trains_exactly_while_acceptance_is_down(joint, tmp_path, monkeypatch, caplog):
    from adrl_jax.drafter import monitor

    wanted = iter([False, True, False])

    def scripted(config, state, found):
        assert found.examined > 0
        return state._replace(training=next(wanted), current=0.5, best=0.7), ["acceptance fell"]

    monkeypatch.setattr(monitor, "observe", scripted)
    with caplog.at_level(logging.INFO, "adrl_jax"):
        logging.getLogger("adrl_jax").propagate = True
        rows = run(tmp_path, **{"drafter.when": "on_demand"})
    assert [r["drafter/training"] for r in rows] == [0.0, 1.0, 0.0]
    assert versions(rows) == [2, 3, 3]
    assert ["drafter/loss" in r for r in rows] == [False, True, False]
    assert "step 2: acceptance fell" in caplog.text
    np.testing.assert_allclose([r["reward/mean"] for r in rows], [r["reward/mean"] for r in joint])
    # What the monitor knows goes on with the run.
    last = Checkpointer(tmp_path / "checkpoints")
    assert MonitorState(*last.host(last.latest())["facts"]["drafter"]) == MonitorState(0.5, 0.7, False, 0, 0)


def test_the_alarm_is_a_warning_and_a_metric(caplog):
    class Launch:
        arm, examined, accepted, accept_passes, accept_tokens = 1, (50, 0), (0, 0), 50, 50

    adapting = Adapting(
        AdaptingConfig("joint", ("eagle",)), MonitorConfig(alarm_steps=2), (OFF, Strategy("eagle", 2)), drafter=None
    )
    found = []
    with caplog.at_level(logging.WARNING, "adrl_jax"):
        logging.getLogger("adrl_jax").propagate = True
        for _ in range(3):
            adapting.after_rollout(None, [Launch()])
            found.append(adapting.row()["drafter/alarm"])
    assert found == [0.0, 1.0, 1.0] and caplog.text.count("no draft is accepted any more") == 1
    # Without a drafter there is nothing to say.
    nobody = Adapting()
    nobody.after_rollout(None, [Launch()])
    assert nobody.row() == {} and not nobody.wanted
    with pytest.raises(ValueError, match="mode='spot': a trainer"):
        Adapting(AdaptingConfig("spot"))
    with pytest.raises(ValueError, match="mode='always' is unknown"):
        AdaptingConfig("always")


def test_a_buffer_that_holds_no_whole_response_is_refused_before_the_run():
    big = ModelConfig("llama", 64, 8192, 8192, 1, 2, 1, 8, max_positions=4096)
    sizes = {"drafter.buffer_megabytes": 1, "train.max_new_tokens": 58, "learner.row_length": 64}
    c = settings(**{"drafter.when": "spot", "drafter.spot_steps": 1, **sizes})
    target = SimpleNamespace(tokenizer=SimpleNamespace(size=64))
    with pytest.raises(ConfigError, match=r"drafter.buffer_megabytes=1.*at least 2, the hidden states of one response of 64"):
        adapt.adapting(c, target, Eagle(big))
    assert adapt.adapting(c, target, Eagle(dataclasses.replace(big, hidden_size=16))).trainer.buffer.max_bytes == 2**20
