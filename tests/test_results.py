"""Answers from small invented tables, whose gaps, shares and routes can be worked out by hand.

No model is trained here: a run folder is written by hand, and read as any other.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import tiny_config
from scipy import stats

from tl_hysteresis.config import StudyConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.models import ParameterLayout, build_model, hooked_config
from tl_hysteresis.results import StudyResult, load_study
from tl_hysteresis.schedules import BRANCHES
from tl_hysteresis.store import RunFolder
from tl_hysteresis.summary import caveats, compare_with_paper
from tl_hysteresis.summary import summary as summary_of

PerSeed = Sequence[float]
GAPS: Mapping[int, PerSeed] = {
    0: [0.08, 0.10, 0.12],
    25: [-0.05, -0.04, -0.06],
    100: [-0.01, 0.004, 0.009],
}
# What is left of the gaps at 0 with all heads replaced: 10, 13 and 16 % of 0.1, 0.13 of it in all.
LEFT: PerSeed = [0.010, 0.013, 0.016]
ROUTES: Mapping[str, PerSeed] = {
    "value": [0.9995, 0.9996, 0.9997],
    "key": [0.9996, 0.9997, 0.9998],
}


def relaxation_table(gaps: Mapping[int, PerSeed]) -> pd.DataFrame:
    """Margins around 3 logits whose difference, below minus above, is the gap."""
    return pd.DataFrame(
        [
            {"seed": seed, "branch": branch, "relaxation": at, "margin": 3.0 + half}
            for at, per_seed in gaps.items()
            for seed, gap in enumerate(per_seed)
            for branch, half in (("below", gap / 2), ("above", -gap / 2))
        ]
    )


def replacement_table(
    gaps: Mapping[int, PerSeed],
    left: PerSeed,
    dominant: Sequence[tuple[str, str]] | None = None,
) -> pd.DataFrame:
    """Replacing all heads leaves `left` of the gap, a head alone 90 % of it.

    The dominant head of a branch, L1H0 unless named, moves the margin by 2 logits, another by 1.
    """
    rows = []
    for at, per_seed in gaps.items():
        for seed, gap in enumerate(per_seed):
            heads = dominant[seed] if dominant else ("L1H0", "L1H0")
            for branch, sign, strongest in zip(BRANCHES, (0.5, -0.5), heads, strict=True):
                margins = {"intact": 3.0 + sign * gap, "all heads": sign * left[seed]}
                for head in ("L0H0", "L0H1", "L1H0", "L1H1"):
                    moved = 2.0 if head == strongest else 1.0
                    margins[head] = 3.0 + sign * 0.9 * gap - moved
                rows += [
                    {
                        "seed": seed,
                        "branch": branch,
                        "relaxation": at,
                        "component": component,
                        "margin": margin,
                    }
                    for component, margin in margins.items()
                ]
    return pd.DataFrame(rows)


def routes_table(
    at: Sequence[int], topology: Mapping[str, PerSeed], *, scale: float = 1.0
) -> pd.DataFrame:
    """Routes of four sites with a given correlation; from below they are `scale` times as large."""
    above, across = np.array([1.0, 1.0, -1.0, -1.0]), np.array([1.0, -1.0, 1.0, -1.0])
    rows = []
    for relaxation in at:
        for corruption, per_seed in topology.items():
            for seed, r in enumerate(per_seed):
                below = scale * (r * above + math.sqrt(1.0 - r**2) * across)
                for branch, effects in (("below", below), ("above", above)):
                    rows += [
                        {
                            "seed": seed,
                            "branch": branch,
                            "relaxation": relaxation,
                            "layer": site // 2,
                            "point": "resid_pre",
                            "role": ("query", "matched_value")[site % 2],
                            "effect": effect,
                            "corruption": corruption,
                        }
                        for site, effect in enumerate(effects.tolist())
                    ]
    return pd.DataFrame(rows)


def anchors_table(converged: Sequence[bool]) -> pd.DataFrame:
    return pd.DataFrame({"seed": range(len(converged)), "converged": converged})


def a_study(
    path: Path,
    *,
    gaps: Mapping[int, PerSeed] = GAPS,
    left: PerSeed = LEFT,
    dominant: Sequence[tuple[str, str]] | None = None,
    topology: Mapping[str, PerSeed] = ROUTES,
    scale: float = 1.0,
    converged: Sequence[bool] | None = None,
    finished: bool = True,
    **changes: Any,
) -> StudyResult:
    """A run folder with invented tables, measured at the relaxations of `gaps`."""
    n_seeds = len(next(iter(gaps.values())))
    changes = {"seeds": list(range(n_seeds)), "relaxation": {"measure_at": list(gaps)}} | changes
    run = RunFolder.create(path / "run", StudyConfig.from_dict(changes), threads=1)
    run.write_table("anchors", anchors_table(converged or [True] * n_seeds))
    run.write_table("relaxation", relaxation_table(gaps))
    run.write_table("replacement", replacement_table(gaps, left, dominant))
    run.write_table("routes", routes_table(list(gaps), topology, scale=scale))
    if finished:
        run.finish()
    return load_study(run.path)


def one_seed(path: Path, **changes: Any) -> StudyResult:
    alone: dict[str, Any] = {
        "gaps": {at: per_seed[:1] for at, per_seed in GAPS.items()},
        "left": LEFT[:1],
        "topology": {name: per_seed[:1] for name, per_seed in ROUTES.items()},
    }
    return a_study(path, **alone | changes)


class TestGaps:
    def test_the_curve_is_below_minus_above(self, tmp_path: Path) -> None:
        curve = a_study(tmp_path).curve()
        assert list(curve.columns) == ["seed", "relaxation", "gap"]
        for at, per_seed in GAPS.items():
            found = curve[curve["relaxation"] == at]
            assert found["seed"].tolist() == [0, 1, 2]
            assert found["gap"].tolist() == pytest.approx(per_seed)

    def test_by_hand(self, tmp_path: Path) -> None:
        first = a_study(tmp_path).gaps().iloc[0]
        assert (first["relaxation"], first["n"]) == (0, 3)
        assert first["gap"] == pytest.approx(0.1)
        # Standard deviation 0.02; 4.3027 is Student's 97.5 % point at two degrees of freedom.
        half = 4.302653 * 0.02 / math.sqrt(3)
        assert first["t_low"] == pytest.approx(0.1 - half)
        assert first["t_high"] == pytest.approx(0.1 + half)
        assert (first["n_positive"], first["n_negative"], first["common_sign"]) == (3, 0, 1)
        assert (first["p"], first["smallest_p"]) == (0.25, 0.25)
        bootstrap = first["bootstrap_low"], first["bootstrap_high"]
        assert bootstrap == pytest.approx((0.08, 0.12))  # of three values, the outermost two

    def test_one_row_for_each_measured_relaxation(self, tmp_path: Path) -> None:
        gaps = a_study(tmp_path).gaps()
        assert gaps["relaxation"].tolist() == [0, 25, 100]
        assert gaps["common_sign"].tolist() == [1, -1, 0]
        for row, per_seed in zip(gaps.itertuples(), GAPS.values(), strict=True):
            reference = stats.ttest_1samp(per_seed, 0).confidence_interval(0.95)
            assert (row.t_low, row.t_high) == pytest.approx((reference.low, reference.high))

    def test_one_seed_has_a_gap_and_no_interval(self, tmp_path: Path) -> None:
        first = one_seed(tmp_path).gaps().iloc[0]
        assert first["gap"] == pytest.approx(0.08)
        for bound in ("t_low", "t_high", "bootstrap_low", "bootstrap_high"):
            assert math.isnan(first[bound])
        assert (first["n"], first["p"]) == (1, 1.0)

    @pytest.mark.parametrize("dropped", [0, 5, 17])
    def test_branches_measured_at_different_places_are_refused(
        self, tmp_path: Path, dropped: int
    ) -> None:
        result = a_study(tmp_path)
        result.folder.write_table("relaxation", relaxation_table(GAPS).drop(index=dropped))
        with pytest.raises(HysteresisError, match="not measured at the same places"):
            result.curve()


class TestReplacement:
    def test_by_hand(self, tmp_path: Path) -> None:
        table = a_study(tmp_path).replacement()
        first = table[table["relaxation"] == 0].set_index("component")
        assert first.index.tolist() == ["all heads", "L0H0", "L0H1", "L1H0", "L1H1"]
        # 0.013 of 0.1 is left in the mean; one head alone removes a tenth in every seed.
        assert first.loc["all heads", "gap"] == pytest.approx(0.013)
        assert first.loc["all heads", "share"] == pytest.approx(0.87)
        assert first.loc["L0H1", "gap"] == pytest.approx(0.09)
        for bound in ("share", "share_low", "share_high"):
            assert first.loc["L0H1", bound] == pytest.approx(0.1)

    def test_the_gap_left_has_a_t_interval(self, tmp_path: Path) -> None:
        row = a_study(tmp_path).replacement().iloc[0]
        reference = stats.ttest_1samp(LEFT, 0).confidence_interval(0.95)
        assert (row["gap_low"], row["gap_high"]) == pytest.approx((reference.low, reference.high))

    def test_the_share_is_unbounded_where_the_gap_may_be_zero(self, tmp_path: Path) -> None:
        table = a_study(tmp_path, gaps={**GAPS, 0: [-0.1, 0.02, 0.1]}).replacement()
        row = table[(table["relaxation"] == 0) & (table["component"] == "all heads")].iloc[0]
        assert (row["share_low"], row["share_high"]) == (-math.inf, math.inf)

    def test_one_seed_has_a_share_and_no_interval(self, tmp_path: Path) -> None:
        row = one_seed(tmp_path).replacement().iloc[0]
        assert (row["gap"], row["share"]) == pytest.approx((0.01, 1 - 0.01 / 0.08))
        for bound in ("gap_low", "gap_high", "share_low", "share_high"):
            assert math.isnan(row[bound])

    def test_a_run_cut_short_shows_the_relaxations_it_has(self, tmp_path: Path) -> None:
        result = a_study(tmp_path, finished=False)
        result.folder.write_table("replacement", replacement_table({0: GAPS[0]}, LEFT))
        assert set(result.replacement()["relaxation"]) == {0}


class TestDominantHeads:
    def test_by_hand(self, tmp_path: Path) -> None:
        heads = [("L1H0", "L1H0"), ("L0H1", "L1H1"), ("L0H0", "L0H0")]
        table = a_study(tmp_path, dominant=heads).dominant_heads()
        assert list(table.columns) == ["seed", "relaxation", "below", "above", "same"]
        first = table[table["relaxation"] == 0]
        assert list(zip(first["below"], first["above"], strict=True)) == heads
        assert first["same"].tolist() == [True, False, True]

    def test_it_may_raise_or_lower_the_margin(self, tmp_path: Path) -> None:
        result = a_study(tmp_path)
        table = replacement_table(GAPS, LEFT)
        table.loc[table["component"] == "L0H1", "margin"] += 10.0
        result.folder.write_table("replacement", table)
        assert set(result.dominant_heads()["below"]) == {"L0H1"}

    def test_sums_of_heads_do_not_compete(self, tmp_path: Path) -> None:
        # All heads together move the margin by 3 logits, more than any head.
        assert set(one_seed(tmp_path).dominant_heads()["above"]) == {"L1H0"}


class TestRoutes:
    def test_topology_and_gain_by_hand(self, tmp_path: Path) -> None:
        result = a_study(tmp_path, topology={"value": [1.0, 0.6, -0.8]}, scale=1.5)
        table = result.routes()
        assert len(table) == 3 * 3
        assert set(table["n_sites"]) == {4}
        assert set(table["corruption"]) == {"value"}
        for at in (0, 25, 100):
            part = table[table["relaxation"] == at].sort_values("seed")
            assert part["topology"].tolist() == pytest.approx([1.0, 0.6, -0.8])
            # The part that is across the map from above adds nothing to the slope.
            assert part["gain"].tolist() == pytest.approx([1.5, 0.9, -1.2])

    def test_branches_of_different_sites_are_refused(self, tmp_path: Path) -> None:
        result = a_study(tmp_path)
        result.folder.write_table("routes", routes_table([0], ROUTES).drop(index=0))
        with pytest.raises(HysteresisError, match="route maps of 3 and 4 sites have 3 in common"):
            result.routes()


def verdict(result: StudyResult, quantity: str) -> str:
    """What the comparison says of the one quantity that begins like this."""
    table = compare_with_paper(result)
    rows = table[table["quantity"].str.startswith(quantity)]
    assert len(rows) == 1
    return str(rows["agrees"].item())


class TestPaper:
    def test_its_columns_and_rows(self, tmp_path: Path) -> None:
        table = compare_with_paper(a_study(tmp_path))
        assert list(table.columns) == ["quantity", "paper", "here", "agrees", "rule"]
        assert len(table) == 6
        assert table["agrees"].tolist() == ["yes"] * 6

    def test_only_what_was_measured_is_compared(self, tmp_path: Path) -> None:
        table = compare_with_paper(a_study(tmp_path, gaps={0: GAPS[0], 10: GAPS[25]}))
        assert table["quantity"].str.startswith("gap in margin").sum() == 1

    @pytest.mark.parametrize(
        ("at_0", "agrees"),
        [
            ([0.08, 0.10, 0.12], "yes"),
            ([-0.08, -0.10, -0.12], "no"),
            ([-0.05, 0.10, 0.25], "undecided"),
        ],
    )
    def test_gap_at_0(self, tmp_path: Path, at_0: PerSeed, agrees: str) -> None:
        result = a_study(tmp_path, gaps={**GAPS, 0: at_0})
        assert verdict(result, "gap in margin at 0 updates") == agrees

    @pytest.mark.parametrize(
        ("at_25", "agrees"),
        [
            ([-0.05, -0.04, -0.06], "yes"),
            ([0.05, 0.04, 0.06], "no"),
            ([-0.10, 0.0, 0.05], "undecided"),
        ],
    )
    def test_gap_at_25(self, tmp_path: Path, at_25: PerSeed, agrees: str) -> None:
        result = a_study(tmp_path, gaps={**GAPS, 25: at_25})
        assert verdict(result, "gap in margin at 25 updates") == agrees

    @pytest.mark.parametrize(
        ("at_100", "agrees"),
        [
            ([-0.01, 0.004, 0.009], "yes"),
            ([0.04, 0.05, 0.06], "no"),
            ([-0.04, -0.05, -0.06], "no"),
            # Holds zero, but reaches as far from it as the gap at 0 is: 4.3 * 0.1 / 1.7 = 0.25.
            ([-0.1, 0.01, 0.1], "undecided"),
        ],
    )
    def test_gap_at_100(self, tmp_path: Path, at_100: PerSeed, agrees: str) -> None:
        result = a_study(tmp_path, gaps={**GAPS, 100: at_100})
        assert verdict(result, "gap in margin at 100 updates") == agrees

    @pytest.mark.parametrize(
        ("left", "agrees"),
        [
            ([0.010, 0.013, 0.016], "yes"),
            ([0.04, 0.05, 0.06], "no"),  # half of the gap is left in each seed
            ([-0.2, 0.0, 0.2], "undecided"),  # any share between none and twice the gap
        ],
    )
    def test_share(self, tmp_path: Path, left: PerSeed, agrees: str) -> None:
        assert verdict(a_study(tmp_path, left=left), "share of the gap") == agrees

    def test_share_of_a_gap_that_may_be_zero(self, tmp_path: Path) -> None:
        result = a_study(tmp_path, gaps={**GAPS, 0: [-0.1, 0.02, 0.1]})
        assert verdict(result, "share of the gap") == "undecided"

    @pytest.mark.parametrize(
        ("third_seed", "agrees"), [(("L0H1", "L0H1"), "yes"), (("L0H1", "L1H0"), "no")]
    )
    def test_dominant_head(self, tmp_path: Path, third_seed: tuple[str, str], agrees: str) -> None:
        dominant = [("L1H0", "L1H0"), ("L1H1", "L1H1"), third_seed]
        assert verdict(a_study(tmp_path, dominant=dominant), "dominant head") == agrees

    HIGH, LOW, WIDE = [0.9995, 0.9996, 0.9997], [0.90, 0.91, 0.92], [0.998, 0.999, 0.9998]

    @pytest.mark.parametrize(
        ("value", "key", "agrees"),
        [
            (HIGH, HIGH, "yes"),
            (LOW, LOW, "no"),
            (HIGH, LOW, "no"),
            (WIDE, WIDE, "undecided"),
            (HIGH, WIDE, "undecided"),
            (WIDE, LOW, "no"),
        ],
    )
    def test_routes(self, tmp_path: Path, value: PerSeed, key: PerSeed, agrees: str) -> None:
        result = a_study(tmp_path, topology={"value": value, "key": key})
        assert verdict(result, "correlation of the two branches' routes") == agrees

    def test_the_interval_of_the_routes_is_shown_whole(self, tmp_path: Path) -> None:
        table = compare_with_paper(a_study(tmp_path, topology={"value": self.LOW, "key": self.LOW}))
        interval = stats.ttest_1samp(np.arctanh(self.LOW), 0).confidence_interval(0.95)
        low, high = np.tanh(interval.low), np.tanh(interval.high)
        assert high < 0.999
        assert f"[{low:.5f}, {high:.5f}]" in table["here"].iloc[-1]

    def test_one_seed_decides_nothing_that_needs_an_interval(self, tmp_path: Path) -> None:
        result = one_seed(tmp_path)
        table = compare_with_paper(result).set_index("quantity")["agrees"]
        assert table.pop("dominant head, below and above") == "yes"
        assert table.tolist() == ["undecided"] * 5


class TestSummary:
    @pytest.mark.parametrize("make", [a_study, one_seed])
    def test_every_table_has_rows(self, tmp_path: Path, make: Any) -> None:
        summary = summary_of(make(tmp_path))
        assert list(summary)[0].startswith("Anchors, 2048 held-out conflict trials")
        for table in summary.values():
            assert len(table)
            assert all(isinstance(column, str) for column in table.columns)

    def test_routes_are_summed_up_over_seeds(self, tmp_path: Path) -> None:
        (title,) = [title for title in summary_of(a_study(tmp_path)) if title.startswith("Routes")]
        table = summary_of(a_study(tmp_path / "scaled", topology={"key": [0.5, 0.6, 1.0]}))[title]
        row = table[table["updates"] == 0].iloc[0]
        assert row["corruption"] == "key"
        assert row["topology (correlation)"] == "0.70000 (0.50000, 1.00000)"


SIX = {0: [0.1, 0.11, 0.12, 0.13, 0.14, 0.15], 25: [0.01] * 6}
SIX_LEFT = [0.01] * 6
SIX_ROUTES = {"value": [0.9995] * 6}


def six_seeds(path: Path, **changes: Any) -> StudyResult:
    """A study that nothing is wrong with: six seeds can reach p = 0.03125."""
    return a_study(path, gaps=SIX, left=SIX_LEFT, topology=SIX_ROUTES, **changes)


class TestWarnings:
    def test_none(self, tmp_path: Path) -> None:
        assert caveats(six_seeds(tmp_path)) == []

    def test_incomplete(self, tmp_path: Path) -> None:
        assert caveats(six_seeds(tmp_path, finished=False)) == [
            f"the run is not complete: tl-hysteresis resume {tmp_path / 'run'}"
        ]

    def test_quick(self, tmp_path: Path) -> None:
        (warning,) = caveats(six_seeds(tmp_path, quick=True))
        assert warning.startswith("a quick run")

    def test_unconverged(self, tmp_path: Path) -> None:
        converged = [True, False, True, True, False, True]
        (warning,) = caveats(six_seeds(tmp_path, converged=converged))
        assert warning == "the anchors of seeds [1, 4] have not converged"

    @pytest.mark.parametrize(
        ("make", "smallest"), [(a_study, "3 seeds .* 0.25"), (one_seed, "1 seeds .* below 1:")]
    )
    def test_too_few_seeds(self, tmp_path: Path, make: Any, smallest: str) -> None:
        (warning,) = caveats(make(tmp_path))
        assert re.search(smallest, warning)

    def test_all_at_once(self, tmp_path: Path) -> None:
        result = a_study(tmp_path, quick=True, converged=[False] * 3, finished=False)
        assert len(caveats(result)) == 4


class TestDamage:
    def test_a_table_that_the_run_does_not_have(self, tmp_path: Path) -> None:
        with pytest.raises(HysteresisError, match=r"no tables/loop.csv \(the run is complete\)"):
            a_study(tmp_path).table("loop")
        unfinished = a_study(tmp_path / "unfinished", finished=False)
        with pytest.raises(HysteresisError, match=r"\(the run is not complete\)"):
            unfinished.table("loop")

    def test_a_table_that_was_edited(self, tmp_path: Path) -> None:
        result = a_study(tmp_path)
        path = result.folder.path / "tables" / "relaxation.csv"
        path.write_text(path.read_text().replace("3.0", "4.0"))
        with pytest.raises(HysteresisError, match="relaxation.csv is damaged"):
            result.gaps()
        with pytest.raises(HysteresisError, match="relaxation.csv is damaged"):
            load_study(result.folder.path)

    def test_a_table_that_was_deleted(self, tmp_path: Path) -> None:
        result = a_study(tmp_path)
        (result.folder.path / "tables" / "routes.csv").unlink()
        with pytest.raises(HysteresisError, match="cannot read .*routes.csv"):
            result.routes()
        with pytest.raises(HysteresisError, match="cannot read .*routes.csv"):
            load_study(result.folder.path)

    def test_a_folder_that_is_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(HysteresisError, match="not a run folder"):
            load_study(tmp_path)


class TestModel:
    @staticmethod
    def numbered_study(path: Path) -> StudyResult:
        """Every parameter is 100 x relaxation + member; of an anchor, -1 - member."""
        config = tiny_config(seeds=[5, 3])
        run = RunFolder.create(path / "run", config, threads=1)
        hooked = hooked_config(config.model, d_vocab=14, n_ctx=7)
        size = ParameterLayout.of(build_model(hooked, seed=0)).size

        def numbered(numbers: Sequence[float]) -> dict[str, torch.Tensor]:
            return {"parameters": torch.tensor(numbers)[:, None].repeat(1, size)}

        run.write_checkpoint("anchor", numbered([-1.0, -2.0]))
        for at in config.relaxation.measure_at:
            members = [100.0 * at + member for member in range(4)]
            run.write_checkpoint(f"relaxation_{at}", numbered(members))
        return load_study(run.path)

    @pytest.mark.parametrize(
        ("seed", "branch", "relaxation", "number"),
        [
            (5, "anchor", 0, -1.0),
            (3, "anchor", 0, -2.0),
            (5, "below", 0, 0.0),
            (5, "above", 0, 1.0),
            (3, "below", 1, 102.0),
            (3, "above", 3, 303.0),
        ],
    )
    def test_each_model_has_its_own_parameters(
        self, tmp_path: Path, seed: int, branch: str, relaxation: int, number: float
    ) -> None:
        model = self.numbered_study(tmp_path).model(seed, branch, relaxation)
        assert {value for p in model.parameters() for value in p.unique().tolist()} == {number}

    @pytest.mark.parametrize(
        ("seed", "branch", "relaxation", "message"),
        [
            (7, "below", 0, r"no seed 7; there are \[5, 3\]"),
            (5, "middle", 0, "no branch 'middle'; there are below, above and anchor"),
            (5, "above", 2, r"no checkpoint of above at relaxation 2; there are \[0, 1, 3\]"),
            (5, "below", -1, "no checkpoint of below at relaxation -1"),
            (5, "anchor", 3, r"no checkpoint of anchor at relaxation 3; there are \[0\]"),
        ],
    )
    def test_a_model_that_there_is_not(
        self, tmp_path: Path, seed: int, branch: str, relaxation: int, message: str
    ) -> None:
        with pytest.raises(HysteresisError, match=message):
            self.numbered_study(tmp_path).model(seed, branch, relaxation)

    def test_a_checkpoint_that_was_not_reached(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path / "run", tiny_config(), threads=1)
        with pytest.raises(HysteresisError, match="no checkpoints/relaxation_1.safetensors"):
            load_study(run.path).model(0, "below", 1)
