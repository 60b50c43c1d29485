"""Path patching equals TransformerLens's split inputs with hooks written by hand, edge by edge."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer
from zoo import BRIDGES, KINDS, a_model, left_as_it_was, trials_pair

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.paths import EMBED, LOGITS, path_map
from tl_hysteresis.routes import route_map

CLEAN, CORRUPTED = trials_pair()


def by_hand(
    model: HookedTransformer, sender: tuple[int, int | None], receiver: tuple[int, int], input: str
) -> float:
    """The effect of one edge, by `use_split_qkv_input` and the weights W_O."""
    with torch.no_grad():
        _, clean = model.run_with_cache(CLEAN.tokens)
        logits, own = model.run_with_cache(CORRUPTED.tokens)
        layer, head = sender
        name = f"blocks.{layer}.hook_mlp_out" if head is None else f"blocks.{layer}.attn.hook_z"
        change = clean[name] - own[name]
        if head is not None:
            change = change[:, :, head] @ model.W_O[layer, head]

        def exchange(activation: Tensor, hook: Any) -> Tensor:
            activation = activation.clone()
            activation[:, :, receiver[1]] += change
            return activation

        model.set_use_split_qkv_input(True)
        assert model.cfg.use_split_qkv_input
        hook = (f"blocks.{receiver[0]}.hook_{input}_input", exchange)
        patched = model.run_with_hooks(CORRUPTED.tokens, fwd_hooks=[hook])
        model.set_use_split_qkv_input(False)
    effect = logit_margin(patched, CLEAN) - logit_margin(cast(Tensor, logits), CLEAN)
    return effect.double().mean().item()


# One layer has no path between heads, and behind a norm a head's change is no product with W_O.
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("1 layer", "norms after")])
def test_paths_are_those_of_split_inputs(name: str) -> None:
    model = a_model(name)
    assert isinstance(model, HookedTransformer)
    model.to(torch.float64)
    last = model.cfg.n_layers - 1
    found = path_map(
        model,
        CLEAN,
        CORRUPTED,
        senders=["L0H1"] if model.cfg.attn_only else ["L0H1", "L0 MLP"],
        receivers=[f"L{last}H0", "L1H1"],
        shares=False,
    ).table
    for _, row in found.iterrows():
        sender, receiver, input, effect = row[["sender", "receiver", "input", "effect"]]
        to = int(receiver[1]), int(receiver[3])
        expected = by_hand(model, (0, 1 if sender == "L0H1" else None), to, input)
        assert effect == pytest.approx(expected, abs=1e-9)
    assert found["effect"].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["no norm", "attention only"])
def test_all_direct_paths_to_the_logits_add_up_where_nothing_normalises(name: str) -> None:
    """The logits are then linear in the stream, which is the sum of what all components write."""
    model = a_model(name)
    if name == "attention only":
        model.cfg.normalization_type = None  # leaves out the final norm; those of the heads stay
    found = path_map(model, CLEAN, CORRUPTED, receivers=[LOGITS])
    assert found.table["share"].sum() == pytest.approx(1.0, abs=1e-4)


def test_in_one_layer_of_attention_alone_the_embedding_is_the_only_sender() -> None:
    """With every head's input exchanged through the embedding, all that is left is its own path."""
    model = a_model("1 layer")
    table = path_map(model, CLEAN, CORRUPTED).table
    assert set(table[table["input"] != ""]["sender"]) == {EMBED}
    assert set(table[table["receiver"] == LOGITS]["sender"]) == {
        *(EMBED, "L0H0", "L0H1", "L0H2", "L0H3", "L0 MLP")
    }


def test_a_heads_value_through_the_embedding_is_patching_its_value() -> None:
    """In the first layer the stream is the embedding, so the edge is the whole input."""
    model = a_model("LN")
    paths = path_map(model, CLEAN, CORRUPTED, senders=[EMBED], receivers=["L0H0", "L0H1"])
    for input in ("q", "k", "v"):
        whole = route_map(model, CLEAN, CORRUPTED, points=[input], by="all").tensor(input)
        assert paths.matrix(input).loc[EMBED].to_numpy() == pytest.approx(
            whole[0, :2].numpy(), abs=1e-5
        )


@pytest.mark.parametrize("name", [*KINDS, *BRIDGES])
def test_paths_on_every_model_start_where_the_runs_differ_and_leave_it_as_it_was(name: str) -> None:
    model = a_model(name)
    unchanged = left_as_it_was(model)
    found = path_map(model, CLEAN, CORRUPTED, senders=EMBED, by="role", shares=False)
    assert unchanged()
    assert not found.effects.requires_grad
    # The corruption stands at "value": from other positions the embedding brings nothing.
    heads = found.table[found.table["input"] != ""]
    largest = heads["effect"].abs().groupby(heads["role"]).max()
    assert largest["value"] > 1e-3
    assert largest.drop("value").max() < 1e-6 * (1.0 + largest["value"])


