"""What holds the memory: experiments on a finished study, in its own run folder.

`Memory` reads as their table of contents. Each experiment trains one population, or measures
models, and writes tables; `traces.py` computes the answers from the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import HookedTransformer

from tl_hysteresis.comparison import compare_routes
from tl_hysteresis.config import SGDConfig, StudyConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.models import build_model
from tl_hysteresis.results import StudyResult
from tl_hysteresis.routes import INTACT, replacement_margins, route_map
from tl_hysteresis.schedules import BRANCHES, Plan
from tl_hysteresis.sites import Site, components
from tl_hysteresis.stages import Member
from tl_hysteresis.store import RunFolder
from tl_hysteresis.study import Study, loop_plans, threads
from tl_hysteresis.tasks import generator
from tl_hysteresis.traces import MemoryResult
from tl_hysteresis.training import OptimizerState, Population, initial_state

SNAPSHOTS = 8
"""Directions of the anchor's own drift: as many snapshots of it as it is trained on."""

Loop = tuple[int, Plan, dict[str, str | int]]
"""Whose loop, along which plan, and its names in tables."""

NO_EFFECT = "b_K"
"""A key's bias shifts all scores of a query alike: its gradient is rounding error, and so are its
steps. It is left out of distances between weights."""


def examine_memory(folder: Path | str, *, progress: bool = False) -> MemoryResult:
    """Run the memory experiments on a finished study, in its folder; again, it goes on.

    Which they are, and how large, is set in `StudyConfig.memory`.

    Args:
        folder: the run folder of a complete study.
        progress: show progress bars.

    Raises:
        HysteresisError: a study that is not complete, begun by other versions, whose loop is a
            same-order control, or of a single seed.

    Example:
        >>> memory = examine_memory("runs/reproduce")  # doctest: +SKIP
        >>> memory.effects()  # weights against optimizer state  # doctest: +SKIP
    """
    run = RunFolder.open(folder)
    run.verify()
    if not run.complete:
        raise HysteresisError(
            f"the study {run.path} is not complete: tl-hysteresis resume {run.path}"
        )
    refuse_without_memory(run.config)
    result = MemoryResult(StudyResult(run))
    if result.complete:
        return result
    run.check_versions()
    with run.locked():
        run.clean()
        with threads(run.manifest["threads"]):
            memory = Memory(Study(run, progress=progress))
            memory.cross()
            memory.control()
            memory.look_inside()
        run.finish()
    return result


def refuse_without_memory(config: StudyConfig) -> None:
    """Refuse settings under which there is no memory to look for, or no test that could find it.

    Raises:
        HysteresisError: a same-order control, or a single seed.
    """
    if config.schedule.same_order:
        raise HysteresisError(
            "schedule.same_order = true: both branches took the same path, so there is no memory "
            "of it to look for"
        )
    if len(config.seeds) < 2:
        raise HysteresisError(
            f"seeds = {list(config.seeds)}: intervals and sign-flip tests of what holds the memory "
            "are over seeds, at least two"
        )


def optimizer_states(
    branches: Population, anchors: Population, *, member: int, anchor: int
) -> dict[str, OptimizerState]:
    """The optimizer states that a branch's weights are crossed with, by name.

    `below`, `above`, `anchor`: that model's state at the end of the loop, or of the anchor's
    training. `reset`: as before the first update. `first_moment_reset` and `second_moment_reset`:
    the branch's own state with one moment as before the first update, its bias correction included.
    SGD has one moment, so that only `reset` remains of the three.

    Args:
        branches: below and above of each seed in turn.
        anchors: one for each seed.
        member: whose own state the partial resets start from.
        anchor: index of its anchor.
    """
    pair = member - member % 2
    fresh = initial_state(branches.optimizer, branches.parameters[:1])
    states = {
        "below": _state_of(branches, pair),
        "above": _state_of(branches, pair + 1),
        "anchor": _state_of(anchors, anchor),
        "reset": fresh,
    }
    if isinstance(branches.optimizer, SGDConfig):
        return states
    own = _state_of(branches, member)
    first = {name: fresh[name] for name in ("first_moment", "step")}
    second = {name: fresh[name] for name in ("second_moment", "second_step")}
    return states | {"first_moment_reset": own | first, "second_moment_reset": own | second}


