"""Where activations are read and written, by name; what can be run; and how runs are measured."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformer_lens import HookedTransformer
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.utilities.components_utils import get_act_name

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.tasks import Trials

HookedModel = HookedTransformer | TransformerBridge
"""Any model with TransformerLens's hook points."""

STREAM = ("resid_pre", "resid_mid", "resid_post")
"""Points of the residual stream: before a layer, between its attention and its MLP, after it."""

SWITCHED = {
    "attn.hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_mlp_in": "use_hook_mlp_in",
    "hook_attn_in": "use_attn_in",
}
"""Hook points that do not fire before a setting of the model is on, by how their names end."""

MAX_BYTES = 1 << 26
"""Default budget of activations held at a time, in bytes (64 MiB)."""


@dataclass(frozen=True, order=True)
class Site:
    """A place in a model where an activation is read and written.

    Attributes:
        name: name of a hook point.
        head: one head, where the activation has a head axis; None for all.

    Example:
        >>> Site("blocks.1.attn.hook_z", head=3)
        Site(name='blocks.1.attn.hook_z', head=3)
    """

    name: str
    head: int | None = None

    def __post_init__(self) -> None:
        if self.head is not None:  # a number out of a table is a numpy integer
            object.__setattr__(self, "head", operator.index(self.head))

    @property
    def of_queries(self) -> bool:
        """Whether the activation is `[trial, head, query, key]`, and its position is the query."""
        return self.name.endswith(("hook_pattern", "hook_attn_scores"))

    def read(self, activation: Tensor) -> Tensor:
        """The site's part of an activation, as a view `[trial, pos, *feature]`.

        An attention pattern or its scores are taken by query: `[trial, query, (head,) key]`.

        Raises:
            HysteresisError: an activation without a head axis, or without this head.

        Example:
            >>> Site("blocks.0.attn.hook_pattern", head=1).read(torch.zeros(5, 2, 9, 9)).shape
            torch.Size([5, 9, 9])
        """
        if self.of_queries:
            activation = activation.transpose(1, 2)
        if self.head is None:
            return activation
        if activation.ndim != 4:
            raise HysteresisError(
                f"the activation at {self.name} is {tuple(activation.shape)}: it has no head axis"
            )
        if not 0 <= self.head < activation.shape[2]:
            raise HysteresisError(
                f"there is no head {self.head} at {self.name}: it has {activation.shape[2]} heads"
            )
        return activation[:, :, self.head]


def head_sites(model: HookedModel, layer: int) -> list[Site]:
    """The outputs of a layer's attention heads, one site a head.

    A head's output is read at `hook_z`, before W_O: W_O is linear, so the mean of one is the mean
    of the other (but for models that normalise the attention's output), and no `use_attn_result`
    is needed.
    """
    return [Site(f"blocks.{layer}.attn.hook_z", head) for head in range(model.cfg.n_heads)]


def n_key_heads(model: HookedModel) -> int:
    """How many heads keys and values have: fewer than the queries where they are grouped."""
    groups: int | None = model.cfg.n_key_value_heads
    if groups is None or getattr(model.cfg, "ungroup_grouped_query_attention", False):
        return model.cfg.n_heads
    return groups


def attention_site(layer: int) -> Site:
    """The output of a layer's attention, all heads together, as it is added to the stream."""
    return Site(f"blocks.{layer}.hook_attn_out")


def mlp_site(layer: int) -> Site:
    """The output of a layer's MLP."""
    return Site(f"blocks.{layer}.hook_mlp_out")


