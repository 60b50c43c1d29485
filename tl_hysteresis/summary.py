"""What a study says, in short: tables as text, caveats, and the comparison with the paper."""

from __future__ import annotations

import math

import pandas as pd

from tl_hysteresis.results import StudyResult, mean_or_value
from tl_hysteresis.statistics import correlation_interval, sign_flip_test
from tl_hysteresis.store import data_file
from tl_hysteresis.sweep import SweepResult


def summary(result: StudyResult) -> dict[str, pd.DataFrame]:
    """The answers as short tables of text, by title; of an unfinished run, those that there are."""
    measurement, first = result.config.measurement, result.config.relaxation.measure_at[0]
    mark = f", {measurement.conflict_trials} held-out conflict trials a seed{quick_mark(result)}"
    patched = f", {measurement.patching_trials} of these trials{quick_mark(result)}"
    tables = {f"Anchors{mark}": result.table("anchors").round(3)}
    if result.folder.has("tables/relaxation.csv"):
        gaps = result.gaps()
        tables[f"Gap in margin, below minus above, in logits{mark}"] = pd.DataFrame(
            {
                "updates": gaps["relaxation"],
                "mean over seeds [95 % t]": _intervals(gaps, "gap", "t_low", "t_high"),
                "95 % bootstrap": _bounds(gaps, "bootstrap_low", "bootstrap_high"),
                "positive": [f"{row.n_positive} of {row.n}" for row in gaps.itertuples()],
                "p (smallest)": [
                    f"{row.p:.4g} ({row.smallest_p:.4g})" for row in gaps.itertuples()
                ],
            }
        )
    if result.folder.has("tables/replacement.csv"):
        replaced = result.replacement()
        replaced = replaced[replaced["relaxation"] == first]
        tables[f"Mean replacement at the query, {first} updates after the loop{mark}"] = (
            pd.DataFrame(
                {
                    "component": replaced["component"],
                    "gap left [95 % t]": _intervals(replaced, "gap", "gap_low", "gap_high"),
                    "share of the gap removed [95 %]": [
                        _share(*bounds)
                        for bounds in replaced[["share", "share_low", "share_high"]].to_numpy()
                    ],
                }
            )
        )
    if result.folder.has("tables/routes.csv"):
        routes = result.routes().groupby(["relaxation", "corruption"], sort=False)
        tables[f"Routes, below against above, mean (least, most) over seeds{patched}"] = (
            pd.DataFrame(
                [
                    {
                        "updates": relaxation,
                        "corruption": corruption,
                        "topology (correlation)": _spread(part["topology"], 5),
                        "gain (slope)": _spread(part["gain"], 3),
                    }
                    for (relaxation, corruption), part in routes
                ]
            )
        )
    return tables


def sweep_summary(sweep: SweepResult) -> dict[str, pd.DataFrame]:
    """The cells of a sweep and the gaps of those that are complete, as short tables, by title."""
    cells = sweep.cells()
    counts = cells["status"].value_counts()
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    tables = {f"Cells of {sweep.path}: {told}": cells}
    if counts.get("complete", 0):
        gaps = sweep.gaps()
        gaps["mean over seeds [95 % t]"] = _intervals(gaps, "gap", "t_low", "t_high")
        gaps["positive"] = [f"{row.n_positive} of {row.n}" for row in gaps.itertuples()]
        shown = ["relaxation", "mean over seeds [95 % t]", "positive", "p"]
        title = "Gap in margin, below minus above, in logits"
        tables[title] = gaps[["cell", *sweep.grid.axes, *shown]]
    return tables


def _intervals(table: pd.DataFrame, estimate: str, low: str, high: str) -> list[str]:
    """Estimates with their intervals; a single seed has none."""
    bounds = _bounds(table, low, high)
    return [f"{value:+.4f} {bound}" for value, bound in zip(table[estimate], bounds, strict=True)]


def _bounds(table: pd.DataFrame, low: str, high: str) -> list[str]:
    return [
        "(one seed)" if math.isnan(a) else f"[{a:+.4f}, {b:+.4f}]"
        for a, b in table[[low, high]].to_numpy()
    ]


QUICK_MARK = " (quick run, not a result)"


def quick_mark(result: StudyResult) -> str:
    """What is added to every title of a quick run."""
    return QUICK_MARK if result.config.quick else ""


def caveats(result: StudyResult) -> list[str]:
    """What a reader must know before trusting these numbers."""
    found = []
    if not result.folder.complete:
        found.append(f"the run is not complete: tl-hysteresis resume {result.folder.path}")
    if result.config.quick:
        found.append("a quick run: fewer updates, seeds and trials than the study; not a result")
    if not result.folder.is_of_this_source:
        found.append("the run was made by another version of this program's source")
    if result.config.schedule.same_order:
        found.append("a same-order control: its gap is zero by construction")
    anchors = result.table("anchors")
    unconverged = anchors.loc[~anchors["converged"], "seed"].tolist()
    if unconverged:
        found.append(f"the anchors of seeds {unconverged} have not converged")
    smallest_p = 2.0 / 2**result.n_seeds
    if smallest_p > 0.05:
        found.append(
            f"with {result.n_seeds} seeds no sign-flip p can be below "
            f"{min(smallest_p, 1.0):.4g}: read signs and intervals, not p"
        )
    return found


