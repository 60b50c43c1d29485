"""A second recall task: facts told in sentences, at no fixed place, among words that say nothing.

It shares the `Task` protocol with `AssociativeRecall`, and neither vocabulary, length nor roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_hysteresis.config import SentenceRecallConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.tasks import Trials, generator, replace_matched, shuffled_rows

NAMES = "Ann Ben Cleo Dan Eve Finn Gus Hana Ivo Joy Kim Leo Mia Noor Ola Pia".split()
PLACES = (
    "Accra Berlin Cairo Dakar Essen Faro Graz Hanoi Izmir Jena Kyoto Lima Minsk Nice Oslo Perth"
).split()
FILLERS = "also anyway indeed now so then today well".split()
FRAME = "lives in . where is".split()

# The words of "NAME lives in PLACE ." in the order of either template: "in PLACE lives NAME ."
TEMPLATES = np.array([[0, 1, 2, 3, 4], [2, 3, 1, 0, 4]])
SENTENCE = len(TEMPLATES[0])
QUESTION = 3  # where is NAME


@dataclass(frozen=True)
class SentenceRecall:
    """Sentences that say who lives where, then a question: answer by the prompt, or by heart.

    A prompt has 1 to `max_facts` facts, each as "NAME lives in PLACE ." or "in PLACE lives NAME ."
    with equal probability, and ends with "where is NAME". Names are distinct in a prompt, and so
    are places; all are uniformly drawn. The fixed rule is one permutation of names to places for
    each seed. The two rules agree by chance in one trial in `n_places`.

    `max_facts` slots of the length of a sentence and `min_fillers` single filler words follow each
    other in random order. One slot, drawn uniformly, has the queried fact. Each other one has a
    further fact, or with probability `filler_rate` filler words in its place: a prompt has
    1 + Binomial(max_facts - 1, 1 - filler_rate) facts, and always the same length. From equal
    random numbers, a higher rate turns facts into fillers and changes nothing else.

    Roles: `query`, the name asked for; `matched_name`, `matched_place` and `matched_word`, of the
    sentence about it; `other_name`, `other_place`, `other_word`; `filler`; `question` ("where is").

    Corruptions: `place` replaces the matched place by one that is neither in the prompt nor the
    fixed answer; `name` replaces the matched name by a name that is not in the prompt.

    Example:
        >>> from tl_hysteresis.tasks import draw
        >>> task = SentenceRecall()
        >>> trials = draw(task, 2, seed=0, stream="example", index=42)
        >>> for prompt in trials.tokens:
        ...     print(*task.to_words(prompt))
        Finn lives in Essen . also well now so now so Ann lives in Faro . then anyway where is Ann
        in Izmir lives Hana . now well in Nice lives Ben . then Ivo lives in Jena . where is Ben
        >>> task.to_words(trials.contextual), task.to_words(trials.fixed)
        (['Faro', 'Nice'], ['Perth', 'Graz'])
    """

    n_names: int = 16
    n_places: int = 16
    max_facts: int = 3
    min_fillers: int = 3
    filler_rate: float = 0.25

    role_names = (
        *("query", "matched_name", "matched_place", "matched_word"),
        *("other_name", "other_place", "other_word", "filler", "question"),
    )
    corruptions = ("place", "name")

    def __post_init__(self) -> None:
        SentenceRecallConfig(**asdict(self))

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The word of each token id: names, places, fillers, then the words of the templates."""
        names, places = _words(NAMES, self.n_names), _words(PLACES, self.n_places)
        return (*names, *places, *FILLERS, *FRAME)

    @property
    def d_vocab(self) -> int:
        """Number of token ids."""
        return self.n_names + self.n_places + len(FILLERS) + len(FRAME)

    @property
    def n_ctx(self) -> int:
        """Tokens in a prompt: slots, single fillers and the question."""
        return SENTENCE * self.max_facts + self.min_fillers + QUESTION

    def to_words(self, tokens: Int[Tensor, " token"]) -> list[str]:
        """The words of a prompt, or of any other tokens.

        Raises:
            HysteresisError: a token that this task does not have.
        """
        vocabulary, ids = self.vocabulary, tokens.tolist()
        for token in ids:
            if not 0 <= token < len(vocabulary):
                raise HysteresisError(f"token {token} is no word; d_vocab is {len(vocabulary)}")
        return [vocabulary[token] for token in ids]

    def fixed_rule(self, seed: int) -> Int[np.ndarray, " name"]:
        """The place token that the weights are to learn for each name; a function of the seed."""
        rng = generator(seed, "fixed rule", 0)
        return self.n_names + rng.permutation(self.n_places)[: self.n_names]

    def sample(self, n: int, *, seed: int, rng: np.random.Generator) -> Trials:
        """Draw `n` trials under the fixed rule of `seed`; the mixture plays no part."""
        names = shuffled_rows(n, self.n_names, rng)[:, : self.max_facts]
        places = self.n_names + shuffled_rows(n, self.n_places, rng)[:, : self.max_facts]
        template = TEMPLATES[rng.integers(len(TEMPLATES), size=names.shape)]
        slots = shuffled_rows(n, self.max_facts + self.min_fillers, rng)[:, : self.max_facts]
        start = np.sort(slots, axis=1) + (SENTENCE - 1) * np.arange(self.max_facts)

        trial, fact = np.arange(n), rng.integers(self.max_facts, size=n)
        matched = np.arange(self.max_facts) == fact[:, None]
        told = matched | (rng.random(names.shape) >= self.filler_rate)
        query = names[trial, fact]

        lives, in_, stop, where, is_ = range(self.d_vocab - len(FRAME), self.d_vocab)
        tokens = rng.integers(self.n_names + self.n_places, lives, size=(n, self.n_ctx))
        tokens[:, -QUESTION:] = np.stack(np.broadcast_arrays(where, is_, query), axis=-1)
        roles = np.full_like(tokens, self.role_names.index("filler"))
        roles[:, -QUESTION:] = self._roles("question", "question", "query")

        # All positions hold filler words so far; the sentences that are told overwrite theirs.
        sentences = np.stack(np.broadcast_arrays(names, lives, in_, places, stop), axis=-1)
        parts = np.where(matched[..., None], *map(self._sentence_roles, ("matched", "other")))
        row, position = np.nonzero(told)[0][:, None], start[told][:, None] + np.arange(SENTENCE)
        tokens[row, position] = np.take_along_axis(sentences, template, axis=-1)[told]
        roles[row, position] = np.take_along_axis(parts, template, axis=-1)[told]
        return Trials(
            tokens=torch.from_numpy(tokens),
            contextual=torch.from_numpy(places[trial, fact]),
            fixed=torch.from_numpy(self.fixed_rule(seed)[query]),
            roles=torch.from_numpy(roles),
            role_names=self.role_names,
        )

    def corrupt(self, trials: Trials, corruption: str, *, rng: np.random.Generator) -> Trials:
        """Replace the matched place, or the matched name, by a token that is not in the prompt.

        Raises:
            HysteresisError: a corruption that this task does not have.
        """
        places = range(self.n_names, self.n_names + self.n_places)
        kinds = {"place": places, "name": range(self.n_names)}
        return replace_matched(trials, corruption, kinds, d_vocab=self.d_vocab, rng=rng)

    def _roles(self, *names: str) -> list[int]:
        return [self.role_names.index(name) for name in names]

    def _sentence_roles(self, fact: str) -> list[int]:
        """The roles of the words of "NAME lives in PLACE ."."""
        name, word, place = (f"{fact}_{part}" for part in ("name", "word", "place"))
        return self._roles(name, word, word, place, word)


def _words(stems: Sequence[str], n: int) -> list[str]:
    """As many different words: Ann, Ben, ... and, where they run out, Ann2, Ben2, ..."""
    rounds = (divmod(index, len(stems)) for index in range(n))
    return [stems[stem] + (str(past + 1) if past else "") for past, stem in rounds]