def components(model: HookedModel) -> dict[str, list[Site]]:
    """The parts that are studied, by name: all heads, each layer's heads, each head, each MLP.

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


@dataclass(frozen=True)
class Component:
    """What a component's name says: "all heads", "L0 heads", "L0H3", "L0 MLP" or "L0 norms".

    Attributes:
        part: "heads" (one where `head` says which, else all of the layer, or of all layers), "MLP"
            or "norms".
        layer: its layer; None for all.
        head: the head, of one.

    Example:
        >>> Component.of("L1H3")
        Component(part='heads', layer=1, head=3)
        >>> Component.of("nose") is None
        True
    """

    part: str
    layer: int | None = None
    head: int | None = None

    @classmethod
    def of(cls, name: str) -> Component | None:
        """A component from its name, or None for what is no such name."""
        if name == "all heads":
            return cls("heads")
        match = re.fullmatch(r"L(\d+)(?:H(\d+)| (heads|MLP|norms))", name)
        if match is None:
            return None
        if match[2] is None:
            return cls(match[3], int(match[1]))
        return cls("heads", int(match[1]), int(match[2]))

    def is_in(self, model: HookedModel) -> bool:
        """Whether the model has this layer, this head, or any MLP."""
        return (
            (self.layer is None or self.layer < model.cfg.n_layers)
            and (self.head is None or self.head < model.cfg.n_heads)
            and not (self.part == "MLP" and model.cfg.attn_only)
        )


def component_sites(model: HookedModel, *names: str | Iterable[str]) -> list[Site]:
    """The sites of components by name, such as "L1H3", "L0 heads", "all heads" or "L0 MLP".

    Names can stand by themselves or in lists.

    Raises:
        HysteresisError: a component that the model does not have.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> component_sites(model, "L1H3", "L0 MLP")
        [Site(name='blocks.1.attn.hook_z', head=3), Site(name='blocks.0.hook_mlp_out', head=None)]
    """
    known = components(model)
    single = [name for given in names for name in as_list(given)]
    for name in single:
        if name not in known:
            raise HysteresisError(f"no component {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(site for name in single for site in known[name]))


def as_list(names: str | Iterable[str]) -> list[str]:
    """One name or several, as a list, each once."""
    return [names] if isinstance(names, str) else list(dict.fromkeys(names))


def check_are_sites(sites: Site | Iterable[Site]) -> list[Site]:
    """One site or several, as a list, each once; names in the place of sites are refused."""
    sites = [sites] if isinstance(sites, Site | str) else list(dict.fromkeys(sites))
    for site in sites:
        if not isinstance(site, Site):
            raise HysteresisError(
                f"{site!r} is no Site: say Site('blocks.0.attn.hook_z', head=1), "
                "or component_sites(model, 'L0H1')"
            )
    return sites


def hook_name(model: HookedModel, point: str, layer: int) -> str:
    """Full name of a hook point from TransformerLens's short name for it.

    Raises:
        HysteresisError: a point that the model does not have in this layer.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> hook_name(model, "z", 1)
        'blocks.1.attn.hook_z'
    """
    if isinstance(point, str) and ("." in point or point.startswith("hook_")):
        short = point.rsplit(".", 1)[-1].removeprefix("hook_")
        raise HysteresisError(
            f"{point!r} is the full name of a hook: a point of every layer goes by "
            f"TransformerLens's short name, such as {short!r}"
        )
    if point in ("embed", "pos_embed"):
        raise HysteresisError(
            f"{point!r} is no point of a layer: embeddings are what 'resid_pre' of layer 0 holds"
        )
    name = str(get_act_name(point, layer)) if isinstance(point, str) else repr(point)
    # TransformerLens lets a number in a short name, as in "z1", decide the layer.
    if not name.startswith(f"blocks.{layer}."):
        raise HysteresisError(f"{point!r} is no point of a layer: say 'resid_pre', 'z', 'mlp_out'")
    check_hook_point(model, name)
    return name


def check_hook_point(model: HookedModel, name: str) -> None:
    """Refuse a hook point that the model does not have, or that is switched off."""
    if name not in model.hook_dict:
        raise HysteresisError(f"the model has no hook point {name!r}")
    for end, setting in SWITCHED.items():
        if name.endswith(end) and not getattr(model.cfg, setting, False):
            raise HysteresisError(
                f"the hook point {name} never fires before model.set_{setting}(True), which not "
                "every model supports"
            )


def check_are_trials(*batches: Trials) -> None:
    """Refuse tokens, or anything else, in the place of trials."""
    for trials in batches:
        if not isinstance(trials, Trials):
            raise HysteresisError(
                f"a {type(trials).__name__} is no Trials: wrap the tokens, with the two answers to "
                "weigh, as Trials.of(tokens, contextual, fixed)"
            )


def check_trials(model: HookedModel, trials: Trials) -> None:
    """Refuse trials that the model cannot run: length, vocabulary, type, device.

    Raises:
        HysteresisError: what does not fit, and why.
    """
    check_are_trials(trials)
    device = next(model.parameters()).device
    if trials.tokens.device != device:
        raise HysteresisError(
            f"the trials are on {trials.tokens.device}, the model on {device}: "
            "move one, for example trials.to(...)"
        )
    if not trials.tokens.numel():
        raise HysteresisError(f"no trials: tokens are {tuple(trials.tokens.shape)}")
    if trials.tokens.shape[1] > model.cfg.n_ctx:
        raise HysteresisError(
            f"trials of {trials.tokens.shape[1]} tokens, but the model's context is "
            f"{model.cfg.n_ctx}"
        )
    d_vocab_out = model.cfg.d_vocab_out
    if d_vocab_out is None or d_vocab_out < 0:
        d_vocab_out = model.cfg.d_vocab
    for what, ids, size in (
        ("token", trials.tokens, model.cfg.d_vocab),
        ("contextual answer", trials.contextual, d_vocab_out),
        ("fixed answer", trials.fixed, d_vocab_out),
    ):
        if int(ids.max()) >= size:
            raise HysteresisError(
                f"{what} {int(ids.max())} lies outside a vocabulary of {size} tokens"
            )


def check_conflict(trials: Trials) -> None:
    """Refuse trials whose two answers are one token."""
    congruent = int((~trials.conflict).sum())
    if congruent:
        raise HysteresisError(
            f"{congruent} of {len(trials)} trials have one token for both answers: "
            "their margin is always 0, and would dilute every effect"
        )


@contextmanager
def measuring(model: HookedModel) -> Iterator[None]:
    """Without gradients, and with the model in evaluation mode, which is restored afterwards."""
    training = [module for module in all_modules(model) if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def has_hooks(model: HookedModel) -> bool:
    """Whether a caller's forward hook is on the model, TransformerLens's or torch's own."""
    return any(
        is_a_callers(hook)
        for module in all_modules(model)
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


def is_a_callers(hook: object) -> bool:
    """Bridges, and the models that they wrap, have hooks of their own, by which they work."""
    made_in = str(getattr(hook, "__module__", ""))
    return not made_in.startswith(("transformers.", "transformer_lens.model_bridge."))


def all_modules(model: HookedModel) -> list[nn.Module]:
    """All modules; a bridge does not count all parts of the model that it wraps among its own."""
    return [*model.modules(), *getattr(model, "original_model", nn.Module()).modules()]


def check_budget(max_bytes: int) -> None:
    """Refuse a budget that is not a positive number of bytes."""
    if not max_bytes > 0:
        raise HysteresisError(f"max_bytes = {max_bytes}: a positive number of bytes")


def trial_slices(
    model: HookedModel, trials: Trials, names: Collection[str], *, max_bytes: int
) -> list[slice]:
    """Slices of the trials whose activations at the named hook points stay within the budget.

    Trials stay together where the caller has hooks on the model, which may know them by number.

    Raises:
        HysteresisError: a budget that is not positive.
    """
    check_budget(max_bytes)
    n_pos, cfg = trials.tokens.shape[1], model.cfg
    width = max(cfg.d_model, cfg.n_heads * cfg.d_head, cfg.d_mlp or 0)
    widths = [max(width, cfg.n_heads * n_pos) if Site(n).of_queries else width for n in names]
    of_a_trial = sum(widths) * n_pos * next(model.parameters()).element_size()
    size = min(len(trials), max(1, int(max_bytes) // max(1, of_a_trial)))
    if size >= len(trials) or has_hooks(model):
        return [slice(0, len(trials))]
    return [slice(start, start + size) for start in range(0, len(trials), size)]


def one_trial(model: HookedModel, trials: Trials) -> Trials:
    """The first trial, to look at shapes; or all, where hooks of the caller's may count them."""
    return trials if has_hooks(model) else trials.select(slice(1))
