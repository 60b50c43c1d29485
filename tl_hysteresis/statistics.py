"""Exact tests and intervals over independent seeds.

One value per seed goes in and a frozen record comes out. The seed is the unit of resampling: the
trials of one trained model share its weights, so they are not independent observations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from tl_hysteresis.errors import HysteresisError

# A run-time type checker does not find a tuple in numpy's ArrayLike; a static one does.
Values = ArrayLike | Sequence[float]

MOST_SIGN_FLIPS = 30
MOST_ENUMERATED = 6  # 6**6 is 46,656 bootstrap resamples, where 7**7 would be 823,543
LARGEST_VALUE = 1e100  # far beyond any measurement, and its square is still finite


@dataclass(frozen=True)
class SignFlip:
    """Result of `sign_flip_test`; `mean` has the unit of the values.

    Example:
        >>> sign_flip_test([-0.2, -0.1]).common_sign
        -1
    """

    n: int
    n_positive: int
    n_negative: int
    mean: float
    p: float
    smallest_p: float

    @property
    def common_sign(self) -> int:
        """The sign (+1 or -1) that all non-zero values share, or 0 where there is none."""
        return int(self.n_negative == 0) - int(self.n_positive == 0)


@dataclass(frozen=True)
class Interval:
    """A closed interval at confidence `level`, in the unit of its `estimate`.

    Example:
        >>> gap = Interval(0.0976, 0.051, 0.144, level=0.95, method="t", n=5)
        >>> print(gap, 0.1 in gap, gap.side)
        +0.0976 [+0.0510, +0.1440] True 1
    """

    estimate: float
    low: float
    high: float
    level: float
    method: str
    n: int

    def __contains__(self, value: float) -> bool:
        """Whether the value lies in the interval, ends included."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        """The estimate and both ends, to four decimals."""
        return f"{self.estimate:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"

    @property
    def side(self) -> int:
        """+1 wholly above zero, -1 wholly below, 0 where the interval contains zero."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class Equivalence:
    """Result of `equivalence_test`; `margin` and `interval` have the unit of the values.

    Example:
        >>> print(equivalence_test([0.01, -0.02, 0.00, 0.01, -0.01], margin=0.05).interval)
        -0.0020 [-0.0144, +0.0104]
    """

    margin: float
    p: float
    equivalent: bool
    level: float
    interval: Interval
    n: int


def sign_flip_test(values: Values) -> SignFlip:
    """Test exactly, on two sides, that the values are symmetric around a mean of zero.

    Example:
        >>> result = sign_flip_test([0.12, 0.08, 0.15, 0.04, 0.10])
        >>> result.p, result.smallest_p, result.common_sign
        (0.0625, 0.0625, 1)

    Args:
        values: One value per seed, in any unit; 1 to 30 of them.

    Returns:
        `p`, the share of all 2**n sign assignments whose |mean| reaches the observed one, and
        `smallest_p` = 2 / 2**n, the smallest that n non-zero values can give. An assignment that
        ties with the observed one up to the rounding error of the sums counts as reaching it:
        rounding can enlarge p, never shrink it.

    Raises:
        HysteresisError: No values or more than 30, or one not finite, or not one-dimensional.

    Source: Fisher (1935), The Design of Experiments, section 21.
    """
    array = _checked(values, "values", least=1)
    n = len(array)
    if n > MOST_SIGN_FLIPS:
        raise HysteresisError(
            f"values has n = {n}, but 2**{n} sign assignments are too many to enumerate "
            f"(the limit is n = {MOST_SIGN_FLIPS}); use mean_interval"
        )
    threshold = abs(float(array.sum())) - _rounding_error(array)
    return SignFlip(
        n=n,
        n_positive=int((array > 0).sum()),
        n_negative=int((array < 0).sum()),
        mean=float(array.mean()),
        p=2 * _share_reaching(threshold, array) if threshold > 0 else 1.0,
        smallest_p=2 / 2.0**n,
    )


