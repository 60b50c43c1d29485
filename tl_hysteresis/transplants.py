"""Transplants between two checkpoints: which component's activations or weights carry the gap.

Two checkpoints of one model answer the same trials differently. Put one's activations, or one's
weights, into the other, component by component, and see how much of the difference comes along.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import HookedTransformer

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import Hook, intervene, patch_activations, read_activations
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.models import ParameterLayout
from tl_hysteresis.routes import share_scale
from tl_hysteresis.sites import (
    Component,
    HookedModel,
    Site,
    all_modules,
    check_are_sites,
    check_are_trials,
    check_conflict,
    check_trials,
    components,
    measuring,
)
from tl_hysteresis.tasks import Trials

EVERYTHING = "everything"
# Settings that two checkpoints may differ in: they say how weights began, or what hooks see.
_NOT_OF_THE_FUNCTION = {
    *("seed", "device", "model_name", "init_mode", "initializer_range", "init_weights"),
    *("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in"),
    *("use_hook_tokens", "ungroup_grouped_query_attention", "default_prepend_bos"),
    *("tokenizer_name", "tokenizer_prepends_bos", "from_checkpoint", "checkpoint_index"),
    *("checkpoint_label_type", "checkpoint_value"),
}
_NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")
_PLAIN = (str, int, float, bool, list, type(None))
Model = TypeVar("Model", bound=HookedModel)


def transplant(
    first: HookedModel,
    second: HookedModel,
    trials: Trials,
    *,
    sites: Mapping[str, Sequence[Site]] | None = None,
    weights: Sequence[str] | None = None,
    role: str | None = None,
    names: tuple[str, str] = ("below", "above"),
    shares: bool = True,
) -> pd.DataFrame:
    """Transplant each component from each of two checkpoints into the other.

    Args:
        first: a model.
        second: another checkpoint of it.
        trials: what both are asked.
        sites: the sites whose activations go over together, by a name of your choice; None for all
            heads, each layer's heads, each head and each MLP. An empty mapping for none.
        weights: the components whose weights go over, as `transplant_weights` names them; None for
            all that the models have. An empty list for none.
        role: transplant activations at the positions of this role alone; None for all.
        names: what the two models are called in the table.
        shares: False leaves them out, where the two margins differ too little to divide by.

    Returns:
        One row a transplant: `into`, `carrier` ("activations" or "weights"), `component`, `margin`
        (mean over trials, in logits), `effect` (how far it moved), `share` (of the gap, which is
        the donor's mean margin minus the recipient's: 1 where this alone makes the recipient
        answer as the donor does). Shares of several components need not add up to 1.

    Raises:
        HysteresisError: models of different shape; trials that they cannot run; a role that no
            position has; margins too alike to take shares of.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> config = hooked_config(ModelConfig(), d_vocab=32, n_ctx=17)
        >>> below, above = (build_model(config, seed=seed) for seed in (0, 1))
        >>> tokens = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(0))
        >>> table = transplant(below, above, Trials.of(tokens, [16] * 8, [31] * 8))
        >>> table[table["component"] == "everything"]["share"].round(4).tolist()
        [1.0, 1.0]
    """
    _check_alike(first, second)
    check_trials(first, trials)
    check_conflict(trials)
    if len(set(names)) != 2:
        raise HysteresisError(f"names = {names!r}: two different names are needed")
    if sites is None:
        sites = components(first)
    if not isinstance(sites, Mapping):
        raise HysteresisError("sites is a mapping from a name to the sites that go over together")
    if weights is None:
        weights = weight_components(first)
    own = [_margins(model, trials, []) for model in (first, second)]
    rows = []
    for into, here in enumerate((first, second)):
        there = (second, first)[into]
        scale = share_scale(first, own[into], own[1 - into]) if shares else None
        found = [
            ("activations", name, _margins(here, trials, _hooks(there, trials, part, role)))
            for name, part in sites.items()
        ]
        recipient = _copy_of(here)
        for name in weights:
            _copy_weights(there, recipient, name)
            found.append(("weights", name, _margins(recipient, trials, [])))
            _copy_weights(here, recipient, name)
        for carrier, component, margins in found:
            effect = (margins - own[into]).mean().item()
            row = (names[into], carrier, component, margins.mean().item(), effect)
            rows.append(row if scale is None else (*row, effect / scale))
    columns = ["into", "carrier", "component", "margin", "effect", "share"]
    return pd.DataFrame(rows, columns=columns if shares else columns[:-1])


def transplant_activations(
    donor: HookedModel, trials: Trials, sites: Sequence[Site], *, role: str | None = None
) -> list[Hook]:
    """Hooks that give a model the donor's activations at all the given sites at once.

    Args:
        donor: the other checkpoint, run on the same trials.
        trials: the trials that will be run.
        sites: where.
        role: at the positions of this role alone; None for all.

    Raises:
        HysteresisError: a site that the donor does not have, trials that it cannot run, a role that
            no position has.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> trials = Trials.of(torch.arange(17)[None], [16], [31])
        >>> hooks = transplant_activations(model, trials, [Site("blocks.0.hook_mlp_out")])
        >>> with intervene(model, hooks):  # from itself: nothing changes
        ...     transplanted = model(trials.tokens)
        >>> torch.equal(transplanted, model(trials.tokens))
        True
    """
    return _hooks(donor, trials, sites, role)


def transplant_weights(into: Model, donor: HookedModel, component: str) -> Model:
    """A copy of a model that has the donor's weights in one component.

    Args:
        into: the model that is copied, and left as it is.
        donor: another checkpoint of it.
        component: "L0H3" (its queries, keys, values and outputs, with their biases), "L0 heads"
            (the attention layer, with its output bias and any norms of queries and keys), "all
            heads", "L0 MLP", "L0 norms", "embedding", "unembedding" (with the final norm), or
            "everything".

    Raises:
        HysteresisError: models of different shape, or a component that has no weights of its own.
    """
    _check_alike(into, donor)
    recipient = _copy_of(into)
    _copy_weights(donor, recipient, component)
    return recipient


def weight_components(model: HookedModel) -> list[str]:
    """The components whose weights can go over by themselves.

    Heads are taken apart in a `HookedTransformer` whose heads have keys and values of their own;
    embedding and unembedding where they are not tied.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> config = hooked_config(ModelConfig(n_heads=2, n_layers=1), d_vocab=32, n_ctx=17)
        >>> weight_components(build_model(config, seed=0))  # doctest: +NORMALIZE_WHITESPACE
        ['everything', 'all heads', 'L0 heads', 'L0H0', 'L0H1', 'L0 MLP', 'L0 norms', 'embedding',
         'unembedding']
    """
    layers = range(model.cfg.n_layers)
    found = [EVERYTHING, "all heads", *(f"L{layer} heads" for layer in layers)]
    if _heads_are_apart(model):
        found += [f"L{layer}H{head}" for layer in layers for head in range(model.cfg.n_heads)]
    found += [f"L{layer} MLP" for layer in layers]
    found += [f"L{layer} norms" for layer in layers]
    found += ["embedding", "unembedding"]
    return [name for name in found if _parameters(model, name)]


def _hooks(
    donor: HookedModel, trials: Trials, sites: Sequence[Site], role: str | None
) -> list[Hook]:
    sites = check_are_sites(sites)
    check_are_trials(trials)
    everywhere = torch.ones_like(trials.tokens, dtype=torch.bool)
    positions = everywhere if role is None else trials.positions(role)
    source = read_activations(donor, trials, {site.name for site in sites})
    return patch_activations(sites, source, positions=positions)


def _margins(model: HookedModel, trials: Trials, hooks: Sequence[Hook]) -> Float[Tensor, " trial"]:
    """Margins of a whole run: a transplant from the model itself then changes no bit."""
    with measuring(model), intervene(model, hooks):
        return logit_margin(model(trials.tokens), trials).double()


def _copy_of(model: Model) -> Model:
    """A copy. What a bridge remembers of its last run, with its gradients, is not for copying."""
    remembered = [value for module in all_modules(model) for value in vars(module).values()]
    tensors = [x for x in remembered if isinstance(x, Tensor) and not x.is_leaf]
    return copy.deepcopy(model, {id(tensor): tensor.detach() for tensor in tensors})


def _copy_weights(donor: HookedModel, recipient: HookedModel, component: str) -> None:
    pairs = _parameters(donor, component), _parameters(recipient, component)
    if not pairs[0]:
        raise HysteresisError(
            f"no weights of {component!r}; there are {', '.join(weight_components(donor))}"
        )
    with torch.no_grad():
        for source, target in zip(*pairs, strict=True):
            target.copy_(source)


def _parameters(model: HookedModel, component: str) -> list[Tensor]:
    """A component's parameters, or of a head the views that belong to it."""
    if component == EVERYTHING:
        return list(model.parameters())
    if component in ("embedding", "unembedding"):
        ends = _of_modules(model, "embed", "pos_embed"), _of_modules(model, "ln_final", "unembed")
        tied = {id(parameter) for parameter in ends[0]} & {id(parameter) for parameter in ends[1]}
        return [] if tied else ends[component == "unembedding"]
    named = Component.of(component)
    if named is None or not named.is_in(model):
        return []
    if named.layer is None:
        layers = range(model.cfg.n_layers)
        return [p for layer in layers for p in _parameters(model, f"L{layer} heads")]
    block, head = model.blocks[named.layer], named.head
    if head is None:
        modules = {"heads": ("attn",), "MLP": ("mlp",), "norms": _NORMS}[named.part]
        return _of_modules(block, *modules)
    if not _heads_are_apart(model):
        return []
    letters = [*(f"W_{x}" for x in "QKVO"), *(f"b_{x}" for x in "QKV")]
    own = [block.attn.get_parameter(name)[head] for name in letters]
    sinks = dict(block.attn.named_parameters()).get("sinks")  # one logit a head
    return own if sinks is None else [*own, sinks[head : head + 1]]


