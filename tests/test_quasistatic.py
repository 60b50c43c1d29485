"""Loop areas by hand, and verdicts on planted systems run through real staircases."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.quasistatic import QuasiStatic, loop_area, quasi_static

Array = NDArray[np.float64]
System = Callable[[float, float], float]
"""From the state and the control at one update to the state after it."""

DWELLS = (4, 14, 50, 200)
SIZES = (0.9, 0.95, 1.0, 1.05, 1.1)
MARGIN = 0.1


def staircase(first: float) -> list[float]:
    """Levels of a loop from 0 to `first`, to its opposite, and back."""
    quarter = np.linspace(0, first, 5)[1:].tolist()
    back = quarter[-2::-1]
    return [*quarter, *back, 0.0, *(-x for x in quarter), *(-x for x in back), 0.0]


def run_loop(system: System, dwell: int) -> pd.DataFrame:
    """Both branches from the same relaxed state, observed at the end of every level."""
    anchor = 0.0
    for _ in range(5000):
        anchor = system(anchor, 0.0)
    rows = []
    for branch, first in (("below", 1.0), ("above", -1.0)):
        x = anchor
        rows.append((branch, 0, 0.0, x))
        for level, control in enumerate(staircase(first), start=1):
            for _ in range(dwell):
                x = system(x, control)
            rows.append((branch, level * dwell, control, x))
    return pd.DataFrame(rows, columns=["branch", "update", "control", "margin"])


def measured(
    systems: list[System], *, sigma: float = 0.0, dwells: tuple[int, ...] = DWELLS
) -> pd.DataFrame:
    """Gap and lag of each seed's system at each dwell, with noise of the seed."""
    rng, rows = np.random.Generator(np.random.Philox(7)), []
    for seed, system in enumerate(systems):
        for dwell in dwells:
            loop = run_loop(system, dwell).assign(seed=seed)
            at_end = loop.groupby("branch")["margin"].last()
            gap = at_end["below"] - at_end["above"]
            noise = sigma * rng.standard_normal(2)
            rows.append((seed, dwell, gap + noise[0], loop_area(loop)["lag"].mean() + noise[1]))
    return pd.DataFrame(rows, columns=["seed", "dwell", "gap", "lag"])


def lagging(size: float) -> System:
    return lambda x, p: x + 0.06 * (size * p - x)


def double_well(size: float) -> System:
    # The control tilts a well away where |h| > 2 / (3 sqrt 3) = 0.385.
    return lambda x, p: x + 0.1 * (x - x**3 + 0.6 * size * p)


def instant(size: float) -> System:
    return lambda x, p: size * p


@pytest.fixture(scope="module")
def lag_table() -> pd.DataFrame:
    return measured([lagging(size) for size in SIZES], sigma=0.01)


class TestLoopArea:
    def test_a_square_by_hand(self) -> None:
        path = {"update": [0, 1, 2, 3, 4], "control": [0.0, 0.0, 2.0, 2.0, 0.0]}
        # Rising at 1, falling at 4: the margin lags, by 3 over a range of 2.
        square = pd.DataFrame({"seed": 3, "branch": "below", **path, "margin": [4, 1, 1, 4, 4]})
        assert loop_area(square).to_dict("records") == [
            {"seed": 3, "branch": "below", "area": 6.0, "lag": 3.0}
        ]

    def test_the_other_way_round_is_negative(self) -> None:
        path = {"update": [0, 1, 2, 3, 4], "control": [0.0, 0.0, 2.0, 2.0, 0.0]}
        lead = pd.DataFrame({"seed": 3, "branch": "below", **path, "margin": [1, 4, 4, 1, 1]})
        assert loop_area(lead)["area"].to_list() == [-6.0]

    def test_a_function_of_the_control_encloses_nothing(self) -> None:
        loop = run_loop(lambda x, p: p**3 + p, dwell=3).assign(seed=0)
        assert loop_area(loop)["area"].to_list() == pytest.approx([0.0, 0.0], abs=1e-12)

    @pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
    def test_closed_form_of_a_linear_lag(self, ratio: float) -> None:
        """dx/dt = k (p - x) under p = sin(w t): the area is pi r / (1 + r^2), with r = w / k."""
        angle = np.linspace(0, 2 * np.pi, 2001)
        x = (np.sin(angle) - ratio * np.cos(angle)) / (1 + ratio**2)
        loop = pd.DataFrame({"seed": 0, "branch": "above", "update": range(2001)})
        found = loop_area(loop.assign(control=np.sin(angle), margin=x))
        area = math.pi * ratio / (1 + ratio**2)
        assert found["area"].to_list() == pytest.approx([area], rel=1e-5)
        assert found["lag"].to_list() == pytest.approx([area / 2], rel=1e-5)

    def test_rows_may_come_in_any_order(self) -> None:
        loop = run_loop(lagging(1.0), dwell=5).assign(seed=0)
        shuffled = loop.sample(frac=1, random_state=0)
        pd.testing.assert_frame_equal(loop_area(loop), loop_area(shuffled))

    def test_both_directions_of_a_symmetric_system_agree(self) -> None:
        areas = loop_area(run_loop(lagging(1.0), dwell=5).assign(seed=0)).set_index("branch")
        below, above = areas["area"].loc[["below", "above"]].to_list()
        assert below == pytest.approx(above) and below > 0


