"""Findings: the table says what the experiments found, and the paragraph what the table says."""

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import command, files_in, tiny_config

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.findings import (
    HIDDEN,
    LIMIT,
    PLACE,
    SETTING,
    SIZE,
    TIME,
    examine_study,
    findings_summary,
    paragraph,
)
from tl_hysteresis.quasistatic import quasi_static
from tl_hysteresis.results import load_study
from tl_hysteresis.study import run_study
from tl_hysteresis.sweep import load_sweep
from tl_hysteresis.traces import load_memory

CONFIG = tiny_config(
    seeds=[0, 1, 2],
    model={"n_layers": 1},
    relaxation={"measure_at": [0, 4, 10]},
    measurement={"circuits": False},
    memory={"shuffled": 3, "replicates": 1, "observe_every": 2},
)


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("findings") / "study"
    run_study(CONFIG, folder)
    examine_study(folder, workers=1)
    return folder


def row(part: str, quantity: str, /, **numbers: Any) -> dict[str, Any]:
    return {"part": part, "quantity": quantity, **numbers}


def spread(estimate: float, half: float, **more: Any) -> dict[str, Any]:
    return {"estimate": estimate, "low": estimate - half, "high": estimate + half, **more}


def planted(*others: dict[str, Any]) -> pd.DataFrame:
    """A table of findings; rows of the same part, quantity and relaxation take another's place."""
    rows = [
        row(SETTING, "dwell", estimate=14),
        row(SETTING, "levels", estimate=17),
        row(SETTING, "seeds", estimate=5),
        row(SETTING, "mixture", **spread(0.5, 0.2)),
        row(
            SIZE,
            "gap",
            **spread(0.1, 0.04, at=0, n=5, n_positive=5, p=0.0625),
            **{"null_low": -0.03, "null_high": 0.03, "null_p": 0.001},
        ),
        row(TIME, "residual", **spread(0.0, 0.01)),
        *(row(PLACE, name, **spread(0.0, 0.01, at=0)) for name in ("gap", "state", "weights")),
        *(
            row(PLACE, name, **spread(0.0, 0.01, at=25))
            for name in ("gap", "state", "weights", "interaction")
        ),
        row(HIDDEN, "margin", **spread(0.0, 0.01, at=100, null_p=0.5), unit="logits"),
        row(HIDDEN, "weight distance", **spread(1.0, 0.1, at=100), unit="ratio"),
        *(
            row(LIMIT, name, **spread(0.05, 0.02, at=at))
            for name in ("gap", "lag")
            for at in (2, 64)
        ),
        row(LIMIT, "gap at rate zero, linear", **spread(0.01, 0.02)),
        row(LIMIT, "lag at rate zero, linear", **spread(0.02, 0.02)),
        row(LIMIT, "margin", estimate=0.05),
        row(LIMIT, "verdict", note="finite-rate path dependence"),
    ]
    table = pd.DataFrame(rows + list(others))
    table = table.drop_duplicates(["part", "quantity", "at"], keep="last")
    return table.sort_index(ignore_index=True)


