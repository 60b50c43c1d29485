"""Two route maps compared: the same sites (topology), and how strongly (gain)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.routes import SITE_AXES, EffectMap, dominant_head
from tl_hysteresis.statistics import (
    Interval,
    correlation_interval,
    mean_interval,
    proportion_interval,
)


@dataclass(frozen=True)
class RouteComparison:
    """How alike two route maps are."""

    topology: float
    """Pearson correlation of the effects over sites: do the same sites matter?"""
    spearman: float
    """Spearman's rank correlation: do they matter in the same order?"""
    gain: float
    """Slope through the origin of first ≈ gain · second: how much more strongly?"""
    overlap: float
    """Share of the `k` sites with the largest effects in size that the two maps have in common."""
    k: int
    """How many sites `overlap` looks at."""
    n_sites: int
    """Sites in each map."""
    dominant_heads: tuple[str, str] | None = None
    """In each map the head with the largest effect in size; None for maps without heads."""
    intervals: dict[str, Interval] | None = None
    """Bootstrap intervals over trials of topology, spearman and gain; None for bare tables.

    One is left out where a map is constant in most resamples.
    """


def compare_routes(
    first: EffectMap | pd.DataFrame,
    second: EffectMap | pd.DataFrame,
    *,
    k: int = 5,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> RouteComparison:
    """Compare the effects of two route maps, or of their tables, over the same sites.

    The gain goes from the second map to the first: it is the slope through the origin of
    first ≈ gain · second, and above 1 where the effects of the first are the larger ones. Exchanged
    maps have another gain, which is its inverse only where the maps are proportional; the
    correlations and the overlap are the same both ways.

    Maps with effects of several trials get percentile bootstrap intervals over trials: the same
    trials are drawn for both maps where both were measured on the same ones, else each map's own.
    They say how far the trials decide the number, and nothing of other seeds: see `compare_seeds`.
    Noise pulls correlations and gain towards zero, and resampling adds as much again, so that with
    few trials an interval can lie below its estimate.

    Args:
        first: a route map or a path map, or a table with its columns.
        second: another one of the same sites, in any order.
        k: how many of the strongest sites `overlap` looks at; at most all.
        level: confidence level of the intervals.
        resamples: bootstrap resamples.
        seed: of the resampling.

    Raises:
        HysteresisError: maps of different sites or directions, fewer than three sites, or a
            constant map, whose correlation is not defined.

    Example:
        >>> sites = {"layer": [0, 0, 1], "point": ["resid_pre"] * 3, "role": ["a", "b", "a"]}
        >>> one = pd.DataFrame({**sites, "effect": [0.0, 1.0, 2.0]})
        >>> two = pd.DataFrame({**sites, "effect": [0.0, 0.5, 1.0]})
        >>> result = compare_routes(one, two)
        >>> round(result.topology, 6), result.gain, result.overlap
        (1.0, 2.0, 1.0)

    Source: topology and gain, Zuo (2026); the bootstrap, Efron and Tibshirani (1993), chapter 13.
    """
    tables = _tables(first, second)
    order = _common_order(*tables)
    a, b = (t["effect"].to_numpy(float)[i] for t, i in zip(tables, order, strict=True))
    for which, values in (("first", a), ("second", b)):
        _check_effects(which, values)
    if k < 1:
        raise HysteresisError(f"k = {k}: the overlap needs at least one site")
    if not 0.0 < level < 1.0:
        raise HysteresisError(f"level is {level}, but must lie between 0 and 1")
    if resamples < 1 or seed < 0:
        raise HysteresisError(
            f"resamples = {resamples}, seed = {seed}: at least 1 of them, and a seed of at least 0"
        )
    k = min(k, len(a))
    strongest = [set(np.argsort(-np.abs(x), kind="stable")[:k].tolist()) for x in (a, b)]
    heads = all("head" in table and table["head"].notna().any() for table in tables)
    found = RouteComparison(
        topology=float(_pearson(a[None], b[None])[0]),
        spearman=float(_spearman(a[None], b[None])[0]),
        gain=float(_gain(a[None], b[None])[0]),
        overlap=len(strongest[0] & strongest[1]) / k,
        k=k,
        n_sites=len(a),
        dominant_heads=(dominant_head(tables[0]), dominant_head(tables[1])) if heads else None,
    )
    if not (isinstance(first, EffectMap) and isinstance(second, EffectMap)):
        return found
    n_trials = first.effects.shape[1], second.effects.shape[1]
    if min(n_trials) < 2:
        return found
    rng = np.random.Generator(np.random.Philox(seed))
    weights = [rng.multinomial(n, np.full(n, 1 / n), size=resamples) / n for n in n_trials]
    if first.trials == second.trials:
        weights[1] = weights[0]
    drawn = [
        w @ x.effects.numpy()[i].T for w, x, i in zip(weights, (first, second), order, strict=True)
    ]
    tail = (1.0 - level) / 2.0
    intervals = {}
    for name, statistic in (("topology", _pearson), ("spearman", _spearman), ("gain", _gain)):
        values = statistic(*drawn)
        if np.isnan(values).mean() > 0.5:
            continue  # in most resamples a map is constant, so nothing can be said
        low, high = np.nanquantile(values, [tail, 1.0 - tail]).tolist()
        intervals[name] = Interval(
            getattr(found, name), low, high, level, "bootstrap over trials", min(n_trials)
        )
    return RouteComparison(**{**vars(found), "intervals": intervals})


def compare_seeds(
    pairs: Sequence[tuple[EffectMap | pd.DataFrame, EffectMap | pd.DataFrame]], *, k: int = 5
) -> pd.DataFrame:
    """Compare one pair of maps a seed, with intervals over seeds.

    The seeds are what is sampled, so no map may stand in two pairs.

    Args:
        pairs: of each seed its two maps, or their tables: (first, second), as `compare_routes`
            takes them.
        k: how many of the strongest sites `overlap` looks at.

    Returns:
        One row for each of `topology`, `spearman`, `gain`, `overlap`, and, for maps with heads,
        `same_dominant_head` (a share of the seeds): `estimate`, the mean over seeds; `low`, `high`
        and by which `method`; `bootstrap_low`, `bootstrap_high`, the bootstrap over seeds, which is
        a point where all seeds have one value; `n`, the number of seeds. The methods: "Fisher z"
        for the two correlations, "t" for the gain, "t within [0, 1]", where it is cut, for the
        overlap, "Clopper-Pearson" for `same_dominant_head`.

    Raises:
        HysteresisError: fewer than two pairs, what is no pair of maps, a map in two pairs, or what
            `compare_routes` refuses, with its seed.

    Example:
        >>> sites = {"layer": [0, 0, 1], "point": ["resid_pre"] * 3, "role": ["a", "b", "a"]}
        >>> one, two, three, four = (
        ...     pd.DataFrame({**sites, "effect": effects})
        ...     for effects in ([0.0, 1.0, 2.0], [0.0, 0.5, 1.0], [0.1, 3.0, 3.0], [0.0, 1.0, 1.0])
        ... )
        >>> found = compare_seeds([(one, two), (three, four)])  # a pair for each of two seeds
        >>> found["method"].to_list()
        ['Fisher z', 'Fisher z', 't', 't within [0, 1]']
    """
    found = []
    owner: dict[bytes, int] = {}
    for number, (first, second) in enumerate(_checked_pairs(pairs)):
        try:
            tables = _tables(first, second)
            found.append(compare_routes(*tables, k=k))
        except HysteresisError as error:
            raise HysteresisError(f"pair {number}: {error}") from error
        for table in tables:
            effects = np.sort(table["effect"].to_numpy(float)).tobytes()
            if owner.setdefault(effects, number) != number:
                raise HysteresisError(
                    f"pairs {owner[effects]} and {number} share a map, so they are not independent "
                    "seeds: each map may stand in one pair"
                )
    columns = {
        name: [float(getattr(comparison, name)) for comparison in found]
        for name in ("topology", "spearman", "gain", "overlap")
    }
    heads = [c.dominant_heads for c in found]
    if heads and all(pair is not None for pair in heads):
        columns["same_dominant_head"] = [float(p is not None and p[0] == p[1]) for p in heads]
    rows = []
    for name, values in columns.items():
        over_seeds = {
            "topology": correlation_interval,
            "spearman": correlation_interval,
            "same_dominant_head": proportion_interval,
        }.get(name, mean_interval)(values)
        low, high, method = over_seeds.low, over_seeds.high, over_seeds.method
        if name == "overlap":  # a share, of which Student's t does not know that it has bounds
            low, high, method = max(low, 0.0), min(high, 1.0), "t within [0, 1]"
        bootstrap = mean_interval(values, method="bootstrap")
        bounds = (low, high, method, bootstrap.low, bootstrap.high)
        rows.append((name, bootstrap.estimate, *bounds, len(values)))
    names = [
        "quantity",
        "estimate",
        "low",
        "high",
        "method",
        "bootstrap_low",
        "bootstrap_high",
        "n",
    ]
    return pd.DataFrame(rows, columns=names)


def _checked_pairs(
    pairs: Sequence[tuple[EffectMap | pd.DataFrame, EffectMap | pd.DataFrame]],
) -> list[tuple[EffectMap | pd.DataFrame, EffectMap | pd.DataFrame]]:
    if isinstance(pairs, EffectMap | pd.DataFrame):
        raise HysteresisError("compare_seeds takes a list of pairs of maps, one pair for each seed")
    pairs = list(pairs)
    for number, pair in enumerate(pairs):
        maps = pair if isinstance(pair, tuple | list) else [pair]
        if len(maps) != 2 or not all(isinstance(m, EffectMap | pd.DataFrame) for m in maps):
            found = ", ".join(type(m).__name__ for m in maps)
            raise HysteresisError(f"pair {number} is no (first map, second map), but ({found})")
    if len(pairs) < 2:
        raise HysteresisError(
            f"{len(pairs)} pair of maps: an interval over seeds needs at least two; compare_routes "
            "compares one"
        )
    return pairs


@dataclass(frozen=True, eq=False)
class Agreement:
    """How far an approximate route map agrees with the exact one."""

    comparison: RouteComparison
    """Of the approximate map with the exact: a gain below 1 means effects are underestimated."""
    mean_error: float
    """Mean size of the deviation over sites, in logits."""
    largest_error: float
    """Largest deviation, in logits."""
    worst_site: str
    """The site where it is."""
    largest_effect: float
    """Size of the largest exact effect, in logits, to judge the errors by."""
    table: pd.DataFrame = field(repr=False)
    """One row a site, as in the exact map: `exact`, `approximate` (effects, in logits)."""


def agreement(exact: EffectMap, approximate: EffectMap, *, k: int = 5) -> Agreement:
    """How far an approximate map, from `attribution_map`, agrees with the exact one.

    In its `comparison` the approximate map comes first: approximate is about gain times exact, and
    `dominant_heads` are the approximate one's and the exact one's.

    Args:
        exact: a map by patching, from `route_map`.
        approximate: the map that is judged.
        k: how many of the strongest sites `overlap` looks at.

    Raises:
        HysteresisError: an attribution map in the place of the exact one; maps of different models,
            trials, sites or directions; or what `compare_routes` refuses.

    Example:
        >>> import torch
        >>> from tl_hysteresis.attribution import attribution_map
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> from tl_hysteresis.routes import route_map
        >>> from tl_hysteresis.tasks import Trials
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> tokens = torch.randint(16, (2, 8, 17), generator=torch.Generator().manual_seed(0))
        >>> clean, corrupted = (Trials.of(t, [16] * 8, [31] * 8) for t in tokens)
        >>> exact = route_map(model, clean, corrupted, points="v")
        >>> found = agreement(exact, attribution_map(model, clean, corrupted, points="v"))
        >>> found.comparison.topology > 0.9, found.mean_error < 0.1 * found.largest_effect
        (True, True)
    """
    if exact.method == "attribution":
        raise HysteresisError(
            f"the exact map was made by {exact.method}, the approximate one by "
            f"{approximate.method}: say agreement(exact, approximate), the exact one by route_map"
        )
    if exact.trials != approximate.trials:
        raise HysteresisError("the two maps were measured on different trials")
    if exact.corrupted_tokens != approximate.corrupted_tokens:
        raise HysteresisError("the two maps were measured on different corrupted trials")
    if exact.model != approximate.model:
        raise HysteresisError("the two maps were measured on different models")
    comparison = compare_routes(approximate, exact, k=k)
    i, j = _common_order(exact.table, approximate.table)
    a, b = exact.table["effect"].to_numpy(float)[i], approximate.table["effect"].to_numpy(float)[j]
    error = np.abs(b - a)
    worst = exact.table[exact.axes].iloc[int(i[error.argmax()])]
    return Agreement(
        comparison=comparison,
        mean_error=float(error.mean()),
        largest_error=float(error.max()),
        worst_site=", ".join(f"{axis} {value}" for axis, value in worst.dropna().items()),
        largest_effect=float(np.abs(a).max()),
        table=exact.table[exact.axes].iloc[i].assign(exact=a, approximate=b).sort_index(),
    )


def _tables(
    first: EffectMap | pd.DataFrame, second: EffectMap | pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables of both maps, refused where they show different things."""
    if isinstance(first, EffectMap) and isinstance(second, EffectMap):
        if first.direction != second.direction:
            raise HysteresisError(f"a map of {first.direction} and one of {second.direction}")
    return _table(first), _table(second)


def _table(route: EffectMap | pd.DataFrame) -> pd.DataFrame:
    """A map's table, with types as they were before it went through any file."""
    table = route.table if isinstance(route, EffectMap) else route
    if "effect" not in table:
        raise HysteresisError("a route map's table has a column 'effect' beside those of its sites")
    table = table.reset_index(drop=True)
    for axis in ("layer", "head", "position"):
        if axis in table:
            try:
                table[axis] = table[axis].astype("Int64")
            except (TypeError, ValueError) as error:
                raise HysteresisError(f"{axis} holds what is no whole number: {error}") from None
    if "input" in table:
        table["input"] = table["input"].fillna("")
    return table


def _common_order(first: pd.DataFrame, second: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of both tables that put their sites in the same order."""
    keys, other = ([axis for axis in SITE_AXES if axis in table] for table in (first, second))
    if keys != other:
        raise HysteresisError(f"route maps by {', '.join(keys)} and by {', '.join(other)}")
    numbered = []
    for table, which in ((first, "first"), (second, "second")):
        if table.duplicated(keys).any():
            raise HysteresisError(f"the {which} route map has a site twice")
        numbered.append(table[keys].assign(**{which: range(len(table))}))
    # In the order of the keys, so that the order of the rows decides no tie.
    both = numbered[0].merge(numbered[1], on=keys).sort_values(keys)
    if not len(both) == len(first) == len(second):
        raise HysteresisError(
            f"route maps of {len(first)} and {len(second)} sites have {len(both)} in common"
        )
    if len(both) < 3:
        raise HysteresisError(f"a correlation over {len(both)} sites says nothing; 3 are needed")
    return both["first"].to_numpy(), both["second"].to_numpy()


def _check_effects(which: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise HysteresisError(f"the {which} route map has effects that are not finite")
    if np.ptp(values) <= 1e-12 * np.abs(values).max():
        raise HysteresisError(f"the {which} route map is constant: no correlation is defined")


_Maps = Float[np.ndarray, "resample site"]


def _pearson(a: _Maps, b: _Maps) -> Float[np.ndarray, " resample"]:
    """Correlation of each pair of rows; NaN where one is constant, as a resample can be."""
    constant = np.any([np.ptp(x, axis=1) <= 1e-12 * np.abs(x).max(axis=1) for x in (a, b)], axis=0)
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        found: np.ndarray = (a * b).sum(axis=1) / np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
    found[constant] = np.nan
    return found.clip(-1.0, 1.0)  # rounding can leave it just outside


def _spearman(a: _Maps, b: _Maps) -> Float[np.ndarray, " resample"]:
    return _pearson(stats.rankdata(a, axis=1), stats.rankdata(b, axis=1))


def _gain(a: _Maps, b: _Maps) -> Float[np.ndarray, " resample"]:
    with np.errstate(invalid="ignore", divide="ignore"):
        found: np.ndarray = (a * b).sum(axis=1) / (b**2).sum(axis=1)
    return found
