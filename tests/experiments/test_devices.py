"""Device groups and the rules of asynchronous runs: each fault names the field, its value and what would be legal."""

import jax
import pytest

from adrl_jax.learner.surrogates import SURROGATES
from experiments import config, devices
from experiments.schema import ConfigError


def settings(**changes):
    c = config.get_config()
    c.update_from_flattened_dict(changes)
    return c


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"runtime.max_staleness": -1}, r"runtime.max_staleness=-1 .*>= 0"),
        ({"runtime.lag": -1}, r"runtime.lag=-1 .*>= 0"),
        ({"runtime.queue": 0}, r"runtime.queue=0 .*>= 1"),
        ({"runtime.mode": "async"}, r"runtime.mode='async' .*one of sync, lagged, overlap, in_flight"),
        (
            {"runtime.mode": "overlap", "runtime.generator_devices": (0,)},
            r"runtime.generator_devices=\(0,\).*share no device; device 0 learns already \(runtime.learner_devices=\(0,\)\)",
        ),
        (
            {"runtime.mode": "overlap", "runtime.learner_devices": (1,), "runtime.generator_devices": (1,)},
            r"device 1 learns already",
        ),
        ({"runtime.mode": "overlap", "runtime.generator_devices": (1, 2)}, r"one device: an engine runs on one"),
        ({"runtime.learner_devices": (0, 1)}, r"runtime.learner_devices=\(0, 1\).*learner.devices=1 of them"),
        ({"runtime.mode": "lagged", "runtime.generator_devices": (1,)}, r"generates where it learns"),
        ({"runtime.pin_versions": True}, r"runtime.pin_versions=True.*overlap only"),
        ({"runtime.refresh": "always"}, r"runtime.refresh='always'.*sync has no stale batch"),
        (
            {"runtime.mode": "lagged", "runtime.refresh": "auto", "rollout.verification": "rejection"},
            r"runtime.refresh='auto'.*coupled noise",
        ),
        ({"runtime.mode": "in_flight", "rollout.admission": "longest_first"}, r"rollout.admission='longest_first'.*arrival"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_built(changes, message):
    with pytest.raises(ConfigError, match=message):
        config.freeze(settings(**changes))


def test_stale_data_need_a_correction_or_leave(monkeypatch):
    from experiments import learner_rules

    monkeypatch.setattr(learner_rules, "corrected", lambda c: False)
    stale = ({"runtime.mode": "lagged"}, {"runtime.mode": "overlap"}, {"runtime.mode": "in_flight"})
    for changes in stale:
        with pytest.raises(ConfigError, match=r"no importance correction.*runtime.allow_uncorrected=True"):
            config.freeze(settings(**changes))
        config.freeze(settings(**changes, **{"runtime.allow_uncorrected": True}))
    config.freeze(settings())
    config.freeze(settings(**{"runtime.mode": "lagged", "runtime.lag": 0}))
    config.freeze(settings(**{"runtime.mode": "overlap", "runtime.max_staleness": 0}))
    config.freeze(settings(**{"runtime.mode": "lagged", "runtime.refresh": "always"}))


@pytest.mark.parametrize("mode", ["lagged", "overlap", "in_flight"])
def test_a_loss_without_correction_names_its_fields_and_every_way_out_is_legal(mode):
    plain = {"runtime.mode": mode, "learner.surrogate": "reinforce"}
    with pytest.raises(ConfigError) as error:
        config.freeze(settings(**plain))
    text = str(error.value)
    for word in (
        f"runtime.mode='{mode}'",
        "learner.surrogate=reinforce",
        "learner.weight=none",
        "learner.old_log_probs=behaviour",
    ):
        assert word in text
    assert "learner.weight of token, sequence, geometric, vespo" in text and "ppo_clip" in text
    for weight in ("token", "sequence", "geometric", "vespo"):
        config.freeze(settings(**plain, **{"learner.weight": weight}))
    off_policy = text.split("learner.surrogate of ")[1].split(" with")[0].split(", ")
    assert "reinforce" not in off_policy
    for name in off_policy:
        assert f"learner.surrogate={name}" not in text
        c = settings(**{"runtime.mode": mode, "learner.surrogate": name})
        level = SURROGATES[name].level
        c.learner.aggregation = {"token": "token", "sequence": "sequence", "group": "group"}[level]
        own = SURROGATES[name].advantages in ("pair", "reward", "best")
        c.learner.advantage, c.learner.row_length = "none" if own else "dr_grpo", 0
        config.freeze(c)


def test_groups_are_those_asked_for_or_the_first_ones():
    here = jax.devices()
    freeze = lambda **changes: config.freeze(settings(**changes))  # noqa: E731
    assert devices.groups(freeze()) == ([here[0]], None)
    assert devices.groups(freeze(**{"runtime.mode": "overlap"})) == ([here[0]], here[1])
    chosen = {
        "runtime.mode": "in_flight",
        "runtime.learner_devices": (3, 1),
        "learner.devices": 2,
        "runtime.generator_devices": (2,),
    }
    assert devices.groups(freeze(**chosen)) == ([here[3], here[1]], here[2])
    assert list(devices.mesh([here[3], here[1]]).devices.flat) == [here[3], here[1]]


def test_devices_that_are_not_there_are_named_with_what_there_is():
    freeze = lambda **changes: config.freeze(settings(**changes))  # noqa: E731
    with pytest.raises(ConfigError, match=r"runtime.generator_devices=\(9,\).*jax.devices\(\) here are 0 to 3"):
        devices.groups(freeze(**{"runtime.mode": "overlap", "runtime.generator_devices": (9,)}))
    with pytest.raises(ConfigError, match=r"runtime.learner_devices=\(7,\).*jax.devices\(\) here are 0 to 3"):
        devices.groups(freeze(**{"runtime.learner_devices": (7,)}))
    with pytest.raises(
        ConfigError, match=r"runtime.mode='overlap'.*a device to generate on beside the 4 that learn.*XLA_FLAGS"
    ):
        devices.groups(freeze(**{"runtime.mode": "overlap", "learner.devices": 4}))
