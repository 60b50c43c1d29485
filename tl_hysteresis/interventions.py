"""Causal interventions as TransformerLens hook functions: mean replacement, activation patching.

An intervention is a value, a list of `(hook name, hook function)`; several are composed by adding
their lists. `intervene` installs them for the length of a `with` block, checks that each of them
really fired, and leaves the model as it found it.

Hook functions here never write in place: TransformerLens's caches are not copies, and an edit in
place would reach into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor
from transformer_lens import HookedTransformer
from transformer_lens.hook_points import HookPoint

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.tasks import Trials

Hook = tuple[str, Callable[[Tensor, HookPoint], Tensor]]
"""A hook name and a function of the activation there, as `model.hooks(fwd_hooks=...)` takes it."""


@dataclass(frozen=True, order=True)
class Site:
    """A place in a model where an activation is read and written.

    Attributes:
        name: name of a hook point.
        head: one head, where the activation has a head axis behind the position; None for all.

    Example:
        >>> Site("blocks.1.attn.hook_z", head=3)
        Site(name='blocks.1.attn.hook_z', head=3)
    """

    name: str
    head: int | None = None


def head_sites(model: HookedTransformer, layer: int) -> list[Site]:
    """The outputs of a layer's attention heads, one site a head.

    A head's output is read at `hook_z`, before W_O: W_O is linear, so the mean of one is the mean
    of the other, and no `use_attn_result` is needed.
    """
    return [Site(f"blocks.{layer}.attn.hook_z", head) for head in range(model.cfg.n_heads)]


def mlp_site(layer: int) -> Site:
    """The output of a layer's MLP."""
    return Site(f"blocks.{layer}.hook_mlp_out")


@contextmanager
def intervene(model: HookedTransformer, hooks: Sequence[Hook]) -> Iterator[HookedTransformer]:
    """Run a model under interventions; hooks that were there before stay, these go at the end.

    Raises:
        HysteresisError: a hook point that the model does not have, or, at the end of the block, a
            hook that never fired: it was skipped, and what was measured is not the intervention.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> with intervene(model, [("blocks.0.hook_mlp_out", lambda act, hook: act * 0.0)]):
        ...     _ = model(torch.arange(17)[None])
        >>> with intervene(model, [("blocks.0.hook_mlp_owt", lambda act, hook: act)]):
        ...     _ = model(torch.arange(17)[None])
        Traceback (most recent call last):
        ...
        tl_hysteresis.errors.HysteresisError: the model has no hook point 'blocks.0.hook_mlp_owt'
    """
    for name, _ in hooks:
        _check_hook_point(model, name)
    silent = dict(enumerate(name for name, _ in hooks))

    def counted(index: int, function: Callable[[Tensor, HookPoint], Tensor]) -> Hook:
        def run(activation: Tensor, hook: HookPoint) -> Tensor:
            silent.pop(index, None)
            return function(activation, hook)

        return hooks[index][0], run

    installed = [counted(index, function) for index, (_, function) in enumerate(hooks)]
    with model.hooks(fwd_hooks=list(installed)):
        yield model
    if silent:
        raise HysteresisError(f"hooks that never fired: {', '.join(sorted(set(silent.values())))}")


@dataclass(frozen=True, eq=False)
class MeanReference:
    """Mean activations to put in the place of the real ones.

    Attributes:
        values: mean of each site's activation.
        role: the role of the positions that the means were taken over, and replace.
        n_trials: how many trials they were taken over.
    """

    values: Mapping[Site, Tensor]
    role: str
    n_trials: int


@torch.no_grad()
def mean_reference(
    model: HookedTransformer, trials: Trials, sites: Sequence[Site], *, role: str = "query"
) -> MeanReference:
    """Means, over trials, of this model's own activations at the positions of one role.

    Raises:
        HysteresisError: a site that the model does not have, or a role that no position has.

    Source: the reference of Zuo (2026), "their mean over examples in that same checkpoint".
    """
    positions = trials.positions(role)
    cache = read_activations(model, trials, {site.name for site in sites})
    values = {
        site: _at(cache[site.name], site)[positions].double().mean(dim=0).to(cache[site.name].dtype)
        for site in sites
    }
    return MeanReference(values, role, len(trials))


