"""Checkpoints: what is saved is what was there, and what is not complete is not a checkpoint."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from adrl_jax.checkpoint import Checkpointer, CheckpointMismatch, check_identity, named_arrays


class State(NamedTuple):
    params: dict
    opt_state: tuple
    step: np.ndarray
    nothing: None = None


def make_state(scale: float = 1.0) -> State:
    params = {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3) * scale, "half": jnp.full(3, scale, jnp.bfloat16)}
    return State(params, optax.adamw(1e-3).init(params), np.int32(scale))


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


def test_round_trip_keeps_types_dtypes_and_values(tmp_path):
    saver = Checkpointer(tmp_path)
    state = make_state(3.0)
    saver.save(5, state, {"note": "x", "list": [1, 2]})
    saver.close()
    saver = Checkpointer(tmp_path)  # as another process would
    back = saver.restore(5, make_state(0.0))
    assert_equal(back, state)
    assert isinstance(back.opt_state[0], optax.ScaleByAdamState) and back.opt_state[0].count.dtype == jnp.int32
    assert saver.host(5) == {"note": "x", "list": [1, 2]}
    saver.close()


def test_what_is_renewed_stays_as_it_was_given(tmp_path):
    saver = Checkpointer(tmp_path)
    saver.save(1, make_state(3.0), {})
    saver.wait()
    other = make_state(0.0)._replace(params={"w": jnp.full((5,), 7.0), "new": jnp.zeros(2)})
    with pytest.raises(CheckpointMismatch, match="params/new: missing"):
        saver.restore(1, other, renew=("opt_state",))
    back = saver.restore(1, other, renew=("params",))
    assert_equal(back.params, other.params)
    assert_equal((back.opt_state, back.step), (make_state(3.0).opt_state, make_state(3.0).step))
    saver.close()


def test_a_step_being_written_is_not_there_yet_and_the_last_two_stay(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3):
        saver.save(step, make_state(step), {})
        saver.wait()
    assert saver.steps() == [2, 3] and saver.latest() == 3
    saver.close()


def test_every_save_holds_its_own_weights_although_buffers_are_donated(tmp_path):
    saver = Checkpointer(tmp_path, keep=3)
    bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    live = {"w": jnp.zeros((512, 512))}
    for step in (1, 2, 3):
        live = bump(live)
        saver.save(step, live, {})
        live = bump(live)  # gives the buffers away while the save may still be going on
    saver.wait()
    values = [float(saver.restore(step, live)["w"][7, 9]) for step in (1, 2, 3)]
    assert values == [1.0, 3.0, 5.0]
    saver.close()


def test_leftovers_of_a_killed_save_are_put_aside(tmp_path, caplog):
    saver = Checkpointer(tmp_path)
    saver.save(4, make_state(), {})
    saver.close()
    (tmp_path / "9").mkdir()
    (tmp_path / "8.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with caplog.at_level("WARNING"):
        saver = Checkpointer(tmp_path)
    assert saver.latest() == 4 and not (tmp_path / "8.orbax-checkpoint-tmp").exists()
    assert "not a complete checkpoint" in caplog.text and "unfinished" in caplog.text
    saver.save(9, make_state(9.0), {})
    saver.wait()
    assert saver.latest() == 9 and float(saver.restore(9, make_state()).params["w"][0, 1]) == 9.0
    saver.close()


def test_saving_the_latest_step_again_is_a_no_op_and_an_older_one_an_error(tmp_path):
    saver = Checkpointer(tmp_path)
    saver.save(4, make_state(1.0), {})
    saver.save(4, make_state(2.0), {})
    with pytest.raises(ValueError, match="step=3 is older"):
        saver.save(3, make_state(), {})
    saver.wait()
    assert float(saver.restore(4, make_state()).params["w"][0, 1]) == 1.0
    saver.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p | {"w": jnp.zeros((3, 3))}, r"params/w: checkpoint float32\[2, 3\], this run float32\[3, 3\]"),
        (lambda p: p | {"w": jnp.zeros((2, 3), jnp.bfloat16)}, r"params/w: checkpoint float32\[2, 3\], this run bfloat16"),
        (lambda p: p | {"extra": jnp.zeros(1)}, "params/extra: missing in the checkpoint"),
        (lambda p: {"w": p["w"]}, "params/half: only in the checkpoint"),
    ],
)
def test_another_model_is_refused_by_name_shape_and_dtype(tmp_path, change, message):
    saver = Checkpointer(tmp_path)
    saver.save(1, {"params": make_state().params}, {})
    saver.close()
    saver = Checkpointer(tmp_path)
    with pytest.raises(CheckpointMismatch, match=message):
        saver.restore(1, {"params": change(make_state().params)})
    saver.close()


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(4, 1), (1, 4), (4, 2)])
def test_any_number_of_devices_reads_what_any_other_wrote(tmp_path, saved_on, loaded_on):
    def sharded(devices, value):
        mesh = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
        return {"w": jax.device_put(value, jax.NamedSharding(mesh, jax.P("d")))}

    saver = Checkpointer(tmp_path)
    saver.save(1, sharded(saved_on, jnp.arange(16.0)), {})
    saver.wait()
    back = saver.restore(1, sharded(loaded_on, jnp.zeros(16)))["w"]
    assert float(back.sum()) == 120.0 and len(back.sharding.device_set) == loaded_on
    saver.close()


def test_identity_names_what_differs():
    check_identity({"seed": 0}, {"seed": 0}, "checkpoint 3")
    with pytest.raises(CheckpointMismatch, match=r"model.hidden_size: checkpoint 64, this run 128"):
        check_identity({"model.hidden_size": 64, "seed": 0}, {"model.hidden_size": 128, "seed": 0}, "checkpoint 3")


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)


def test_named_arrays_reads_fields_keys_and_indices():
    names = set(named_arrays(make_state()))
    assert {"params/w", "opt_state/0/count", "opt_state/0/mu/half", "step"} <= names
    assert not any(name.startswith("nothing") for name in names)
