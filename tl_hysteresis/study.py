"""The protocol: train anchors, fork them, send the branches through the loop, relax, measure.

`run_study` reads as its table of contents. Each stage takes up a killed run where it stands: it
reads what is finished, and otherwise trains on from the last saved state, to the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import NoReturn

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm
from transformer_lens import HookedTransformer

from tl_hysteresis.config import StudyConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.measures import Behaviour, behaviour
from tl_hysteresis.models import hooked_config
from tl_hysteresis.results import BRANCHES, StudyResult
from tl_hysteresis.routes import replacement_margins, route_map
from tl_hysteresis.schedules import Plan, constant_plan, matched_plans, verify_matched
from tl_hysteresis.store import RunFolder
from tl_hysteresis.tasks import draw_conflict, generator, make_task
from tl_hysteresis.training import Population, train


def run_study(config: StudyConfig, folder: Path | str, *, progress: bool = False) -> StudyResult:
    """Run a whole study into a new folder.

    Args:
        config: the settings.
        folder: where the run is kept; must not exist yet, or be empty.
        progress: show progress bars.

    Raises:
        HysteresisError: bad settings, a folder that exists, a device that is not there, an anchor
            that did not converge, a value that is not finite.

    Example:
        >>> import tempfile
        >>> from tl_hysteresis.config import AnchorConfig, MeasurementConfig, ScheduleConfig
        >>> tiny = StudyConfig(
        ...     seeds=(0, 1),
        ...     anchor=AnchorConfig(updates=2, evaluate_every=1, require_convergence=False),
        ...     schedule=ScheduleConfig(steps=4, dwell=1),
        ...     relaxation={"measure_at": [0, 1]},
        ...     measurement=MeasurementConfig(conflict_trials=8, patching_trials=4),
        ... )
        >>> with tempfile.TemporaryDirectory() as home:
        ...     result = run_study(tiny, Path(home) / "run")
        ...     list(result.gaps()["relaxation"])
        [0, 1]
    """
    device_of(config)
    threads = config.threads or torch.get_num_threads()
    return _run(RunFolder.create(folder, config, threads=threads), progress=progress)


def resume_study(
    folder: Path | str, *, accept_unconverged: bool = False, progress: bool = False
) -> StudyResult:
    """Continue a run that was cut short; it ends as it would have, to the bit.

    Args:
        folder: a run folder.
        accept_unconverged: go on although an anchor has not converged; the manifest notes it.
        progress: show progress bars.

    Raises:
        HysteresisError: a folder that is not a run, a damaged file, other versions than began it.
    """
    run = RunFolder.open(folder)
    run.verify()
    if run.complete:
        return StudyResult(run)
    run.check_versions()
    device_of(run.config)
    run.clean()
    if accept_unconverged:
        run.note(accepted_unconverged=True)
    return _run(run, progress=progress)


def _run(run: RunFolder, *, progress: bool) -> StudyResult:
    study = Study(run, progress)
    with _threads(run.manifest["threads"]):
        study.prove_matching()
        anchors = study.train_anchors()
        branches = study.run_loop(anchors)
        study.relax(branches)
        study.replace_components()
        study.map_routes()
    run.finish()
    return StudyResult(run)


@dataclass
class Study:
    """The stages of one study, each of which reads or writes its part of the run folder.

    Attributes:
        run: the run folder, with the settings.
        progress: show progress bars.
    """

    run: RunFolder
    progress: bool = False

    def __post_init__(self) -> None:
        self.config = self.run.config
        self.task = make_task(self.config.task)
        self.seeds = self.config.seeds
        self.device = device_of(self.config)
        self.below, self.above = matched_plans(self.config.schedule)
        self.trials = {
            seed: draw_conflict(
                self.task, self.config.measurement.conflict_trials, seed=seed, stream="evaluation"
            ).to(self.device)
            for seed in self.seeds
        }

    def prove_matching(self) -> None:
        """Show for each seed that both branches see the same examples in another order."""
        if self.run.has("tables/matching.csv"):
            return
        rows = []
        for seed in self.seeds:
            matching = verify_matched(
                self.below,
                self.above,
                task=self.task,
                seed=seed,
                batch_size=self.config.optimizer.batch_size,
            )
            if not matching.matched:
                raise HysteresisError(
                    f"the branches of seed {seed} do not match: {'; '.join(matching.differences)}"
                )
            for branch in BRANCHES:
                rows.append({"seed": seed, "branch": branch, **asdict(getattr(matching, branch))})
        self.run.write_table("matching", pd.DataFrame(rows))

    def train_anchors(self) -> Population:
        """Train one anchor a seed at the balanced mixture, and judge whether it has converged."""
        settings = self.config.anchor
        anchors = Population.build(
            hooked_config(
                self.config.model,
                d_vocab=self.task.d_vocab,
                n_ctx=self.task.n_ctx,
                device=self.config.device,
            ),
            self.config.optimizer,
            seeds=self.seeds,
        )
        self._train(
            "course",
            anchors,
            [constant_plan(settings.updates, self.config.schedule.p0, stream="anchor")],
            observe_at=range(0, settings.updates + 1, settings.evaluate_every),
            keep_at={settings.updates: "anchor"},
        )
        if not self.run.has("tables/anchors.csv"):
            verdicts = judge_convergence(self.run.read_table("course"), self.config)
            self.run.write_table("anchors", verdicts)
        self._refuse_unconverged(self.run.read_table("anchors"))
        return anchors

    def run_loop(self, anchors: Population) -> Population:
        """Fork model and optimizer of each anchor in two, and send both through the loop."""
        branches = anchors.fork([member for member in range(len(anchors)) for _ in BRANCHES])
        dwell = self.config.schedule.dwell
        self._train(
            "loop",
            branches,
            [self.below, self.above],
            observe_at=range(dwell, len(self.below) + 1, dwell),
            keep_at={len(self.below): "relaxation_0"},
        )
        return branches

    def relax(self, branches: Population) -> None:
        """Train both branches on at the balanced mixture, on the same batches."""
        measure_at = self.config.relaxation.measure_at
        self._train(
            "relaxation",
            branches,
            [constant_plan(measure_at[-1], self.config.schedule.p0, stream="relaxation")] * 2,
            observe_at=range(measure_at[-1] + 1),
            keep_at={at: f"relaxation_{at}" for at in measure_at if at > 0},
        )

    def replace_components(self) -> None:
        """Measure the margin of each checkpoint with each component replaced by its mean."""
        self._measure(
            "replacement", lambda model, seed: replacement_margins(model, self.trials[seed])
        )

    def map_routes(self) -> None:
        """Patch each checkpoint's clean activations into its corrupted runs, site by site."""
        self._measure("routes", self._routes)

    def _routes(self, model: HookedTransformer, seed: int) -> pd.DataFrame:
        clean = self.trials[seed].select(slice(self.config.measurement.patching_trials))
        maps = []
        for corruption in self.task.corruptions:
            rng = generator(seed, f"corruption/{corruption}", 0)
            corrupted = self.task.corrupt(clean, corruption, rng=rng)
            effects = route_map(model, clean, corrupted).table
            maps.append(effects.assign(corruption=corruption))
        return pd.concat(maps)

    def _train(
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
        seeds = [seed for seed in self.seeds for _ in plans]
        plans_of_members = list(plans) * len(self.seeds)
        updates = len(plans[0])
        saved = self.run.read_progress(stage)
        start = 0 if saved is None else int(saved["done"])
        observations = [] if saved is None else list(saved["observations"])
        if saved is not None:
            _restore(population, saved)

        def after_update(done: int, losses: Tensor) -> None:
            self._refuse_divergence(losses, stage, done, seeds)
            if done in observe_at:
                observations.append(self._observe(population, plans_of_members, done, seeds))
            if done in keep_at:
                self.run.write_checkpoint(keep_at[done], _tensors(population))
            elif done % self.config.checkpoint_every == 0:
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
            for seed in self.seeds:
                for branch, plan in zip(branches, plans, strict=True):
                    rows.append((seed, branch, done, _mixture(plan, done), *next(members)))
        measures = [field.name for field in fields(Behaviour)]
        count = "relaxation" if stage == "relaxation" else "update"
        return pd.DataFrame(rows, columns=["seed", "branch", count, "mixture", *measures])

    def _measure(
        self, stage: str, measure: Callable[[HookedTransformer, int], pd.DataFrame]
    ) -> None:
        """Apply a causal measurement to both branches of every seed at every kept relaxation."""
        result, measure_at = StudyResult(self.run), self.config.relaxation.measure_at
        done = self.run.read_table(stage) if self.run.has(f"tables/{stage}.csv") else None
        finished = 0 if done is None else done["relaxation"].nunique()
        parts = [] if done is None else [done]
        if finished == len(measure_at):
            return
        per_relaxation = len(self.seeds) * len(BRANCHES)
        total = len(measure_at) * per_relaxation
        with self._stage(stage, total=total, initial=finished * per_relaxation) as bar:
            for relaxation in measure_at[finished:]:
                for seed in self.seeds:
                    for branch in BRANCHES:
                        model = result.model(seed, branch, relaxation)
                        model.to(self.device, print_details=False)
                        labels = {"seed": seed, "branch": branch, "relaxation": relaxation}
                        table = measure(model, seed)
                        parts.append(pd.concat([pd.DataFrame(labels, table.index), table], axis=1))
                        bar.update()
                self.run.write_table(stage, pd.concat(parts, ignore_index=True))

    @contextmanager
    def _stage(self, stage: str, *, total: int, initial: int) -> Iterator[tqdm[NoReturn]]:
        """Show the progress of a stage, and note how long it took."""
        begun = time.perf_counter()
        try:
            with tqdm(
                desc=stage, total=total, initial=initial, disable=not self.progress, unit="upd"
            ) as bar:
                yield bar
        except KeyboardInterrupt:
            self.run.add_seconds(stage, time.perf_counter() - begun)
            raise
        # Not after an error: on a full disk this would fail too, and hide which file did first.
        self.run.add_seconds(stage, time.perf_counter() - begun)

    def _refuse_divergence(
        self, losses: Float[Tensor, " member"], stage: str, done: int, seeds: Sequence[int]
    ) -> None:
        if bool(torch.isfinite(losses).all()):
            return
        member = int((~torch.isfinite(losses)).nonzero()[0])
        raise HysteresisError(
            f"seed {seeds[member]} diverged: its loss at update {done} of the {stage} is "
            f"{losses[member].item()}; a smaller learning_rate may help"
        )

    def _refuse_unconverged(self, verdicts: pd.DataFrame) -> None:
        failed = verdicts[~verdicts["converged"]]
        required = self.config.anchor.require_convergence
        if failed.empty or not required or self.run.manifest.get("accepted_unconverged"):
            return
        listed = "; ".join(
            f"seed {row.seed}: excess loss {row.excess_loss:.3f} nats, answer share "
            f"{row.answer_share:.3f}, margin drift {row.margin_drift:.2f}"
            for row in failed.itertuples()
        )
        raise HysteresisError(
            f"anchors that have not converged ({listed}). Train longer (anchor.updates), or go on "
            f"all the same: tl-hysteresis resume {self.run.path} --accept-unconverged"
        )


def judge_convergence(course: pd.DataFrame, config: StudyConfig) -> pd.DataFrame:
    """Whether each anchor has converged, and when its contextual route formed.

    Converged means, on conflict trials: the loss is near the entropy floor, nearly every greedy
    answer is one of the two, and the margin no longer drifts (`AnchorConfig` has the three bounds).
    The contextual route is taken as formed at the first evaluation from which on the contextual
    answer's mean probability stays above half of p0: before, the model knows the fixed rule only.

    Returns:
        One row a seed: `seed`, `converged`, `excess_loss` (nats), `answer_share`, `margin_drift`
        (logits), `route_formed_at` (updates; empty if it never formed).
    """
    settings, rows = config.anchor, []
    for seed, part in course.groupby("seed", sort=False):
        last, fifth = part.iloc[-1], max(len(part) // 5, 1)
        drift = abs(part["margin"][-fifth:].mean() - part["margin"][-2 * fifth : -fifth].mean())
        excess = last["loss"] - last["floor"]
        below = part["contextual"] < config.schedule.p0 / 2
        formed = part.loc[~below[::-1].cummax()[::-1], "update"]
        rows.append(
            {
                "seed": seed,
                "converged": bool(
                    excess <= settings.excess_loss
                    and last["answer_share"] >= settings.answer_share
                    and drift <= settings.margin_drift
                ),
                "excess_loss": excess,
                "answer_share": last["answer_share"],
                "margin_drift": drift,
                "route_formed_at": None if formed.empty else int(formed.iloc[0]),
            }
        )
    return pd.DataFrame(rows).astype({"route_formed_at": "Int64"})


def device_of(config: StudyConfig) -> torch.device:
    """The device that the settings name.

    Raises:
        HysteresisError: a name torch does not know, or a device that is not there.
    """
    try:
        device = torch.device(config.device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise HysteresisError(f"device = {config.device!r} cannot be used: {reason}") from None
    return device


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
