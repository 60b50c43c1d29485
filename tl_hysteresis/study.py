"""The protocol: train anchors, fork them, send the branches through the loop, relax, measure.

`Study` reads as its table of contents, and `_run` is the order of its chapters. `stages.py` holds
what makes each of them resumable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
from transformer_lens import HookedTransformer

from tl_hysteresis.config import StudyConfig
from tl_hysteresis.convergence import judge_convergence
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.factory import make_task
from tl_hysteresis.models import hooked_config
from tl_hysteresis.results import StudyResult
from tl_hysteresis.routes import replacement_margins, route_map
from tl_hysteresis.schedules import (
    BRANCHES,
    SAME_ORDER,
    Plan,
    constant_plan,
    matched_plans,
    verify_matched,
)
from tl_hysteresis.stages import Member, Stages
from tl_hysteresis.store import MANIFEST, PROGRESS, RunFolder
from tl_hysteresis.tasks import generator
from tl_hysteresis.training import Population

ANCHOR_FILES = ("tables/course.csv", "checkpoints/anchor.safetensors", "tables/anchors.csv")
"""In the order in which they are taken over: where the last one is, all are."""


def run_study(
    config: StudyConfig,
    folder: Path | str,
    *,
    anchors: Path | str | None = None,
    progress: bool = False,
) -> StudyResult:
    """Run a whole study into a new folder.

    Args:
        config: the settings.
        folder: where the run is kept; must not exist yet, or be empty.
        anchors: a run folder whose anchors these settings would train again: they are taken over.
        progress: show progress bars.

    Raises:
        HysteresisError: bad settings, a folder that exists, a device that is not there, an anchor
            that did not converge, a value that is not finite, anchors of another study.

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
    check_possible(config)
    source = None if anchors is None else _anchors_for(config, anchors)
    run = RunFolder.create(folder, config, threads=_threads_for(config))
    with run.locked():
        if source is not None:
            run.adopt(source, *ANCHOR_FILES)
        return _run(run, progress=progress)


def train_anchors(config: StudyConfig, folder: Path | str, *, progress: bool = False) -> None:
    """Train a study's anchors and no more, for `run_study` to take over; again, it goes on.

    Args:
        config: the settings; those that anchors do not depend on are left out of account.
        folder: where they are kept, as an incomplete run.
        progress: show progress bars.

    Raises:
        HysteresisError: bad settings, a folder that holds something else, an anchor that diverges.
            Whether they converged is for the study to judge that takes them over.
    """
    config = config.of_anchors()
    check_possible(config)
    folder = Path(folder)
    if (folder / MANIFEST).exists() and RunFolder.open(folder).config == config:
        run = RunFolder.open(folder)
        run.verify()
        run.check_versions()
    else:
        run = RunFolder.create(folder, config, threads=_threads_for(config))
    with run.locked(), threads(run.manifest["threads"]):
        run.clean()
        Study(run, progress=progress).train_anchors()
        (run.path / PROGRESS).unlink(missing_ok=True)


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
    with run.locked():
        run.clean()
        if accept_unconverged:
            run.note(accepted_unconverged=True)
        return _run(run, progress=progress)


def _run(run: RunFolder, *, progress: bool) -> StudyResult:
    with threads(run.manifest["threads"]):
        study = Study(run, progress=progress)
        study.prove_matching()
        anchors = study.train_anchors()
        branches = study.run_loop(anchors)
        study.relax(branches)
        if run.config.measurement.circuits:
            study.replace_components()
            study.map_routes()
    run.finish()
    return StudyResult(run)


def _anchors_for(config: StudyConfig, path: Path | str) -> RunFolder:
    """The run whose anchors these settings would train again."""
    source = RunFolder.open(path)
    ours, theirs = config.of_anchors(), source.config.of_anchors()
    differing = [
        name for name in type(ours).model_fields if getattr(ours, name) != getattr(theirs, name)
    ]
    if differing:
        raise HysteresisError(
            f"the anchors of {source.path} are of other settings: {', '.join(differing)}"
        )
    source.check_versions()
    return source


def check_possible(config: StudyConfig) -> None:
    """Refuse settings whose task, model or device cannot be made here.

    Raises:
        HysteresisError: what cannot be, and why.
    """
    if not isinstance(config, StudyConfig):
        raise HysteresisError(f"a study takes a StudyConfig, not {type(config).__name__}")
    device_of(config)
    task = make_task(config.task)
    hooked_config(config.model, d_vocab=task.d_vocab, n_ctx=task.n_ctx)


