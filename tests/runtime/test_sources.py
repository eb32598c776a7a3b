"""What a mode needs and what couples two threads: each wrong value is named, with what would be legal."""

import types

import pytest

from adrl_jax.runtime import cursor, sources
from adrl_jax.runtime.batches import Saved
from adrl_jax.runtime.overlap import OverlapConfig
from adrl_jax.runtime.timeline import Timeline


@pytest.mark.parametrize(
    "mode,message",
    [
        ("async", "mode='async' is unknown; choose one of sync, lagged, overlap, in_flight"),
        ("overlap", "mode='overlap' generates on a device of its own; Parts.generator_device is None"),
        ("in_flight", "mode='in_flight' generates on a device of its own"),
    ],
)
def test_a_mode_that_is_unknown_or_lacks_its_device_is_named(mode, message):
    parts = types.SimpleNamespace(generator_device=None)
    state = types.SimpleNamespace(step=0, cursor=cursor.init(0, 4), learner=types.SimpleNamespace(version=0))
    config = types.SimpleNamespace(mode=mode, prompts_per_step=2, limit=1)
    nothing = dict(on_launch=lambda record: None, check=lambda: None, timeline=Timeline())
    with pytest.raises(ValueError, match=message):
        sources.make(parts, config, state, Saved(None), **nothing)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"limit": -1}, "limit=-1 must be >= 0"),
        ({"queue": 0}, "queue=0 must be >= 1"),
        ({"pinned": True, "cache": "keep"}, "pinned and cache='keep' exclude each other"),
    ],
)
def test_what_cannot_be_coupled_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        OverlapConfig(**fields)
