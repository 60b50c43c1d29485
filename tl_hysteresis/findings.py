"""What memory experiments and quasi-static test say: one table, and a paragraph for a paper.

Everything is computed by rules that do not know the answer, and the paragraph from the table alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from tl_hysteresis.grid import Grid
from tl_hysteresis.memory import examine_memory
from tl_hysteresis.quasistatic import QuasiStatic
from tl_hysteresis.relaxation import RelaxationFit
from tl_hysteresis.results import StudyResult, mean_or_value
from tl_hysteresis.statistics import sign_flip_test
from tl_hysteresis.store import RunFolder
from tl_hysteresis.summary import QUICK_MARK, quick_mark
from tl_hysteresis.sweep import refuse_too_few, run_sweep
from tl_hysteresis.traces import MemoryResult

Row = dict[str, Any]

SETTING, SIZE, TIME = "setting", "how large", "how long"
PLACE, HIDDEN, LIMIT = "where it is held", "hidden memory", "is it hysteresis"

MATCHED = "where behaviour first matches"

NUMBERS = ["estimate", "low", "high", "n", "n_positive", "p", "null_low", "null_high", "null_p"]
COLUMNS = ["part", "quantity", "at", "unit", *NUMBERS, "note"]


def examine_study(
    folder: Path | str,
    *,
    workers: int | None = None,
    dask: str | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Ask a finished study what holds its memory, and whether it is hysteresis; again, it goes on.

    Runs the memory experiments in its folder, and the study at other dwells beside it, in
    ``FOLDER-dwells``, from its own anchors. The table is kept in the folder as
    ``tables/findings.csv``.

    Args:
        folder: the run folder of a complete study.
        workers: as for `run_sweep`.
        dask: as for `run_sweep`.
        progress: show progress bars.

    Returns:
        The table of `findings`, for `paragraph`.

    Raises:
        HysteresisError: what `examine_memory` and `run_sweep` refuse; before anything trains, a
            study of too few seeds for the quasi-static test.

    Example:
        >>> table = examine_study("runs/reproduce", workers=2)  # doctest: +SKIP
        >>> print(paragraph(table))  # doctest: +SKIP
    """
    run = RunFolder.open(folder)
    grid = Grid.of_dwells(run.config)
    refuse_too_few(grid)
    memory = examine_memory(folder, progress=progress)
    dwells = run.path.with_name(f"{run.path.name}-dwells")
    sweep = run_sweep(grid, dwells, workers=workers, dask=dask, anchors=[folder], progress=progress)
    [cell] = sweep.quasi_static(margin=run.config.memory.margin)
    table = findings(memory, cell.test)
    run = RunFolder.open(folder)
    with run.locked():
        run.write_table("findings", table)
    return table


def findings(memory: MemoryResult, quasi: QuasiStatic | None = None) -> pd.DataFrame:
    """Every number of the paragraph, and those behind it, each with its 95 % interval over seeds.

    Args:
        memory: the experiments on one study.
        quasi: the quasi-static test on studies of the same settings at other dwells.

    Returns:
        One row a number: `part` of the question, `quantity`, `at` (updates after the loop's end;
        for "is it hysteresis", the dwell), `unit`, `estimate`, `low`, `high`, `n` (seeds),
        `n_positive` of them, sign-flip `p`; `null_low` to `null_high`, 95 % of the null of order
        noise, and its `null_p`; and `note`, what else is to be known. What a number does not have
        is NaN. Intervals of "is it hysteresis" hold jointly, over rates and both measures. A CSV
        file holds the table without loss.

    Example:
        >>> table = findings(load_memory("runs/reproduce"))  # doctest: +SKIP
        >>> print(paragraph(table))  # doctest: +SKIP
    """
    rows = [
        *_setting(memory.study),
        *_how_large(memory),
        *_how_long(memory.fit()),
        *_where(memory),
        *_hidden(memory),
        *(_limits(quasi) if quasi is not None else ()),
    ]
    return pd.DataFrame(rows, columns=COLUMNS).astype(
        {"at": float, **dict.fromkeys(NUMBERS, float)}
    )


def paragraph(table: pd.DataFrame) -> str:
    """How large the memory is, how long it lasts, where it is held, and whether it is hysteresis.

    Args:
        table: as `findings` returns it, or read back from its CSV file. The last question is left
            out where the quasi-static test is.

    Example:
        >>> print(paragraph(pd.read_csv("runs/reproduce/findings.csv")))  # doctest: +SKIP
    """
    parts = _parts(table)
    n = _row(parts[SETTING], "seeds")["estimate"]
    said = [
        _say_setting(parts[SETTING]),
        _say_how_large(parts[SIZE]),
        _say_how_long(parts[TIME]),
        _say_where(parts[PLACE]),
        _say_hidden(parts[HIDDEN]),
    ]
    if LIMIT in parts:
        said.append(_say_hysteresis(parts[LIMIT]))
    said.append(
        f"Brackets are 95 % intervals over {n:.0f} seeds, those at rate zero jointly; the smallest "
        f"sign-flip p that {n:.0f} seeds can give is {2 / 2**n:.4g}."
    )
    return " ".join(said)


