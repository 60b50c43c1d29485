"""Route maps equal TransformerLens's own patching; comparisons equal scipy's and hand-made ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer, patching

from tl_hysteresis.attribution import attribution_map
from tl_hysteresis.config import ModelConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.models import build_model, hooked_config
from tl_hysteresis.paths import path_map
from tl_hysteresis.readouts import direct_logit_attribution, head_scores
from tl_hysteresis.replacement import (
    mean_reference,
    mean_replacement,
    resampled_reference,
    zero_reference,
)
from tl_hysteresis.routes import replacement_margins, route_map
from tl_hysteresis.sites import component_sites, components, mlp_site
from tl_hysteresis.tasks import AssociativeRecall, Trials, draw_conflict, generator
from tl_hysteresis.transplants import transplant, transplant_activations

TASK = AssociativeRecall(n_keys=6, n_values=8, n_pairs=3)
CLEAN = draw_conflict(TASK, 10, seed=0, stream="test")
MODELS = {
    "default": ModelConfig(d_model=16, d_mlp=8, n_heads=2),
    "one layer": ModelConfig(d_model=16, d_mlp=8, n_heads=2, n_layers=1),
    "four layers": ModelConfig(d_model=16, d_mlp=8, n_heads=2, n_layers=4),
    "rotary": ModelConfig(d_model=16, d_mlp=8, n_heads=2, positional_embedding_type="rotary"),
    "shortformer": ModelConfig(
        d_model=16, d_mlp=8, n_heads=2, positional_embedding_type="shortformer"
    ),
}


def a_model(name: str = "default") -> HookedTransformer:
    config = hooked_config(MODELS[name], d_vocab=TASK.d_vocab, n_ctx=TASK.n_ctx)
    return build_model(config, seed=1)


def corrupt(corruption: str = "value") -> Trials:
    return TASK.corrupt(CLEAN, corruption, rng=generator(0, "corruption", 0))


def position_roles(trials: Trials) -> Trials:
    """The same trials with one role a position, so that TransformerLens's maps are comparable."""
    n_pos = trials.tokens.shape[1]
    roles = torch.arange(n_pos).expand_as(trials.tokens).clone()
    names = tuple(f"position {p}" for p in range(n_pos))
    return Trials(trials.tokens, trials.contextual, trials.fixed, roles, names)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("corruption", TASK.corruptions)
def test_route_maps_are_transformer_lens_s_own(name: str, corruption: str) -> None:
    model, corrupted = a_model(name), corrupt(corruption)
    found = route_map(model, position_roles(CLEAN), corrupted)

    def metric(logits: Tensor) -> Tensor:
        return logit_margin(logits, CLEAN).mean()

    _, clean_cache = model.run_with_cache(CLEAN.tokens)
    baseline = metric(model(corrupted.tokens)).item()
    for point, function in (
        ("resid_pre", patching.get_act_patch_resid_pre),
        (
            "resid_post",
            partial(
                patching.generic_activation_patch,
                patch_setter=patching.layer_pos_patch_setter,
                activation_name="resid_post",
                index_axis_names=("layer", "pos"),
            ),
        ),
        ("resid_mid", patching.get_act_patch_resid_mid),
    ):
        with torch.no_grad():
            theirs = function(model, corrupted.tokens, clean_cache, patching_metric=metric)
        ours = found.table[found.table["point"] == point]["effect"].to_numpy()
        expected = theirs.double().numpy().ravel() - baseline
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_shares_and_baselines() -> None:
    model, corrupted = a_model(), corrupt()
    found = route_map(model, CLEAN, corrupted)
    clean = logit_margin(model(CLEAN.tokens), CLEAN).mean().item()
    bad = logit_margin(model(corrupted.tokens), CLEAN).mean().item()
    assert found.clean.mean().item() == pytest.approx(clean, abs=1e-6)
    assert found.corrupted.mean().item() == pytest.approx(bad, abs=1e-6)
    np.testing.assert_allclose(found.table["share"], found.table["effect"] / (clean - bad), 1e-4)
    by_site = found.table.set_index(["layer", "point", "role"])["share"]
    # The corruption changes the matched value alone, and the answer is read at the query alone.
    assert by_site[0, "resid_pre", "matched_value"] == pytest.approx(1.0, abs=1e-4)
    assert by_site[1, "resid_post", "query"] == pytest.approx(1.0, abs=1e-4)
    for role in ("query", "matched_key", "other_key", "other_value"):
        assert by_site[0, "resid_pre", role] == pytest.approx(0.0, abs=1e-4)


