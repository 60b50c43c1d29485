"""How the gap relaxes after the loop: a damped oscillation, a plain decay, or neither.

Heavy-ball momentum in a quadratic bowl rings exactly as a damped oscillation does, so that its
period and time constant can be held against what the optimizer's settings predict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import optimize

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.statistics import Interval, Values, mean_interval

Array = NDArray[np.float64]

MODELS = ("constant", "decay", "oscillation")  # the simplest first
QUANTITIES = ("amplitude", "time_constant", "period", "phase", "residual")
UNITS = ("logits", "updates", "updates", "rad", "logits")
# Bounds of the search, in steps between updates or in lengths of the curve. Just below 2 steps a
# period aliases, and at 2 the sine vanishes at every update.
SHORTEST_PERIOD, LONGEST_PERIOD = 2.5, 4.0
SHORTEST_TIME, LONGEST_TIME, N_TIMES = 0.5, 10.0, 16
NEARLY = 0.999  # a fit that is this close to a bound has run into it


@dataclass(frozen=True)
class RelaxationFit:
    """Result of `fit_relaxation`: the law that the mean gap over seeds follows.

    A quantity that the model does not have is None. Where a fit, with all seeds or without one, ran
    into an end of the search, the curve sets no bound: that bound is then infinite, or zero.
    """

    model: str
    """"oscillation", "decay" or "constant"."""
    errors: dict[str, float]
    """Leave-one-seed-out mean squared error of each model, in logits squared."""
    amplitude: Interval | None
    """A, logits at relaxation 0; positive for an oscillation, whose sign is in the phase."""
    time_constant: Interval | None
    """Updates in which what is transient falls to 1/e."""
    period: Interval | None
    """Updates from one crest to the next."""
    phase: Interval | None
    """Radians; bounds may leave (-pi, pi], and a whole circle says nothing."""
    residual: Interval
    """c, logits: what stays for ever if the law goes on to hold."""
    n: int
    """Number of seeds."""
    length: float
    """Updates from the first to the last of the curve."""
    residual_seen: bool
    """Whether in every fit, left-out seeds included, the curve is long enough to see `residual`.

    It holds three time constants or two periods; otherwise the bounds of `residual` are infinite.
    """
    seeds: pd.DataFrame = field(repr=False)
    """The chosen model fitted to each seed's own curve: seed, the five quantities, r2."""

    @property
    def period_seen(self) -> bool:
        """Whether the curve lasts a whole period, up to the upper bound of its interval."""
        return self.period is not None and self.period.high <= self.length

    def predict(self, t: Values | float) -> Array:
        """The fitted mean gap, in logits, at these relaxations."""
        found = [getattr(self, name) for name in QUANTITIES]
        parameters = np.array([x.estimate if x else math.nan for x in found])
        at = np.asarray(t, dtype=float)
        return np.asarray(_curves(parameters[None], at.ravel())[0].reshape(at.shape))

    def table(self) -> pd.DataFrame:
        """One row a quantity: `quantity`, `unit`, `estimate`, `low`, `high`."""
        found = [(*both, getattr(self, both[0])) for both in zip(QUANTITIES, UNITS, strict=True)]
        rows = [(name, unit, x.estimate, x.low, x.high) for name, unit, x in found if x]
        return pd.DataFrame(rows, columns=["quantity", "unit", "estimate", "low", "high"])


