"""Sites read what they say; a write that a model does not honour is found, and refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from zoo import BRIDGES, D_VOCAB, KINDS, N_POS, a_model, left_as_it_was, trials_pair

from tl_hysteresis.checks import check_sites
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import intervene, overwrite, read_activations
from tl_hysteresis.routes import route_map
from tl_hysteresis.sites import (
    Component,
    Site,
    check_trials,
    component_sites,
    components,
    hook_name,
    trial_slices,
)
from tl_hysteresis.tasks import Trials
from tl_hysteresis.transplants import weight_components

CLEAN, CORRUPTED = trials_pair()
EVERYWHERE = torch.ones_like(CLEAN.tokens, dtype=torch.bool)


@pytest.mark.parametrize("name", KINDS)
def test_a_hooked_transformer_honours_every_site(name: str) -> None:
    model = a_model(name)
    unchanged = left_as_it_was(model)
    table = check_sites(model)
    for row in table.itertuples():  # without `use_attn_result` that hook does not fire
        assert row.verdict == ("absent" if row.point == "result" else "honoured"), row
    assert set(table["layer"]) == set(range(model.cfg.n_layers))
    assert unchanged()


def test_results_are_checked_where_the_model_computes_them() -> None:
    model = a_model("LN")
    model.set_use_attn_result(True)
    table = check_sites(model)
    assert (table["verdict"] == "honoured").all()
    assert (table["point"] == "result").sum() == model.cfg.n_layers


@pytest.mark.parametrize("name", BRIDGES)
def test_a_bridges_half_applied_and_ignored_sites_are_found(name: str) -> None:
    model = a_model(name)
    unchanged = left_as_it_was(model)
    verdicts = check_sites(model).groupby("point")["verdict"].unique()
    assert list(verdicts["resid_mid"]) == ["half applied"]
    for point in ("resid_pre", "resid_post", "attn_out", "mlp_out", "z", "q", "k", "v"):
        assert list(verdicts[point]) == ["honoured"], point
    assert unchanged()
    # The verdicts agree with what a write does, by the plain definition.
    model.eval()
    clean, corrupted = model(CLEAN.tokens), model(CORRUPTED.tokens)
    for point, expected in (("resid_pre", True), ("resid_mid", False), ("resid_post", True)):
        name_of_point = f"blocks.1.hook_{point}"
        value = read_activations(model, CLEAN, [name_of_point])[name_of_point]
        patched = model.run_with_hooks(
            CORRUPTED.tokens, fwd_hooks=[(name_of_point, lambda act, hook, value=value: value)]
        )
        assert torch.allclose(patched, clean, atol=1e-5) == expected
    for ignored, verdict in verdicts.items():
        if list(verdict) == ["ignored"]:
            zeroed = model.run_with_hooks(
                CORRUPTED.tokens,
                fwd_hooks=[(hook_name(model, str(ignored), 1), lambda act, hook: act * 0.0)],
            )
            assert torch.equal(zeroed, corrupted)


def test_a_model_that_drops_a_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook point that fires, but whose output the model does not use."""
    model = a_model("LN")
    block = model.blocks[1]

    def deaf(normalized: Tensor) -> Tensor:
        written: Tensor = block.mlp(normalized)
        block.hook_mlp_out(written)
        return written

    monkeypatch.setattr(block, "apply_mlp", deaf)
    table = check_sites(model).set_index("name")
    assert table.loc["blocks.1.hook_mlp_out", "verdict"] == "ignored"
    assert table.loc["blocks.0.hook_mlp_out", "verdict"] == "honoured"


@torch.no_grad()
@pytest.mark.parametrize("name", BRIDGES)
def test_a_write_that_would_not_be_honoured_is_refused_and_a_read_is_not(name: str) -> None:
    model = a_model(name)
    unchanged = left_as_it_was(model)
    site = Site("blocks.1.hook_resid_mid")
    value = read_activations(model, CLEAN, [site.name])[site.name]
    seen: list[Tensor] = []
    with intervene(model, [(site.name, lambda act, hook: seen.append(act))]):
        model(CORRUPTED.tokens)
    assert len(seen) == 1
    with pytest.raises(HysteresisError, match=r"blocks.1.hook_resid_mid is half applied"):
        with intervene(model, [overwrite(site, value, positions=EVERYWHERE)]):
            model(CORRUPTED.tokens)
    # The same point under its other name.
    with pytest.raises(HysteresisError, match="half applied"):
        with intervene(model, [("blocks.1.ln2.hook_in", lambda act, hook: value)]):
            model(CORRUPTED.tokens)
    assert unchanged()


