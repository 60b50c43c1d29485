"""From a study's tables to its answers: gaps, shares, dominant heads, routes.

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

from tl_hysteresis.comparison import compare_routes
from tl_hysteresis.config import StudyConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.factory import make_task
from tl_hysteresis.models import ParameterLayout, build_model, hooked_config
from tl_hysteresis.routes import INTACT
from tl_hysteresis.schedules import BRANCHES
from tl_hysteresis.statistics import (
    Interval,
    mean_interval,
    ratio_interval,
    sign_flip_test,
)
from tl_hysteresis.store import RunFolder
from tl_hysteresis.tasks import Task, Trials, draw_conflict


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
        return gap_between(self.table("relaxation"), ["seed", "relaxation"])

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
        gaps = gap_between(self.table("replacement"), ["seed", "relaxation", "component"])
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
            rows.append((*keys, *_alike(below, above)))
        columns = ["seed", "relaxation", "corruption", "topology", "gain", "n_sites"]
        return pd.DataFrame(rows, columns=columns)

    def routes_between_seeds(self) -> pd.DataFrame:
        """The null for `routes`: the same comparison between *different* seeds, below to above.

        Different seeds are circuits that have nothing in common but the task. A topology within
        seeds that is no higher than between them says nothing about a shared history.

        Columns `seed`, `other`, `relaxation`, `corruption`, `topology`, `gain`, `n_sites`.
        """
        table, rows = self.table("routes"), []
        for keys, part in table.groupby(["relaxation", "corruption"], sort=False):
            below, above = (part[part["branch"] == branch] for branch in BRANCHES)
            for seed in self.config.seeds:
                for other in self.config.seeds:
                    if seed != other:
                        compared = _alike(
                            below[below["seed"] == seed], above[above["seed"] == other]
                        )
                        rows.append((seed, other, *keys, *compared))
        columns = ["seed", "other", "relaxation", "corruption", "topology", "gain", "n_sites"]
        return pd.DataFrame(rows, columns=columns)

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
    try:
        folder = RunFolder.open(path)
        folder.verify()
    except HysteresisError:
        # A run at work may have replaced a table between the two; what is damaged stays so.
        folder = RunFolder.open(path)
        folder.verify()
    return StudyResult(folder)


def _alike(below: pd.DataFrame, above: pd.DataFrame) -> tuple[float, float, int]:
    compared = compare_routes(below, above)
    return compared.topology, compared.gain, compared.n_sites


def mean_or_value(values: pd.Series) -> Interval:
    """The t interval over seeds; for a single seed its value, with bounds that are NaN."""
    if len(values) == 1:
        return _without_bounds(float(values.iloc[0]), "t", 1)
    return mean_interval(values)


def _without_bounds(estimate: float, method: str, n: int) -> Interval:
    return Interval(estimate, math.nan, math.nan, 0.95, method, n)


def _ratio(numerator: pd.Series, denominator: pd.Series) -> Interval:
    if denominator.mean() == 0.0:
        return _without_bounds(math.nan, "Fieller", len(numerator))
    if len(numerator) == 1:
        return _without_bounds(float(numerator.iloc[0] / denominator.iloc[0]), "Fieller", 1)
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


def gap_between(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Margin of the branch from below minus that from above."""
    below, above = (
        table[table["branch"] == branch].set_index(keys)["margin"] for branch in BRANCHES
    )
    if not below.index.equals(above.index):
        raise HysteresisError("the two branches were not measured at the same places")
    return (below - above).rename("gap").reset_index()
