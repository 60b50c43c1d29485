"""A task as a user would write it: answer with the prompt's first token, or with a constant."""

from dataclasses import dataclass

import numpy as np
import torch

from tl_hysteresis.tasks import Trials


@dataclass(frozen=True)
class FirstToken:
    n_tokens: int = 8
    rare: float = 0.5

    d_vocab = property(lambda self: self.n_tokens)
    n_ctx = 4
    role_names = ("first", "middle", "query")
    corruptions = ("first",)

    def sample(self, n: int, *, seed: int, rng: np.random.Generator) -> Trials:
        tokens = rng.integers(self.n_tokens, size=(n, self.n_ctx))
        # `rare` moves the law of the inputs: how often the prompt starts with token 0.
        tokens[rng.random(n) < self.rare, 0] = 0
        return Trials(
            tokens=torch.from_numpy(tokens),
            contextual=torch.from_numpy(tokens[:, 0].copy()),
            fixed=torch.full((n,), 1 + seed % 2),
            roles=torch.tensor([0, 1, 1, 2]).expand(n, -1),
            role_names=self.role_names,
        )

    def corrupt(self, trials: Trials, corruption: str, *, rng: np.random.Generator) -> Trials:
        tokens = trials.tokens.clone()
        shift = torch.from_numpy(rng.integers(1, self.n_tokens, size=len(trials)))
        tokens[:, 0] = (tokens[:, 0] + shift) % self.n_tokens
        return trials.with_tokens(tokens)


def no_task() -> str:
    return "no task"


def broken(**parameters: object) -> None:
    raise ValueError(f"cannot make it from {parameters}")
