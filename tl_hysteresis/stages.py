"""Resumable stages: train a population along plans, or measure every checkpoint.

A stage that is finished is read back. One that was cut short goes on from its last saved state, to
the same bits.
"""

from __future__ import annotations

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
        plans: Sequence[Plan],
        *,
        observe_at: range,
        keep_at: Mapping[int, str],
    ) -> None:
        """Train along plans, one for each branch of each seed, and write the table of the course.

        `keep_at` names the checkpoints to keep; the last of them is the end of the stage.
        """
        if self.run.has(f"tables/{stage}.csv"):
            _restore(population, self.run.read_checkpoint(list(keep_at.values())[-1]))
            return
        seeds = [seed for seed in self.run.config.seeds for _ in plans]
        plans_of_members = list(plans) * len(self.run.config.seeds)
        updates = len(plans[0])
        saved = self.run.read_progress(stage)
        start = 0 if saved is None else int(saved["done"])
        observations = [] if saved is None else list(saved["observations"])
        if saved is not None:
            _restore(population, saved)

        def after_update(done: int, losses: Tensor) -> None:
            self._refuse_divergence(torch.isfinite(losses), stage, done, seeds)
            if done in observe_at:
                observations.append(self._observe(population, plans_of_members, done, seeds))
            if done in keep_at:
                self._refuse_divergence(population.finite, stage, done, seeds)
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
                observations.append(self._observe(population, plans_of_members, 0, seeds))
            train(
                population,
                self.task,
                plans_of_members,
                seeds=seeds,
                start=start,
                after_update=after_update,
            )
            self.run.write_table(
                stage, self._course(stage, torch.stack(observations), observe_at, plans)
            )

    def _observe(
        self, population: Population, plans: Sequence[Plan], done: int, seeds: Sequence[int]
    ) -> Float[Tensor, "member measure"]:
        """Behaviour of each member on its seed's trials, at the mixture of its last update."""
        logits = population.logits(torch.stack([self.trials[seed].tokens for seed in seeds]))
        return torch.tensor(
            [
                astuple(behaviour(logits[member], self.trials[seed], mixture=_mixture(plan, done)))
                for member, (seed, plan) in enumerate(zip(seeds, plans, strict=True))
            ],
            dtype=torch.float64,
        )

    def _course(
        self,
        stage: str,
        observations: Float[Tensor, "observation member measure"],
        observe_at: range,
        plans: Sequence[Plan],
    ) -> pd.DataFrame:
        """Observations as a tidy table: seed, branch, updates done, mixture, then the measures."""
        branches = BRANCHES if len(plans) == 2 else ("anchor",)
        rows = []
        for done, observed in zip(observe_at, observations, strict=True):
            members = iter(observed.tolist())
            for seed in self.run.config.seeds:
                for branch, plan in zip(branches, plans, strict=True):
                    rows.append((seed, branch, done, _mixture(plan, done), *next(members)))
        measures = [field.name for field in fields(Behaviour)]
        count = "relaxation" if stage == "relaxation" else "update"
        return pd.DataFrame(rows, columns=["seed", "branch", count, "mixture", *measures])

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

    def _refuse_divergence(
        self, finite: Bool[Tensor, " member"], stage: str, done: int, seeds: Sequence[int]
    ) -> None:
        if bool(finite.all()):
            return
        raise HysteresisError(
            f"seed {seeds[int((~finite).nonzero()[0])]} diverged: at update {done} of the {stage} "
            "its loss or a parameter is not a finite number. The run cannot go on: leave that seed "
            "out, or lower the learning_rate, in a new run"
        )


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


def _mixture(plan: Plan, done: int) -> float:
    """The mixture of the last update, or of the first before any."""
    return plan.mixtures[max(done - 1, 0)]
