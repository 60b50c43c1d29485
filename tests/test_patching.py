"""Packed patching equals whole forward passes, and TransformerLens's own, on many models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformer_lens import patching
from zoo import BRIDGES, KINDS, a_model, left_as_it_was, trials_pair

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import intervene, read_activations
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.patching import BaseRun, margins_under, one_by_one, patched_margins
from tl_hysteresis.routes import By, route_map
from tl_hysteresis.sites import MAX_BYTES, HookedModel, Site, hook_name
from tl_hysteresis.tasks import Trials

CLEAN, CORRUPTED = trials_pair()
EACH = torch.eye(CLEAN.tokens.shape[1], dtype=torch.bool)[:, None].expand(-1, len(CLEAN), -1)
POINTS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z", "q", "k", "v")
NOT_HONOURED = {
    *(("native bridge", point) for point in ("resid_mid", "pattern")),
    ("GPT-2 bridge", "resid_mid"),
}
PATTERNS = ("pattern", "attn_scores")
BITS = {"bfloat16": 0.0, "float64": 1e-12}

POST = partial(
    patching.generic_activation_patch,
    patch_setter=patching.layer_pos_patch_setter,
    activation_name="resid_post",
    index_axis_names=("layer", "pos"),
)
# TransformerLens's maps: point, what is patched at once, function, order of its axes in ours.
THEIRS: list[tuple[str, By, Callable[..., Tensor], str]] = [
    ("resid_pre", "position", patching.get_act_patch_resid_pre, "lp->lp"),
    ("resid_mid", "position", patching.get_act_patch_resid_mid, "lp->lp"),
    ("resid_post", "position", POST, "lp->lp"),
    ("attn_out", "position", patching.get_act_patch_attn_out, "lp->lp"),
    ("mlp_out", "position", patching.get_act_patch_mlp_out, "lp->lp"),
    ("z", "position", patching.get_act_patch_attn_head_out_by_pos, "lph->lhp"),
    ("q", "position", patching.get_act_patch_attn_head_q_by_pos, "lph->lhp"),
    ("k", "position", patching.get_act_patch_attn_head_k_by_pos, "lph->lhp"),
    ("v", "position", patching.get_act_patch_attn_head_v_by_pos, "lph->lhp"),
    ("pattern", "position", patching.get_act_patch_attn_head_pattern_by_pos, "lhp->lhp"),
    ("q", "all", patching.get_act_patch_attn_head_q_all_pos, "lh->lh"),
    ("k", "all", patching.get_act_patch_attn_head_k_all_pos, "lh->lh"),
    ("v", "all", patching.get_act_patch_attn_head_v_all_pos, "lh->lh"),
    ("z", "all", patching.get_act_patch_attn_head_out_all_pos, "lh->lh"),
    ("pattern", "all", patching.get_act_patch_attn_head_pattern_all_pos, "lh->lh"),
]


def has(model: HookedModel, point: str) -> bool:
    try:
        read_activations(model, CLEAN, [hook_name(model, point, 0)])
    except HysteresisError:
        return False
    return True


@pytest.mark.parametrize("name", [*KINDS, *BRIDGES])
def test_maps_are_transformer_lens_s_own(name: str) -> None:
    model = a_model(name)
    unchanged = left_as_it_was(model)
    mode = model.training

    def metric(logits: Tensor) -> Tensor:
        return logit_margin(logits, CLEAN).double().mean()

    compared = 0
    for point, by, function, order in THEIRS:
        # What a bridge does not honour it does not honour for TransformerLens either.
        if not has(model, point) or (name, point) in NOT_HONOURED:
            continue
        if name == "ungrouped" and point in ("k", "v"):
            continue  # TransformerLens patches the first few heads, as if they were groups
        model.eval()
        with torch.no_grad():
            _, cache = model.run_with_cache(CLEAN.tokens)
            base = metric(model(CORRUPTED.tokens))
            theirs = function(model, CORRUPTED.tokens, cache, patching_metric=metric)
        model.train(mode)
        found = route_map(model, CLEAN, CORRUPTED, points=[point], by=by, shares=False)
        expected = torch.einsum(order, theirs).double() - base
        # They keep a map in float32, whatever the model's type.
        torch.testing.assert_close(found.tensor(point), expected, atol=1e-5, rtol=0.0)
        compared += int(expected.abs().max() > 1e-3)
    assert compared >= 6, "maps of nothing but zeros agree on nothing"
    assert unchanged()


@pytest.mark.parametrize("name", KINDS)
def test_the_fast_way_is_the_plain_way(name: str) -> None:
    model = a_model(name)
    run = BaseRun.of(model, CORRUPTED)
    names = [
        point_name
        for layer in range(model.cfg.n_layers)
        for point_name in (
            *(hook_name(model, p, layer) for p in (*POINTS, *PATTERNS) if has(model, p)),
            f"blocks.{layer}.mlp.hook_post",
            f"blocks.{layer}.ln2.hook_normalized",
        )
        if point_name in model.hook_dict
    ]
    cache = read_activations(model, CLEAN, names)
    for full in names:
        site = Site(full, 1 if full.endswith(("hook_z", "hook_q", "hook_k", "hook_v")) else None)
        value = site.read(cache[full])
        if value.shape[:2] != CLEAN.tokens.shape:
            continue
        plain = torch.cat(
            [one_by_one(run, site, value, one[None], max_bytes=MAX_BYTES) for one in EACH]
        )
        fast = patched_margins(run, site, value, EACH, max_bytes=MAX_BYTES)
        tolerance = BITS.get(name, 1e-5 * (1.0 + plain.abs().max().item()))
        torch.testing.assert_close(fast, plain, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("name", BRIDGES)
def test_the_middle_of_the_stream_is_patched_rightly_where_its_hook_is_half_applied(
    name: str,
) -> None:
    """At every position the clean stream gives the clean margins, in each layer."""
    found = route_map(a_model(name), CLEAN, CORRUPTED, points=["resid_mid"], by="all")
    np.testing.assert_allclose(found.table["share"], 1.0, atol=1e-5)
    # And by position it equals a HookedTransformer's map in the last layer, where only the last
    # position is read: all or nothing.
    each = route_map(a_model(name), CLEAN, CORRUPTED, points=["resid_mid"], by="position")
    np.testing.assert_allclose(each.tensor("resid_mid")[1, :-1], 0.0, atol=1e-6)


@pytest.mark.parametrize("name", [*KINDS, *BRIDGES])
def test_the_whole_stream_carries_everything(name: str) -> None:
    model = a_model(name)
    for direction in ("denoising", "noising"):
        for point in ("resid_pre", "resid_post"):
            found = route_map(
                model, CLEAN, CORRUPTED, points=[point], by="all", direction=direction
            )
            tolerance = 0.05 if name == "bfloat16" else 1e-4
            np.testing.assert_allclose(found.table["share"], 1.0, atol=tolerance)


def test_noising_is_denoising_with_the_runs_exchanged() -> None:
    model = a_model("LN")
    noising = route_map(model, CLEAN, CORRUPTED, points=POINTS, direction="noising")
    exchanged = route_map(model, CORRUPTED, CLEAN, points=POINTS)
    assert torch.equal(noising.effects, exchanged.effects)
    assert torch.equal(noising.clean, exchanged.corrupted)
    np.testing.assert_allclose(noising.table["share"], exchanged.table["share"])


@pytest.mark.parametrize("name", ["LN", "native bridge", "bfloat16"])
def test_the_byte_budget_changes_nothing(name: str) -> None:
    model = a_model(name)
    by: By = "position" if name == "LN" else "all"
    found = [
        route_map(model, CLEAN, CORRUPTED, points=["resid_pre", "z", "k"], by=by, max_bytes=budget)
        for budget in (MAX_BYTES, 5_000, 1)
    ]
    for other in found[1:]:
        tolerance = 0.05 if name == "bfloat16" else 1e-5
        torch.testing.assert_close(other.effects, found[0].effects, atol=tolerance, rtol=0.0)
        torch.testing.assert_close(other.clean, found[0].clean, atol=tolerance, rtol=0.0)


def test_a_callers_hooks_count_even_if_they_know_the_trials_by_number() -> None:
    """An ablation that is on while a map is taken belongs to the model."""
    model = a_model("LN")
    offsets = torch.randn(len(CLEAN), 1, 1)

    def ablate(activation: Tensor, hook: Any) -> Tensor:
        return activation * offsets  # of the wrong shape for any other batch than these trials

    plain = route_map(model, CLEAN, CORRUPTED, points=["resid_pre", "z"], by="position")
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", ablate)]):
        unchanged = left_as_it_was(model)
        found = route_map(model, CLEAN, CORRUPTED, points=["resid_pre", "z"], by="position")
        assert unchanged()
        _, cache = model.run_with_cache(CLEAN.tokens)
        base = logit_margin(model(CORRUPTED.tokens), CLEAN)

        def by_hand(activation: Tensor, hook: Any) -> Tensor:
            activation = activation.clone()
            activation[:, 4, 2] = cache["blocks.0.attn.hook_z"][:, 4, 2]
            return activation

        patched = model.run_with_hooks(
            CORRUPTED.tokens, fwd_hooks=[("blocks.0.attn.hook_z", by_hand)]
        )
    effect = (logit_margin(patched, CLEAN) - base).mean().item()
    assert found.tensor("z")[0, 2, 4].item() == pytest.approx(effect, abs=1e-5)
    assert not torch.allclose(found.effects, plain.effects, atol=1e-3)


@pytest.mark.parametrize("name", ["LN", "shortformer", *BRIDGES])
def test_hooks_modes_and_flags_are_restored_after_an_error(name: str) -> None:
    model = a_model(name)
    model.train()

    def fail(activation: Tensor, hook: Any) -> Tensor:
        raise RuntimeError("broken hook")

    unchanged = left_as_it_was(model)
    with pytest.raises(RuntimeError, match="broken hook"):
        with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", fail)]):
            route_map(model, CLEAN, CORRUPTED, points=["resid_pre"])
    assert unchanged()


def test_margins_under_hooks_are_those_of_a_whole_run() -> None:
    for name in ("LN", "shortformer", "native bridge"):
        model = a_model(name)
        model.eval()
        run = BaseRun.of(model, CLEAN)
        hooks = [
            ("blocks.1.hook_mlp_out", lambda act, hook: act * 0.0),
            ("blocks.0.attn.hook_z", lambda act, hook: act * 2.0),
        ]
        for some in (hooks, hooks[:1], [*hooks, ("hook_embed", lambda act, hook: act + 1.0)]):
            with intervene(model, some):
                expected = logit_margin(model(CLEAN.tokens), CLEAN)
            torch.testing.assert_close(margins_under(run, some), expected, atol=1e-5, rtol=0.0)


def test_a_mask_of_left_padding_counts() -> None:
    """It is made from the tokens, so no run can be taken up midway."""

    class Tokenizer:
        padding_side, pad_token_id, bos_token_id, eos_token_id = "left", 0, None, 1

    model = a_model("LN")
    padded = CLEAN.tokens.clone()
    padded[:, :2] = Tokenizer.pad_token_id
    clean, corrupted = CLEAN.with_tokens(padded), CORRUPTED.with_tokens(padded.roll(1, dims=0))
    plain = route_map(model, clean, corrupted, points=["z"], by="position")
    object.__setattr__(model, "tokenizer", Tokenizer())
    assert BaseRun.of(model, clean).streams is None
    found = route_map(model, clean, corrupted, points=["z"], by="position")
    with torch.no_grad():
        _, cache = model.run_with_cache(clean.tokens)
        theirs = patching.get_act_patch_attn_head_out_by_pos(
            model, corrupted.tokens, cache, lambda logits: logit_margin(logits, clean).mean()
        )
        base = logit_margin(model(corrupted.tokens), clean).mean()
    expected = (theirs - base).transpose(1, 2).double()
    torch.testing.assert_close(found.tensor("z"), expected, atol=1e-5, rtol=0.0)
    assert not torch.allclose(found.tensor("z"), plain.tensor("z"), atol=1e-3)


def test_torchs_own_hooks_count_too() -> None:
    """They may look at positions, or at the batch, and say nothing to TransformerLens."""
    model = a_model("LN")

    def silence(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, 2] = 0.0
        return output

    handle = model.blocks[1].attn.register_forward_hook(silence)
    found = route_map(model, CLEAN, CORRUPTED, points=["resid_pre"], by="position")
    with torch.no_grad():
        _, cache = model.run_with_cache(CLEAN.tokens)
        base = logit_margin(model(CORRUPTED.tokens), CLEAN).mean()
        theirs = patching.get_act_patch_resid_pre(
            model, CORRUPTED.tokens, cache, lambda logits: logit_margin(logits, CLEAN).mean()
        )
    handle.remove()
    expected = (theirs - base).double()
    torch.testing.assert_close(found.tensor("resid_pre"), expected, atol=1e-5, rtol=0.0)


def test_trials_with_one_token_for_both_answers_are_refused() -> None:
    fixed = CLEAN.fixed.clone()
    fixed[:2] = CLEAN.contextual[:2]
    congruent = Trials(CLEAN.tokens, CLEAN.contextual, fixed)
    with pytest.raises(HysteresisError, match="2 of 6 trials have one token for both answers"):
        route_map(a_model("LN"), congruent, CORRUPTED)


def test_what_does_not_fit_is_named() -> None:
    model = a_model("LN")
    run = BaseRun.of(model, CLEAN)
    for site in (Site("blocks.0.hook_resid_pre"), Site("blocks.0.attn.hook_k")):
        with pytest.raises(HysteresisError, match="cannot stand"):
            patched_margins(run, site, torch.zeros(6, 7, 3), EACH, max_bytes=MAX_BYTES)
    wrong_type = torch.zeros(6, 7, 16, dtype=torch.float64)
    with pytest.raises(HysteresisError, match="float64 .*cannot stand"):
        patched_margins(run, Site("blocks.0.hook_resid_pre"), wrong_type, EACH, max_bytes=MAX_BYTES)
    with pytest.raises(HysteresisError, match="no hook point 'blocks.0.hook_zz'"):
        patched_margins(
            run, Site("blocks.0.hook_zz"), torch.zeros(6, 7, 16), EACH, max_bytes=MAX_BYTES
        )


def test_no_result_holds_a_graph() -> None:
    model = a_model("LN")
    found = route_map(model, CLEAN, CORRUPTED, points=["resid_pre", "k", "z"])
    assert not any(tensor.requires_grad for tensor in (found.effects, found.clean, found.corrupted))


def some_prompts() -> Trials:
    return Trials(CLEAN.tokens, CLEAN.contextual, CLEAN.fixed)


def test_plain_trials_are_enough() -> None:
    found = route_map(
        a_model("LN"), some_prompts(), Trials(CORRUPTED.tokens, CLEAN.fixed, CLEAN.fixed)
    )
    assert list(found.table.columns) == ["layer", "point", "position", "effect", "share"]
    assert len(found.table) == 2 * 3 * 7