def fit_relaxation(curve: pd.DataFrame, *, level: float = 0.95) -> RelaxationFit:
    """Fit the mean gap over seeds after the loop, and choose the law by prediction of new seeds.

    The candidates are, with t the relaxation,

        oscillation   g(t) = c + A exp(-t / tau) cos(2 pi t / T + phi)
        decay         g(t) = c + A exp(-t / tau)
        constant      g(t) = c

    fitted by least squares: c, A cos(phi) and A sin(phi) are linear and solved for, tau and T
    searched on a grid and refined (variable projection).

    *Choice.* Each seed's curve is predicted by a fit to the mean of the others. The model with the
    lowest mean squared error stands, unless a simpler one's error exceeds it by no more than one
    standard error over seeds of the paired difference. In simulations of five seeds of noise alone,
    that takes one in seven for a decay or an oscillation. An information criterion over updates
    would be far more confident, and wrong: within a seed residuals are autocorrelated, and only
    seeds are independent. An oscillation whose period runs into the end of the search, four lengths
    of the curve, never turns back in view, as two decays in a row do, and is not admitted.

    *Intervals.* Jackknife over seeds with Student's t at n - 1, given the model, centred on the fit
    to all; for amplitude, time constant and period on the log scale, which never reaches zero:
    whether there is a transient is for the choice. Where seeds differ in period, their mean decays
    faster than each: compare `seeds`.

    Args:
        curve: `seed`, `relaxation` (updates, from 0 on, at least 8, the same for every seed), and
            `gap` (logits); at least two seeds.
        level: confidence level of the intervals.

    Raises:
        HysteresisError: a missing column, a value not finite, fewer than two seeds or 8 updates,
            seeds measured at different relaxations, a first that is not 0, or a bad level.

    Example:
        >>> t = np.arange(101)
        >>> gaps = {s: (s + 2) * np.exp(-t / 20) * np.cos(2 * np.pi * t / 40) for s in range(5)}
        >>> wide = pd.DataFrame(gaps).rename_axis(index="relaxation", columns="seed")
        >>> fit = fit_relaxation(wide.unstack().rename("gap").reset_index())
        >>> fit.model, round(fit.time_constant.estimate, 3), round(fit.period.estimate, 3)
        ('oscillation', 20.0, 40.0)

    Source: variable projection, Golub and Pereyra (1973), SIAM J. Numer. Anal. 10(2); one standard
    error, Breiman et al. (1984), CART, section 3.4.3; jackknife, Efron and Tibshirani (1993).
    """
    seeds, t, gaps = _checked(curve)
    n, length = len(seeds), float(t[-1] - t[0])
    others = (gaps.sum(axis=0) - gaps) / (n - 1)
    fits = {model: _fit(t, np.vstack([gaps.mean(axis=0), others]), model) for model in MODELS}
    by_seed = {m: ((gaps - _curves(fits[m][1:], t)) ** 2).mean(axis=1) for m in MODELS}
    turns_back = fits["oscillation"][0, 2] < NEARLY * _bounds(t, 2)[1, 1]
    model = _choose(by_seed if turns_back else {m: by_seed[m] for m in MODELS[:2]})
    fit, own = fits[model], _fit(t, gaps, model)
    tau, period = fit[:, 1], fit[:, 2]  # NaN where the model has none, which compares false
    seen = bool((np.isnan(tau) | (3 * tau <= length) | (2 * period <= length)).all())
    residual = _jackknife(fit[:, 4], level)
    left, total = ((gaps - _curves(own, t)) ** 2).mean(axis=1), gaps.var(axis=1)
    r2 = 1 - left / np.where(total > 0, total, math.nan)
    return RelaxationFit(
        model=model,
        errors={name: float(errors.mean()) for name, errors in by_seed.items()},
        **_transient(fit, _bounds(t, MODELS.index(model)), level),
        residual=residual if seen else replace(residual, low=-math.inf, high=math.inf),
        n=n,
        length=length,
        residual_seen=seen,
        seeds=pd.DataFrame({"seed": seeds, **dict(zip(QUANTITIES, own.T, strict=True)), "r2": r2}),
    )


