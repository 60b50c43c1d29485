"""Plans against levels written by hand, and the proof of matching against a slow count."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_hysteresis.config import ScheduleConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.schedules import (
    Exposure,
    Matching,
    Plan,
    constant_plan,
    exposure,
    matched_plans,
    verify_matched,
)
from tl_hysteresis.tasks import AssociativeRecall, generator

TASK = AssociativeRecall(n_keys=6, n_values=8, n_pairs=3)
SEED = 3
BATCH_SIZE = 8

unhurried = settings(deadline=None, max_examples=30)


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleConfig:
    p0 = draw(st.floats(0.1, 0.9))
    # Half heights below 1e-9 are lost where mixtures are rounded to twelve decimals.
    return ScheduleConfig(
        shape=draw(st.sampled_from(["staircase", "smooth"])),
        p0=p0,
        delta=draw(st.floats(1e-9, min(p0, 1.0 - p0) * 0.999)),
        steps=4 * draw(st.integers(1, 5)),
        dwell=draw(st.integers(1, 6)),
    )


def compare(below: Plan, above: Plan) -> Matching:
    return verify_matched(below, above, task=TASK, seed=SEED, batch_size=BATCH_SIZE)


def expose(plan: Plan) -> Exposure:
    return exposure(plan, task=TASK, seed=SEED, batch_size=BATCH_SIZE)


def examples_of(plan: Plan) -> list[tuple[int, ...]]:
    """Every labelled example of a plan in order, one at a time: tokens, target, rule."""
    examples = []
    for update in range(len(plan)):
        batch = plan.batch(update, task=TASK, seed=SEED, batch_size=BATCH_SIZE)
        for trial in range(BATCH_SIZE):
            tokens = batch.tokens[trial].tolist()
            examples.append((*tokens, int(batch.targets[trial]), int(batch.contextual[trial])))
    return examples


def small_pair() -> tuple[Plan, Plan]:
    return matched_plans(ScheduleConfig(steps=4, dwell=2))


def change(
    plan: Plan, update: int, *, index: int | None = None, mixture: float | None = None
) -> Plan:
    """The plan with another batch or another mixture at one update."""
    indices, mixtures = list(plan.indices), list(plan.mixtures)
    if index is not None:
        indices[update] = index
    if mixture is not None:
        mixtures[update] = mixture
    return Plan(plan.stream, tuple(indices), tuple(mixtures))


def one_coin(plan: Plan, update: int, *, up: bool) -> float:
    """A mixture at which exactly one target of this update follows the other rule than planned."""
    coins = np.sort(
        generator(SEED, f"{plan.stream}/coins", plan.indices[update]).random(BATCH_SIZE)
    )
    n_contextual = int((coins < plan.mixtures[update]).sum())
    edges = [0.0, *coins.tolist(), 1.0]  # k targets are contextual between edges k and k + 1
    wanted = n_contextual + (1 if up else -1)
    return float(edges[wanted] + edges[wanted + 1]) / 2


class TestStaircase:
    def test_levels_by_hand(self) -> None:
        schedule = ScheduleConfig(p0=0.5, delta=0.2, steps=8, dwell=2)
        below, above = matched_plans(schedule)
        levels = [0.5, 0.6, 0.7, 0.6, 0.5, 0.4, 0.3, 0.4, 0.5]
        assert list(below.mixtures) == [level for level in levels for _ in range(2)]
        assert list(below.indices) == list(range(18))
        assert list(above.indices) == list(reversed(range(18)))

    def test_the_default_has_17_levels_of_14_updates(self) -> None:
        below, _ = matched_plans(ScheduleConfig())
        levels = np.array(below.mixtures).reshape(17, 14)
        assert (levels == levels[:, :1]).all()
        expected = 0.5 + 0.05 * np.array([0, 1, 2, 3, 4, 3, 2, 1, 0, -1, -2, -3, -4, -3, -2, -1, 0])
        assert levels[:, 0] == pytest.approx(expected, abs=1e-12)

    @given(schedules())
    @unhurried
    def test_each_level_is_dwelt_on_and_the_ends_are_p0(self, schedule: ScheduleConfig) -> None:
        schedule = schedule.model_copy(update={"shape": "staircase"})
        below, _ = matched_plans(schedule)
        levels = np.array(below.mixtures).reshape(schedule.steps + 1, schedule.dwell)
        assert (levels == levels[:, :1]).all()
        first, quarter = levels[:, 0], schedule.steps // 4
        assert first[[0, 2 * quarter, -1]] == pytest.approx([schedule.p0] * 3, abs=1e-11)
        assert first[quarter] == pytest.approx(schedule.p0 + schedule.delta, abs=1e-11)
        assert first[3 * quarter] == pytest.approx(schedule.p0 - schedule.delta, abs=1e-11)

    @pytest.mark.parametrize("steps", [4, 8, 12, 16, 20, 28, 40])
    @pytest.mark.parametrize("delta", [0.05, 0.1, 0.2, 0.3])
    def test_a_level_has_one_value_on_the_way_up_and_on_the_way_down(
        self, steps: int, delta: float
    ) -> None:
        below, _ = matched_plans(ScheduleConfig(delta=delta, steps=steps, dwell=1))
        upper, lower = below.mixtures[: steps // 2 + 1], below.mixtures[steps // 2 :]
        assert upper == upper[::-1]
        assert lower == lower[::-1]
        assert len(set(below.mixtures)) == steps // 2 + 1


class TestSmooth:
    @pytest.mark.parametrize("dwell", [1, 2, 13, 14])
    def test_it_takes_as_many_updates_as_the_staircase(self, dwell: int) -> None:
        lengths = {
            len(matched_plans(ScheduleConfig(shape=shape, dwell=dwell))[0])
            for shape in ("staircase", "smooth")
        }
        assert lengths == {17 * dwell}

    def test_by_hand(self) -> None:
        # Five levels of one update make both shapes the same.
        below, _ = matched_plans(ScheduleConfig(shape="smooth", steps=4, dwell=1))
        assert below.mixtures == (0.5, 0.7, 0.5, 0.3, 0.5)

    def test_the_extremes_are_reached_where_the_grid_holds_them(self) -> None:
        # 85 updates: their phases are 0/84, ..., 21/84 = 1/4, ..., 84/84.
        below, _ = matched_plans(ScheduleConfig(shape="smooth", steps=16, dwell=5))
        assert below.mixtures[21] == max(below.mixtures) == 0.7
        assert below.mixtures[63] == min(below.mixtures) == 0.3

    @given(schedules())
    @unhurried
    def test_it_is_antisymmetric_around_p0_and_of_even_speed(
        self, schedule: ScheduleConfig
    ) -> None:
        below, _ = matched_plans(schedule.model_copy(update={"shape": "smooth"}))
        height = np.array(below.mixtures) - schedule.p0
        assert height + height[::-1] == pytest.approx(np.zeros(len(below)), abs=1e-11)
        assert height[[0, -1]] == pytest.approx([0.0, 0.0], abs=1e-11)
        assert np.abs(height).max() <= schedule.delta + 1e-11
        step = 4 * schedule.delta / (len(below) - 1)
        assert np.abs(np.diff(height)).max() <= step + 1e-11
        assert np.diff(height)[0] == pytest.approx(step, abs=1e-11)


class TestBranches:
    @given(schedules())
    @unhurried
    def test_above_is_below_read_backwards(self, schedule: ScheduleConfig) -> None:
        below, above = matched_plans(schedule, stream="sweep")
        assert below.stream == above.stream == "sweep"
        assert below.indices == tuple(range(len(below)))
        assert above.indices == below.indices[::-1]
        assert above.mixtures == below.mixtures[::-1]
        assert above.reversed() == below

    @pytest.mark.parametrize("shape", ["staircase", "smooth"])
    def test_from_below_goes_up_first_and_arrives_from_low_mixtures(self, shape: str) -> None:
        below, above = matched_plans(ScheduleConfig.model_validate({"shape": shape}))
        half = len(below) // 2
        assert np.mean(below.mixtures[:half]) > 0.5 > np.mean(below.mixtures[half:])
        assert np.mean(above.mixtures[:half]) < 0.5 < np.mean(above.mixtures[half:])


class TestExposure:
    @given(schedules())
    @unhurried
    def test_a_slow_count(self, schedule: ScheduleConfig) -> None:
        plan, _ = matched_plans(schedule)
        found, examples = expose(plan), examples_of(plan)
        assert (found.updates, found.examples) == (len(plan), len(examples))
        assert found.contextual_targets == sum(contextual for *_, contextual in examples)
        assert found.fixed_targets == len(examples) - found.contextual_targets
        assert found.mean_mixture == pytest.approx(math.fsum(plan.mixtures) / len(plan))

    def test_by_hand(self) -> None:
        found = expose(Plan("loop", (0, 1, 2, 2), (0.0, 1.0, 1.0, 1.0)))
        assert (found.updates, found.examples) == (4, 32)
        assert (found.contextual_targets, found.fixed_targets) == (24, 8)
        assert found.mean_mixture == 0.75

    @given(
        st.lists(st.integers(0, 3), min_size=4, max_size=4),
        st.lists(st.integers(0, 3), min_size=4, max_size=4),
    )
    @unhurried
    def test_the_hashes_are_equal_just_when_the_examples_are(
        self, first: list[int], second: list[int]
    ) -> None:
        plans = [Plan("loop", tuple(indices), (0.5,) * 4) for indices in (first, second)]
        a, b = (expose(plan) for plan in plans)
        listed = [examples_of(plan) for plan in plans]
        assert (a.order_hash == b.order_hash) == (listed[0] == listed[1])
        assert (a.multiset_hash == b.multiset_hash) == (Counter(listed[0]) == Counter(listed[1]))


class TestMatching:
    @given(schedules(), st.integers(0, 10**6))
    @unhurried
    def test_every_pair_of_branches_matches(self, schedule: ScheduleConfig, seed: int) -> None:
        below, above = matched_plans(schedule)
        found = verify_matched(below, above, task=TASK, seed=seed, batch_size=BATCH_SIZE)
        assert found.matched and found.differences == ()
        assert found.below.multiset_hash == found.above.multiset_hash
        assert found.below.order_hash != found.above.order_hash
        assert found.below.mean_mixture == pytest.approx(found.above.mean_mixture)

    def test_the_same_order_twice(self) -> None:
        below, _ = small_pair()
        found = compare(below, below)
        assert not found.matched
        assert found.differences == ("the order of training is the same in both branches",)

    @pytest.mark.parametrize("up", [True, False])
    def test_one_relabelled_example(self, up: bool) -> None:
        below, above = small_pair()
        altered = change(above, 0, mixture=one_coin(above, 0, up=up))
        n = expose(below).contextual_targets
        n_altered = n + (1 if up else -1)
        found = compare(below, altered)
        total = len(below) * BATCH_SIZE
        assert found.differences == (
            f"targets by the contextual rule: {n} below, {n_altered} above",
            f"targets by the fixed rule: {total - n} below, {total - n_altered} above",
            "the multisets of labelled examples",
        )

    def test_two_examples_relabelled_in_opposite_ways(self) -> None:
        # Both counts stay as they were, so that only the examples themselves can tell.
        below, above = small_pair()
        altered = change(above, 0, mixture=one_coin(above, 0, up=True))
        altered = change(altered, 1, mixture=one_coin(altered, 1, up=False))
        assert compare(below, altered).differences == ("the multisets of labelled examples",)

    def test_one_batch_more(self) -> None:
        below, above = small_pair()
        longer = Plan(above.stream, (*above.indices, 10), (*above.mixtures, 0.5))
        differences = compare(below, longer).differences
        assert differences[:2] == (
            "updates: 10 below, 11 above",
            f"labelled examples: {10 * BATCH_SIZE} below, {11 * BATCH_SIZE} above",
        )
        assert "the multisets of labelled examples" in differences

    def test_one_batch_for_another(self) -> None:
        below, above = small_pair()
        swapped = change(above, 4, index=99)
        assert "the multisets of labelled examples" in compare(below, swapped).differences

    def test_one_batch_shown_twice_and_another_never(self) -> None:
        below, above = small_pair()
        repeated = change(above, 0, index=above.indices[1])
        assert "the multisets of labelled examples" in compare(below, repeated).differences

    def test_another_stream(self) -> None:
        below, above = small_pair()
        other = replace(above, stream="another")
        assert "the multisets of labelled examples" in compare(below, other).differences

    def test_two_batches_exchanged_are_another_order_but_no_opposite_path(self) -> None:
        below, _ = small_pair()
        # Updates 0 and 1 have one mixture, so that the order is all that changes.
        exchanged = Plan(below.stream, (1, 0, *below.indices[2:]), below.mixtures)
        assert compare(below, exchanged).differences == (
            "the mixtures above are not those below, last first",
        )


class TestPlan:
    @pytest.mark.parametrize(
        ("indices", "mixtures", "message"),
        [
            ((), (), "a plan of no updates"),
            ((0, 1), (0.5,), "a plan of 2 batches and 1 mixtures"),
            ((0,), (0.5, 0.5), "a plan of 1 batches and 2 mixtures"),
            ((0, 1, 2), (0.5, 0.5, 1.5), r"mixture at update 2 is 1.5: .* \[0, 1\]"),
            ((0, 1), (-0.25, 0.5), "mixture at update 0 is -0.25"),
            ((0, 1), (0.5, math.nan), "mixture at update 1 is nan"),
            ((0,), (1.0000000000000002,), "mixture at update 0 is 1.0000000000000002"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, indices: tuple[int, ...], mixtures: tuple[float, ...], message: str
    ) -> None:
        with pytest.raises(HysteresisError, match=message):
            Plan("loop", indices, mixtures)

    def test_a_constant_plan(self) -> None:
        plan = constant_plan(3, 0.25, stream="anchor")
        assert plan == Plan("anchor", (0, 1, 2), (0.25, 0.25, 0.25))
        with pytest.raises(HysteresisError, match="no updates"):
            constant_plan(0, 0.5, stream="anchor")

    def test_the_batches_are_those_of_its_indices(self) -> None:
        plan = Plan("loop", (7, 2), (1.0, 0.0))
        first, second = (
            plan.batch(update, task=TASK, seed=SEED, batch_size=BATCH_SIZE) for update in (0, 1)
        )
        alone = Plan("loop", (2,), (0.0,)).batch(0, task=TASK, seed=SEED, batch_size=BATCH_SIZE)
        assert second.tokens.tolist() == alone.tokens.tolist()
        assert second.targets.tolist() == alone.targets.tolist()
        assert first.contextual.all() and not second.contextual.any()
        assert first.tokens.tolist() != second.tokens.tolist()
