"""Comparisons of route maps equal scipy's, hand-made and closed-form ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from tl_hysteresis.comparison import agreement, compare_routes, compare_seeds
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.routes import Direction, RouteMap
from tl_hysteresis.statistics import correlation_interval, mean_interval

SITES = [(layer, point, role) for layer in (0, 1) for point in "ab" for role in "xyz"]
HEADS = [(layer, "z", head, "x") for layer in (0, 1) for head in range(4)]


def table(effects: Sequence[float] | np.ndarray, heads: bool = False) -> pd.DataFrame:
    sites, columns = (HEADS, ["layer", "point", "head", "role"]) if heads else (SITES, None)
    columns = columns or ["layer", "point", "role"]
    return pd.DataFrame(sites[: len(effects)], columns=columns).assign(effect=list(effects))


def a_map(
    effects: np.ndarray,
    trials: str = "these",
    direction: Direction = "denoising",
    heads: bool = False,
) -> RouteMap:
    """A map from its effects, `[site, trial]`."""
    margins = torch.zeros(effects.shape[1], dtype=torch.float64)
    of_sites = table(effects.mean(axis=1), heads)
    return RouteMap(of_sites, torch.tensor(effects), margins, margins, direction, trials)


def rows_in_order(route: RouteMap, order: np.ndarray) -> RouteMap:
    """The same map with its rows in another order."""
    moved = {"table": route.table.iloc[order], "effects": route.effects[torch.from_numpy(order)]}
    return RouteMap(**{**vars(route), **moved})


def noisy(seed: int, n_trials: int = 30, n_sites: int = 12) -> np.ndarray:
    """Effects that vary from trial to trial about the same truth."""
    noise = np.random.default_rng(seed).normal(size=(n_sites, n_trials))
    return np.linspace(-1.0, 2.0, n_sites)[:, None] + noise


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "with ties"])
def test_the_numbers_are_scipys_and_least_squares(rounded: bool) -> None:
    a, b = np.random.default_rng(int(rounded)).normal(size=(2, 12))
    a, b = (np.round(x) if rounded else x for x in (a, b + 0.5 * a))
    found = compare_routes(table(a), table(b))
    assert found.topology == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-12)
    assert found.spearman == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    assert found.gain == pytest.approx(np.linalg.lstsq(b[:, None], a, rcond=None)[0][0], abs=1e-12)
    assert (found.n_sites, found.intervals, found.dominant_heads) == (12, None, None)


def test_scale_and_offset() -> None:
    effects = noisy(0).mean(axis=1)
    for factor in (3.0, 1e-9, -2.0):
        found = compare_routes(table(factor * effects), table(effects))
        assert found.gain == pytest.approx(factor)
        assert found.topology == pytest.approx(np.sign(factor))
        assert found.spearman == pytest.approx(np.sign(factor))
    # An offset leaves the correlation, and not the slope through the origin.
    found = compare_routes(table(effects + 100.0), table(effects))
    assert found.topology == pytest.approx(1.0)
    expected = 1.0 + 100.0 * effects.sum() / (effects**2).sum()
    assert found.gain == pytest.approx(expected)


def test_overlap_counts_the_strongest_sites_in_size() -> None:
    a, b = table([9.0, -8.0, 0.1, 0.2, 7.0]), table([0.1, -9.0, 6.0, 0.2, -4.0])
    overlaps = {k: compare_routes(a, b, k=k).overlap for k in (1, 2, 3, 4)}
    assert overlaps == {1: 0.0, 2: 1 / 2, 3: 2 / 3, 4: 3 / 4}
    assert compare_routes(a, b, k=99).overlap == 1.0
    assert compare_routes(a, b, k=99).k == 5


def test_dominant_heads_are_the_largest_in_size() -> None:
    a = table([0.1, 0.2, 0.3, 0.0, 0.5, -0.9, 0.1, 0.2], heads=True)
    b = table([0.1, 0.2, 0.3, 0.0, 0.5, -0.1, 0.1, 0.7], heads=True)
    assert compare_routes(a, b).dominant_heads == ("L1H1", "L1H3")
    read = b.astype({"head": float})  # as a table is read from a file that has sites without heads
    assert compare_routes(a, read).topology == compare_routes(a, b).topology
    streams = pd.DataFrame([(2, "resid_pre", None, "x", 99.0)], columns=a.columns)
    mixed = [pd.concat([x.astype(object), streams]).convert_dtypes() for x in (a, b)]
    assert compare_routes(*mixed).dominant_heads == ("L1H1", "L1H3")
    assert compare_routes(*mixed).n_sites == 9


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "many zeros"])
def test_the_order_of_the_rows_has_no_say(ties: bool) -> None:
    a, b = noisy(1).mean(axis=1), noisy(2).mean(axis=1)
    if ties:  # as where a role is not corrupted, and its effect is exactly 0
        a[3:], b[:-3] = 0.0, 0.0
    expected = compare_routes(table(a), table(b))
    for seed in range(8):
        mixed = (table(x).sample(frac=1.0, random_state=seed + i) for i, x in enumerate((a, b)))
        found = compare_routes(*mixed)
        for name in ("topology", "spearman", "gain"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-12)
        assert found.overlap == expected.overlap


def test_the_order_of_the_rows_has_no_say_in_intervals() -> None:
    first, second = a_map(noisy(1)), a_map(noisy(2))
    order = np.random.default_rng(0).permutation(12)
    mixed = rows_in_order(second, order)
    one, two = compare_routes(first, second).intervals, compare_routes(first, mixed).intervals
    assert one is not None and two is not None
    for name, interval in one.items():
        bounds = (interval.estimate, interval.low, interval.high)
        assert (two[name].estimate, two[name].low, two[name].high) == pytest.approx(bounds)


def test_maps_that_cannot_be_compared_are_refused() -> None:
    good = table(noisy(0).mean(axis=1))
    other_roles = good.assign(role=good["role"].str.upper())
    for bad, message in (
        (good.iloc[:-1], "12 and 11 sites have 11 in common"),
        (other_roles, "have 0 in common"),
        (
            good.drop(columns="role").assign(position=range(len(good))),
            "by layer, point, role and by layer, point, po",
        ),
        (table(np.arange(8.0), heads=True), "route maps by"),
        (pd.concat([good, good.iloc[:1]]), "has a site twice"),
        (good.assign(effect=0.3), "constant"),
        (good.assign(effect=0.0), "constant"),
        (good.assign(effect=0.1 + 1e-16 * np.arange(12)), "constant"),
        (good.assign(effect=[np.nan, *np.arange(11.0)]), "not finite"),
        (good.assign(effect=[np.inf, *np.arange(11.0)]), "not finite"),
    ):
        for pair in ((good, bad), (bad, good)):
            with pytest.raises(HysteresisError) as error:
                compare_routes(*pair)
            if pair[1] is bad:
                assert message in str(error.value)
                if "common" not in message and "by" not in message:
                    assert "second" in str(error.value)
    with pytest.raises(HysteresisError, match="over 2 sites says nothing"):
        compare_routes(good.iloc[:2], good.iloc[:2])
    with pytest.raises(HysteresisError, match="k = 0"):
        compare_routes(good, good, k=0)
    with pytest.raises(HysteresisError, match="of denoising and one of noising"):
        compare_routes(a_map(noisy(0)), a_map(noisy(0), direction="noising"))


def test_bad_options_of_the_bootstrap_are_refused() -> None:
    pair = a_map(noisy(0)), a_map(noisy(1))
    for options in ({"level": 1.5}, {"level": 0.0}, {"resamples": 0}, {"seed": -1}):
        with pytest.raises(HysteresisError, match=next(iter(options))):
            compare_routes(*pair, **options)


def test_a_map_with_itself_on_the_same_trials_is_certain() -> None:
    itself = compare_routes(a_map(noisy(0)), a_map(noisy(0))).intervals
    assert itself is not None
    for interval in itself.values():
        assert (interval.low, interval.high) == pytest.approx((1.0, 1.0), abs=1e-12)
        assert (interval.n, interval.level) == (30, 0.95)
    # Of other trials, though their effects are the same, each map's trials are drawn for itself.
    apart = compare_routes(a_map(noisy(0)), a_map(noisy(0), trials="others")).intervals
    assert apart is not None
    assert apart["topology"].low < 0.99 and apart["gain"].low < 0.95 < 1.05 < apart["gain"].high


def test_a_constant_gain_is_certain_only_where_the_trials_are_paired() -> None:
    effects = noisy(0)
    paired = compare_routes(a_map(2.5 * effects), a_map(effects)).intervals
    assert paired is not None
    assert (paired["gain"].low, paired["gain"].high) == pytest.approx((2.5, 2.5))
    apart = compare_routes(a_map(2.5 * effects[:, :20], "some"), a_map(effects)).intervals
    assert apart is not None
    assert apart["gain"].n == 20 and apart["gain"].high - apart["gain"].low > 0.2


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_gains_interval_is_that_of_a_mean_where_the_second_map_is_sure(level: float) -> None:
    """Then the gain is the mean over trials of a_t·b / b·b, whose standard error is known."""
    sure = np.repeat(np.linspace(-1.0, 2.0, 12)[:, None], 400, axis=1)
    effects = noisy(3, n_trials=400)
    result = compare_routes(a_map(effects), a_map(sure), level=level, resamples=8000)
    each = (effects * sure).sum(axis=0) / (sure**2).sum(axis=0)
    assert result.gain == pytest.approx(each.mean()) and result.intervals is not None
    half = stats.norm.ppf((1.0 + level) / 2.0) * each.std() / np.sqrt(400)
    interval = result.intervals["gain"]
    assert interval.low == pytest.approx(each.mean() - half, abs=0.05 * half)
    assert interval.high == pytest.approx(each.mean() + half, abs=0.05 * half)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """The truth is a gain of 1; both maps are of the same trials, with errors of their own.

    The errors are small: those of the second map bias a slope towards 0.
    """
    truth = np.linspace(-1.0, 2.0, 12)[:, None]
    covered = []
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(scale=0.2, size=(2, 12, 60))
        pair = [a_map(truth + part) for part in noise]
        intervals = compare_routes(*pair, level=0.9, resamples=200).intervals
        assert intervals is not None
        covered.append(1.0 in intervals["gain"])
    # Binomial: 0.9 within three standard errors, less a little for the percentile bootstrap.
    assert 0.82 <= np.mean(covered) <= 0.965


def test_intervals_are_reproducible_and_the_seed_decides_them() -> None:
    pair = a_map(noisy(0)), a_map(noisy(1))
    first, again, other = (compare_routes(*pair, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first.topology == other.topology
    assert compare_routes(a_map(noisy(0, 1)), a_map(noisy(1, 1))).intervals is None
    assert compare_routes(pair[0].table, pair[1]).intervals is None


def test_a_resample_in_which_a_map_is_constant_has_no_correlation() -> None:
    """By rounding its mean may differ from its values: that must not count as a correlation of 1.

    In every other resample, of these two trials, the correlation is that of the second trial.
    """
    for n_sites, constant in ((3, 0.1), (7, 0.1), (7, 0.7), (9, 0.3), (11, 0.6)):
        a, b = np.random.default_rng(n_sites).normal(size=(2, n_sites, 2))
        a[:, 0], b[:, 0] = constant, 1.1 * constant
        found = compare_routes(a_map(a), a_map(b))
        assert found.intervals is not None
        for name in ("topology", "spearman"):
            interval = found.intervals[name]
            assert (interval.low, interval.high) == pytest.approx((interval.estimate,) * 2), name


def seeds_pairs() -> list[tuple[RouteMap, RouteMap]]:
    effects = [noisy(seed, n_sites=8) for seed in range(10)]
    return [(a_map(effects[i], heads=True), a_map(effects[i + 5], heads=True)) for i in range(5)]


def test_seeds_are_summarised_by_the_mean_and_the_statistics_own_intervals() -> None:
    pairs = seeds_pairs()
    each = [compare_routes(*pair, k=3) for pair in pairs]
    found = compare_seeds(pairs, k=3).set_index("quantity")
    same = [float(c.dominant_heads[0] == c.dominant_heads[1]) for c in each if c.dominant_heads]
    assert 0.0 < np.mean(same) < 1.0, "else nothing is tested"
    values = {n: [getattr(c, n) for c in each] for n in ("topology", "spearman", "gain", "overlap")}
    values["same_dominant_head"] = same
    assert list(found.index) == list(values)
    for name, numbers in values.items():
        row = found.loc[name]
        correlation = name in ("topology", "spearman")
        t = (correlation_interval if correlation else mean_interval)(numbers)
        method = t.method
        bootstrap = mean_interval(numbers, method="bootstrap")
        assert row["estimate"] == pytest.approx(np.mean(numbers))
        ends = (t.low, t.high)
        if name == "overlap":  # shares do not leave [0, 1]
            ends, method = (max(t.low, 0.0), min(t.high, 1.0)), "t within [0, 1]"
        if name == "same_dominant_head":
            binomial = stats.binomtest(int(sum(numbers)), 5).proportion_ci(method="exact")
            ends, method = (binomial.low, binomial.high), "Clopper-Pearson"
        assert (row["low"], row["high"]) == pytest.approx(ends)
        assert row["method"] == method
        bounds = (row["bootstrap_low"], row["bootstrap_high"])
        assert bounds == pytest.approx((bootstrap.low, bootstrap.high))
        assert row["n"] == 5
    tables = compare_seeds([(x.table, y.table) for x, y in pairs], k=3).set_index("quantity")
    pd.testing.assert_frame_equal(found, tables)
    assert "same_dominant_head" not in set(
        compare_seeds([(a_map(noisy(i)), a_map(noisy(i + 9))) for i in range(2)])["quantity"]
    )


def test_seeds_that_cannot_be_summarised_are_named() -> None:
    pairs = seeds_pairs()
    bad = a_map(np.ones((8, 3)), heads=True)
    with pytest.raises(HysteresisError, match="pair 2: the second route map is constant"):
        compare_seeds([*pairs[:2], (pairs[2][0], bad)])
    noising = a_map(noisy(0, n_sites=8), direction="noising", heads=True)
    with pytest.raises(HysteresisError, match="pair 1: a map of denoising and one of noising"):
        compare_seeds([pairs[0], (pairs[1][0], noising)])
    for few in (0, 1):
        with pytest.raises(HysteresisError, match=f"{few} pair of maps: an interval over seeds"):
            compare_seeds(pairs[:few])


def test_a_map_in_two_pairs_is_refused() -> None:
    """Two comparisons with one map are not independent, whatever its rows' order or its class."""
    pairs = seeds_pairs()
    shared, order = pairs[1][1], np.arange(8)[::-1].copy()
    for again in (shared, shared.table, rows_in_order(shared, order)):
        for pair in ((pairs[4][0], again), (again, pairs[4][0])):
            with pytest.raises(HysteresisError, match="pairs 1 and 3 share a map, so they are not"):
                compare_seeds([*pairs[:3], pair])


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_pair_of_maps_is_named() -> None:
    first, second = seeds_pairs()[0]
    not_pairs: list[Any] = [[first, second], [(first, second, first)], [(first, "second")], [[]]]
    for pairs in not_pairs:
        with pytest.raises(
            HysteresisError, match=r"pair 0 is no \(first map, second map\), but \("
        ):
            compare_seeds(pairs)
    for one in (first, first.table):
        with pytest.raises(HysteresisError, match="takes a list of pairs"):
            compare_seeds(one)  # type: ignore[arg-type]


