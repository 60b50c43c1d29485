"""What single components do: what each writes to the answers' logits, what each head attends to.

Both are read from a run that is left as it is. They show what a component does, not whether the
answer depends on it: other components may make up for it. That is for interventions to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens.components.rms_norm import RMSNorm
from transformer_lens.components.rms_norm_pre import RMSNormPre

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import read_activations
from tl_hysteresis.measures import last_position
from tl_hysteresis.sites import HookedModel, check_trials, hook_name, measuring
from tl_hysteresis.tasks import Trials

FINAL_SCALE = "ln_final.hook_scale"
"""Where the final normalisation divides; models without one do not have it."""


@dataclass(frozen=True, eq=False)
class LogitAttribution:
    """The logits of the two answers, as sums of what each component writes directly to them.

    Attributes:
        components: `embed`, tokens and positions together; for each layer its heads `L0H0`, ...,
            its `L0 attention bias` and its `L0 MLP`; and `bias`, which no component writes.
        contextual: parts of the contextual answer's logit, in logits.
        fixed: parts of the fixed answer's logit, in logits.

    Example:
        >>> found = LogitAttribution(("embed", "bias"), torch.ones(2, 3), torch.zeros(2, 3))
        >>> found.margin.sum(dim=0).tolist()
        [2.0, 2.0, 2.0]
    """

    components: tuple[str, ...]
    contextual: Float[Tensor, "component trial"]
    fixed: Float[Tensor, "component trial"]

    @property
    def margin(self) -> Float[Tensor, "component trial"]:
        """Parts of the logit margin, contextual minus fixed."""
        return self.contextual - self.fixed

    @property
    def table(self) -> pd.DataFrame:
        """Means over trials: `component`, `contextual`, `fixed`, `margin` (logits)."""
        means = {name: part.mean(dim=1).tolist() for name, part in self._parts().items()}
        return pd.DataFrame({"component": self.components, **means})

    def per_trial(self) -> pd.DataFrame:
        """One row a trial and component: `trial`, `component`, `contextual`, `fixed`, `margin`."""
        n_trials = self.contextual.shape[1]
        parts = {name: part.T.flatten().tolist() for name, part in self._parts().items()}
        trial = np.repeat(np.arange(n_trials), len(self.components))
        return pd.DataFrame({"trial": trial, "component": self.components * n_trials, **parts})

    def _parts(self) -> dict[str, Tensor]:
        return {"contextual": self.contextual, "fixed": self.fixed, "margin": self.margin}


@torch.no_grad()
def direct_logit_attribution(model: HookedModel, trials: Trials) -> LogitAttribution:
    """How much each component writes directly to the logits of both answers, at the query.

    With the scale of the final normalisation held at its value in this run, a logit is linear in
    the residual stream, which is the sum of what the components write: so it has a part for each.
    The parts are computed in float64, and checked: they must sum to the model's logits, and a
    layer's heads and bias to its attention's output, up to the square root of the precision of the
    model's own type.

    Args:
        model: with a final normalisation (LN, LNPre, RMS, RMSPre) or none, and W_U after it.
        trials: the trials, answered at the last position.

    Raises:
        HysteresisError: trials that the model cannot run; parts that do not sum to the whole, as
            where logits are capped or a layer's output is normalised before it is added.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.measures import logit_margin
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> from tl_hysteresis.tasks import AssociativeRecall, draw
        >>> model = build_model(hooked_config(ModelConfig(n_heads=2), d_vocab=32, n_ctx=17), seed=0)
        >>> trials = draw(AssociativeRecall(), 8, seed=0, stream="example", index=0)
        >>> found = direct_logit_attribution(model, trials)
        >>> found.components[:5]
        ('embed', 'L0H0', 'L0H1', 'L0 attention bias', 'L0 MLP')
        >>> margin = logit_margin(model(trials.tokens), trials).double()
        >>> bool(torch.allclose(found.margin.sum(dim=0), margin, atol=1e-5))
        True

    Source: Elhage et al. (2021), A Mathematical Framework for Transformer Circuits, for the direct
    path; the frozen normalisation is TransformerLens's.
    """
    layers, embed = range(model.cfg.n_layers), hook_name(model, "resid_pre", 0)
    points = ("z", "attn_out") if model.cfg.attn_only else ("z", "attn_out", "mlp_out")
    names = {(point, layer): hook_name(model, point, layer) for point in points for layer in layers}
    wanted = {*names.values(), embed, *({FINAL_SCALE} & model.hook_dict.keys())}
    activations = read_activations(model, trials, wanted)
    with measuring(model):
        logits = last_position(model(trials.tokens))
    tolerance = max(torch.finfo(x.dtype).eps for x in (*activations.values(), logits)) ** 0.5
    last = {name: activation[:, -1].double() for name, activation in activations.items()}

    directions, bias = _answer_directions(model, trials, last.get(FINAL_SCALE))
    parts = {"embed": _project(last[embed], directions)}
    W_O = model.W_O
    for layer in layers:
        heads = torch.einsum("thd,hdm->htm", last[names["z", layer]], W_O[layer].double())
        writes = {f"L{layer}H{head}": write for head, write in enumerate(heads)}
        output, b_O = last[names["attn_out", layer]], getattr(model.blocks[layer].attn, "b_O", None)
        silent = torch.zeros_like(output)
        writes[f"L{layer} attention bias"] = silent if b_O is None else silent + b_O
        _check_sum(writes, output, tolerance, f"the output of the attention of layer {layer}")
        if "mlp_out" in points:
            writes[f"L{layer} MLP"] = last[names["mlp_out", layer]]
        parts |= {name: _project(write, directions) for name, write in writes.items()}
    parts["bias"] = bias

    answers = torch.stack([trials.contextual, trials.fixed])
    _check_sum(parts, logits.double().gather(1, answers.T).T, tolerance, "the logits")
    contextual, fixed = torch.stack(list(parts.values()), dim=1)
    return LogitAttribution(tuple(parts), contextual, fixed)


def head_scores(model: HookedModel, trials: Trials, *, role: str | None = None) -> pd.DataFrame:
    """What each head attends to, by how tokens are arranged: previous, same, after the same.

    Each score is an attention probability, from 0 to 1: what a querying position attends to all
    the keys together that the score is about. It is averaged over all the querying positions, of
    all trials, that have such a key.

    - `previous_token`: to the position just before.
    - `same_token`: to earlier copies of the querying token.
    - `prefix_matching`: to the tokens right after those copies, as an induction head does. A copy
      directly before the query does not count: the token after it is the query itself.

    Args:
        model: any model whose attention patterns can be read.
        trials: the trials; for `AssociativeRecall` the query alone has an earlier copy.
        role: take querying positions with this role only.

    Returns:
        One row a head: `layer`, `head`, `previous_token`, `same_token`, `prefix_matching`.

    Raises:
        HysteresisError: trials that the model cannot run, a role that they do not have, or a score
            for which no querying position has a key.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> from tl_hysteresis.tasks import AssociativeRecall, draw
        >>> model = build_model(hooked_config(ModelConfig(n_heads=2), d_vocab=32, n_ctx=17), seed=0)
        >>> trials = draw(AssociativeRecall(), 8, seed=0, stream="example", index=0)
        >>> scores = head_scores(model, trials)
        >>> scores[["layer", "head"]].to_numpy().tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1]]

    Source: Olsson et al. (2022), In-context Learning and Induction Heads, for prefix matching.
    """
    check_trials(model, trials)
    keys = _scored_keys(trials, role)
    names = [hook_name(model, "pattern", layer) for layer in range(model.cfg.n_layers)]
    patterns = read_activations(model, trials, names)
    layers = []
    for layer, name in enumerate(names):
        scores = {score: _mean_attention(patterns[name], mask) for score, mask in keys.items()}
        layers.append(pd.DataFrame({"layer": layer, "head": range(model.cfg.n_heads), **scores}))
    return pd.concat(layers, ignore_index=True)


def _answer_directions(
    model: HookedModel, trials: Trials, scale: Float[Tensor, "trial 1"] | None
) -> tuple[Float[Tensor, "answer trial d_model"], Float[Tensor, "answer trial"]]:
    """The direction of the stream that each answer's logit reads, and what it is without a stream.

    The final normalisation's weights, centring and scale are folded into the direction.
    """
    answers = torch.stack([trials.contextual, trials.fixed])
    directions, bias = model.W_U.double().T[answers], model.b_U.double()[answers]
    if scale is None:
        return directions, bias
    norm = model.ln_final
    w, b = getattr(norm, "w", None), getattr(norm, "b", None)
    if b is not None:
        bias = bias + directions @ b.double()
    if w is not None:
        offset = 1.0 if getattr(model.cfg, "rmsnorm_uses_offset", False) else 0.0
        directions = directions * (offset + w.double())
    if not (isinstance(norm, RMSNorm | RMSNormPre) or getattr(norm, "uses_rms_norm", False)):
        directions = directions - directions.mean(dim=-1, keepdim=True)
    return directions / scale, bias


def _project(
    write: Float[Tensor, "trial d_model"], directions: Float[Tensor, "answer trial d_model"]
) -> Float[Tensor, "answer trial"]:
    return (write * directions).sum(dim=-1)


def _check_sum(parts: Mapping[str, Tensor], whole: Tensor, tolerance: float, what: str) -> None:
    """Refuse parts that do not sum to the whole, relative to the largest sum of their sizes."""
    stack = torch.stack(list(parts.values()))
    deviation = (stack.sum(dim=0) - whole).abs().max().item()
    allowed = tolerance * stack.abs().sum(dim=0).max().item()
    if not deviation <= allowed:  # so that NaN is refused
        raise HysteresisError(
            f"the parts miss {what} by up to {deviation:.3g}, where {allowed:.3g} is rounding: the "
            "model does more to them than add (capped logits, a norm after attention, a hook?)"
        )


def _scored_keys(trials: Trials, role: str | None) -> dict[str, Bool[Tensor, "trial query key"]]:
    """The keys that each of the head scores is about, for each querying position."""
    tokens = trials.tokens
    n_pos = tokens.shape[1]
    earlier = torch.ones(n_pos, n_pos, dtype=torch.bool, device=tokens.device).tril(-1)
    copies = (tokens[:, :, None] == tokens[:, None, :]) & earlier
    queries = torch.ones_like(tokens, dtype=torch.bool) if role is None else trials.positions(role)
    rules = {
        "previous_token": ((earlier & ~earlier.tril(-2)).expand_as(copies), "has one before it"),
        "same_token": (copies, "repeats a token of its trial"),
        "prefix_matching": (
            copies.roll(1, dims=2) & earlier,
            "repeats a token of its trial with another between",
        ),
    }
    keys = {score: mask & queries[:, :, None] for score, (mask, _) in rules.items()}
    for score, mask in keys.items():
        if not bool(mask.any()):
            positions = "no position" if role is None else f"no position with the role {role!r}"
            raise HysteresisError(f"{score} is undefined: {positions} {rules[score][1]}")
    return keys


def _mean_attention(
    pattern: Float[Tensor, "trial head query key"], keys: Bool[Tensor, "trial query key"]
) -> list[float]:
    """Attention to the keys, of each head, over the querying positions that have any."""
    attention = torch.einsum("thqk,tqk->tqh", pattern.double(), keys.double())
    means: list[float] = attention[keys.any(dim=-1)].mean(dim=0).tolist()
    return means
