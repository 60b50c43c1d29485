"""Mean replacement (mean ablation), with a reference that says what is put in the place of what.

Replacing an activation by its mean over trials removes what the trials differ in there and keeps
the rest. What the mean is taken over decides what that is, so it is an object: it can be saved, and
it remembers what it was computed from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import Hook, overwrite, read_activations
from tl_hysteresis.models import fingerprint
from tl_hysteresis.sites import (
    MAX_BYTES,
    HookedModel,
    Site,
    check_are_sites,
    check_are_trials,
    check_trials,
    one_trial,
    trial_slices,
)
from tl_hysteresis.store import write_file
from tl_hysteresis.tasks import Trials

MOVING = -1
"""In the place of a position: a role that stands at several."""


@dataclass(frozen=True, eq=False)
class Reference:
    """Activations to put in the place of the real ones.

    Attributes:
        values: for each site `[pos, *feature]`, `[role, *feature]` or `[trial, pos, *feature]`.
        by: which of the three: "position", "role" or "trial".
        role_names: the roles, in the order of `values`, where they go by role.
        positions: the position of each role, or -1 where it stands at several. A role that no trial
            had is not among `role_names`.
        origin: what the values were computed from: `kind` ("mean", "zero", "resampled"), `model`
            and `trials` (their fingerprints), `n_trials`, and for "resampled" the `seed`.
    """

    values: Mapping[Site, Tensor]
    by: Literal["position", "role", "trial"]
    role_names: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        facts = ", ".join(f"{key}={str(value)[:12]}" for key, value in self.origin.items())
        return f"Reference({len(self.values)} sites by {self.by}, {facts})"

    def at(
        self, site: Site, trials: Trials, where: Bool[Tensor, "trial pos"]
    ) -> Float[Tensor, "trial pos *feature"]:
        """The value for each position of each trial; what it is outside `where` has no meaning.

        Raises:
            HysteresisError: a site, a role, a length or a number of trials that it does not cover.
        """
        if site not in self.values:
            raise HysteresisError(f"the reference holds no value of {site}")
        values, (n_trials, n_pos) = self.values[site], trials.tokens.shape
        if values.device != trials.tokens.device:
            raise HysteresisError(
                f"the reference is on {values.device}, the trials on {trials.tokens.device}: "
                "move it by reference.to(...)"
            )
        if self.by == "trial" and self.origin.get("trials", trials.fingerprint) != (
            trials.fingerprint
        ):
            raise HysteresisError("this reference belongs to other trials, one value for each")
        if self.by == "role":
            return values[self._roles(site, trials, where)]
        covered = (n_pos,) if self.by == "position" else (n_trials, n_pos)
        if values.shape[: len(covered)] != covered:
            raise HysteresisError(
                f"the reference was taken over trials of shape {tuple(values.shape[:2])}, by "
                f"{self.by}; these are {tuple(trials.tokens.shape)}"
                if self.by == "trial"
                else f"the reference covers {len(values)} positions; these trials have {n_pos}"
            )
        return values.expand(n_trials, *values.shape) if self.by == "position" else values

    def _roles(self, site: Site, trials: Trials, where: Bool[Tensor, "trial pos"]) -> Tensor:
        """Index of each position's role among those of the reference."""
        if trials.roles is None:
            raise HysteresisError("the reference goes by role, and these trials carry no roles")
        rows = {name: row for row, name in enumerate(self.role_names)}
        for role, name in enumerate(trials.role_names):
            here = where & (trials.roles == role)
            if not bool(here.any()):
                continue
            if name not in rows:
                raise HysteresisError(f"the reference was taken over no position of role {name!r}")
            position = self.positions[rows[name]]
            elsewhere = here.any(dim=0).nonzero()[:, 0].tolist() != [position]
            if site.of_queries and (position == MOVING or elsewhere):
                raise HysteresisError(
                    f"role {name!r} stands at several positions: a mean of their attention at "
                    f"{site.name} would look ahead; take the reference by position"
                )
        index = torch.tensor([rows.get(name, 0) for name in trials.role_names])
        return index.to(trials.roles.device)[trials.roles]

    def to(self, target: torch.device | torch.dtype | str) -> Reference:
        """The same values on another device or of another type."""
        return replace(self, values={site: value.to(target) for site, value in self.values.items()})

    def save(self, path: Path | str) -> None:
        """Write it to a safetensors file, whole or not at all.

        Raises:
            HysteresisError: a place that cannot be written.
        """
        labels = {
            "by": self.by,
            "role_names": list(self.role_names),
            "positions": list(self.positions),
            "origin": dict(self.origin),
            "sites": [[site.name, site.head] for site in self.values],
        }
        tensors = {str(i): v.cpu().contiguous() for i, v in enumerate(self.values.values())}
        write_file(path, safetensors.torch.save(tensors, {"reference": json.dumps(labels)}))

    @classmethod
    def load(cls, path: Path | str) -> Reference:
        """Read one that was saved, onto the CPU; `to` moves it.

        Raises:
            HysteresisError: a file that is missing, damaged, or no reference.
        """
        try:
            with safetensors.safe_open(path, "pt") as file:
                labels = json.loads((file.metadata() or {})["reference"])
                values = {
                    Site(name, head): file.get_tensor(str(index))
                    for index, (name, head) in enumerate(labels["sites"])
                }
            return cls(
                values,
                labels["by"],
                tuple(labels["role_names"]),
                tuple(labels["positions"]),
                labels["origin"],
            )
        except (OSError, LookupError, TypeError, ValueError, safetensors.SafetensorError) as error:
            raise HysteresisError(f"{path} is not a saved reference: {error}") from error


