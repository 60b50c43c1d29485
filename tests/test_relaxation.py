"""Fits of the relaxation against planted constants and the closed form of heavy-ball momentum."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.relaxation import RelaxationFit, fit_relaxation

Array = NDArray[np.float64]
SIZES = np.array([0.5, 0.8, 1.0, 1.2, 1.5])


def tidy(gaps: Array) -> pd.DataFrame:
    wide = pd.DataFrame(gaps.T).rename_axis("relaxation")
    return wide.melt(var_name="seed", value_name="gap", ignore_index=False).reset_index()


def heavy_ball(beta: float, curvature: float, n_updates: int = 101) -> Array:
    """Momentum on a quadratic loss, v <- beta v + lambda x, x <- x - v, with eta in lambda."""
    x, v, path = 1.0, 0.0, []
    for _ in range(n_updates):
        path.append(x)
        v = beta * v + curvature * x
        x = x - v
    return np.array(path)


def law(t: Array, amplitude: float, tau: float, period: float, phase: float, c: float) -> Array:
    return np.asarray(c + amplitude * np.exp(-t / tau) * np.cos(2 * np.pi * t / period + phase))


def noise(shape: tuple[int, int], seed: int, autocorrelation: float = 0.0) -> Array:
    values = np.random.Generator(np.random.Philox(seed)).standard_normal(shape)
    for k in range(1, shape[1]):
        values[:, k] += autocorrelation * values[:, k - 1]
    return values


def constants(beta: float, curvature: float) -> tuple[float, float]:
    angle = math.acos((1 + beta - curvature) / (2 * math.sqrt(beta)))
    return -2 / math.log(beta), 2 * math.pi / angle


def estimates(fit: RelaxationFit) -> dict[str, float]:
    return dict(fit.table().set_index("quantity")["estimate"])


class TestHeavyBall:
    @pytest.mark.parametrize(
        ("beta", "curvature"), [(0.9, 0.05), (0.9, 0.01), (0.95, 0.5), (0.8, 1.2)]
    )
    def test_closed_form(self, beta: float, curvature: float) -> None:
        path = heavy_ball(beta, curvature)
        fit = fit_relaxation(tidy(SIZES[:, None] * path + 0.1))
        assert fit.model == "oscillation"
        assert fit.time_constant is not None and fit.period is not None
        tau, period = constants(beta, curvature)
        assert fit.time_constant.estimate == pytest.approx(tau, rel=1e-5)
        assert fit.period.estimate == pytest.approx(period, rel=1e-5)
        assert fit.residual.estimate == pytest.approx(0.1, abs=1e-6)
        assert fit.residual_seen and fit.period_seen
        assert fit.predict(np.arange(101.0)) == pytest.approx(path + 0.1, abs=1e-5)
        assert fit.seeds["time_constant"].to_list() == pytest.approx([tau] * 5, rel=1e-5)
        assert fit.seeds["r2"].to_list() == pytest.approx([1.0] * 5)

    def test_with_noise(self) -> None:
        path = heavy_ball(0.9, 0.05)
        fit = fit_relaxation(tidy(SIZES[:, None] * path - 0.05 + 0.03 * noise((5, 101), 1)))
        assert fit.model == "oscillation"
        assert fit.time_constant is not None and fit.period is not None
        tau, period = constants(0.9, 0.05)
        assert tau in fit.time_constant and fit.time_constant.estimate == pytest.approx(
            tau, rel=0.1
        )
        assert period in fit.period and fit.period.estimate == pytest.approx(period, rel=0.02)
        assert -0.05 in fit.residual and 0.0 not in fit.residual

    @pytest.mark.parametrize("sigma", [0.0, 0.02])
    @pytest.mark.parametrize(("beta", "curvature"), [(0.5, 0.02), (0.3, 0.1), (0.0, 0.1)])
    def test_overdamped_is_a_decay(self, beta: float, curvature: float, sigma: float) -> None:
        path = heavy_ball(beta, curvature)
        fit = fit_relaxation(tidy(SIZES[:, None] * path + 0.1 + sigma * noise((5, 101), 2)))
        assert fit.model == "decay"
        assert fit.period is None and fit.phase is None and not fit.period_seen
        if beta == 0.0:
            assert fit.time_constant is not None
            tau = -1 / math.log(1 - curvature)
            assert fit.time_constant.estimate == pytest.approx(tau, rel=1e-6 if sigma == 0 else 0.1)


def test_every_parameter_is_recovered() -> None:
    t = np.arange(80.0)
    planted = {"amplitude": 0.3, "time_constant": 15, "period": 33, "phase": 2.5, "residual": -0.1}
    fit = fit_relaxation(tidy(np.array([law(t, a, 15, 33, 2.5, -0.1) for a in (0.2, 0.3, 0.4)])))
    assert estimates(fit) == pytest.approx(planted, rel=1e-5)
    assert fit.table()["unit"].to_list() == ["logits", "updates", "updates", "rad", "logits"]
    assert fit.predict(7.0) == pytest.approx(law(np.array(7.0), 0.3, 15, 33, 2.5, -0.1))


def test_a_negative_decay_keeps_its_sign() -> None:
    t = np.arange(60.0)
    fit = fit_relaxation(tidy(np.array([-a * np.exp(-t / 9) for a in (1.0, 1.5)])))
    assert fit.model == "decay" and fit.amplitude is not None
    assert fit.amplitude.estimate == pytest.approx(-1.25)
    assert fit.amplitude.side == -1


@pytest.mark.parametrize("autocorrelation", [0.0, 0.9])
def test_noise_is_constant(autocorrelation: float) -> None:
    chosen = [
        fit_relaxation(tidy(noise((5, 41), seed, autocorrelation))).model for seed in range(15)
    ]
    assert chosen.count("constant") >= 10  # of 15; see the docstring


def test_a_constant_curve() -> None:
    fit = fit_relaxation(tidy(np.outer([0.1, 0.2, 0.3], np.ones(20))))
    assert fit.model == "constant" and fit.amplitude is None and fit.time_constant is None
    assert fit.residual.estimate == pytest.approx(0.2)
    assert fit.predict([0.0, 5.0]).tolist() == pytest.approx([0.2, 0.2])
    assert fit.table()["quantity"].to_list() == ["residual"]


def test_the_interval_of_a_mean_is_the_t_interval() -> None:
    # In a constant model the jackknife is exact: the interval is that of the seeds' means.
    fit = fit_relaxation(tidy(np.outer([0.1, 0.2, 0.6], np.ones(20))))
    assert (fit.residual.low, fit.residual.high) == pytest.approx((-0.3573, 0.9573), abs=1e-4)


def test_intervals_cover() -> None:
    t, covered = np.arange(31.0), {"time_constant": 0, "period": 0, "residual": 0, "phase": 0}
    truth = {"time_constant": 10.0, "period": 18.0, "residual": 0.1, "phase": 0.4}
    for repeat in range(25):
        rng = np.random.Generator(np.random.Philox(1000 + repeat))
        sizes, offsets = rng.lognormal(0, 0.3, 4), 0.1 + 0.05 * rng.standard_normal(4)
        gaps = [law(t, a, 10, 18, 0.4, c) for a, c in zip(sizes, offsets, strict=True)]
        fit = fit_relaxation(tidy(np.array(gaps) + 0.05 * rng.standard_normal((4, 31))))
        assert fit.model == "oscillation"
        for name in covered:
            covered[name] += truth[name] in getattr(fit, name)
    assert min(covered.values()) >= 20, covered  # of 25; at 95 % fewer come once in 800


class TestTooShort:
    def test_a_decay_much_longer_than_the_curve_has_no_residual(self) -> None:
        t = np.arange(30.0)
        gaps = np.array([a * np.exp(-t / 40) for a in (1.0, 1.1, 1.2)])
        fit = fit_relaxation(tidy(gaps + 0.002 * noise((3, 30), 3)))
        assert fit.model == "decay" and not fit.residual_seen
        assert (fit.residual.low, fit.residual.high) == (-math.inf, math.inf)

    def test_a_straight_line_has_no_time_constant(self) -> None:
        fit = fit_relaxation(tidy(np.outer([1.0, 1.1, 1.2], 1 - np.arange(30.0) / 100)))
        assert fit.model == "decay" and fit.time_constant is not None and fit.amplitude is not None
        assert fit.time_constant.high == math.inf and fit.amplitude.high == math.inf
        assert not fit.residual_seen

    def test_a_period_longer_than_the_curve_is_not_seen(self) -> None:
        t = np.arange(50.0)
        fit = fit_relaxation(tidy(np.array([law(t, a, 40, 70, 0, 0) for a in (0.9, 1.0, 1.1)])))
        assert fit.model == "oscillation" and not fit.period_seen and not fit.residual_seen

    def test_ringing_shows_its_centre_though_it_lasts(self) -> None:
        t = np.arange(50.0)
        fit = fit_relaxation(tidy(np.array([law(t, a, 80, 9, 0, 0.2) for a in (0.9, 1.0, 1.1)])))
        assert fit.residual_seen and fit.residual.estimate == pytest.approx(0.2, abs=1e-6)


def test_unit_and_order_of_seeds_do_not_matter() -> None:
    curve = tidy(SIZES[:, None] * heavy_ball(0.9, 0.05) + 0.02 * noise((5, 101), 4))
    fit = fit_relaxation(curve)
    shuffled = fit_relaxation(curve.sample(frac=1, random_state=0))
    pd.testing.assert_frame_equal(fit.table(), shuffled.table())
    thousandth = fit_relaxation(curve.assign(gap=curve["gap"] / 1000))
    assert thousandth.period is not None and fit.period is not None
    assert thousandth.period.high == pytest.approx(fit.period.high, rel=1e-4)


def test_a_large_offset_hides_nothing() -> None:
    gaps = SIZES[:, None] * heavy_ball(0.9, 0.05)
    small, offset = fit_relaxation(tidy(gaps)), fit_relaxation(tidy(gaps + 1e6))
    assert estimates(offset) | {"residual": 0.0} == pytest.approx(
        estimates(small) | {"residual": 0.0}, rel=1e-5
    )


def test_records_are_frozen() -> None:
    fit = fit_relaxation(tidy(np.ones((2, 8))))
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit.model = "decay"  # type: ignore[misc]  # the point of the test


GOOD = tidy(np.outer([1.0, 2.0], np.exp(-np.arange(20.0) / 5)))
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: fit_relaxation(GOOD.drop(columns="gap")), "no column gap"),
    (
        lambda: fit_relaxation(GOOD[GOOD["seed"] == 0]),
        "curve has 1 seeds at 20 relaxations, but needs",
    ),
    (lambda: fit_relaxation(GOOD.iloc[:-1]), "seed 1 at relaxation 19 is missing or not finite"),
    (lambda: fit_relaxation(GOOD.assign(gap=math.inf)), "missing or not finite"),
    (lambda: fit_relaxation(pd.concat([GOOD, GOOD])), "seed 0 has relaxation 0 twice"),
    (
        lambda: fit_relaxation(GOOD[GOOD["relaxation"] < 7]),
        "2 seeds at 7 relaxations, but needs at least 2 at 8",
    ),
    (
        lambda: fit_relaxation(GOOD[GOOD["relaxation"] > 2]),
        "runs from 3 to 19, but must begin at 0",
    ),
    (lambda: fit_relaxation(GOOD, level=95.0), "level is 95.0"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_bad_curves_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(HysteresisError, match=message):
        call()
