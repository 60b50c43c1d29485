"""Hook functions do what they say, fire or complain, and leave the model as it was."""

import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer

from tl_hysteresis.config import ModelConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import (
    intervene,
    overwrite,
    patch_activations,
    read_activations,
)
from tl_hysteresis.models import build_model, hooked_config
from tl_hysteresis.replacement import mean_reference, mean_replacement
from tl_hysteresis.sites import Site, head_sites, mlp_site
from tl_hysteresis.tasks import AssociativeRecall, Trials, draw

TASK = AssociativeRecall(n_keys=6, n_values=8, n_pairs=3)
TRIALS = draw(TASK, 12, seed=0, stream="test", index=0)
OTHERS = draw(TASK, 12, seed=0, stream="test", index=1)
QUERY = TRIALS.positions("query")


@pytest.fixture
def model() -> HookedTransformer:
    settings = ModelConfig(d_model=16, d_mlp=8, n_heads=2)
    return build_model(hooked_config(settings, d_vocab=TASK.d_vocab, n_ctx=TASK.n_ctx), seed=0)


def all_sites(model: HookedTransformer) -> list[Site]:
    heads = [site for layer in range(2) for site in head_sites(model, layer)]
    return heads + [mlp_site(0), mlp_site(1)]


def test_mean_replacement_equals_a_hook_written_by_hand(model: HookedTransformer) -> None:
    site = Site("blocks.0.attn.hook_z", head=1)
    _, cache = model.run_with_cache(TRIALS.tokens)
    mean = cache[site.name][:, -1, 1].mean(dim=0)

    def by_hand(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, -1, 1] = mean
        return z

    expected = model.run_with_hooks(TRIALS.tokens, fwd_hooks=[(site.name, by_hand)])
    reference = mean_reference(model, TRIALS, [site])
    with intervene(model, mean_replacement([site], reference, TRIALS, role="query")):
        found = model(TRIALS.tokens)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0.0)


def test_replacing_everything_at_the_query_leaves_only_the_query_token(
    model: HookedTransformer,
) -> None:
    """With no head and no MLP free to vary, trials with the same query get the same logits."""
    sites = all_sites(model)
    reference = mean_reference(model, TRIALS, sites)
    with intervene(model, mean_replacement(sites, reference, TRIALS, role="query")):
        logits = model(TRIALS.tokens)[:, -1]
    query = TRIALS.tokens[:, -1]
    for token in query.unique():
        same = logits[query == token]
        torch.testing.assert_close(same, same[:1].expand_as(same), atol=1e-6, rtol=0.0)


def test_a_mean_over_one_trial_changes_nothing(model: HookedTransformer) -> None:
    one = TRIALS.select(slice(1))
    sites = all_sites(model)
    reference = mean_reference(model, one, sites)
    hooks = mean_replacement(sites, reference, one, role="query")
    with intervene(model, hooks):
        replaced = model(one.tokens)
    torch.testing.assert_close(replaced, model(one.tokens), atol=1e-6, rtol=0.0)


def test_patching_a_run_with_itself_changes_nothing(model: HookedTransformer) -> None:
    sites = all_sites(model)
    source = read_activations(model, TRIALS, {site.name for site in sites})
    everywhere = torch.ones_like(QUERY)
    with intervene(model, patch_activations(sites, source, positions=everywhere)):
        patched = model(TRIALS.tokens)
    assert torch.equal(patched, model(TRIALS.tokens))


