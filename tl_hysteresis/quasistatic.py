"""What is left of the memory as the loop is run ever more slowly.

Hysteresis in the strict sense is quasi-static: it stays as the rate goes to zero. A system that
merely lags behind its control shows a gap, too, at any finite rate.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import integrate, stats

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.statistics import equivalence_test, mean_interval

Array = NDArray[np.float64]
Row = dict[Hashable, Any]

MEASURES = ("gap", "lag")
FEWEST_DWELLS, FEWEST_SEEDS = 3, 3
MOST_SEEDS = 1000  # beyond that, seeds are not what is missing

PERSISTENT = "persistent hysteresis"
FINITE_RATE = "finite-rate path dependence"
NO_MEMORY = "no memory found"
UNDECIDED = "undecided at this n"


def loop_area(loop: pd.DataFrame) -> pd.DataFrame:
    """Area that the margin encloses over the control, and the mean height of the loop.

    The area is minus the integral of the margin d(control) along the path, by the trapezoid rule:
    that of (margin falling - margin rising) over the control. It is positive where the margin lags
    behind the value it came from, and zero where margin is a function of control.

    Args:
        loop: `seed`, `branch`, `update`, `control` (its value at the last update before), and
            `margin` (logits); each path must end at the control where it began.

    Returns:
        `seed`, `branch`, `area` (logits times control), and `lag`, the area over the range of the
        control, in logits as the gap is.

    Raises:
        HysteresisError: a missing column, a value not finite, an update twice, a path that is not
            closed, or one whose control does not change.

    Example:
        >>> path = {"update": range(5), "control": [0, 1, 0, -1, 0], "margin": [0, 1, 1, -1, -1]}
        >>> loop_area(pd.DataFrame({"seed": 0, "branch": "below", **path}))
           seed branch  area   lag
        0     0  below   1.5  0.75
    """
    _check(loop, "loop", ["seed", "branch", "update"], ["control", "margin"])
    rows = []
    for (seed, branch), part in loop.sort_values("update").groupby(["seed", "branch"], sort=False):
        control, margin = part["control"].to_numpy(float), part["margin"].to_numpy(float)
        span, where = float(np.ptp(control)), f"the path of seed {seed}, {branch}"
        if span == 0:
            raise HysteresisError(f"{where}, stays at control {control[0]:g}: there is no loop")
        if abs(control[-1] - control[0]) > 1e-9 * span:
            raise HysteresisError(
                f"{where}, runs from control {control[0]:g} to {control[-1]:g}: it is not closed"
            )
        area = -float(integrate.trapezoid(margin, control))
        rows.append((seed, branch, area, area / span))
    areas = pd.DataFrame(rows, columns=["seed", "branch", "area", "lag"])
    return areas.sort_values(["seed", "branch"], ignore_index=True)


@dataclass(frozen=True)
class QuasiStatic:
    """Result of `quasi_static`."""

    verdict: str
    """One of the four that `quasi_static` describes."""
    margin: float
    """The gap or lag, in logits, that is just too large to be called none."""
    level: float
    """Confidence level, of all claims that something is there together."""
    n: int
    """Number of seeds."""
    rates: pd.DataFrame = field(repr=False)
    """measure, dwell, rate, estimate, low, high, present, equivalent, seeds_needed.

    `seeds_needed` is roughly how many would show one or the other if mean and standard deviation
    over seeds stayed as they are; infinite where no feasible number would.
    """
    limits: pd.DataFrame = field(repr=False)
    """At rate zero: measure, method, estimate, low, high, equivalent, seeds_needed, stays, gone.

    The verdict goes by the `method` "linear". Beside it stand "quadratic", over all dwells, and
    "slowest", the slowest dwell alone. "continued" is no limit: it is where the measure would be if
    it changed by as much again as it did over the slowest half, which is a line on log dwell.
    """

    @property
    def evidence(self) -> tuple[str, ...]:
        """Why the verdict is what it is, and what is missing where it is undecided."""
        found: list[str] = []
        for name in MEASURES:
            rates = self.rates[self.rates["measure"] == name].to_dict("records")
            limits = self.limits[self.limits["measure"] == name].to_dict("records")
            line, quadratic, slowest, continued = limits
            clearest = max(rates, key=lambda row: (row["present"], abs(row["estimate"])))
            told = [rates[0], clearest, {**slowest, "dwell": rates[-1]["dwell"]}]
            if self.verdict == UNDECIDED and line["gone"]:
                told[1:2] = rates[1:-1]
            by_dwell = {row["dwell"]: row for row in told}
            found += [self._sentence(f"{name} at dwell {at:g}", by_dwell[at]) for at in by_dwell]
            found.append(self._sentence(f"{name} at rate zero", line))
            asked = [line, slowest]
            if {self._where(row) for row in asked} == {"beyond"}:
                asked.append(continued)
                found.append(self._sentence(f"{name}, its last change made once more", continued))
            settled = line["stays"] or line["gone"]
            if not settled and "neither" not in {self._where(row) for row in asked}:
                found.append(f"{name} has not settled: slower loops are missing, not seeds.")
            if (line["stays"], line["gone"]) != (quadratic["stays"], quadratic["gone"]):
                found.append(self._sentence(f"{name} by the quadratic alternative", quadratic))
        return tuple(found)

    def _where(self, row: Row) -> str:
        if row["equivalent"]:
            return "within"
        beyond = row["low"] > self.margin or row["high"] < -self.margin
        return "beyond" if beyond else "neither"

    def _sentence(self, what: str, row: Row) -> str:
        where = self._where(row)
        said = f"{what}: {row['estimate']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}] logits"
        if where != "neither":
            return f"{said}, {where} ±{self.margin:g}."
        needed = row["seeds_needed"]
        seeds = f"about {needed:.0f}" if needed < math.inf else f"not even {MOST_SEEDS}"
        where = f"neither within nor beyond ±{self.margin:g}"
        return f"{said}, {where}: too wide with {self.n} seeds; {seeds} would do."


def quasi_static(
    table: pd.DataFrame, *, margin: float, level: float = 0.95, least_span: float = 30.0
) -> QuasiStatic:
    """Judge whether a gap or a lag is left as the loop is run ever more slowly.

    Each measure is carried to rate zero, seed by seed: the intercept of a least-squares line on the
    rate, 1 / dwell, over the slowest half of the dwells (at least three). A line suits what falls
    as the rate does. What falls exponentially in dwell is flat near zero, and its intercept too
    low, even of the other sign; so the slowest dwell itself must agree always.

    For each measure, with intervals over seeds:

    - *present* at a rate: the interval there lies wholly beyond +margin or -margin. Bonferroni over
      rates and measures.
    - *stays*: the intervals at rate zero and at the slowest rate both lie wholly beyond the margin,
      on one side, and so does what would be left if the measure changed once more by as much as it
      did over the slowest half: a line on log dwell, since what falls as a power of the dwell
      deceives a line on the rate. Bonferroni over measures.
    - *gone*: intercept and slowest rate are both equivalent to zero (two one-sided tests; all must
      pass, so nothing needs correcting).

    The verdict is "persistent hysteresis" where any measure stays; "finite-rate path dependence"
    where all are gone and one is present at some rate; "no memory found" where all are gone and
    equivalent to zero at every rate; otherwise "undecided at this n".

    Args:
        table: `seed`, `dwell` (updates at each level), `gap` and `lag` (logits; the lag averaged
            over the branches), one row a seed and dwell; at least three seeds and three dwells.
        margin: the gap or lag, in logits, that is just too large to be called none.
        level: confidence level, between 0.5 and 1.
        least_span: the least ratio of the longest dwell to the shortest.

    Raises:
        HysteresisError: a missing column or row, a value not finite, a dwell not positive, too few
            seeds or dwells, too small a span, or a bad margin or level.

    Example:
        >>> dwells = [5, 20, 80, 320]
        >>> rows = [(s, d, (1 + s / 9) / d, 3 / d) for s in range(3) for d in dwells]
        >>> table = pd.DataFrame(rows, columns=["seed", "dwell", "gap", "lag"])
        >>> quasi_static(table, margin=0.05).verdict
        'finite-rate path dependence'

    Source: equivalence, Schuirmann (1987), Journal of Pharmacokinetics and Biopharmaceutics 15(6);
    hysteresis as what persists at rate zero, Morris (2011), Applied Mechanics Reviews 64(5).
    """
    wide = _checked(table, least_span)
    rates, limits = [], []
    for name, values in wide.items():
        dwells, y = values.columns.to_numpy(float), values.to_numpy(float)
        n, n_slow = len(y), max(FEWEST_DWELLS, math.ceil(len(dwells) / 2))
        at = [_judge(x, margin, level, n_claims=len(MEASURES) * len(dwells)) for x in y.T]
        rates += [
            {"measure": name, "dwell": dwell, "rate": 1 / dwell, **x}
            for dwell, x in zip(dwells.tolist(), at, strict=True)
        ]
        ends = {
            "linear": _intercepts(dwells[-n_slow:], y[:, -n_slow:], degree=1),
            "quadratic": _intercepts(dwells, y, degree=2),
            "slowest": y[:, -1],
            "continued": 2 * y[:, -1] - y[:, -n_slow],
        }
        judged = {m: _judge(x, margin, level, n_claims=len(MEASURES)) for m, x in ends.items()}
        for method, x in judged.items():
            parts = [x, judged["slowest"], judged["continued"]]
            sides = {math.copysign(1.0, part["estimate"]) for part in parts}
            stays = all(part["present"] for part in parts) and len(sides) == 1
            gone = x["equivalent"] and judged["slowest"]["equivalent"]
            limits.append({"measure": name, "method": method, **x, "stays": stays, "gone": gone})
    by_rate, by_method = pd.DataFrame(rates), pd.DataFrame(limits).drop(columns="present")
    return QuasiStatic(_verdict(by_rate, by_method), margin, level, n, by_rate, by_method)


def _verdict(rates: pd.DataFrame, limits: pd.DataFrame) -> str:
    line = limits[limits["method"] == "linear"]
    if line["stays"].any():
        return PERSISTENT
    if line["gone"].all() and rates["present"].any():
        return FINITE_RATE
    if line["gone"].all() and rates["equivalent"].all():
        return NO_MEMORY
    return UNDECIDED


def _judge(values: Array, margin: float, level: float, *, n_claims: int) -> dict[str, Any]:
    """The mean over seeds held against the margin, as one of `n_claims` that it lies beyond."""
    n, tail = len(values), (1 - level) / n_claims / 2
    x = mean_interval(values, level=1 - 2 * tail)
    equivalent = equivalence_test(values, margin=margin, level=level).equivalent
    sizes = np.arange(n, MOST_SEEDS + 1)
    room = abs(abs(x.estimate) - margin)
    quantile = stats.t.isf(1 - level if abs(x.estimate) < margin else tail, sizes - 1)
    enough = sizes[quantile * float(np.std(values, ddof=1)) / np.sqrt(sizes) < room]
    return {
        "estimate": x.estimate,
        "low": x.low,
        "high": x.high,
        "present": x.low > margin or x.high < -margin,
        "equivalent": equivalent,
        "seeds_needed": float(enough[0]) if len(enough) else math.inf,
    }


def _intercepts(dwells: Array, y: Array, *, degree: int) -> Array:
    """Each seed's value at rate zero, by least squares on powers of the rate."""
    powers = np.vander(dwells.min() / dwells, degree + 1, increasing=True)
    return np.asarray(np.linalg.lstsq(powers, y.T, rcond=None)[0][0])