class TestParagraph:
    def test_says_what_was_planted(self) -> None:
        told = paragraph(planted())
        for sentence in (
            "In 5 independently trained anchors, two branches went through opposite, exactly "
            "matched loops of the mixture (0.5, from 0.3 to 0.7; 14 updates at each of 17 levels).",
            "was +0.100 [+0.060, +0.140] logits (5 of 5 positive, sign-flip p = 0.0625); loops "
            "over the same examples in shuffled orders differ by -0.030 to +0.030 (95 % of that "
            "null; p = 0.001).",
            "How it relaxes no law predicts better than a constant: what remains of it in the "
            "limit is +0.000 [-0.010, +0.010] logits.",
            "neither can be told from zero.",
            "After 100 updates none of 1 measures of behaviour and parts differs",
            "1.00 times [0.90, 1.10] as far apart",
            "Run at dwells from 2 to 64 updates, the gap extrapolates to +0.010 [-0.010, +0.030] "
            "logits at rate zero and the mean height of the loop to +0.020 [+0.000, +0.040]; "
            "against an equivalence margin of 0.05 logits the verdict is: finite-rate path "
            "dependence.",
            "smallest sign-flip p that 5 seeds can give is 0.0625.",
        ):
            assert sentence in told

    @pytest.mark.parametrize(
        ("where", "said"),
        [
            (["state"], "it is held in the optimizer state."),
            (["weights"], "it is held in the weights."),
            (["state", "weights"], "it is held in the optimizer state and in the weights."),
        ],
    )
    def test_where_it_is_held(self, where: list[str], said: str) -> None:
        held = [row(PLACE, name, **spread(-0.1, 0.05, at=25)) for name in where]
        assert said in paragraph(planted(*held))

    def test_an_effect_at_the_loops_end_is_not_where_it_is_held(self) -> None:
        there = row(PLACE, "weights", **spread(0.1, 0.05, at=0))
        assert "neither can be told from zero" in paragraph(planted(there))

    def test_how_it_relaxes(self) -> None:
        time = row(TIME, "time constant", **spread(18.0, 2.0))
        period = row(TIME, "period", **spread(40.0, 4.0))
        assert "as a plain decay with a time constant of 18.0 [16.0, 20.0] updates" in paragraph(
            planted(time)
        )
        assert (
            "as a damped oscillation with a time constant of 18.0 [16.0, 20.0] updates and a "
            "period of 40.0 [36.0, 44.0] updates" in paragraph(planted(time, period))
        )
        short = row(TIME, "residual", estimate=0.0, low=-math.inf, high=math.inf)
        assert "too short to see what remains" in paragraph(planted(short))

    def test_what_still_differs(self) -> None:
        beyond = spread(0.1, 0.05, at=100, null_p=0.01)
        told = paragraph(planted(row(HIDDEN, "margin", **beyond, unit="logits")))
        assert "the branches still differ in margin +0.100 [+0.050, +0.150]" in told
        within_noise = row(HIDDEN, "margin", **beyond | {"null_p": 0.2}, unit="logits")
        assert "none of 1 measures" in paragraph(planted(within_noise))

    def test_without_a_quasi_static_test_it_says_nothing_of_rates(self) -> None:
        table = planted()
        told = paragraph(table[table["part"] != LIMIT])
        assert "verdict" not in told
        assert "Brackets are" in told

    def test_a_quick_run_is_marked(self) -> None:
        moved = row(SETTING, "mixture", **spread(0.5, 0.2), note="x (quick run, not a result)")
        assert "(quick run, not a result)" in paragraph(planted(moved))
        assert all("quick" in title for title in findings_summary(planted(moved)))

    def test_the_readme_has_it_for_the_default_study(self) -> None:
        root = Path(__file__).parents[1]
        table = pd.read_csv(root / "data" / "default_study.csv")
        readme = " ".join((root / "README.md").read_text().replace("\n>", "\n").split())
        assert paragraph(table) in readme


