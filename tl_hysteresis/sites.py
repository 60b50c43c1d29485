"""Where activations are read and written: hook points, heads, and whether a write is honoured.

A hook point can be there, fire, and still not let a hook change the run: some models compute on
with what they had before. `check_sites` finds such points by writing to them and reading what
follows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformer_lens import HookedTransformer
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.utilities.components_utils import get_act_name

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.tasks import Trials

HookedModel = HookedTransformer | TransformerBridge
"""Any model with TransformerLens's hook points."""

STREAM = ("resid_pre", "resid_mid", "resid_post")
"""Points of the residual stream: before a layer, between its attention and its MLP, after it."""

MAX_BYTES = 1 << 26
"""Default budget of activations held at a time, in bytes (64 MiB)."""

CHECKED = (*STREAM, "attn_out", "mlp_out", "z", "result", "q", "k", "v", "pattern", "attn_scores")
"""Points that `check_sites` knows how to check, by TransformerLens's short names."""


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


def component_sites(model: HookedModel, *names: str) -> list[Site]:
    """The sites of components by name, such as "L1H3", "L0 heads", "all heads" or "L0 MLP".

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
    for name in names:
        if name not in known:
            raise HysteresisError(f"no component {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(site for name in names for site in known[name]))


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
    name = str(get_act_name(point, layer)) if isinstance(point, str) else repr(point)
    # TransformerLens lets a number in a short name, as in "z1", decide the layer.
    if not name.startswith(f"blocks.{layer}."):
        raise HysteresisError(f"{point!r} is no point of a layer: say 'resid_pre', 'z', 'mlp_out'")
    check_hook_point(model, name)
    return name


def check_hook_point(model: HookedModel, name: str) -> None:
    """Refuse a hook point that the model does not have."""
    if name not in model.hook_dict:
        raise HysteresisError(f"the model has no hook point {name!r}")


def check_trials(model: HookedModel, trials: Trials) -> None:
    """Refuse trials that the model cannot run: length, vocabulary, type, device.

    Raises:
        HysteresisError: what does not fit, and why.
    """
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
        _is_a_callers(hook)
        for module in all_modules(model)
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


def _is_a_callers(hook: object) -> bool:
    """Bridges, and the models that they wrap, have hooks of their own, by which they work."""
    made_in = str(getattr(hook, "__module__", ""))
    return not made_in.startswith(("transformers.", "transformer_lens.model_bridge."))


def all_modules(model: HookedModel) -> list[nn.Module]:
    """All modules; a bridge does not count all parts of the model that it wraps among its own."""
    return [*model.modules(), *getattr(model, "original_model", nn.Module()).modules()]


def check_sites(model: HookedModel, *, n_trials: int = 4, seed: int = 0) -> pd.DataFrame:
    """Whether writes are honoured: points of each layer are written to, and what follows read.

    The activations of one run of random tokens are written, at every position, into a run of other
    tokens. A write to the residual stream must then give the first run's logits; a head's `z` the
    first run's attention output; and so on for each point of `CHECKED`. Hooks that are on the model
    are set aside.

    Args:
        model: any hooked model.
        n_trials: random prompts to check with.
        seed: of the prompts.

    Returns:
        One row a point of a layer that the model has: `name`, `layer`, `point`, `verdict`, `error`.
        The verdict is `honoured`; `half applied` (something follows it, something does not: any
        measurement there is wrong); `ignored` (nothing follows it); `absent` (the hook does not
        fire, as for `hook_result` without `use_attn_result`); or `undetermined` (what follows is
        the same in both runs, or not finite, as where weights are zero). `error` is the largest
        deviation from what must follow, relative to the largest difference between the two runs.

    Raises:
        HysteresisError: fewer than one trial.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import build_model, hooked_config
        >>> model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
        >>> check_sites(model).query("verdict != 'honoured'")["point"].tolist()
        ['result', 'result']
    """
    if n_trials < 1:
        raise HysteresisError(f"n_trials = {n_trials}: at least one is needed to check with")
    _VERDICTS.pop(model, None)
    rows = []
    for layer in range(model.cfg.n_layers):
        for name, verdict in _layer_verdicts(model, layer, n_trials=n_trials, seed=seed).items():
            rows.append((name, layer, verdict.point, verdict.word, verdict.error))
    return pd.DataFrame(rows, columns=["name", "layer", "point", "verdict", "error"])


def refusals(model: HookedModel, names: Collection[str]) -> dict[str, str]:
    """Why writes at these hook points would not be what they seem; empty where they are.

    A `HookedTransformer` is taken to honour all its hook points. Of any other model the points that
    `check_sites` knows are checked, a layer at a time, the first time that a hook is put there.
    """
    if isinstance(model, HookedTransformer):
        return {}
    found = {}
    for name in names:
        parts = name.split(".")
        if parts[0] != "blocks":
            continue
        for known, verdict in _layer_verdicts(model, int(parts[1])).items():
            same = model.hook_dict[known] is model.hook_dict[name]
            if same and verdict.word in ("ignored", "half applied"):
                found[name] = (
                    f"a write at {name} is {verdict.word} by this model (see check_sites): "
                    "what follows would not be the intervention"
                )
    return found


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


@dataclass(frozen=True)
class _Verdict:
    point: str
    word: str
    error: float


_VERDICTS: WeakKeyDictionary[HookedModel, dict[int, dict[str, _Verdict]]] = WeakKeyDictionary()


def _layer_verdicts(
    model: HookedModel, layer: int, *, n_trials: int = 4, seed: int = 0
) -> Mapping[str, _Verdict]:
    known = _VERDICTS.setdefault(model, {})
    if layer in known:
        return known[layer]
    device = next(model.parameters()).device.type
    with measuring(model), _without_callers_hooks(model), torch.autocast(device, enabled=False):
        found = _LayerCheck(model, layer, n_trials, seed).verdicts()
    # What could not be told now may be told later, when weights are other ones.
    if all(verdict.word != "undetermined" for verdict in found.values()):
        known[layer] = found
    return found


class _LayerCheck:
    """Writes the activations of one run of a layer into another and reads what follows."""

    def __init__(self, model: HookedModel, layer: int, n_trials: int, seed: int) -> None:
        self.model = model
        self.names = {
            point: name
            for point in CHECKED
            if not (point == "mlp_out" and model.cfg.attn_only)
            and (name := get_act_name(point, layer)) in model.hook_dict
        }
        self.open = [point for point, name in self.names.items() if _takes_hooks(model, name)]
        generator = torch.Generator().manual_seed(seed)
        shape = (2, n_trials, min(model.cfg.n_ctx, 8))
        tokens = torch.randint(model.cfg.d_vocab, shape, generator=generator)
        first, self.tokens = tokens.to(next(model.parameters()).device)
        self.source = self._run(first)
        self.base = self._run(self.tokens)

    def verdicts(self) -> dict[str, _Verdict]:
        """A verdict for each point that the model has in this layer."""
        after_attention = "resid_mid" if "resid_mid" in self.source else "resid_post"
        follows: dict[str, Callable[[str], _Verdict]] = {
            **{point: lambda p: self._gives(p, [p], "logits") for point in STREAM},
            "z": lambda p: self._gives(p, [p], "attn_out"),
            "result": lambda p: self._gives(p, [p], "attn_out"),
            "pattern": lambda p: self._gives(p, [p, "v"], "z"),
            "attn_scores": lambda p: self._gives(p, [p, "v"], "z"),
            **{point: lambda p: self._gives(p, ["q", "k", "v"], "z") for point in "qkv"},
            "attn_out": lambda p: self._adds(p, [after_attention, "resid_post"]),
            "mlp_out": lambda p: self._adds(p, ["resid_post"]),
        }
        return {
            name: follows[point](point)
            if point in self.source
            else _Verdict(point, "absent", math.nan)
            for point, name in self.names.items()
        }

    def _gives(self, point: str, written: list[str], read: str) -> _Verdict:
        """With these points as in the source run, what is read must be as in the source run."""
        found = self._run(self.tokens, {p: self.source[p] for p in written})[read]
        return self._verdict(point, read, found - self.source[read])

    def _adds(self, point: str, read: list[str]) -> _Verdict:
        """The stream must change by as much as what is written; the MLP is held where it was."""
        writes = {point: self.source[point]}
        if point != "mlp_out" and "mlp_out" in self.base:
            writes["mlp_out"] = self.base["mlp_out"]
        run, change = self._run(self.tokens, writes), self.source[point] - self.base[point]
        verdicts = [self._verdict(point, p, run[p] - self.base[p] - change) for p in read]
        return max(verdicts, key=lambda verdict: verdict.error)

    def _verdict(self, point: str, read: str, deviation: Tensor) -> _Verdict:
        size, eps = self.source[read].abs(), torch.finfo(deviation.dtype).eps
        visible = size.isfinite()  # of scores, those of masked keys are not
        size, deviation = size[visible], deviation.abs()[visible]
        change = (self.source[read] - self.base[read]).abs()[visible].max().item()
        if not (change > 0.0 and bool(deviation.isfinite().all())):
            return _Verdict(point, "undetermined", math.nan)
        error = deviation.max().item() / change
        # An ignored write leaves every bit as it was, however large: it is made large.
        large = self._run(self.tokens, {point: 8.0 * self.source[point]})[read]
        if torch.equal(large, self.base[read]):
            return _Verdict(point, "ignored", error)
        # Rounding goes by the size of what is added up, which can dwarf the change.
        honoured = error <= eps**0.5 + 32.0 * eps * size.max().item() / change
        return _Verdict(point, "honoured" if honoured else "half applied", error)

    def _run(
        self, tokens: Int[Tensor, "trial pos"], writes: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def hook(point: str, value: Tensor | None) -> Callable[[Tensor, HookPoint], Tensor | None]:
            def run(activation: Tensor, hook: HookPoint) -> Tensor | None:
                seen[point] = activation.clone() if value is None else value
                return value

            return run

        values = writes or {}
        hooks = [(self.names[point], hook(point, values.get(point))) for point in self.open]
        with self.model.hooks(fwd_hooks=list(hooks)):
            seen["logits"] = self.model(tokens)
        return seen


@contextmanager
def _without_callers_hooks(model: HookedModel) -> Iterator[None]:
    """Set the hooks that are on the model aside: it is the model that is checked, not they."""
    modules = {id(module): module for module in all_modules(model)}.values()
    found = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
    before = [dict(hooks) for hooks in found]
    try:
        for hooks in found:
            for key in [key for key, hook in hooks.items() if _is_a_callers(hook)]:
                del hooks[key]
        yield
    finally:
        # What the model itself may have added in its first run stays, behind what there was.
        for hooks, those in zip(found, before, strict=True):
            added = {key: hook for key, hook in hooks.items() if key not in those}
            hooks.clear()
            hooks.update({**those, **added})


def _takes_hooks(model: HookedModel, name: str) -> bool:
    """Whether a hook can be put there; a model can refuse until one of its `use_*` flags is set."""
    try:
        with model.hooks(fwd_hooks=[(name, lambda activation, hook: None)]):
            return True
    except (AssertionError, ValueError):
        return False
