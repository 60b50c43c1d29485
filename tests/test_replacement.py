"""References hold hand-computed values; replacing by them is what plain hooks would do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformer_lens.utilities.components_utils import get_act_name
from zoo import BRIDGES, D_VOCAB, KINDS, N_POS, a_model, left_as_it_was, trials_pair

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.interventions import intervene
from tl_hysteresis.models import fingerprint
from tl_hysteresis.replacement import (
    Reference,
    mean_reference,
    mean_replacement,
    resampled_reference,
    zero_reference,
)
from tl_hysteresis.sites import HookedModel, Site, head_sites, mlp_site
from tl_hysteresis.tasks import Trials

CLEAN, OTHER = trials_pair()
PLAIN = Trials(CLEAN.tokens, CLEAN.contextual, CLEAN.fixed)
NAMES = ["start", "key", "value", "other", "other", "other", "query"]
# The same roles, but each trial has them one position further on than the trial before.
MOVING = Trials.of(
    *(CLEAN.tokens, CLEAN.contextual, CLEAN.fixed),
    roles=[NAMES[-i:] + NAMES[:-i] if i else NAMES for i in range(len(CLEAN))],
)
PATTERN = Site("blocks.1.attn.hook_pattern")
MLP = mlp_site(0)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def sites_of(model: HookedModel) -> list[Site]:
    last = model.cfg.n_layers - 1
    found = [*head_sites(model, last)[1:3], Site("blocks.0.hook_resid_pre")]
    return found if model.cfg.attn_only else [*found, mlp_site(last)]


def activation(model: HookedModel, site: Site, trials: Trials) -> Tensor:
    """By TransformerLens alone: `[trial, pos, *feature]`."""
    with torch.no_grad():
        _, cache = model.run_with_cache(trials.tokens)
    found: Tensor = cache[site.name]
    if site.name.endswith("pattern"):
        found = found.permute(0, 2, 1, 3)
    return found if site.head is None else found.select(2, site.head)


def run(
    model: HookedModel, trials: Trials, hooks: list[tuple[str, Callable[..., Tensor]]]
) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.run_with_hooks(trials.tokens, fwd_hooks=list(hooks))
    return logits


def by_hand(
    site: Site, value: Tensor, where: Tensor | slice = slice(None)
) -> tuple[str, Callable[..., Tensor]]:
    """A hook that sets a site to `value` at some positions, the same in every trial."""

    def write(act: Tensor, hook: object) -> Tensor:
        act = act.clone()
        if site.name.endswith("pattern"):
            act[:, :, where] = value.transpose(-2, -3)
        elif site.head is None:
            act[:, where] = value
        else:
            act[:, where, site.head] = value
        return act

    return site.name, write


def replaced(
    model: HookedModel, sites: list[Site], reference: Reference, trials: Trials, **where: object
) -> Tensor:
    hooks = mean_replacement(sites, reference, trials, **where)  # type: ignore[arg-type]
    with torch.no_grad(), intervene(model, hooks):
        logits: Tensor = model(trials.tokens)
    return logits


@pytest.mark.parametrize("name", [*KINDS, *BRIDGES])
def test_on_every_model_the_means_and_their_replacement_are_those_made_by_hand(name: str) -> None:
    model = a_model(name)
    unchanged = left_as_it_was(model)
    sites = sites_of(model)
    reference = mean_reference(model, CLEAN, sites)
    assert unchanged()
    model.eval()
    unchanged = left_as_it_was(model)
    hooks = []
    for site in sites:
        acts = activation(model, site, CLEAN)
        tolerance = TOLERANCE[acts.dtype]
        assert reference.values[site].dtype == acts.dtype
        for role, found in zip(reference.role_names, reference.values[site], strict=True):
            mean = acts.double()[CLEAN.positions(role)].mean(dim=0)
            torch.testing.assert_close(found.double(), mean, atol=tolerance, rtol=tolerance)
        hooks.append(
            by_hand(site, acts[:, -1].double().mean(dim=0).to(acts.dtype), slice(-1, None))
        )
    found = replaced(model, sites, reference, CLEAN, role="query")
    expected, intact = run(model, CLEAN, hooks), run(model, CLEAN, [])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert (found - intact).abs().max() > 10 * tolerance
    assert unchanged()


@pytest.mark.parametrize("name", [*KINDS, *BRIDGES])
def test_on_every_model_each_kind_of_site_can_be_replaced_by_each_kind_of_reference(
    name: str,
) -> None:
    model = a_model(name).eval()
    other = a_model(name, seed=1).eval()
    points = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z", "pattern")
    refused = {"native bridge": ("resid_mid", "pattern"), "GPT-2 bridge": ("resid_mid",)}
    compared = 0
    for point in points:
        site = Site(str(get_act_name(point, model.cfg.n_layers - 1)))
        absent = model.cfg.attn_only and point in ("resid_mid", "mlp_out")
        absent |= model.cfg.parallel_attn_mlp and point == "resid_mid"
        if absent or point in refused.get(name, ()):
            continue
        own, theirs = (activation(m, site, CLEAN) for m in (model, other))
        expected = {
            "own": own.double().mean(dim=0).to(own.dtype),
            "other": theirs.double().mean(dim=0).to(own.dtype),
            "zero": torch.zeros_like(own[0]),
        }
        references = {
            "own": mean_reference(model, CLEAN, [site], by="position"),
            "other": mean_reference(other, CLEAN, [site], by="position"),
            "zero": zero_reference(model, CLEAN, [site]),
        }
        for kind, reference in references.items():
            found = replaced(model, [site], reference, CLEAN)
            by_hooks = run(model, CLEAN, [by_hand(site, expected[kind])])
            tolerance = TOLERANCE[own.dtype] * (1.0 + by_hooks.abs().max().item())
            torch.testing.assert_close(found, by_hooks, atol=tolerance, rtol=0.0)
            compared += 1
    assert compared >= 3 * 4


@pytest.mark.parametrize("name", BRIDGES)
def test_writes_that_a_bridge_does_not_honour_are_refused(name: str) -> None:
    model = a_model(name)
    unchanged = left_as_it_was(model)
    refused = {"blocks.1.hook_resid_mid": "half applied"}
    if name == "native bridge":
        refused[PATTERN.name] = "ignored"
    for point, verdict in refused.items():
        reference = mean_reference(model, CLEAN, [Site(point)], by="position")
        with pytest.raises(HysteresisError, match=f"{point} is {verdict}"):
            replaced(model, [Site(point)], reference, CLEAN)
        assert unchanged()


def test_a_role_that_moves_gets_its_mean_wherever_it_stands() -> None:
    model, site = a_model("LN"), Site("blocks.1.attn.hook_z", head=2)
    reference = mean_reference(model, MOVING, [site])
    acts = activation(model, site, MOVING)
    value = torch.stack([acts[MOVING.positions(role)].mean(dim=0) for role in MOVING.role_names])[
        MOVING.roles
    ]
    found = replaced(model, [site], reference, MOVING)
    torch.testing.assert_close(found, run(model, MOVING, [by_hand(site, value)]))
    # A reference taken where the roles stand elsewhere, and were met in another order.
    assert MOVING.role_names == CLEAN.role_names
    turned = Trials.of(*(OTHER.tokens, OTHER.contextual, OTHER.fixed), roles=NAMES[::-1])
    found = replaced(model, [site], reference, turned)
    rows = [MOVING.role_names.index(role) for role in NAMES[::-1]]
    mean = torch.stack([acts[MOVING.positions(role)].mean(dim=0) for role in MOVING.role_names])
    torch.testing.assert_close(found, run(model, turned, [by_hand(site, mean[rows])]))


@pytest.mark.parametrize("site", [PATTERN, Site(PATTERN.name, head=1), MLP])
def test_means_by_position(site: Site) -> None:
    model = a_model("LN")
    reference = mean_reference(model, CLEAN, [site], by="position")
    mean = activation(model, site, CLEAN).mean(dim=0)
    torch.testing.assert_close(reference.values[site], mean)
    assert mean_reference(model, PLAIN, [site]).by == "position"
    where = torch.zeros_like(CLEAN.tokens, dtype=torch.bool)
    where[:, [1, 4]] = True
    if site == MLP or site.head is None:
        hook = by_hand(site, mean[[1, 4]], torch.tensor([1, 4]))
        found = replaced(model, [site], reference, CLEAN, positions=where)
        torch.testing.assert_close(found, run(model, CLEAN, [hook]))
        torch.testing.assert_close(
            replaced(model, [site], reference, CLEAN), run(model, CLEAN, [by_hand(site, mean)])
        )


def test_attention_goes_by_role_only_where_the_role_stands_still() -> None:
    model = a_model("LN")
    reference = mean_reference(model, CLEAN, [PATTERN])
    mean = activation(model, PATTERN, CLEAN)[:, -1:].mean(dim=0)
    expected = run(model, CLEAN, [by_hand(PATTERN, mean, torch.tensor([N_POS - 1]))])
    found = replaced(model, [PATTERN], reference, CLEAN, role="query")
    torch.testing.assert_close(found, expected)
    for where in ({"role": "other"}, {}):  # three positions
        with pytest.raises(HysteresisError, match="'other' .* would look ahead"):
            replaced(model, [PATTERN], reference, CLEAN, **where)
    for taken, used in ((MOVING, MOVING), (MOVING, CLEAN), (CLEAN, MOVING)):
        moved = mean_reference(model, taken, [PATTERN])
        with pytest.raises(HysteresisError, match="'query' .* would look ahead"):
            replaced(model, [PATTERN], moved, used, role="query")


def test_where_to_replace_by_one_role_several_a_mask_or_everywhere() -> None:
    model = a_model("LN")
    reference = mean_reference(model, CLEAN, [MLP])
    mask = CLEAN.positions("key") | CLEAN.positions("other")
    found = replaced(model, [MLP], reference, CLEAN, role=["key", "other"])
    assert torch.equal(found, replaced(model, [MLP], reference, CLEAN, positions=mask))
    positions = torch.tensor([1, 3, 4, 5])
    acts = activation(model, MLP, CLEAN)
    mean = torch.stack([acts[CLEAN.positions(NAMES[p])].mean(dim=0) for p in positions])
    torch.testing.assert_close(found, run(model, CLEAN, [by_hand(MLP, mean, positions)]))
    roles = list(CLEAN.role_names)
    everywhere = replaced(model, [MLP], reference, CLEAN)
    assert torch.equal(everywhere, replaced(model, [MLP], reference, CLEAN, role=roles))
    assert not torch.allclose(everywhere, found)


def test_a_site_given_twice_has_the_mean_of_a_site_given_once() -> None:
    model = a_model("LN")
    once, twice = (mean_reference(model, CLEAN, [MLP] * n).values[MLP] for n in (1, 2))
    assert torch.equal(once, twice)


def test_an_empty_list_of_roles_is_refused() -> None:
    reference = mean_reference(a_model("LN"), CLEAN, [MLP])
    with pytest.raises(HysteresisError, match="role"):
        mean_replacement([MLP], reference, CLEAN, role=[])


def test_zeros_are_zero_ablation() -> None:
    model = a_model("LN")
    sites = [MLP, *head_sites(model, 1), PATTERN]
    reference = zero_reference(model, CLEAN, sites)
    hooks = [(site.name, lambda act, hook: torch.zeros_like(act)) for site in sites]
    assert torch.equal(replaced(model, sites, reference, CLEAN), run(model, CLEAN, hooks))


def test_resampled_values_are_another_trials_and_the_same_ones_at_all_sites() -> None:
    model, few = a_model("LN"), CLEAN.select(slice(4))
    # Distinct in every trial, and at every position: what a site holds tells whose it is.
    sites = [Site("blocks.1.attn.hook_z", head) for head in range(4)] + [PATTERN]
    acts = {site: activation(model, site, few) for site in sites}
    drawn = []
    for seed in range(60):
        reference = resampled_reference(model, few, sites, seed=seed)
        sources = set()
        for site in sites:
            distance = (reference.values[site][:, None] - acts[site][None]).flatten(2).norm(dim=2)
            assert (distance.min(dim=1).values < 1e-6).all()
            sources.add(tuple(distance.argmin(dim=1).tolist()))
        assert len(sources) == 1
        drawn.append(torch.tensor(sources.pop()))
    counts = torch.stack([torch.bincount(column, minlength=4) for column in torch.stack(drawn).T])
    assert (counts.diagonal() == 0).all()
    assert (counts[~torch.eye(4, dtype=torch.bool)] >= 8).all(), "expected: 20 of each other trial"
    value = acts[PATTERN][drawn[-1]]
    torch.testing.assert_close(
        replaced(model, [PATTERN], reference, few), run(model, few, [by_hand(PATTERN, value)])
    )


def test_the_mean_of_another_model_is_that_models() -> None:
    model, other = a_model("LN"), a_model("LN", seed=1)
    reference = mean_reference(other, CLEAN, [MLP])
    assert reference.origin["model"] == fingerprint(other) != fingerprint(model)
    mean = activation(other, MLP, CLEAN)[:, -1].mean(dim=0)
    expected = run(model, CLEAN, [by_hand(MLP, mean, slice(-1, None))])
    torch.testing.assert_close(replaced(model, [MLP], reference, CLEAN, role="query"), expected)


def test_lists_of_hooks_add_up() -> None:
    model, head = a_model("LN"), Site("blocks.1.attn.hook_z", head=0)
    both = mean_reference(model, CLEAN, [MLP, head])
    zero = zero_reference(model, CLEAN, [MLP])
    one, two = (mean_replacement([site], both, CLEAN) for site in (MLP, head))
    with torch.no_grad(), intervene(model, one + two):
        added = model(CLEAN.tokens)
    assert torch.equal(added, replaced(model, [MLP, head], both, CLEAN))
    with torch.no_grad(), intervene(model, one + mean_replacement([MLP], zero, CLEAN)):
        last_wins = model(CLEAN.tokens)
    assert torch.equal(last_wins, replaced(model, [MLP], zero, CLEAN))


@pytest.mark.parametrize("name", ["LN", "bfloat16", "GPT-2 bridge"])
@pytest.mark.parametrize("by", ["role", "position"])
def test_means_taken_a_few_trials_at_a_time_are_the_same(
    name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model(name)
    passes: list[int] = []
    run_with_cache = model.run_with_cache

    def counted(*args: Any, **options: Any) -> Any:
        passes.append(1)
        return run_with_cache(*args, **options)

    monkeypatch.setattr(model, "run_with_cache", counted)
    whole = mean_reference(model, MOVING, [MLP], by=by)  # type: ignore[arg-type]
    assert len(passes) == 1
    parts = mean_reference(model, MOVING, [MLP], by=by, max_bytes=1)  # type: ignore[arg-type]
    assert len(passes) == 1 + len(MOVING)
    tolerance = 1e-2 if name == "bfloat16" else 1e-6
    torch.testing.assert_close(parts.values[MLP], whole.values[MLP], atol=tolerance, rtol=tolerance)
    assert dict(parts.origin) == dict(whole.origin)


@pytest.mark.parametrize("name", ["LN", "float64", "bfloat16", "native bridge"])
def test_a_saved_reference_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = a_model(name)
    sites = [*head_sites(model, 1), MLP, PATTERN]
    for reference in (
        mean_reference(model, CLEAN, sites),
        mean_reference(model, MOVING, sites),
        mean_reference(model, CLEAN, sites, by="position"),
        zero_reference(model, CLEAN, sites),
        resampled_reference(model, CLEAN, sites, seed=3),
    ):
        reference.save(tmp_path / "reference.safetensors")
        loaded = Reference.load(str(tmp_path / "reference.safetensors"))
        assert list(loaded.values) == sites
        for site in sites:
            assert loaded.values[site].dtype == reference.values[site].dtype
            assert torch.equal(loaded.values[site], reference.values[site])
        for field in ("by", "role_names", "positions", "origin"):
            assert getattr(loaded, field) == getattr(reference, field)
    assert loaded.origin["seed"] == 3


def test_files_that_are_no_reference_are_named(tmp_path: Path) -> None:
    path = tmp_path / "reference"
    mean_reference(a_model("LN"), CLEAN, [MLP]).save(path)
    whole, tensors = path.read_bytes(), {"0": torch.zeros(2)}
    contents = [b"", b"not safetensors", whole[:-5], whole[: len(whole) // 2]]
    contents += [safetensors.torch.save(tensors)]
    contents += [safetensors.torch.save(tensors, {"reference": text}) for text in ("{", "{}", "[]")]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(HysteresisError, match="reference is not a saved reference"):
            Reference.load(path)
    with pytest.raises(HysteresisError, match="missing is not a saved reference"):
        Reference.load(tmp_path / "missing")
    with pytest.raises(HysteresisError, match="cannot write"):
        mean_reference(a_model("LN"), CLEAN, [MLP]).save(path / "below a file")


def test_the_origin_tells_models_and_trials_apart() -> None:
    model = a_model("LN")
    first = mean_reference(model, CLEAN, [MLP]).origin
    assert first["kind"] == "mean" and first["n_trials"] == len(CLEAN)
    assert mean_reference(model, CLEAN.select(slice(None)), [MLP]).origin == first
    for trials in (OTHER, PLAIN, MOVING, CLEAN.select(slice(5))):
        other = mean_reference(model, trials, [MLP]).origin
        assert (other["model"], other["trials"] == first["trials"]) == (first["model"], False)
    with torch.no_grad():
        model.get_parameter("unembed.b_U")[3] += 1e-3
    other = zero_reference(model, CLEAN, [MLP]).origin
    assert other["kind"] == "zero" and other["trials"] == first["trials"]
    assert other["model"] != first["model"]


def test_another_type_is_refused_and_can_be_converted() -> None:
    model, double = a_model("LN"), a_model("float64")
    reference = mean_reference(double, CLEAN, [MLP])
    with pytest.raises(HysteresisError, match="torch.float64 on cpu cannot stand .* torch.float32"):
        replaced(model, [MLP], reference, CLEAN)
    converted = reference.to(torch.float32)
    assert converted.values[MLP].dtype == torch.float32
    assert reference.values[MLP].dtype == torch.float64
    assert converted.origin == reference.origin and converted.positions == reference.positions
    mean = activation(double, MLP, CLEAN)[:, -1].mean(dim=0).float()
    expected = run(model, CLEAN, [by_hand(MLP, mean, slice(-1, None))])
    found = replaced(model, [MLP], converted, CLEAN, role="query")
    torch.testing.assert_close(found, expected)


def test_what_cannot_be_is_refused_and_leaves_the_model_alone() -> None:
    model = a_model("LN")
    model.train()
    unchanged = left_as_it_was(model)
    short, few = CLEAN.tokens[:, 1:], CLEAN.select(slice(2))
    shorter = Trials(short, CLEAN.contextual, CLEAN.fixed)
    verbs = Trials.of(CLEAN.tokens, CLEAN.contextual, CLEAN.fixed, roles=["verb"] * N_POS)
    empty = Trials(few.tokens, few.contextual, few.fixed, few.roles, (*few.role_names, "never"))
    by_role = mean_reference(model, CLEAN, [MLP])
    by_position = mean_reference(model, PLAIN, [MLP])
    by_trial = resampled_reference(model, CLEAN, [MLP])
    everywhere = torch.ones_like(CLEAN.tokens, dtype=torch.bool)
    too_large = Trials(CLEAN.tokens + D_VOCAB, CLEAN.contextual, CLEAN.fixed)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("no hook point", lambda: mean_reference(model, CLEAN, [mlp_site(2)])),
        ("no hook point", lambda: zero_reference(model, CLEAN, [mlp_site(2)])),
        ("no head 4", lambda: mean_reference(model, CLEAN, [Site(PATTERN.name, 4)])),
        ("no head 4", lambda: resampled_reference(model, CLEAN, [Site(PATTERN.name, 4)])),
        ("lies outside", lambda: mean_reference(model, too_large, [MLP])),
        ("carry no roles", lambda: mean_reference(model, PLAIN, [MLP], by="role")),
        ("max_bytes", lambda: mean_reference(model, CLEAN, [MLP], max_bytes=0)),
        ("no trials", lambda: zero_reference(model, CLEAN.select(slice(0)), [MLP])),
        ("1 trial", lambda: resampled_reference(model, CLEAN.select(slice(1)), [MLP])),
        (
            "one of them",
            lambda: mean_replacement([MLP], by_role, CLEAN, role="query", positions=everywhere),
        ),
        ("positions are", lambda: mean_replacement([MLP], by_role, few, positions=everywhere)),
        ("no value of", lambda: mean_replacement([mlp_site(1)], by_role, CLEAN)),
        ("carry no roles", lambda: mean_replacement([MLP], by_role, PLAIN)),
        ("no position of role 'verb'", lambda: mean_replacement([MLP], by_role, verbs)),
        ("no role 'verb'", lambda: mean_replacement([MLP], by_role, CLEAN, role=["key", "verb"])),
        ("role 'never'", lambda: mean_replacement([MLP], by_role, empty, role="never")),
        ("covers 7 positions", lambda: mean_replacement([MLP], by_position, shorter)),
        ("belongs to other trials", lambda: mean_replacement([MLP], by_trial, few)),
    ]
    for message, call in refused:
        with pytest.raises(HysteresisError, match=message):
            call()
        assert unchanged(), message


def test_a_mean_of_one_activation_is_refused() -> None:
    with pytest.raises(HysteresisError, match="a mean of one activation is that activation"):
        mean_reference(a_model("LN"), PLAIN.select(slice(1)), [MLP])