def test_agreement_measures_errors_by_site() -> None:
    exact = a_map(np.array([[1.0, 3.0], [-6.0, -4.0], [0.0, 1.0], [0.5, 0.5]]))
    shifted = a_map(np.array([[1.5, 3.5], [-2.0, -3.0], [0.0, 1.0], [0.0, 0.5]]))
    approximate = rows_in_order(shifted, np.array([2, 0, 3, 1]))
    found = agreement(exact, approximate, k=2)
    # By site: |2.5 - 2|, |-2.5 + 5|, 0, |0.25 - 0.5|.
    assert found.mean_error == pytest.approx((0.5 + 2.5 + 0.0 + 0.25) / 4)
    assert found.largest_error == pytest.approx(2.5)
    assert found.worst_site == "layer 0, point a, role y"
    assert found.largest_effect == pytest.approx(5.0)
    x, y = (m.table["effect"].to_numpy() for m in (shifted, exact))
    assert found.comparison.gain == pytest.approx(x @ y / (y @ y))
    assert found.comparison.k == 2 and found.comparison.intervals is not None
    assert agreement(exact, exact).largest_error == 0.0
    with pytest.raises(HysteresisError, match="different trials"):
        agreement(exact, a_map(noisy(0, 2, 4), trials="others"))
    with pytest.raises(HysteresisError, match="one of noising|of noising and one"):
        agreement(exact, a_map(noisy(0, 2, 4), direction="noising"))


