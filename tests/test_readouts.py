"""Logit parts sum to logits and are TransformerLens's own; head scores equal a slow, plain loop."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.models import build_model
from tl_hysteresis.readouts import LogitAttribution, direct_logit_attribution, head_scores
from tl_hysteresis.sites import HookedModel
from tl_hysteresis.tasks import AssociativeRecall, Trials, draw

SMALL: dict[str, Any] = {
    **{"n_layers": 2, "d_model": 12, "n_heads": 3, "d_head": 4, "d_mlp": 10},
    **{"d_vocab": 20, "n_ctx": 9, "act_fn": "gelu", "normalization_type": "LN", "device": "cpu"},
}
MODELS: dict[str, dict[str, Any]] = {
    "LN": {},
    "LNPre": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS"},
    "RMSPre": {"normalization_type": "RMSPre"},
    "no norm": {"normalization_type": None},
    "final RMS": {"final_rms": True},
    "attention only": {"attn_only": True, "d_mlp": None},
    "one layer": {"n_layers": 1},
    "four layers": {"n_layers": 4},
    "rotary": {"positional_embedding_type": "rotary", "rotary_dim": 4},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "wide heads": {"d_head": 7},
    "grouped queries": {"n_heads": 4, "n_key_value_heads": 2},
    "parallel": {"parallel_attn_mlp": True},
    "other outputs": {"d_vocab_out": 31},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16 RMS": {"dtype": torch.bfloat16, "normalization_type": "RMS"},
    "large eps": {"eps": 0.5},
}
HUGGING_FACE: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "GPT2LMHeadModel": (GPT2LMHeadModel, GPT2Config, {}),
    "LlamaForCausalLM": (
        *(LlamaForCausalLM, LlamaConfig),
        {"intermediate_size": 8, "num_key_value_heads": 1},
    ),
    "GemmaForCausalLM": (
        *(GemmaForCausalLM, GemmaConfig),
        {"intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 8},
    ),
}


def randomised(model: HookedModel) -> None:
    """No parameter is left at 0 or 1, where a forgotten one would not show."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.4 * noise.to(parameter.dtype))


def a_model(name: str = "LN", **settings: Any) -> HookedTransformer:
    config = HookedTransformerConfig(**{**SMALL, **MODELS[name], **settings})
    model = build_model(config, seed=0)
    randomised(model)
    return model


def a_native_bridge(**settings: Any) -> TransformerBridge:
    model = TransformerBridge.boot_native({**SMALL, **settings}).eval()
    randomised(model)
    return model


def a_hugging_face_bridge(architecture: str, *, folded: bool = False) -> TransformerBridge:
    model_class, config_class, settings = HUGGING_FACE[architecture]
    common = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    config = config_class(
        **{**common, "vocab_size": 20, "max_position_embeddings": 9, "pad_token_id": 0, **settings}
    )
    bridge = build_bridge_from_module(
        model_class(config), architecture=architecture, hf_config=config, device="cpu"
    )
    assert isinstance(bridge, TransformerBridge)
    randomised(bridge)
    if folded:
        bridge.enable_compatibility_mode(disable_warnings=True)
    return bridge.eval()


def random_trials(n: int = 6, *, length: int = 9, d_vocab: int = 20, d_out: int = 20) -> Trials:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(d_vocab, (n, length), generator=generator)
    contextual, fixed = torch.randint(d_out, (2, n), generator=generator)
    return Trials(tokens, contextual, fixed)


TRIALS = random_trials()


def check_parts(model: HookedModel, trials: Trials = TRIALS) -> LogitAttribution:
    found = direct_logit_attribution(model, trials)
    with torch.no_grad():
        logits = model(trials.tokens)[:, -1]
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}[logits.dtype]
    for parts, answers in ((found.contextual, trials.contextual), (found.fixed, trials.fixed)):
        assert parts.dtype == torch.float64 and not parts.requires_grad
        assert parts.shape == (len(found.components), len(trials))
        expected = logits.double().gather(1, answers[:, None])[:, 0]
        scale = parts.abs().sum(dim=0).max().item()
        torch.testing.assert_close(parts.sum(dim=0), expected, rtol=0.0, atol=tolerance * scale)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_parts_sum_to_the_logits(name: str) -> None:
    model = a_model(name)
    found = check_parts(model, random_trials(d_out=31 if name == "other outputs" else 20))
    expected = ["embed"]
    for layer in range(model.cfg.n_layers):
        expected += [f"L{layer}H{head}" for head in range(model.cfg.n_heads)]
        expected += [f"L{layer} attention bias"]
        expected += [] if model.cfg.attn_only else [f"L{layer} MLP"]
    assert list(found.components) == [*expected, "bias"]
    assert bool((found.contextual.abs().amax(dim=1) > 0).all())


