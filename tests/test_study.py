"""The study as a whole: what must hold whatever the numbers are."""

from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_config

from tl_hysteresis.study import run_study


@pytest.mark.parametrize("n_seeds", [1, 2, 3, 5])
def test_a_same_order_control_has_a_gap_of_exactly_zero(tmp_path: Path, n_seeds: int) -> None:
    config = tiny_config(seeds=list(range(n_seeds)), schedule={"same_order": True})
    result = run_study(config, tmp_path / "run")
    assert (result.curve()["gap"] == 0.0).all()
    replaced = result.table("replacement").pivot(
        index=["seed", "relaxation", "component"], columns="branch", values="margin"
    )
    assert replaced["below"].equals(replaced["above"])


def test_opposite_orders_do_not(tmp_path: Path) -> None:
    result = run_study(tiny_config(), tmp_path / "run")
    assert (result.curve()["gap"] != 0.0).any()


def test_tables_agree_where_they_measure_the_same(tmp_path: Path) -> None:
    """Stacked and hooked forward passes; the loop's end and the relaxation's start."""
    result = run_study(tiny_config(), tmp_path / "run")
    keys = ["seed", "branch"]
    relaxation, loop = result.table("relaxation"), result.table("loop")
    end = loop[loop["update"] == loop["update"].max()].set_index(keys)["margin"]
    start = relaxation[relaxation["relaxation"] == 0].set_index(keys)["margin"]
    assert end.equals(start)
    intact = result.table("replacement").query("component == 'intact'")
    both = intact.merge(relaxation, on=[*keys, "relaxation"], suffixes=("_hooked", "_stacked"))
    assert len(both) == len(intact) == 2 * 2 * 3
    np.testing.assert_allclose(both["margin_hooked"], both["margin_stacked"], atol=1e-5)


def test_both_branches_begin_at_the_anchor(tmp_path: Path) -> None:
    result = run_study(tiny_config(), tmp_path / "run")
    loop = result.table("loop")
    wide = loop[loop["update"] == 0].pivot(index="seed", columns="branch", values="margin")
    assert wide["below"].equals(wide["above"])


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"attn_only": True}},
        {"model": {"n_layers": 1}},
        {"model": {"positional_embedding_type": "rotary"}},
        {"model": {"normalization_type": "RMS"}},
        {"optimizer": {"name": "sgd", "batch_size": 8}},
        {"schedule": {"shape": "smooth"}},
        {"schedule": {"labels": "independent"}},
    ],
)
def test_other_settings_run_to_the_end(tmp_path: Path, changes: dict[str, object]) -> None:
    result = run_study(tiny_config(**changes), tmp_path / "run")
    assert result.folder.complete
    assert result.routes()["topology"].between(-1.0, 1.0).all()
