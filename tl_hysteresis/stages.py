"""Resumable stages: train a population along plans, or measure every checkpoint.

A stage that is finished is read back. One that was cut short goes on from its last saved state, to
the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import NoReturn

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm
from transformer_lens import HookedTransformer

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.measures import Behaviour, behaviour
from tl_hysteresis.results import StudyResult
from tl_hysteresis.schedules import BRANCHES, Plan
from tl_hysteresis.store import RunFolder
from tl_hysteresis.tasks import Task, Trials
from tl_hysteresis.training import Population, train


@dataclass(frozen=True)
class Member:
    """One model of a stage: whose examples it sees, along which plan, and its names in tables."""

    seed: int
    plan: Plan
    labels: dict[str, str | int]

    @classmethod
    def of_each(cls, seeds: Sequence[int], plans: Mapping[str, Plan]) -> list[Member]:
        """Every branch of every seed, in the order of the branches' plans."""
        return [
            cls(seed, plan, {"branch": branch}) for seed in seeds for branch, plan in plans.items()
        ]


@dataclass
class Stages:
    """Runs the stages of one study.

    Attributes:
        run: the run folder that they read and write.
        task: where training examples come from.
        trials: each seed's held-out conflict trials.
        progress: show progress bars.
    """

    run: RunFolder
    task: Task
    trials: Mapping[int, Trials]
    progress: bool

    def train(
        self,
        stage: str,
        population: Population,
        members: Sequence[Member],
        *,
        observe_at: Sequence[int],
        keep_at: Mapping[int, str],
        count: str = "update",
        may_diverge: bool = False,
    ) -> None:
        """Train each member along its plan, and write the table of the course.

        Args:
            stage: name of the stage and of its table.
            population: what is trained, in place.
            members: what each member of the population is.
            observe_at: updates after which behaviour is measured.
            keep_at: names of the checkpoints to keep; the last of them is the end of the stage.
            count: the table's name for the updates done.
            may_diverge: go on if a member diverges; its measures are NaN from there on.
        """
        if self.run.has(f"tables/{stage}.csv"):
            _restore(population, self.run.read_checkpoint(list(keep_at.values())[-1]))
            return
        updates = len(members[0].plan)
        saved = self.run.read_progress(stage)
        start = 0 if saved is None else int(saved["done"])
        observations = [] if saved is None else list(saved["observations"])
        if saved is not None:
            _restore(population, saved)

        def refuse_divergence(finite: Bool[Tensor, " member"], done: int) -> None:
            if not may_diverge and not bool(finite.all()):
                seed = members[int((~finite).nonzero()[0])].seed
                raise HysteresisError(
                    f"seed {seed} diverged: at update {done} of the {stage} its loss or a "
                    "parameter is not a finite number. The run cannot go on: leave that seed out, "
                    "or lower the learning_rate, in a new run"
                )

        def after_update(done: int, losses: Tensor) -> None:
            refuse_divergence(torch.isfinite(losses), done)
            if done in observe_at:
                observations.append(self._observe(population, members, done))
            if done in keep_at:
                refuse_divergence(population.finite, done)
                self.run.write_checkpoint(keep_at[done], _tensors(population))
            elif done % self.run.config.checkpoint_every == 0:
                progress = {
                    "done": torch.tensor(done),
                    "observations": torch.stack(observations) if observations else torch.empty(0),
                }
                self.run.write_progress(stage, _tensors(population) | progress)
            bar.update()

        with self._stage(stage, total=updates, initial=start) as bar:
            if start == 0 and 0 in observe_at:
                observations.append(self._observe(population, members, 0))
            train(
                population,
                self.task,
                [member.plan for member in members],
                seeds=[member.seed for member in members],
                start=start,
                after_update=after_update,
            )
            course = _course(torch.stack(observations), members, observe_at, count)
            self.run.write_table(stage, course)

    def _observe(
        self, population: Population, members: Sequence[Member], done: int
    ) -> Float[Tensor, "member measure"]:
        """Behaviour of each member on its seed's trials, at the mixture of its last update."""
        tokens = torch.stack([self.trials[member.seed].tokens for member in members])
        logits, finite = population.logits(tokens), population.finite.tolist()
        return torch.tensor(
            [
                astuple(
                    behaviour(
                        logits[index],
                        self.trials[member.seed],
                        mixture=_at(member.plan.mixtures, done),
                    )
                )
                if finite[index]
                else [math.nan] * len(fields(Behaviour))
                for index, member in enumerate(members)
            ],
            dtype=torch.float64,
        )

    def measure(
        self, stage: str, measure: Callable[[HookedTransformer, int], pd.DataFrame]
    ) -> None:
        """Apply a causal measurement to both branches of every seed at every kept relaxation."""
        result, measure_at = StudyResult(self.run), self.run.config.relaxation.measure_at
        done = self.run.read_table(stage) if self.run.has(f"tables/{stage}.csv") else None
        finished = 0 if done is None else done["relaxation"].nunique()
        parts = [] if done is None else [done]
        if finished == len(measure_at):
            return
        per_relaxation = len(self.run.config.seeds) * len(BRANCHES)
        total = len(measure_at) * per_relaxation
        with self._stage(stage, total=total, initial=finished * per_relaxation) as bar:
            for relaxation in measure_at[finished:]:
                for seed in self.run.config.seeds:
                    for branch in BRANCHES:
                        model = result.model(seed, branch, relaxation)
                        model.to(self.trials[seed].tokens.device, print_details=False)
                        labels = {"seed": seed, "branch": branch, "relaxation": relaxation}
                        try:
                            table = measure(model, seed)
                        except HysteresisError as error:
                            where = f"seed {seed}, {branch}, relaxation {relaxation}"
                            raise HysteresisError(f"{stage} of {where}: {error}") from None
                        parts.append(pd.concat([pd.DataFrame(labels, table.index), table], axis=1))
                        bar.update()
                self.run.write_table(stage, pd.concat(parts, ignore_index=True))

    @contextmanager
    def _stage(self, stage: str, *, total: int, initial: int) -> Iterator[tqdm[NoReturn]]:
        """Show the progress of a stage, and note how long it took."""
        begun = time.perf_counter()
        try:
            with tqdm(desc=stage, total=total, initial=initial, disable=not self.progress) as bar:
                yield bar
        except KeyboardInterrupt:
            self.run.add_seconds(stage, time.perf_counter() - begun)
            raise
        # Not after an error: on a full disk this would fail too, and hide which file did first.
        self.run.add_seconds(stage, time.perf_counter() - begun)