def mean_interval(
    values: Values,
    *,
    level: float = 0.95,
    method: Literal["t", "bootstrap"] = "t",
    seed: int = 0,
) -> Interval:
    """Confidence interval for the mean over seeds.

    Example:
        >>> print(mean_interval([0.12, 0.08, 0.15, 0.04, 0.10]))
        +0.0980 [+0.0465, +0.1495]

    Args:
        values: One value per seed, in any unit, which is the interval's too; at least 2.
        level: Confidence level, between 0 and 1.
        method: "t" is Student's interval. "bootstrap" is the percentile bootstrap over seeds: all
            n**n resamples where n <= 6, otherwise 20,000 random ones. Each end is the mean of a
            resample, the innermost with less than (1 - level) / 2 of them beyond it; nothing is
            interpolated. With few seeds it is too narrow: at level 0.95 it covers the mean of
            normal values 85 % of the time at n = 5, 50 % at n = 2, where its ends are the values.
        seed: Seed of the Philox generator that draws the random resamples.

    Raises:
        HysteresisError: n < 2, a value not finite, not one-dimensional, or a bad option.

    Source: Student (1908), Biometrika 6(1); Efron and Tibshirani (1993), An Introduction to the
    Bootstrap, chapter 13; why it is narrow: Hesterberg (2015), The American Statistician 69(4).
    """
    array = _checked(values, "values", least=2)
    if seed < 0:
        raise HysteresisError(f"seed is {seed}, but must not be negative")
    n, tail = len(array), _tail(level)
    mean, error = _mean_and_error(array)
    if method == "t":
        half = error * float(stats.t.isf(tail, n - 1))
        return Interval(mean, mean - half, mean + half, level, method, n)
    if method == "bootstrap":
        low, high = _outermost(_resampled_means(array - mean, seed), tail)
        return Interval(mean, mean + low, mean + high, level, method, n)
    raise HysteresisError(f'method is {method!r}, but must be "t" or "bootstrap"')


def ratio_interval(numerator: Values, denominator: Values, *, level: float = 0.95) -> Interval:
    """Fieller's confidence interval for mean(numerator) / mean(denominator), paired by seed.

    Example:
        >>> print(ratio_interval([0.9, 2.1, 2.8, 4.2], [1.0, 2.0, 3.0, 4.0]))
        +1.0000 [+0.6362, +1.1143]

    Args:
        numerator: One value per seed, in any unit; at least 2.
        denominator: The value of the same seed at the same place.
        level: Confidence level, between 0 and 1.

    Returns:
        The interval, in the numerator's unit over the denominator's. Where the denominator's mean
        is not distinguishable from zero at this level, Fieller's set is unbounded (a line, or two
        rays) and is given as -inf to +inf, which decides nothing.

    Raises:
        HysteresisError: n < 2, a value not finite, not one-dimensional, unequal lengths, a bad
            level, or a denominator whose mean is zero.

    Source: Fieller (1954), Journal of the Royal Statistical Society B 16(2).
    """
    top = _checked(numerator, "numerator", least=2)
    bottom = _checked(denominator, "denominator", least=2)
    n = len(top)
    if n != len(bottom):
        raise HysteresisError(
            f"numerator has {n} values and denominator {len(bottom)}, but they must be paired"
        )
    if abs(bottom.sum()) <= _rounding_error(bottom):
        raise HysteresisError(
            f"the mean of denominator is zero ({bottom.mean():.3g}), so the ratio is undefined"
        )
    t = float(stats.t.isf(_tail(level), n - 1))
    mean = float(bottom.mean())
    ratio = float(top.mean()) / mean
    # Fieller's quadratic, shifted to the estimated ratio: its discriminant is then a sum of
    # squares, where the textbook form loses half the digits to cancellation.
    covariances = np.cov(top - ratio * bottom, bottom / mean) / n
    g = t**2 * float(covariances[1, 1])  # Fieller's name
    if g >= 1:
        return Interval(ratio, -math.inf, math.inf, level, "Fieller", n)
    centre = -(t**2) * float(covariances[0, 1])
    half = math.hypot(centre, t * math.sqrt(float(covariances[0, 0]) * (1 - g)))
    scale = mean * (1 - g)
    low, high = sorted([ratio + (centre - half) / scale, ratio + (centre + half) / scale])
    return Interval(ratio, low, high, level, "Fieller", n)


