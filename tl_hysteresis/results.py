"""From a study's tables to its answers: gaps, shares, routes, and the comparison with the paper.

Everything here is computed from the tables of a run folder, so that it can be computed again at any
time. The unit of every interval and test is the seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
from transformer_lens import HookedTransformer, HookedTransformerConfig

from tl_hysteresis.config import StudyConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.models import ParameterLayout, build_model, hooked_config
from tl_hysteresis.routes import INTACT, compare_routes
from tl_hysteresis.statistics import (
    Interval,
    correlation_interval,
    mean_interval,
    ratio_interval,
    sign_flip_test,
)
from tl_hysteresis.store import RunFolder, data_file
from tl_hysteresis.tasks import Task, Trials, draw_conflict, make_task

BRANCHES = ("below", "above")


@dataclass(frozen=True)
class StudyResult:
    """The results of a study, read from its run folder.

    Attributes:
        folder: the run folder.

    Example:
        >>> result = load_study("runs/default")  # doctest: +SKIP
        >>> result.gaps()  # doctest: +SKIP
        >>> model = result.model(seed=0, branch="below", relaxation=0)  # doctest: +SKIP
    """

    folder: RunFolder

    @property
    def config(self) -> StudyConfig:
        """The study's settings."""
        return self.folder.config

    @property
    def n_seeds(self) -> int:
        """Number of independent anchors, the n of every test."""
        return len(self.config.seeds)

    def table(self, name: str) -> pd.DataFrame:
        """One of the study's tables as it was written.

        `anchors`, `course`, `matching`, `loop`, `relaxation`, `replacement`, `routes`.

        Raises:
            HysteresisError: a table that the run does not have, or a damaged one.
        """
        return self.folder.read_table(name)

    def curve(self) -> pd.DataFrame:
        """The gap at every relaxation update: `seed`, `relaxation`, `gap` (logits).

        The gap is the margin of the branch from below minus that of the branch from above.
        """
        return _gap(self.table("relaxation"), ["seed", "relaxation"])

    def gaps(self) -> pd.DataFrame:
        """The gap at each measured relaxation, over seeds; one row for each."""
        curve = self.curve()
        return pd.DataFrame(
            [
                {"relaxation": at, **_summary(curve.loc[curve["relaxation"] == at, "gap"])}
                for at in self.config.relaxation.measure_at
            ]
        )

    def replacement(self) -> pd.DataFrame:
        """What mean replacement of each component leaves of the gap, and the share it removes.

        `gap` is what is left, over seeds, with its t interval; `share` is 1 - left / intact, the
        ratio of means over seeds, with Fieller's interval (infinite where the intact gap cannot be
        told from zero, so that the share means nothing). Without an interval at one seed.
        """
        gaps = _gap(self.table("replacement"), ["seed", "relaxation", "component"])
        rows = []
        for at, part in gaps.groupby("relaxation", sort=False):
            wide = part.pivot(index="seed", columns="component", values="gap")
            intact = wide[INTACT]
            for component in [name for name in gaps["component"].unique() if name != INTACT]:
                left = mean_or_value(wide[component])
                share = _ratio(intact - wide[component], intact)
                rows.append(
                    {
                        "relaxation": at,
                        "component": component,
                        "gap": left.estimate,
                        "gap_low": left.low,
                        "gap_high": left.high,
                        "share": share.estimate,
                        "share_low": share.low,
                        "share_high": share.high,
                    }
                )
        return pd.DataFrame(rows)

    def dominant_heads(self) -> pd.DataFrame:
        """In each branch, the head whose mean replacement moves the margin most.

        Columns `seed`, `relaxation`, `below`, `above`, `same`.
        """
        table = self.table("replacement")
        keys = ["seed", "branch", "relaxation"]
        intact = table[table["component"] == INTACT].set_index(keys)["margin"]
        heads = table[table["component"].str.fullmatch(r"L\d+H\d+")].set_index(keys)
        heads = heads.assign(moved=(heads["margin"] - intact.reindex(heads.index)).abs())
        strongest = heads.sort_values("moved").groupby(level=keys)["component"].last()
        wide = strongest.unstack("branch")[list(BRANCHES)].reset_index()
        wide.columns.name = None
        return wide.assign(same=wide["below"] == wide["above"])

    def routes(self) -> pd.DataFrame:
        """Topology and gain of the route from below against that from above, for each seed.

        Columns `seed`, `relaxation`, `corruption`, `topology` (Pearson correlation of the patching
        effects over sites), `gain` (slope through the origin, below on above), `n_sites`.
        """
        table = self.table("routes")
        rows = []
        for keys, part in table.groupby(["seed", "relaxation", "corruption"], sort=False):
            below, above = (part[part["branch"] == branch] for branch in BRANCHES)
            compared = compare_routes(below, above)
            rows.append((*keys, compared.topology, compared.gain, compared.n_sites))
        columns = ["seed", "relaxation", "corruption", "topology", "gain", "n_sites"]
        return pd.DataFrame(rows, columns=columns)

    def paper(self) -> pd.DataFrame:
        """The paper's numbers beside this study's, as `compare_with_paper` gives them."""
        return compare_with_paper(self)

    def summary(self) -> dict[str, pd.DataFrame]:
        """The tables that answer the question, by title, rows of the first relaxation first."""
        return {
            "Anchors": self.table("anchors"),
            "Gap in margin, below minus above (logits)": self.gaps(),
            "Mean replacement at the query: gap left (logits), share of the gap removed": (
                self.replacement()
            ),
            "Routes: correlation (topology) and slope (gain), below against above": (
                self.routes()
                .groupby(["relaxation", "corruption"], sort=False)[["topology", "gain"]]
                .agg(["mean", "min", "max"])
                .pipe(_flat)
            ),
            "Beside the paper": self.paper(),
        }

    def warnings(self) -> list[str]:
        """What a reader must know before trusting these numbers."""
        found = []
        if not self.folder.complete:
            found.append("the run is not complete")
        if self.config.quick:
            found.append(
                "a quick run: fewer updates, seeds and trials than the study; not a result"
            )
        anchors = self.table("anchors")
        unconverged = anchors.loc[~anchors["converged"], "seed"].tolist()
        if unconverged:
            found.append(f"the anchors of seeds {unconverged} have not converged")
        smallest_p = 2.0 / 2**self.n_seeds
        if smallest_p > 0.05:
            found.append(
                f"with {self.n_seeds} seeds no sign-flip p can be below "
                f"{min(smallest_p, 1.0):.4g}: read signs and intervals, not p"
            )
        return found

    def trials(self, seed: int) -> Trials:
        """The held-out conflict trials on which a seed's branches were measured.

        Raises:
            HysteresisError: a seed that is not the study's.
        """
        self._check_seed(seed)
        n_trials = self.config.measurement.conflict_trials
        return draw_conflict(self.task, n_trials, seed=seed, stream="evaluation")

    def model(self, seed: int, branch: str = "below", relaxation: int = 0) -> HookedTransformer:
        """A branch as a `HookedTransformer`, at one of the measured relaxations.

        Args:
            seed: one of the study's seeds.
            branch: "below", "above", or "anchor" for the anchor, at relaxation 0.
            relaxation: updates since the end of the loop.

        Raises:
            HysteresisError: a seed, branch or relaxation of which there is no checkpoint.
        """
        self._check_seed(seed)
        if branch not in ("anchor", *BRANCHES):
            raise HysteresisError(f"no branch {branch!r}; there are below, above and anchor")
        kept = {0} if branch == "anchor" else {0, *self.config.relaxation.measure_at}
        if relaxation not in kept:
            raise HysteresisError(
                f"no checkpoint of {branch} at relaxation {relaxation}; there are {sorted(kept)}"
            )
        member = self.config.seeds.index(seed)
        if branch != "anchor":
            member = 2 * member + BRANCHES.index(branch)
        name = "anchor" if branch == "anchor" else f"relaxation_{relaxation}"
        parameters = self.folder.read_checkpoint(name)["parameters"][member]
        model = build_model(self._hooked_config, seed=0)
        ParameterLayout.of(model).write(parameters, model)
        return model

    def _check_seed(self, seed: int) -> None:
        if seed not in self.config.seeds:
            raise HysteresisError(f"no seed {seed}; there are {list(self.config.seeds)}")

    @cached_property
    def task(self) -> Task:
        """The study's task."""
        return make_task(self.config.task)

    @cached_property
    def _hooked_config(self) -> HookedTransformerConfig:
        return hooked_config(self.config.model, d_vocab=self.task.d_vocab, n_ctx=self.task.n_ctx)


