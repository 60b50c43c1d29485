"""Plans: which batch of examples at which mixture, update by update; and the proof that two match.

What a loop moves is the mixture, or another scalar of training. The branch from above is the branch
from below read backwards: the same batches at the same values in the opposite order. The two
therefore see the same multiset of labelled examples by construction, and `verify_matched` proves it
on the examples themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float

from tl_hysteresis.config import ScheduleConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.tasks import Batch, Labels, Task, labelled_batch, with_parameter

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
        label_noise: share of targets that are drawn from the whole vocabulary.
        parameter: what the plan moves: "mixture", or "learning_rate", "weight_decay",
            "label_noise" or "task.NAME".
        values: its value at each update, where it is not the mixture.

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
    label_noise: float = 0.0
    parameter: str = "mixture"
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.indices:
            raise HysteresisError("a plan of no updates")
        if len(self.indices) != len(self.mixtures):
            raise HysteresisError(
                f"a plan of {len(self.indices)} batches and {len(self.mixtures)} mixtures: "
                "each update has one of both"
            )
        if len(self.values) != (0 if self.parameter == "mixture" else len(self)):
            raise HysteresisError(
                f"a plan of {len(self)} updates that moves {self.parameter} has {len(self.values)} "
                "values of it: one for each update, and none beside the mixtures"
            )
        for update, mixture in enumerate(self.mixtures):
            if not 0.0 <= mixture <= 1.0:
                raise HysteresisError(
                    f"the mixture at update {update} is {mixture}: a probability lies in [0, 1]"
                )

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def control(self) -> tuple[float, ...]:
        """The value at each update of what the plan moves."""
        return self.values or self.mixtures

    def reversed(self) -> Plan:
        """The same batches at the same values, last first."""
        return self.reordered(range(len(self))[::-1])

    def reordered(self, order: Sequence[int]) -> Plan:
        """The same batches at the same values in another order.

        Raises:
            HysteresisError: an order that leaves an update out, or takes one twice.
        """
        if sorted(order) != list(range(len(self))):
            raise HysteresisError(f"not an order of {len(self)} updates: {list(order)}")
        return replace(
            self,
            indices=tuple(self.indices[update] for update in order),
            mixtures=tuple(self.mixtures[update] for update in order),
            values=tuple(self.values[update] for update in order if self.values),
        )

    def first(self, updates: int) -> Plan:
        """The plan's beginning.

        Raises:
            HysteresisError: no updates, or more than the plan has.
        """
        if not 0 < updates <= len(self):
            raise HysteresisError(f"the first {updates} of {len(self)} updates")
        return replace(
            self,
            indices=self.indices[:updates],
            mixtures=self.mixtures[:updates],
            values=self.values[:updates],
        )

    def batch(self, update: int, *, task: Task, seed: int, batch_size: int) -> Batch:
        """The labelled examples of one update, for one seed."""
        noise, name = self.label_noise, self.parameter.removeprefix("task.")
        if self.parameter == "label_noise":
            noise = self.values[update]
        elif name != self.parameter:
            task = with_parameter(task, name, self.values[update])
        return labelled_batch(
            task,
            batch_size,
            seed=seed,
            stream=self.stream,
            index=self.indices[update],
            mixture=self.mixtures[update],
            labels=self.labels,
            noise=noise,
        )


def constant_plan(
    updates: int,
    mixture: float,
    *,
    stream: str,
    labels: Labels = "stratified",
    label_noise: float = 0.0,
) -> Plan:
    """A plan that stays at one mixture, as the anchor's and the relaxation's do."""
    return Plan(stream, tuple(range(updates)), (mixture,) * updates, labels, label_noise)


def matched_plans(
    schedule: ScheduleConfig, *, stream: str = "loop", centre: float | None = None
) -> tuple[Plan, Plan]:
    """The two branches of a loop, `(below, above)`: the same batches in opposite order.

    From below: p0, up to p0 + delta, down to p0 - delta, back to p0, so that p0 is reached from the
    side of in-weights learning. From above: the same read backwards. A loop that moves another
    parameter goes the same way around `centre`, at the mixture p0.

    Args:
        schedule: the loop's settings.
        stream: name of the stream of batches.
        centre: the moved parameter's own setting, `StudyConfig.centre`; p0 if it is the mixture.

    Raises:
        HysteresisError: another parameter than the mixture, without a centre.

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
    moves_mixture = schedule.parameter == "mixture"
    if centre is None and not moves_mixture:
        raise HysteresisError(f"a loop that moves {schedule.parameter} needs its centre")
    middle = schedule.p0 if moves_mixture or centre is None else centre
    # Rounded so that a level has one value on the way up and on the way down.
    path = np.round(middle + schedule.delta * _triangle(phases), 12).tolist()
    updates = len(path)
    below = Plan(
        stream,
        indices=tuple(range(updates)),
        mixtures=tuple(path) if moves_mixture else (schedule.p0,) * updates,
        labels=schedule.labels,
        label_noise=schedule.label_noise,
        parameter=schedule.parameter,
        values=() if moves_mixture else tuple(path),
    )
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
    parameter: str
    """What the plan moves."""
    mean_control: float
    """Mean over updates of its value."""
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
    hold is named in `differences`. Where the loop moves a parameter of the task, an example belongs
    to the value at which it was drawn; both branches still see the same ones.

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
    if a.parameter != b.parameter:
        differences.append(f"what is moved: {a.parameter} below, {b.parameter} above")
    elif a.parameter != "mixture" and sorted(above.control) != sorted(below.control):
        differences.append(f"the values of {a.parameter}")
    if a.order_hash == b.order_hash and above.control == below.control:
        differences.append(SAME_ORDER)
    elif not differences and above.control != below.control[::-1]:
        moved = {"mixture": "mixtures"}.get(a.parameter, f"values of {a.parameter}")
        differences.append(f"the {moved} above are not those below, last first")
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
        parameter=plan.parameter,
        mean_control=float(np.mean(plan.control)),
        multiset_hash=hashlib.sha256(np.sort(examples).tobytes()).hexdigest(),
        order_hash=hashlib.sha256(examples.tobytes()).hexdigest(),
    )
