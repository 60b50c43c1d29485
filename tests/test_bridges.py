"""A bridge is measured as the `HookedTransformer` with its weights, by every tool."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer
from transformer_lens.model_bridge import TransformerBridge
from zoo import BRIDGES, a_model, bridge, left_as_it_was, trials_pair, twin

from tl_hysteresis.attribution import attribution_map
from tl_hysteresis.checks import check_sites
from tl_hysteresis.interventions import intervene
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.paths import path_map
from tl_hysteresis.readouts import direct_logit_attribution, head_scores
from tl_hysteresis.replacement import mean_reference, mean_replacement, resampled_reference
from tl_hysteresis.routes import replacement_margins, route_map
from tl_hysteresis.sites import HookedModel, component_sites
from tl_hysteresis.transplants import transplant

CLEAN, CORRUPTED = trials_pair()
POINTS = ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z", "q", "k", "v"]
BY_ROLE = component_sites(a_model("LN"), "L0H1", "L1 MLP")


@cache
def pair(name: str) -> tuple[TransformerBridge, HookedTransformer]:
    """A bridge and its twin."""
    model = bridge(name)
    return model, twin(model)


def points(name: str) -> list[str]:
    """The points whose writes, or gradients, the bridge honours."""
    return POINTS if name == "native bridge" else [*POINTS, "pattern"]


@pytest.mark.parametrize("name", BRIDGES)
def test_the_twin_is_one(name: str) -> None:
    model, its_twin = pair(name)
    model.eval()
    torch.testing.assert_close(model(CLEAN.tokens), its_twin(CLEAN.tokens), atol=2e-5, rtol=0.0)


TOOLS: dict[str, Callable[[HookedModel, str], np.ndarray]] = {
    "denoising": lambda model, name: effects(
        route_map(model, CLEAN, CORRUPTED, points=points(name), by="position")
    ),
    "noising": lambda model, name: effects(
        route_map(model, CLEAN, CORRUPTED, points=points(name), direction="noising")
    ),
    "attribution": lambda model, name: effects(
        attribution_map(model, CLEAN, CORRUPTED, points=points(name), by="position")
    ),
    "paths": lambda model, name: effects(path_map(model, CLEAN, CORRUPTED)),
    "noised paths": lambda model, name: effects(
        path_map(model, CLEAN, CORRUPTED, by="role", direction="noising")
    ),
    "replacement": lambda model, name: replacement_margins(model, CLEAN)["margin"].to_numpy(),
    "direct attribution": lambda model, name: (
        direct_logit_attribution(model, CLEAN).margin.numpy().ravel()
    ),
    "head scores": lambda model, name: head_scores(model, CLEAN).to_numpy(float).ravel(),
    "resampling": lambda model, name: under_resampling(model),
}


def effects(found: Any) -> np.ndarray:
    values: np.ndarray = found.effects.numpy().ravel()
    return values


def under_resampling(model: HookedModel) -> np.ndarray:
    reference = resampled_reference(model, CLEAN, BY_ROLE, seed=3)
    model.eval()
    with torch.no_grad(), intervene(model, mean_replacement(BY_ROLE, reference, CLEAN)):
        margins: np.ndarray = logit_margin(model(CLEAN.tokens), CLEAN).numpy()
    return margins


@pytest.mark.parametrize("name", BRIDGES)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_bridge_is_measured_as_its_twin(name: str, tool: str) -> None:
    model, its_twin = pair(name)
    found, expected = TOOLS[tool](model, name), TOOLS[tool](its_twin, name)
    np.testing.assert_allclose(found, expected, atol=5e-5)
    assert np.abs(expected).max() > 1e-2


@pytest.mark.parametrize("name", BRIDGES)
def test_a_callers_hooks_do_not_decide_what_a_bridge_honours(name: str) -> None:
    """An ablation that is on during the first check must not spoil it, nor be spoilt by it."""
    model = bridge(name)

    def ablate(activation: Tensor, hook: Any) -> Tensor:
        return activation * torch.zeros(len(CLEAN), 1, 1)  # for these trials and no others

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", ablate)]):
        unchanged = left_as_it_was(model)
        route_map(model, CLEAN, CORRUPTED, points=["mlp_out"], by="all", shares=False)
        assert unchanged()
        verdicts = check_sites(model)
    assert verdicts.equals(check_sites(bridge(name)))


MEASUREMENTS: dict[str, Callable[[HookedModel], object]] = {
    "route_map": lambda model: route_map(model, CLEAN, CORRUPTED),
    "attribution_map": lambda model: attribution_map(model, CLEAN, CORRUPTED),
    "path_map": lambda model: path_map(model, CLEAN, CORRUPTED),
    "mean_reference": lambda model: mean_reference(model, CLEAN, BY_ROLE),
    "resampled_reference": lambda model: resampled_reference(model, CLEAN, BY_ROLE),
    "replacement_margins": lambda model: replacement_margins(model, CLEAN),
    "transplant": lambda model: transplant(model, model, CLEAN, shares=False),
    "direct_logit_attribution": lambda model: direct_logit_attribution(model, CLEAN),
    "head_scores": lambda model: head_scores(model, CLEAN),
    "check_sites": lambda model: check_sites(model),
}


@pytest.mark.parametrize("name", ["LN", "shortformer", *BRIDGES])
@pytest.mark.parametrize("tool", MEASUREMENTS)
def test_a_model_is_left_as_it_was_even_if_a_hook_of_the_callers_raises(
    name: str, tool: str
) -> None:
    model = a_model(name)
    model.train()
    unchanged = left_as_it_was(model)
    MEASUREMENTS[tool](model)
    assert unchanged()
    if tool == "check_sites":
        return  # the caller's hooks are set aside for it
    calls = 0

    def fail(tensor: Tensor, *, hook: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1 or tool in ("mean_reference", "resampled_reference", "head_scores"):
            raise RuntimeError("broken hook")

    model.add_hook("blocks.1.hook_attn_out", fail)
    unchanged = left_as_it_was(model)
    with pytest.raises(RuntimeError, match="broken hook"):
        MEASUREMENTS[tool](model)
    assert unchanged()
    assert any(point.fwd_hooks for point in model.hook_dict.values()), "the caller's hook stays"
