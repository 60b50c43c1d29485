"""Route maps: through which layers, points, heads and positions the answer travels.

A route map is a table of patching effects, site by site. `attribution` makes the same map from
gradients, and `comparison` compares two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import read_activations, run_and_read
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.models import fingerprint
from tl_hysteresis.patching import BaseRun, margins_under, patched_margins
from tl_hysteresis.replacement import mean_reference, mean_replacement
from tl_hysteresis.sites import (
    MAX_BYTES,
    STREAM,
    HookedModel,
    Site,
    as_list,
    check_are_sites,
    check_are_trials,
    check_budget,
    check_conflict,
    check_trials,
    components,
    hook_name,
    one_trial,
    trial_slices,
)
from tl_hysteresis.tasks import Trials

INTACT = "intact"
SITE_AXES = ("layer", "point", "head", "role", "position", "sender", "receiver", "input")
"""The columns of an effect map's table that name a site."""

By = Literal["role", "position", "all"]
Direction = Literal["denoising", "noising"]
Method = Literal["patching", "attribution"]
Map = TypeVar("Map", bound="EffectMap")
Sites = list[tuple[int, str, Site]]
"""Sites with their layer and point."""


def replacement_margins(
    model: HookedModel,
    trials: Trials,
    *,
    role: str | None = "query",
    parts: Mapping[str, Sequence[Site]] | None = None,
) -> pd.DataFrame:
    """Mean margin with each component replaced by its mean, by default at the role "query" alone.

    Another `role` replaces there, and `role=None` at all positions, which is what
    `mean_replacement` does by default.

    Args:
        model: any hooked model; the means are its own, over these trials, role by role.
        trials: with roles.
        role: where to replace: "query" if not given; None for all positions.
        parts: the sites that are replaced at once, by a name; None for all `components`.

    Returns:
        One row for the intact model and for each part: `component`, `margin` (logits).

    Raises:
        HysteresisError: a role that no position has, or a site that the model does not have.
    """
    given = components(model) if parts is None else parts
    parts = {name: check_are_sites(part) for name, part in given.items()}
    sites = list(dict.fromkeys(site for part in parts.values() for site in part))
    reference = mean_reference(model, trials, sites)
    run = BaseRun.of(model, trials)
    margins = {INTACT: run.margins}
    for name, part in parts.items():
        margins[name] = margins_under(run, mean_replacement(part, reference, trials, role=role))
    return pd.DataFrame(
        {
            "component": margins.keys(),
            "margin": [m.double().mean().item() for m in margins.values()],
        }
    )


@dataclass(frozen=True, eq=False)
class EffectMap:
    """Effects of patching, site by site, trial by trial.

    The sign: an effect is margin(patched) - margin(unpatched), in logits. Its share is the effect
    over what patching everything would give, margin(other run) - margin(this run): 1 where one
    site carries all of the difference, 0 where it carries none, whichever way is patched.

    Attributes:
        table: one row a site: the columns that name it, `effect` (mean over trials, in logits) and,
            unless they were refused, `share`.
        effects: the effect in each trial; rows as in `table`.
        clean: margin of each trial in the clean run, in logits.
        corrupted: margin of each trial in the corrupted run, in logits.
        direction: "denoising", clean into corrupted, or "noising", corrupted into clean.
        trials: fingerprint of the clean trials.
        corrupted_tokens: fingerprint of the corrupted ones, with the answers of the clean.
        model: fingerprint of the model.
        method: "patching", which is exact, or "attribution", which is to first order.
    """

    table: pd.DataFrame
    effects: Float[Tensor, "site trial"]
    clean: Float[Tensor, " trial"]
    corrupted: Float[Tensor, " trial"]
    direction: Direction
    trials: str
    corrupted_tokens: str = ""
    model: str = ""
    method: Method = "patching"

    @classmethod
    def of(
        cls: type[Map],
        model: HookedModel,
        clean: Trials,
        corrupted: Trials,
        labels: pd.DataFrame,
        effects: Float[Tensor, "site trial"],
        here: Float[Tensor, " trial"],
        there: Float[Tensor, " trial"],
        direction: Direction,
        shares: bool,
        method: Method = "patching",
    ) -> Map:
        """A map from effects, and the margins of the run patched into and of the other."""
        mean = effects.mean(dim=1).numpy()
        table = labels.assign(effect=mean)
        if shares:
            table["share"] = mean / share_scale(model, here, there)
        return cls(
            table,
            effects,
            clean=there if direction == "denoising" else here,
            corrupted=here if direction == "denoising" else there,
            direction=direction,
            trials=clean.fingerprint,
            corrupted_tokens=corrupted.with_answers_of(clean).fingerprint,
            model=fingerprint(model),
            method=method,
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.table)} sites, {self.effects.shape[1]} trials, "
            f"{self.direction} by {self.method}, margin {self.clean.mean():+.3f} clean, "
            f"{self.corrupted.mean():+.3f} corrupted)"
        )

    @property
    def axes(self) -> list[str]:
        """The columns of `table` that name a site."""
        return [name for name in self.table.columns if name in SITE_AXES]

    @property
    def scale(self) -> float:
        """What shares are shares of: mean margin of the other run minus that of this, in logits."""
        difference = (self.clean - self.corrupted).mean().item()
        return difference if self.direction == "denoising" else -difference

    def _check_values(self, values: str) -> None:
        if values not in ("effect", "share") or values not in self.table:
            raise HysteresisError(f"the map has no {values!r}; say 'effect', or 'share' if it does")

    def per_trial(self) -> pd.DataFrame:
        """One row a site and trial: the columns that name the site, `trial`, `effect` (logits)."""
        n_sites, n_trials = self.effects.shape
        sites = self.table[self.axes].iloc[np.repeat(np.arange(n_sites), n_trials)]
        return sites.reset_index(drop=True).assign(
            trial=np.tile(np.arange(n_trials), n_sites), effect=self.effects.flatten().numpy()
        )