@pytest.mark.parametrize("kind", ["LN", "LNPre", "RMS", "RMSPre", None])
@pytest.mark.parametrize("attn_only", [False, True])
def test_parts_sum_to_the_logits_of_a_native_bridge(kind: str | None, attn_only: bool) -> None:
    check_parts(a_native_bridge(normalization_type=kind, attn_only=attn_only))


@pytest.mark.parametrize("architecture", HUGGING_FACE)
@pytest.mark.parametrize("folded", [False, True])
def test_parts_sum_to_the_logits_of_a_hugging_face_bridge(architecture: str, folded: bool) -> None:
    found = check_parts(a_hugging_face_bridge(architecture, folded=folded))
    assert found.components[:4] == ("embed", "L0H0", "L0H1", "L0 attention bias")


@pytest.mark.parametrize("kind", ["LNPre", "RMSPre", None])
def test_parts_are_transformer_lens_s_own_where_those_are_right(kind: str | None) -> None:
    model = a_model(normalization_type=kind, dtype=torch.float64)
    found = direct_logit_attribution(model, TRIALS)
    with torch.no_grad():
        _, cache = model.run_with_cache(TRIALS.tokens)
        heads, labels = cache.stack_head_results(pos_slice=-1, return_labels=True)
        others, names = cache.decompose_resid(pos_slice=-1, mode="mlp", return_labels=True)
        pre = cache["resid_pre", 0][:, -1]
        stack = torch.cat([heads, others[[name.endswith("mlp_out") for name in names]], pre[None]])
        order = [*labels, "L0 MLP", "L1 MLP", "embed"]
        rows = [found.components.index(name) for name in order]
        for parts, answers in (
            (found.contextual, TRIALS.contextual),
            (found.fixed, TRIALS.fixed),
        ):
            theirs = cache.logit_attrs(stack, answers, pos_slice=-1, has_batch_dim=True)
            torch.testing.assert_close(parts[rows], theirs)
        theirs = cache.logit_attrs(stack, TRIALS.contextual, TRIALS.fixed, pos_slice=-1)
        torch.testing.assert_close(found.margin[rows], theirs)


