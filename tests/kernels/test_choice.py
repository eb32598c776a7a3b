"""Who runs an op: names are checked, `auto` tells once what it took and why, and what was asked for by name is never replaced."""

import jax
import pytest
from adrl_kernels import choice


def refuses(name):
    return None if name == "xla" else f"{name} is too small"


@pytest.mark.parametrize(
    "platform, problem, message",
    [
        ("cpu", lambda name: None, "op runs on xla: there are no Pallas kernels for cpu"),
        ("tpu", lambda name: None, "op runs on pallas_tpu: the backend is a TPU"),
        ("tpu", refuses, "op runs on xla: pallas_tpu cannot: pallas_tpu is too small"),
        ("gpu", lambda name: None, "op runs on xla: the Pallas kernels for GPUs have not been measured on one yet"),
    ],
)
def test_auto_tells_once_what_it_took_and_why(platform, problem, message, monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    choice.told.cache_clear()
    with caplog.at_level("INFO", logger="adrl_kernels"):
        chosen = {choice.resolve("op", "auto", problem) for _ in range(3)}
    assert [r.message for r in caplog.records] == [message]
    assert chosen == {message.split(":")[0].split()[-1]}


@pytest.mark.parametrize("name", choice.IMPLEMENTATIONS[1:])
def test_what_is_named_is_taken_or_refused(name, caplog):
    assert choice.resolve("op", name, lambda name: None) == name
    with pytest.raises(choice.UnsupportedError, match=f"op by {name}: nothing fits"):
        choice.resolve("op", name, lambda name: "nothing fits")
    assert not caplog.records


def test_unknown_names_and_other_machines_are_refused():
    choices = "choose one of auto, xla, pallas_tpu, pallas_gpu, interpret"
    with pytest.raises(ValueError, match=f"kernels.implementation='triton' is unknown; {choices}"):
        choice.check_name("triton", "kernels.implementation")
    with pytest.raises(ValueError, match="field='pallas_gpu' needs a GPU, and JAX runs on cpu; choose auto, xla"):
        choice.check_platform("pallas_gpu", "field")
    for name in ("auto", "xla", "interpret"):
        choice.check_platform(name)
