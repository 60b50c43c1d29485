"""Statistics against hand-computed answers, identities, scipy and slow, obvious references."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.statistics import (
    Interval,
    SignFlip,
    correlation_interval,
    equivalence_test,
    holm,
    mean_interval,
    proportion_interval,
    ratio_interval,
    sign_flip_test,
)

GAPS = [0.12, 0.08, 0.15, 0.04, 0.10]
LEVELS = [0.5, 0.9, 0.95, 0.999]
# Fisher (1935), section 21: Darwin's 15 pairs of Zea mays, in eighths of an inch.
DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]

unhurried = settings(deadline=None, max_examples=60)
# Multiples of 1/64: their sums are exact, so ties are ties in floating point too.
exact_values = st.integers(-300, 300).map(lambda k: k / 64)
samples = st.lists(exact_values, min_size=2, max_size=9).filter(lambda xs: len(set(xs)) > 1)
# A numerator and a denominator whose mean is far enough from zero to be told apart, mostly.
pairs = st.lists(
    st.tuples(exact_values, st.integers(100, 300).map(lambda k: k / 64)), min_size=3, max_size=9
)
levels = st.sampled_from(LEVELS)


def brute_force_p(values: Sequence[float]) -> float:
    """Every sign assignment, one at a time; exact for integers."""
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in itertools.product([1, -1], repeat=len(values))
    ]
    return sum(total >= abs(sum(values)) for total in sums) / len(sums)


class TestSignFlip:
    def test_five_positive_seeds(self) -> None:
        assert sign_flip_test([1, 4, 2, 5, 3]) == SignFlip(
            n=5, n_positive=5, n_negative=0, mean=3.0, p=0.0625, smallest_p=0.0625
        )

    def test_fisher_counted_863_sums_in_each_tail_of_darwins_maize(self) -> None:
        assert sign_flip_test(DARWIN).p == 2 * 863 / 2**15

    @given(st.lists(st.integers(-30, 30), min_size=1, max_size=9))
    @unhurried
    def test_brute_force(self, integers: list[int]) -> None:
        expected = brute_force_p(integers)
        assert sign_flip_test(integers).p == expected
        # Tenths are not exact in binary, so ties of the integers are broken by rounding here.
        assert sign_flip_test([k / 10 for k in integers]).p == expected
        assert sign_flip_test([math.pi * 1e-9 * k for k in integers]).p == expected

    @given(st.lists(st.floats(-1, 1).filter(lambda x: abs(x) > 1e-3), min_size=2, max_size=8))
    @unhurried
    def test_scipy_permutation_test(self, values: list[float]) -> None:
        reference = stats.permutation_test(
            (values,), np.mean, permutation_type="samples", n_resamples=2**8
        )
        assert sign_flip_test(values).p == pytest.approx(reference.pvalue, abs=1e-12)

    @pytest.mark.parametrize("n_positive", range(0, 14))
    def test_binomial_sign_test_where_all_magnitudes_are_equal(self, n_positive: int) -> None:
        values = [0.1] * n_positive + [-0.1] * (13 - n_positive)
        expected = stats.binomtest(n_positive, 13).pvalue
        assert sign_flip_test(values).p == pytest.approx(expected, rel=1e-12)

    def test_wilcoxon_where_the_values_are_signed_ranks(self) -> None:
        signed_ranks = [1, -2, 3, 4, -5, 6, 7, 8, 9, -10, 11, 12]
        expected = stats.wilcoxon(signed_ranks, method="exact").pvalue
        assert sign_flip_test(signed_ranks).p == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("n", [1, 2, 5, 12, 20, 21, 22])
    def test_powers_of_two_reach_every_odd_sum_once(self, n: int) -> None:
        values = [(-1) ** (i % 3) * 2**i for i in range(n)]
        observed = abs(sum(values))
        assert sign_flip_test(values).p == (2**n - observed + 1) / 2**n

    @given(st.lists(st.integers(-30, 30), min_size=1, max_size=12), st.floats(1e-30, 1e30))
    @unhurried
    def test_order_sign_and_unit_do_not_matter(self, integers: list[int], unit: float) -> None:
        result = sign_flip_test(integers)
        scaled = sign_flip_test([-unit * k for k in reversed(integers)])
        assert scaled.p == result.p
        assert scaled.common_sign == -result.common_sign
        assert (scaled.n_positive, scaled.n_negative) == (result.n_negative, result.n_positive)
        assert scaled.mean == pytest.approx(-unit * result.mean, rel=1e-9, abs=1e-12 * unit)

    @given(st.lists(exact_values, min_size=1, max_size=22))
    @unhurried
    def test_p_lies_between_the_smallest_p_and_one(self, values: list[float]) -> None:
        result = sign_flip_test(values)
        assert 2 / 2**result.n == result.smallest_p <= result.p <= 1

    @pytest.mark.parametrize(
        ("values", "sign", "p"),
        [
            ([0.0, 0.0, 0.0], 0, 1.0),
            ([0.0, 2.0, 1.0], 1, 0.5),
            ([-1.0, 0.0], -1, 1.0),
            ([1.0, -1.0], 0, 1.0),
            ([0.1, 0.2, -0.3], 0, 1.0),
            ([3.0], 1, 1.0),
        ],
    )
    def test_zeros_and_signs(self, values: list[float], sign: int, p: float) -> None:
        result = sign_flip_test(values)
        assert (result.common_sign, result.p) == (sign, p)


class TestInterval:
    @pytest.mark.parametrize(
        ("low", "high", "side"), [(0.1, 0.2, 1), (-0.2, -0.1, -1), (-0.1, 0.1, 0), (0.0, 0.1, 0)]
    )
    def test_side(self, low: float, high: float, side: int) -> None:
        interval = Interval((low + high) / 2, low, high, 0.95, "t", 5)
        assert interval.side == side
        assert (0.0 in interval) == (side == 0)

    def test_contains_its_ends_and_nothing_beyond(self) -> None:
        interval = Interval(0.5, 0.0, 1.0, 0.95, "t", 5)
        assert 0.0 in interval and 1.0 in interval
        assert math.nextafter(1.0, 2.0) not in interval
        assert math.nan not in interval

    def test_text(self) -> None:
        assert str(Interval(0.0976, 0.051, 0.144, 0.95, "t", 5)) == "+0.0976 [+0.0510, +0.1440]"
        unbounded = Interval(-2.0, -math.inf, math.inf, 0.95, "Fieller", 5)
        assert str(unbounded) == "-2.0000 [-inf, +inf]"
        assert unbounded.side == 0

    def test_is_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            mean_interval(GAPS).low = 0.0  # type: ignore[misc]  # the point of the test


class TestMeanInterval:
    @given(samples, levels)
    @unhurried
    def test_t_is_scipys(self, values: list[float], level: float) -> None:
        interval = mean_interval(values, level=level)
        expected = stats.ttest_1samp(values, 0).confidence_interval(level)
        assert interval.low == pytest.approx(expected.low, rel=1e-9, abs=1e-12)
        assert interval.high == pytest.approx(expected.high, rel=1e-9, abs=1e-12)
        assert interval.estimate == pytest.approx(sum(values) / len(values))

    def test_t_of_two_values_by_hand(self) -> None:
        # One degree of freedom is the Cauchy distribution, whose 75 % point is 1.
        interval = mean_interval([1.0, 3.0], level=0.5)
        assert (interval.low, interval.high) == pytest.approx((1.0, 3.0))

    @given(st.lists(exact_values, min_size=2, max_size=5), levels)
    @unhurried
    def test_bootstrap_of_few_values_is_exact(self, values: list[float], level: float) -> None:
        n, tail = len(values), (1 - Fraction(str(level))) / 2
        sums = sorted(map(sum, itertools.product(values, repeat=n)))
        room = tail * len(sums)
        low = max(x for x in set(sums) if bisect.bisect_left(sums, x) < room)
        high = min(x for x in set(sums) if len(sums) - bisect.bisect_right(sums, x) < room)
        interval = mean_interval(values, level=level, method="bootstrap")
        assert [interval.low, interval.high] == pytest.approx([low / n, high / n], abs=1e-12)

    def test_bootstrap_of_two_and_three_values_by_hand(self) -> None:
        # Of 4 resamples one, 25 %, is the smaller value twice: more than the tail of 2.5 %.
        two = mean_interval([1.0, 3.0], method="bootstrap")
        assert (two.low, two.high) == pytest.approx((1.0, 3.0), abs=1e-15)
        # Of 27 one, 3.7 %, is the smallest thrice; the next, 0, 0, 3, comes in three orders.
        three = mean_interval([0.0, 3.0, 9.0], method="bootstrap")
        assert (three.low, three.high) == pytest.approx((0.0, 9.0), abs=1e-15)
        three = mean_interval([0.0, 3.0, 9.0], method="bootstrap", level=0.8)
        assert (three.low, three.high) == pytest.approx((1.0, 7.0), abs=1e-15)
        # A tie of the tail with a resample, at 25 % of 4, is cut on both sides alike.
        tie = mean_interval([1.0, 3.0], method="bootstrap", level=0.5)
        assert (tie.low, tie.high) == pytest.approx((1.0, 3.0), abs=1e-15)

    def test_bootstrap_of_six_values_is_exact_and_of_seven_is_drawn(self) -> None:
        def interval(n: int, seed: int) -> Interval:
            return mean_interval(DARWIN[:n], method="bootstrap", seed=seed)

        assert interval(6, seed=0) == interval(6, seed=1)
        assert interval(7, seed=0) == interval(7, seed=0)
        assert interval(7, seed=0) != interval(7, seed=1)

    def test_bootstrap_of_many_values_is_scipys(self) -> None:
        interval = mean_interval(DARWIN, method="bootstrap", level=0.9)
        reference = stats.bootstrap(
            (DARWIN,), np.mean, method="percentile", confidence_level=0.9, n_resamples=20_000, rng=1
        ).confidence_interval
        standard_error = float(np.std(DARWIN)) / math.sqrt(len(DARWIN))
        assert interval.low == pytest.approx(reference.low, abs=0.1 * standard_error)
        assert interval.high == pytest.approx(reference.high, abs=0.1 * standard_error)

    def test_bootstrap_of_five_values_covers_85_percent(self) -> None:
        generator = np.random.default_rng(0)
        covered = [
            0.0 in mean_interval(generator.normal(size=5), method="bootstrap") for _ in range(1000)
        ]
        assert 0.81 < np.mean(covered) < 0.89

    def test_t_of_five_values_covers_95_percent(self) -> None:
        generator = np.random.default_rng(0)
        covered = [0.0 in mean_interval(generator.normal(size=5)) for _ in range(2000)]
        assert 0.93 < np.mean(covered) < 0.97

    @pytest.mark.parametrize("n", [2, 3, 7, 10])
    def test_equal_values_give_a_point(self, n: int) -> None:
        expected = (0.1, 0.1, 0.1)
        t = mean_interval([0.1] * n)
        bootstrap = mean_interval([0.1] * n, method="bootstrap")
        assert (t.estimate, t.low, t.high) == expected
        assert (bootstrap.estimate, bootstrap.low, bootstrap.high) == expected

    @pytest.mark.parametrize("unit", [1e-300, 1e-170, 1e98])
    def test_extreme_units_do_not_lose_the_spread(self, unit: float) -> None:
        interval = mean_interval([unit * gap for gap in GAPS])
        expected = mean_interval(GAPS)
        assert interval.low / unit == pytest.approx(expected.low)
        assert interval.high / unit == pytest.approx(expected.high)


class TestRatioInterval:
    @given(pairs, levels)
    @unhurried
    def test_ends_are_the_ratios_that_a_t_test_just_fails_to_reject(
        self, both: list[tuple[float, float]], level: float
    ) -> None:
        numerator, denominator = np.array(both).T
        interval = ratio_interval(numerator, denominator, level=level)
        assert interval.estimate == pytest.approx(numerator.mean() / denominator.mean())
        residual = numerator - interval.estimate * denominator
        assume(math.isfinite(interval.low) and np.ptp(residual) > 1e-6)
        assert interval.low < interval.estimate < interval.high
        for end in (interval.low, interval.high):
            p = float(stats.ttest_1samp(numerator - end * denominator, 0).pvalue)
            assert p == pytest.approx(1 - level, rel=1e-6)

    @given(samples, levels)
    @unhurried
    def test_unbounded_just_where_the_denominator_could_be_zero(
        self, denominator: list[float], level: float
    ) -> None:
        assume(sum(denominator) != 0)
        p = float(stats.ttest_1samp(denominator, 0).pvalue)
        assume(abs(p - (1 - level)) > 1e-9)
        interval = ratio_interval(np.arange(len(denominator)), denominator, level=level)
        unbounded = (interval.low, interval.high) == (-math.inf, math.inf)
        assert unbounded == (p > 1 - level)
        assert math.isfinite(interval.estimate)

    def test_fiellers_quadratic_as_the_textbooks_write_it(self) -> None:
        x, y = np.array([4.1, 5.2, 6.3, 4.4, 5.5]), np.array([8.0, 9.5, 10.1, 8.8, 9.9])
        t2 = stats.t.ppf(0.975, 4) ** 2
        (v_xx, v_xy), (_, v_yy) = np.cov(x, y) / 5
        roots = np.roots(
            [
                y.mean() ** 2 - t2 * v_yy,
                -2 * (x.mean() * y.mean() - t2 * v_xy),
                x.mean() ** 2 - t2 * v_xx,
            ]
        )
        interval = ratio_interval(x, y)
        assert [interval.low, interval.high] == pytest.approx(sorted(roots))

    @pytest.mark.parametrize("constant", [0.3, -7.0])
    def test_constant_denominator_divides_the_t_interval(self, constant: float) -> None:
        interval = ratio_interval(GAPS, [constant] * 5)
        expected = mean_interval([gap / constant for gap in GAPS])
        assert interval.low == pytest.approx(expected.low)
        assert interval.high == pytest.approx(expected.high)

    @given(pairs, st.floats(0.01, 100), st.sampled_from([1, -1]))
    @unhurried
    def test_units_scale_the_ratio(
        self, both: list[tuple[float, float]], unit: float, sign: int
    ) -> None:
        numerator, denominator = np.array(both).T
        interval = ratio_interval(numerator, denominator)
        assume(interval.high < 1e6)  # close to unbounded the ends are ill conditioned
        scaled = ratio_interval(numerator, sign * unit * denominator)
        expected = sorted([sign * interval.low / unit, sign * interval.high / unit])
        assert [scaled.low, scaled.high] == pytest.approx(expected, rel=1e-6, abs=1e-7)

    @pytest.mark.parametrize(
        ("numerator", "denominator", "ratio"),
        [
            ([0.1] * 5, [0.3] * 5, 1 / 3),
            ([0.3, 0.33, 0.39], [0.1, 0.11, 0.13], 3.0),
            ([0.0, 0.0, 0.0], [1.0, 2.0, 1.5], 0.0),
        ],
    )
    def test_a_ratio_without_spread_is_a_point(
        self, numerator: list[float], denominator: list[float], ratio: float
    ) -> None:
        interval = ratio_interval(numerator, denominator)
        ends = (interval.estimate, interval.low, interval.high)
        assert ends == pytest.approx((ratio, ratio, ratio), rel=1e-14)

    def test_covers_95_percent(self) -> None:
        generator = np.random.default_rng(0)
        covered = [
            2.0 in ratio_interval(generator.normal(2, 0.5, 5), generator.normal(1, 0.3, 5))
            for _ in range(2000)
        ]
        assert 0.93 < np.mean(covered) < 0.97


class TestCorrelationInterval:
    @given(st.lists(st.floats(-0.999, 0.999), min_size=2, max_size=9), levels)
    @unhurried
    def test_is_the_t_interval_of_z(self, values: list[float], level: float) -> None:
        z = np.array([0.5 * math.log((1 + r) / (1 - r)) for r in values])
        assume(np.ptp(z) > 1e-6)
        expected = stats.ttest_1samp(z, 0).confidence_interval(level)
        interval = correlation_interval(values, level=level)
        assert math.atanh(interval.estimate) == pytest.approx(z.mean(), abs=1e-9)
        assert interval.low == pytest.approx(math.tanh(expected.low), abs=1e-9)
        assert interval.high == pytest.approx(math.tanh(expected.high), abs=1e-9)

    @given(st.lists(st.floats(-1, 1), min_size=2, max_size=9))
    @unhurried
    def test_stays_inside_and_turns_with_the_sign(self, values: list[float]) -> None:
        interval = correlation_interval(values)
        assert -1 <= interval.low <= interval.estimate <= interval.high <= 1
        mirrored = correlation_interval([-r for r in values])
        assert (mirrored.low, mirrored.high) == pytest.approx((-interval.high, -interval.low))

    @pytest.mark.parametrize("one", [1.0, 1 + 4e-16, 1 - 2**-53])
    def test_one_is_moved_to_the_nearest_number_inside(self, one: float) -> None:
        interval = correlation_interval([one, one, one])
        assert interval.estimate == interval.low == interval.high
        assert interval.estimate == pytest.approx(1, abs=3e-16)
        z_of_one = 0.5 * math.log((2 - 2**-53) / 2**-53)
        pair = correlation_interval([one, 0.0])
        assert math.atanh(pair.estimate) == pytest.approx(z_of_one / 2)


class TestProportionInterval:
    def test_all_or_none_by_hand(self) -> None:
        """Where all n hold, the low end is the p with p**n = 2.5 %; the high end is 1."""
        every, none = proportion_interval([1.0] * 5), proportion_interval([0.0] * 5)
        assert (every.low, every.high) == pytest.approx((0.025 ** (1 / 5), 1.0))
        assert (none.low, none.high) == pytest.approx((0.0, 1 - 0.025 ** (1 / 5)))
        assert (every.estimate, every.method, every.n) == (1.0, "Clopper-Pearson", 5)

    @pytest.mark.parametrize("level", LEVELS)
    def test_ends_are_the_shares_that_just_leave_the_tails(self, level: float) -> None:
        interval, tail = proportion_interval([1, 0, 1, 1, 0, 1], level=level), (1 - level) / 2
        assert stats.binom.sf(3, 6, interval.low) == pytest.approx(tail)
        assert stats.binom.cdf(4, 6, interval.high) == pytest.approx(tail)


class TestHolm:
    def test_by_hand(self) -> None:
        # In order of size: 4 x 0.005, 3 x 0.01, 2 x 0.03, and 1 x 0.04, raised to its predecessor.
        assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])

    def test_is_cut_at_one(self) -> None:
        assert holm([0.9, 0.4, 0.6]).tolist() == [1.0, 1.0, 1.0]
        assert holm([0.2]).tolist() == [0.2]

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.999))
    @unhurried
    def test_step_down_procedure(self, p_values: list[float], size: float) -> None:
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
            if (len(p_values) - rank) * p_values[index] > size:
                break
            rejected.add(index)
        assert {i for i, adjusted in enumerate(holm(p_values)) if adjusted <= size} == rejected

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
    @unhurried
    def test_order_and_bounds(self, p_values: list[float]) -> None:
        adjusted = holm(p_values)
        assert holm(p_values[::-1]).tolist() == adjusted[::-1].tolist()
        bonferroni = np.minimum(1, len(p_values) * np.array(p_values))
        assert np.all(np.array(p_values) <= adjusted)
        assert np.all(adjusted <= bonferroni)


class TestEquivalence:
    @given(samples, st.floats(0.01, 10), st.sampled_from([0.6, 0.9, 0.95, 0.99]))
    @unhurried
    def test_two_one_sided_scipy_tests(
        self, values: list[float], margin: float, level: float
    ) -> None:
        result = equivalence_test(values, margin=margin, level=level)
        above_lower = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
        below_upper = stats.ttest_1samp(values, margin, alternative="less").pvalue
        assert result.p == pytest.approx(max(above_lower, below_upper), rel=1e-9, abs=1e-12)
        assume(abs(result.p - (1 - level)) > 1e-9)
        inside = -margin < result.interval.low and result.interval.high < margin
        assert result.equivalent == (result.p < 1 - level) == inside

    def test_interval_is_the_90_percent_t_interval(self) -> None:
        result = equivalence_test(GAPS, margin=0.2)
        expected = stats.ttest_1samp(GAPS, 0).confidence_interval(0.9)
        assert (result.interval.low, result.interval.high) == pytest.approx(tuple(expected))
        assert result.interval.level == pytest.approx(0.9)
        assert (result.n, result.margin, result.level) == (5, 0.2, 0.95)

    @pytest.mark.parametrize(
        ("value", "p", "equivalent"),
        [(0.1, 0.0, True), (-0.1, 0.0, True), (0.3, 1.0, False), (0.2, 1.0, False)],
    )
    def test_equal_values(self, value: float, p: float, equivalent: bool) -> None:
        result = equivalence_test([value] * 3, margin=0.2)
        assert (result.p, result.equivalent) == (p, equivalent)

    def test_a_wide_spread_is_not_equivalence(self) -> None:
        result = equivalence_test([-1.0, 1.0, -0.5, 0.5], margin=0.1)
        assert not result.equivalent
        assert 0.0 in result.interval


@pytest.mark.parametrize(
    "container",
    [
        list,
        tuple,
        np.array,
        pd.Series,
        lambda xs: pd.Series(xs, index=[7, 7, 3, 2, 1]),
        lambda xs: pd.Series(xs, dtype=object),
    ],
)
def test_any_sequence_of_numbers_is_accepted(container: Callable[[list[float]], object]) -> None:
    values: list[float] = container(GAPS)  # type: ignore[assignment]  # several types, on purpose
    assert sign_flip_test(values) == sign_flip_test(GAPS)
    assert mean_interval(values) == mean_interval(GAPS)
    assert ratio_interval(values, values) == ratio_interval(GAPS, GAPS)
    assert correlation_interval(values) == correlation_interval(GAPS)
    assert holm(values).tolist() == holm(GAPS).tolist()
    assert equivalence_test(values, margin=1.0) == equivalence_test(GAPS, margin=1.0)


def test_inputs_are_left_as_they_were() -> None:
    values = np.array([0.3, -0.1, 0.2])
    sign_flip_test(values)
    mean_interval(values, method="bootstrap")
    correlation_interval(values)
    holm(np.abs(values))
    assert values.tolist() == [0.3, -0.1, 0.2]


BAD_INPUTS: list[tuple[Callable[[], object], str]] = [
    (lambda: sign_flip_test([]), "values has n = 0, but needs at least one"),
    (lambda: sign_flip_test([1.0] * 31), r"n = 31, but 2\*\*31 sign assignments are too many"),
    (lambda: sign_flip_test([1.0, math.nan]), r"values\[1\] is nan, but every value must be fini"),
    (lambda: sign_flip_test([1.0, 2.0, -math.inf]), r"values\[2\] is -inf"),
    (lambda: sign_flip_test([1e200]), r"values\[0\] is 1e\+200.*at most 1e\+100"),
    (lambda: sign_flip_test([[1.0, 2.0]]), r"one-dimensional, but its shape is \(1, 2\)"),
    (lambda: sign_flip_test(np.array(0.1)), r"one-dimensional, but its shape is \(\)"),
    (lambda: sign_flip_test(["a"]), "values must be a sequence of numbers"),
    (lambda: sign_flip_test([[1.0], [1.0, 2.0]]), "values must be a sequence of numbers"),
    (lambda: mean_interval([1.0]), "n = 1, but an interval over seeds needs at least two"),
    (lambda: mean_interval([1.0, math.inf]), r"values\[1\] is inf"),
    (lambda: mean_interval(GAPS, level=0.0), "level is 0.0, but must lie between 0 and 1"),
    (lambda: mean_interval(GAPS, level=95.0), "level is 95.0"),
    (lambda: mean_interval(GAPS, level=math.nan), "level is nan"),
    (lambda: mean_interval(GAPS, method="bootstrap", seed=-1), "seed is -1"),
    (lambda: proportion_interval([]), "hits has n = 0"),
    (lambda: proportion_interval([1.0, 0.5]), r"hits\[1\] is 0.5, but every value must be 0 or 1"),
    (lambda: proportion_interval([1.0], level=1.0), "level is 1.0"),
    (lambda: ratio_interval([1.0], [1.0]), "numerator has n = 1, but an interval over seeds"),
    (lambda: ratio_interval([1.0, 2.0], [1.0]), "denominator has n = 1"),
    (lambda: ratio_interval([1.0, 2.0], [1.0, 2.0, 3.0]), "2 values and denominator 3, but"),
    (lambda: ratio_interval([1.0, math.nan], [1.0, 2.0]), r"numerator\[1\] is nan"),
    (lambda: ratio_interval([1.0, 2.0], [math.nan, 2.0]), r"denominator\[0\] is nan"),
    (lambda: ratio_interval([1.0, 2.0], [-1.0, 1.0]), "mean of denominator is zero"),
    (lambda: ratio_interval([1.0, 2.0, 3.0], [0.1, 0.2, -0.3]), "mean of denominator is zero"),
    (lambda: ratio_interval([1.0, 2.0], [0.0, 0.0]), "mean of denominator is zero"),
    (lambda: ratio_interval(GAPS, GAPS, level=1.0), "level is 1.0"),
    (lambda: correlation_interval([0.5]), "correlations has n = 1, but an interval over seeds"),
    (lambda: correlation_interval([0.5, 1.01]), r"correlations\[1\] is 1.01.*in \[-1, 1\]"),
    (lambda: correlation_interval([-1.01, 0.5]), r"correlations\[0\] is -1.01"),
    (lambda: correlation_interval([math.nan, 0.5]), r"correlations\[0\] is nan"),
    (lambda: correlation_interval([0.5, 0.6], level=-1.0), "level is -1.0"),
    (lambda: holm([]), "p_values has n = 0, but needs at least one"),
    (lambda: holm([0.1, 1.2]), r"p_values\[1\] is 1.2, but every value must be in \[0, 1\]"),
    (lambda: holm([-0.1]), r"p_values\[0\] is -0.1"),
    (lambda: holm([math.nan]), r"p_values\[0\] is nan"),
    (lambda: holm([[0.1]]), "p_values must be one-dimensional"),
    (lambda: equivalence_test([1.0], margin=1.0), "n = 1, but an interval over seeds"),
    (lambda: equivalence_test(GAPS, margin=0.0), "margin is 0.0, but must be positive and finite"),
    (lambda: equivalence_test(GAPS, margin=-1.0), "margin is -1.0"),
    (lambda: equivalence_test(GAPS, margin=math.nan), "margin is nan"),
    (lambda: equivalence_test(GAPS, margin=math.inf), "margin is inf"),
    (lambda: equivalence_test([1.0, math.nan], margin=1.0), r"values\[1\] is nan"),
    (lambda: equivalence_test(GAPS, margin=1.0, level=0.5), "level is 0.5.* between 0.5 and 1"),
    (lambda: equivalence_test(GAPS, margin=1.0, level=1.0), "level is 1.0"),
]


@pytest.mark.parametrize(("call", "message"), BAD_INPUTS, ids=[text for _, text in BAD_INPUTS])
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(HysteresisError, match=message):
        call()


def test_unknown_method_is_refused() -> None:
    # Where types are checked at run time, that check comes first, with its own error.
    with pytest.raises((HysteresisError, TypeError), match="method"):
        mean_interval(GAPS, method="z")  # type: ignore[arg-type]  # the point of the test
