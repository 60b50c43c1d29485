"""What the memory experiments and the quasi-static test say: tables, and a paragraph for a paper.

Everything is computed from tables, by rules that do not know the answer.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from tl_hysteresis.quasistatic import QuasiStatic
from tl_hysteresis.relaxation import RelaxationFit
from tl_hysteresis.results import mean_or_value
from tl_hysteresis.statistics import mean_interval, sign_flip_test
from tl_hysteresis.summary import quick_mark
from tl_hysteresis.traces import MemoryResult

COLUMNS = ["part", "quantity", "unit", "estimate", "low", "high", "n", "note"]


def findings(memory: MemoryResult, quasi: QuasiStatic | None = None) -> pd.DataFrame:
    """Every number of the paragraph, and those behind it, each with its 95 % interval over seeds.

    Returns:
        One row a number: `part` of the question ("how large", "how long", "where it is held",
        "hidden memory", "is it hysteresis"), `quantity`, `unit`, `estimate`, `low`, `high`, `n`
        (seeds) and `note`, what else is to be known.
    """
    rows = [*_how_large(memory), *_how_long(memory), *_where(memory), *_hidden(memory)]
    if quasi is not None:
        rows += _limits(quasi)
    return pd.DataFrame(rows, columns=COLUMNS)


def paragraph(memory: MemoryResult, quasi: QuasiStatic) -> str:
    """How large the memory is, how long it lasts, where it is held, and whether it is hysteresis.

    Args:
        memory: the experiments on one study.
        quasi: the quasi-static test on studies of the same settings at other dwells.
    """
    study = memory.study
    schedule, seeds = study.config.schedule, study.n_seeds
    setting = (
        f"In {seeds} independently trained anchors{quick_mark(study)}, two branches went through "
        f"opposite, exactly matched loops of the {schedule.parameter.replace('_', ' ')} "
        f"({study.config.centre:g} ± {schedule.delta:g}, {schedule.dwell} updates at each of "
        f"{schedule.steps + 1} levels)."
    )
    sentences = [
        setting,
        _say_how_large(memory),
        _say_how_long(memory.fit()),
        _say_where(memory),
        _say_hidden(memory),
        _say_hysteresis(quasi),
        f"Brackets are 95 % intervals over {seeds} seeds; the smallest sign-flip p that {seeds} "
        f"seeds can give is {2 / 2**seeds:.4g}.",
    ]
    return " ".join(sentences)


def memory_summary(memory: MemoryResult) -> dict[str, pd.DataFrame]:
    """The answers of the memory experiments as short tables of text, by title."""
    mark = quick_mark(memory.study)
    found = findings(memory)
    tables = {}
    for part, rows in found.groupby("part", sort=False):
        tables[f"Memory: {part}{mark}"] = pd.DataFrame(
            {
                "quantity": rows["quantity"],
                "95 % interval over seeds": [_number(row) for row in rows.to_dict("records")],
                "unit": rows["unit"],
                "note": rows["note"],
            }
        )
    return tables


def verdict_summary(quasi: QuasiStatic) -> dict[str, pd.DataFrame]:
    """The quasi-static test as short tables of text, by title."""
    columns = {"estimate": "mean", "low": "low", "high": "high", "equivalent": "within the margin"}
    return {
        f"Gap and lag at each rate, in logits (margin {quasi.margin:g})": quasi.rates[
            ["measure", "dwell", *columns, "present"]
        ].rename(columns=columns),
        "At rate zero": quasi.limits[["measure", "method", *columns, "stays", "gone"]].rename(
            columns=columns
        ),
        f"Verdict: {quasi.verdict}": pd.DataFrame({"evidence": list(quasi.evidence)}),
    }


Row = tuple[str, str, str, float, float, float, int, str]


def _how_large(memory: MemoryResult) -> list[Row]:
    part, rows = "how large", []
    curve, n = memory.study.curve(), memory.study.n_seeds
    null = memory.null().set_index("relaxation")
    for at in memory.study.config.relaxation.measure_at:
        gaps = curve.loc[curve["relaxation"] == at, "gap"]
        interval, signs, order = mean_or_value(gaps), sign_flip_test(gaps), null.loc[at]
        note = (
            f"positive in {signs.n_positive} of {n}, p = {signs.p:.4g}; order noise "
            f"{order['null_low']:+.4f} to {order['null_high']:+.4f}, p = {order['null_p']:.4g}"
        )
        rows.append(
            _row(part, f"gap at relaxation {at}", "logits", interval.estimate, interval, n, note)
        )
    for row in _replicated(memory):
        rows.append(
            (
                part,
                f"gap at relaxation {row['relaxation']}, {row['loops_per_seed']} loops a seed",
                "logits",
                row["gap"],
                row["low"],
                row["high"],
                row["n_seeds"],
                f"sd between seeds {row['sd_between']:.4f}, within {row['sd_within']:.4f}",
            )
        )
    lag = memory.loop().groupby("seed")["lag"].mean()
    interval = mean_interval(lag)
    rows.append(
        _row(part, "mean height of the loop", "logits", interval.estimate, interval, n, "its lag")
    )
    return rows


def _replicated(memory: MemoryResult) -> list[dict[str, Any]]:
    if not memory.study.folder.has("tables/replicates.csv"):
        return []
    table = memory.replicates()
    kept = table["relaxation"].isin(memory.study.config.relaxation.measure_at)
    return [{str(k): v for k, v in row.items()} for row in table[kept].to_dict("records")]


def _how_long(memory: MemoryResult) -> list[Row]:
    fit = memory.fit()
    errors = ", ".join(f"{name} {error:.3g}" for name, error in fit.errors.items())
    note = f"{fit.model}; mean squared error on left-out seeds: {errors}"
    return [
        (
            "how long",
            row["quantity"].replace("_", " "),
            row["unit"],
            row["estimate"],
            row["low"],
            row["high"],
            fit.n,
            note,
        )
        for row in fit.table().to_dict("records")
    ]


def _where(memory: MemoryResult) -> list[Row]:
    effects, asked = memory.effects(), memory.study.config.relaxation.measure_at
    return [
        (
            "where it is held",
            f"{row['effect']}, relaxation {row['relaxation']}",
            "logits",
            row["estimate"],
            row["low"],
            row["high"],
            row["n"],
            f"positive in {row['n_positive']} of {row['n']}, p = {row['p']:.4g}, "
            f"Holm over relaxations {row['p_holm']:.4g}",
        )
        for row in effects[effects["relaxation"].isin(asked)].to_dict("records")
    ]


def _hidden(memory: MemoryResult) -> list[Row]:
    rows: list[Row] = []
    for row in memory.hidden().to_dict("records"):
        note = f"below minus above, p = {row['p']:.4g}"
        if not math.isnan(row["null_p"]):
            note += (
                f"; order noise {row['null_low']:+.4f} to {row['null_high']:+.4f}, "
                f"p = {row['null_p']:.4g}"
            )
        unit = "slope" if "gain" in row["quantity"] else "logits"
        rows.append(
            (
                "hidden memory",
                f"{row['quantity']}, {row['place']}",
                unit,
                row["estimate"],
                row["low"],
                row["high"],
                row["n"],
                note,
            )
        )
    for row in memory.distances().to_dict("records"):
        rows.append(
            (
                "hidden memory",
                f"weight {row['quantity'].replace('_', ' ')} over that of shuffled loops",
                "ratio",
                row["ratio"],
                row["low"],
                row["high"],
                memory.study.n_seeds,
                f"distance {row['distance']:.4g}, p = {row['p']:.4g}",
            )
        )
    after = memory.matched()["after"].dropna()
    if len(after) > 1:
        interval = mean_interval(after)
        rows.append(
            _row(
                "hidden memory",
                "gap that opens again after behaviour matched",
                "logits",
                interval.estimate,
                interval,
                len(after),
                f"in the sign it had at first; p = {sign_flip_test(after).p:.4g}",
            )
        )
    return rows


def _limits(quasi: QuasiStatic) -> list[Row]:
    part = "is it hysteresis"
    rows: list[Row] = [
        (
            part,
            f"{row['measure']} at dwell {row['dwell']:g}",
            "logits",
            row["estimate"],
            row["low"],
            row["high"],
            quasi.n,
            _standing(row, quasi),
        )
        for row in quasi.rates.to_dict("records")
    ]
    rows += [
        (
            part,
            f"{row['measure']} at rate zero ({row['method']})",
            "logits",
            row["estimate"],
            row["low"],
            row["high"],
            quasi.n,
            _standing(row, quasi),
        )
        for row in quasi.limits.to_dict("records")
    ]
    return [*rows, (part, quasi.verdict, "", math.nan, math.nan, math.nan, quasi.n, "verdict")]


def _standing(row: Any, quasi: QuasiStatic) -> str:
    if row["equivalent"]:
        return f"within ±{quasi.margin:g}"
    beyond = row["low"] > quasi.margin or row["high"] < -quasi.margin
    return f"{'beyond' if beyond else 'neither within nor beyond'} ±{quasi.margin:g}"


def _row(
    part: str, quantity: str, unit: str, estimate: float, bounds: Any, n: int, note: str
) -> Row:
    return part, quantity, unit, estimate, bounds.low, bounds.high, n, note


def _say_how_large(memory: MemoryResult) -> str:
    curve, n = memory.study.curve(), memory.study.n_seeds
    gaps = curve.loc[curve["relaxation"] == 0, "gap"]
    interval, signs = mean_interval(gaps), sign_flip_test(gaps)
    order = memory.null().set_index("relaxation").loc[0]
    told = (
        f"At the loop's end their gap in logit margin, below minus above, was {interval} logits "
        f"({signs.n_positive} of {n} positive, sign-flip p = {signs.p:.4g}); loops over the same "
        f"examples in shuffled orders differ by {order['null_low']:+.3f} to "
        f"{order['null_high']:+.3f} (95 % of that null; p = {order['null_p']:.3g})."
    )
    for row in _replicated(memory)[:1]:
        told += (
            f" Over {row['loops_per_seed']} loops an anchor, on different batches, it was "
            f"{row['gap']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]."
        )
    return told


def _say_how_long(fit: RelaxationFit) -> str:
    residual = f"what remains of it in the limit is {fit.residual} logits"
    if not fit.residual_seen:
        residual = "the curve is too short to see what remains of it in the limit"
    if fit.time_constant is None:
        return f"How it relaxes no law predicts better than a constant: {residual}."
    time = f"a time constant of {_span(fit.time_constant)} updates"
    if fit.period is None:
        return f"It relaxes as a plain decay with {time}; {residual}."
    return (
        f"It relaxes as a damped oscillation with {time} and a period of {_span(fit.period)} "
        f"updates (chosen by its error on left-out seeds); {residual}."
    )


def _say_where(memory: MemoryResult) -> str:
    at = next(at for at in memory.study.config.relaxation.measure_at if at > 0)
    effects = memory.effects()
    rows = effects[effects["relaxation"] == at].set_index("effect")
    shares = {name: rows.loc[name] for name in ("state", "weights", "interaction")}
    sides = {name: _side(shares[name]) for name in HOLDERS}
    held = [f"the {names}" for key, names in HOLDERS.items() if sides[key]]
    told = (
        f"With weights and optimizer state exchanged between the branches at the loop's end, the "
        f"gap {at} updates later ({_bounds(rows.loc['gap'])}) is the sum of a main effect of the "
        f"optimizer state, {_bounds(shares['state'])}, and one of the weights, "
        f"{_bounds(shares['weights'])} (interaction {_bounds(shares['interaction'])}): "
    )
    told += f"it is held in {' and in '.join(held)}." if held else "neither can be told from zero."
    resets = [
        f"{_bounds(rows.loc[name])} {words}" for name, words in RESETS.items() if name in rows.index
    ]
    if resets:
        told += f" From a common state the weights alone leave a gap of {', '.join(resets)}."
    return told


HOLDERS = {"state": "optimizer state", "weights": "weights"}
RESETS = {
    "weights, anchor": "with the anchor's state",
    "weights, reset": "with a new optimizer's",
    "weights, first moment reset": "with the first moment alone reset",
    "weights, second moment reset": "with the second alone reset",
}


def _say_hidden(memory: MemoryResult) -> str:
    hidden = memory.hidden()
    relaxed = hidden[hidden["place"] == "relaxed"]
    differing = [
        f"{row['quantity']} {_bounds(row)}"
        for row in relaxed.to_dict("records")
        if _side(row) and row["null_p"] < 0.05
    ]
    last = memory.study.config.relaxation.measure_at[-1]
    told = f"After {last} updates " + (
        f"the branches still differ in {', '.join(differing)}"
        if differing
        else f"none of {len(relaxed)} measures of the parts differs between the branches beyond "
        "zero and beyond order noise"
    )
    distance = memory.distances().iloc[0]
    return (
        f"{told}; their weights are {distance['ratio']:.2f} times [{distance['low']:.2f}, "
        f"{distance['high']:.2f}] as far apart as those of shuffled loops."
    )


def _say_hysteresis(quasi: QuasiStatic) -> str:
    line = quasi.limits[quasi.limits["method"] == "linear"].set_index("measure")
    dwells = quasi.rates["dwell"]
    return (
        f"Run at dwells from {dwells.min():g} to {dwells.max():g} updates, the gap extrapolates to "
        f"{_bounds(line.loc['gap'])} logits at rate zero and the mean height of the loop to "
        f"{_bounds(line.loc['lag'])}; against an equivalence margin of {quasi.margin:g} logits the "
        f"verdict is: {quasi.verdict}."
    )


def _side(row: Any) -> int:
    return int(row["low"] > 0) - int(row["high"] < 0)


def _bounds(row: Any) -> str:
    return f"{row['estimate']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"


def _span(interval: Any) -> str:
    return f"{interval.estimate:.1f} [{interval.low:.1f}, {interval.high:.1f}]"


def _number(row: Any) -> str:
    return f"{row['estimate']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