@pytest.mark.parametrize("inference", [False, True])
def test_a_write_in_place_that_would_not_be_honoured_is_refused(inference: bool) -> None:
    """A hook that returns nothing can still write; one that only looks is let through."""
    model, name = a_model("native bridge"), "blocks.1.hook_resid_mid"
    seen: list[Tensor] = []
    with torch.inference_mode(inference), torch.no_grad():

        def zero(activation: Tensor, hook: HookPoint) -> None:
            activation[:, 2] = 0.0

        for at in (name, "blocks.0.attn.hook_pattern"):
            with pytest.raises(HysteresisError, match=f"a write at {at} is"):
                with intervene(model, [(at, zero)]):
                    model(CLEAN.tokens)
            with intervene(model, [(at, lambda act, hook: seen.append(act.clone().zero_()))]):
                model(CLEAN.tokens)
        with intervene(model, [("blocks.1.hook_resid_pre", zero)]):  # is honoured
            model(CLEAN.tokens)
    assert len(seen) == 2


SWITCHES = {
    "attn.hook_result": "set_use_attn_result",
    "hook_q_input": "set_use_split_qkv_input",
    "hook_v_input": "set_use_split_qkv_input",
    "hook_mlp_in": "set_use_hook_mlp_in",
    "hook_attn_in": "set_use_attn_in",
}


@pytest.mark.parametrize("name", ["LN", "GPT-2 bridge"])
@pytest.mark.parametrize("point", SWITCHES)
def test_what_switches_a_hook_point_on_is_said(name: str, point: str) -> None:
    model, at = a_model(name), f"blocks.1.{point}"
    expected = rf"hook point {at} never fires before model.{SWITCHES[point]}\(True\)"
    with pytest.raises(HysteresisError, match=expected):
        read_activations(model, CLEAN, [at])
    with pytest.raises(HysteresisError, match=expected):
        with intervene(model, [(at, lambda act, hook: None)]):
            model(CLEAN.tokens)
    getattr(model, SWITCHES[point])(True)
    assert len(read_activations(model, CLEAN, [at])[at]) == len(CLEAN)


def test_a_map_says_what_switches_its_point_on() -> None:
    with pytest.raises(HysteresisError, match=r"model.set_use_attn_result\(True\)"):
        route_map(a_model("LN"), CLEAN, CORRUPTED, points="result")


def test_a_pattern_that_the_native_bridge_ignores_is_refused_in_a_map() -> None:
    with pytest.raises(HysteresisError, match="hook_pattern is ignored"):
        route_map(a_model("native bridge"), CLEAN, CORRUPTED, points=["pattern"])


def test_trials_that_a_model_cannot_run_are_refused() -> None:
    model = a_model("LN")
    check_trials(model, CLEAN)
    long = Trials.of(torch.zeros(2, 10, dtype=torch.long), [1, 1], [2, 2])
    with pytest.raises(HysteresisError, match="trials of 10 tokens, but the model's context is 9"):
        check_trials(model, long)
    tokens = CLEAN.tokens.clone()
    tokens[1, 2] = D_VOCAB
    with pytest.raises(HysteresisError, match="token 20 lies outside a vocabulary of 20"):
        check_trials(model, Trials(tokens, CLEAN.contextual, CLEAN.fixed))
    with pytest.raises(HysteresisError, match="contextual answer 25 lies outside"):
        check_trials(model, Trials(CLEAN.tokens, CLEAN.contextual * 0 + 25, CLEAN.fixed))
    with pytest.raises(HysteresisError, match="no trials"):
        check_trials(model, CLEAN.select(slice(0)))
    with pytest.raises(HysteresisError, match="the trials are on cpu, the model on meta"):
        check_trials(a_model("LN").to("meta"), CLEAN)


def test_sites_read_heads_and_queries() -> None:
    z, pattern = torch.randn(3, N_POS, 4, 5), torch.randn(3, 4, N_POS, N_POS)
    assert torch.equal(Site("blocks.0.attn.hook_z", 2).read(z), z[:, :, 2])
    assert torch.equal(Site("blocks.0.attn.hook_pattern", 2).read(pattern), pattern[:, 2])
    assert Site("blocks.0.attn.hook_pattern").read(pattern).shape == (3, N_POS, 4, N_POS)


