"""Causal interventions as TransformerLens hook functions.

An intervention is a value, a list of `(hook name, hook function)`; several are composed by adding
their lists. `intervene` installs them for the length of a `with` block, checks that each of them
really fired, and leaves the model as it found it.

Hook functions here never write in place: TransformerLens's caches are not copies, and an edit in
place would reach into them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.hook_points import HookPoint

from tl_hysteresis.checks import refusals
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.sites import (
    HookedModel,
    Site,
    check_are_sites,
    check_hook_point,
    check_trials,
    measuring,
)
from tl_hysteresis.tasks import Trials

Hook = tuple[str, Callable[[Tensor, HookPoint], Tensor | None]]
"""A hook name and a function of the activation there, as `model.hooks(fwd_hooks=...)` takes it."""


@contextmanager
def intervene(model: HookedModel, hooks: Sequence[Hook]) -> Iterator[HookedModel]:
    """Run a model under interventions; hooks that were there before stay, these go at the end.

    Raises:
        HysteresisError: a hook point that the model does not have, or has switched off; a write,
            in place or returned, that the model would ignore or apply by half; or, at the end of
            the block, a hook that never fired: it was skipped, and what was measured is not the
            intervention.

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
    hooks = list(hooks)
    for name, _ in hooks:
        check_hook_point(model, name)
    refused = refusals(model, {name for name, _ in hooks})
    silent = dict(enumerate(name for name, _ in hooks))

    def counted(index: int, function: Callable[[Tensor, HookPoint], Tensor | None]) -> Hook:
        name = hooks[index][0]

        def run(activation: Tensor, hook: HookPoint) -> Tensor | None:
            silent.pop(index, None)
            if name not in refused:
                return function(activation, hook)
            before = _state(activation)
            written = function(activation, hook)
            if written is not None or not _is_in(before, activation):
                raise HysteresisError(refused[name])
            return None

        return name, run

    installed = [counted(index, function) for index, (_, function) in enumerate(hooks)]
    with model.hooks(fwd_hooks=list(installed)):
        yield model
    if silent:
        raise HysteresisError(f"hooks that never fired: {', '.join(sorted(set(silent.values())))}")


def _state(activation: Tensor) -> int | Tensor:
    """What tells whether a tensor is edited: its version, or a copy in inference mode."""
    return activation.clone() if activation.is_inference() else activation._version


def _is_in(before: int | Tensor, activation: Tensor) -> bool:
    if isinstance(before, int):
        return activation._version == before
    return bool(torch.isclose(activation, before, 0.0, 0.0, equal_nan=True).all())


def patch_activations(
    sites: Sequence[Site],
    source: Mapping[str, Tensor] | ActivationCache,
    *,
    positions: Bool[Tensor, "trial pos"],
) -> list[Hook]:
    """Hooks that replace the activations of all the given sites at once by those of another run.

    With the clean run's activations in a corrupted run this is denoising; the reverse, noising.

    Args:
        sites: where to patch.
        source: activations of the other run by hook name, such as an `ActivationCache`.
        positions: where in each trial; of an attention pattern, at which queries.

    Raises:
        HysteresisError: a site whose activation is not in `source`.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> clean, corrupted = torch.randint(32, (2, 8, 17))
        >>> _, cache = model.run_with_cache(clean)
        >>> everywhere = torch.ones(8, 17, dtype=torch.bool)
        >>> site = Site("blocks.1.hook_resid_pre")
        >>> with intervene(model, patch_activations([site], cache, positions=everywhere)):
        ...     patched = model(corrupted)
        >>> bool(torch.allclose(patched, model(clean)))
        True
    """
    sites = check_are_sites(sites)
    missing = [site for site in sites if site.name not in source]
    if missing:
        raise HysteresisError(f"the source run holds no activation of {missing[0].name!r}")
    return [overwrite(site, site.read(source[site.name]), positions=positions) for site in sites]


def overwrite(site: Site, value: Tensor, *, positions: Bool[Tensor, "trial pos"]) -> Hook:
    """A hook that writes `value` at a site, at the given positions, into a copy of the activation.

    Args:
        site: where.
        value: `[*feature]`, the same for every trial and position, or `[trial, pos, *feature]`,
            as `Site.read` gives it.
        positions: where in each trial.

    Raises:
        HysteresisError: when it runs, an activation of another shape than `positions` or `value`,
            or of another type, or on another device, than `value`.
    """

    def write(activation: Tensor, hook: HookPoint) -> Tensor:
        old = site.read(activation)
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
        if (value.dtype, value.device) != (old.dtype, old.device):
            raise HysteresisError(
                f"a value of {value.dtype} on {value.device} cannot stand at {site}, "
                f"whose activation is {old.dtype} on {old.device}"
            )
        mask = positions.to(old.device).view(*positions.shape, *[1] * (old.ndim - 2))
        whole = activation.clone()
        site.read(whole).copy_(torch.where(mask, value, old))
        return whole

    return site.name, write


def overwrite_stream_between(
    layer: int, value: Tensor, *, positions: Bool[Tensor, "trial pos"]
) -> list[Hook]:
    """Hooks that set `resid_mid` by what the attention adds, for models that half apply it.

    The stream between attention and MLP is the layer's input plus the attention's output. Where a
    model adds the two by itself and does not look at the hook, the output can be chosen instead.
    """
    entered: list[Tensor] = []

    def remember(activation: Tensor, hook: HookPoint) -> None:
        entered[:] = [activation]

    def write(activation: Tensor, hook: HookPoint) -> Tensor:
        return torch.where(positions[:, :, None], value - entered[0], activation)

    return [
        (f"blocks.{layer}.hook_resid_pre", remember),
        (f"blocks.{layer}.hook_attn_out", write),
    ]


def read_activations(
    model: HookedModel, trials: Trials, names: Collection[str]
) -> dict[str, Tensor]:
    """Activations of one run at the named hook points, without gradients, by hook name.

    Raises:
        HysteresisError: trials that the model cannot run, a hook point that it does not have, one
            that does not fire, or one whose activation does not go by trial and position.
    """
    return run_and_read(model, trials, names)[1]


def run_and_read(
    model: HookedModel, trials: Trials, names: Collection[str]
) -> tuple[Float[Tensor, "trial pos d_vocab"], dict[str, Tensor]]:
    """The logits of a run, and its activations as `read_activations` gives them."""
    check_trials(model, trials)
    for name in sorted(names):
        check_hook_point(model, name)
    wanted = set(names)
    with measuring(model):
        output, cache = model.run_with_cache(
            trials.tokens, names_filter=lambda name: name in wanted
        )
    absent = wanted - set(cache.keys())
    if absent:
        raise HysteresisError(f"hooks that never fired: {', '.join(sorted(absent))}")
    for name in sorted(names):
        if Site(name).read(cache[name]).shape[:2] != trials.tokens.shape:
            raise HysteresisError(
                f"the activation at {name} is {tuple(cache[name].shape)}: it does not begin with "
                "trial and position"
            )
    return cast(Tensor, output), {name: cache[name] for name in names}
