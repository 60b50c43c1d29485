"""Margins of a run with one site patched, at each of many choices of positions: the hot path.

The plain way is one forward pass for each choice, and `one_by_one` is that. It is slow, because
nearly all of each pass has been computed before. Four things are exact and save most of it:

- A patch in layer l leaves every layer before l as it was: the run is taken up again at l.
- After its attention a layer treats each position by itself. So a patch behind the attention, at
  some positions, is a patch of the layer's *output* at those positions, by what it is when the
  site is patched everywhere; and that one run serves all choices of positions.
- A trial in which the patch changes no bit at the chosen positions keeps its margin.
- After the last layer only the last position is read: there, one query attends to cached keys.

What is left are rows, one for each choice and trial, and they are run many to a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens import HookedTransformer
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry

from tl_hysteresis.checks import refusals
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import (
    Hook,
    intervene,
    overwrite,
    overwrite_stream_between,
    run_and_read,
)
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.sites import HookedModel, Site, check_trials, has_hooks, measuring, n_key_heads
from tl_hysteresis.tasks import Trials

# Points of a layer whose activation at a position (of a pattern: at a query) reaches the other
# positions only through later layers. Keys, values and the layer's input are not of them.
_BY_POSITION = {
    *("attn.hook_q", "attn.hook_rot_q", "attn.hook_attn_scores", "attn.hook_pattern"),
    *("attn.hook_z", "attn.hook_result", "hook_attn_out", "hook_resid_mid", "hook_mlp_in"),
    *("ln2.hook_scale", "ln2.hook_normalized", "mlp.hook_pre", "mlp.hook_pre_linear"),
    *("mlp.hook_post", "hook_mlp_out"),
}


@dataclass(frozen=True, eq=False)
class BaseRun:
    """The run into which is patched.

    Attributes:
        model: the model.
        trials: the prompts of this run, with the answers whose margin is measured.
        margins: the margin of each trial, unpatched.
        streams: the residual stream before each layer and after the last, from which the run can be
            taken up again; None where it cannot, and every patch is a whole run.
    """

    model: HookedModel
    trials: Trials
    margins: Float[Tensor, " trial"]
    streams: tuple[Float[Tensor, "trial pos d_model"], ...] | None

    @cached_property
    def attended(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the last layer, each `[trial, pos, head, d_head]`."""
        assert self.streams is not None
        return _keys_and_values(self.model, self.streams[-2])

    @classmethod
    def of(cls, model: HookedModel, trials: Trials) -> BaseRun:
        """Run the trials, and keep what is needed to take the run up again.

        Raises:
            HysteresisError: trials that the model cannot run.
        """
        check_trials(model, trials)
        with measuring(model):
            if not _can_be_taken_up(model):
                return cls(model, trials, logit_margin(model(trials.tokens), trials), None)
            last = model.cfg.n_layers - 1
            names = [f"blocks.{layer}.hook_resid_pre" for layer in range(last + 1)]
            names.append(f"blocks.{last}.hook_resid_post")
            logits, cache = run_and_read(model, trials, names)
            streams = tuple(cache[name] for name in names)
            return cls(model, trials, logit_margin(logits, trials), streams)


def patched_margins(
    run: BaseRun,
    site: Site,
    value: Float[Tensor, "trial pos *feature"],
    choices: Bool[Tensor, "choice trial pos"],
    *,
    max_bytes: int,
) -> Float[Tensor, "choice trial"]:
    """The margin of each trial with `value` written at a site, for each choice of positions.

    Args:
        run: the run into which is patched.
        site: where.
        value: what is written there, as `Site.read` gives it.
        choices: at which positions of each trial, once for each choice.
        max_bytes: of activations held at a time.

    Raises:
        HysteresisError: a value that does not fit the site, or a write that the model would ignore
            or apply by half, where no other way is known.
    """
    with measuring(run.model):
        layer, point = _place(site)
        if run.streams is None or layer is None:
            return one_by_one(run, site, value, choices, max_bytes=max_bytes)
        if point == "hook_resid_pre":
            return _patch_stream(run, layer, value, choices, max_bytes=max_bytes)
        if point == "hook_resid_post":
            return _patch_stream(run, layer + 1, value, choices, max_bytes=max_bytes)
        if point not in _BY_POSITION:
            return one_by_one(run, site, value, choices, max_bytes=max_bytes)
        everywhere = torch.ones_like(choices[0])
        with intervene(run.model, [overwrite(site, value, positions=everywhere)]):
            value = run.model(run.streams[layer], start_at_layer=layer, stop_at_layer=layer + 1)
        return _patch_stream(run, layer + 1, value, choices, max_bytes=max_bytes)