@dataclass(frozen=True, eq=False, repr=False)
class RouteMap(EffectMap):
    """Effects by `layer`, `point`, `head` (where a point has heads) and `role` or `position`."""

    def tensor(self, point: str) -> Tensor:
        """Mean effects at one point: `[layer]`, then `[head]`, then `[role]` or `[position]`.

        Raises:
            HysteresisError: a point that the map does not have.

        Example:
            >>> route.tensor("z").shape  # doctest: +SKIP
            torch.Size([2, 4, 17])
        """
        part = self._at(point)
        axes = [axis for axis in self.axes if axis != "point" and part[axis].notna().all()]
        shape = [part[axis].nunique() for axis in axes]
        return torch.from_numpy(part["effect"].to_numpy().copy()).view(shape)

    def _at(self, point: str) -> pd.DataFrame:
        part = self.table[self.table["point"] == point]
        if part.empty:
            raise HysteresisError(
                f"the map has no point {point!r}; it has {', '.join(self.table['point'].unique())}"
            )
        return part

    def matrix(self, point: str, *, values: str = "effect") -> pd.DataFrame:
        """Mean effects, or shares, at one point as a frame to look at.

        A row for each layer, or head such as "L1H3"; a column for each role or position.

        Args:
            point: one of the map's points.
            values: "effect", in logits, or "share".

        Raises:
            HysteresisError: a point, or values, that the map does not have.

        Example:
            >>> from tl_hysteresis.config import ModelConfig
            >>> from tl_hysteresis.models import build_model, hooked_config
            >>> config = hooked_config(ModelConfig(n_heads=2), d_vocab=32, n_ctx=17)
            >>> model = build_model(config, seed=0)
            >>> tokens = torch.randint(16, (2, 8, 17), generator=torch.Generator().manual_seed(0))
            >>> roles = ["context"] * 16 + ["query"]
            >>> clean, corrupted = (Trials.of(t, [16] * 8, [31] * 8, roles=roles) for t in tokens)
            >>> matrix = route_map(model, clean, corrupted, points="z").matrix("z")
            >>> list(matrix.index), list(matrix.columns)
            (['L0H0', 'L0H1', 'L1H0', 'L1H1'], ['context', 'query'])
        """
        self._check_values(values)
        part = self._at(point)
        rows = part["layer"].map("L{}".format)
        if "head" in part and part["head"].notna().all():
            rows += part["head"].map("H{}".format)
        by = next((axis for axis in ("role", "position") if axis in part), None)
        columns = ["all"] if by is None else part[by].unique()
        frame = part[values].to_numpy().reshape(-1, len(columns))
        return pd.DataFrame(frame, index=rows.unique(), columns=columns)

    def dominant_head(self) -> str:
        """The head with the largest effect in size at any of its positions, such as "L1H3".

        Raises:
            HysteresisError: a map without heads.
        """
        return dominant_head(self.table)


