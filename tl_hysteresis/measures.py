"""From logits to numbers: the logit margin, the shares of the two answers, the entropy floor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.tasks import Trials


def last_position(
    logits: Float[Tensor, "trial pos d_vocab"] | Float[Tensor, "trial d_vocab"],
) -> Float[Tensor, "trial d_vocab"]:
    """The logits that answer: those at the last position, where the query stands."""
    return logits[:, -1] if logits.ndim == 3 else logits


def logit_margin(
    logits: Float[Tensor, "trial pos d_vocab"] | Float[Tensor, "trial d_vocab"], trials: Trials
) -> Float[Tensor, " trial"]:
    """Logit of the contextual answer minus logit of the fixed answer, at the query.

    Positive where the model answers from its prompt, negative where from its weights. Unit: nats of
    log odds between the two answers.

    Args:
        logits: of the trials, at all positions or at the last.
        trials: the trials, with their two answers.

    Raises:
        HysteresisError: another number of trials, an answer outside the vocabulary, a value that is
            not finite.

    Example:
        >>> trials = Trials(torch.tensor([[0, 2, 0]]), torch.tensor([2]), torch.tensor([3]))
        >>> logit_margin(torch.tensor([[0.0, 0.0, 1.5, 0.25]]), trials).tolist()
        [1.25]

    Source: Zuo (2026).
    """
    logits = last_position(logits)
    _check(logits, trials)
    contextual = logits.gather(1, trials.contextual[:, None])[:, 0]
    fixed = logits.gather(1, trials.fixed[:, None])[:, 0]
    if logits.dtype in (torch.bfloat16, torch.float16):
        # Their difference would be rounded once more, and to as few digits.
        return contextual.float() - fixed.float()
    return contextual - fixed


@dataclass(frozen=True)
class Behaviour:
    """How a model answers conflict trials; means over trials."""

    margin: float
    """Logit margin, contextual minus fixed."""
    loss: float
    """Expected cross-entropy in nats, over the targets that the mixture would draw."""
    floor: float
    """The least that loss can be, in nats: the entropy of the mixture."""
    contextual: float
    """Probability of the contextual answer."""
    fixed: float
    """Probability of the fixed answer."""
    answer_share: float
    """Share of trials whose greedy answer is one of the two."""


def behaviour(
    logits: Float[Tensor, "trial pos d_vocab"] | Float[Tensor, "trial d_vocab"],
    trials: Trials,
    *,
    mixture: float,
) -> Behaviour:
    """Margin, loss against its floor, and what is answered, over conflict trials.

    Raises:
        HysteresisError: no trials, a congruent trial among them, or what `logit_margin` refuses.

    Example:
        >>> trials = Trials(torch.tensor([[0, 2, 0]]), torch.tensor([2]), torch.tensor([3]))
        >>> undecided = torch.tensor([[-30.0, -30.0, 0.0, 0.0]])
        >>> result = behaviour(undecided, trials, mixture=0.5)
        >>> round(result.loss, 4), round(result.floor, 4), result.answer_share
        (0.6931, 0.6931, 1.0)
    """
    if not len(trials):
        raise HysteresisError("no trials to measure behaviour on")
    if not bool(trials.conflict.all()):
        raise HysteresisError(
            f"{int((~trials.conflict).sum())} of {len(trials)} trials are congruent: "
            "behaviour is measured where the two answers differ"
        )
    logits = last_position(logits)
    margin = logit_margin(logits, trials)
    log_probability = logits.log_softmax(dim=-1)
    contextual = log_probability.gather(1, trials.contextual[:, None])[:, 0]
    fixed = log_probability.gather(1, trials.fixed[:, None])[:, 0]
    greedy = logits.argmax(dim=-1)
    answered = (greedy == trials.contextual) | (greedy == trials.fixed)
    return Behaviour(
        margin=margin.double().mean().item(),
        loss=-(mixture * contextual + (1.0 - mixture) * fixed).double().mean().item(),
        floor=entropy_floor(mixture),
        contextual=contextual.exp().double().mean().item(),
        fixed=fixed.exp().double().mean().item(),
        answer_share=answered.double().mean().item(),
    )


def entropy_floor(mixture: float) -> float:
    """Entropy of the mixture in nats: the least possible loss on conflict trials.

    Example:
        >>> round(entropy_floor(0.5), 4), entropy_floor(1.0)
        (0.6931, 0.0)
    """
    if not 0.0 <= mixture <= 1.0:
        raise HysteresisError(f"a mixture is a probability, in [0, 1]; found {mixture}")
    return sum(-p * math.log(p) for p in (mixture, 1.0 - mixture) if p > 0.0)


def _check(logits: Float[Tensor, "trial d_vocab"], trials: Trials) -> None:
    if len(logits) != len(trials):
        raise HysteresisError(f"logits of {len(logits)} trials, but {len(trials)} trials")
    for name in ("contextual", "fixed"):
        largest = int(getattr(trials, name).max()) if len(trials) else 0
        if largest >= logits.shape[1]:
            raise HysteresisError(
                f"{name} answer {largest} lies outside a vocabulary of {logits.shape[1]} tokens"
            )
    if not bool(torch.isfinite(logits).all()):
        bad = (~torch.isfinite(logits).all(dim=1)).nonzero()[0].item()
        raise HysteresisError(f"the logits of trial {bad} are not finite")