def test_points_and_roles_can_be_chosen() -> None:
    table = route_map(a_model(), CLEAN, corrupt(), points=["resid_mid"], roles=["query"]).table
    assert table[["layer", "point", "role"]].to_numpy().tolist() == [
        [0, "resid_mid", "query"],
        [1, "resid_mid", "query"],
    ]


def test_refusals() -> None:
    model = a_model()
    with pytest.raises(HysteresisError, match="effects have no scale; shares=False"):
        route_map(model, CLEAN, CLEAN)
    with pytest.raises(HysteresisError, match="must match trial by trial"):
        route_map(model, CLEAN, corrupt().select(slice(5)))
    with pytest.raises(HysteresisError, match="no role 'verb'"):
        route_map(model, CLEAN, corrupt(), roles=["verb"])
    with pytest.raises(HysteresisError, match="no hook point 'blocks.0.hook_resid_end'"):
        route_map(model, CLEAN, corrupt(), points=["resid_end"])


def test_replacement_margins_are_those_of_a_whole_run() -> None:
    """The prefix that is not run again must not matter."""
    model = a_model()
    table = replacement_margins(model, CLEAN).set_index("component")["margin"]
    assert list(table.index) == ["intact", *components(model)]
    assert table["intact"] == pytest.approx(
        logit_margin(model(CLEAN.tokens), CLEAN).mean().item(), abs=1e-5
    )
    _, cache = model.run_with_cache(CLEAN.tokens)
    for layer, head in ((0, 1), (1, 0)):
        name = f"blocks.{layer}.attn.hook_z"

        def by_hand(z: Tensor, hook: object, name: str = name, head: int = head) -> Tensor:
            z = z.clone()
            z[:, -1, head] = cache[name][:, -1, head].mean(dim=0)
            return z

        logits = model.run_with_hooks(CLEAN.tokens, fwd_hooks=[(name, by_hand)])
        margin = logit_margin(logits, CLEAN).mean().item()
        assert table[f"L{layer}H{head}"] == pytest.approx(margin, abs=1e-5)


def test_a_matrix_shows_the_tensor_with_names() -> None:
    model, corrupted = a_model(), corrupt()
    found = route_map(model, CLEAN, corrupted, points=["z", "resid_pre"])
    heads = found.matrix("z")
    assert list(heads.index) == ["L0H0", "L0H1", "L1H0", "L1H1"]
    assert list(heads.columns) == list(CLEAN.role_names)
    np.testing.assert_array_equal(heads, found.tensor("z").flatten(0, 1))
    shares = found.matrix("resid_pre", values="share")
    np.testing.assert_allclose(shares * found.scale, found.tensor("resid_pre"), atol=1e-12)
    assert list(shares.index) == ["L0", "L1"]
    everywhere = route_map(model, CLEAN, corrupted, points="z", by="all", shares=False)
    assert list(everywhere.matrix("z").columns) == ["all"]
    with pytest.raises(HysteresisError, match="has no 'share'"):
        everywhere.matrix("z", values="share")
    with pytest.raises(HysteresisError, match="no point 'k'; it has z"):
        everywhere.matrix("k")


def test_per_trial_effects_are_those_of_the_table() -> None:
    found = route_map(a_model(), CLEAN, corrupt(), points=["z"])
    long = found.per_trial()
    assert len(long) == len(found.table) * len(CLEAN)
    means = long.groupby(found.axes, sort=False)["effect"].mean().to_numpy()
    np.testing.assert_allclose(means, found.table["effect"])
    # The third trial alone.
    alone = route_map(
        a_model(), CLEAN.select(slice(2, 3)), corrupt().select(slice(2, 3)), points="z"
    )
    third = long[long["trial"] == 2]["effect"].to_numpy()
    np.testing.assert_allclose(alone.table["effect"], third, atol=1e-6)


def test_the_dominant_head_is_the_largest_in_size() -> None:
    found = route_map(a_model(), CLEAN, corrupt(), points=["z"])
    heads = found.tensor("z").abs().amax(dim=2)
    layer, head = divmod(int(heads.argmax()), heads.shape[1])
    assert found.dominant_head() == f"L{layer}H{head}"
    with_keys = route_map(a_model(), CLEAN, corrupt(), points=["k", "z"])
    assert with_keys.dominant_head() == found.dominant_head()
    with pytest.raises(HysteresisError, match="no heads"):
        route_map(a_model(), CLEAN, corrupt()).dominant_head()


