"""A transplant is what plain hooks or copied weights do; from oneself, it changes no bit."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformer_lens import ActivationCache
from zoo import BRIDGES, D_VOCAB, KINDS, a_model, hooked, left_as_it_was, trials_pair

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import intervene
from tl_hysteresis.models import fingerprint
from tl_hysteresis.sites import HookedModel, Site, components, mlp_site
from tl_hysteresis.tasks import Trials
from tl_hysteresis.transplants import (
    transplant,
    transplant_activations,
    transplant_weights,
    weight_components,
)

TRIALS, _ = trials_pair()
HEADS = [f"L{layer}H{head}" for layer in (0, 1) for head in range(4)]
OF_A_HEAD = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")
# How the names of a component's parameters begin, in a `HookedTransformer` of two layers.
PREFIXES: dict[str, tuple[str, ...]] = {
    "everything": ("",),
    "all heads": ("blocks.0.attn.", "blocks.1.attn."),
    "L0 heads": ("blocks.0.attn.",),
    "L1 heads": ("blocks.1.attn.",),
    "L0 MLP": ("blocks.0.mlp.",),
    "L1 MLP": ("blocks.1.mlp.",),
    "L0 norms": ("blocks.0.ln1.", "blocks.0.ln2."),
    "L1 norms": ("blocks.1.ln1.", "blocks.1.ln2."),
    "embedding": ("embed.", "pos_embed."),
    "unembedding": ("ln_final.", "unembed."),
}


def a_pair(name: str = "LN") -> tuple[HookedModel, HookedModel]:
    """Two models of one kind that differ in every number, in evaluation mode."""
    first, second = a_model(name, 0).eval(), a_model(name, 1).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in second.parameters():
            p.add_((0.01 + 0.1 * torch.rand(p.shape, generator=generator)).to(p.dtype))
    return first, second


def margin(model: HookedModel, hooks: list[tuple[str, Callable[..., Tensor]]]) -> float:
    """The mean margin by TransformerLens alone."""
    with torch.no_grad():
        logits = model.run_with_hooks(TRIALS.tokens, fwd_hooks=list(hooks))[:, -1].double()
    rows = torch.arange(len(TRIALS))
    return float((logits[rows, TRIALS.contextual] - logits[rows, TRIALS.fixed]).mean())


def changed(model: nn.Module, before: nn.Module) -> dict[str, Tensor]:
    """For each parameter that is not bit for bit as it was, where it differs."""
    pairs = zip(model.named_parameters(), before.parameters(), strict=True)
    return {name: new != old for (name, new), old in pairs if not torch.equal(new, old)}


@pytest.mark.parametrize("name", [*KINDS, *BRIDGES])
def test_a_transplant_from_oneself_changes_no_bit_on_any_model(name: str) -> None:
    model, same = a_model(name).eval(), a_model(name).eval()
    unchanged, sites = left_as_it_was(model), components(model)
    with torch.no_grad():
        expected = model(TRIALS.tokens)
        for part in (*sites.values(), [Site("blocks.0.hook_resid_pre")]):
            with intervene(model, transplant_activations(same, TRIALS, part)):
                assert torch.equal(model(TRIALS.tokens), expected)
        for component in ("everything", "L0 heads"):
            into = transplant_weights(model, same, component)
            assert torch.equal(into(TRIALS.tokens), expected) and not changed(into, model)
    parts, weights = {"heads": sites["all heads"]}, weight_components(model)[-4:]
    table = transplant(model, same, TRIALS, sites=parts, weights=weights, shares=False)
    assert (table["effect"] == 0.0).all() and len(table) == 2 * 5
    assert list(table.columns) == ["into", "carrier", "component", "margin", "effect"]
    assert unchanged()


@pytest.mark.parametrize("name", ["LN", *BRIDGES])
def test_a_model_that_was_run_with_gradients_can_be_transplanted_into(name: str) -> None:
    """A bridge keeps activations of its last run, which torch does not copy with their graph."""
    first, second = a_pair(name)
    first(TRIALS.tokens)
    into = transplant_weights(first, second, "everything")
    with torch.no_grad():
        assert torch.equal(into(TRIALS.tokens), second(TRIALS.tokens))


@pytest.mark.parametrize("name", [*KINDS, *BRIDGES])
def test_everything_and_the_last_of_the_stream_give_the_donors_answers(name: str) -> None:
    first, second = a_pair(name)
    # After the last of the stream come the final norm and the unembedding: of these, one's own.
    with torch.no_grad():
        for part in ("ln_final", "unembed"):
            here, there = (getattr(model, part, nn.Module()) for model in (first, second))
            for parameter, other in zip(here.parameters(), there.parameters(), strict=True):
                parameter.copy_(other)
    own = [margin(model, []) for model in (first, second)]
    everything = transplant_weights(first, second, "everything")
    with torch.no_grad():
        assert torch.equal(everything(TRIALS.tokens), second(TRIALS.tokens))
    for model in (first, second):
        model.train()
    unchanged = [left_as_it_was(model) for model in (first, second)]
    prints = [fingerprint(model) for model in (first, second)]
    last = {"stream": [Site(f"blocks.{first.cfg.n_layers - 1}.hook_resid_post")]}
    shares = name != "bfloat16"  # whose margins differ by too few of its digits
    table = transplant(first, second, TRIALS, sites=last, weights=["everything"], shares=shares)
    assert all(check() for check in unchanged)
    assert [fingerprint(model) for model in (first, second)] == prints
    expected = [own[1], own[1], own[0], own[0]]
    assert table["margin"].tolist() == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert table["carrier"].tolist() == ["activations", "weights"] * 2
    assert abs(own[0] - own[1]) > 0.02
    if shares:
        assert table["share"].tolist() == pytest.approx([1.0] * 4, abs=1e-4)


@pytest.mark.parametrize("name", ["LN", "grouped", "native bridge"])
@pytest.mark.parametrize("role", [None, "other"])
def test_each_row_of_activations_is_a_plain_hooked_run(name: str, role: str | None) -> None:
    models, names = a_pair(name), ("early", "late")
    table = transplant(*models, TRIALS, weights=[], role=role, names=names)
    assert set(table["carrier"]) == {"activations"}
    where = slice(None) if role is None else slice(3, 6)
    every: list[tuple[int, int | None]] = [(layer, i) for layer in (0, 1) for i in range(4)]
    parts = {f"L{layer}H{head}": [(layer, head)] for layer, head in every}
    parts |= {f"L{layer} heads": [x for x in every if x[0] == layer] for layer in (0, 1)}
    parts |= {"all heads": every, "L0 MLP": [(0, None)], "L1 MLP": [(1, None)]}
    own = [margin(model, []) for model in models]
    for into in (0, 1):
        with torch.no_grad():
            _, source = models[1 - into].run_with_cache(TRIALS.tokens)

        def hook(
            layer: int, head: int | None, source: ActivationCache = source
        ) -> tuple[str, Callable[..., Tensor]]:
            name = f"blocks.{layer}." + ("hook_mlp_out" if head is None else "attn.hook_z")
            which = slice(None) if head is None else [head]

            def put(act: Tensor, hook: object) -> Tensor:
                act = act.clone()
                act[:, where, which] = source[name][:, where, which]
                return act

            return name, put

        rows = table[table["into"] == names[into]]
        assert set(rows["component"]) == set(parts)
        for row in rows.to_dict("records"):
            hooks = [hook(*which) for which in parts[str(row["component"])]]
            effect = margin(models[into], hooks) - own[into]
            assert row["margin"] == pytest.approx(own[into] + effect, abs=2e-5)
            assert row["effect"] == pytest.approx(effect, abs=2e-5)
            share = effect / (own[1 - into] - own[into])
            assert row["share"] == pytest.approx(share, rel=1e-2, abs=1e-3)
    assert (table["effect"].abs() > 1e-3).any()


@pytest.mark.parametrize("name", ["LN", "gated"])
def test_the_weights_of_a_component_go_over_and_no_others(name: str) -> None:
    first, second = a_pair(name)
    assert sorted(weight_components(first)) == sorted([*PREFIXES, *HEADS])
    prints = fingerprint(first), fingerprint(second)
    table = transplant(first, second, TRIALS, sites={})
    margins = table[table["into"] == "below"].set_index("component")["margin"]
    donors = dict(second.named_parameters())
    for component in weight_components(first):
        into = transplant_weights(first, second, component)
        by_hand = copy.deepcopy(first)
        with torch.no_grad():
            for key, p in by_hand.named_parameters():
                if component in PREFIXES:
                    if key.startswith(PREFIXES[component]):
                        p.copy_(donors[key])
                elif key.startswith(f"blocks.{component[1]}.attn.") and key.endswith(OF_A_HEAD):
                    p[int(component[3])] = donors[key][int(component[3])]
        assert changed(into, first) and not changed(into, by_hand), component
        assert margins[component] == pytest.approx(margin(by_hand, []), abs=1e-5)
    # The output bias belongs to the layer, not to any head.
    heads = into = transplant_weights(first, second, "L0H0")
    for head in ("L0H1", "L0H2", "L0H3"):
        heads = transplant_weights(heads, second, head)
    layer = transplant_weights(first, second, "L0 heads")
    assert list(changed(layer, heads)) == ["blocks.0.attn.b_O"]
    assert changed(into, first)["blocks.0.attn.W_O"].flatten(1).any(dim=1).tolist() == [
        True,
        *[False] * 3,
    ]
    assert (fingerprint(first), fingerprint(second)) == prints


@pytest.mark.parametrize("name", [n for n in [*KINDS, *BRIDGES] if n != "LN"])
def test_what_has_no_weights_of_its_own_is_refused_and_what_has_is_listed(name: str) -> None:
    model = a_model(name)
    layers, norm = range(model.cfg.n_layers), model.cfg.normalization_type
    absent = set()
    if name in (*BRIDGES, "grouped", "ungrouped"):
        absent |= {f"L{layer}H{head}" for layer in layers for head in range(4)}
    if model.cfg.attn_only:
        absent |= {f"L{layer} MLP" for layer in layers}
    if norm in (None, "LNPre"):
        absent |= {f"L{layer} norms" for layer in layers}
    every = {f"L{i} {part}" for i in layers for part in ("heads", "MLP", "norms")}
    every |= {f"L{i}H{head}" for i in layers for head in range(4)} | {"everything", "all heads"}
    there = set(weight_components(model))
    assert there - {"embedding", "unembedding"} == every - absent
    for component in [
        *sorted(absent)[:1],
        f"L{len(layers)} heads",
        "L0H4",
        "L0 mlp",
        "neurons",
        "",
    ]:
        with pytest.raises(HysteresisError, match=f"no weights of '{component}'") as error:
            transplant_weights(model, model, component)
        assert all(name in str(error.value) for name in there)


@pytest.mark.parametrize("name", ["LN", *BRIDGES])
def test_a_component_alone_leaves_the_other_components_as_they_were(name: str) -> None:
    """Weights that two components share, as tied embeddings, are no component's own."""
    first, second = a_pair(name)
    for component, other in (("embedding", "unembed"), ("unembedding", "embed")):
        if component in weight_components(first):
            into = transplant_weights(first, second, component)
            assert not changed(getattr(into, other), getattr(first, other)), component


