"""The recall task against its definition, trial by trial, and its laws against scipy's tests."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tl_hysteresis.config import AssociativeRecallConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.factory import make_task
from tl_hysteresis.tasks import (
    AssociativeRecall,
    Batch,
    Task,
    Trials,
    concatenate,
    draw,
    draw_conflict,
    generator,
    labelled_batch,
)

DEFAULT = AssociativeRecall()
SMALL = AssociativeRecall(n_keys=4, n_values=5, n_pairs=3)
CUDA = torch.cuda.is_available()
SMALLEST_P = 1e-4  # seeds are fixed, so a test that passes once passes always

# The smallest tasks are the ones with the least room for a corruption.
tasks = (
    st.tuples(st.integers(2, 6), st.integers(1, 3), st.integers(0, 3))
    .filter(lambda sizes: sizes[1] + sizes[2] >= 2)
    .map(lambda s: AssociativeRecall(n_pairs=s[0], n_keys=s[0] + s[1], n_values=sum(s)))
)
unhurried = settings(deadline=None, max_examples=40)


def pairs(task: AssociativeRecall, tokens: list[int]) -> tuple[list[int], list[int], int]:
    """The keys, the values and the query of one prompt."""
    assert len(tokens) == 2 * task.n_pairs + 1
    return tokens[0:-1:2], tokens[1::2], tokens[-1]


def uniform_p(observed: list[int], n_outcomes: int) -> float:
    """P value of scipy's chi-square test that all outcomes are equally likely."""
    counts = np.bincount(observed, minlength=n_outcomes)
    assert len(counts) == n_outcomes
    return float(stats.chisquare(counts).pvalue)


class TestPrompts:
    @given(tasks, st.integers(0, 10))
    @unhurried
    def test_every_trial_obeys_the_rules(self, task: AssociativeRecall, seed: int) -> None:
        trials = draw(task, 12, seed=seed, stream="prompts", index=seed)
        rule = task.fixed_rule(seed)
        assert trials.roles is not None
        for tokens, contextual, fixed, roles in zip(
            trials.tokens.tolist(),
            trials.contextual.tolist(),
            trials.fixed.tolist(),
            trials.roles.tolist(),
            strict=True,
        ):
            keys, values, query = pairs(task, tokens)
            assert len(set(keys)) == len(keys) and set(keys) <= set(range(task.n_keys))
            assert len(set(values)) == len(values)
            assert set(values) <= set(range(task.n_keys, task.d_vocab))
            assert contextual == dict(zip(keys, values, strict=True))[query]
            assert fixed == rule[query]

            expected = []
            for key in keys:
                matched = "matched" if key == query else "other"
                expected += [f"{matched}_key", f"{matched}_value"]
            assert [task.role_names[role] for role in roles] == [*expected, "query"]

    @pytest.mark.parametrize("task", [DEFAULT, SMALL])
    def test_the_fixed_rule_is_a_permutation_of_its_seed(self, task: AssociativeRecall) -> None:
        rules = [task.fixed_rule(seed).tolist() for seed in range(20)]
        for rule in rules:
            assert len(rule) == len(set(rule)) == task.n_keys
            assert set(rule) <= set(range(task.n_keys, task.d_vocab))
        assert rules == [task.fixed_rule(seed).tolist() for seed in range(20)]

    def test_as_many_values_as_keys_are_all_used_by_the_fixed_rule(self) -> None:
        assert sorted(DEFAULT.fixed_rule(3).tolist()) == list(range(16, 32))

    def test_seeds_have_different_fixed_rules(self) -> None:
        assert len({tuple(DEFAULT.fixed_rule(seed).tolist()) for seed in range(50)}) == 50

    def test_the_fixed_rule_does_not_depend_on_stream_or_index(self) -> None:
        trials = concatenate(
            [
                draw(DEFAULT, 200, seed=4, stream=stream, index=index)
                for stream, index in [("anchor", 0), ("anchor", 1), ("loop", 0)]
            ]
        )
        answers = set(zip(trials.tokens[:, -1].tolist(), trials.fixed.tolist(), strict=True))
        assert len(answers) == DEFAULT.n_keys

    def test_settings_make_the_task(self) -> None:
        made = make_task(AssociativeRecallConfig(n_keys=5, n_values=7, n_pairs=4))
        assert made == AssociativeRecall(n_keys=5, n_values=7, n_pairs=4)
        assert (made.d_vocab, made.n_ctx) == (12, 9)

    @pytest.mark.parametrize(
        ("sizes", "named"),
        [
            ({"n_values": 8}, "n_values = 8"),
            ({"n_pairs": 17}, "n_pairs = 17"),
            ({"n_pairs": 16}, "corruption `key`"),
            ({"n_pairs": 15}, "corruption `value`"),
            ({"n_pairs": 1}, "n_pairs = 1"),
        ],
    )
    def test_impossible_sizes_are_refused(self, sizes: dict[str, int], named: str) -> None:
        with pytest.raises(HysteresisError, match=named):
            AssociativeRecall(**sizes)


