"""The page: complete, self-contained, and honest where a run has no data for a figure."""

import json
import re

import pytest

from adrl_jax import report

ARMS = ("off", "eagle-d2", "eagle-d4")


def write_run(folder, steps=6):
    metrics = [{"phase": "warm_start", "step": 1, "loss": 2.0}, {"phase": "evaluate", "step": 0, "reward/mean": 0.2}]
    arms, samples = [], []
    for k in range(1, steps + 1):
        row = {"phase": "train", "step": k, "reward/mean": 0.2 + k / 50, "spec/accept_len": None if k == 2 else 2 + k / 9}
        row |= {f"time/{p}": 0.1 * k for p in ("rollout", "update", "compile")} | {"time/step": 0.3 * k, "rollout/tokens": 500}
        metrics.append(row)
        running = [8, 5, 2, 1]
        arms.append(
            {"step": k, "arms": [ARMS[min(i, 2)] for i in range(4)], "running": running, "start": [0.1, 0.2, 0.3, 0.4],
             "seconds": [0.1] * 4, "lengths": [3, 4, 5, 90]}
        )  # fmt: skip
        samples.append(
            {"phase": "train", "step": k, "prompt": "<script>alert(1)</script>", "response": "a & b", "extracted": None,
             "reward": 1.0, "advantage": -0.5, "response_length": 4}
        )  # fmt: skip
    for name, rows in (("metrics", metrics), ("arms", arms), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


SUMMARY = {
    "reward_start": 0.2,
    "reward_end": 0.31,
    "rollout_speedup": 1.5,
    "accept_length": 2.4,
    "identical_tokens": True,
    "tie_divergences": 0,
    "divergent_responses": 0,
    "seconds": 90.0,
    "steps": 6,
    "rollout_tokens_per_s": 1500.0,
    "rollout_tokens_per_s_off": 1000.0,
    "running": [[0.0, 8], [0.5, 1], [1.0, 0]],
    "running_off": [[0.0, 8], [0.9, 1], [1.5, 0]],
}


def test_a_complete_run_has_all_figures_and_needs_nothing_else(tmp_path):
    write_run(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    text = report.write(tmp_path).read_text()
    titles = ("Reward", "Response length", "The tail of one rollout", "Accept length", "Arm chosen", "Time of a step")
    assert text.count("<svg") == len(titles) and all(f"<h2>{title}</h2>" in text for title in titles)
    assert "Staleness" not in text  # nothing was ever stale, and nobody waited
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    assert "<script" not in text and " src=" not in text and "&lt;script&gt;" in text and "a &amp; b" in text
    for figure in ("0.310", "from 0.200", "1.50×", "2.40", "identical", "1,500 tokens/s", "without speculation"):
        assert figure in text


def test_a_run_without_summary_or_arms_leaves_their_figures_out(tmp_path):
    write_run(tmp_path)
    (tmp_path / "arms.jsonl").unlink()
    text = report.write(tmp_path).read_text()
    assert text.count("<svg") == 3 and "Closing table" not in text
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        report.write(tmp_path / "elsewhere")


def test_the_tail_comes_from_the_last_rollout_where_there_was_no_comparison(tmp_path):
    write_run(tmp_path)
    assert "The rollout of step 6." in report.write(tmp_path).read_text()


def test_the_closing_table_says_what_is_known():
    text = report.closing_text(SUMMARY)
    assert "0.200" in text and "0.310" in text and "1.50×" in text and "yes, every token" in text and "1.5 min" in text
    differs = report.closing_text(SUMMARY | {"identical_tokens": False, "divergent_responses": 3})
    assert "no, 3 responses differ" in differs
    assert "2 float ties" in report.closing_text(SUMMARY | {"tie_divergences": 2})
    nothing = dict.fromkeys(SUMMARY) | {"seconds": 60.0, "steps": 2}
    assert report.closing_text(nothing).count("–") == 6