def test_paths_by_position_and_role() -> None:
    model = a_model("LN")
    whole = path_map(model, CLEAN, CORRUPTED, senders="L0H0", receivers="L1H0", inputs="q")
    each = path_map(
        model, CLEAN, CORRUPTED, senders="L0H0", receivers="L1H0", inputs="q", by="position"
    )
    # Queries of the last layer matter at the last position alone.
    assert each.table["effect"][:6].abs().max() < 1e-6
    assert each.table["effect"][6] == pytest.approx(whole.table["effect"][0], abs=1e-6)
    role = path_map(model, CLEAN, CORRUPTED, senders="L0H0", receivers="L1H0", roles="query")
    assert role.table["effect"][0] == pytest.approx(whole.table["effect"][0], abs=1e-6)
    assert role.matrix("k", values="share").index.to_list() == [("L0H0", "query")]


def test_noising_is_denoising_with_the_runs_exchanged() -> None:
    model = a_model("LN")
    noising = path_map(model, CLEAN, CORRUPTED, direction="noising")
    exchanged = path_map(model, CORRUPTED, CLEAN)
    assert torch.equal(noising.effects, exchanged.effects)
    assert noising.table["share"].to_numpy() == pytest.approx(exchanged.table["share"].to_numpy())


def test_groups_of_keys_are_receivers_by_their_own_number() -> None:
    model = a_model("grouped")  # 4 heads, 2 groups
    table = path_map(model, CLEAN, CORRUPTED, senders=["L0H0"]).table
    assert (table["input"].value_counts()[["q", "k", "v"]] == [4, 2, 2]).all()
    with pytest.raises(HysteresisError, match="L1H3 has no k of its own: .*2 groups"):
        path_map(model, CLEAN, CORRUPTED, receivers=["L1H3"])


def test_heads_of_a_layer_stand_for_each_of_them() -> None:
    model = a_model("LN")
    named = path_map(
        model,
        CLEAN,
        CORRUPTED,
        senders=["L0H0", "L0H1", "L0H2", "L0H3"],
        receivers=["L1H0", "L1H1", "L1H2", "L1H3", LOGITS],
        inputs="k",
    )
    for receivers in (["L1 heads", LOGITS], ["L1H0", "L1 heads", LOGITS], ["all heads", LOGITS]):
        found = path_map(
            model, CLEAN, CORRUPTED, senders="L0 heads", receivers=receivers, inputs="k"
        )
        assert found.table.equals(named.table)
    table = path_map(a_model("grouped"), CLEAN, CORRUPTED, receivers="L1 heads").table
    assert (table[table["sender"] == EMBED]["input"].value_counts()[["q", "k"]] == [4, 2]).all()
    with pytest.raises(HysteresisError, match="no L7 heads: the model has 2 layers"):
        path_map(model, CLEAN, CORRUPTED, receivers="L7 heads")
    with pytest.raises(HysteresisError, match="'L0 norms' is no component"):
        path_map(model, CLEAN, CORRUPTED, senders="L0 norms")


def test_refusals() -> None:
    model = a_model("LN")
    for arguments, message in (
        ({"senders": ["head 3"]}, "'head 3' is no component"),
        ({"senders": ["L0H9"]}, "no L0H9: the model has 2 layers of 4 heads"),
        ({"receivers": ["L5H0"]}, "no L5H0"),
        ({"receivers": ["L1 MLP"]}, "receivers are heads or 'logits'"),
        ({"senders": ["L1H0"], "receivers": ["L1H1"]}, "no path leads"),
        ({"inputs": ["o"]}, "no input 'o'"),
        ({"roles": "verb"}, "no role 'verb'"),
    ):
        with pytest.raises(HysteresisError, match=message):
            path_map(model, CLEAN, CORRUPTED, **arguments)
    with pytest.raises(HysteresisError, match="no L0 MLP: the model has no MLPs"):
        path_map(a_model("attention only"), CLEAN, CORRUPTED, senders=["L0 MLP"])
    with pytest.raises(HysteresisError, match="shares=False"):
        path_map(model, CLEAN, CLEAN)
    with pytest.raises(HysteresisError, match="must match trial by trial"):
        path_map(model, CLEAN, CORRUPTED.select(slice(2)))
    with pytest.raises(HysteresisError, match="no input 'z'"):
        path_map(model, CLEAN, CORRUPTED, receivers=[LOGITS]).matrix("z")
