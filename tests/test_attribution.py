"""Attribution patching is the derivative of exact patching, and exact where nothing bends."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from zoo import BRIDGES, KINDS, a_model, hooked, left_as_it_was, trials_pair

from tl_hysteresis.attribution import attribution_map
from tl_hysteresis.comparison import agreement
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import read_activations
from tl_hysteresis.patching import BaseRun, patched_margins
from tl_hysteresis.routes import route_map
from tl_hysteresis.sites import MAX_BYTES, Site, hook_name

CLEAN, CORRUPTED = trials_pair()
POINTS = ("resid_pre", "resid_mid", "attn_out", "mlp_out", "z", "q", "k", "v", "pattern")


@pytest.mark.parametrize("name", KINDS)
def test_it_is_the_derivative_of_exact_patching(name: str) -> None:
    """A small step from one run's activation towards the other's, by exact patching."""
    model, step = hooked(name), 1e-6
    model.to(torch.float64)
    points = POINTS if name == "LN" else ("resid_pre", "z", "k")
    run = BaseRun.of(model, CORRUPTED)
    found = attribution_map(model, CLEAN, CORRUPTED, points=points, by="position")
    each = torch.eye(7, dtype=torch.bool)[:, None].expand(-1, len(CLEAN), -1)
    # The rows come site by site, position by position.
    sites = found.table.iloc[:: len(each)][["layer", "point", "head"]].to_numpy().tolist()
    effects = found.effects.view(len(sites), *each.shape[:2])
    for (layer, point, head), expected in zip(sites, effects, strict=True):
        name = hook_name(model, point, layer)
        site = Site(name, None if pd.isna(head) else int(head))
        there, here = (
            site.read(read_activations(model, trials, [name])[name])
            for trials in (CLEAN, CORRUPTED)
        )
        up, down = (
            patched_margins(run, site, here + h * (there - here), each, max_bytes=MAX_BYTES)
            for h in (step, -step)
        )
        derivative = (up - down) / (2.0 * step)
        torch.testing.assert_close(derivative, expected, atol=1e-5, rtol=1e-4)


def test_it_is_exact_where_the_margin_is_linear() -> None:
    """Without norms, the margin is linear in what the last layer writes."""
    model = a_model("no norm")
    points = ["resid_post", "mlp_out"]
    exact = route_map(model, CLEAN, CORRUPTED, points=points, by="position")
    found = attribution_map(model, CLEAN, CORRUPTED, points=points, by="position")
    assert (exact.method, found.method) == ("patching", "attribution")
    last = (exact.table["layer"] == 1).tolist()
    scale = exact.effects.abs().max().item()
    torch.testing.assert_close(
        found.effects[last], exact.effects[last], atol=1e-5 * (1.0 + scale), rtol=0.0
    )
    assert found.effects[last].abs().max() > 1e-2


@pytest.mark.parametrize("name", [*KINDS, *BRIDGES])
def test_it_maps_the_same_sites_on_every_model_and_leaves_no_graph(name: str) -> None:
    model = a_model(name)
    unchanged = left_as_it_was(model)
    points = ["resid_pre", "resid_post", "attn_out", "z"]
    if not (model.cfg.attn_only or model.cfg.parallel_attn_mlp):
        points.append("resid_mid")
    exact = route_map(model, CLEAN, CORRUPTED, points=points, shares=False)
    found = attribution_map(model, CLEAN, CORRUPTED, points=points, shares=False)
    assert unchanged()
    keys = list(exact.axes)
    assert found.table[keys].equals(exact.table[keys])
    assert not found.effects.requires_grad
    assert torch.equal(found.clean, exact.clean)
    assert np.isfinite(found.table["effect"]).all()
    report = agreement(exact, found)
    assert report.comparison.n_sites == len(exact.table)
    error = (found.effects - exact.effects).mean(dim=1).abs()
    assert report.largest_error == pytest.approx(error.max().item(), abs=1e-9)
    assert report.mean_error == pytest.approx(error.mean().item(), abs=1e-9)
    with pytest.raises(HysteresisError, match="different corrupted trials"):
        agreement(exact, attribution_map(model, CLEAN, CLEAN, points=points, shares=False))


def test_maps_of_two_models_do_not_agree_by_accident() -> None:
    model = hooked("LN")
    exact = route_map(model, CLEAN, CORRUPTED, points="z")
    with torch.no_grad():
        model.blocks[0].attn.W_O[0] *= 1.0001
    with pytest.raises(HysteresisError, match="different models"):
        agreement(exact, attribution_map(model, CLEAN, CORRUPTED, points="z"))


def test_parameters_without_gradients_and_inference_mode_are_no_hindrance() -> None:
    model = a_model("LN")
    expected = attribution_map(model, CLEAN, CORRUPTED)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(attribution_map(model, CLEAN, CORRUPTED).effects, expected.effects)
    with torch.inference_mode():
        assert torch.equal(attribution_map(model, CLEAN, CORRUPTED).effects, expected.effects)
    with torch.no_grad():
        assert torch.equal(attribution_map(model, CLEAN, CORRUPTED).effects, expected.effects)


def test_budget_and_direction() -> None:
    model = a_model("LN")
    whole = attribution_map(model, CLEAN, CORRUPTED, direction="noising")
    part = attribution_map(model, CLEAN, CORRUPTED, direction="noising", max_bytes=1)
    torch.testing.assert_close(part.effects, whole.effects, atol=1e-5, rtol=1e-4)
    exchanged = attribution_map(model, CORRUPTED, CLEAN)
    torch.testing.assert_close(whole.effects, exchanged.effects, atol=1e-5, rtol=1e-4)
    assert whole.direction == "noising"


@pytest.mark.parametrize("name", BRIDGES)
def test_gradients_do_not_pass_by_a_half_applied_site(name: str) -> None:
    """To first order, the middle of the last layer's stream is the embedding of a small step."""
    model = a_model(name).double()
    points = ["resid_mid"]
    clean, close = CLEAN, CORRUPTED
    found = attribution_map(model, clean, close, points=points, by="position", shares=False)
    run = BaseRun.of(model, close)
    site = Site("blocks.1.hook_resid_mid")
    there, here = (
        read_activations(model, trials, [site.name])[site.name] for trials in (clean, close)
    )
    each = torch.eye(7, dtype=torch.bool)[:, None].expand(-1, len(clean), -1)
    moved = patched_margins(run, site, here + 1e-6 * (there - here), each, max_bytes=MAX_BYTES)
    derivative = ((moved - run.margins) / 1e-6).double()
    torch.testing.assert_close(found.effects[7:], derivative, atol=1e-5, rtol=1e-4)
    with pytest.raises(HysteresisError, match="is ignored"):
        attribution_map(a_model("native bridge"), clean, close, points=["pattern"])


def test_gradients_that_are_not_finite_are_an_error_and_not_zero() -> None:
    model = a_model("LN")

    def bend(tensor: Tensor, *, hook: Any) -> Any:
        return (tensor - tensor).abs().sqrt() * 0.0 + tensor  # finite, but its slope is not

    model.add_hook("blocks.1.hook_mlp_out", bend)
    with pytest.raises(HysteresisError, match="resid_pre are not finite"):
        attribution_map(model, CLEAN, CORRUPTED, points="resid_pre", shares=False)


def test_trials_made_in_inference_mode() -> None:
    model = a_model("LN")
    expected = attribution_map(model, CLEAN, CORRUPTED)
    with torch.inference_mode():
        clean, corrupted = CLEAN.clone(), CORRUPTED.clone()
    assert torch.equal(attribution_map(model, clean, corrupted).effects, expected.effects)
    with torch.inference_mode():
        model = a_model("LN")
    with pytest.raises(HysteresisError, match="made in inference mode"):
        attribution_map(model, CLEAN, CORRUPTED)