def test_models_and_trials_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    first, second = a_pair()
    first.train()
    unchanged, before = left_as_it_was(first), fingerprint(first)
    large = Trials(TRIALS.tokens + D_VOCAB, TRIALS.contextual, TRIALS.fixed)
    plain = Trials(TRIALS.tokens, TRIALS.contextual, TRIALS.fixed)
    refused: list[tuple[str, Callable[[], object]]] = [
        (r"W_Q is \(4, 16, 4\) in the first, \(4, 16, 3\)", lambda: other("d_head 3")),
        (r"blocks.2.ln1.w is absent in the first, \(16,\)", lambda: other("4 layers")),
        (r"pos_embed.W_pos is .* absent in the second", lambda: other("rotary")),
        ("is torch.float32 on cpu in the first model, torch.float64", lambda: other("float64")),
        ("torch.float64", lambda: transplant_weights(first, a_model("float64"), "L0 MLP")),
        ("same mean margin .* shares=False", lambda: transplant(first, first, TRIALS)),
        ("no role 'verb'", lambda: transplant(first, second, TRIALS, role="verb")),
        ("no roles", lambda: transplant_activations(first, plain, [mlp_site(0)], role="query")),
        ("lies outside", lambda: transplant(first, second, large)),
        ("no trials", lambda: transplant(first, second, TRIALS.select(slice(0)))),
        ("no weights of 'L9 MLP'", lambda: transplant(first, second, TRIALS, weights=["L9 MLP"])),
        ("no hook point", lambda: transplant(first, second, TRIALS, sites={"x": [mlp_site(2)]})),
    ]

    def other(name: str) -> object:
        return transplant(first, a_model(name), TRIALS)

    for message, call in refused:
        with pytest.raises(HysteresisError, match=message):
            call()
        assert unchanged() and fingerprint(first) == before, message


