"""From the tables of the memory experiments to their answers: what holds the memory, and how long.

The unit of every interval and test is the seed; what is shuffled or repeated within a seed serves
as a null, or is averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tl_hysteresis.quasistatic import loop_area
from tl_hysteresis.relaxation import RelaxationFit, fit_relaxation
from tl_hysteresis.results import StudyResult, gap_between, load_study
from tl_hysteresis.schedules import BRANCHES
from tl_hysteresis.statistics import holm, mean_interval, sign_flip_test

Array = NDArray[np.float64]

DRAWS = 20_000
"""Draws from a null distribution."""

AFTER = 10
"""Updates after behaviour first matches over which the gap that opens again is averaged."""

TABLES = ("crossing", "shuffled", "drift", "distances", "parts")


@dataclass(frozen=True)
class MemoryResult:
    """The answers of the memory experiments on one study.

    Attributes:
        study: the study they were run on.

    Example:
        >>> memory = load_memory("runs/reproduce")  # doctest: +SKIP
        >>> memory.fit().time_constant  # doctest: +SKIP
    """

    study: StudyResult

    @property
    def complete(self) -> bool:
        """True when every experiment is done."""
        return all(self.study.folder.has(f"tables/{name}.csv") for name in TABLES)

    def fit(self) -> RelaxationFit:
        """The law that the gap follows after the loop; see `fit_relaxation`."""
        return fit_relaxation(self.study.curve())

    def loop(self) -> pd.DataFrame:
        """Area and lag of each branch's loop; see `loop_area`."""
        return loop_area(self.study.table("loop"))

    def effects(self) -> pd.DataFrame:
        """Main effects and interaction of weights and optimizer state, at each relaxation.

        See `crossing_effects`.
        """
        return crossing_effects(self.study.table("crossing"))

    def null(self) -> pd.DataFrame:
        """The gap against order noise: pairs of loops whose updates were shuffled.

        One row a relaxation: `gap`, the mean over seeds; `null_low` and `null_high`, between which
        95 % of the null's means lie; `p`, the share of the null that is at least as large in size.
        A draw of the null takes two different shuffled loops of each seed, at random.
        """
        shuffled, curve = self.study.table("shuffled"), self.study.curve()
        rows = []
        for at, part in shuffled.groupby("relaxation", sort=True):
            margins = part.pivot(index="seed", columns="order", values="margin")
            gaps = curve[curve["relaxation"] == at].set_index("seed")["gap"]
            null = _null_means(margins.to_numpy())
            rows.append({"relaxation": at, "gap": gaps.mean(), **_against(gaps.mean(), null)})
        return pd.DataFrame(rows)

    def replicates(self) -> pd.DataFrame:
        """The gap of loops repeated from the same anchor on other batches, the first included.

        One row a relaxation: the mean over seeds of the mean over a seed's loops, with its t
        interval over seeds; `sd_between`, the spread of the seeds' means; `sd_within`, the spread
        of loops of one seed (root mean variance over seeds).
        """
        first = self.study.curve().assign(replicate=-1)
        others = gap_between(self.study.table("replicates"), ["seed", "replicate", "relaxation"])
        every = pd.concat([first, others], ignore_index=True)
        rows = []
        for at in sorted(others["relaxation"].unique()):
            wide = every[every["relaxation"] == at].pivot(
                index="seed", columns="replicate", values="gap"
            )
            means = wide.mean(axis=1)
            interval = mean_interval(means)
            rows.append(
                {
                    "relaxation": at,
                    "n_seeds": len(wide),
                    "loops_per_seed": wide.shape[1],
                    "gap": interval.estimate,
                    "low": interval.low,
                    "high": interval.high,
                    "sd_between": means.std(ddof=1),
                    "sd_within": float(np.sqrt(wide.var(axis=1, ddof=1).mean())),
                }
            )
        return pd.DataFrame(rows)

    def matched(self) -> pd.DataFrame:
        """Where the behaviour of the two branches first matches, and what happens next.

        For each seed: `relaxation`, the update at which the gap first changes sign (of the two
        beside the change, the one with the smaller gap), or where it is smallest if it never does;
        `gap` there; `after`, the mean gap over the next updates, times the sign that it had at
        first. Were the state of training fixed by behaviour, `after` would be zero on average;
        below zero, the gap goes on to the other side.
        """
        rows = []
        for seed, part in self.study.curve().groupby("seed", sort=False):
            gaps = part.sort_values("relaxation").set_index("relaxation")["gap"]
            sizes = gaps.abs()
            changes = np.flatnonzero(np.diff(np.sign(gaps.to_numpy())) != 0)
            beside = sizes.iloc[changes[0] : changes[0] + 2] if len(changes) else sizes
            at = int(beside.index[int(beside.to_numpy().argmin())])
            following = gaps[(gaps.index > at) & (gaps.index <= at + AFTER)]
            sign = float(np.sign(gaps.iloc[0]))
            rows.append((seed, at, gaps[at], sign * following.mean(), bool(len(changes))))
        columns = ["seed", "relaxation", "gap", "after", "changes_sign"]
        return pd.DataFrame(rows, columns=columns)

    def hidden(self) -> pd.DataFrame:
        """Whether the parts still differ where behaviour does not, against order noise.

        At `place` "relaxed", the last relaxation, and "matched", where behaviour first matches.
        One row a quantity: the mean over seeds of below minus above, its t interval, sign-flip p
        and, where the branches have relaxed, the null of shuffled loops as in `null`.
        """
        parts, rows = self.study.table("parts"), []
        for (place, quantity), part in parts.groupby(["place", "quantity"], sort=False):
            wide = part.pivot(index="seed", columns="model", values="value")
            differences = wide[BRANCHES[0]] - wide[BRANCHES[1]]
            shuffled = wide[[name for name in wide if str(name).startswith("shuffled")]]
            row = {"place": place, "quantity": quantity, **_over_seeds(differences)}
            if shuffled.shape[1]:
                row |= _against(differences.mean(), _null_means(shuffled.to_numpy()))
            rows.append(row)
        return pd.DataFrame(rows)

    def distances(self) -> pd.DataFrame:
        """How far the branches' weights have come apart, relative to pairs of shuffled loops.

        One row for the whole distance and its parts in and out of the span of the anchor's own
        drift: `distance`, the mean over seeds once the branches have relaxed; `ratio`, over seeds
        the geometric mean of it to the mean of that seed's shuffled pairs, with its t interval (on
        the log scale) and sign-flip p: 1 where opposite loops leave weights no further apart than
        any two orders do.
        """
        table = self.study.table("distances")
        table = table[table["place"] == "relaxed"].set_index("seed")
        branches = table["first"] == BRANCHES[0]
        rows = []
        for name in ("distance", "in_drift", "out_of_drift"):
            here = table.loc[branches, name]
            null = table.loc[~branches, name].groupby(level="seed", sort=False).mean()
            logs = np.log(here / null)
            interval = mean_interval(logs)
            low, ratio, high = np.exp([interval.low, interval.estimate, interval.high])
            rows.append(
                {
                    "quantity": name,
                    "distance": here.mean(),
                    "ratio": ratio,
                    "low": low,
                    "high": high,
                    "p": sign_flip_test(logs).p,
                }
            )
        return pd.DataFrame(rows)