def cross_memory(branches: Population, anchors: Population) -> tuple[Population, pd.DataFrame]:
    """Every branch's weights with every optimizer state, as one population.

    Args:
        branches: at the end of the loop: below and above of the first seed, of the second, ...
        anchors: the anchor of each seed.

    Returns:
        The population, and what each member is: `index` of the seed, `weights`, `state`.

    Raises:
        HysteresisError: branches that are not two for each anchor.

    Example:
        >>> from tl_hysteresis.config import AdamWConfig, ModelConfig
        >>> from tl_hysteresis.models import hooked_config
        >>> config = hooked_config(ModelConfig(), d_vocab=32, n_ctx=17)
        >>> anchors = Population.build(config, AdamWConfig(), seeds=[0, 1])
        >>> population, cells = cross_memory(anchors.fork([0, 0, 1, 1]), anchors)
        >>> len(population), cells["state"].nunique()
        (24, 6)
    """
    if len(branches) != 2 * len(anchors):
        raise HysteresisError(
            f"{len(branches)} branches of {len(anchors)} anchors: each anchor has one from below "
            "and one from above"
        )
    parameters, states, rows = [], [], []
    for member in range(len(branches)):
        of_member = optimizer_states(branches, anchors, member=member, anchor=member // 2)
        for name, state in of_member.items():
            parameters.append(branches.parameters[member])
            states.append(state)
            rows.append({"index": member // 2, "weights": BRANCHES[member % 2], "state": name})
    population = Population(
        branches.config,
        branches.layout,
        torch.stack(parameters),
        branches.optimizer,
        {name: torch.cat([state[name] for state in states]) for name in states[0]},
    )
    return population, pd.DataFrame(rows)


def _state_of(population: Population, member: int) -> OptimizerState:
    return {name: value[member : member + 1] for name, value in population.state.items()}


class Memory:
    """The experiments on one finished study."""

    def __init__(self, study: Study) -> None:
        """Read back anchors and branches, as they were at the end of the loop."""
        self.study, self.run, self.stages = study, study.run, study.stages
        self.config, self.seeds, self.settings = study.config, study.seeds, study.config.memory
        self.anchors = study.train_anchors()
        self.branches = study.run_loop(self.anchors)
        self.updates = self.config.relaxation.measure_at[-1]
        every = range(0, self.updates + 1, self.settings.observe_every)
        self.observe_at = sorted({*every, *self.config.relaxation.measure_at})

    def cross(self) -> None:
        """Relax every branch's weights with every optimizer state, all on the same batches."""
        population, cells = cross_memory(self.branches, self.anchors)
        plan = self.study.constant("relaxation", self.updates)
        members = [
            Member(self.seeds[int(index)], plan, {"weights": str(weights), "state": str(state)})
            for index, weights, state in cells.itertuples(index=False)
        ]
        self._relax("crossing", population, members)

    def control(self) -> None:
        """Loops whose order is shuffled, loops run again on other batches, and no loop at all."""
        plans = {
            (seed, order): self.study.below.reordered(
                generator(seed, "shuffled order", order).permutation(len(self.study.below)).tolist()
            )
            for seed, order in product(self.seeds, range(self.settings.shuffled))
        }
        self._loop("shuffled", [(seed, plan, {"order": k}) for (seed, k), plan in plans.items()])
        replicates: list[Loop] = [
            (seed, plan, {"replicate": replicate, "branch": branch})
            for replicate in range(self.settings.replicates)
            for branches in [loop_plans(self.config, stream=f"loop/replicate {replicate}")]
            for seed in self.seeds
            for branch, plan in zip(BRANCHES, branches, strict=True)
        ]
        if replicates:
            self._loop("replicates", replicates)
        length = len(self.study.below) + self.updates
        self.stages.train(
            "drift",
            self.anchors.fork(range(len(self.anchors))),
            Member.of_each(self.seeds, {"anchor": self.study.constant("drift", length)}),
            observe_at=[0, length],
            keep_at={at: f"drift_{at}" for at in self._drift_at()},
        )

    def look_inside(self) -> None:
        """Once behaviour has relaxed, and where it first matches: do the parts still differ?"""
        at = {seed: self.updates for seed in self.seeds}
        result = MemoryResult(StudyResult(self.run))
        matched = result.matched().set_index("seed")["relaxation"].astype(int).to_dict()
        plan = self.study.constant("relaxation", self.updates)
        last = max(matched.values())
        if last > 0:
            self.stages.train(
                "matched",
                self.branches.fork(range(len(self.branches))),
                Member.of_each(self.seeds, dict.fromkeys(BRANCHES, plan.first(last))),
                observe_at=sorted(set(matched.values())),
                keep_at={t: f"matched_{t}" for t in sorted(set(matched.values()) - {0})},
                count="relaxation",
            )
        if self.run.has("tables/parts.csv"):
            return
        parts, distances = [], []
        for seed in self.seeds:
            for place, when in (("relaxed", at[seed]), ("matched", matched[seed])):
                models = self._branch_parameters(seed, place, when)
                if place == "relaxed":
                    models |= self._shuffled_parameters(seed)
                parts.append(self._measure_parts(seed, models).assign(place=place))
                distances.append(self._distances(seed, models).assign(place=place))
        self.run.write_table("distances", pd.concat(distances, ignore_index=True))
        self.run.write_table("parts", pd.concat(parts, ignore_index=True))

    def _relax(self, stage: str, population: Population, members: Sequence[Member]) -> None:
        self.stages.train(
            stage,
            population,
            members,
            observe_at=self.observe_at,
            keep_at={self.updates: stage},
            count="relaxation",
            may_diverge=True,
        )

    def _loop(self, stage: str, loops: Sequence[Loop]) -> None:
        """Send copies of the anchors through loops, and relax them as the branches were."""
        population = self.anchors.fork([self.seeds.index(seed) for seed, _, _ in loops])
        members = [Member(*loop) for loop in loops]
        updates = len(members[0].plan)
        self.stages.train(
            f"{stage}_loop",
            population,
            members,
            observe_at=[updates],
            keep_at={updates: f"{stage}_loop"},
            may_diverge=True,
        )
        plan = self.study.constant("relaxation", self.updates)
        self._relax(stage, population, [Member(m.seed, plan, m.labels) for m in members])

    def _branch_parameters(
        self, seed: int, place: str, when: int
    ) -> dict[str, Float[Tensor, " param"]]:
        kept = place == "relaxed" or when == 0
        stored = self.run.read_checkpoint(f"relaxation_{when}" if kept else f"matched_{when}")
        first = 2 * self.seeds.index(seed)
        return {b: stored["parameters"][first + k] for k, b in enumerate(BRANCHES)}

    def _shuffled_parameters(self, seed: int) -> dict[str, Float[Tensor, " param"]]:
        stored = self.run.read_checkpoint("shuffled")["parameters"]
        first = self.seeds.index(seed) * self.settings.shuffled
        return {f"shuffled {k}": stored[first + k] for k in range(self.settings.shuffled)}

    def _measure_parts(
        self, seed: int, models: Mapping[str, Float[Tensor, " param"]]
    ) -> pd.DataFrame:
        """What each model's parts do: replaced margins, and how strong the anchor's route is."""
        trials, task = self.study.trials[seed], self.study.task
        clean = trials.select(slice(self.config.measurement.patching_trials))
        corruption = task.corruptions[0]
        corrupted = task.corrupt(
            clean, corruption, rng=generator(seed, f"corruption/{corruption}", 0)
        )
        anchor = self._model(self.anchors.parameters[self.seeds.index(seed)])
        route = route_map(anchor, clean, corrupted).table
        totals = _totals(anchor)
        rows = []
        for name, parameters in models.items():
            model = self._model(parameters)
            margins = replacement_margins(model, trials, parts=totals)
            margin = dict(zip(margins["component"], margins["margin"], strict=True))
            strength = compare_routes(route_map(model, clean, corrupted).table, route)
            values = {"margin": margin[INTACT], "contextual route gain": strength.gain}
            for part in totals:
                values[f"margin, {part} replaced"] = margin[part]
            if "all MLPs" in margin:
                values["fixed route strength"] = margin["all MLPs"] - margin[INTACT]
            rows += [
                {"seed": seed, "model": name, "quantity": quantity, "value": value}
                for quantity, value in values.items()
            ]
        return pd.DataFrame(rows)

    def _distances(self, seed: int, models: Mapping[str, Float[Tensor, " param"]]) -> pd.DataFrame:
        """How far apart weights are, in and out of the span of the anchor's own drift."""
        kept = self._counted()
        start = self.anchors.parameters[self.seeds.index(seed)].cpu()[kept]
        drift = torch.stack(
            [
                self.run.read_checkpoint(f"drift_{at}")["parameters"][self.seeds.index(seed)][kept]
                for at in self._drift_at()
            ]
        )
        basis = torch.linalg.qr((drift - start).double().T).Q
        rows = []
        for one, other in _pairs(models):
            difference = (models[one] - models[other]).cpu()[kept].double()
            inside = (basis.T @ difference).norm().item()
            whole = difference.norm().item()
            outside = (difference - basis @ (basis.T @ difference)).norm().item()
            rows.append((seed, one, other, whole, inside, outside))
        columns = ["seed", "first", "second", "distance", "in_drift", "out_of_drift"]
        return pd.DataFrame(rows, columns=columns)

    def _drift_at(self) -> list[int]:
        """When the anchor that is merely trained on is kept."""
        length = len(self.study.below) + self.updates
        return sorted({round(length * part / SNAPSHOTS) for part in range(1, SNAPSHOTS + 1)} - {0})

    def _counted(self) -> Tensor:
        """True for the parameters that the function depends on."""
        layout = self.anchors.layout
        return torch.cat(
            [
                torch.full((size,), not name.endswith(NO_EFFECT))
                for name, size in zip(layout.names, layout.sizes, strict=True)
            ]
        )

    def _model(self, parameters: Float[Tensor, " param"]) -> HookedTransformer:
        model = build_model(self.anchors.config, seed=0)
        self.anchors.layout.write(parameters, model)
        model.to(self.study.device, print_details=False)
        return model


def _pairs(models: Mapping[str, Float[Tensor, " param"]]) -> Iterator[tuple[str, str]]:
    """The two branches, and every two shuffled loops."""
    names = list(models)
    yield names[0], names[1]
    for k, one in enumerate(names[2:], 2):
        for other in names[k + 1 :]:
            yield one, other


def _totals(model: HookedTransformer) -> dict[str, list[Site]]:
    """All heads, and all MLPs where there are any."""
    parts = components(model)
    mlps = [site for name, sites in parts.items() if name.endswith("MLP") for site in sites]
    return {"all heads": list(parts["all heads"])} | ({"all MLPs": mlps} if mlps else {})