class TestSampling:
    def test_a_batch_depends_on_its_place_alone_not_on_what_was_drawn_before(self) -> None:
        places = [(seed, stream, index) for seed in (0, 1) for stream in "ab" for index in (0, 7)]

        def tokens(place: tuple[int, str, int]) -> list[list[int]]:
            seed, stream, index = place
            drawn: list[list[int]] = draw(
                DEFAULT, 5, seed=seed, stream=stream, index=index
            ).tokens.tolist()
            return drawn

        forwards = {place: tokens(place) for place in places}
        torch.manual_seed(1)
        backwards = {place: tokens(place) for place in reversed(places)}
        assert forwards == backwards
        assert len({str(drawn) for drawn in forwards.values()}) == len(places)

    def test_neighbours_share_no_random_numbers(self) -> None:
        # `seed + index` would give (0, 1) and (1, 0) the same numbers.
        drawn = [
            generator(seed, stream, index).random(200)
            for seed in range(4)
            for stream in ("anchor", "anchor/coins", "loop")
            for index in range(4)
        ]
        assert len(np.unique(np.concatenate(drawn))) == 4 * 3 * 4 * 200

    def test_numbers_of_neighbours_are_not_correlated(self) -> None:
        rows = [
            generator(seed, "anchor", index).random(4000) for seed in (0, 1) for index in (0, 1)
        ]
        for i, first in enumerate(rows):
            for second in rows[:i]:
                assert stats.pearsonr(first, second).pvalue > SMALLEST_P