def correlation_interval(correlations: Values, *, level: float = 0.95) -> Interval:
    """Confidence interval for the mean correlation over seeds, by Student's t on Fisher's z scale.

    Example:
        >>> print(correlation_interval([0.9991, 0.9987, 0.9995, 0.9990, 0.9978]))
        +0.9989 [+0.9979, +0.9995]

    Args:
        correlations: One correlation per seed, without unit, in [-1, 1]; at least 2. A value of
            +-1 (or beyond it by rounding, up to 1e-15) has no finite z, and is moved to the nearest
            number inside. Its z is then +-18.7, which dominates the mean of a few seeds.
        level: Confidence level, between 0 and 1.

    Raises:
        HysteresisError: n < 2, a value not in [-1, 1], not one-dimensional, or a bad level.

    Source: Fisher (1921), Metron 1; the standard error is the spread over seeds, not his
    1 / sqrt(N - 3), which needs N independent entries behind each correlation.
    """
    array = _checked(correlations, "correlations", least=2)
    _refuse(np.abs(array) > 1 + 1e-15, array, "correlations", "in [-1, 1]")
    inside = math.nextafter(1, 0)
    z = mean_interval(np.arctanh(array.clip(-inside, inside)), level=level)
    estimate, low, high = np.tanh([z.estimate, z.low, z.high]).tolist()
    return Interval(estimate, low, high, level, "Fisher z", z.n)


def proportion_interval(hits: Values, *, level: float = 0.95) -> Interval:
    """Confidence interval for how often something holds over seeds, by Clopper and Pearson.

    Example:
        >>> print(proportion_interval([1.0, 1.0, 1.0, 1.0, 1.0]))
        +1.0000 [+0.4782, +1.0000]

    Args:
        hits: One value per seed: 1 where it holds, 0 where not; at least 1.
        level: Confidence level, between 0 and 1; the interval covers at least as often.

    Raises:
        HysteresisError: No values, one that is neither 0 nor 1, not one-dimensional, or a bad
            level.

    Source: Clopper and Pearson (1934), Biometrika 26(4).
    """
    array = _checked(hits, "hits", least=1)
    _refuse((array != 0) & (array != 1), array, "hits", "0 or 1")
    _tail(level)
    n, n_hits = len(array), int(array.sum())
    ends = stats.binomtest(n_hits, n).proportion_ci(confidence_level=level, method="exact")
    low, high = float(ends.low), float(ends.high)
    return Interval(n_hits / n, low, high, level, "Clopper-Pearson", n)


def holm(p_values: Values) -> NDArray[np.float64]:
    """Adjust p values, in the order given, so that the family-wise error rate is controlled.

    Example:
        >>> holm([0.01, 0.04, 0.03]).tolist()
        [0.03, 0.06, 0.06]

    Args:
        p_values: The p values of one family of tests, each in [0, 1].

    Raises:
        HysteresisError: No p values, or one not in [0, 1], or not one-dimensional.

    Source: Holm (1979), Scandinavian Journal of Statistics 6(2).
    """
    array = _checked(p_values, "p_values", least=1)
    _refuse((array < 0) | (array > 1), array, "p_values", "in [0, 1]")
    order = np.argsort(array)
    hypotheses_left = np.arange(len(array), 0, -1)
    adjusted = np.empty_like(array)
    adjusted[order] = np.maximum.accumulate(hypotheses_left * array[order]).clip(max=1)
    return adjusted


