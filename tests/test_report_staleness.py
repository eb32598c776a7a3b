"""The staleness section: what each figure shows is what the rows say, and what a mode does not have is not drawn."""

import json

import pytest
from matplotlib.figure import Figure

from adrl_jax import report, report_staleness
from adrl_jax.run_files import RunFiles

HISTS = [[1.0], [0.25, 0.75], [0.0, 0.5, 0.5]]
TOKENS = (100, 100, 300)


def rows(**more):
    """Three batches whose oldest tokens are 0, 1 and 2 updates old; `more` has lists of three values by name."""
    out = []
    for i, hist in enumerate(HISTS):
        mean = sum(age * share for age, share in enumerate(hist))
        row = {"phase": "train", "step": i + 1, "staleness/hist": hist, "staleness/mean": mean, "staleness/max": len(hist) - 1}
        row |= {
            "time/update": 0.5,
            "time/step": 1.0,
            "rollout/tokens": TOKENS[i],
            "staleness/disagreement": 0.1 * i,
            "queue/depth": float(i),
        }
        out.append(row | {name: values[i] for name, values in more.items()})
    return out


WAITS = {"time/learner_wait": [1.0, 0.5, 0.0], "time/generator_wait": [0.0, 0.25, 2.0]}


def run_of(found):
    return RunFiles("run", found, [], [], {})


@pytest.fixture
def drawn(monkeypatch):
    """A function that draws a figure and returns its axes and caption."""

    def get(make, found):
        kept = {}

        def figure(title, caption, draw):
            kept["ax"], kept["caption"] = Figure().subplots(), caption
            draw(kept["ax"])
            return title

        monkeypatch.setattr(report_staleness, "figure", figure)
        assert make(run_of(found))
        return kept["ax"], kept["caption"]

    return get


def test_the_histogram_weighs_batches_by_their_tokens(drawn):
    ax, _ = drawn(report_staleness.histogram, rows())
    by_hand = [(100 + 25) / 500, (75 + 150) / 500, 150 / 500]
    assert [bar.get_height() for bar in ax.patches] == pytest.approx(by_hand)


def test_lines_are_the_rows(drawn):
    ax, _ = drawn(report_staleness.ages, rows())
    lines = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert lines == {"oldest token": [0, 1, 2], "mean": pytest.approx([0, 0.75, 1.5])}
    ax, _ = drawn(report_staleness.disagreement, rows())
    assert ax.lines[0].get_ydata().tolist() == pytest.approx([0, 10, 20])  # per cent
    ax, _ = drawn(report_staleness.queue, rows())
    assert ax.lines[0].get_ydata().tolist() == [0, 1, 2]


def test_both_waits_are_drawn_and_summed(drawn):
    ax, caption = drawn(report_staleness.waits, rows(**WAITS))
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([1.0, 0.5, 0.0, 0.0, 0.25, 2.0])
    assert "the learner waited 1.5 s, the generator 2.2 s" in caption
    assert ax.get_ylim()[1] > 2.0 * 1.3


def test_each_mode_has_the_figures_it_has_numbers_for(tmp_path):
    def titles(found):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        text = report.write(tmp_path).read_text()
        names = ("Age of the data", "Tokens by age", "Disagreement", "Queue", "Who waited")
        assert ("Staleness</h2>" in text) == any(f"<h2>{name}</h2>" in text for name in names)
        return [name for name in names if f"<h2>{name}</h2>" in text]

    sync = [row | {"staleness/max": 0, "staleness/mean": 0.0, "staleness/hist": [1.0]} for row in rows()]
    assert titles(sync) == []
    assert titles(rows()) == ["Age of the data", "Tokens by age", "Disagreement", "Queue"]  # lagged: nobody waits
    assert titles(rows(**WAITS)) == ["Age of the data", "Tokens by age", "Disagreement", "Queue", "Who waited"]
    # Overlapped at a limit of 0: never stale, but the learner waits.
    fresh = [row | {"time/learner_wait": 1.0} for row in sync]
    assert "Who waited" in titles(fresh)