def one_by_one(
    run: BaseRun,
    site: Site,
    value: Float[Tensor, "trial pos *feature"],
    choices: Bool[Tensor, "choice trial pos"],
    *,
    max_bytes: int,
) -> Float[Tensor, "choice trial"]:
    """The same by forward passes with a hook at the site: the plain way, and right for any model.

    Several choices share a pass, as far as the budget goes; where the caller has hooks on the
    model, which may know the trials by number, and in half precision, where rounding depends on
    the batch, each has its own.
    """
    layer, _ = _place(site)
    n_trials, n_pos = run.trials.tokens.shape
    together = max(1, max_bytes // _bytes_of_a_row(run.model, n_pos) // n_trials)
    if has_hooks(run.model) or _half_precision(run.model):
        together = 1
    margins = []
    with measuring(run.model):
        for part in choices.split(together):
            trial = torch.arange(n_trials, device=part.device).repeat(len(part))
            hooks = _writes(run.model, site, value[trial], part.flatten(end_dim=1))
            with intervene(run.model, hooks):
                if run.streams is None or layer is None:
                    logits = run.model(run.trials.tokens[trial])
                else:
                    logits = _finish(run.model, run.streams[layer][trial], layer)
            margins.append(logit_margin(logits, run.trials.select(trial)).view(len(part), -1))
    return torch.cat(margins)


def margins_under(run: BaseRun, hooks: Sequence[Hook]) -> Float[Tensor, " trial"]:
    """The margin of each trial under any hooks, taken up at the first layer that one touches."""
    layers = [_place(Site(name))[0] for name, _ in hooks]
    first = min((layer for layer in layers if layer is not None), default=None)
    with measuring(run.model), intervene(run.model, hooks):
        if run.streams is None or first is None or None in layers:
            logits = run.model(run.trials.tokens)
        else:
            logits = _finish(run.model, run.streams[first], first)
    return logit_margin(logits, run.trials)


def _patch_stream(
    run: BaseRun,
    layer: int,
    value: Float[Tensor, "trial pos d_model"],
    choices: Bool[Tensor, "choice trial pos"],
    *,
    max_bytes: int,
) -> Float[Tensor, "choice trial"]:
    """Patch the stream that enters a layer; that after the last layer is only read at the end."""
    assert run.streams is not None
    model, base, n_layers = run.model, run.streams[layer], run.model.cfg.n_layers
    if value.shape != base.shape or value.dtype != base.dtype:
        raise HysteresisError(
            f"a value {tuple(value.shape)} of {value.dtype} cannot stand in a residual stream "
            f"{tuple(base.shape)} of {base.dtype}"
        )
    if layer == n_layers:
        base, value, choices = base[:, -1:], value[:, -1:], choices[:, :, -1:]
    changed = (value != base).any(dim=-1)
    rows = (choices & changed).any(dim=-1).nonzero()
    attended = _keys_and_values(model, value) if layer == n_layers - 1 and len(rows) else None
    margins = run.margins.repeat(len(choices), 1)
    for part in rows.split(max(1, max_bytes // _bytes_of_a_row(model, base.shape[1]))):
        choice, trial = part.unbind(dim=1)
        patched = choices[choice, trial]
        if attended is not None:
            # Only the last query is read after the last layer: no other is asked.
            last = patched[:, -1:, None]
            residual = torch.where(last, value[trial, -1:], base[trial, -1:])
            keys, values = (
                torch.where(patched[:, :-1, None, None], new[trial, :-1], old[trial, :-1])
                for new, old in zip(attended, run.attended, strict=True)
            )
            cache = _cache(model, TransformerLensKeyValueCacheEntry(keys, values))
            logits = model(residual, start_at_layer=layer, past_kv_cache=cache)
        else:
            residual = torch.where(patched[:, :, None], value[trial], base[trial])
            logits = _finish(model, residual, layer)
        margins[choice, trial] = logit_margin(logits, run.trials.select(trial))
    return margins


def _finish(
    model: HookedModel, residual: Float[Tensor, "row pos d_model"], layer: int
) -> Float[Tensor, "row 1 d_vocab"]:
    """Run the layers from this one on, and the unembedding at the last position alone."""
    n_layers = model.cfg.n_layers
    if layer < n_layers:
        residual = model(residual, start_at_layer=layer, stop_at_layer=n_layers)
    return cast(Tensor, model(residual[:, -1:], start_at_layer=n_layers))


def _keys_and_values(
    model: HookedModel, stream: Float[Tensor, "trial pos d_model"]
) -> tuple[Float[Tensor, "trial pos head d_head"], Float[Tensor, "trial pos head d_head"]]:
    """Keys and values of the last layer, as its attention would cache them."""
    layer = model.cfg.n_layers - 1
    nothing = stream.new_empty(len(stream), 0, n_key_heads(model), model.cfg.d_head)
    empty = TransformerLensKeyValueCacheEntry(nothing, nothing)
    model(stream, start_at_layer=layer, stop_at_layer=layer + 1, past_kv_cache=_cache(model, empty))
    return empty.past_keys, empty.past_values


def _cache(
    model: HookedModel, last: TransformerLensKeyValueCacheEntry
) -> TransformerLensKeyValueCache:
    """A cache of which only the last layer's entry is ever looked at."""
    entries = [last] * model.cfg.n_layers
    return TransformerLensKeyValueCache(entries, torch.empty(len(last.past_keys), 0))


def _writes(
    model: HookedModel, site: Site, value: Tensor, positions: Bool[Tensor, "trial pos"]
) -> list[Hook]:
    """A hook that writes at the site, or, where the model would half apply it, another way."""
    layer, point = _place(site)
    if layer is not None and point == "hook_resid_mid" and refusals(model, [site.name]):
        return overwrite_stream_between(layer, value, positions=positions)
    return [overwrite(site, value, positions=positions)]


def _can_be_taken_up(model: HookedModel) -> bool:
    """Whether a run can be taken up at a layer, and rows be regrouped, without changing anything.

    Not on a bridge, which has no `start_at_layer`; where layers need more than the stream
    (shortformer's positions, the mask of left padding); where the caller has hooks on the model;
    or in half precision, where rounding depends on the batch.
    """
    return (
        isinstance(model, HookedTransformer)
        and model.cfg.positional_embedding_type != "shortformer"
        and getattr(model.tokenizer, "padding_side", "right") == "right"
        and not has_hooks(model)
        and not _half_precision(model)
    )


def _half_precision(model: HookedModel) -> bool:
    return next(model.parameters()).dtype not in (torch.float32, torch.float64)


def _place(site: Site) -> tuple[int | None, str]:
    """The layer of a hook point, and its name within the layer."""
    block, _, rest = site.name.partition(".")
    layer, _, point = rest.partition(".")
    if block != "blocks" or not layer.isdigit():
        return None, site.name
    return int(layer), point


def _bytes_of_a_row(model: HookedModel, n_pos: int) -> int:
    """About what a prompt's activations in one layer take."""
    cfg = model.cfg
    width = 4 * cfg.d_model + 2 * (cfg.d_mlp or 0)
    width += 4 * cfg.n_heads * cfg.d_head + 3 * cfg.n_heads * n_pos
    return int(width * n_pos * next(model.parameters()).element_size())