def equivalence_test(values: Values, *, margin: float, level: float = 0.95) -> Equivalence:
    """Test that the mean over seeds lies within +-margin, by two one-sided t tests.

    Example:
        >>> equivalence_test([0.01, -0.02, 0.00, 0.01, -0.01], margin=0.05).equivalent
        True

    Args:
        values: One value per seed, in any unit; at least 2.
        margin: The mean that is just too large to be called none, in the unit of the values.
        level: One minus the size of the test; between 0.5 and 1.

    Returns:
        `p`, the larger of the two p values (0 or 1 where the values have no variance);
        `equivalent`, whether p < 1 - level; and `interval`, the t interval of level
        1 - 2 * (1 - level), which lies within the margin just when `equivalent` is true.

    Raises:
        HysteresisError: n < 2, a value not finite, not one-dimensional, or a bad margin or level.

    Source: Schuirmann (1987), Journal of Pharmacokinetics and Biopharmaceutics 15(6).
    """
    array = _checked(values, "values", least=2)
    n = len(array)
    if not 0 < margin < math.inf:
        raise HysteresisError(f"margin is {margin}, but must be positive and finite")
    if not 0.5 < level < 1:
        raise HysteresisError(f"level is {level}, but must lie between 0.5 and 1")
    mean, error = _mean_and_error(array)
    room = margin - abs(mean)  # the nearer bound has the larger p value
    p = float(stats.t.sf(room / error, n - 1)) if error > 0 else float(room <= 0)
    interval = mean_interval(array, level=1 - 2 * (1 - level))
    return Equivalence(margin, p, p < 1 - level, level, interval, n)


def _checked(values: Values, name: str, *, least: int) -> NDArray[np.float64]:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise HysteresisError(f"{name} must be a sequence of numbers: {error}") from error
    if array.ndim != 1:
        raise HysteresisError(f"{name} must be one-dimensional, but its shape is {array.shape}")
    if len(array) < least:
        needs = "an interval over seeds needs at least two" if least == 2 else "needs at least one"
        raise HysteresisError(f"{name} has n = {len(array)}, but {needs}")
    _refuse(~(np.abs(array) <= LARGEST_VALUE), array, name, f"finite, at most {LARGEST_VALUE:g}")
    return array


def _refuse(bad: NDArray[np.bool_], array: NDArray[np.float64], name: str, rule: str) -> None:
    if bad.any():
        index = int(bad.argmax())
        raise HysteresisError(f"{name}[{index}] is {array[index]}, but every value must be {rule}")


def _tail(level: float) -> float:
    if not 0 < level < 1:
        raise HysteresisError(f"level is {level}, but must lie between 0 and 1")
    return (1 - level) / 2


def _mean_and_error(array: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and its standard error."""
    spread = float(np.ptp(array))
    if spread == 0:  # numpy's mean of equal values can miss them by a rounding error
        return float(array[0]), 0.0
    # In units of the spread the squares of very small values do not vanish.
    error = spread * float(np.std(array / spread, ddof=1)) / math.sqrt(len(array))
    return float(array.mean()), error


def _rounding_error(array: NDArray[np.float64]) -> float:
    """A bound on how far apart two signed sums that are equal in exact arithmetic can lie."""
    return 4 * len(array) * float(np.finfo(np.float64).eps * np.abs(array).sum())


def _share_reaching(threshold: float, array: NDArray[np.float64]) -> float:
    """Share of all 2**n signed sums that are at least the threshold."""
    # Each is a signed sum of one half of the values plus one of the other half, so two lists of
    # 2**(n/2) are enough to count them all.
    half = len(array) // 2
    first, second = _signed_sums(array[:half]), np.sort(_signed_sums(array[half:]))
    too_small = int(np.searchsorted(second, threshold - first).sum())
    return 1 - too_small / 2.0 ** len(array)


def _signed_sums(array: NDArray[np.float64]) -> NDArray[np.float64]:
    sums = np.zeros(1)
    for value in array:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def _outermost(means: NDArray[np.float64], tail: float) -> tuple[float, float]:
    """The innermost of the means that have less than the tail beyond them, on either side.

    An interpolation between the few means that small samples have would narrow the interval.
    """
    ordered = np.sort(means)
    rank = max(1, math.ceil(tail * len(means) - 1e-9))  # a product that rounding lifts over a rank
    return float(ordered[rank - 1]), float(ordered[-rank])


def _resampled_means(array: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    n = len(array)
    if n <= MOST_ENUMERATED:
        resamples = np.indices((n,) * n).reshape(n, -1).T
    else:
        resamples = np.random.Generator(np.random.Philox(seed)).integers(n, size=(20_000, n))
    means: NDArray[np.float64] = array[resamples].mean(axis=1)
    return means