def load_study(path: Path | str) -> StudyResult:
    """Open a run folder, complete or not, and verify its files.

    Raises:
        HysteresisError: a folder that is not a run, or holds a damaged file.
    """
    folder = RunFolder.open(path)
    folder.verify()
    return StudyResult(folder)


def compare_with_paper(result: StudyResult) -> pd.DataFrame:
    """This study's numbers beside the paper's, each with the rule that decides whether they agree.

    The paper gives no intervals, so the rules ask on which side of zero this study's interval over
    seeds lies, or whether it holds the paper's number. `agrees` is "yes", "no", or "undecided"
    where the interval is too wide to tell, or where there is none.

    Returns:
        One row for each quantity: `quantity`, `paper`, `here`, `agrees`, `rule`.
    """
    paper = pd.read_csv(data_file("paper.csv"))
    first = paper.drop_duplicates("quantity").set_index("quantity")["value"]
    stated = {str(quantity): float(value) for quantity, value in first.items()}
    measured_at = result.config.relaxation.measure_at
    rows = [
        _gap_row(result, at, claim, stated["gap"])
        for at, claim in ((0, 1), (25, -1), (100, 0))
        if at in measured_at
    ]
    if 0 in measured_at:
        rows.append(_share_row(result, stated["share_removed"]))
    rows.append(_dominant_head_row(result, measured_at[0]))
    rows.append(_routes_row(result, measured_at[0], stated["route_correlation"]))
    return pd.DataFrame(rows, columns=["quantity", "paper", "here", "agrees", "rule"])