def _checked(curve: pd.DataFrame) -> tuple[NDArray[Any], Array, Array]:
    """Seeds, relaxations, and the gaps, one row a seed."""
    missing = {"seed", "relaxation", "gap"} - set(curve.columns)
    if missing:
        raise HysteresisError(f"curve has no column {min(missing)}; it has {list(curve.columns)}")
    twice = curve.duplicated(["seed", "relaxation"])
    if twice.any():
        seed, at = (curve.loc[twice, name].iloc[0] for name in ("seed", "relaxation"))
        raise HysteresisError(f"seed {seed} has relaxation {at} twice")
    wide = curve.pivot(index="seed", columns="relaxation", values="gap").sort_index(axis=1)
    if len(wide) < 2 or wide.shape[1] < 8:
        raise HysteresisError(
            f"curve has {len(wide)} seeds at {wide.shape[1]} relaxations, but needs at least 2 at 8"
        )
    t, gaps = wide.columns.to_numpy(float), wide.to_numpy(float)
    bad = np.argwhere(~np.isfinite(gaps))
    if len(bad):
        seed, at = wide.index[bad[0][0]], wide.columns[bad[0][1]]
        raise HysteresisError(f"the gap of seed {seed} at relaxation {at} is missing or not finite")
    if t[0] != 0 or not np.isfinite(t).all():
        raise HysteresisError(
            f"relaxation runs from {t[0]:g} to {t[-1]:g}, but must begin at 0 and stay finite"
        )
    return wide.index.to_numpy(), t, gaps


def _choose(by_seed: dict[str, Array]) -> str:
    """The simplest, which comes first, that is no worse than the best by a standard error."""
    best = min(by_seed.values(), key=lambda errors: float(errors.mean()))
    excess = {model: errors - best for model, errors in by_seed.items()}
    return next(m for m, x in excess.items() if x.mean() <= x.std(ddof=1) / math.sqrt(len(x)))


def _basis(t: Array, scales: Array) -> Array:
    """The linear columns at each (tau, T), (tau,) or () on the last axis of `scales`."""
    ones = np.ones((*scales.shape[:-1], len(t)))
    if scales.shape[-1] == 0:
        return ones[..., None]
    decay = np.exp(-t / scales[..., :1])
    if scales.shape[-1] == 1:
        return np.stack([ones, decay], axis=-1)
    angle = 2 * np.pi * t / scales[..., 1:]
    return np.stack([ones, decay * np.cos(angle), -decay * np.sin(angle)], axis=-1)


def _bounds(t: Array, n_scales: int) -> Array:
    """Lowest and highest tau, and T, of the search; one column each."""
    step, length = float(np.diff(t).min()), float(t[-1] - t[0])
    low = [SHORTEST_TIME * step, SHORTEST_PERIOD * step]
    return np.array([low, [LONGEST_TIME * length, LONGEST_PERIOD * length]])[:, :n_scales]


def _grid(t: Array, n_scales: int) -> list[Array]:
    """Values of tau and T to start from, in a list of parts that are small enough to hold."""
    if n_scales == 0:
        return [np.empty((1, 0))]
    low, high = _bounds(t, n_scales)
    times = np.geomspace(low[0], high[0], N_TIMES)
    if n_scales == 1:
        return [times[:, None]]
    # Even in frequency, a quarter of a turn over the whole curve apart, so that no peak is missed.
    periods = 1 / np.arange(1 / high[1], 1 / low[1], 1 / high[1])
    return [np.column_stack([np.full_like(periods, time), periods]) for time in times]


def _fit(t: Array, curves: Array, model: str) -> Array:
    """Least-squares parameters, in the order of `QUANTITIES`, of each curve (one a row)."""
    grid = _grid(t, MODELS.index(model))
    orthonormal = (np.linalg.qr(_basis(t, scales))[0] for scales in grid)
    centred = curves - curves.mean(axis=1, keepdims=True)
    explained = [((centred @ q) ** 2).sum(axis=-1) for q in orthonormal]  # grid point by curve
    starts = np.concatenate(grid)[np.concatenate(explained).argmax(axis=0)]
    return np.array([_refined(t, *pair) for pair in zip(curves, starts, strict=True)])