def test_a_misspelt_point_is_named() -> None:
    with pytest.raises(HysteresisError, match=r"no hook point 'blocks.0.attn.hook_zz'"):
        read_activations(a_model("LN"), CLEAN, ["blocks.0.attn.hook_zz"])
    with pytest.raises(HysteresisError, match="no hook point 'blocks.0.hook_resid_end'"):
        hook_name(a_model("LN"), "resid_end", 0)


def test_slices_cover_all_trials_and_stay_whole_under_a_callers_hooks() -> None:
    model = a_model("LN")
    names = {"blocks.0.hook_resid_pre"}
    slices = trial_slices(model, CLEAN, names, max_bytes=2 * N_POS * 24 * 4)
    assert slices == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert trial_slices(model, CLEAN, names, max_bytes=1)[0] == slice(0, 1)

    def look(activation: Tensor, hook: HookPoint) -> None: ...

    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", look)]):
        assert trial_slices(model, CLEAN, names, max_bytes=1) == [slice(0, len(CLEAN))]
    with pytest.raises(HysteresisError, match="max_bytes = 0"):
        trial_slices(model, CLEAN, names, max_bytes=0)


def test_what_cannot_be_told_is_not_remembered() -> None:
    """With weights of zero nothing follows from a head; once they are trained, it does."""
    model: Any = a_model("native bridge")
    output = model.blocks[1].attn.o.weight
    trained = output.detach().clone()
    output.data.zero_()
    verdicts = check_sites(model).set_index("name")["verdict"]
    assert verdicts["blocks.1.attn.hook_z"] == "undetermined"
    output.data.copy_(trained)
    value = read_activations(model, CLEAN, ["blocks.1.attn.hook_z"])["blocks.1.attn.hook_z"]
    with intervene(model, [("blocks.1.attn.hook_z", lambda act, hook: value)]):
        model(CORRUPTED.tokens)
    assert check_sites(model).set_index("name")["verdict"]["blocks.1.attn.hook_z"] == "honoured"


def test_rounding_of_large_activations_is_no_verdict() -> None:
    model: Any = a_model("native bridge")
    next(model.pos_embed.parameters()).data[:, 3] += 1e4
    verdicts = check_sites(model).set_index("point")["verdict"]
    assert set(verdicts[["attn_out", "mlp_out", "z"]]) == {"honoured"}
    assert set(verdicts[["resid_mid"]]) == {"half applied"}


def test_autocast_and_bad_counts() -> None:
    model = a_model("GPT-2 bridge")
    with torch.autocast("cpu", torch.bfloat16):
        assert check_sites(model)["verdict"].isin(["honoured", "half applied", "absent"]).all()
    with pytest.raises(HysteresisError, match="n_trials = 0"):
        check_sites(model, n_trials=0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("point", ["z1", "scale1ln1", None, 3])
def test_a_short_name_that_says_its_own_layer_is_refused(point: Any) -> None:
    with pytest.raises(HysteresisError, match="is no point of a layer"):
        hook_name(a_model("LN"), point, 0)


def test_components_can_be_named_one_by_one_or_in_lists() -> None:
    model = a_model("LN")
    expected = component_sites(model, "L1H3", "L0 MLP", "L0 heads")
    assert component_sites(model, ["L1H3", "L0 MLP"], "L0 heads") == expected
    with pytest.raises(HysteresisError, match="no component 'L9H3'; there are all heads"):
        component_sites(model, ["L1H3", "L9H3"])


@pytest.mark.parametrize("name", ["LN", "attention only"])
def test_the_name_of_every_component_is_understood(name: str) -> None:
    model = a_model(name)
    for component in (*components(model), *weight_components(model)):
        if component not in ("everything", "embedding", "unembedding"):
            found = Component.of(component)
            assert found is not None and found.is_in(model), component
    assert Component.of("L0 norms") == Component("norms", 0)
    for other in ("L2H0", "L0H4", "L2 heads", "L2 MLP"):
        absent = Component.of(other)
        assert absent is not None and not absent.is_in(model)
    for wrong in ("", "L0", "L0H", "l0h1", "L-1H0", "L0H1 ", "L0 mlp", "heads", "L0H1H2"):
        assert Component.of(wrong) is None
    mlp = Component.of("L0 MLP")
    assert mlp is not None and mlp.is_in(model) == (name == "LN")


@pytest.mark.usefixtures("unchecked")
def test_a_head_out_of_a_table_is_a_number() -> None:
    number: Any = np.int64(2)
    assert type(Site("blocks.0.attn.hook_z", number).head) is int
    with pytest.raises(TypeError):
        Site("blocks.0.attn.hook_z", 1.0)  # type: ignore[arg-type]
