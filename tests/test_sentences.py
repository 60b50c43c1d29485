"""The second task, read as sentences: nothing here knows how `sample` lays its prompts out."""

import re
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tl_hysteresis.config import SentenceRecallConfig, StudyConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.factory import make_task
from tl_hysteresis.schedules import matched_plans, verify_matched
from tl_hysteresis.sentences import SentenceRecall
from tl_hysteresis.study import resume_study, run_study
from tl_hysteresis.tasks import Task, Trials, draw, draw_conflict, generator, with_parameter

DEFAULT = SentenceRecall()
SMALL: dict[str, Any] = {
    "name": "sentence_recall",
    "n_names": 5,
    "n_places": 6,
    "max_facts": 2,
    "min_fillers": 2,
    "filler_rate": 0.5,
}
SMALLEST_P = 1e-4  # seeds are fixed, so a test that passes once passes always
FACT = re.compile(r"(\w+) lives in (\w+) \.|in (\w+) lives (\w+) \.")
DATA = Path(__file__).parents[1] / "data"

# The smallest tasks are the ones with the least room for a corruption.
tasks = st.builds(
    lambda facts, more, left, fillers, rate: SentenceRecall(
        n_names=facts + more,
        n_places=facts + more + left,
        max_facts=facts,
        min_fillers=fillers,
        filler_rate=rate,
    ),
    st.integers(2, 5),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 6),
    st.floats(0, 1, exclude_max=True),
)
unhurried = settings(deadline=None, max_examples=40)


def facts_in(prompt: str) -> dict[str, str]:
    """Who lives where, as a reader finds it."""
    found = [(a or d, b or c) for a, b, c, d in FACT.findall(prompt)]
    assert len(dict(found)) == len({place for _, place in found}) == len(found)
    return dict(found)


def prompts(task: SentenceRecall, trials: Trials) -> list[str]:
    return [" ".join(task.to_words(tokens)) for tokens in trials.tokens]


def n_facts(task: SentenceRecall, trials: Trials) -> list[int]:
    return [len(facts_in(prompt)) for prompt in prompts(task, trials)]