def findings_summary(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The table of findings as short tables of text, by title."""
    mark, tables = _mark(table), {}
    for part, rows in _parts(table).items():
        title = f"Memory: {part}{mark}, in logits"
        if part == TIME:
            law = str(rows["note"].iloc[0]).partition(";")[0]
            tables[f"Memory: {part}{mark} ({law})"] = pd.DataFrame(
                {
                    "": rows["quantity"],
                    "estimate": [_bounds(row) for row in rows.to_dict("records")],
                    "unit": rows["unit"],
                }
            )
        elif part == LIMIT:
            margin, verdict = _row(rows, "margin")["estimate"], _row(rows, "verdict")["note"]
            judged = rows[rows["low"].notna()]
            tables[f"{title}, margin {margin:g}: {verdict}"] = _crossed(judged)
        elif part != SETTING:
            tables[title] = _crossed(rows)
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


# From the experiments to rows.


def _setting(study: StudyResult) -> Iterator[Row]:
    schedule, centre = study.config.schedule, study.config.centre
    for quantity, unit, estimate in (
        ("dwell", "updates", schedule.dwell),
        ("levels", "", schedule.steps + 1),
        ("seeds", "", study.n_seeds),
    ):
        yield {"part": SETTING, "quantity": quantity, "unit": unit, "estimate": estimate}
    yield {
        "part": SETTING,
        "quantity": schedule.parameter,
        "estimate": centre,
        "low": centre - schedule.delta,
        "high": centre + schedule.delta,
        "note": "what the loop moves: at the anchor, least and most" + quick_mark(study),
    }


def _how_large(memory: MemoryResult) -> Iterator[Row]:
    study = memory.study
    curve, null = study.curve(), memory.null().set_index("relaxation")
    here = {"part": SIZE, "unit": "logits"}
    for at in study.config.relaxation.measure_at:
        gaps = curve.loc[curve["relaxation"] == at, "gap"]
        noise = _numbers(null.loc[at].to_dict())
        yield {**here, "quantity": "gap", "at": at, **_over_seeds(gaps), **noise}
    if study.folder.has("tables/replicates.csv"):
        table = memory.replicates().rename(columns={"gap": "estimate", "n_seeds": "n"})
        for row in table.to_dict("records"):
            if row["relaxation"] in study.config.relaxation.measure_at:
                yield {
                    **here,
                    "quantity": f"gap, {row['loops_per_seed']} loops a seed",
                    "at": row["relaxation"],
                    **_numbers(row),
                    "note": f"sd between seeds {row['sd_between']:.4g}, "
                    f"of one seed's loops {row['sd_within']:.4g}",
                }
    lag = memory.loop().groupby("seed")["lag"].mean()
    note = "in the loop"
    yield {**here, "quantity": "mean height of the loop", **_over_seeds(lag), "note": note}


def _how_long(fit: RelaxationFit) -> Iterator[Row]:
    errors = ", ".join(f"{name} {error:.3g}" for name, error in fit.errors.items())
    note = f"{fit.model}; mean squared error on left-out seeds: {errors}"
    for row in fit.table().to_dict("records"):
        quantity = str(row["quantity"]).replace("_", " ")
        found = {"unit": row["unit"], **_numbers(row), "n": fit.n, "note": note}
        yield {"part": TIME, "quantity": quantity, **found}


def _where(memory: MemoryResult) -> Iterator[Row]:
    for row in memory.effects().to_dict("records"):
        if row["relaxation"] in memory.study.config.relaxation.measure_at:
            yield {
                "part": PLACE,
                "quantity": row["effect"],
                "at": row["relaxation"],
                "unit": "logits",
                **_numbers(row),
                "note": f"Holm over relaxations: p = {row['p_holm']:.4g}",
            }


def _hidden(memory: MemoryResult) -> Iterator[Row]:
    relaxed = memory.study.config.relaxation.measure_at[-1]
    for row in memory.hidden().to_dict("records"):
        is_relaxed, quantity = row["place"] == "relaxed", str(row["quantity"])
        yield {
            "part": HIDDEN,
            "quantity": quantity,
            "at": relaxed if is_relaxed else math.nan,
            "unit": "slope" if "gain" in quantity else "logits",
            **_numbers(row),
            "note": "" if is_relaxed else MATCHED,
        }
    for row in memory.distances().to_dict("records"):
        yield {
            "part": HIDDEN,
            "quantity": f"weight {str(row['quantity']).replace('_', ' ')} over shuffled loops'",
            "at": relaxed,
            "unit": "ratio",
            **_numbers({**row, "estimate": row["ratio"], "n": memory.study.n_seeds}),
            "note": f"distance {row['distance']:.4g}",
        }
    after = memory.matched()["after"].dropna()
    if len(after) > 1:
        yield {
            "part": HIDDEN,
            "quantity": "gap next, times its first sign",
            "unit": "logits",
            **_over_seeds(after),
            "note": MATCHED,
        }


def _limits(quasi: QuasiStatic) -> Iterator[Row]:
    here = {"part": LIMIT, "unit": "logits", "n": quasi.n}
    for row in quasi.rates.to_dict("records"):
        found = {"quantity": row["measure"], "at": row["dwell"], **_numbers(row)}
        yield {**here, **found, "note": _standing(row, quasi.margin)}
    for row in quasi.limits.to_dict("records"):
        found = {"quantity": f"{row['measure']} at rate zero, {row['method']}", **_numbers(row)}
        yield {**here, **found, "note": _standing(row, quasi.margin)}
    note = "the gap or lag that is just too large to be called none"
    yield {**here, "quantity": "margin", "estimate": quasi.margin, "note": note}
    yield {"part": LIMIT, "quantity": "verdict", "n": quasi.n, "note": quasi.verdict}


def _standing(row: Any, margin: float) -> str:
    if row["equivalent"]:
        return f"within ±{margin:g}"
    beyond = row["low"] > margin or row["high"] < -margin
    return f"{'beyond' if beyond else 'neither within nor beyond'} ±{margin:g}"


def _over_seeds(values: pd.Series) -> Row:
    interval, signs = mean_or_value(values), sign_flip_test(values)
    bounds = {"estimate": interval.estimate, "low": interval.low, "high": interval.high}
    return {**bounds, "n": signs.n, "n_positive": signs.n_positive, "p": signs.p}


def _numbers(row: Any) -> Row:
    return {name: row[name] for name in NUMBERS if name in row}


# From rows to text.


def _parts(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {str(name): rows for name, rows in table.groupby("part", sort=False)}


def _row(rows: pd.DataFrame, quantity: str, at: float | None = None) -> Any:
    """The row of a quantity; the first, if it is there at several relaxations."""
    found = rows[rows["quantity"] == quantity]
    return (found if at is None else found[found["at"] == at]).iloc[0]


def _say_setting(rows: pd.DataFrame) -> str:
    seeds, dwell, levels = (
        f"{_row(rows, name)['estimate']:.0f}" for name in ("seeds", "dwell", "levels")
    )
    moved = rows[~rows["quantity"].isin(["seeds", "dwell", "levels"])].iloc[0]
    return (
        f"In {seeds} independently trained anchors{_mark(rows)}, two branches went through "
        f"opposite, exactly matched loops of the {moved['quantity'].replace('_', ' ')} "
        f"({moved['estimate']:g}, from {moved['low']:g} to {moved['high']:g}; {dwell} updates at "
        f"each of {levels} levels)."
    )


def _say_how_large(rows: pd.DataFrame) -> str:
    gap = rows[rows["quantity"] == "gap"].iloc[0]
    told = f"{gap['at']:.0f} updates after the loop's end" if gap["at"] else "At the loop's end"
    told += (
        f" their gap in logit margin, below minus above, was {_bounds(gap)} logits "
        f"({gap['n_positive']:.0f} of {gap['n']:.0f} positive, sign-flip p = {gap['p']:.4g}); "
        f"loops over the same examples in shuffled orders differ by {gap['null_low']:+.3f} to "
        f"{gap['null_high']:+.3f} (95 % of that null; p = {gap['null_p']:.2g})."
    )
    repeated = rows[rows["quantity"].str.contains("loops a seed")]
    if len(repeated):
        row = repeated.iloc[0]
        loops = row["quantity"].removeprefix("gap, ").removesuffix(" loops a seed")
        told += (
            f" Averaged over {loops} loops an anchor, on different batches, it was {_bounds(row)}."
        )
    return told


def _say_how_long(rows: pd.DataFrame) -> str:
    found = {row["quantity"]: row for row in rows.to_dict("records")}
    residual = found["residual"]
    told = f"what remains of it in the limit is {_bounds(residual)} logits"
    if math.isinf(residual["low"]):
        told = "the curve is too short to see what remains of it in the limit"
    if "time constant" not in found:
        return f"How it relaxes no law predicts better than a constant: {told}."
    time = f"a time constant of {_span(found['time constant'])} updates"
    if "period" not in found:
        return f"It relaxes as a plain decay with {time}; {told}."
    return (
        f"It relaxes as a damped oscillation with {time} and a period of {_span(found['period'])} "
        f"updates (chosen by its error on left-out seeds); {told}."
    )


HOLDERS = {"state": "optimizer state", "weights": "weights"}
COMMON = {
    "weights, anchor": "with the anchor's state",
    "weights, reset": "with a new optimizer's",
    "weights, first moment reset": "with the first moment alone reset",
    "weights, second moment reset": "with the second alone reset",
}


def _say_where(rows: pd.DataFrame) -> str:
    at = rows.loc[rows["at"] > 0, "at"].min()
    found = {row["quantity"]: row for row in rows[rows["at"] == at].to_dict("records")}
    held = [f"the {words}" for name, words in HOLDERS.items() if _side(found[name])]
    told = (
        f"With weights and optimizer state exchanged between the branches at the loop's end, the "
        f"gap {at:.0f} updates later, {_bounds(found['gap'])}, is the sum of a main effect of the "
        f"optimizer state, {_bounds(found['state'])}, and one of the weights, "
        f"{_bounds(found['weights'])} (interaction {_bounds(found['interaction'])}): "
    )
    told += f"it is held in {' and in '.join(held)}." if held else "neither can be told from zero."
    common = [f"{_bounds(found[name])} {words}" for name, words in COMMON.items() if name in found]
    if common:
        told += f" From a common state the weights alone leave a gap of {', '.join(common)}."
    return told


def _say_hidden(rows: pd.DataFrame) -> str:
    ratios = rows["unit"] == "ratio"
    relaxed = rows[rows["at"].notna() & ~ratios]
    differing = [
        f"{row['quantity']} {_bounds(row)}"
        for row in relaxed.to_dict("records")
        if _side(row) and row["null_p"] < 0.05
    ]
    distance = rows[ratios].iloc[0]
    told = f"After {distance['at']:.0f} updates " + (
        f"the branches still differ in {', '.join(differing)}"
        if differing
        else f"none of {len(relaxed)} measures of behaviour and parts differs between the branches "
        "beyond zero and beyond order noise"
    )
    return (
        f"{told}; their weights are {distance['estimate']:.2f} times [{distance['low']:.2f}, "
        f"{distance['high']:.2f}] as far apart as those of shuffled loops."
    )


def _say_hysteresis(rows: pd.DataFrame) -> str:
    gap, lag = (_row(rows, f"{name} at rate zero, linear") for name in ("gap", "lag"))
    return (
        f"Run at dwells from {rows['at'].min():g} to {rows['at'].max():g} updates, the gap "
        f"extrapolates to {_bounds(gap)} logits at rate zero and the mean height of the loop to "
        f"{_bounds(lag)}; against an equivalence margin of {_row(rows, 'margin')['estimate']:g} "
        f"logits the verdict is: {_row(rows, 'verdict')['note']}."
    )


def _crossed(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a quantity, a column a relaxation; or, of several rates, a line each."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows.to_dict("records"):
        line, column = row["quantity"], row["note"]
        if not math.isnan(row["at"]):
            column = f"after {row['at']:g} updates"
        if row["part"] == LIMIT:
            column, _, method = row["quantity"].partition(" at rate zero, ")
            line = f"rate zero, {method}" if method else f"dwell {row['at']:g}"
        elif row["unit"] != "logits":
            line = f"{line} ({row['unit']})"
        cells.setdefault(line, {})[column] = _cell(row)
    table = pd.DataFrame.from_dict(cells, orient="index").fillna("")
    return table.rename_axis("").reset_index()


def _cell(row: Any) -> str:
    """What is known of a number, a line for each."""
    said = [_bounds(row)]
    if not math.isnan(row["n_positive"]):
        said.append(f"{row['n_positive']:.0f} of {row['n']:.0f} positive, p = {row['p']:.3g}")
    if not math.isnan(row["null_p"]):
        said.append(f"order noise {row['null_low']:+.3f} to {row['null_high']:+.3f}")
    return "\n".join(said)


def _mark(rows: pd.DataFrame) -> str:
    """The mark of a quick run, if these rows of the setting carry it."""
    notes = rows.loc[rows["part"] == SETTING, "note"].dropna()
    return QUICK_MARK if notes.str.endswith(QUICK_MARK).any() else ""


def _side(row: Any) -> int:
    return int(row["low"] > 0) - int(row["high"] < 0)


def _bounds(row: Any) -> str:
    return f"{row['estimate']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"


def _span(row: Any) -> str:
    return f"{row['estimate']:.1f} [{row['low']:.1f}, {row['high']:.1f}]"