def dominant_head(table: pd.DataFrame) -> str:
    """The head of a route map's table with the largest effect in size at any of its positions.

    By its output "z" where the map has it, else by the first point with heads: keys of a group
    would not be a head's.
    """
    if "head" not in table or table["head"].isna().all():
        raise HysteresisError("this map has no heads: take it with a point such as 'z'")
    heads = table[table["head"].notna()]
    points = heads["point"].unique()
    heads = heads[heads["point"] == ("z" if "z" in points else points[0])]
    strongest = heads.iloc[int(heads["effect"].abs().to_numpy().argmax())]
    return f"L{int(strongest['layer'])}H{int(strongest['head'])}"


def route_map(
    model: HookedModel,
    clean: Trials,
    corrupted: Trials,
    *,
    points: str | Sequence[str] | None = None,
    by: By | None = None,
    roles: str | Sequence[str] | None = None,
    direction: Direction = "denoising",
    shares: bool = True,
    max_bytes: int = MAX_BYTES,
) -> RouteMap:
    """Patch one run's activations into the other: layer by point by (head) by role or position.

    Denoising patches clean activations into the corrupted run: what is enough to restore the
    answer. Noising patches corrupted ones into the clean run: what is needed for it. Margins are of
    the clean trials' answers throughout; the answers and roles of the corrupted ones are not looked
    at. An effect is margin(patched) - margin(unpatched), in logits, and its share the fraction of
    the difference between the two runs' margins that it makes up: see `EffectMap`.

    Args:
        model: any hooked model.
        clean: trials; with roles if the map is to go by role. One without some role counts there
            with an effect of 0.
        corrupted: the same trials with other tokens.
        points: by TransformerLens's short names: "resid_pre", "resid_mid", "resid_post",
            "attn_out", "mlp_out", "z", "q", "k", "v", "pattern" (by query), ... Those with a head
            axis are patched head by head ("k" and "v" by group where keys are grouped). None for
            all of the residual stream's that the model has (without MLPs, no "resid_mid").
        by: what is patched at once in a trial: all positions of a "role", one "position", or "all".
            None for "role" where the trials carry roles, else "position".
        roles: names of roles; None for all.
        direction: "denoising" or "noising".
        shares: False leaves them out, where the two runs' margins differ too little to divide by.
        max_bytes: of activations held at a time, about; fewer cost more passes.

    Raises:
        HysteresisError: batches of different shape; a misspelt point; a role that no trial has; a
            corruption that leaves the mean margin as it is, so that a share has no meaning; a site
            whose write this model would ignore or apply by half.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> tokens = torch.randint(16, (2, 8, 17), generator=torch.Generator().manual_seed(0))
        >>> clean, corrupted = (Trials.of(t, clean_answer, [31] * 8)
        ...     for clean_answer in [tokens[0, :, 3]] for t in tokens)
        >>> heads = route_map(model, clean, corrupted, points=["z"], by="all")
        >>> heads.tensor("z").shape
        torch.Size([2, 4])

    Source: activation patching, Vig et al. (2020), Meng et al. (2022); the two directions,
    Heimersheim and Nanda (2024), How to use and interpret activation patching.
    """
    base, source = two_runs(model, clean, corrupted, direction)
    sites, chosen, labels = plan(model, clean, points, by, roles)
    parts = []
    names = {site.name for _, _, site in sites}
    check_budget(max_bytes)
    # What is read once may take more than what each of many passes does.
    for part in trial_slices(model, clean, names, max_bytes=4 * max_bytes):
        run = BaseRun.of(model, base.select(part))
        logits, cache = run_and_read(model, source.select(part), names)
        margins = [
            patched_margins(
                run, site, site.read(cache[site.name]), chosen[:, part], max_bytes=max_bytes
            )
            for _, _, site in sites
        ]
        parts.append((torch.cat(margins), run.margins, logit_margin(logits, clean.select(part))))
    patched, here, there = (torch.cat(p, dim=-1).cpu().double() for p in zip(*parts, strict=True))
    effects = patched - here
    return RouteMap.of(model, clean, corrupted, labels, effects, here, there, direction, shares)