class TestLaws:
    """The marginal laws that the docstring states, on 20,000 trials of one seed."""

    TRIALS = draw(DEFAULT, 20_000, seed=0, stream="laws", index=0)

    @pytest.mark.parametrize("pair", [0, 3, 7])
    def test_keys_and_values_are_uniform_at_every_place(self, pair: int) -> None:
        tokens = self.TRIALS.tokens
        assert uniform_p(tokens[:, 2 * pair].tolist(), 16) > SMALLEST_P
        assert uniform_p((tokens[:, 2 * pair + 1] - 16).tolist(), 16) > SMALLEST_P

    def test_query_key_query_place_and_answer_are_uniform(self) -> None:
        place = self.TRIALS.positions("matched_key").int().argmax(dim=1)
        assert uniform_p((place // 2).tolist(), 8) > SMALLEST_P
        assert uniform_p(self.TRIALS.tokens[:, -1].tolist(), 16) > SMALLEST_P
        assert uniform_p((self.TRIALS.contextual - 16).tolist(), 16) > SMALLEST_P

    def test_the_two_answers_are_independent(self) -> None:
        joint = (self.TRIALS.fixed - 16) * 16 + (self.TRIALS.contextual - 16)
        assert uniform_p(joint.tolist(), 256) > SMALLEST_P

    @pytest.mark.parametrize("task", [DEFAULT, AssociativeRecall(n_keys=6, n_values=9, n_pairs=3)])
    def test_the_rules_agree_by_chance_in_one_trial_in_n_values(
        self, task: AssociativeRecall
    ) -> None:
        trials = draw(task, 20_000, seed=1, stream="laws", index=0)
        congruent = int((~trials.conflict).sum())
        assert stats.binomtest(congruent, 20_000, 1 / task.n_values).pvalue > SMALLEST_P


class TestMixture:
    @staticmethod
    def batch(mixture: float, index: int = 0, n: int = 4000) -> Batch:
        return labelled_batch(DEFAULT, n, seed=2, stream="loop", index=index, mixture=mixture)

    @given(st.floats(0, 1), st.integers(0, 5))
    @unhurried
    def test_inputs_do_not_depend_on_the_mixture(self, mixture: float, index: int) -> None:
        drawn = draw(DEFAULT, 50, seed=2, stream="loop", index=index)
        batch = self.batch(mixture, index, n=50)
        assert torch.equal(batch.tokens, drawn.tokens)
        expected = torch.where(batch.contextual, drawn.contextual, drawn.fixed)
        assert torch.equal(batch.targets, expected)

    def test_between_two_mixtures_targets_change_in_one_direction_only(self) -> None:
        shares = [self.batch(p).contextual for p in (0.0, 0.2, 0.5, 0.50001, 1.0)]
        for low, high in zip(shares, shares[1:], strict=False):
            assert bool((low <= high).all())
        assert not shares[0].any() and shares[-1].all()

    @pytest.mark.parametrize("mixture", [0.02, 0.3, 0.5, 0.7, 0.98])
    def test_the_share_of_contextual_targets_is_the_mixture(self, mixture: float) -> None:
        contextual = int(sum(self.batch(mixture, index).contextual.sum() for index in range(5)))
        assert stats.binomtest(contextual, 5 * 4000, mixture).pvalue > SMALLEST_P

    def test_which_rule_a_target_follows_is_independent_of_the_prompt(self) -> None:
        batch = self.batch(0.5, n=20_000)
        coins = batch.contextual.numpy()
        for position in (0, 1, 14, 15, 16):
            table = stats.contingency.crosstab(coins, batch.tokens[:, position].numpy()).count
            assert stats.chi2_contingency(table).pvalue > SMALLEST_P

    def test_coins_are_not_the_numbers_that_the_prompts_were_drawn_with(self) -> None:
        of_the_prompts = generator(2, "loop", 0).random(4000) < 0.5
        agreeing = int((self.batch(0.5).contextual.numpy() == of_the_prompts).sum())
        assert stats.binomtest(agreeing, 4000, 0.5).pvalue > SMALLEST_P

    def test_stacked_batches_keep_their_examples(self) -> None:
        parts = [self.batch(0.5, index, n=3) for index in (0, 1)]
        stack = Batch.stack(parts).to("cpu")
        assert stack.tokens.shape == (2, 3, 17)
        for member, part in enumerate(parts):
            assert torch.equal(stack.tokens[member], part.tokens)
            assert torch.equal(stack.targets[member], part.targets)
            assert torch.equal(stack.contextual[member], part.contextual)


class TestConflict:
    @pytest.mark.parametrize("n", [1, 7, 500])
    def test_exactly_n_conflict_trials(self, n: int) -> None:
        trials = draw_conflict(SMALL, n, seed=0, stream="evaluation")
        assert len(trials) == n
        assert bool((trials.contextual != trials.fixed).all())

    def test_they_are_the_stream_in_order_without_its_congruent_trials(self) -> None:
        batches = [draw(SMALL, 300, seed=0, stream="evaluation", index=i) for i in (0, 1)]
        expected = [
            tokens
            for batch in batches
            for tokens, conflict in zip(batch.tokens.tolist(), batch.conflict.tolist(), strict=True)
            if conflict
        ]
        trials = draw_conflict(SMALL, 300, seed=0, stream="evaluation")
        assert trials.tokens.tolist() == expected[:300]

    def test_a_task_with_hardly_any_is_refused(self) -> None:
        with pytest.raises(HysteresisError, match="only 0 of 1000 trials .* hardly ever disagree"):
            draw_conflict(CopyTask(shift=0), 10, seed=0, stream="evaluation")


class TestCorruptions:
    @given(tasks, st.sampled_from(["value", "key"]), st.integers(0, 100))
    @unhurried
    def test_only_the_matched_token_changes(
        self, task: AssociativeRecall, corruption: str, seed: int
    ) -> None:
        clean = draw(task, 12, seed=seed, stream="clean", index=0)
        corrupted = task.corrupt(clean, corruption, rng=generator(seed, "corruption", 0))
        changed = corrupted.tokens != clean.tokens
        assert torch.equal(changed, clean.positions(f"matched_{corruption}"))

        new = corrupted.tokens[changed].tolist()
        kind = range(task.n_keys) if corruption == "key" else range(task.n_keys, task.d_vocab)
        for token, prompt, fixed in zip(
            new, clean.tokens.tolist(), clean.fixed.tolist(), strict=True
        ):
            assert token in kind
            assert token not in prompt
            assert corruption == "key" or token != fixed

        assert torch.equal(corrupted.contextual, clean.contextual)
        assert torch.equal(corrupted.fixed, clean.fixed)
        assert clean.roles is not None and corrupted.roles is not None
        assert torch.equal(corrupted.roles, clean.roles)
        assert corrupted.role_names == clean.role_names

    def test_the_clean_trials_are_left_as_they_were(self) -> None:
        clean = draw(SMALL, 50, seed=0, stream="clean", index=0)
        before = clean.tokens.clone()
        SMALL.corrupt(clean, "key", rng=generator(0, "corruption", 0))
        assert torch.equal(clean.tokens, before)

    def test_the_new_token_is_uniform_among_those_allowed(self) -> None:
        clean = draw(DEFAULT, 20_000, seed=0, stream="clean", index=0)
        corrupted = DEFAULT.corrupt(clean, "key", rng=generator(0, "corruption", 0))
        places = []  # of the new key among the eight keys that are not in the prompt
        new_keys = corrupted.tokens[clean.positions("matched_key")].tolist()
        for prompt, new in zip(clean.tokens.tolist(), new_keys, strict=True):
            places.append(sorted(set(range(16)) - set(prompt)).index(new))
        assert uniform_p(places, 8) > SMALLEST_P

    def test_an_unknown_corruption_is_refused(self) -> None:
        clean = draw(SMALL, 2, seed=0, stream="clean", index=0)
        with pytest.raises(HysteresisError, match="no corruption 'query'; there are value, key"):
            SMALL.corrupt(clean, "query", rng=generator(0, "corruption", 0))


@dataclass(frozen=True)
class CopyTask:
    """A user's own task, which knows nothing of this package's classes but `Trials`.

    One token and a query: by the prompt, copy the token; by the weights, add `shift` to it.
    """

    shift: int = 1
    d_vocab: int = 5
    n_ctx: int = 2
    role_names: tuple[str, ...] = ("token", "query")
    corruptions: tuple[str, ...] = ("token",)

    def sample(self, n: int, *, seed: int, rng: np.random.Generator) -> Trials:
        token = torch.from_numpy(rng.integers(4, size=n))
        query = torch.full((n,), 4)
        return Trials(
            tokens=torch.stack([token, query], dim=1),
            contextual=token,
            fixed=(token + self.shift) % 4,
            roles=torch.tensor([[0, 1]]).repeat(n, 1),
            role_names=self.role_names,
        )

    def corrupt(self, trials: Trials, corruption: str, *, rng: np.random.Generator) -> Trials:
        shift = torch.from_numpy(rng.integers(1, 4, size=len(trials)))
        tokens = trials.tokens.clone()
        tokens[:, 0] = (tokens[:, 0] + shift) % 4
        return replace(trials, tokens=tokens)


class TestOwnTask:
    def test_it_is_a_task_without_inheriting(self) -> None:
        assert isinstance(CopyTask(), Task)
        assert isinstance(DEFAULT, Task)
        assert not isinstance("a task", Task)

    def test_it_works_wherever_a_task_does(self) -> None:
        task: Task = CopyTask()
        trials = draw(task, 6, seed=0, stream="own", index=0)
        assert torch.equal(trials.fixed, (trials.contextual + 1) % 4)
        batch = labelled_batch(task, 6, seed=0, stream="own", index=0, mixture=1.0)
        assert torch.equal(batch.tokens, trials.tokens)
        assert torch.equal(batch.targets, trials.contextual)
        assert len(draw_conflict(task, 9, seed=0, stream="own")) == 9
        corrupted = task.corrupt(trials, "token", rng=generator(0, "own/token", 0))
        assert torch.equal(corrupted.tokens != trials.tokens, trials.positions("token"))


def three_trials(*, tokens: list[list[int]] | None = None, **parts: torch.Tensor) -> Trials:
    """Three trials of three positions, with parts of them replaced."""
    whole: dict[str, torch.Tensor] = {
        "tokens": torch.tensor(tokens or [[0, 4, 0], [1, 5, 1], [2, 6, 2]]),
        "contextual": torch.tensor([4, 5, 6]),
        "fixed": torch.tensor([4, 6, 5]),
        "roles": torch.tensor([[1, 2, 0]]).repeat(3, 1),
    }
    return Trials(**whole | parts, role_names=("query", "key", "value"))


class TestTrials:
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (lambda: three_trials(tokens=[[-1, 4, 0]] * 3), "tokens: -1 is not a token id"),
            (
                lambda: three_trials(contextual=torch.tensor([4, 5])),
                r"contextual answers have shape \(2,\); 3 trials need \(3,\)",
            ),
            (
                lambda: three_trials(fixed=torch.tensor([4, 5, 6, 7])),
                r"fixed answers have shape \(4,\); 3 trials need \(3,\)",
            ),
            (
                lambda: three_trials(contextual=torch.tensor([4, -1, 6])),
                "contextual: -1 is not a token id",
            ),
            (
                lambda: three_trials(fixed=torch.tensor([4, 5, -2])),
                "fixed: -2 is not a token id",
            ),
            (
                lambda: three_trials(roles=torch.zeros(3, 2, dtype=torch.long)),
                r"roles have shape \(3, 2\), tokens \(3, 3\)",
            ),
            (
                lambda: three_trials(roles=torch.full((3, 3), 3)),
                "roles run from 3 to 3, but there are 3 role_names",
            ),
            (lambda: three_trials(roles=torch.full((3, 3), -1)), "roles run from -1 to -1"),
        ],
    )
    @pytest.mark.usefixtures("unchecked")
    def test_what_cannot_be_is_refused(self, bad: Callable[[], Trials], message: str) -> None:
        with pytest.raises(HysteresisError, match=message):
            bad()

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize("shape", [(3,), (3, 1, 1)])
    def test_tokens_of_another_rank_are_refused(self, shape: tuple[int, ...]) -> None:
        answers = torch.tensor([0, 0, 0])
        with pytest.raises(HysteresisError, match=r"\[trial, pos\].* found shape \(3,"):
            Trials(torch.zeros(shape, dtype=torch.long), answers, answers)

    def test_conflict(self) -> None:
        assert three_trials().conflict.tolist() == [False, True, True]

    @pytest.mark.parametrize(
        ("which", "expected"),
        [
            (torch.tensor([False, True, True]), [1, 2]),
            (torch.tensor([2, 0]), [2, 0]),
            (slice(2), [0, 1]),
            (slice(0), []),
        ],
    )
    def test_select(self, which: torch.Tensor | slice, expected: list[int]) -> None:
        trials = three_trials()
        chosen = trials.select(which)
        assert trials.roles is not None and chosen.roles is not None
        assert chosen.tokens.tolist() == [trials.tokens[i].tolist() for i in expected]
        assert chosen.contextual.tolist() == [trials.contextual[i].item() for i in expected]
        assert chosen.fixed.tolist() == [trials.fixed[i].item() for i in expected]
        assert chosen.roles.tolist() == [trials.roles[i].tolist() for i in expected]

    @pytest.mark.parametrize(
        "device",
        [
            "cpu",
            pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="there is no GPU")),
        ],
    )
    def test_to_moves_every_part(self, device: str) -> None:
        trials = three_trials()
        moved = trials.to(device)
        assert trials.roles is not None and moved.roles is not None
        for part, old in (
            (moved.tokens, trials.tokens),
            (moved.contextual, trials.contextual),
            (moved.fixed, trials.fixed),
            (moved.roles, trials.roles),
        ):
            assert part.device.type == device
            assert torch.equal(part.cpu(), old)

    def test_trials_without_roles(self) -> None:
        bare = Trials(torch.tensor([[0, 4, 0]]), torch.tensor([4]), torch.tensor([5]))
        assert bare.select(slice(1)).to("cpu").roles is None
        assert concatenate([bare, bare]).roles is None
        with pytest.raises(HysteresisError, match="carry no roles, so none is 'query'"):
            bare.positions("query")

    def test_positions(self) -> None:
        assert three_trials().positions("value").tolist() == [[False, True, False]] * 3
        with pytest.raises(HysteresisError, match="no role 'answer'; there are query, key, value"):
            three_trials().positions("answer")
        with pytest.raises(HysteresisError, match="no position of these trials has the role 'key'"):
            three_trials(roles=torch.zeros(3, 3, dtype=torch.long)).positions("key")

    def test_concatenate_undoes_a_split(self) -> None:
        whole = draw(SMALL, 10, seed=0, stream="whole", index=0)
        joined = concatenate([whole.select(slice(0, 3)), whole.select(slice(3, 10))])
        assert whole.roles is not None and joined.roles is not None
        assert torch.equal(joined.tokens, whole.tokens)
        assert torch.equal(joined.contextual, whole.contextual)
        assert torch.equal(joined.fixed, whole.fixed)
        assert torch.equal(joined.roles, whole.roles)
        assert joined.role_names == whole.role_names

    def test_concatenate_refuses_what_does_not_fit(self) -> None:
        three = three_trials()
        longer = Trials(torch.tensor([[0, 4, 1, 5, 0]]), torch.tensor([4]), torch.tensor([5]))
        with pytest.raises(HysteresisError, match="trials of 5 positions .* 3 positions"):
            concatenate([three, longer])
        bare = Trials(three.tokens, three.contextual, three.fixed, role_names=three.role_names)
        with pytest.raises(HysteresisError, match="3 positions without roles do not follow"):
            concatenate([three, bare])
        other = replace(three, role_names=("query", "key", "answer"))
        with pytest.raises(HysteresisError, match="'answer'.* do not follow .*'value'"):
            concatenate([three, other])


