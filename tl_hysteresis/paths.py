"""Path patching: the effect that travels along one edge, from a sender straight to a receiver.

Activation patching asks what a component matters for; path patching asks through whom. Only what
the sender adds to the residual stream is exchanged, and only as one receiver sees it: all that lies
between them stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import Hook, intervene, overwrite, run_and_read
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.patching import BaseRun, patched_margins
from tl_hysteresis.routes import By, Direction, EffectMap, choices, two_runs
from tl_hysteresis.sites import (
    MAX_BYTES,
    Component,
    HookedModel,
    Site,
    as_list,
    check_budget,
    hook_name,
    measuring,
    n_key_heads,
    trial_slices,
)
from tl_hysteresis.tasks import Trials

LOGITS, EMBED = "logits", "embed"
INPUTS = ("q", "k", "v")


@dataclass(frozen=True, eq=False, repr=False)
class PathMap(EffectMap):
    """Effects by `sender`, `receiver` and the receiver's `input` ("q", "k", "v"; "" for logits).

    And by `role` or `position`, unless paths are patched at all positions at once.
    """

    def matrix(self, input: str, *, values: str = "effect") -> pd.DataFrame:
        """Mean effects, or shares, at one input as a frame to look at.

        A row for each sender, and for each role or position of it if the map goes by them; a column
        for each receiver. A pair with no path, the receiver not being above the sender, is blank.

        Args:
            input: "q", "k", "v", or "" for the logits.
            values: "effect", in logits, or "share".

        Raises:
            HysteresisError: an input, or values, that the map does not have.

        Example:
            >>> from tl_hysteresis.config import ModelConfig
            >>> from tl_hysteresis.models import build_model, hooked_config
            >>> config = hooked_config(ModelConfig(n_heads=2), d_vocab=32, n_ctx=17)
            >>> model = build_model(config, seed=0)
            >>> tokens = torch.randint(16, (2, 8, 17), generator=torch.Generator().manual_seed(0))
            >>> clean, corrupted = (Trials.of(t, [16] * 8, [31] * 8) for t in tokens)
            >>> paths = path_map(model, clean, corrupted, senders="L0 heads", receivers="L1 heads")
            >>> matrix = paths.matrix("k")
            >>> list(matrix.index), list(matrix.columns)
            (['L0H0', 'L0H1'], ['L1H0', 'L1H1'])
        """
        self._check_values(values)
        part = self.table[self.table["input"] == input]
        if part.empty:
            raise HysteresisError(
                f"the map has no input {input!r}; it has {sorted(self.table['input'].unique())}"
            )
        rows = [axis for axis in ("sender", "role", "position") if axis in part]
        return part.pivot_table(
            index=rows, columns="receiver", values=values, sort=False, dropna=False
        )


def path_map(
    model: HookedModel,
    clean: Trials,
    corrupted: Trials,
    *,
    senders: str | Sequence[str] | None = None,
    receivers: str | Sequence[str] | None = None,
    inputs: str | Sequence[str] = INPUTS,
    by: By = "all",
    roles: str | Sequence[str] | None = None,
    direction: Direction = "denoising",
    shares: bool = True,
    max_bytes: int = MAX_BYTES,
) -> PathMap:
    """Patch single paths: what a sender writes, as one receiver's input alone sees it.

    In the run that is patched, a receiver's query, key or value is computed from the stream with
    the sender's output exchanged for the other run's; everything between them, heads and MLPs,
    keeps this run's activations, and everything behind the receiver is computed anew. So this is
    the effect of a single edge; where MLPs between the two are to follow, as in Wang et al., their
    paths come on top. Towards the logits, the exchange is made in the stream after the last layer.
    The normalisation in front of the receiver is computed anew too: exact, not first order.

    Each path takes a run of the layers from its receiver on: a small model's paths are seconds, but
    all of GPT-2 small's are thousands of runs, so name the senders or receivers there.

    Args:
        model: any hooked model.
        clean: trials.
        corrupted: the same trials with other tokens.
        senders: "L0H3", "L0 MLP", or "embed" for token and position embedding; "L0 heads" or "all
            heads" for each of these heads; None for all.
        receivers: "L1H2", "L1 heads" or "all heads" for each of these, or "logits"; None for all.
        inputs: of the receiving heads: "q", "k", "v".
        by: a path at "all" positions at once, or at those of each "role", or at each "position".
        roles: names of roles; None for all.
        direction: "denoising", clean into corrupted, or "noising", corrupted into clean.
        shares: False leaves them out, where the two runs' margins differ too little to divide by.
        max_bytes: of activations held at a time, about.

    Returns:
        One row for each path that there is: `sender`, `receiver`, `input`, `effect`, `share`, with
        the signs of an `EffectMap`. With grouped keys and values a receiver of "k" or "v" is a
        group, numbered as at `hook_k`.

    Raises:
        HysteresisError: a component that the model does not have, no path between those that were
            given, or what `route_map` refuses.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> tokens = torch.randint(32, (2, 8, 17), generator=torch.Generator().manual_seed(0))
        >>> clean, corrupted = (Trials.of(t, [16] * 8, [31] * 8) for t in tokens)
        >>> to = ["L1H0", "logits"]
        >>> paths = path_map(model, clean, corrupted, senders=["L0H1"], receivers=to, inputs="k")
        >>> paths.table[["sender", "receiver", "input"]].to_numpy().tolist()
        [['L0H1', 'L1H0', 'k'], ['L0H1', 'logits', '']]

    Source: Goldowsky-Dill et al. (2023), Localizing model behavior with path patching; the idea,
    Wang et al. (2022), Interpretability in the wild.
    """
    base, source = two_runs(model, clean, corrupted, direction)
    paths = _paths(model, _names(senders), _names(receivers), as_list(inputs))
    if roles is not None and by == "all":
        by = "role"
    where, places = choices(clean, by, roles)
    names = _read_by_both(model)
    parts = []
    check_budget(max_bytes)
    for part in trial_slices(model, clean, names, max_bytes=4 * max_bytes):
        run = BaseRun.of(model, base.select(part))
        _, own = run_and_read(model, base.select(part), names)
        logits, other = run_and_read(model, source.select(part), names)
        walk = _Walk(run, own, other, where[:, part], max_bytes)
        patched = torch.cat(walk.margins(paths))
        parts.append((patched, run.margins, logit_margin(logits, clean.select(part))))
    patched, here, there = (torch.cat(p, dim=-1).cpu().double() for p in zip(*parts, strict=True))
    rows = [(s.name, r.name, r.input, place) for s, r in paths for place in places]
    labels = pd.DataFrame(rows, columns=["sender", "receiver", "input", by])
    if by == "all":
        labels = labels.drop(columns="all")
    effects = patched - here
    return PathMap.of(model, clean, corrupted, labels, effects, here, there, direction, shares)


@dataclass(frozen=True)
class _End:
    """A sender or a receiver; the layer is -1 of the embedding, n_layers of the logits."""

    name: str
    layer: int
    head: int | None = None
    input: str = ""


@dataclass(frozen=True)
class _Walk:
    """One run to patch into, the activations of both runs, and where."""

    run: BaseRun
    own: Mapping[str, Tensor]
    other: Mapping[str, Tensor]
    where: Bool[Tensor, "choice trial pos"]
    max_bytes: int

    def margins(self, paths: Sequence[tuple[_End, _End]]) -> list[Float[Tensor, "choice trial"]]:
        """Margins for each path and choice; what paths have in common is computed once."""
        found: list[Tensor] = []
        for sender, its_paths in groupby(paths, key=lambda path: path[0]):
            change = self.change(sender)
            inputs: dict[int, dict[str, Tensor]] = {}
            for _, receiver in its_paths:
                if receiver.name == LOGITS:
                    site = Site(f"blocks.{receiver.layer - 1}.hook_resid_post")
                    value = self.own[site.name] + change
                else:
                    if receiver.layer not in inputs:
                        inputs[receiver.layer] = self.inputs(receiver.layer, change)
                    name = f"blocks.{receiver.layer}.attn.hook_{receiver.input}"
                    site = Site(name, receiver.head)
                    value = site.read(inputs[receiver.layer][name])
                found.append(
                    patched_margins(self.run, site, value, self.where, max_bytes=self.max_bytes)
                )
        return found

    @property
    def everywhere(self) -> Bool[Tensor, "trial pos"]:
        """All positions of all trials."""
        return torch.ones_like(self.where[0])

    def change(self, sender: _End) -> Float[Tensor, "trial pos d_model"]:
        """How much else the sender would add to the stream, had it the other run's activations."""
        if sender.layer < 0:
            name = "blocks.0.hook_resid_pre"
        elif sender.head is None:
            name = f"blocks.{sender.layer}.hook_mlp_out"
        else:
            # Behind the heads come W_O and, in some models, a norm: the layer itself computes them.
            name = f"blocks.{sender.layer}.hook_attn_out"
            z = Site(f"blocks.{sender.layer}.attn.hook_z", sender.head)
            hook = overwrite(z, z.read(self.other[z.name]), positions=self.everywhere)
            return self.read(sender.layer, [hook], [name])[name] - self.own[name]
        return self.other[name] - self.own[name]

    def inputs(self, layer: int, change: Tensor) -> dict[str, Tensor]:
        """Queries, keys and values of a layer whose input stream is changed."""
        entry = f"blocks.{layer}.hook_resid_pre"
        hook = overwrite(Site(entry), self.own[entry] + change, positions=self.everywhere)
        return self.read(layer, [hook], [f"blocks.{layer}.attn.hook_{i}" for i in INPUTS])

    def read(self, layer: int, hooks: list[Hook], names: Sequence[str]) -> dict[str, Tensor]:
        """Activations of one layer under hooks."""
        seen: dict[str, Tensor] = {}

        def keep(name: str) -> Hook:
            def run(activation: Tensor, hook: HookPoint) -> None:
                seen[name] = activation

            return name, run

        model, streams = self.run.model, self.run.streams
        with measuring(model), intervene(model, [*hooks, *map(keep, names)]):
            if streams is None:
                model(self.run.trials.tokens)
            else:
                model(streams[layer], start_at_layer=layer, stop_at_layer=layer + 1)
        return seen


