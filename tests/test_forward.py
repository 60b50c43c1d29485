"""The stacked forward pass equals `HookedTransformer`'s, in logits and in gradients."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig

from tl_hysteresis.config import ModelConfig
from tl_hysteresis.forward import logits_one_by_one, stacked_logits, unsupported
from tl_hysteresis.models import build_model, hooked_config, stack_parameters

N_VOCAB, N_CTX = 12, 9
SUPPORTED = {
    "default": ModelConfig(),
    "one layer": ModelConfig(n_layers=1),
    "four layers": ModelConfig(n_layers=4, d_model=32),
    "attention only": ModelConfig(attn_only=True),
    "LNPre": ModelConfig(normalization_type="LNPre"),
    "no normalisation": ModelConfig(normalization_type="none"),
    "wide heads": ModelConfig(n_heads=3, d_head=10, d_model=32),
    "relu": ModelConfig(act_fn="relu"),
    "gelu_new": ModelConfig(act_fn="gelu_new"),
    "silu": ModelConfig(act_fn="silu"),
}
UNSUPPORTED = {
    "rotary": ModelConfig(positional_embedding_type="rotary"),
    "RMS": ModelConfig(normalization_type="RMS"),
    "shortformer": ModelConfig(positional_embedding_type="shortformer"),
}


def perturbed_models(settings: ModelConfig, n: int) -> list[HookedTransformer]:
    """Models whose biases and LayerNorm weights are not at their trivial initial values."""
    torch.manual_seed(0)
    config = hooked_config(settings, d_vocab=N_VOCAB, n_ctx=N_CTX)
    models = [build_model(config, seed=seed) for seed in range(n)]
    for model in models:
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return models


def gradient(logits: Tensor, targets: Tensor, parameters: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.flatten(end_dim=1), targets.flatten(), reduction="sum")
    return torch.autograd.grad(loss / targets.shape[1], parameters)[0]


@pytest.mark.parametrize("name", SUPPORTED)
def test_logits_and_gradients_are_the_models_own(name: str) -> None:
    models = perturbed_models(SUPPORTED[name], n=3)
    assert unsupported(models[0].cfg) is None
    tokens, targets = torch.randint(N_VOCAB, (3, 20, N_CTX)), torch.randint(N_VOCAB, (3, 20))
    layout, flat = stack_parameters(models)
    flat.requires_grad_()
    stacked = stacked_logits(layout.split(flat), tokens, models[0].cfg)
    by_stack = gradient(stacked, targets, flat)
    for member, model in enumerate(models):
        alone = model(tokens[member])[:, -1]
        torch.testing.assert_close(stacked[member], alone, atol=1e-5, rtol=0.0)
        model.zero_grad()
        F.cross_entropy(alone, targets[member]).backward()
        own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(by_stack[member], own, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_models_run_one_by_one(name: str) -> None:
    models = perturbed_models(UNSUPPORTED[name], n=2)
    assert unsupported(models[0].cfg) is not None
    tokens = torch.randint(N_VOCAB, (2, 6, N_CTX))
    layout, flat = stack_parameters(models)
    logits = logits_one_by_one(layout.split(flat), tokens, models[1])
    for member, model in enumerate(models):
        assert torch.equal(logits[member], model(tokens[member])[:, -1])


def test_prompts_shorter_than_the_context() -> None:
    models = perturbed_models(ModelConfig(), n=2)
    tokens = torch.randint(N_VOCAB, (2, 6, N_CTX - 4))
    layout, flat = stack_parameters(models)
    logits = stacked_logits(layout.split(flat), tokens, models[0].cfg)
    torch.testing.assert_close(logits[1], models[1](tokens[1])[:, -1], atol=1e-5, rtol=0.0)


# For each feature that changes the function, a value that switches it on.
FEATURES: dict[str, Any] = {
    "n_key_value_heads": 2,
    "parallel_attn_mlp": True,
    "gated_mlp": True,
    "attention_dir": "bidirectional",
    "scale_attn_by_inverse_layer_idx": True,
    "attn_scores_soft_cap": 5.0,
    "output_logits_soft_cap": 5.0,
    "use_qk_norm": True,
    "tie_word_embeddings": True,
    "post_embedding_ln": True,
    "final_rms": True,
    "dtype": torch.bfloat16,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_the_stack_does_not_know_is_never_stacked(feature: str) -> None:
    config = hooked_config(ModelConfig(), d_vocab=N_VOCAB, n_ctx=N_CTX)
    changed = dataclasses.replace(config, **{feature: FEATURES[feature]})
    reason = unsupported(changed)
    assert reason is not None and feature in reason


@pytest.mark.parametrize("settings", [{"use_attn_scale": False}, {"attn_scale": 2.0}])
def test_attention_scale_is_honoured(settings: dict[str, Any]) -> None:
    config = HookedTransformerConfig(
        n_layers=2, d_model=16, n_heads=2, d_head=8, d_mlp=8, n_ctx=N_CTX, d_vocab=N_VOCAB,
        act_fn="relu", device="cpu", **settings,
    )  # fmt: skip
    model = build_model(config, seed=0)
    layout, flat = stack_parameters([model])
    tokens = torch.randint(N_VOCAB, (1, 6, N_CTX))
    logits = stacked_logits(layout.split(flat), tokens, config)
    torch.testing.assert_close(logits[0], model(tokens[0])[:, -1], atol=1e-5, rtol=0.0)
