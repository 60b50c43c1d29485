"""Whether a model honours what is written at its hook points.

A hook point can be there, fire, and still not let a hook change the run: some models compute on
with what they had before. `check_sites` finds such points by writing to them and reading what
follows, and `intervene` refuses to write there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens import HookedTransformer
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.components_utils import get_act_name

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.sites import STREAM, HookedModel, all_modules, is_a_callers, measuring

CHECKED = (*STREAM, "attn_out", "mlp_out", "z", "result", "q", "k", "v", "pattern", "attn_scores")
"""Points that `check_sites` knows how to check, by TransformerLens's short names."""


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
            for key in [key for key, hook in hooks.items() if is_a_callers(hook)]:
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