def _of_modules(parent: nn.Module, *names: str) -> list[Tensor]:
    modules = [getattr(parent, name, None) for name in names]
    return [p for module in modules if module is not None for p in module.parameters()]


def _heads_are_apart(model: HookedModel) -> bool:
    return isinstance(model, HookedTransformer) and model.cfg.n_key_value_heads is None


def _check_alike(first: HookedModel, second: HookedModel) -> None:
    """Refuse models that are not two checkpoints of one."""
    layouts = [ParameterLayout.of(model) for model in (first, second)]
    if layouts[0] != layouts[1]:
        here, there = (dict(zip(x.names, x.shapes, strict=True)) for x in layouts)
        name = next(n for n in {**here, **there} if here.get(n) != there.get(n))
        raise HysteresisError(
            f"not two checkpoints of one model: {name} is {_shape(here.get(name))} in the first, "
            f"{_shape(there.get(name))} in the second"
        )
    settings = [vars(model.cfg) for model in (first, second)]
    for name in sorted(set.union(*map(set, settings)) - _NOT_OF_THE_FUNCTION):
        ours, theirs = (s.get(name) for s in settings)
        if isinstance(ours, _PLAIN) and isinstance(theirs, _PLAIN) and ours != theirs:
            raise HysteresisError(
                f"not two checkpoints of one model: {name} is {ours!r} in the first, "
                f"{theirs!r} in the second"
            )
    for name, parameter in first.named_parameters():
        other = second.get_parameter(name)
        if (parameter.dtype, parameter.device) != (other.dtype, other.device):
            raise HysteresisError(
                f"{name} is {parameter.dtype} on {parameter.device} in the first model, "
                f"{other.dtype} on {other.device} in the second"
            )


def _shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(tuple(shape))