def test_an_attribution_map_is_not_taken_for_the_exact_one() -> None:
    exact = a_map(noisy(0))
    approximate = RouteMap(**{**vars(a_map(noisy(1))), "method": "attribution"})
    assert agreement(exact, approximate).comparison.gain > 0.0
    for swapped in ((approximate, exact), (approximate, approximate)):
        with pytest.raises(HysteresisError, match="the exact map was made by attribution, the app"):
            agreement(*swapped)
    assert "denoising by patching," in repr(exact)
    assert "denoising by attribution," in repr(approximate)


def test_a_table_that_went_through_a_file_is_the_same_map(tmp_path: Path) -> None:
    """Beside points without heads, head numbers come back as 0.0, 1.0, ...; and "" as nothing."""
    streams = table(noisy(0).mean(axis=1)).assign(head=None)
    heads = table(np.arange(8.0) - 2, heads=True).astype({"head": object})
    whole = pd.concat([streams, heads], ignore_index=True)
    whole.to_csv(tmp_path / "map.csv", index=False)
    read = pd.read_csv(tmp_path / "map.csv")
    assert read["head"].dtype == float
    found = compare_routes(read, whole)
    assert found.topology == pytest.approx(1.0)
    assert found.dominant_heads == ("L1H3", "L1H3")
    paths = pd.DataFrame(
        {
            "sender": ["L0H0"] * 3,
            "receiver": ["L1H0", "L1H1", "logits"],
            "input": ["k", "k", ""],
            "effect": [1.0, 3.0, 2.0],
        }
    )
    paths.to_csv(tmp_path / "paths.csv", index=False)
    assert compare_routes(pd.read_csv(tmp_path / "paths.csv"), paths).n_sites == 3