@pytest.mark.parametrize("kind", ["LN", "RMS"])
def test_weights_of_the_final_norm_count_as_when_folded_into_the_unembedding(kind: str) -> None:
    model = a_model(normalization_type=kind, dtype=torch.float64)
    before = direct_logit_attribution(model, TRIALS)
    model.load_and_process_state_dict(
        model.state_dict(),
        fold_ln=True,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )
    assert model.cfg.normalization_type == kind + "Pre"
    after = direct_logit_attribution(model, TRIALS)
    # TransformerLens folds in float32.
    torch.testing.assert_close(after.contextual, before.contextual, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(after.fixed, before.fixed, rtol=0.0, atol=1e-5)


def test_a_part_is_what_the_logit_loses_without_it_when_the_norm_is_frozen() -> None:
    """LN is frozen by hooks, so that a component can be taken out of the stream for real."""
    model = a_model(dtype=torch.float64)
    found = direct_logit_attribution(model, TRIALS)
    _, cache = model.run_with_cache(TRIALS.tokens)
    name = "blocks.1.attn.hook_z"

    def without(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, 2] = 0.0
        return z

    def frozen(scale: Tensor, hook: object) -> Tensor:
        return cache["ln_final.hook_scale"]

    def the_mlp(output: Tensor, hook: object) -> Tensor:
        return cache["blocks.1.hook_mlp_out"]

    hooks = [(name, without), ("ln_final.hook_scale", frozen), ("blocks.1.hook_mlp_out", the_mlp)]
    with torch.no_grad():
        lost = logit_margin(model(TRIALS.tokens), TRIALS) - logit_margin(
            model.run_with_hooks(TRIALS.tokens, fwd_hooks=list(hooks)), TRIALS
        )
    torch.testing.assert_close(found.margin[found.components.index("L1H2")], lost)


def test_tables() -> None:
    found = direct_logit_attribution(a_model(), TRIALS)
    table, per_trial = found.table, found.per_trial()
    assert list(table.columns) == ["component", "contextual", "fixed", "margin"]
    assert table["component"].tolist() == list(found.components)
    assert list(per_trial.columns) == ["trial", "component", "contextual", "fixed", "margin"]
    assert len(per_trial) == len(TRIALS) * len(found.components)
    for column in ("contextual", "fixed", "margin"):
        wide = per_trial.pivot(index="component", columns="trial", values=column)
        parts = getattr(found, column).numpy()
        np.testing.assert_array_equal(wide.loc[list(found.components)].to_numpy(), parts)
        np.testing.assert_allclose(table[column], parts.mean(axis=1))
    np.testing.assert_allclose(table["margin"], table["contextual"] - table["fixed"])


def test_the_run_that_is_attributed_is_the_one_with_the_hooks_of_the_caller() -> None:
    model = a_model()
    zero = ("blocks.0.attn.hook_z", lambda z, hook: 0.0 * z)
    with model.hooks(fwd_hooks=[zero]):
        found = check_parts(model)
    assert not found.contextual[found.components.index("L0H1")].any()


def test_capped_logits_are_refused() -> None:
    for model in (a_model(output_logits_soft_cap=2.0), a_native_bridge(output_logits_soft_cap=2.0)):
        with pytest.raises(HysteresisError, match=r"the parts miss the logits by up to \d"):
            direct_logit_attribution(model, TRIALS)


def test_norms_after_the_attention_are_refused() -> None:
    model = a_model(normalization_type="RMS", use_normalization_before_and_after=True)
    with pytest.raises(HysteresisError, match=r"miss the output of the attention of layer 0 by"):
        direct_logit_attribution(model, TRIALS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("blocks.0.hook_attn_out", "the output of the attention of layer 0"),
        ("blocks.0.hook_resid_mid", "the logits"),
        ("blocks.1.hook_resid_post", "the logits"),
        ("ln_final.hook_normalized", "the logits"),
        ("unembed.hook_out", "the logits"),
    ],
)
def test_writes_that_no_component_makes_are_refused(
    name: str, what: str, dtype: torch.dtype
) -> None:
    model = a_model(dtype=dtype)
    noise = torch.randn(20, generator=torch.Generator().manual_seed(0)).to(dtype)

    def write(activation: Tensor, hook: object) -> Tensor:
        return activation + 2.0 * noise[: activation.shape[-1]]

    with (
        model.hooks(fwd_hooks=[(name, write)]),
        pytest.raises(HysteresisError, match=f"the parts miss {what} by up to"),
    ):
        direct_logit_attribution(model, TRIALS)


def test_values_that_are_not_numbers_are_refused() -> None:
    model = a_model()
    with torch.no_grad():
        model.b_U[int(TRIALS.fixed[0])] = torch.nan
    with pytest.raises(HysteresisError, match="by up to nan"):
        direct_logit_attribution(model, TRIALS)


def test_trials_that_the_model_cannot_run_are_refused() -> None:
    for function in (direct_logit_attribution, head_scores):
        with pytest.raises(HysteresisError, match="no trials"):
            function(a_model(), TRIALS.select(slice(0)))
        with pytest.raises(HysteresisError, match="trials of 12 tokens"):
            function(a_model(), random_trials(length=12))
        with pytest.raises(HysteresisError, match="outside a vocabulary"):
            function(a_model(), random_trials(d_vocab=40))


