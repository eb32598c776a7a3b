"""bench.kernels meets its bars, and says what it was not asked for."""

import json

import pytest

from experiments.bench import kernel_shapes, kernels, kernels_gpu


def test_bytes_meet_the_bars(tmp_path):
    path = tmp_path / "kernels.json"
    kernels.main(["--aot=none", f"--json={path}"])
    form = json.loads(path.read_text())
    results = form["results"]
    assert results["verify_attention_ratio"] <= 1.1 and results["sample_head_ratio"] <= 1.05
    for chip in ("v5e", "v5p"):
        ratios = results["verify_round_over_plain"]["Qwen2.5-7B"][chip]
        assert set(ratios) == {"1", "4", "16"} and all(1 < r <= 1.1 for r in ratios.values())
        drafted = results["spec_round_over_plain"]["Qwen2.5-7B"][chip]
        assert all(drafted[batch] > ratios[batch] for batch in ratios)
    assert results["aot_ok"] is None and "not asked for" in form["config"]["notes"]["aot_ok"]
    for row in results["ops"]:
        assert row["bytes"] >= row["minimum_bytes"] > 0
        assert row["ratio"] == pytest.approx(row["bytes"] / row["minimum_bytes"])
        # Moving the bytes takes at least this long.
        assert row["roofline_us"]["v5e"] >= 1e6 * row["bytes"] / 819e9 * 0.999


def test_weights_of_a_plain_step_are_those_of_the_model():
    """7.6 billion parameters, of which the embedding table is not read; the rest is what one row adds."""
    m = kernel_shapes.MODELS["Qwen2.5-7B"]
    weights = 2 * (m.layers * m.layer_weights + m.vocab * m.hidden)
    assert weights == pytest.approx(2 * (7.62e9 - 152_064 * 3584), rel=0.01)
    plain = kernel_shapes.round_bytes(m, 1, 1, "bfloat16")
    cache = 2 * m.layers * 2 * 2049 * m.kv_heads * m.head_dim
    assert 0 < plain - weights - cache < 0.01 * weights


@pytest.mark.parametrize("flag", ("--models=GPT-9", "--chips=v3", "--dtypes=float8", "--models="))
def test_unknown_names_end_the_run(flag, capsys):
    with pytest.raises(SystemExit):
        kernels.main([flag, "--aot=none"])
    assert "choose from" in capsys.readouterr().err


def test_the_gpu_benchmark_refuses_other_machines():
    with pytest.raises(ValueError, match="--kernels='pallas_gpu' needs a GPU, and JAX runs on cpu"):
        kernels_gpu.main(["--size=tiny"])