Row = tuple[str, str, str, str, str]


def _gap_row(result: StudyResult, at: int, claim: int, stated: float) -> Row:
    curve = result.curve()
    gaps = curve.loc[curve["relaxation"] == at, "gap"]
    interval, signs = mean_or_value(gaps), sign_flip_test(gaps)
    here = (
        f"{interval}, positive in {signs.n_positive} of {signs.n}, "
        f"p = {signs.p:.4g} (smallest possible {signs.smallest_p:.4g})"
    )
    paper, rule = {
        1: (f"{stated:+.4f}, positive in 5 of 5, p = 0.0625", "95 % interval above zero"),
        -1: ("slightly reversed", "95 % interval below zero"),
        0: ("near zero", "95 % interval holds zero and stays nearer to it than the gap at 0"),
    }[claim]
    if math.isnan(interval.low):
        agrees = "undecided"
    elif claim:
        agrees = {claim: "yes", 0: "undecided", -claim: "no"}[interval.side]
    elif interval.side:
        agrees = "no"
    else:
        first = mean_or_value(curve.loc[curve["relaxation"] == 0, "gap"])
        agrees = "yes" if max(-interval.low, interval.high) < abs(first.estimate) else "undecided"
    return f"gap in margin at {at} updates (logits)", paper, here, agrees, rule