class TestExamineStudy:
    def test_the_kept_table_says_the_same(self, examined: Path) -> None:
        kept = load_study(examined).table("findings")
        again = examine_study(examined, workers=1)
        assert (
            paragraph(kept)
            == paragraph(again)
            == paragraph(pd.read_csv(examined / "tables" / "findings.csv"))
        )
        numbers = kept.select_dtypes("number").columns
        pd.testing.assert_frame_equal(kept[numbers], again[numbers], check_exact=True)

    def test_every_interval_of_the_paragraph_stands_in_the_table(self, examined: Path) -> None:
        table = load_study(examined).table("findings")
        number = r"[+-]?\d+\.\d+"
        told = re.findall(rf"({number})[a-z ]* \[({number}), ({number})\]", paragraph(table))
        assert len(told) > 10
        for found in told:
            digits = len(found[0].partition(".")[2])
            here = table[["estimate", "low", "high"]].sub([float(x) for x in found]).abs()
            assert (here.max(axis=1, skipna=False) <= 0.51 * 10**-digits).any(), found

    def test_it_holds_what_the_experiments_found(self, examined: Path) -> None:
        table = load_study(examined).table("findings")
        gaps = load_study(examined).gaps().query("relaxation == 4").iloc[0]
        size = table[(table["part"] == SIZE) & (table["quantity"] == "gap")]
        gap = size.query("at == 4").iloc[0]
        assert [gap["estimate"], gap["low"], gap["high"], gap["p"]] == pytest.approx(
            [gaps["gap"], gaps["t_low"], gaps["t_high"], gaps["p"]]
        )
        effects = load_memory(examined).effects().query("relaxation == 10")
        for name in ("state", "weights, reset"):
            here = table[(table["quantity"] == name) & (table["at"] == 10)].iloc[0]
            there = effects[effects["effect"] == name].iloc[0]
            assert [here[key] for key in ("estimate", "low", "p")] == [
                there[key] for key in ("estimate", "low", "p")
            ]

    def test_the_verdict_is_that_of_the_loops_beside_it(self, examined: Path) -> None:
        sweep = load_sweep(examined.with_name("study-dwells"))
        assert [cell.config.schedule.dwell for cell in sweep.grid.cells] == [2, 4, 8, 16, 32, 64]
        rows = [
            (study.table("anchors"), cell.config.schedule.dwell, study.curve(), study)
            for cell in sweep.grid.cells
            for study in [sweep.study(cell)]
        ]
        for anchors, *_ in rows:
            assert anchors.equals(load_study(examined).table("anchors"))
        by_hand = []
        for _, dwell, curve, study in rows:
            for seed in CONFIG.seeds:
                lags = []
                for _, path in study.table("loop").query("seed == @seed").groupby("branch"):
                    path = path.sort_values("update")
                    x, y = path["control"].to_numpy(), path["margin"].to_numpy()
                    area = sum((y[1:] + y[:-1]) / 2 * (x[:-1] - x[1:]))
                    lags.append(area / (x.max() - x.min()))
                gap = curve.query("seed == @seed and relaxation == 0")["gap"].item()
                by_hand.append((seed, dwell, gap, sum(lags) / 2))
        table = pd.DataFrame(by_hand, columns=["seed", "dwell", "gap", "lag"])
        expected = quasi_static(table, margin=CONFIG.memory.margin)
        found = load_study(examined).table("findings").set_index("quantity")
        assert found.loc["verdict", "note"] == expected.verdict
        line = expected.limits.query("method == 'linear'").set_index("measure")
        for name in ("gap", "lag"):
            assert found.loc[f"{name} at rate zero, linear", "low"] == pytest.approx(
                line.loc[name, "low"], abs=1e-12
            )

    def test_a_second_call_changes_nothing(self, examined: Path) -> None:
        before = files_in(examined), files_in(examined.with_name("study-dwells"))
        examine_study(examined, workers=1)
        assert (files_in(examined), files_in(examined.with_name("study-dwells"))) == before
        load_study(examined).folder.verify()
        assert load_study(examined).folder.complete

    def test_show_prints_it(self, examined: Path) -> None:
        answer = command("show", examined)
        assert (answer.code, answer.err) == (0, "")
        printed = " ".join(answer.out.split())
        assert paragraph(load_study(examined).table("findings")) in printed

    def test_too_few_seeds_are_refused_before_anything_trains(self, tmp_path: Path) -> None:
        run_study(tiny_config(measurement={"circuits": False}), tmp_path / "run")
        before = files_in(tmp_path)
        with pytest.raises(HysteresisError, match="too few seeds: table has n = 2"):
            examine_study(tmp_path / "run")
        assert files_in(tmp_path) == before


class TestVerdict:
    def test_prints_the_evidence(self, examined: Path) -> None:
        answer = command("verdict", examined.with_name("study-dwells"), "--margin", 1e6)
        assert (answer.code, answer.err) == (0, "")
        assert "Verdict: no memory found" in answer.out
        assert "gap at dwell 64" in answer.out

    def test_of_a_relaxation_that_was_not_measured(self, examined: Path) -> None:
        answer = command("verdict", examined.with_name("study-dwells"), "--relaxation", 3)
        assert answer.code == 2
        assert "error: relaxation 3 was not measured in" in answer.err

    def test_of_what_is_no_sweep(self, examined: Path) -> None:
        answer = command("verdict", examined)
        assert answer.code == 2
        assert "is not the folder of a sweep: no sweep.json" in answer.err
