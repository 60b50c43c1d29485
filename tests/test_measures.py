"""Margins and losses against hand-computed answers, a plain loop, and Gibbs's inequality."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.measures import behaviour, entropy_floor, last_position, logit_margin
from tl_hysteresis.tasks import AssociativeRecall, Trials, draw_conflict

TASK = AssociativeRecall(n_keys=4, n_values=6, n_pairs=3)
TRIALS = draw_conflict(TASK, 40, seed=0, stream="evaluation")
NEVER = -100.0  # a logit whose probability is nothing, in single precision

unhurried = settings(deadline=None, max_examples=60)
mixtures = st.floats(0, 1)


def trials_with(contextual: list[int], fixed: list[int]) -> Trials:
    """Trials of which only the answers matter."""
    tokens = torch.zeros(len(contextual), 3, dtype=torch.long)
    return Trials(tokens, torch.tensor(contextual), torch.tensor(fixed))


def random_logits(seed: int, scale: float = 1.0) -> Tensor:
    rng = np.random.default_rng(seed)
    shape = (len(TRIALS), TASK.n_ctx, TASK.d_vocab)
    return torch.from_numpy(scale * rng.normal(size=shape)).float()


def calibrated_logits(mixture: float) -> Tensor:
    """Log-probabilities of the targets that the mixture draws."""
    logits = torch.full((len(TRIALS), TASK.d_vocab), NEVER)
    for trial in range(len(TRIALS)):
        for answer, p in ((TRIALS.contextual, mixture), (TRIALS.fixed, 1.0 - mixture)):
            logits[trial, answer[trial]] = math.log(p) if p > 0.0 else NEVER
    return logits


class TestMargin:
    def test_by_hand(self) -> None:
        logits = torch.tensor([[0.0, 1.0, 2.0, 4.0], [0.5, 0.0, -1.0, 8.0]])
        margin = logit_margin(logits, trials_with([3, 2], [1, 0]))
        assert margin.tolist() == [3.0, -1.5]

    @given(st.integers(0, 1000))
    @unhurried
    def test_a_plain_loop(self, seed: int) -> None:
        logits = random_logits(seed)
        expected = []
        for trial in range(len(TRIALS)):
            answers = int(TRIALS.contextual[trial]), int(TRIALS.fixed[trial])
            contextual, fixed = (logits[trial, -1, answer] for answer in answers)
            expected.append(contextual - fixed)
        assert torch.equal(logit_margin(logits, TRIALS), torch.stack(expected))

    def test_only_the_last_position_counts(self) -> None:
        logits = random_logits(0)
        elsewhere = logits.clone()
        elsewhere[:, :-1] = math.nan
        assert torch.equal(last_position(elsewhere), logits[:, -1])
        expected = logit_margin(logits[:, -1], TRIALS)
        assert torch.equal(logit_margin(elsewhere, TRIALS), expected)

    def test_it_is_the_log_odds_of_the_two_answers(self) -> None:
        logits = random_logits(1)
        probability = logits[:, -1].softmax(dim=-1).numpy()
        rows = np.arange(len(TRIALS))
        odds = probability[rows, TRIALS.contextual] / probability[rows, TRIALS.fixed]
        assert logit_margin(logits, TRIALS).numpy() == pytest.approx(np.log(odds), abs=1e-5)

    def test_exchanging_the_answers_turns_its_sign(self) -> None:
        logits = random_logits(2)
        exchanged = Trials(TRIALS.tokens, TRIALS.fixed, TRIALS.contextual)
        assert torch.equal(logit_margin(logits, exchanged), -logit_margin(logits, TRIALS))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_value_that_is_not_finite_names_its_trial(self, bad: float) -> None:
        logits = torch.zeros(3, 4)
        logits[1, 0] = bad
        with pytest.raises(HysteresisError, match="logits of trial 1 are not finite"):
            logit_margin(logits, trials_with([1, 1, 1], [2, 2, 2]))

    @pytest.mark.parametrize("n", [0, 1, 3])
    def test_another_number_of_trials(self, n: int) -> None:
        with pytest.raises(HysteresisError, match=f"logits of {n} trials, but 2 trials"):
            logit_margin(torch.zeros(n, 4), trials_with([1, 1], [2, 2]))

    @pytest.mark.parametrize(
        ("contextual", "fixed", "named"),
        [([1, 4], [2, 2], "contextual answer 4"), ([1, 1], [7, 2], "fixed answer 7")],
    )
    def test_an_answer_outside_the_vocabulary(
        self, contextual: list[int], fixed: list[int], named: str
    ) -> None:
        with pytest.raises(HysteresisError, match=f"{named} .* vocabulary of 4 tokens"):
            logit_margin(torch.zeros(2, 4), trials_with(contextual, fixed))


class TestBehaviour:
    @given(mixtures)
    @unhurried
    def test_calibrated_logits_reach_the_floor(self, mixture: float) -> None:
        found = behaviour(calibrated_logits(mixture), TRIALS, mixture=mixture)
        assert found.loss == pytest.approx(found.floor, abs=1e-5)
        assert found.contextual == pytest.approx(mixture, abs=1e-6)
        assert found.fixed == pytest.approx(1.0 - mixture, abs=1e-6)
        assert found.answer_share == 1.0
        if 0.01 < mixture < 0.99:
            assert found.margin == pytest.approx(math.log(mixture / (1 - mixture)), abs=1e-5)

    @given(mixtures, st.integers(0, 1000), st.floats(0, 30))
    @unhurried
    def test_no_logits_go_below_the_floor(self, mixture: float, seed: int, scale: float) -> None:
        found = behaviour(random_logits(seed, scale), TRIALS, mixture=mixture)
        assert found.loss >= found.floor - 1e-6
        assert 0.0 <= found.contextual + found.fixed <= 1.0 + 1e-6

    def test_miscalibrated_logits_lie_above_it_by_the_divergence(self) -> None:
        found = behaviour(calibrated_logits(0.8), TRIALS, mixture=0.5)
        divergence = float(stats.entropy([0.5, 0.5], [0.8, 0.2]))
        assert found.loss - found.floor == pytest.approx(divergence, abs=1e-5)

    def test_the_loss_is_the_expected_cross_entropy(self) -> None:
        logits = random_logits(3)
        cross_entropy = torch.nn.functional.cross_entropy
        contextual = cross_entropy(logits[:, -1], TRIALS.contextual).item()
        fixed = cross_entropy(logits[:, -1], TRIALS.fixed).item()
        found = behaviour(logits, TRIALS, mixture=0.3)
        assert found.loss == pytest.approx(0.3 * contextual + 0.7 * fixed, abs=1e-5)

    def test_the_answer_share_by_hand(self) -> None:
        # Greedy answers: the contextual one, the fixed one, and twice another token.
        logits = torch.eye(5)[[1, 2, 3, 0]]
        found = behaviour(logits, trials_with([1, 1, 1, 1], [2, 2, 2, 2]), mixture=0.5)
        assert found.answer_share == 0.5
        assert found.margin == 0.0

    def test_all_positions_or_the_last(self) -> None:
        logits = random_logits(4)
        expected = behaviour(logits[:, -1], TRIALS, mixture=0.5)
        assert behaviour(logits, TRIALS, mixture=0.5) == expected

    def test_no_trials(self) -> None:
        empty = TRIALS.select(slice(0))
        with pytest.raises(HysteresisError, match="no trials"):
            behaviour(torch.zeros(0, TASK.d_vocab), empty, mixture=0.5)

    def test_congruent_trials_are_counted_and_refused(self) -> None:
        with pytest.raises(HysteresisError, match="2 of 3 trials are congruent"):
            behaviour(torch.zeros(3, 4), trials_with([1, 2, 3], [1, 2, 0]), mixture=0.5)

    @pytest.mark.parametrize("mixture", [-0.1, 1.1, math.nan])
    def test_a_mixture_that_is_no_probability(self, mixture: float) -> None:
        with pytest.raises(HysteresisError, match=rf"in \[0, 1\]; found {mixture}"):
            behaviour(random_logits(0), TRIALS, mixture=mixture)

    def test_it_refuses_what_the_margin_refuses(self) -> None:
        with pytest.raises(HysteresisError, match="trial 0 are not finite"):
            behaviour(torch.full((1, 4), math.nan), trials_with([1], [2]), mixture=0.5)
        with pytest.raises(HysteresisError, match="fixed answer 9"):
            behaviour(torch.zeros(1, 4), trials_with([1], [9]), mixture=0.5)
        with pytest.raises(HysteresisError, match="logits of 2 trials"):
            behaviour(torch.zeros(2, 4), trials_with([1], [2]), mixture=0.5)


class TestEntropyFloor:
    @given(mixtures)
    @unhurried
    def test_scipy(self, mixture: float) -> None:
        expected = float(stats.entropy([mixture, 1.0 - mixture]))
        assert entropy_floor(mixture) == pytest.approx(expected, abs=1e-12)

    def test_by_hand(self) -> None:
        assert entropy_floor(0.5) == pytest.approx(math.log(2))
        assert entropy_floor(0.0) == entropy_floor(1.0) == 0.0

    @pytest.mark.parametrize("mixture", [-1e-9, 1.0000001, math.nan, math.inf])
    def test_no_probability(self, mixture: float) -> None:
        with pytest.raises(HysteresisError, match=r"a probability, in \[0, 1\]"):
            entropy_floor(mixture)