def mean_reference(
    model: HookedModel,
    trials: Trials,
    sites: Sequence[Site],
    *,
    by: Literal["role", "position"] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Reference:
    """Means of a model's activations over trials, for each role or for each position.

    Nothing ties a reference to the model that it is used in: that of another model, such as the
    other branch, is taken with that model and used in this one.

    Args:
        model: whose activations.
        trials: over which trials.
        sites: where.
        by: "role", over all positions of a role in all trials, or "position"; None for "role" where
            the trials carry roles.
        max_bytes: of activations held at a time.

    Raises:
        HysteresisError: a site that the model does not have, trials that it cannot run, or means by
            role of trials without roles.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> tokens = torch.randint(16, (8, 17), generator=torch.Generator().manual_seed(0))
        >>> roles = ["context"] * 16 + ["query"]
        >>> trials = Trials.of(tokens, [16] * 8, [31] * 8, roles=roles)
        >>> site = Site("blocks.0.hook_mlp_out")
        >>> reference = mean_reference(model, trials, [site])
        >>> reference.by, reference.role_names, reference.values[site].shape
        ('role', ('context', 'query'), torch.Size([2, 64]))

    Source: mean ablation; the reference of Zuo (2026) is "their mean over examples in that same
    checkpoint".
    """
    sites = check_are_sites(sites)  # each once: one that is named twice is summed once
    check_trials(model, trials)
    by = by or ("position" if trials.roles is None else "role")
    groups, names, positions = _groups(trials, by)
    n_groups = int(groups.max()) + 1
    counts = torch.bincount(groups.flatten(), minlength=n_groups)
    if int(counts.max()) == 1:
        raise HysteresisError(
            f"{len(trials)} trial: a mean of one activation is that activation, and would replace "
            "nothing"
        )
    sums: dict[Site, Tensor] = {}
    dtypes: dict[Site, torch.dtype] = {}
    points = {site.name for site in sites}
    for part in trial_slices(model, trials, points, max_bytes=max_bytes):
        cache = read_activations(model, trials.select(part), points)
        for site in sites:
            value = site.read(cache[site.name])
            if site not in sums:
                shape = (n_groups, *value.shape[2:])
                sums[site] = torch.zeros(shape, dtype=torch.float64, device=value.device)
                dtypes[site] = value.dtype
            sums[site].index_add_(0, groups[part].flatten(), value.flatten(end_dim=1).double())
    values = {
        site: (total / counts.view(-1, *[1] * (total.ndim - 1))).to(dtypes[site])
        for site, total in sums.items()
    }
    return Reference(values, by, names, positions, _origin("mean", model, trials))


def zero_reference(model: HookedModel, trials: Trials, sites: Sequence[Site]) -> Reference:
    """Zeros, for every position: zero ablation.

    Raises:
        HysteresisError: a site that the model does not have, or trials that it cannot run.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> trials = Trials.of(torch.arange(17)[None], [16], [31])
        >>> site = Site("blocks.0.attn.hook_z", head=1)
        >>> reference = zero_reference(model, trials, [site])
        >>> reference.by, reference.values[site].shape, int(reference.values[site].count_nonzero())
        ('position', torch.Size([17, 16]), 0)
    """
    sites = check_are_sites(sites)
    check_are_trials(trials)
    cache = read_activations(model, one_trial(model, trials), {site.name for site in sites})
    values = {site: torch.zeros_like(site.read(cache[site.name])[0]) for site in sites}
    return Reference(values, "position", origin=_origin("zero", model, trials))


def resampled_reference(
    model: HookedModel,
    trials: Trials,
    sites: Sequence[Site],
    *,
    pool: Trials | None = None,
    seed: int = 0,
) -> Reference:
    """For each trial the activations of another one, drawn at random: resample ablation.

    Each position gets the activation of the same position in the other trial. All sites of a trial
    come from the same other trial. The reference belongs to these trials in this order.

    Args:
        model: whose activations.
        trials: those that will be run.
        sites: where.
        pool: what to draw from; None for the other ones of `trials`.
        seed: of the draw.

    Raises:
        HysteresisError: nothing to draw from, a pool of another length, a site that the model does
            not have, or trials that it cannot run.

    Source: resample ablation, Chan et al. (2022), Causal scrubbing.
    """
    sites = check_are_sites(sites)
    check_are_trials(trials, *([] if pool is None else [pool]))
    n, generator = len(trials), torch.Generator().manual_seed(seed)
    if pool is None:
        if n < 2:
            raise HysteresisError(f"{n} trial: there is no other to resample from")
        # A shift by 1 ... n-1 never meets the trial itself, and is uniform over all others.
        other = (torch.arange(n) + torch.randint(1, n, (n,), generator=generator)) % n
    else:
        if not len(pool) or pool.tokens.shape[1] != trials.tokens.shape[1]:
            raise HysteresisError(
                f"a pool of {tuple(pool.tokens.shape)} tokens cannot stand in for trials of "
                f"{tuple(trials.tokens.shape)}"
            )
        other = torch.randint(len(pool), (n,), generator=generator)
    other = other.to(trials.tokens.device)
    cache = read_activations(model, trials if pool is None else pool, {site.name for site in sites})
    values = {site: site.read(cache[site.name])[other] for site in sites}
    origin = {**_origin("resampled", model, trials), "seed": seed}
    if pool is not None:
        origin["pool"] = pool.fingerprint
    return Reference(values, "trial", origin=origin)


def mean_replacement(
    sites: Sequence[Site],
    reference: Reference,
    trials: Trials,
    *,
    role: str | Sequence[str] | None = None,
    positions: Bool[Tensor, "trial pos"] | None = None,
) -> list[Hook]:
    """Hooks that replace activations by a reference's values, by default at all positions.

    All the given sites are replaced at once. A `role`, or `positions`, says where; the default of
    `replacement_margins` is another one, the role "query".

    With a reference of means, what varies between trials at these sites is gone, and with it any
    influence of the prompt through them; their average effect stays.

    Args:
        sites: where to replace.
        reference: by what, from `mean_reference`, `zero_reference` or `resampled_reference`.
        trials: the trials that will be run.
        role: at the positions of this role or these roles.
        positions: at these positions of each trial; not together with `role`. With neither, at all.

    Raises:
        HysteresisError: a site, role or position that the reference does not cover, a role that no
            position has, or a mean of attention that would look ahead.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.interventions import intervene
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> from tl_hysteresis.sites import head_sites
        >>> from tl_hysteresis.tasks import AssociativeRecall, draw
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> trials = draw(AssociativeRecall(), 8, seed=0, stream="example", index=0)
        >>> heads = head_sites(model, layer=1)
        >>> reference = mean_reference(model, trials, heads)
        >>> hooks = mean_replacement(heads, reference, trials, role="query")
        >>> with intervene(model, hooks):
        ...     model(trials.tokens).shape
        torch.Size([8, 17, 32])
    """
    sites = check_are_sites(sites)
    check_are_trials(trials)
    if role is not None and positions is not None:
        raise HysteresisError("role and positions both say where to replace: give one of them")
    if role is not None:
        roles = [role] if isinstance(role, str) else list(role)
        if not roles:
            raise HysteresisError("role is an empty list: None replaces at all positions")
        where = torch.stack([trials.positions(name) for name in roles]).any(dim=0)
    elif positions is not None:
        if positions.shape != trials.tokens.shape or positions.dtype != torch.bool:
            raise HysteresisError(
                f"positions are {tuple(positions.shape)} of {positions.dtype}: trials of "
                f"{tuple(trials.tokens.shape)} need a mask of that shape, of torch.bool"
            )
        where = positions
    else:
        where = torch.ones_like(trials.tokens, dtype=torch.bool)
    return [overwrite(s, reference.at(s, trials, where), positions=where) for s in sites]


def _groups(trials: Trials, by: str) -> tuple[Tensor, tuple[str, ...], tuple[int, ...]]:
    """The group of each position of each trial; the groups' names, and where each stands."""
    if by == "position":
        n_trials, n_pos = trials.tokens.shape
        return torch.arange(n_pos, device=trials.tokens.device).expand(n_trials, -1), (), ()
    if by != "role":
        raise HysteresisError(f'by is {by!r}, but must be "role" or "position"')
    if trials.roles is None:
        raise HysteresisError("these trials carry no roles, so no mean goes by role")
    present, groups = trials.roles.unique(return_inverse=True)
    positions = []
    for group in range(len(present)):
        places = (groups == group).any(dim=0).nonzero()[:, 0].tolist()
        positions.append(places[0] if len(places) == 1 else MOVING)
    names = tuple(trials.role_names[int(role)] for role in present)
    return groups, names, tuple(positions)


def _origin(kind: str, model: HookedModel, trials: Trials) -> dict[str, Any]:
    return {
        "kind": kind,
        "model": fingerprint(model),
        "trials": trials.fingerprint,
        "n_trials": len(trials),
    }
