"""What is saved is what is trained, whole or not at all, and the caller may give its buffers away at once."""

import json
import threading

import drafter_world as world
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from adrl_jax.drafter import checkpoint, saving
from adrl_jax.drafter.saving import OPTIMIZER, DrafterSaver, load_optimizer, saves
from adrl_jax.speculation import eagle
from adrl_jax.speculation.eagle import Eagle

DRAFTER = Eagle(world.TINY, draft_vocab_size=7)


def made():
    params = DRAFTER.init_params(jax.random.key(3))
    opt_state = jax.tree.map(lambda x: x + 1, world.OPTIMIZER.init(eagle.split(params)[0]))
    return params, opt_state


def test_round_trip_with_the_optimizer_and_without_anything_of_the_target(tmp_path):
    params, opt_state = made()
    served = DRAFTER.serve(params, world.policy())
    saver = DrafterSaver(tmp_path / "d", DRAFTER)
    saver.save(12, served, opt_state, target_fingerprint="abc", record={"step": 4})
    saver.wait()
    drafter, found, record = checkpoint.load(tmp_path / "d" / "12", world.TINY, "abc")
    assert drafter == DRAFTER and (record["version"], record["step"]) == (12, 4)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    template = jax.tree.map(jnp.zeros_like, opt_state)
    jax.tree.map(np.testing.assert_array_equal, load_optimizer(tmp_path / "d" / "12", template), opt_state)
    written = safetensors.numpy.load_file(tmp_path / "d" / "12" / checkpoint.WEIGHTS)
    assert not any("embedding" in name or "head" in name for name in written)
    trained = eagle.split(params)[0]
    assert sum(x.size for x in written.values()) == 7 + sum(x.size for x in jax.tree.leaves(trained))


def test_buffers_may_be_given_away_while_it_writes(tmp_path, monkeypatch):
    params, opt_state = made()
    expected = jax.tree.map(np.array, (params, opt_state))
    go, write = threading.Event(), saving.DrafterSaver._write

    def slow(self, *args):
        assert go.wait(20)
        write(self, *args)

    monkeypatch.setattr(saving.DrafterSaver, "_write", slow)
    saver = DrafterSaver(tmp_path, DRAFTER)
    saver.save(1, params, opt_state, target_fingerprint="")
    assert saves(tmp_path) == []
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    step((params, opt_state))
    go.set()
    saver.wait()
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(tmp_path / "1", world.TINY)[1], expected[0])
    jax.tree.map(np.testing.assert_array_equal, load_optimizer(tmp_path / "1", opt_state), expected[1])


def test_a_save_that_was_cut_short_is_no_save(tmp_path, monkeypatch):
    params, opt_state = made()
    saver = DrafterSaver(tmp_path, DRAFTER)
    saver.save(1, params, opt_state, target_fingerprint="")
    saver.wait()

    def dies(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save", dies)
    saver.save(2, params, opt_state, target_fingerprint="")
    with pytest.raises(OSError, match="no space left"):
        saver.wait()
    assert saves(tmp_path) == [1] and (tmp_path / ".2.part" / OPTIMIZER).exists()
    monkeypatch.undo()
    # The next process puts the remains away and goes on.
    again = DrafterSaver(tmp_path, DRAFTER)
    assert not (tmp_path / ".2.part").exists()
    again.save(2, params, opt_state, target_fingerprint="")
    again.wait()
    assert saves(tmp_path) == [1, 2] and checkpoint.load(tmp_path / "2", world.TINY)


def test_the_latest_stay_and_a_version_is_written_once(tmp_path):
    params, opt_state = made()
    saver = DrafterSaver(tmp_path, DRAFTER, keep=2)
    for version in (3, 10, 9, 21):
        saver.save(version, params, opt_state, target_fingerprint="")
    saver.wait()
    assert saves(tmp_path) == [10, 21]
    record = tmp_path / "21" / checkpoint.RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | {"mark": 1}))
    saver.save(21, params, opt_state, target_fingerprint="")
    saver.wait()
    assert json.loads(record.read_text())["mark"] == 1
    assert saves(tmp_path / "nowhere") == []


def test_faults_are_named(tmp_path):
    params, opt_state = made()
    with pytest.raises(ValueError, match=r"DrafterSaver\.keep=0"):
        DrafterSaver(tmp_path, DRAFTER, keep=0)
    with pytest.raises(FileNotFoundError, match="absent"):
        load_optimizer(tmp_path, opt_state)
    saver = DrafterSaver(tmp_path, DRAFTER)
    saver.save(1, params, opt_state, target_fingerprint="")
    saver.wait()
    with pytest.raises(ValueError, match=r"expected None|is None"):
        load_optimizer(tmp_path / "1", opt_state[0])