def _refined(t: Array, curve: Array, start: Array) -> Array:
    """Parameters of one curve, from the best point of the grid."""
    scale = float(np.ptp(curve)) or 1.0

    def residuals(logs: Array) -> Array:
        basis = _basis(t, np.exp(logs))
        return np.asarray(basis @ np.linalg.lstsq(basis, curve, rcond=None)[0] - curve) / scale

    logs = np.log(start)
    if len(start):
        low, high = np.log(_bounds(t, len(start)))
        logs = optimize.least_squares(residuals, logs.clip(low, high), bounds=(low, high)).x
    c, *transient = np.linalg.lstsq(_basis(t, np.exp(logs)), curve, rcond=None)[0].tolist()
    tau, period = [*np.exp(logs).tolist(), math.nan, math.nan][:2]
    if len(transient) == 2:
        cosine, sine = transient
        return np.array([math.hypot(cosine, sine), tau, period, math.atan2(sine, cosine), c])
    return np.array([*(transient or [math.nan]), tau, period, math.nan, c])


def _curves(parameters: Array, t: Array) -> Array:
    """The curve of each row of parameters; what is NaN, the model does not have."""
    amplitude, tau, period, phase, c = parameters.T[:, :, None]
    wave = np.cos(2 * np.pi * t / period + phase)
    transient = amplitude * np.exp(-t / tau) * np.where(np.isnan(period), 1.0, wave)
    return np.asarray(c + np.where(np.isnan(tau), 0.0, transient))


def _transient(fit: Array, bounds: Array, level: float) -> dict[str, Interval | None]:
    """Of each quantity, from the fit to all seeds (first row) and those without one."""
    found: dict[str, Interval | None] = dict.fromkeys(QUANTITIES[:4])
    n_scales = bounds.shape[1]
    if n_scales == 0:
        return found
    amplitude, phase, scales = fit[:, 0], fit[:, 3], fit[:, 1 : 1 + n_scales]
    at_low = (scales <= bounds[0] / NEARLY).any(axis=0)
    at_high = (scales >= bounds[1] * NEARLY).any(axis=0)
    for i, name in enumerate(("time_constant", "period")[:n_scales]):
        x = _log_jackknife(scales[:, i], level)
        low, high = 0.0 if at_low[i] else x.low, math.inf if at_high[i] else x.high
        found[name] = replace(x, low=low, high=high)
    # At the end of the search amplitude is traded against residual, and neither is determined.
    sign = math.copysign(1.0, amplitude[0])
    x = _log_jackknife(np.abs(amplitude).clip(np.finfo(float).tiny), level)
    low, high = sorted([sign * x.low, sign * x.high])
    if at_high.any() or (np.sign(amplitude) != sign).any():
        low, high = 0.0 if n_scales == 2 else -math.inf, math.inf
    found["amplitude"] = replace(x, estimate=sign * x.estimate, low=low, high=high)
    if n_scales == 2:
        x = _jackknife(phase[0] + np.angle(np.exp(1j * (phase - phase[0]))), level)
        half = math.pi if at_high.any() else min(x.high - x.estimate, math.pi)
        found["phase"] = replace(x, low=x.estimate - half, high=x.estimate + half)
    return found


def _jackknife(values: Array, level: float) -> Interval:
    """From the value for all seeds (first) and those without one."""
    estimate, without = float(values[0]), values[1:]
    n = len(without)
    pseudo = mean_interval(n * estimate - (n - 1) * without, level=level)
    half = (pseudo.high - pseudo.low) / 2
    return Interval(estimate, estimate - half, estimate + half, level, "jackknife", n)


def _log_jackknife(values: Array, level: float) -> Interval:
    x = _jackknife(np.log(values), level)
    with np.errstate(over="ignore"):
        estimate, low, high = np.exp([x.estimate, x.low, x.high]).tolist()
    return replace(x, estimate=estimate, low=low, high=high)