def test_replaced_parts_can_be_chosen() -> None:
    model = a_model()
    parts = {"two heads": component_sites(model, "L0H1", "L1H0"), "nothing": []}
    table = replacement_margins(model, CLEAN, parts=parts).set_index("component")["margin"]
    assert list(table.index) == ["intact", "two heads", "nothing"]
    assert table["nothing"] == pytest.approx(table["intact"], abs=1e-6)
    with pytest.raises(HysteresisError, match="no component 'L7H0'; there are all heads"):
        component_sites(model, "L7H0")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": []}, "points is empty"),
        ({"roles": []}, "roles is empty"),
        ({"points": ["z1"]}, "'z1' is no point of a layer"),
        ({"by": "head"}, "by is 'head'"),
        ({"by": "position", "roles": ["query"]}, "roles are given, but the map goes by 'position'"),
        ({"direction": "both"}, "direction is 'both'"),
        ({"max_bytes": -1}, "max_bytes"),
    ],
)
def test_arguments_that_cannot_be_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(HysteresisError, match=message):
        route_map(a_model(), CLEAN, corrupt(), **arguments)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("hook_z", "'hook_z' is the full name of a hook: .* short name, such as 'z'"),
        ("blocks.0.attn.hook_z", "'blocks.0.attn.hook_z' is the full name .* such as 'z'"),
        ("blocks.1.hook_resid_pre", "is the full name of a hook: .* such as 'resid_pre'"),
        ("embed", "'embed' is no point of a layer: embeddings are what 'resid_pre' of layer 0"),
        ("pos_embed", "'pos_embed' is no point of a layer: embeddings are"),
    ],
)
def test_a_hooks_full_name_is_no_point_and_the_short_one_is_said(point: str, message: str) -> None:
    for make in (route_map, attribution_map):
        with pytest.raises(HysteresisError, match=message):
            make(a_model(), CLEAN, corrupt(), points=point)


MEASUREMENTS: dict[str, Callable[[HookedTransformer, Any], object]] = {
    "route_map": lambda model, tokens: route_map(model, tokens, tokens),
    "route_map, corrupted": lambda model, tokens: route_map(model, CLEAN, tokens),
    "attribution_map": lambda model, tokens: attribution_map(model, tokens, tokens),
    "path_map": lambda model, tokens: path_map(model, tokens, tokens),
    "replacement_margins": lambda model, tokens: replacement_margins(model, tokens),
    "mean_reference": lambda model, tokens: mean_reference(model, tokens, [mlp_site(0)]),
    "zero_reference": lambda model, tokens: zero_reference(model, tokens, [mlp_site(0)]),
    "resampled_reference": lambda model, tokens: resampled_reference(model, tokens, [mlp_site(0)]),
    "resampled_reference, pool": lambda model, tokens: resampled_reference(
        model, CLEAN, [mlp_site(0)], pool=tokens
    ),
    "mean_replacement": lambda model, tokens: mean_replacement(
        [mlp_site(0)], zero_reference(model, CLEAN, [mlp_site(0)]), tokens
    ),
    "transplant": lambda model, tokens: transplant(model, model, tokens),
    "transplant_activations": lambda model, tokens: transplant_activations(
        model, tokens, [mlp_site(0)], role="query"
    ),
    "head_scores": lambda model, tokens: head_scores(model, tokens),
    "direct_logit_attribution": lambda model, tokens: direct_logit_attribution(model, tokens),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tool", MEASUREMENTS)
def test_raw_tokens_are_no_trials(tool: str) -> None:
    for tokens in (CLEAN.tokens, CLEAN.tokens.tolist()):
        with pytest.raises(HysteresisError, match=r"a (Tensor|list) is no Trials: .*Trials.of\("):
            MEASUREMENTS[tool](a_model(), tokens)


def test_names_given_twice_count_once_and_layouts_do_not_matter() -> None:
    model, corrupted = a_model(), corrupt()
    roles = ["query", "matched_key"]
    once = route_map(model, CLEAN, corrupted, points=["z"], roles=roles)
    twice = route_map(model, CLEAN, corrupted, points=["z", "z"], roles=roles * 2)
    assert twice.table.equals(once.table)
    transposed = CLEAN.with_tokens(CLEAN.tokens.T.contiguous().T)
    found = route_map(model, transposed, corrupted, points="z", roles=roles)
    assert found.table.equals(once.table)