class TestPrompts:
    @given(tasks, st.integers(0, 10))
    @unhurried
    def test_a_reader_finds_the_answers(self, task: SentenceRecall, seed: int) -> None:
        trials = draw(task, 12, seed=seed, stream="prompts", index=seed)
        rule = task.fixed_rule(seed)
        names, places = task.vocabulary[: task.n_names], task.vocabulary[task.n_names :]
        assert trials.tokens.shape == (12, 5 * task.max_facts + task.min_fillers + 3)
        for prompt, contextual, fixed in zip(
            prompts(task, trials),
            task.to_words(trials.contextual),
            task.to_words(trials.fixed),
            strict=True,
        ):
            told, query = prompt.rsplit(" where is ", 1)
            facts = facts_in(told)
            assert 1 <= len(facts) <= task.max_facts
            assert set(facts) <= set(names)
            assert set(facts.values()) <= set(places[: task.n_places])
            assert facts[query] == contextual
            assert task.vocabulary[rule[names.index(query)]] == fixed

            rest = FACT.sub("", told).split()
            assert len(rest) == task.min_fillers + 5 * (task.max_facts - len(facts))
            assert set(rest) <= set("also anyway indeed now so then today well".split())

    @given(tasks, st.integers(0, 10))
    @unhurried
    def test_each_role_has_the_words_of_its_kind(self, task: SentenceRecall, seed: int) -> None:
        trials = draw(task, 12, seed=seed, stream="prompts", index=seed)
        assert trials.roles is not None
        for tokens, roles, answer in zip(
            trials.tokens, trials.roles.tolist(), task.to_words(trials.contextual), strict=True
        ):
            words = task.to_words(tokens)
            facts, query = facts_in(" ".join(words)), words[-1]
            found: dict[str, list[str]] = {name: [] for name in task.role_names}
            for word, role in zip(words, roles, strict=True):
                found[task.role_names[role]].append(word)
            others = facts.keys() - {query}
            assert found["query"] == found["matched_name"] == [query]
            assert found["matched_place"] == [answer]
            assert set(found["other_name"]) == others
            assert set(found["other_place"]) == {facts[name] for name in others}
            assert sorted(found["matched_word"]) == [".", "in", "lives"]
            assert sorted(found["other_word"]) == sorted([".", "in", "lives"] * len(others))
            assert found["question"] == ["where", "is"]

    def test_roles_stand_where_their_words_do(self) -> None:
        letters = dict(zip(DEFAULT.role_names, "QNPWnpw-?", strict=True))
        trials = draw(DEFAULT, 200, seed=0, stream="prompts", index=0)
        assert trials.roles is not None
        orders = set()
        for prompt, roles in zip(prompts(DEFAULT, trials), trials.roles.tolist(), strict=True):
            query = prompt.split()[-1]
            order = "NWWPW" if f"{query} lives in" in prompt else "WPWNW"
            drawn = "".join(letters[DEFAULT.role_names[role]] for role in roles)
            assert re.fullmatch(rf"(-|nwwpw|wpwnw)*{order}(-|nwwpw|wpwnw)*\?\?Q", drawn)
            orders.add(order)
        assert orders == {"NWWPW", "WPWNW"}

    def test_settings_make_the_task(self) -> None:
        made = make_task(SentenceRecallConfig(n_names=5, n_places=7, max_facts=4, min_fillers=1))
        assert made == SentenceRecall(n_names=5, n_places=7, max_facts=4, min_fillers=1)
        assert isinstance(made, Task)
        assert (made.d_vocab, made.n_ctx) == (5 + 7 + 8 + 5, 4 * 5 + 1 + 3)
        assert (DEFAULT.d_vocab, DEFAULT.n_ctx) == (45, 21)

    @pytest.mark.parametrize(
        ("bad", "named"),
        [
            ({"n_places": 8}, "n_places = 8 must be at least n_names = 16: the fixed rule"),
            ({"max_facts": 17}, "max_facts = 17 exceeds n_names = 16: the names of a prompt"),
            ({"max_facts": 16}, "max_facts = 16 must be below .*the corruption `name` needs a n"),
            ({"max_facts": 15}, "must be at most n_places - 2 = 14: the corruption `place`"),
            ({"n_names": 2, "max_facts": 1}, "n_names = 2: .*max_facts = 1: "),
            ({"min_fillers": 0}, "task.min_fillers = 0: "),
            ({"filler_rate": 1.0}, "task.filler_rate = 1.0: Input should be less than 1"),
            ({"filler_rate": -0.1}, "task.filler_rate = -0.1: .* greater than or equal to 0"),
            ({"max_facts": 2.0}, "task.max_facts = 2.0: Input should be a valid integer"),
        ],
    )
    @pytest.mark.usefixtures("unchecked")
    def test_impossible_settings_are_refused(self, bad: dict[str, Any], named: str) -> None:
        for make in (SentenceRecall, SentenceRecallConfig):
            with pytest.raises(HysteresisError, match=named):
                make(**bad)


class TestVocabulary:
    @given(tasks)
    @unhurried
    def test_each_token_has_a_word_of_its_own(self, task: SentenceRecall) -> None:
        words = task.to_words(torch.arange(task.d_vocab))
        assert tuple(words) == task.vocabulary
        assert len(set(words)) == task.d_vocab

    def test_names_that_run_out_are_numbered(self) -> None:
        task = SentenceRecall(n_names=34, n_places=34)
        assert task.vocabulary[14:18] == ("Ola", "Pia", "Ann2", "Ben2")
        assert task.vocabulary[32:36] == ("Ann3", "Ben3", "Accra", "Berlin")

    @pytest.mark.parametrize("token", [-1, 45])
    def test_other_tokens_are_refused(self, token: int) -> None:
        with pytest.raises(HysteresisError, match=f"token {token} is no word; d_vocab is 45"):
            DEFAULT.to_words(torch.tensor([0, token]))


class TestFixedRule:
    @given(tasks, st.integers(0, 2**63 - 1))
    @unhurried
    def test_gives_each_name_a_place_of_its_own(self, task: SentenceRecall, seed: int) -> None:
        rule = task.fixed_rule(seed).tolist()
        assert len(rule) == len(set(rule)) == task.n_names
        assert set(rule) <= set(range(task.n_names, task.n_names + task.n_places))
        assert rule == task.fixed_rule(seed).tolist()

    def test_depends_on_the_seed_alone(self) -> None:
        assert len({tuple(DEFAULT.fixed_rule(seed).tolist()) for seed in range(50)}) == 50
        known = {
            (query, fixed)
            for stream, index in [("anchor", 0), ("anchor", 1), ("loop", 0)]
            for trials in [draw(DEFAULT, 300, seed=4, stream=stream, index=index)]
            for query, fixed in zip(
                trials.tokens[:, -1].tolist(), trials.fixed.tolist(), strict=True
            )
        }
        assert known == set(enumerate(DEFAULT.fixed_rule(4).tolist()))


