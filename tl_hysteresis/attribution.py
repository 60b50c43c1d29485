"""Attribution patching: route maps to first order, from the gradients of one backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import HookedTransformer
from transformer_lens.hook_points import HookPoint

from tl_hysteresis.checks import refusals
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import Hook, run_and_read
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.routes import By, Direction, RouteMap, plan, two_runs
from tl_hysteresis.sites import MAX_BYTES, HookedModel, measuring, trial_slices
from tl_hysteresis.tasks import Trials


def attribution_map(
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
    """The same map to first order: (other activation - this one) · gradient of the margin here.

    Two forward passes and one backward pass for the whole map. How good it is, `agreement` says;
    it is exact where the margin is linear in the activation, and can be badly wrong elsewhere, at
    early sites and saturated attention above all.

    Arguments, signs and shares (of the exact difference between the two runs) are those of
    `route_map`.

    Raises:
        HysteresisError: what `route_map` refuses, or a site that the margin does not depend on.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> tokens = torch.randint(16, (2, 8, 17), generator=torch.Generator().manual_seed(0))
        >>> clean, corrupted = (Trials.of(t, [16] * 8, [31] * 8) for t in tokens)
        >>> attribution_map(model, clean, corrupted, points="z", by="all").tensor("z").shape
        torch.Size([2, 4])

    Source: Nanda (2023), Attribution patching; Syed, Rager and Conmy (2023).
    """
    base, source = two_runs(model, clean, corrupted, direction)
    sites, chosen, labels = plan(model, clean, points, by, roles)
    names = {site.name for _, _, site in sites}
    parts = []
    # A graph keeps several activations for each point.
    for part in trial_slices(model, clean, names, max_bytes=max_bytes):
        logits, other = run_and_read(model, source.select(part), names)
        here, own, gradients = _gradients(model, base.select(part), names)
        found = []
        for _, _, site in sites:
            new, old = (site.read(cache[site.name]).double() for cache in (other, own))
            # The scores of masked keys are -inf in both runs, which is no change.
            change = torch.where(new == old, 0.0, new - old)
            product = change * site.read(gradients[site.name]).double()
            if not bool(product.isfinite().all()):
                raise HysteresisError(f"changes or gradients at {site.name} are not finite")
            product = product.flatten(start_dim=2).sum(dim=2)
            found.append((product * chosen[:, part]).sum(dim=2))
        parts.append((torch.cat(found), here, logit_margin(logits, clean.select(part))))
    effects, here, there = (torch.cat(p, dim=-1).cpu().double() for p in zip(*parts, strict=True))
    return RouteMap.of(
        model,
        clean,
        corrupted,
        labels,
        effects,
        here,
        there,
        direction,
        shares,
        method="attribution",
    )


def _gradients(
    model: HookedModel, trials: Trials, names: set[str]
) -> tuple[Float[Tensor, " trial"], dict[str, Tensor], dict[str, Tensor]]:
    """Margins, the activations at the named points, and the gradients of the margins there."""
    asked = {name: _seen_by_gradients(model, name) for name in names}
    points = sorted({*names, *asked.values()})
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Hook:
        def run(activation: Tensor, hook: HookPoint) -> Tensor:
            # The first point that is reached starts the graph where the parameters do not. It is
            # returned in any case: a bridge shows its hooks a view that it does not go on with.
            needed = activation.requires_grad
            kept[name] = activation if needed else activation.detach().requires_grad_()
            return kept[name]

        return name, run

    with measuring(model), torch.inference_mode(False), torch.enable_grad():
        trials = trials.clone()  # those made in inference mode cannot be in a graph
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise HysteresisError("the model was made in inference mode, which allows no gradients")
        with model.hooks(fwd_hooks=[keep(name) for name in points]):
            margins = logit_margin(model(trials.tokens), trials)
        wanted = [kept[asked[name]] for name in names]
        found = torch.autograd.grad(margins.sum(), wanted, allow_unused=True)
        unused = [name for name, gradient in zip(names, found, strict=True) if gradient is None]
        if unused:
            raise HysteresisError(f"the margin does not depend on the activation at {unused[0]}")
    gradients = dict(zip(names, found, strict=True))
    own = {name: kept[name].detach() for name in names}
    if not isinstance(model, HookedTransformer):
        with measuring(model):  # a bridge remembers tensors of its last run: not with their graph
            model(trials.tokens[:1])
    return margins.detach(), own, gradients


def _seen_by_gradients(model: HookedModel, name: str) -> str:
    """The point whose gradient is that of the named one.

    Where a model computes past a hook, so does its gradient. What the attention adds to the middle
    of the stream has the gradient of that middle.

    Raises:
        HysteresisError: another point whose write the model would ignore or apply by half.
    """
    refused = refusals(model, [name])
    if refused and name.endswith("hook_resid_mid"):
        return name.replace("hook_resid_mid", "hook_attn_out")
    if refused:
        raise HysteresisError(refused[name])
    return name