@pytest.mark.parametrize("name", [*KINDS, *BRIDGES])
def test_the_components_cover_all_weights(name: str) -> None:
    """What no component holds could carry a gap that no row of the table shows."""
    first, second = a_pair(name)
    parts = {p for p in weight_components(first) if not re.search(r"everything|all|H", p)}
    for part in parts:
        first = transplant_weights(first, second, part)
    differ = [
        parameter
        for (parameter, here), there in zip(
            first.named_parameters(), second.parameters(), strict=True
        )
        if not torch.equal(here, there)
    ]
    if "embedding" not in parts:  # tied to the unembedding: neither can go over by itself
        differ = [parameter for parameter in differ if ".h." in parameter]
    assert differ == []


def test_a_heads_sink_goes_with_it() -> None:
    first, second = a_pair("sinks")
    with torch.no_grad():
        second.blocks[0].attn.sinks += 1.0
    moved = transplant_weights(first, second, "L0H2").blocks[0].attn.sinks
    assert moved[2] == second.blocks[0].attn.sinks[2]
    assert torch.equal(moved[:2], first.blocks[0].attn.sinks[:2])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("attn_scores_soft_cap", 7.0), ("use_attn_scale", False), ("parallel_attn_mlp", True)],
)
def test_two_functions_of_the_same_weights_are_not_two_checkpoints(
    setting: str, value: object
) -> None:
    first, second = hooked("LN"), hooked("LN")
    setattr(second.cfg, setting, value)
    with pytest.raises(
        HysteresisError, match=f"{setting} is .* in the first, {value} in the second"
    ):
        transplant(first, second, TRIALS)