def _share_row(result: StudyResult, stated: float) -> Row:
    table = result.replacement()
    row = table[(table["relaxation"] == 0) & (table["component"] == "all heads")].iloc[0]
    share, low, high = row[["share", "share_low", "share_high"]].astype(float).tolist()
    interval = Interval(share, low, high, 0.95, "Fieller", result.n_seeds)
    if 0.0 in interval or math.isnan(interval.low):
        agrees = "undecided"
    else:
        agrees = "yes" if stated in interval else "no"
    return (
        "share of the gap at 0 removed by mean replacement of all heads at the query",
        f"{stated:.1%}",
        f"{share:.1%} [{low:.1%}, {high:.1%}]; "
        f"gap left {row.gap:+.4f} [{row.gap_low:+.4f}, {row.gap_high:+.4f}]",
        agrees,
        "95 % interval holds the paper's share, and not zero",
    )


def _dominant_head_row(result: StudyResult, at: int) -> Row:
    heads = result.dominant_heads()
    heads = heads[heads["relaxation"] == at]
    same = int(heads["same"].sum())
    return (
        "dominant head, below and above",
        "the same",
        f"the same in {same} of {len(heads)} seeds ("
        + ", ".join(f"{row.below}/{row.above}" for row in heads.itertuples())
        + ")",
        "yes" if same == len(heads) else "no",
        "the same in every seed",
    )


def _routes_row(result: StudyResult, at: int, stated: float) -> Row:
    routes = result.routes()
    routes = routes[routes["relaxation"] == at]
    parts, sides = [], []
    for corruption, rows in routes.groupby("corruption", sort=False):
        if len(rows) > 1:
            interval = correlation_interval(rows["topology"])
            sides.append((interval.low > stated) - (interval.high < stated))
            parts.append(
                f"{corruption}: {interval.estimate:.5f} [{interval.low:.5f}, {interval.high:.5f}]"
            )
        else:
            sides.append(0)
            parts.append(f"{corruption}: {rows['topology'].item():.5f}")
    agrees = "yes" if min(sides) == 1 else "no" if min(sides) == -1 else "undecided"
    return (
        f"correlation of the two branches' routes at {at} updates",
        f"> {stated}",
        "; ".join(parts),
        agrees,
        f"95 % interval (Fisher z, over seeds) above {stated}, for every corruption",
    )


def mean_or_value(values: pd.Series) -> Interval:
    """The t interval over seeds; for a single seed its value, with bounds that are NaN."""
    if len(values) == 1:
        return Interval(float(values.iloc[0]), float("nan"), float("nan"), 0.95, "t", 1)
    return mean_interval(values)


def _ratio(numerator: pd.Series, denominator: pd.Series) -> Interval:
    if denominator.mean() == 0.0:
        return Interval(math.nan, math.nan, math.nan, 0.95, "Fieller", len(numerator))
    if len(numerator) == 1:
        ratio = float(numerator.iloc[0] / denominator.iloc[0])
        return Interval(ratio, float("nan"), float("nan"), 0.95, "Fieller", 1)
    return ratio_interval(numerator, denominator)


def _summary(gaps: pd.Series) -> dict[str, float | int]:
    """Mean, intervals and the exact test of a gap over seeds."""
    t, signs = mean_or_value(gaps), sign_flip_test(gaps)
    bootstrap = mean_interval(gaps, method="bootstrap") if len(gaps) > 1 else t
    return {
        "n": signs.n,
        "gap": t.estimate,
        "t_low": t.low,
        "t_high": t.high,
        "bootstrap_low": bootstrap.low,
        "bootstrap_high": bootstrap.high,
        "n_positive": signs.n_positive,
        "n_negative": signs.n_negative,
        "common_sign": signs.common_sign,
        "p": signs.p,
        "smallest_p": signs.smallest_p,
    }


def _gap(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Margin of the branch from below minus that from above."""
    below, above = (
        table[table["branch"] == branch].set_index(keys)["margin"] for branch in BRANCHES
    )
    if not below.index.equals(above.index):
        raise HysteresisError("the two branches were not measured at the same places")
    return (below - above).rename("gap").reset_index()


def _flat(table: pd.DataFrame) -> pd.DataFrame:
    """A table with plain column names and its groups as columns."""
    table.columns = [" ".join(names) for names in table.columns]
    return table.reset_index()