class TestVerdicts:
    def test_a_lag_is_finite_rate_path_dependence(self, lag_table: pd.DataFrame) -> None:
        result = quasi_static(lag_table, margin=MARGIN)
        assert result.verdict == "finite-rate path dependence"
        fast = result.rates[(result.rates["measure"] == "gap") & (result.rates["dwell"] == 4)]
        assert fast["present"].all()
        assert any("gap at dwell 4" in line and "beyond ±0.1" in line for line in result.evidence)
        assert any("lag at rate zero" in line and "within" in line for line in result.evidence)

    @pytest.mark.parametrize("sigma", [0.0, 0.03])
    def test_two_wells_are_persistent_hysteresis(self, sigma: float) -> None:
        result = quasi_static(measured([double_well(s) for s in SIZES], sigma=sigma), margin=MARGIN)
        assert result.verdict == "persistent hysteresis"
        gap = result.limits.query("measure == 'gap' and method == 'slowest'").iloc[0]
        assert gap["estimate"] == pytest.approx(-2.0, abs=0.1) and gap["stays"]

    @pytest.mark.parametrize("sigma", [0.0, 0.01])
    def test_a_function_of_the_control_has_no_memory(self, sigma: float) -> None:
        result = quasi_static(measured([instant(s) for s in SIZES], sigma=sigma), margin=MARGIN)
        assert result.verdict == "no memory found"

    def test_noisy_seeds_are_undecided_and_told_how_many_would_do(self) -> None:
        table = measured([lagging(size) for size in SIZES], sigma=0.3)
        result = quasi_static(table, margin=MARGIN)
        assert result.verdict == "undecided at this n"
        assert any("too wide with 5 seeds; about" in line for line in result.evidence)

    def test_what_still_falls_is_not_called_persistent(self) -> None:
        """A gap that dies as dwell^(-1/2): its line does not reach zero at rate zero."""
        rows = [(s, d, (2 + s / 50) / math.sqrt(d), 0.0) for s in range(5) for d in DWELLS]
        result = quasi_static(
            pd.DataFrame(rows, columns=["seed", "dwell", "gap", "lag"]), margin=0.05
        )
        assert result.verdict == "undecided at this n"
        assert "gap has not settled: slower loops are missing, not seeds." in result.evidence

    def test_loops_that_are_all_too_fast_are_undecided(self) -> None:
        """exp(-dwell / 300): the line overshoots zero, and the slowest dwell is not yet there."""
        rows = [(s, d, math.exp(-d / 300) * (1 + s / 50), 0.0) for s in range(5) for d in DWELLS]
        table = pd.DataFrame(rows, columns=["seed", "dwell", "gap", "lag"])
        assert quasi_static(table, margin=MARGIN).verdict == "undecided at this n"


def test_a_line_in_the_rate_is_carried_to_its_intercept() -> None:
    rows = [(s, d, 0.5 + s + 3 / d, 0.2 - 1 / d + 2 / d**2) for s in range(3) for d in DWELLS]
    limits = quasi_static(
        pd.DataFrame(rows, columns=["seed", "dwell", "gap", "lag"]), margin=MARGIN
    ).limits.set_index(["measure", "method"])["estimate"]
    assert limits["gap", "linear"] == pytest.approx(1.5)
    assert limits["gap", "quadratic"] == pytest.approx(1.5)
    assert limits["lag", "quadratic"] == pytest.approx(0.2)
    assert limits["gap", "slowest"] == pytest.approx(1.5 + 3 / 200)