def plan(
    model: HookedModel,
    clean: Trials,
    points: str | Sequence[str] | None,
    by: By | None,
    roles: str | Sequence[str] | None,
) -> tuple[Sites, Bool[Tensor, "choice trial pos"], pd.DataFrame]:
    """What is patched: sites, positions in each trial, and the two crossed as a table."""
    if points is not None:
        points = as_list(points)
        if not points:
            raise HysteresisError("points is empty; None is for all points of the residual stream")
    if by is None:
        by = "role" if roles is not None or clean.roles is not None else "position"
    if points is None:
        points = [p for p in STREAM if f"blocks.0.hook_{p}" in model.hook_dict]
    sites: Sites = []
    shapes = _shapes(model, clean, points)
    for layer in range(model.cfg.n_layers):
        for point in points:
            name = hook_name(model, point, layer)
            heads = range(shapes[point][2]) if len(shapes[point]) == 4 else [None]
            sites += [(layer, point, Site(name, head)) for head in heads]
    chosen, names = choices(clean, by, roles)
    columns = ["layer", "point", "head", by]
    rows = [(layer, p, site.head, name) for layer, p, site in sites for name in names]
    table = pd.DataFrame(rows, columns=columns).astype({"head": "Int64"})
    unused = [] if table["head"].notna().any() else ["head"]
    return sites, chosen, table.drop(columns=unused + (["all"] if by == "all" else []))


def two_runs(
    model: HookedModel, clean: Trials, corrupted: Trials, direction: Direction
) -> tuple[Trials, Trials]:
    """The run that is patched into, measured by the clean answers, and the one patched from.

    Raises:
        HysteresisError: two runs that cannot be patched into each other.
    """
    if direction not in ("denoising", "noising"):
        raise HysteresisError(f'direction is {direction!r}, but must be "denoising" or "noising"')
    check_are_trials(clean, corrupted)
    if clean.tokens.shape != corrupted.tokens.shape:
        raise HysteresisError(
            f"clean trials are {tuple(clean.tokens.shape)}, "
            f"corrupted {tuple(corrupted.tokens.shape)}: they must match trial by trial"
        )
    check_trials(model, clean)
    check_trials(model, corrupted.with_answers_of(clean))
    check_conflict(clean)
    if direction == "denoising":
        return corrupted.with_answers_of(clean), clean
    return clean, corrupted


def _shapes(model: HookedModel, trials: Trials, points: Sequence[str]) -> dict[str, torch.Size]:
    """Shapes of the points' activations, as a site reads them, from one trial in layer 0."""
    names = {point: hook_name(model, point, 0) for point in points}
    cache = read_activations(model, one_trial(model, trials), set(names.values()))
    return {point: Site(name).read(cache[name]).shape for point, name in names.items()}


def choices(
    trials: Trials, by: By, roles: str | Sequence[str] | None
) -> tuple[Bool[Tensor, "choice trial pos"], Sequence[str | int]]:
    """The positions that are patched at once, and what they are called."""
    if roles is not None and by != "role":
        raise HysteresisError(f"roles are given, but the map goes by {by!r}")
    shape, device = trials.tokens.shape, trials.tokens.device
    if by == "all":
        return torch.ones(1, *shape, dtype=torch.bool, device=device), ["all"]
    if by == "position":
        each = torch.eye(shape[1], dtype=torch.bool, device=device)
        return each[:, None].expand(-1, shape[0], -1), range(shape[1])
    if by != "role":
        raise HysteresisError(f'by is {by!r}, but must be "role", "position" or "all"')
    if trials.roles is None:
        raise HysteresisError(
            'these trials carry no roles, so the map cannot go by role: give by="position"'
        )
    names = list(trials.role_names) if roles is None else as_list(roles)
    if not names:
        raise HysteresisError("roles is empty; None is for all roles")
    return torch.stack([trials.positions(name) for name in names]), names


def share_scale(
    model: HookedModel, here: Float[Tensor, " trial"], there: Float[Tensor, " trial"]
) -> float:
    """The mean difference that shares are taken of, refused where it is no more than rounding."""
    eps = torch.finfo(next(model.parameters()).dtype).eps
    difference = (there.double() - here.double()).mean().item()
    if abs(difference) < 10.0 * eps * (1.0 + here.double().abs().mean().item()):
        raise HysteresisError(
            f"both runs have the same mean margin ({here.double().mean():.6f}), so effects have "
            "no scale; shares=False gives them in logits alone"
        )
    return difference