def _names(given: str | Sequence[str] | None) -> Sequence[str] | None:
    return None if given is None else as_list(given)


def _read_by_both(model: HookedModel) -> set[str]:
    """The activations of both runs that senders and receivers are made of."""
    layers = range(model.cfg.n_layers)
    points = ["resid_pre", "attn_out", "z", *([] if model.cfg.attn_only else ["mlp_out"])]
    names = {hook_name(model, point, layer) for layer in layers for point in points}
    return names | {hook_name(model, "resid_post", layers[-1])}


def _paths(
    model: HookedModel,
    senders: Sequence[str] | None,
    receivers: Sequence[str] | None,
    inputs: Sequence[str],
) -> list[tuple[_End, _End]]:
    """The pairs, sender by sender, whose receiver lies above the sender."""
    if senders is None:
        layers = [] if model.cfg.attn_only else range(model.cfg.n_layers)
        senders = [EMBED, "all heads", *(f"L{layer} MLP" for layer in layers)]
    unknown = [name for name in inputs if name not in INPUTS]
    if unknown:
        raise HysteresisError(f"no input {unknown[0]!r}; a head has q, k and v")
    groups = n_key_heads(model)
    ends = []
    for name in receivers if receivers is not None else ["all heads", LOGITS]:
        if name == LOGITS:
            ends.append(_End(LOGITS, model.cfg.n_layers))
            continue
        found = _ends(model, name)
        for end in found:
            if end.head is None:
                raise HysteresisError(f"receivers are heads or {LOGITS!r}; found {name!r}")
            for input in inputs:
                if input == "q" or end.head < groups:
                    ends.append(replace(end, input=input))
                elif end.name == name:  # one of several heads is left out: its group is there
                    raise HysteresisError(
                        f"{name} has no {input} of its own: the model has {groups} groups of keys "
                        "and values, and as their receiver a head is the number of a group"
                    )
    starts = dict.fromkeys(start for name in senders for start in _ends(model, name))
    paths = [(s, r) for s in starts for r in dict.fromkeys(ends) if s.layer < r.layer]
    if not paths:
        raise HysteresisError("no path leads from these senders to these receivers")
    return paths


def _ends(model: HookedModel, name: str) -> list[_End]:
    """A sender or receiver from its name, or each head of several."""
    if name == EMBED:
        return [_End(EMBED, -1)]
    found = Component.of(name)
    if found is None or found.part == "norms":
        raise HysteresisError(
            f"{name!r} is no component: say 'L0H3', 'L0 heads', 'L0 MLP' or {EMBED!r}"
        )
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    if not found.is_in(model):
        without = found.part == "MLP" and model.cfg.attn_only
        has = "no MLPs" if without else f"{n_layers} layers of {n_heads} heads"
        raise HysteresisError(f"no {name}: the model has {has}")
    layers = range(n_layers) if found.layer is None else [found.layer]
    if found.part == "MLP":
        return [_End(name, layer) for layer in layers]
    heads = range(n_heads) if found.head is None else [found.head]
    return [_End(f"L{layer}H{head}", layer, head) for layer in layers for head in heads]