def _tensors(population: Population) -> dict[str, Tensor]:
    return {"parameters": population.parameters, **population.state}


def _restore(population: Population, tensors: Mapping[str, Tensor]) -> None:
    """Put saved parameters and optimizer state in the place of a population's."""
    for name, value in _tensors(population).items():
        if name not in tensors or tensors[name].shape != value.shape:
            raise HysteresisError(
                f"a checkpoint without {name} of shape {tuple(value.shape)} is not of this study"
            )
        value.copy_(tensors[name])


def _course(
    observations: Float[Tensor, "observation member measure"],
    members: Sequence[Member],
    observe_at: Sequence[int],
    count: str,
) -> pd.DataFrame:
    """Observations as a tidy table: who, updates done, where on the plan, then the measures."""
    measures = [field.name for field in fields(Behaviour)]
    return pd.DataFrame(
        [
            {
                "seed": member.seed,
                **member.labels,
                count: done,
                "mixture": _at(member.plan.mixtures, done),
                "control": _at(member.plan.control, done),
                **dict(zip(measures, measured, strict=True)),
            }
            for done, observed in zip(observe_at, observations.tolist(), strict=True)
            for member, measured in zip(members, observed, strict=True)
        ]
    )


def _at(values: Sequence[float], done: int) -> float:
    """The value of the last update, or of the first before any."""
    return values[max(done - 1, 0)]
