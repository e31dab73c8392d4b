"""The fit finds constants that are in the times, and none below zero."""

from dataclasses import astuple

import numpy as np
import pytest

from bml.errors import UsageError
from bml.lab.bench.calibration import EXPERIMENTS
from bml.lab.bench.fit import NAMES, Sample, Work, addition, fit, pull
from bml.schedule.select.model import Constants

TRUE = Constants(alpha_s=30e-6, beta_s=0.3e-9, gamma_s=0.05e-9, delta_s=0.08e-9, epsilon_s=0.01e-9)


def samples(constants, noise=0.0):
    rng = np.random.default_rng(5)
    return [
        Sample(each.what, each.work, each.work.seconds(constants) * (1 + noise * rng.uniform(-1, 1)))
        for each in EXPERIMENTS
    ]


def test_constants_are_found_again():
    assert astuple(fit(samples(TRUE))) == pytest.approx(astuple(TRUE), rel=1e-6)


def test_noise_of_a_few_percent_leaves_them_near():
    found = fit(samples(TRUE, noise=0.03))
    assert astuple(found)[:4] == pytest.approx(astuple(TRUE)[:4], rel=0.2)


def test_what_does_not_cost_anything_is_zero_and_nothing_is_below():
    free = Constants(alpha_s=30e-6, beta_s=0.3e-9, gamma_s=0.0, delta_s=0.08e-9, epsilon_s=0.0)
    assert astuple(fit(samples(free))) == pytest.approx(astuple(free), rel=1e-6, abs=1e-16)
    cheaper_in_a_crowd = [
        Sample(each.what, each.work, each.work.seconds(TRUE) * (0.6 if each.work.incast else 1))
        for each in EXPERIMENTS
    ]
    found = fit(cheaper_in_a_crowd)
    assert found.epsilon_s == 0
    assert min(astuple(found)) >= 0


def test_experiments_are_lines_of_the_model():
    assert pull(1, 10) == Work(rounds=2, wire=10)
    assert pull(3, 10) == Work(rounds=2, wire=30, incast=120)
    assert addition(0, 10) == Work(touched=20)
    assert addition(2, 10) == Work(added=20, touched=40)
    assert pull(3, 10).seconds(Constants(1, 10, 0, 0, 1000)) == 2 + 300 + 120000


def test_a_constant_that_no_sample_depends_on_is_named():
    with pytest.raises(UsageError, match="no sample depends on gamma_s, delta_s, epsilon_s"):
        fit([Sample("one", pull(1, 8), 1e-4), Sample("two", pull(1, 1 << 20), 1e-3)])


def test_the_order_of_a_sample_is_that_of_the_constants():
    assert NAMES == ("alpha_s", "beta_s", "gamma_s", "delta_s", "epsilon_s")