def slow_scores(
    patterns: dict[str, Tensor], trials: Trials, role: str | None = None
) -> list[tuple[int, int, float, float, float]]:
    rows = []
    for layer, pattern in enumerate(patterns.values()):
        for head in range(pattern.shape[1]):
            previous, same, prefix = [], [], []
            for trial, tokens in enumerate(trials.tokens.tolist()):
                for p, token in enumerate(tokens):
                    if role is not None and not trials.positions(role)[trial, p]:
                        continue
                    row = pattern[trial, head, p].tolist()
                    copies = [j for j in range(p) if tokens[j] == token]
                    after = [j + 1 for j in copies if j + 1 < p]
                    previous += [row[p - 1]] if p else []
                    same += [sum(row[j] for j in copies)] if copies else []
                    prefix += [sum(row[j] for j in after)] if after else []
            means = (sum(values) / len(values) for values in (previous, same, prefix))
            rows.append((layer, head, *means))
    return rows


def with_patterns(model: HookedModel, patterns: dict[str, Tensor]) -> Any:
    """The model with these attention patterns written over its own."""

    def hook(pattern: Tensor) -> Any:
        return lambda activation, hook: pattern

    return model.hooks(fwd_hooks=[(name, hook(pattern)) for name, pattern in patterns.items()])


def random_patterns(trials: Trials, n_heads: int = 3) -> dict[str, Tensor]:
    n_trials, n_pos = trials.tokens.shape
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, n_trials, n_heads, n_pos, n_pos, generator=generator)
    scores = scores.masked_fill(torch.ones(n_pos, n_pos).triu(1).bool(), -torch.inf)
    return {
        f"blocks.{layer}.attn.hook_pattern": pattern
        for layer, pattern in enumerate(scores.softmax(dim=-1))
    }


@pytest.mark.parametrize("d_vocab", [2, 4, 20])
@pytest.mark.parametrize("role", [None, "odd"])
def test_head_scores_are_those_of_a_plain_loop(d_vocab: int, role: str | None) -> None:
    trials = random_trials(d_vocab=d_vocab)
    roles = (torch.arange(9) % 2).expand(6, 9).clone()
    trials = Trials(trials.tokens, trials.contextual, trials.fixed, roles, ("even", "odd"))
    model, patterns = a_model(), random_patterns(trials)
    with with_patterns(model, patterns):
        found = head_scores(model, trials, role=role)
    columns = ["layer", "head", "previous_token", "same_token", "prefix_matching"]
    expected = pd.DataFrame(slow_scores(patterns, trials, role), columns=columns)
    pd.testing.assert_frame_equal(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_head_scores_of_the_model_s_own_patterns(name: str) -> None:
    check_own_patterns(a_model(name))


@pytest.mark.parametrize("architecture", HUGGING_FACE)
def test_head_scores_of_bridges(architecture: str) -> None:
    check_own_patterns(a_hugging_face_bridge(architecture))
    check_own_patterns(a_native_bridge())


def check_own_patterns(model: HookedModel) -> None:
    _, cache = model.run_with_cache(TRIALS.tokens)
    patterns = {
        name: cache[name].detach()
        for name in (f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers))
    }
    found = head_scores(model, TRIALS)
    np.testing.assert_allclose(found.to_numpy(), slow_scores(patterns, TRIALS), rtol=1e-5)


def test_head_scores_of_hand_made_heads() -> None:
    """A previous-token head, a head that finds its own copies, and an induction head."""
    tokens = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6, 7]])
    trials = Trials(tokens, torch.tensor([5]), torch.tensor([6]))
    pattern = torch.zeros(1, 3, 9, 9)
    pattern[0, :, 0, 0] = 1.0
    for p in range(1, 9):
        pattern[0, 0, p, p - 1] = 1.0
        # The copies are 3 before and, from position 6, 6 before; half an eye on each.
        copies = [j for j in (p - 3, p - 6) if j >= 0]
        for j in copies:
            pattern[0, 1, p, j] = pattern[0, 2, p, j + 1] = 1.0 / len(copies)
    zeros = torch.zeros(1, 3, 9, 9)
    model = a_model()
    patterns = dict(zip(random_patterns(trials), (zeros, pattern), strict=True))
    with with_patterns(model, patterns):
        found = head_scores(model, trials).set_index(["layer", "head"])
    assert found.loc[0].to_numpy().tolist() == [[0.0] * 3] * 3
    assert found.loc[1].to_numpy().tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_a_copy_directly_before_has_no_token_after_it_but_the_query_itself() -> None:
    tokens = torch.tensor([[1, 2, 2, 3, 1]])
    trials = Trials(tokens, torch.tensor([5]), torch.tensor([6]))
    pattern = torch.zeros(1, 3, 5, 5)
    pattern[:, :, 2, 2] = 1.0  # not counted: the query itself
    pattern[:, :, 4, 1] = 0.25  # counted: the token after the first 1
    model = a_model()
    with with_patterns(model, dict.fromkeys(random_patterns(trials), pattern)):
        found = head_scores(model, trials)
    assert found["prefix_matching"].tolist() == [0.25] * 6
    assert found["same_token"].tolist() == [0.0] * 6


