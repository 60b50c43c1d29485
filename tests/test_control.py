"""Loops that move another scalar of training than the mixture, and tasks of one's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_config
from own_task import FirstToken

from tl_hysteresis.config import (
    AdamConfig,
    AdamWConfig,
    ModelConfig,
    OptimizerConfig,
    SGDConfig,
    StudyConfig,
)
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.factory import make_task
from tl_hysteresis.memory import examine_memory
from tl_hysteresis.models import hooked_config
from tl_hysteresis.schedules import Plan, constant_plan, matched_plans, verify_matched
from tl_hysteresis.study import resume_study, run_study
from tl_hysteresis.tasks import (
    AssociativeRecall,
    draw,
    labelled_batch,
    with_parameter,
)
from tl_hysteresis.training import Population, train

TASK = AssociativeRecall(n_keys=6, n_values=8, n_pairs=3)
SMALL = hooked_config(
    ModelConfig(n_layers=1, n_heads=2, d_model=16, d_mlp=16), d_vocab=TASK.d_vocab, n_ctx=TASK.n_ctx
)
OWN: dict[str, Any] = {
    "name": "custom",
    "factory": "own_task:FirstToken",
    "parameters": {"n_tokens": 8, "rare": 0.5},
}
OPTIMIZERS = [kind(batch_size=8, weight_decay=0.1) for kind in (AdamWConfig, AdamConfig, SGDConfig)]


def own_config(**schedule: Any) -> StudyConfig:
    settings = tiny_config().model_dump()
    return StudyConfig.from_dict(
        settings | {"task": OWN, "schedule": settings["schedule"] | schedule}
    )


class TestTraining:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
    @pytest.mark.parametrize("name", ["learning_rate", "weight_decay"])
    def test_a_moved_setting_is_that_setting(self, optimizer: OptimizerConfig, name: str) -> None:
        """Held at a value, it trains as an optimizer with that value does; its neighbour as own."""
        value = 0.02
        plan = constant_plan(5, 0.5, stream="test")
        moved = Plan(plan.stream, plan.indices, plan.mixtures, parameter=name, values=(value,) * 5)
        pair = Population.build(SMALL, optimizer, seeds=[0, 0])
        train(pair, TASK, [moved, plan], seeds=[0, 0])
        for member, settings in enumerate([optimizer.model_copy(update={name: value}), optimizer]):
            alone = Population.build(SMALL, settings, seeds=[0, 0])
            train(alone, TASK, [plan, plan], seeds=[0, 0])
            torch.testing.assert_close(
                pair.parameters[member], alone.parameters[0], atol=1e-5, rtol=0.0
            )

    def test_a_learning_rate_that_changes_steps_as_torch_does(self) -> None:
        rates = (1e-3, 5e-3, 2e-3, 1e-2)
        plan = Plan("test", (0, 1, 2, 3), (0.5,) * 4, parameter="learning_rate", values=rates)
        population = Population.build(SMALL, SGDConfig(batch_size=8), seeds=[0])
        model = population.model(0)
        theirs = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        train(population, TASK, [plan], seeds=[0])
        for update, rate in enumerate(rates):
            theirs.param_groups[0]["lr"] = rate
            batch = plan.batch(update, task=TASK, seed=0, batch_size=8)
            theirs.zero_grad()
            logits = model(batch.tokens)[:, -1]
            torch.nn.functional.cross_entropy(logits, batch.targets).backward()
            theirs.step()
        expected = population.layout.read(model)
        torch.testing.assert_close(population.parameters[0], expected, atol=1e-5, rtol=0.0)


class TestLabelNoise:
    @pytest.mark.parametrize("noise", [0.0, 0.25, 1.0])
    def test_replaces_its_share_of_targets_and_nothing_else(self, noise: float) -> None:
        where: dict[str, Any] = dict(seed=0, stream="test", index=3, mixture=0.5)
        clean = labelled_batch(TASK, 4000, **where)
        noisy = labelled_batch(TASK, 4000, noise=noise, **where)
        assert torch.equal(noisy.tokens, clean.tokens)
        assert torch.equal(noisy.contextual, clean.contextual)
        changed = (noisy.targets != clean.targets).double().mean().item()
        # One in d_vocab of the tokens drawn is the target that it replaces.
        expected = noise * (1 - 1 / TASK.d_vocab)
        assert changed == pytest.approx(expected, abs=4 * np.sqrt(noise / TASK.d_vocab / 4000))
        if noise == 1.0:
            assert set(noisy.targets.tolist()) == set(range(TASK.d_vocab))

    def test_is_refused_beyond_one(self) -> None:
        with pytest.raises(HysteresisError, match=r"noise = 1.5: a probability lies in \[0, 1\]"):
            labelled_batch(TASK, 4, seed=0, stream="test", index=0, mixture=0.5, noise=1.5)


LOOPS: list[dict[str, Any]] = [
    {"schedule": {"parameter": "learning_rate", "delta": 5e-4}},
    {"schedule": {"parameter": "weight_decay", "delta": 0.1}, "optimizer": {"weight_decay": 0.2}},
    {"schedule": {"parameter": "label_noise", "delta": 0.1, "label_noise": 0.1}},
]


class TestStudies:
    @pytest.mark.parametrize("changes", LOOPS, ids=lambda c: c["schedule"]["parameter"])
    def test_move_other_scalars(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        config = tiny_config(relaxation={"measure_at": [0, 8]}, **changes)
        result = run_study(config, tmp_path / "run")
        loop, delta = result.table("loop"), config.schedule.delta
        assert (loop["mixture"] == 0.5).all()
        levels = np.array([0.0, 0.0, 0.5, 0.0, -0.5, 0.0]) * 2 * delta + config.centre
        below = loop[(loop["branch"] == "below") & (loop["seed"] == 0)]["control"]
        np.testing.assert_allclose(below, levels)
        assert (result.curve()["gap"] != 0.0).any()
        matching = result.table("matching")
        assert set(matching["parameter"]) == {config.schedule.parameter}
        np.testing.assert_allclose(matching["mean_control"], config.centre)
        assert examine_memory(tmp_path / "run").complete

    def test_move_a_parameter_of_a_task_of_ones_own(self, tmp_path: Path) -> None:
        config = own_config(parameter="task.rare", delta=0.4)
        result = run_study(config, tmp_path / "run")
        assert result.task == FirstToken(rare=0.5)
        below, above = matched_plans(config.schedule, centre=config.centre)
        share = [
            (below.batch(u, task=result.task, seed=0, batch_size=500).tokens[:, 0] == 0)
            for u in range(len(below))
        ]
        shares = np.array([each.double().mean().item() for each in share])
        expected = np.array(below.control) + (1 - np.array(below.control)) / 8
        np.testing.assert_allclose(shares, expected, atol=0.1)
        matching = verify_matched(below, above, task=result.task, seed=0, batch_size=8)
        assert matching.matched
        assert result.routes()["topology"].between(-1.0, 1.0).all()
        assert resume_study(tmp_path / "run").curve().equals(result.curve())

    def test_same_order_controls_have_no_gap_whatever_is_moved(self, tmp_path: Path) -> None:
        schedule = {"parameter": "learning_rate", "delta": 5e-4, "same_order": True}
        result = run_study(tiny_config(schedule=schedule), tmp_path / "run")
        assert (result.curve()["gap"] == 0.0).all()


class TestPlans:
    def test_another_parameter_needs_its_centre(self) -> None:
        schedule = tiny_config(schedule={"parameter": "learning_rate", "delta": 5e-4}).schedule
        with pytest.raises(HysteresisError, match="a loop that moves learning_rate needs its cent"):
            matched_plans(schedule)

    def test_values_stand_beside_mixtures_only_where_they_are_moved(self) -> None:
        with pytest.raises(HysteresisError, match="moves learning_rate has 1 values of it"):
            Plan("test", (0, 1), (0.5, 0.5), parameter="learning_rate", values=(1.0,))
        with pytest.raises(HysteresisError, match="moves mixture has 2 values of it"):
            Plan("test", (0, 1), (0.5, 0.5), values=(1.0, 1.0))

    def test_other_values_do_not_match(self) -> None:
        below, above = (
            Plan("test", (0, 1), (0.5, 0.5), parameter="weight_decay", values=values)
            for values in ((0.1, 0.2), (0.3, 0.1))
        )
        where: dict[str, Any] = dict(task=TASK, seed=0, batch_size=4)
        assert verify_matched(below, above, **where).differences == ("the values of weight_decay",)
        mixture = Plan("test", (1, 0), (0.5, 0.5))
        found = verify_matched(below, mixture, **where).differences
        assert found == ("what is moved: weight_decay below, mixture above",)

    def test_the_same_values_in_the_same_order_are_no_pair(self) -> None:
        plan = Plan("test", (0, 1), (0.5, 0.5), parameter="weight_decay", values=(0.1, 0.2))
        turned = plan.reordered([1, 0])
        where: dict[str, Any] = dict(task=TASK, seed=0, batch_size=4)
        assert verify_matched(plan, turned, **where).matched
        assert not verify_matched(plan, plan, **where).matched

    @pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 2, 3]])
    def test_an_order_takes_every_update_once(self, order: list[int]) -> None:
        with pytest.raises(HysteresisError, match="not an order of 3 updates"):
            constant_plan(3, 0.5, stream="test").reordered(order)

    def test_the_beginning_of_a_plan(self) -> None:
        plan = Plan("test", (3, 4, 5), (0.5, 0.6, 0.7))
        assert plan.first(2) == Plan("test", (3, 4), (0.5, 0.6))
        for updates in (0, 4):
            with pytest.raises(HysteresisError, match=f"the first {updates} of 3 updates"):
                plan.first(updates)


class TestTasksOfOnesOwn:
    @pytest.mark.parametrize(
        ("task", "message"),
        [
            ({"factory": "no_such_module:Task"}, "ModuleNotFoundError: No module named 'no_such"),
            ({"factory": "own_task:Missing"}, "AttributeError: module 'own_task' has no attribute"),
            ({"factory": "own_task:broken", "parameters": {"a": 1}}, "ValueError: cannot make it"),
            ({"factory": "own_task:no_task"}, "made str, which is no task: it has no d_vocab, n_c"),
            ({"factory": "own_task:FirstToken", "parameters": {"x": 1}}, "TypeError: FirstToken"),
        ],
    )
    def test_are_refused_where_they_cannot_be_made(
        self, tmp_path: Path, task: dict[str, Any], message: str
    ) -> None:
        config = StudyConfig.from_dict(
            tiny_config().model_dump() | {"task": {"name": "custom", **task}}
        )
        with pytest.raises(HysteresisError, match=message):
            run_study(config, tmp_path / "run")
        assert not (tmp_path / "run" / "tables").exists()

    def test_a_parameter_that_changes_the_shape_is_refused(self) -> None:
        with pytest.raises(HysteresisError, match=r"n_tokens = 9.0 changes \(d_voc"):
            with_parameter(FirstToken(), "n_tokens", 9.0)
        with pytest.raises(HysteresisError, match="FirstToken has no parameter 'common'"):
            with_parameter(FirstToken(), "common", 0.5)

    def test_a_task_may_say_itself_how_a_parameter_is_moved(self) -> None:
        class Own(FirstToken):
            def with_parameter(self, name: str, value: float) -> FirstToken:
                assert name == "common"
                return FirstToken(rare=1 - value)

        assert with_parameter(Own(), "common", 0.25) == FirstToken(rare=0.75)
        assert draw(make_task(own_config().task), 3, seed=0, stream="s", index=0).tokens.shape == (
            3,
            4,
        )
