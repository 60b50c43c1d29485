"""What a study says, in short: tables as text, caveats, and the comparison with the paper."""

from __future__ import annotations

import math

import pandas as pd

from tl_hysteresis.results import StudyResult, mean_or_value
from tl_hysteresis.statistics import Interval, correlation_interval, sign_flip_test
from tl_hysteresis.store import data_file


def summary(result: StudyResult) -> dict[str, pd.DataFrame]:
    """The answers as short tables of text, by title; the numbers stand in the other methods."""
    anchors, first = result.table("anchors").round(3), result.config.relaxation.measure_at[0]
    mark = " (quick run, not a result)" if result.config.quick else ""
    gaps, replaced = result.gaps(), result.replacement()
    replaced = replaced[replaced["relaxation"] == first]
    routes = result.routes().groupby(["relaxation", "corruption"], sort=False)
    return {
        f"Anchors{mark}": anchors,
        f"Gap in margin, below minus above, in logits{mark}": pd.DataFrame(
            {
                "updates": gaps["relaxation"],
                "mean over seeds [95 % t]": [
                    f"{row.gap:+.4f} [{row.t_low:+.4f}, {row.t_high:+.4f}]"
                    for row in gaps.itertuples()
                ],
                "95 % bootstrap": [
                    f"[{row.bootstrap_low:+.4f}, {row.bootstrap_high:+.4f}]"
                    for row in gaps.itertuples()
                ],
                "positive": [f"{row.n_positive} of {row.n}" for row in gaps.itertuples()],
                "p (smallest)": [
                    f"{row.p:.4g} ({row.smallest_p:.4g})" for row in gaps.itertuples()
                ],
            }
        ),
        f"Mean replacement at the query, {first} updates after the loop{mark}": pd.DataFrame(
            {
                "component": replaced["component"],
                "gap left [95 % t], logits": [
                    f"{row.gap:+.4f} [{row.gap_low:+.4f}, {row.gap_high:+.4f}]"
                    for row in replaced.itertuples()
                ],
                "share of the gap removed [95 %]": [
                    _share(*bounds)
                    for bounds in replaced[["share", "share_low", "share_high"]].to_numpy()
                ],
            }
        ),
        f"Routes, below against above, mean (least, most) over seeds{mark}": pd.DataFrame(
            [
                {
                    "updates": relaxation,
                    "corruption": corruption,
                    "topology (correlation)": _spread(part["topology"], 5),
                    "gain (slope)": _spread(part["gain"], 3),
                }
                for (relaxation, corruption), part in routes
            ]
        ),
        f"Beside the paper{mark}": compare_with_paper(result),
    }


def caveats(result: StudyResult) -> list[str]:
    """What a reader must know before trusting these numbers."""
    found = []
    if not result.folder.complete:
        found.append("the run is not complete")
    if result.config.quick:
        found.append("a quick run: fewer updates, seeds and trials than the study; not a result")
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


def _share(share: float, low: float, high: float) -> str:
    """A share with its interval, in words where the interval has no bounds."""
    if math.isinf(low):
        return f"{share:.1%} (any: the gap may be zero)"
    return f"{share:.1%} [{low:.1%}, {high:.1%}]"


def _spread(values: pd.Series, digits: int) -> str:
    return f"{values.mean():.{digits}f} ({values.min():.{digits}f}, {values.max():.{digits}f})"