def test_trials_from_lists() -> None:
    roles = ["key", "value", "query"]
    trials = Trials.of([[1, 2, 1], [3, 4, 3]], [2, 4], [5, 5], roles=roles)
    assert trials.tokens.tolist() == [[1, 2, 1], [3, 4, 3]]
    assert trials.tokens.dtype == trials.fixed.dtype == torch.int64
    assert trials.positions("value").tolist() == [[False, True, False]] * 2
    each = Trials.of([[1, 2, 1], [3, 4, 3]], [2, 4], [5, 5], roles=[roles, roles[::-1]])
    assert each.positions("key").tolist() == [[True, False, False], [False, False, True]]
    assert Trials.of(torch.zeros(2, 3, dtype=torch.int32), [2, 4], [5, 5]).roles is None
    pieces = [torch.tensor([1, 2, 1]), torch.tensor([3, 4, 3])]
    assert torch.equal(Trials.of(pieces, [2, 4], [5, 5]).tokens, trials.tokens)
    other = trials.with_tokens(trials.tokens + 1)
    assert other.tokens.tolist() == [[2, 3, 2], [4, 5, 4]]
    assert other.contextual is trials.contextual and other.role_names == tuple(roles)
    assert other.fingerprint != trials.fingerprint
    assert each.fingerprint != trials.fingerprint
    assert trials.select(slice(None)).fingerprint == trials.fingerprint


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2], [1, 2, 3]], [0, 0], [1, 1]), "trial 1 has 3 tokens, trial 0 has 2"),
        (([[0.5, 1.0]], [0], [1]), "tokens are token ids, of torch.int64; found torch.float32"),
        (([[1, 2]], [0, 1], [1]), "contextual answers have shape"),
        (([[1, 2]], [-1], [1]), "-1 is not a token id"),
        ((["ab", "cd"], [0, 0], [1, 1]), "token ids, such as model.to_tokens"),
        (([1, 2], [0, 0], [1, 1]), "prompts are lists of token ids"),
        ((None, [0], [1]), "prompts are lists of token ids"),
        (([[1, 2]], ["a"], [1]), "token ids, such as model.to_tokens"),
    ],
)
def test_prompts_that_make_no_trials_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(HysteresisError, match=message):
        Trials.of(*arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["key"], "roles must name each position"),
        ([["key", "value"]], "roles must name each position"),
        ([], "roles must name each position"),
        ([["a", "b"], ["a"]], "roles must name each position"),
        (torch.zeros(2, 2, dtype=torch.long), "roles are names here"),
        ([0, 1], "roles are names here"),
        ("ab", "roles are names here"),
    ],
)
def test_roles_that_fit_no_position_are_refused(roles: Any, message: str) -> None:
    with pytest.raises(HysteresisError, match=message):
        Trials.of([[1, 2], [3, 4]], [0, 0], [1, 1], roles=roles)


@pytest.mark.usefixtures("unchecked")
def test_role_names_and_indices_that_cannot_be_are_refused() -> None:
    tokens, answers = torch.zeros(1, 3, dtype=torch.long), torch.tensor([1])
    roles = torch.tensor([[0, 1, 1]])
    for names in (("a", "a"), "ab"):
        with pytest.raises(HysteresisError, match="different names, in a tuple"):
            Trials(tokens, answers, answers, roles, names)  # type: ignore[arg-type]
    with pytest.raises(HysteresisError, match="roles are indices of torch.int64, not torch.uint8"):
        Trials(tokens, answers, answers, roles.to(torch.uint8), ("a", "b"))
