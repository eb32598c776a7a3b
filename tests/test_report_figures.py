"""What the figures share."""

import numpy as np
import pytest

from adrl_jax import report_figures


def test_smoothing_keeps_a_line_and_its_ends():
    values = np.arange(9.0)
    assert report_figures.smooth(values)[4] == 4 and report_figures.smooth(values)[0] == pytest.approx(1.0)
    assert report_figures.smooth(np.ones(3)).sum() == pytest.approx(3)


def test_a_series_leaves_out_steps_without_a_number():
    steps, values = report_figures.series([{"step": 1, "x": 2.0}, {"step": 2, "x": None}, {"step": 3}], "x")
    assert steps.tolist() == [1] and values.tolist() == [2.0]