def test_intervals_are_simultaneous_over_rates_and_measures() -> None:
    values = [0.1, 0.3, 0.2, 0.4]
    rows = [(s, d, x, x) for s, x in enumerate(values) for d in DWELLS]
    result = quasi_static(
        pd.DataFrame(rows, columns=["seed", "dwell", "gap", "lag"]), margin=MARGIN, level=0.92
    )
    # 0.08 over 4 rates and 2 measures leaves 0.01 for each: t(0.005, 3) = 5.8409.
    half = 5.8409 * np.std(values, ddof=1) / 2
    assert (result.rates["high"] - result.rates["estimate"]).to_list() == pytest.approx(
        [half] * 8, rel=1e-4
    )


def test_the_seeds_that_would_do_do(lag_table: pd.DataFrame) -> None:
    """Values of the same mean and standard deviation decide at `seeds_needed`, not one before."""
    rng = np.random.Generator(np.random.Philox(1))

    def at(n: int) -> pd.DataFrame:
        z = rng.standard_normal(n)
        values = 0.05 + 0.1 * (z - z.mean()) / z.std(ddof=1)
        rows = [(s, d, x, x) for s, x in enumerate(values) for d in DWELLS]
        table = pd.DataFrame(rows, columns=["seed", "dwell", "gap", "lag"])
        return quasi_static(table, margin=MARGIN).rates

    needed = int(at(4)["seeds_needed"].iloc[0])
    assert not at(needed - 1)["equivalent"].any() and at(needed)["equivalent"].all()


def test_noise_alone_is_hardly_ever_called_memory() -> None:
    rng, verdicts = np.random.Generator(np.random.Philox(2)), []
    keys = pd.DataFrame([(s, d) for s in range(5) for d in DWELLS], columns=["seed", "dwell"])
    for _ in range(60):
        gap, lag = 0.1 * rng.standard_normal((2, len(keys)))
        verdicts.append(quasi_static(keys.assign(gap=gap, lag=lag), margin=0.05).verdict)
    assert (
        verdicts.count("persistent hysteresis") + verdicts.count("finite-rate path dependence") <= 6
    )


def test_records_are_frozen(lag_table: pd.DataFrame) -> None:
    result: QuasiStatic = quasi_static(lag_table, margin=MARGIN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.verdict = "no memory found"  # type: ignore[misc]  # the point of the test


GOOD = pd.DataFrame(
    [(s, d, 1.0 + s, 1 / d) for s in range(4) for d in (5, 20, 80, 320)],
    columns=["seed", "dwell", "gap", "lag"],
)
LOOP = pd.DataFrame(
    {"seed": 0, "branch": "below", "update": [0, 1, 2], "control": [0, 1, 0], "margin": 1.0}
)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: quasi_static(GOOD.drop(columns="lag"), margin=0.1), "table has no column lag"),
    (lambda: quasi_static(GOOD.iloc[:0], margin=0.1), "table has no rows"),
    (lambda: quasi_static(GOOD.iloc[:-1], margin=0.1), "no row for seed 3 at dwell 320"),
    (lambda: quasi_static(GOOD.assign(gap=math.nan), margin=0.1), "gap that is not finite, at s"),
    (lambda: quasi_static(pd.concat([GOOD, GOOD]), margin=0.1), "a second row, at seed 0"),
    (lambda: quasi_static(GOOD[GOOD["seed"] < 2], margin=0.1), "too few seeds: table has n = 2"),
    (lambda: quasi_static(GOOD[GOOD["dwell"].isin([5, 320])], margin=0.1), "2 dwells, but a line"),
    (lambda: quasi_static(GOOD[GOOD["dwell"] < 99], margin=0.1), "5 to 80 span a factor of 16"),
    (lambda: quasi_static(GOOD.assign(dwell=GOOD["dwell"] - 5), margin=0.1), "run from 0 to 315"),
    (lambda: quasi_static(GOOD, margin=0.0), "margin is 0.0, but must be positive"),
    (lambda: quasi_static(GOOD, margin=0.1, level=0.3), "level is 0.3"),
    (lambda: loop_area(LOOP.drop(columns="control")), "loop has no column control"),
    (lambda: loop_area(LOOP.assign(margin=math.inf)), "margin that is not finite, at seed 0, bran"),
    (lambda: loop_area(LOOP.iloc[:-1]), "seed 0, below, runs from control 0 to 1: it is not close"),
    (lambda: loop_area(LOOP.assign(control=0.5)), "stays at control 0.5: there is no loop"),
    (lambda: loop_area(pd.concat([LOOP, LOOP])), "second row, at seed 0, branch below, update 0"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(HysteresisError, match=message):
        call()


def test_a_small_span_is_allowed_on_request() -> None:
    part = GOOD[GOOD["dwell"] < 99]
    assert quasi_static(part, margin=0.1, least_span=16.0).n == 4
