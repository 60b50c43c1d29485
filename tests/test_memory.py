"""Memory experiments: planted memory is found where it was put, and a run cut short goes on."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import command, results_in, tiny_config
from interruptions import MOMENTS, Stop, run_command, writes_of

from tl_hysteresis.config import AdamWConfig, ModelConfig, OptimizerConfig, SGDConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.memory import cross_memory, examine_memory
from tl_hysteresis.models import hooked_config
from tl_hysteresis.results import load_study
from tl_hysteresis.schedules import constant_plan, exposure, matched_plans
from tl_hysteresis.study import run_study
from tl_hysteresis.tasks import AssociativeRecall, draw_conflict
from tl_hysteresis.traces import MemoryResult, crossing_effects, load_memory
from tl_hysteresis.training import Population, initial_state, train

TASK = AssociativeRecall(n_keys=6, n_values=8, n_pairs=3)
SMALL = hooked_config(
    ModelConfig(n_layers=1, n_heads=2, d_model=16, d_mlp=16), d_vocab=TASK.d_vocab, n_ctx=TASK.n_ctx
)
SEEDS = [0, 1, 2]
CONFIG = tiny_config(
    seeds=SEEDS,
    model={"n_layers": 1},
    relaxation={"measure_at": [0, 4, 10]},
    measurement={"circuits": False},
    memory={"shuffled": 3, "replicates": 1, "observe_every": 2},
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "study"
    run_study(CONFIG, folder)
    return folder


@pytest.fixture(scope="module")
def examined(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> MemoryResult:
    folder = tmp_path_factory.mktemp("memory") / "examined"
    shutil.copytree(finished, folder)
    return examine_memory(folder)


def trained(optimizer: OptimizerConfig) -> Population:
    """Anchors with an optimizer state worth crossing."""
    anchors = Population.build(SMALL, optimizer, seeds=SEEDS)
    plan = constant_plan(8, 0.5, stream="anchor")
    train(anchors, TASK, [plan] * len(SEEDS), seeds=SEEDS)
    return anchors


def crossed_margins(branches: Population, anchors: Population, updates: int) -> pd.DataFrame:
    """Margins of every cell after it has relaxed."""
    population, cells = cross_memory(branches, anchors)
    plan = constant_plan(updates, 0.5, stream="relaxation")
    seeds = [SEEDS[index] for index in cells["index"]]
    train(population, TASK, [plan] * len(population), seeds=seeds)
    trials = [draw_conflict(TASK, 16, seed=seed, stream="evaluation") for seed in seeds]
    logits = population.logits(torch.stack([each.tokens for each in trials]))
    margins = [
        logit_margin(own, each).double().mean().item()
        for own, each in zip(logits, trials, strict=True)
    ]
    return cells.assign(seed=seeds, relaxation=updates, margin=margins)


def effect(table: pd.DataFrame, name: str) -> "pd.Series[Any]":
    return table[table["effect"] == name].iloc[0]


class TestCrossing:
    @pytest.mark.parametrize("optimizer", [AdamWConfig(batch_size=8), SGDConfig(batch_size=8)])
    def test_finds_memory_that_was_planted_in_the_optimizer(
        self, optimizer: OptimizerConfig
    ) -> None:
        anchors = trained(optimizer)
        branches = anchors.fork([0, 0, 1, 1, 2, 2])
        moment = "momentum" if isinstance(optimizer, SGDConfig) else "first_moment"
        branches.state[moment][0::2] *= -3.0
        effects = crossing_effects(crossed_margins(branches, anchors, 6))
        assert effect(effects, "weights")["estimate"] == 0.0
        assert effect(effects, "interaction")["estimate"] == 0.0
        assert effect(effects, "state")["estimate"] == effect(effects, "gap")["estimate"] != 0.0
        for name in effects["effect"]:
            if name.startswith("weights, ") and "second" not in name:
                assert effect(effects, name)["estimate"] == 0.0

    def test_finds_memory_that_was_planted_in_the_second_moment(self) -> None:
        anchors = trained(AdamWConfig(batch_size=8))
        branches = anchors.fork([0, 0, 1, 1, 2, 2])
        branches.state["second_moment"][0::2] *= 100.0
        effects = crossing_effects(crossed_margins(branches, anchors, 6))
        assert effect(effects, "state")["estimate"] != 0.0
        assert effect(effects, "weights, second moment reset")["estimate"] == 0.0
        assert effect(effects, "weights, first moment reset")["estimate"] != 0.0

    def test_finds_memory_that_was_planted_in_the_weights(self) -> None:
        anchors = trained(AdamWConfig(batch_size=8))
        branches = anchors.fork([0, 0, 1, 1, 2, 2])
        noise = torch.randn(branches.parameters[0::2].shape, generator=torch.manual_seed(0))
        branches.parameters[0::2] += 0.1 * noise
        effects = crossing_effects(crossed_margins(branches, anchors, 6))
        assert effect(effects, "state")["estimate"] == 0.0
        assert effect(effects, "weights")["estimate"] == effect(effects, "gap")["estimate"] != 0.0

    def test_a_reset_state_is_that_of_a_new_optimizer(self) -> None:
        anchors = trained(AdamWConfig(batch_size=8))
        population, cells = cross_memory(anchors.fork([0, 0, 1, 1, 2, 2]), anchors)
        reset = cells.index[cells["state"] == "reset"].tolist()
        fresh = initial_state(population.optimizer, population.parameters[reset])
        assert all(torch.equal(population.state[k][reset], fresh[k]) for k in fresh)

    def test_partial_resets_reset_one_moment_with_its_age(self) -> None:
        anchors = trained(AdamWConfig(batch_size=8))
        population, cells = cross_memory(anchors.fork([0, 0, 1, 1, 2, 2]), anchors)
        for reset, kept, ages in (
            ("first_moment", "second_moment", (0, 8)),
            ("second_moment", "first_moment", (8, 0)),
        ):
            which = cells.index[cells["state"] == f"{reset}_reset"].tolist()
            assert not population.state[reset][which].any()
            assert torch.equal(
                population.state[kept][which], anchors.state[kept][[0, 0, 1, 1, 2, 2]]
            )
            assert set(population.state["step"][which].tolist()) == {ages[0]}
            assert set(population.state["second_step"][which].tolist()) == {ages[1]}

    def test_branches_that_are_no_pairs_are_refused(self) -> None:
        anchors = Population.build(SMALL, AdamWConfig(), seeds=[0, 1])
        with pytest.raises(HysteresisError, match="3 branches of 2 anchors"):
            cross_memory(anchors.fork([0, 0, 1]), anchors)


class TestExperiments:
    def test_own_weights_with_own_state_relax_as_the_branches_did(
        self, examined: MemoryResult
    ) -> None:
        cells = examined.study.table("crossing")
        own = cells[cells["weights"] == cells["state"]].rename(columns={"weights": "branch"})
        both = own.merge(examined.study.table("relaxation"), on=["seed", "branch", "relaxation"])
        assert sorted(both["relaxation"].unique()) == [0, 2, 4, 6, 8, 10]
        np.testing.assert_allclose(both["margin_x"], both["margin_y"], atol=1e-4)

    def test_before_any_update_the_state_has_no_effect(self, examined: MemoryResult) -> None:
        effects = examined.effects().query("relaxation == 0").set_index("effect")
        assert (effects.loc[["state", "interaction"], "estimate"] == 0.0).all()
        gaps = examined.study.gaps().set_index("relaxation")
        assert effects.loc["weights", "estimate"] == pytest.approx(gaps.loc[0, "gap"])

    def test_shuffled_loops_show_the_examples_of_the_loop(self, examined: MemoryResult) -> None:
        below, _ = matched_plans(CONFIG.schedule)
        shuffled = below.reordered(np.random.default_rng(0).permutation(len(below)).tolist())
        a, b = (exposure(p, task=TASK, seed=0, batch_size=8) for p in (below, shuffled))
        assert a.multiset_hash == b.multiset_hash
        assert a.order_hash != b.order_hash
        table = examined.study.table("shuffled")
        ends = table[table["relaxation"] == 0]
        assert len(ends) == len(ends["margin"].unique()) == 3 * 3

    def test_replicates_see_other_batches(self, examined: MemoryResult) -> None:
        table = examined.replicates()
        assert (table["loops_per_seed"] == 2).all()
        assert (table["sd_within"] > 0.0).all()

    def test_distances_in_and_out_of_the_drift_make_up_the_whole(
        self, examined: MemoryResult
    ) -> None:
        table = examined.study.table("distances")
        parts = table["in_drift"] ** 2 + table["out_of_drift"] ** 2
        np.testing.assert_allclose(parts, table["distance"] ** 2, rtol=1e-9)
        assert (table["in_drift"] > 0.0).all()

    def test_parts_agree_with_the_margins_of_the_study(self, examined: MemoryResult) -> None:
        hidden = examined.hidden().set_index(["place", "quantity"])
        gaps = examined.study.gaps().set_index("relaxation")
        assert hidden.loc[("relaxed", "margin"), "estimate"] == pytest.approx(
            gaps.loc[10, "gap"], abs=1e-5
        )
        matched = examined.matched()["gap"].mean()
        assert hidden.loc[("matched", "margin"), "estimate"] == pytest.approx(matched, abs=1e-5)

    def test_a_second_call_changes_nothing(self, examined: MemoryResult) -> None:
        folder = examined.study.folder.path
        before = results_in(folder)
        assert examine_memory(folder).effects().equals(examined.effects())
        assert results_in(folder) == before
        assert load_memory(folder).complete
        assert load_study(folder).folder.complete

    def test_sgd_has_no_second_moment_to_reset(self, tmp_path: Path) -> None:
        config = CONFIG.model_dump() | {"optimizer": {"name": "sgd", "batch_size": 8}}
        run_study(type(CONFIG).from_dict(config), tmp_path / "run")
        effects = examine_memory(tmp_path / "run").effects()
        assert set(effects["effect"]) == {
            *("gap", "weights", "state", "interaction", "weights, anchor", "weights, reset")
        }


class TestKilled:
    def test_ends_as_it_would_have(self, finished: Path, examined: MemoryResult) -> None:
        expected = results_in(examined.study.folder.path)
        whole = finished.with_name("whole")
        shutil.copytree(finished, whole)
        log = whole.with_name("whole.log")
        assert run_command("memory", whole, log=log) == 0, log.read_text()
        assert results_in(whole) == expected
        n_writes = len(writes_of(log))
        for write in range(0, n_writes, 4):
            folder = finished.with_name(f"killed {write}")
            shutil.copytree(finished, folder)
            stop = Stop(write, MOMENTS[write % 3])
            assert run_command("memory", folder, log=log, stop=stop) == -9
            assert run_command("memory", folder, log=log) == 0, log.read_text()
            assert results_in(folder) == expected, write


class TestRefuses:
    def test_a_study_that_is_not_complete(self, finished: Path, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        shutil.copytree(finished, folder)
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
        answer = command("memory", folder)
        assert answer.code == 2
        assert "is not complete: tl-hysteresis resume" in answer.err

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"schedule": {"same_order": True}}, "schedule.same_order = true: both branches took"),
            ({"seeds": [4]}, r"seeds = \[4\]: intervals and sign-flip tests"),
        ],
    )
    def test_a_study_that_cannot_answer(
        self, tmp_path: Path, changes: dict[str, object], message: str
    ) -> None:
        run_study(tiny_config(measurement={"circuits": False}, **changes), tmp_path / "run")
        before = results_in(tmp_path / "run")
        with pytest.raises(HysteresisError, match=message):
            examine_memory(tmp_path / "run")
        assert results_in(tmp_path / "run") == before

    def test_another_version_of_the_program(self, finished: Path, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        shutil.copytree(finished, folder)
        manifest = folder / "manifest.json"
        source = load_study(folder).folder.manifest["versions"]["source"]
        manifest.write_text(manifest.read_text().replace(source, "0" * 64))
        with pytest.raises(HysteresisError, match="another version of this program's source"):
            examine_memory(folder)