def mean_replacement(sites: Sequence[Site], reference: MeanReference, trials: Trials) -> list[Hook]:
    """Hooks that replace the activations of all the given sites at once by their means.

    They are replaced at the positions of the role that the means were taken over.

    What varies between trials at these sites is gone, and with it any influence of the prompt
    through them; their average effect stays.

    Args:
        sites: where to replace.
        reference: the means, from `mean_reference`.
        trials: the trials that will be run.

    Raises:
        HysteresisError: a site that the reference has no mean of, or a role that no position has.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> from tl_hysteresis.tasks import AssociativeRecall, draw
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> trials = draw(AssociativeRecall(), 8, seed=0, stream="example", index=0)
        >>> heads = head_sites(model, layer=1)
        >>> reference = mean_reference(model, trials, heads)
        >>> hooks = mean_replacement(heads, reference, trials)
        >>> with intervene(model, hooks):
        ...     model(trials.tokens).shape
        torch.Size([8, 17, 32])
    """
    missing = [site for site in sites if site not in reference.values]
    if missing:
        raise HysteresisError(f"the reference holds no mean of {missing[0]}")
    positions = trials.positions(reference.role)
    return [overwrite(site, reference.values[site], positions=positions) for site in sites]


def patch_activations(
    sites: Sequence[Site],
    source: Mapping[str, Tensor],
    *,
    positions: Bool[Tensor, "trial pos"],
) -> list[Hook]:
    """Hooks that replace the activations of all the given sites at once by those of another run.

    With the clean run's activations in a corrupted run this is denoising; the reverse, noising.

    Args:
        sites: where to patch.
        source: activations of the other run by hook name, such as an `ActivationCache`.
        positions: where in each trial.

    Raises:
        HysteresisError: a site whose activation is not in `source`.
    """
    missing = [site for site in sites if site.name not in source]
    if missing:
        raise HysteresisError(f"the source run holds no activation of {missing[0].name!r}")
    return [overwrite(site, _at(source[site.name], site), positions=positions) for site in sites]


def overwrite(site: Site, value: Tensor, *, positions: Bool[Tensor, "trial pos"]) -> Hook:
    """A hook that writes `value` at a site, at the given positions, into a copy of the activation.

    Args:
        site: where.
        value: `[*feature]`, the same for every trial and position, or `[trial, pos, *feature]`.
        positions: where in each trial.

    Raises:
        HysteresisError: when it runs, an activation of another shape than `positions` or `value`.
    """

    def write(activation: Tensor, hook: HookPoint) -> Tensor:
        old = _at(activation, site)
        if old.shape[:2] != positions.shape:
            raise HysteresisError(
                f"the activation at {site.name} is {tuple(activation.shape)}, "
                f"but positions are {tuple(positions.shape)}"
            )
        if value.shape not in (old.shape, old.shape[2:]):
            raise HysteresisError(
                f"a value of shape {tuple(value.shape)} cannot stand at {site}, "
                f"whose activation is {tuple(old.shape)}"
            )
        mask = positions.to(old.device).view(*positions.shape, *[1] * (old.ndim - 2))
        new = torch.where(mask, value, old)
        if site.head is None:
            return new
        whole = activation.clone()
        whole[:, :, site.head] = new
        return whole

    return site.name, write


def read_activations(
    model: HookedTransformer, trials: Trials, names: set[str]
) -> Mapping[str, Tensor]:
    """Activations of one run at the named hook points, as an `ActivationCache`.

    Raises:
        HysteresisError: a hook point that the model does not have.
    """
    for name in sorted(names):
        _check_hook_point(model, name)
    with torch.no_grad():
        _, cache = model.run_with_cache(trials.tokens, names_filter=lambda name: name in names)
    absent = names - set(cache.keys())
    if absent:
        raise HysteresisError(f"hooks that never fired: {', '.join(sorted(absent))}")
    for name in sorted(names):
        if cache[name].shape[:2] != trials.tokens.shape:
            raise HysteresisError(
                f"the activation at {name} is {tuple(cache[name].shape)}: it does not begin with "
                "trial and position"
            )
    return dict(cache.items())


def _check_hook_point(model: HookedTransformer, name: str) -> None:
    if name not in model.hook_dict:
        raise HysteresisError(f"the model has no hook point {name!r}")


def _at(activation: Tensor, site: Site) -> Tensor:
    """The part of an activation that belongs to a site: `[trial, pos, *feature]`."""
    if site.head is None:
        return activation
    if activation.ndim != 4:
        raise HysteresisError(
            f"the activation at {site.name} is {tuple(activation.shape)}: it has no head axis"
        )
    if not 0 <= site.head < activation.shape[2]:
        raise HysteresisError(
            f"there is no head {site.head} at {site.name}: it has {activation.shape[2]} heads"
        )
    return activation[:, :, site.head]