def _threads_for(config: StudyConfig) -> int:
    return config.threads or torch.get_num_threads()


class Study:
    """The stages of one study; each reads or writes its part of the run folder."""

    def __init__(self, run: RunFolder, *, progress: bool = False) -> None:
        """Draw the held-out conflict trials of every seed, and lay out the two branches."""
        self.run, self.config, self.seeds = run, run.config, run.config.seeds
        self.device = device_of(self.config)
        self.task = make_task(self.config.task)
        self.below, self.above = loop_plans(self.config)
        result = StudyResult(run)
        self.trials = {seed: result.trials(seed).to(self.device) for seed in self.seeds}
        self.stages = Stages(run, self.task, self.trials, progress)

    def prove_matching(self) -> None:
        """Show for each seed that both branches see the same examples in another order."""
        if self.run.has("tables/matching.csv"):
            return
        batch_size, rows = self.config.optimizer.batch_size, []
        for seed in self.seeds:
            matching = verify_matched(
                self.below, self.above, task=self.task, seed=seed, batch_size=batch_size
            )
            expected = (SAME_ORDER,) if self.config.schedule.same_order else ()
            if matching.differences != expected:
                raise HysteresisError(
                    f"the branches of seed {seed} do not match: {'; '.join(matching.differences)}"
                )
            for branch in BRANCHES:
                rows.append({"seed": seed, "branch": branch, **asdict(getattr(matching, branch))})
        self.run.write_table("matching", pd.DataFrame(rows))

    def train_anchors(self) -> Population:
        """Train one anchor a seed at the balanced mixture, and judge whether it has converged."""
        settings, task = self.config.anchor, self.task
        shape = hooked_config(self.config.model, d_vocab=task.d_vocab, n_ctx=task.n_ctx)
        anchors = Population.build(shape, self.config.optimizer, seeds=self.seeds).to(self.device)
        self.stages.train(
            "course",
            anchors,
            Member.of_each(self.seeds, {"anchor": self.constant("anchor", settings.updates)}),
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
        updates, dwell = len(self.below), self.config.schedule.dwell
        self.stages.train(
            "loop",
            branches,
            Member.of_each(self.seeds, dict(zip(BRANCHES, (self.below, self.above), strict=True))),
            observe_at=range(0, updates + 1, dwell),
            keep_at={updates: "relaxation_0"},
        )
        return branches

    def relax(self, branches: Population) -> None:
        """Train both branches on at the balanced mixture, on the same batches."""
        measure_at = self.config.relaxation.measure_at
        plan = self.constant("relaxation", measure_at[-1])
        self.stages.train(
            "relaxation",
            branches,
            Member.of_each(self.seeds, dict.fromkeys(BRANCHES, plan)),
            observe_at=range(measure_at[-1] + 1),
            keep_at={at: f"relaxation_{at}" for at in measure_at if at > 0},
            count="relaxation",
        )

    def replace_components(self) -> None:
        """In each checkpoint, replace each component by its mean and measure the margin."""

        def margins(model: HookedTransformer, seed: int) -> pd.DataFrame:
            return replacement_margins(model, self.trials[seed])

        self.stages.measure("replacement", margins)

    def map_routes(self) -> None:
        """In each checkpoint, patch clean activations into corrupted runs, site by site."""
        n_trials = self.config.measurement.patching_trials

        def maps(model: HookedTransformer, seed: int) -> pd.DataFrame:
            clean, tables = self.trials[seed].select(slice(n_trials)), []
            for corruption in self.task.corruptions:
                rng = generator(seed, f"corruption/{corruption}", 0)
                corrupted = self.task.corrupt(clean, corruption, rng=rng)
                table = route_map(model, clean, corrupted).table
                tables.append(table.assign(corruption=corruption))
            return pd.concat(tables)

        self.stages.measure("routes", maps)

    def constant(self, stream: str, updates: int) -> Plan:
        """A plan that stays where the anchors are trained."""
        schedule = self.config.schedule
        return constant_plan(
            updates,
            schedule.p0,
            stream=stream,
            labels=schedule.labels,
            label_noise=schedule.label_noise,
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


def loop_plans(config: StudyConfig, *, stream: str = "loop") -> tuple[Plan, Plan]:
    """The plans of the two branches, `(below, above)`, that a study's settings describe."""
    below, above = matched_plans(config.schedule, stream=stream, centre=config.centre)
    return below, below if config.schedule.same_order else above


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
def threads(number: int) -> Iterator[None]:
    """Compute with this many CPU threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
