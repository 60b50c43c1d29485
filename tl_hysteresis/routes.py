"""Route maps: through which layers, stream points and positions the answer travels.

A route map is a table of patching effects. Two maps are compared in their *topology*, whether the
same sites matter, and in their *gain*, how strongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import HookedTransformer

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import (
    Hook,
    Site,
    head_sites,
    intervene,
    mean_reference,
    mean_replacement,
    mlp_site,
    patch_activations,
    read_activations,
)
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.tasks import Trials

POINTS = ("resid_pre", "resid_mid", "resid_post")
INTACT = "intact"


def components(model: HookedTransformer) -> dict[str, list[Site]]:
    """What mean replacement removes: all heads, each layer's heads, each head, each MLP.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> config = hooked_config(ModelConfig(n_heads=2), d_vocab=32, n_ctx=17)
        >>> list(components(build_model(config, seed=0)))
        ['all heads', 'L0 heads', 'L1 heads', 'L0H0', 'L0H1', 'L1H0', 'L1H1', 'L0 MLP', 'L1 MLP']
    """
    layers = range(model.cfg.n_layers)
    heads = {layer: head_sites(model, layer) for layer in layers}
    found = {"all heads": [site for layer in layers for site in heads[layer]]}
    found |= {f"L{layer} heads": heads[layer] for layer in layers}
    found |= {f"L{layer}H{site.head}": [site] for layer in layers for site in heads[layer]}
    if not model.cfg.attn_only:
        found |= {f"L{layer} MLP": [mlp_site(layer)] for layer in layers}
    return found


@torch.no_grad()
def replacement_margins(
    model: HookedTransformer, trials: Trials, *, role: str = "query"
) -> pd.DataFrame:
    """Mean margin with each component replaced by its mean at the positions of a role.

    Returns:
        One row for the intact model and for each of `components`: `component`, `margin` (logits).
    """
    parts = components(model)
    sites = list(dict.fromkeys(site for part in parts.values() for site in part))
    reference = mean_reference(model, trials, sites, role=role)
    starts = _layer_inputs(model, trials)
    margins = {INTACT: _margin(model, trials, [], starts)}
    for name, part in parts.items():
        hooks = mean_replacement(part, reference, trials)
        margins[name] = _margin(model, trials, hooks, starts)
    return pd.DataFrame(
        {
            "component": margins.keys(),
            "margin": [m.double().mean().item() for m in margins.values()],
        }
    )


@dataclass(frozen=True, eq=False)
class RouteMap:
    """Effects of denoising, site by site, for one model and one corruption.

    Attributes:
        table: one row a site: `layer`, `point`, `role`, `effect` (logits), `share`.
        clean: mean margin of the clean run, in logits.
        corrupted: mean margin of the corrupted run, in logits.
    """

    table: pd.DataFrame
    clean: float
    corrupted: float


@torch.no_grad()
def route_map(
    model: HookedTransformer,
    clean: Trials,
    corrupted: Trials,
    *,
    points: Sequence[str] | None = None,
    roles: Sequence[str] | None = None,
) -> RouteMap:
    """Patch the clean run's residual stream into the corrupted run: layer by point by role.

    The effect of a site is the mean over trials of margin(patched) - margin(corrupted), in logits;
    its share is the effect over margin(clean) - margin(corrupted). A share of 1 restores the clean
    margin, 0 does nothing. All positions of a role are patched at once. Margins are of the clean
    trials' answers throughout.

    Args:
        model: any `HookedTransformer`.
        clean: trials with roles.
        corrupted: the same trials with other tokens.
        points: of the residual stream: "resid_pre", "resid_mid", "resid_post"; None for all that
            the model has (without MLPs there is no "resid_mid").
        roles: names of roles; None for all.

    Raises:
        HysteresisError: batches of different shape, or a corruption that leaves the margin as it is
            (no share can be taken of a difference of about zero).
    """
    if clean.roles is None:
        raise HysteresisError("these trials carry no roles, and a route map goes by roles")
    if clean.tokens.shape != corrupted.tokens.shape:
        raise HysteresisError(
            f"clean trials are {tuple(clean.tokens.shape)}, "
            f"corrupted {tuple(corrupted.tokens.shape)}: they must match trial by trial"
        )
    if points is None:
        points = [point for point in POINTS if f"blocks.0.hook_{point}" in model.hook_dict]
    sites = [
        (layer, point, Site(f"blocks.{layer}.hook_{point}"))
        for layer in range(model.cfg.n_layers)
        for point in points
    ]
    source = read_activations(model, clean, {site.name for _, _, site in sites})
    starts = _layer_inputs(model, corrupted)
    clean_margin = logit_margin(model(clean.tokens), clean)
    corrupted_margin = logit_margin(model(corrupted.tokens), clean)
    difference = (clean_margin - corrupted_margin).double()
    if abs(difference.mean()) < 1e-6 * (1.0 + clean_margin.abs().mean()):
        raise HysteresisError(
            "the corruption leaves the mean margin as it is "
            f"({clean_margin.mean():.6f} clean and corrupted): effects have no scale"
        )
    rows = []
    for layer, point, site in sites:
        for role in roles or clean.role_names:
            hooks = patch_activations([site], source, positions=clean.positions(role))
            margin = _margin(model, corrupted, hooks, starts, answers=clean)
            effect = (margin - corrupted_margin).double().mean().item()
            rows.append((layer, point, role, effect, effect / difference.mean().item()))
    return RouteMap(
        pd.DataFrame(rows, columns=["layer", "point", "role", "effect", "share"]),
        clean_margin.double().mean().item(),
        corrupted_margin.double().mean().item(),
    )


@dataclass(frozen=True)
class RouteComparison:
    """How alike two route maps are."""

    topology: float
    """Pearson correlation of the effects over sites: do the same sites matter?"""
    gain: float
    """Slope through the origin of the first map on the second: how much more strongly?"""
    n_sites: int
    """Sites in each map."""


def compare_routes(
    first: RouteMap | pd.DataFrame, second: RouteMap | pd.DataFrame
) -> RouteComparison:
    """Compare the effects of two route maps, or of their tables, over the same sites.

    Raises:
        HysteresisError: maps of different sites, fewer than three sites, or a constant map, whose
            correlation is not defined.

    Example:
        >>> sites = {"layer": [0, 0, 1], "point": ["resid_pre"] * 3, "role": ["a", "b", "a"]}
        >>> one = pd.DataFrame({**sites, "effect": [0.0, 1.0, 2.0]})
        >>> two = pd.DataFrame({**sites, "effect": [0.0, 0.5, 1.0]})
        >>> compare_routes(one, two)
        RouteComparison(topology=1.0, gain=2.0, n_sites=3)
    """
    first, second = (x.table if isinstance(x, RouteMap) else x for x in (first, second))
    keys = ["layer", "point", "role"]
    both = first.merge(second, on=keys, suffixes=("_first", "_second"), validate="one_to_one")
    if not len(both) == len(first) == len(second):
        raise HysteresisError(
            f"route maps of {len(first)} and {len(second)} sites have {len(both)} in common"
        )
    if len(both) < 3:
        raise HysteresisError(f"a correlation over {len(both)} sites says nothing; 3 are needed")
    a, b = both["effect_first"].to_numpy(), both["effect_second"].to_numpy()
    for which, values in (("first", a), ("second", b)):
        if np.ptp(values) == 0.0:
            raise HysteresisError(f"the {which} route map is constant: no correlation is defined")
    return RouteComparison(
        topology=float(np.corrcoef(a, b)[0, 1]), gain=float(a @ b / (b @ b)), n_sites=len(both)
    )


def _layer_inputs(
    model: HookedTransformer, trials: Trials
) -> list[Float[Tensor, "trial pos d_model"]]:
    """The residual stream that enters each layer, from which a run can be taken up again."""
    if model.cfg.positional_embedding_type == "shortformer":
        return []  # its attention needs the positional embedding besides: always run from the start
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(model.cfg.n_layers)]
    cache = read_activations(model, trials, set(names))
    return [cache[name] for name in names]


def _margin(
    model: HookedTransformer,
    trials: Trials,
    hooks: Sequence[Hook],
    starts: Sequence[Tensor],
    *,
    answers: Trials | None = None,
) -> Float[Tensor, " trial"]:
    """Margins of a run under hooks, taken up at the first layer that a hook touches."""
    layers = [int(name.split(".")[1]) for name, _ in hooks if name.startswith("blocks.")]
    with intervene(model, hooks):
        if starts and hooks and len(layers) == len(hooks):
            logits = model(starts[min(layers)], start_at_layer=min(layers))
        else:
            logits = model(trials.tokens)
    return logit_margin(logits, answers or trials)
