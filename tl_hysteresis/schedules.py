"""Plans: which batch of examples at which mixture, update by update; and the proof that two match.

The branch from above is the branch from below read backwards: the same batches at the same mixtures
in the opposite order. The two therefore see the same multiset of labelled examples by construction,
and `verify_matched` proves it on the examples themselves.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from tl_hysteresis.config import ScheduleConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.tasks import Batch, Labels, Task, labelled_batch

BRANCHES = ("below", "above")
SAME_ORDER = "the order of training is the same in both branches"


@dataclass(frozen=True)
class Plan:
    """One branch of training, written out: for each update a batch index and a mixture.

    Attributes:
        stream: name of the stream of batches that the indices count.
        indices: index of the batch of each update.
        mixtures: probability, at each update, that a target follows the contextual rule.
        labels: how targets are assigned to the rules, as in `tasks.labelled_batch`.

    Raises:
        HysteresisError: an empty plan, lengths that differ, or a mixture outside [0, 1].

    Example:
        >>> plan = Plan("loop", indices=(0, 1, 2), mixtures=(0.5, 0.7, 0.7))
        >>> plan.reversed().mixtures
        (0.7, 0.7, 0.5)
    """

    stream: str
    indices: tuple[int, ...]
    mixtures: tuple[float, ...]
    labels: Labels = "stratified"

    def __post_init__(self) -> None:
        if not self.indices:
            raise HysteresisError("a plan of no updates")
        if len(self.indices) != len(self.mixtures):
            raise HysteresisError(
                f"a plan of {len(self.indices)} batches and {len(self.mixtures)} mixtures: "
                "each update has one of both"
            )
        for update, mixture in enumerate(self.mixtures):
            if not 0.0 <= mixture <= 1.0:
                raise HysteresisError(
                    f"the mixture at update {update} is {mixture}: a probability lies in [0, 1]"
                )

    def __len__(self) -> int:
        return len(self.indices)

    def reversed(self) -> Plan:
        """The same batches at the same mixtures, last first."""
        return Plan(self.stream, self.indices[::-1], self.mixtures[::-1], self.labels)

    def batch(self, update: int, *, task: Task, seed: int, batch_size: int) -> Batch:
        """The labelled examples of one update, for one seed."""
        return labelled_batch(
            task,
            batch_size,
            seed=seed,
            stream=self.stream,
            index=self.indices[update],
            mixture=self.mixtures[update],
            labels=self.labels,
        )


def constant_plan(
    updates: int, mixture: float, *, stream: str, labels: Labels = "stratified"
) -> Plan:
    """A plan that stays at one mixture, as the anchor's and the relaxation's do."""
    return Plan(stream, tuple(range(updates)), (mixture,) * updates, labels)


def matched_plans(schedule: ScheduleConfig, *, stream: str = "loop") -> tuple[Plan, Plan]:
    """The two branches of a loop, `(below, above)`: the same batches in opposite order.

    From below: p0, up to p0 + delta, down to p0 - delta, back to p0, so that p0 is reached from the
    side of in-weights learning. From above: the same read backwards.

    Example:
        >>> below, above = matched_plans(ScheduleConfig(delta=0.2, steps=4, dwell=1))
        >>> below.mixtures
        (0.5, 0.7, 0.5, 0.3, 0.5)
        >>> above == below.reversed()
        True

    Source: the protocol of Zuo (2026); the staircase of 17 levels is this project's choice.
    """
    levels = schedule.steps + 1
    if schedule.shape == "staircase":
        phases = np.repeat(np.linspace(0.0, 1.0, levels), schedule.dwell)
    else:
        phases = np.linspace(0.0, 1.0, levels * schedule.dwell)
    # Rounded so that a level has one value on the way up and on the way down.
    mixtures = np.round(schedule.p0 + schedule.delta * _triangle(phases), 12)
    indices, path = tuple(range(len(phases))), tuple(float(p) for p in mixtures)
    below = Plan(stream, indices, path, schedule.labels)
    return below, below.reversed()


def _triangle(phase: Float[np.ndarray, " update"]) -> Float[np.ndarray, " update"]:
    """The triangle wave through 0, 1, 0, -1, 0 at phases 0, 1/4, 1/2, 3/4, 1."""
    return np.asarray(np.interp(phase, [0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 1.0, 0.0, -1.0, 0.0]))


@dataclass(frozen=True)
class Exposure:
    """What a plan shows to a model of one seed; every field but `order_hash` is free of order."""

    updates: int
    examples: int
    contextual_targets: int
    """Examples whose target follows the contextual rule."""
    fixed_targets: int
    """Examples whose target follows the fixed rule."""
    mean_mixture: float
    """Mean over updates of the mixture."""
    multiset_hash: str
    """SHA-256 of all labelled examples, sorted: equal if and only if the multisets are."""
    order_hash: str
    """SHA-256 of all labelled examples in the order of training."""


@dataclass(frozen=True)
class Matching:
    """The exposures of two plans, and in what they differ although they should not."""

    below: Exposure
    above: Exposure
    differences: tuple[str, ...]

    @property
    def matched(self) -> bool:
        """True for a counterbalanced pair: the same examples, in another order."""
        return not self.differences


def verify_matched(below: Plan, above: Plan, *, task: Task, seed: int, batch_size: int) -> Matching:
    """Draw every labelled example of both plans and compare them.

    A matched pair has equal numbers of updates, the same multiset of labelled examples, hence equal
    exposure to each rule, another order, and opposite paths through the mixtures. What does not
    hold is named in `differences`.

    Example:
        >>> from tl_hysteresis.tasks import AssociativeRecall
        >>> below, above = matched_plans(ScheduleConfig(steps=4, dwell=2))
        >>> where = dict(task=AssociativeRecall(), seed=0, batch_size=8)
        >>> verify_matched(below, above, **where).matched
        True
        >>> verify_matched(below, below, **where).differences
        ('the order of training is the same in both branches',)
    """
    a = exposure(below, task=task, seed=seed, batch_size=batch_size)
    b = exposure(above, task=task, seed=seed, batch_size=batch_size)
    differences = [
        f"{what}: {getattr(a, field)} below, {getattr(b, field)} above"
        for field, what in (
            ("updates", "updates"),
            ("examples", "labelled examples"),
            ("contextual_targets", "targets by the contextual rule"),
            ("fixed_targets", "targets by the fixed rule"),
        )
        if getattr(a, field) != getattr(b, field)
    ]
    if a.multiset_hash != b.multiset_hash:
        differences.append("the multisets of labelled examples")
    if a.order_hash == b.order_hash:
        differences.append(SAME_ORDER)
    elif not differences and above.mixtures != below.mixtures[::-1]:
        differences.append("the mixtures above are not those below, last first")
    return Matching(a, b, tuple(differences))


def exposure(plan: Plan, *, task: Task, seed: int, batch_size: int) -> Exposure:
    """Count and hash every labelled example that a plan shows to the model of one seed."""
    batches = [
        plan.batch(update, task=task, seed=seed, batch_size=batch_size)
        for update in range(len(plan))
    ]
    columns = torch.cat(
        [
            torch.cat([batch.tokens, batch.targets[:, None], batch.contextual[:, None]], dim=1)
            for batch in batches
        ]
    ).numpy()
    # An example as one opaque value, so that numpy can sort examples.
    examples = np.ascontiguousarray(columns).view(f"V{columns.strides[0]}").ravel()
    contextual = sum(int(batch.contextual.sum()) for batch in batches)
    return Exposure(
        updates=len(plan),
        examples=len(examples),
        contextual_targets=contextual,
        fixed_targets=len(examples) - contextual,
        mean_mixture=float(np.mean(plan.mixtures)),
        multiset_hash=hashlib.sha256(np.sort(examples).tobytes()).hexdigest(),
        order_hash=hashlib.sha256(examples.tobytes()).hexdigest(),
    )