def test_scores_of_the_task_are_read_at_the_query() -> None:
    trials = draw(AssociativeRecall(4, 6, 3), 8, seed=0, stream="test", index=0)
    model = a_model(n_ctx=7)
    patterns = random_patterns(trials)
    with with_patterns(model, patterns):
        found, at_query = head_scores(model, trials), head_scores(model, trials, role="query")
    scores = ["same_token", "prefix_matching"]
    pd.testing.assert_frame_equal(found[scores], at_query[scores])
    value = patterns["blocks.1.attn.hook_pattern"][:, :, -1].transpose(1, 2)
    expected = value[trials.positions("matched_value")].mean(dim=0)
    np.testing.assert_allclose(found.query("layer == 1")["prefix_matching"], expected, rtol=1e-5)


def test_undefined_scores_are_refused() -> None:
    def one(*tokens: int, roles: list[int] | None = None) -> Trials:
        known = None if roles is None else torch.tensor([roles])
        answer = torch.tensor([0])
        return Trials(torch.tensor([tokens]), answer, answer, known, ("first", "rest"))

    model = a_model()
    for trials, message in (
        (one(1), "previous_token is undefined: no position has one before it"),
        (one(1, 2, 3), "same_token is undefined: no position repeats a token of its trial"),
        (one(1, 2, 2), "prefix_matching is undefined: no position repeats .* with another between"),
    ):
        with pytest.raises(HysteresisError, match=message):
            head_scores(model, trials)
    trials = one(1, 2, 1, 3, roles=[0, 0, 1, 0])
    assert len(head_scores(model, trials, role="rest")) == 6
    with pytest.raises(HysteresisError, match="no position with the role 'first' repeats a token"):
        head_scores(model, trials, role="first")
    with pytest.raises(HysteresisError, match="no role 'verb'"):
        head_scores(model, trials, role="verb")
    with pytest.raises(HysteresisError, match="carry no roles"):
        head_scores(model, TRIALS, role="rest")


def state_of(model: HookedModel) -> tuple[list[bool], dict[str, list[Any]], list[Tensor]]:
    modes = [module.training for module in model.modules()]
    hooks = {name: list(point.fwd_hooks) for name, point in model.hook_dict.items()}
    return modes, hooks, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_the_model_is_left_as_it_was(kind: str) -> None:
    model: HookedModel = a_model() if kind == "hooked" else a_native_bridge()
    model.train()
    model.blocks[0].eval()
    seen: list[bool] = []
    spoil = {"on": False}

    def hook(activation: Tensor, hook: object) -> Tensor:
        seen.append(model.training or torch.is_grad_enabled())
        if spoil["on"]:
            raise RuntimeError("spoilt")
        return activation

    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", hook)]):
        modes, hooks, values = state_of(model)

        def same() -> bool:
            found = state_of(model)
            return (modes, hooks) == found[:2] and all(map(torch.equal, values, found[2]))

        direct_logit_attribution(model, TRIALS)
        head_scores(model, TRIALS)
        assert same()
        with pytest.raises(HysteresisError):
            direct_logit_attribution(model, random_trials(d_vocab=40))
        with pytest.raises(HysteresisError):
            head_scores(model, random_trials(length=1))
        spoil["on"] = True
        for function in (direct_logit_attribution, head_scores):
            with pytest.raises(RuntimeError, match="spoilt"):
                function(model, TRIALS)
        assert same()
    assert seen and not any(seen)
    assert torch.is_grad_enabled()