class TestLaws:
    """The laws that the docstring states, on 20,000 trials of one seed."""

    TRIALS = draw(DEFAULT, 20_000, seed=0, stream="laws", index=0)

    @pytest.mark.parametrize("rate", [0.0, 0.1, 0.25, 0.6, 0.95])
    def test_the_number_of_facts_is_one_and_a_binomial(self, rate: float) -> None:
        task = SentenceRecall(max_facts=4, filler_rate=rate)
        found = np.bincount(
            n_facts(task, draw(task, 4000, seed=1, stream="laws", index=0)), minlength=5
        )
        expected = 4000 * stats.binom.pmf(np.arange(4), 3, 1 - rate)
        assert found[0] == 0
        if rate == 0.0:
            assert found[1:].tolist() == expected.tolist() == [0, 0, 0, 4000]
        else:
            assert stats.chisquare(found[1:], expected).pvalue > SMALLEST_P

    def test_names_places_and_words_are_uniform(self) -> None:
        for ids, first, n in [
            (self.TRIALS.tokens[:, -1], 0, 16),
            (self.TRIALS.contextual, 16, 16),
            (self.TRIALS.tokens[self.TRIALS.positions("other_name")], 0, 16),
            (self.TRIALS.tokens[self.TRIALS.positions("other_place")], 16, 16),
            (self.TRIALS.tokens[self.TRIALS.positions("filler")], 32, 8),
        ]:
            counts = np.bincount(ids.numpy() - first, minlength=n)
            assert len(counts) == n
            assert stats.chisquare(counts).pvalue > SMALLEST_P

    def test_the_rules_are_independent_and_agree_by_chance(self) -> None:
        joint = (self.TRIALS.fixed - 16) * 16 + (self.TRIALS.contextual - 16)
        assert stats.chisquare(np.bincount(joint.numpy(), minlength=256)).pvalue > SMALLEST_P

    def test_either_word_order_is_equally_likely(self) -> None:
        name, place = (
            self.TRIALS.positions(f"matched_{kind}").int().argmax(dim=1)
            for kind in ("name", "place")
        )
        plain = int((name < place).sum())
        assert set((place - name).abs().tolist()) == {2, 3}
        assert stats.binomtest(plain, 20_000, 0.5).pvalue > SMALLEST_P

    def test_the_matched_sentence_may_start_at_any_place_that_the_order_allows(self) -> None:
        """Counted over all orders of 3 sentences' lengths and 3 single words."""
        expected = np.zeros(21)
        for lengths in set(permutations([5, 5, 5, 1, 1, 1])):
            for unit, length in enumerate(lengths):
                expected[sum(lengths[:unit])] += length == 5
        expected *= 20_000 / expected.sum()
        matched = [self.TRIALS.positions(f"matched_{part}") for part in ("name", "place", "word")]
        starts = torch.stack(matched).any(dim=0).int().argmax(dim=1)
        counts = np.bincount(starts.numpy(), minlength=21)
        assert not counts[expected == 0].any()
        allowed = expected > 0
        assert stats.chisquare(counts[allowed], expected[allowed]).pvalue > SMALLEST_P

    @given(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
    @unhurried
    def test_a_higher_rate_turns_facts_into_fillers_and_nothing_else(
        self, one: float, other: float
    ) -> None:
        low, high = (
            draw(SentenceRecall(filler_rate=rate), 50, seed=0, stream="nested", index=0)
            for rate in sorted((one, other))
        )
        assert torch.equal(low.contextual, high.contextual)
        assert torch.equal(low.fixed, high.fixed)
        assert high.roles is not None
        changed = low.tokens != high.tokens
        filler = DEFAULT.role_names.index("filler")
        assert bool((high.roles[changed] == filler).all())


class TestSampling:
    def test_a_batch_depends_on_its_place_alone(self) -> None:
        places = [(seed, stream, index) for seed in (0, 1) for stream in "ab" for index in (0, 7)]

        def fingerprint(place: tuple[int, str, int]) -> str:
            seed, stream, index = place
            return draw(DEFAULT, 5, seed=seed, stream=stream, index=index).fingerprint

        forwards = {place: fingerprint(place) for place in places}
        np.random.seed(1)
        torch.manual_seed(1)
        assert forwards == {place: fingerprint(place) for place in reversed(places)}
        assert len(set(forwards.values())) == len(places)


class TestCorruptions:
    @given(tasks, st.sampled_from(["place", "name"]), st.integers(0, 100))
    @unhurried
    def test_only_the_matched_token_changes(
        self, task: SentenceRecall, corruption: str, seed: int
    ) -> None:
        clean = draw(task, 12, seed=seed, stream="clean", index=0)
        before = clean.tokens.clone()
        corrupted = task.corrupt(clean, corruption, rng=generator(seed, "corruption", 0))
        assert torch.equal(clean.tokens, before)
        changed = corrupted.tokens != clean.tokens
        assert changed.sum(dim=1).tolist() == [1] * 12
        assert torch.equal(changed, clean.positions(f"matched_{corruption}"))

        names = set(task.vocabulary[: task.n_names])
        places = set(task.vocabulary[task.n_names : task.n_names + task.n_places])
        for old, new, fixed in zip(
            prompts(task, clean),
            prompts(task, corrupted),
            task.to_words(clean.fixed),
            strict=True,
        ):
            query = old.split()[-1]
            facts, others = facts_in(old), facts_in(new)
            if corruption == "place":
                assert others.keys() == facts.keys()
                assert others[query] in places - set(facts.values()) - {fixed}
            else:
                (stranger,) = others.keys() - facts.keys()
                assert stranger in names
                assert query not in others and others[stranger] == facts[query]
        assert corrupted.with_tokens(clean.tokens).fingerprint == clean.fingerprint

    def test_an_unknown_corruption_is_refused(self) -> None:
        clean = draw(DEFAULT, 2, seed=0, stream="clean", index=0)
        with pytest.raises(HysteresisError, match="no corruption 'value'; there are place, name"):
            DEFAULT.corrupt(clean, "value", rng=generator(0, "corruption", 0))


def sentences_config(**schedule: Any) -> StudyConfig:
    config = tiny_config().model_dump()
    return StudyConfig.from_dict(
        config | {"task": SMALL, "schedule": config["schedule"] | schedule}
    )


class TestStudies:
    def test_run_from_end_to_end(self, tmp_path: Path) -> None:
        config = sentences_config()
        assert StudyConfig.from_toml_text(config.to_toml()) == config
        assert 'name = "sentence_recall"' in config.to_toml()
        result = run_study(config, tmp_path / "run")
        assert isinstance(result.task, SentenceRecall)
        routes = result.table("routes")
        assert set(routes["corruption"]) == {"place", "name"}
        assert set(routes["role"]) == set(result.task.role_names)
        assert result.routes()["topology"].between(-1.0, 1.0).all()
        assert len(result.replacement()) > 0
        assert resume_study(tmp_path / "run").curve().equals(result.curve())

    def test_move_the_share_of_fillers(self, tmp_path: Path) -> None:
        config = sentences_config(parameter="task.filler_rate", delta=0.45)
        result = run_study(config, tmp_path / "run")
        assert isinstance(result.task, SentenceRecall)
        assert result.task.filler_rate == config.centre == 0.5
        matching = result.table("matching")
        assert set(matching["parameter"]) == {"task.filler_rate"}
        np.testing.assert_allclose(matching["mean_control"], 0.5)
        below, above = matched_plans(config.schedule, centre=config.centre)
        assert verify_matched(below, above, task=result.task, seed=0, batch_size=8).matched
        for update, rate in enumerate(below.control):
            batch = below.batch(update, task=result.task, seed=0, batch_size=500)
            further = result.task.to_words(batch.tokens.flatten()).count("lives") - 500
            assert stats.binomtest(further, 500, 1 - rate).pvalue > SMALLEST_P
        assert (result.curve()["gap"] != 0.0).any()

    @pytest.mark.usefixtures("unchecked")
    def test_a_rate_beyond_its_range_and_sizes_are_not_moved(self) -> None:
        with pytest.raises(HysteresisError, match="task.filler_rate = 1.0: Input should be less"):
            sentences_config(parameter="task.filler_rate", delta=0.5)
        with pytest.raises(HysteresisError, match="task.min_fillers = 4.0: Input should be a val"):
            with_parameter(DEFAULT, "min_fillers", 4.0)

    def test_the_settings_in_the_data_folder(self) -> None:
        config = StudyConfig.from_toml(DATA / "sentences.toml")
        assert make_task(config.task) == DEFAULT
        assert config.anchor.updates == 4000
        assert config.seeds == StudyConfig().seeds

    def test_conflict_trials(self) -> None:
        assert bool(draw_conflict(DEFAULT, 100, seed=0, stream="evaluation").conflict.all())