def compare_with_paper(result: StudyResult) -> pd.DataFrame:
    """This study's numbers beside the paper's, each with the rule that decides whether they agree.

    The paper gives no intervals, so the rules ask on which side of zero this study's interval over
    seeds lies, or whether it holds the paper's number. `agrees` is "yes", "no", or "undecided"
    where the interval is too wide to tell, or where there is none.

    Returns:
        One row for each quantity: `quantity`, `paper`, `here`, `agrees`, `rule`.
    """
    paper = pd.read_csv(data_file("paper.csv"))
    statements = {
        int(row["relaxation"]): str(row["statement"])
        for row in paper[paper["quantity"] == "gap"].to_dict("records")
    }
    values = paper.drop_duplicates("quantity").set_index("quantity")["value"].astype(float)
    measured_at = result.config.relaxation.measure_at
    rows = [
        _gap_row(result, at, claim, statements[at])
        for at, claim in ((0, 1), (25, -1), (100, 0))
        if at in measured_at
    ]
    if result.config.measurement.circuits:
        if 0 in measured_at:
            rows.append(_share_row(result, values["share_removed"]))
        rows.append(_dominant_head_row(result, measured_at[0]))
        rows.append(_routes_row(result, measured_at[0], values["route_correlation"]))
    return pd.DataFrame(rows, columns=["quantity", "paper", "here", "agrees", "rule"])


Row = tuple[str, str, str, str, str]


def _gap_row(result: StudyResult, at: int, claim: int, statement: str) -> Row:
    curve = result.curve()
    gaps = curve.loc[curve["relaxation"] == at, "gap"]
    interval, signs = mean_or_value(gaps), sign_flip_test(gaps)
    here = (
        f"{interval}, positive in {signs.n_positive} of {signs.n}, "
        f"p = {signs.p:.4g} (smallest possible {signs.smallest_p:.4g})"
    )
    rule = {
        1: "95 % interval above zero",
        -1: "95 % interval below zero",
        0: "95 % interval holds zero, and all of it lies nearer to zero than the gap's at 0",
    }[claim]
    if math.isnan(interval.low):
        agrees = "undecided"
    elif claim:
        agrees = {claim: "yes", 0: "undecided", -claim: "no"}[interval.side]
    elif interval.side:
        agrees = "no"
    else:
        first = mean_or_value(curve.loc[curve["relaxation"] == 0, "gap"])
        nearest = min(abs(first.low), abs(first.high)) if first.side else 0.0
        agrees = "yes" if max(-interval.low, interval.high) < nearest else "undecided"
    return f"gap in margin at {at} updates (logits)", statement, here, agrees, rule


def _share_row(result: StudyResult, stated: float) -> Row:
    table = result.replacement()
    row = table[(table["relaxation"] == 0) & (table["component"] == "all heads")].iloc[0]
    low, high = float(row["share_low"]), float(row["share_high"])
    if math.isnan(low):
        agrees = "undecided"
    elif not low <= stated <= high:
        agrees = "no"
    else:
        agrees = "undecided" if low <= 0.0 <= high else "yes"
    return (
        "share of the gap at 0 removed by mean replacement of all heads at the query",
        f"{stated:.1%}",
        f"{_share(float(row['share']), low, high)}; "
        f"gap left {row['gap']:+.4f} [{row['gap_low']:+.4f}, {row['gap_high']:+.4f}]",
        agrees,
        "95 % interval (Fieller, over seeds) holds the paper's share, and not zero",
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
    within, between = (
        table[table["relaxation"] == at].groupby("corruption", sort=False)["topology"]
        for table in (result.routes(), result.routes_between_seeds())
    )
    parts, sides = [], []
    for corruption, values in within:
        if len(values) > 1:
            interval, null = correlation_interval(values), between.get_group(corruption).mean()
            sides.append(int(interval.low > stated) - int(interval.high < stated))
            parts.append(
                f"{corruption}: {interval.estimate:.5f} [{interval.low:.5f}, {interval.high:.5f}]"
                f" (between different seeds {null:.5f})"
            )
        else:
            sides.append(0)
            parts.append(f"{corruption}: {values.item():.5f}")
    agrees = "yes" if min(sides) == 1 else "no" if min(sides) == -1 else "undecided"
    return (
        f"correlation of the two branches' routes at {at} updates",
        f"> {stated}",
        "; ".join(parts),
        agrees,
        f"95 % interval (Fisher z, over seeds) above {stated}, for every corruption",
    )


def _share(share: float, low: float, high: float) -> str:
    """A share with its interval, in words where the interval has no bounds."""
    if math.isnan(low):
        return "-" if math.isnan(share) else f"{share:.1%}"
    if math.isinf(low):
        return f"{share:.1%} (any: the gap may be zero)"
    return f"{share:.1%} [{low:.1%}, {high:.1%}]"


def _spread(values: pd.Series, digits: int) -> str:
    return f"{values.mean():.{digits}f} ({values.min():.{digits}f}, {values.max():.{digits}f})"