def load_memory(path: Path | str) -> MemoryResult:
    """The memory experiments in a study's run folder, as far as they are done.

    Raises:
        HysteresisError: a folder that is not a run, or holds a damaged file.
    """
    return MemoryResult(load_study(path))


def crossing_effects(crossing: pd.DataFrame) -> pd.DataFrame:
    """What the weights carry and what the optimizer's state carries, at each relaxation.

    With m(w, s) the margin of weights w trained on with state s, b below and a above:

        weights      half of [m(b, b) - m(a, b)] + [m(b, a) - m(a, a)]
        state        half of [m(b, b) - m(b, a)] + [m(a, b) - m(a, a)]
        interaction  half of [m(b, b) - m(a, b)] - [m(b, a) - m(a, a)]
        gap          m(b, b) - m(a, a), which is weights + state
        weights, X   m(b, X) - m(a, X): both with the anchor's state, or one that was reset

    At relaxation 0 no update has used the state, so its effect and the interaction are zero there.

    Args:
        crossing: `seed`, `weights`, `state`, `relaxation`, `margin`; states below and above are
            needed, any others are taken as they come.

    Returns:
        One row a relaxation and effect: mean over seeds with t interval, the counts of signs, the
        exact sign-flip `p`, its `smallest_p`, and `p_holm`, adjusted over the relaxations of that
        effect. A seed of which a cell diverged is left out of that effect (`n`).

    Example:
        >>> cells = [(s, w, o, 9, (w == "below") * 0.2 + (o == "below") * (0.3 + s / 100))
        ...          for s in range(5) for w in ("below", "above") for o in ("below", "above")]
        >>> names = ["seed", "weights", "state", "relaxation", "margin"]
        >>> effects = crossing_effects(pd.DataFrame(cells, columns=names))
        >>> effects.set_index("effect")["estimate"].round(3).to_dict()
        {'gap': 0.52, 'weights': 0.2, 'state': 0.32, 'interaction': 0.0}
    """
    cells = crossing.pivot(
        index=["relaxation", "seed"], columns=["weights", "state"], values="margin"
    ).sort_index()
    below, above = (cells[branch] for branch in BRANCHES)
    bb, ba = below["below"], below["above"]
    ab, aa = above["below"], above["above"]
    effects = {
        "gap": bb - aa,
        "weights": ((bb - ab) + (ba - aa)) / 2,
        "state": ((bb - ba) + (ab - aa)) / 2,
        "interaction": ((bb - ab) - (ba - aa)) / 2,
    }
    effects |= {
        f"weights, {state.replace('_', ' ')}": below[state] - above[state]
        for state in crossing["state"].unique()
        if state not in BRANCHES
    }
    parts = []
    for effect, values in effects.items():
        rows = [
            {"relaxation": at, "effect": effect, **_over_seeds(part.dropna())}
            for at, part in values.groupby(level="relaxation")
            if part.notna().sum() > 1
        ]
        if rows:
            table = pd.DataFrame(rows)
            parts.append(table.assign(p_holm=holm(table["p"])))
    return pd.concat(parts, ignore_index=True)


def _over_seeds(values: pd.Series) -> dict[str, float | int]:
    interval, signs = mean_interval(values), sign_flip_test(values)
    return {
        "n": signs.n,
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "n_positive": signs.n_positive,
        "n_negative": signs.n_negative,
        "p": signs.p,
        "smallest_p": signs.smallest_p,
    }


def _null_means(values: Array) -> Array:
    """Means over seeds of the difference of two different columns, drawn for each seed alike."""
    rng = np.random.Generator(np.random.Philox(0))
    n_seeds, n_orders = values.shape
    first = rng.integers(n_orders, size=(DRAWS, n_seeds))
    second = (first + rng.integers(1, n_orders, size=(DRAWS, n_seeds))) % n_orders
    seed = np.arange(n_seeds)
    return np.asarray((values[seed, first] - values[seed, second]).mean(axis=1))


def _against(observed: float, null: Array) -> dict[str, float]:
    """Where a mean lies in its null distribution; the observed one counts as one of the draws."""
    low, high = np.quantile(null, [0.025, 0.975])
    reach = 1 + int((np.abs(null) >= abs(observed)).sum())
    return {"null_low": low, "null_high": high, "null_p": reach / (1 + len(null))}