def _checked(table: pd.DataFrame, least_span: float) -> dict[str, pd.DataFrame]:
    """Each measure with one row a seed and one column a dwell, the slowest last."""
    _check(table, "table", ["seed", "dwell"], list(MEASURES))
    wide = {
        name: table.pivot(index="seed", columns="dwell", values=name).sort_index(axis=1)
        for name in MEASURES
    }
    gaps = wide["gap"]
    empty = np.argwhere(gaps.isna().to_numpy())
    if len(empty):
        seed, dwell = gaps.index[empty[0][0]], gaps.columns[empty[0][1]]
        raise HysteresisError(f"table has no row for seed {seed} at dwell {dwell}")
    dwells = gaps.columns.to_numpy(float)
    if len(gaps) < FEWEST_SEEDS:
        raise HysteresisError(
            f"too few seeds: table has n = {len(gaps)}, but a verdict needs at least "
            f"{FEWEST_SEEDS}, since two give no usable spread (t = 12.7)"
        )
    if len(dwells) < FEWEST_DWELLS:
        raise HysteresisError(
            f"table has {len(dwells)} dwells, but a line on the rate needs at least {FEWEST_DWELLS}"
        )
    if not 0 < dwells[0] <= dwells[-1] < math.inf:
        ends = f"{dwells[0]:g} to {dwells[-1]:g}"
        raise HysteresisError(f"the dwells run from {ends}, but must be positive and finite")
    if not dwells[-1] / dwells[0] >= least_span:
        raise HysteresisError(
            f"the dwells {dwells[0]:g} to {dwells[-1]:g} span a factor of "
            f"{dwells[-1] / dwells[0]:.3g}, but to reach rate zero least_span asks {least_span:g}"
        )
    return wide


def _check(frame: pd.DataFrame, what: str, keys: list[str], values: list[str]) -> None:
    missing = [name for name in (*keys, *values) if name not in frame]
    if missing:
        raise HysteresisError(f"{what} has no column {missing[0]}; it has {list(frame.columns)}")
    if frame.empty:
        raise HysteresisError(f"{what} has no rows")
    faults = {f"a {name} that is not finite": ~np.isfinite(frame[name]) for name in values}
    for fault, bad in {**faults, "a second row": frame.duplicated(keys)}.items():
        if bad.any():
            row = frame[bad.to_numpy()].iloc[0]
            where = ", ".join(f"{key} {row[key]}" for key in keys)
            raise HysteresisError(f"{what} has {fault}, at {where}")