@pytest.mark.parametrize("point", ["resid_pre", "resid_mid", "resid_post"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_whole_clean_stream_gives_the_clean_logits(
    model: HookedTransformer, layer: int, point: str
) -> None:
    site = Site(f"blocks.{layer}.hook_{point}")
    source = read_activations(model, TRIALS, {site.name})
    with intervene(model, patch_activations([site], source, positions=torch.ones_like(QUERY))):
        patched = model(OTHERS.tokens)
    torch.testing.assert_close(patched, model(TRIALS.tokens), atol=1e-6, rtol=0.0)


def test_other_positions_and_heads_stay(model: HookedTransformer) -> None:
    site = Site("blocks.1.attn.hook_z", head=0)
    name, write = overwrite(site, torch.full((8,), 7.0), positions=QUERY)
    before = torch.randn(12, TASK.n_ctx, 2, 8)
    kept = before.clone()
    after = write(before, model.hook_dict[name])
    assert after is not None
    assert torch.equal(before, kept), "a hook must not edit in place"
    assert (after[:, -1, 0] == 7.0).all()
    assert torch.equal(after[:, -1, 1], before[:, -1, 1])
    assert torch.equal(after[:, :-1], before[:, :-1])


def hooks_of(model: HookedTransformer) -> dict[str, list[object]]:
    return {name: list(point.fwd_hooks) for name, point in model.hook_dict.items()}


def test_hooks_are_gone_afterwards_and_the_callers_stay(model: HookedTransformer) -> None:
    seen: list[str] = []
    model.add_hook("blocks.0.hook_mlp_out", lambda act, hook: seen.append(str(hook.name)))
    before = hooks_of(model)
    reference = mean_reference(model, TRIALS, [mlp_site(0)])
    hooks = mean_replacement([mlp_site(0)], reference, TRIALS, role="query")
    with intervene(model, hooks):
        with intervene(model, hooks):
            model(TRIALS.tokens)
        model(TRIALS.tokens)
    assert hooks_of(model) == before
    assert len(seen) == 3


def test_hooks_are_gone_after_an_error(model: HookedTransformer) -> None:
    def fail(activation: Tensor, hook: object) -> Tensor:
        raise RuntimeError("broken hook")

    before = hooks_of(model)
    with pytest.raises(RuntimeError, match="broken hook"):
        with intervene(model, [("blocks.0.hook_mlp_out", fail)]):
            model(TRIALS.tokens)
    assert hooks_of(model) == before


def test_a_hook_that_never_fires_is_an_error(model: HookedTransformer) -> None:
    hooks = [("blocks.0.hook_mlp_out", lambda act, hook: act)]
    stream = model(TRIALS.tokens, stop_at_layer=1)
    with pytest.raises(HysteresisError, match="never fired: blocks.0.hook_mlp_out"):
        with intervene(model, hooks):
            model(stream, start_at_layer=1)


def some_trials() -> Trials:
    return Trials(TRIALS.tokens, TRIALS.contextual, TRIALS.fixed)


def test_bad_sites_and_shapes_are_named(model: HookedTransformer) -> None:
    with pytest.raises(HysteresisError, match="no hook point 'blocks.9.hook_mlp_out'"):
        mean_reference(model, TRIALS, [mlp_site(9)])
    with pytest.raises(HysteresisError, match="no head 5 at .*it has 2 heads"):
        mean_reference(model, TRIALS, [Site("blocks.0.attn.hook_z", head=5)])
    with pytest.raises(HysteresisError, match="has no head axis"):
        mean_reference(model, TRIALS, [Site("blocks.0.hook_mlp_out", head=0)])
    reference = mean_reference(model, TRIALS, [mlp_site(0)])
    with pytest.raises(HysteresisError, match="no role 'subject'"):
        mean_replacement([mlp_site(0)], reference, TRIALS, role="subject")
    with pytest.raises(HysteresisError, match="carry no roles"):
        mean_reference(model, some_trials(), [mlp_site(0)], by="role")
    with pytest.raises(HysteresisError, match="no value of .*blocks.1"):
        mean_replacement([mlp_site(1)], reference, TRIALS)
    with pytest.raises(HysteresisError, match="no activation of 'blocks.1.hook_mlp_out'"):
        patch_activations([mlp_site(1)], {}, positions=QUERY)
    with pytest.raises(HysteresisError, match="positions are"):
        with intervene(model, mean_replacement([mlp_site(0)], reference, TRIALS.select(slice(5)))):
            model(TRIALS.tokens)
    with pytest.raises(HysteresisError, match="cannot stand at"):
        with intervene(model, [overwrite(mlp_site(0), torch.zeros(3), positions=QUERY)]):
            model(TRIALS.tokens)


@pytest.mark.usefixtures("unchecked")
def test_iterators_are_not_used_up_before_they_are_read(model: HookedTransformer) -> None:
    """A `zip` or a generator can be walked once only: what is checked must also be installed."""
    before = model(TRIALS.tokens)
    with intervene(model, zip(["blocks.0.hook_mlp_out"], [lambda act, hook: act * 0], strict=True)):  # type: ignore[arg-type]
        assert not torch.equal(model(TRIALS.tokens), before)
    sites = head_sites(model, 1)
    reference = mean_reference(model, TRIALS, (site for site in sites))  # type: ignore[arg-type]
    assert set(reference.values) == set(sites)
    hooks = mean_replacement(filter(lambda s: s.head == 1, sites), reference, TRIALS)  # type: ignore[arg-type]
    assert len(hooks) == 1
