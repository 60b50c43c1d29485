"""The forward pass of a stack of models: `HookedTransformer`'s, at the last position only.

A prompt is answered at its last position, so in the last block only keys and values are computed
for the others. LayerNorm's weights are folded into the matrix that follows, at each step anew: it
is exact and saves a pass over the activations. Tests hold both against `HookedTransformer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig

Parameters = Mapping[str, Tensor]
"""Parameters of a stack by TransformerLens's names, each with a leading `member` axis."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
}

# The settings that the stacked pass understands. Any other setting of a config must stand at its
# default, or the models are run one by one: a feature that is not known here is never half applied.
_UNDERSTOOD = {
    *("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab", "d_vocab_out", "n_ctx"),
    *("act_fn", "normalization_type", "attn_only", "eps", "attn_scale", "use_attn_scale"),
    *("device", "seed", "init_mode", "initializer_range", "init_weights", "model_name", "n_params"),
    # These add hook points or concern text, and leave the function as it is.
    *("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in"),
    *("use_hook_tokens", "default_prepend_bos", "tokenizer_name", "tokenizer_prepends_bos"),
}


def unsupported(config: HookedTransformerConfig) -> str | None:
    """Why the stacked pass cannot run this config; None if it can.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import hooked_config
        >>> rotary = ModelConfig(positional_embedding_type="rotary")
        >>> unsupported(hooked_config(rotary, d_vocab=32, n_ctx=17))
        "positional_embedding_type = 'rotary'"
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _UNDERSTOOD and value != field.default:
            return f"{field.name} = {value!r}"
    if config.normalization_type not in ("LN", "LNPre", None):
        return f"normalization_type = {config.normalization_type!r}"
    if not config.attn_only and config.act_fn not in ACTIVATIONS:
        return f"act_fn = {config.act_fn!r}"
    return None


def stacked_logits(
    parameters: Parameters, tokens: Int[Tensor, "member trial pos"], config: HookedTransformerConfig
) -> Float[Tensor, "member trial d_vocab"]:
    """Logits of each member at the last position of its own prompts.

    Args:
        parameters: each `[member, *shape]`; differentiable in them.
        tokens: prompts of each member.
        config: the models' common config, for which `unsupported` returns None.
    """
    n_members, n_trials, n_pos = tokens.shape
    scale = 1.0 / config.attn_scale if config.use_attn_scale else 1.0
    vocabulary = config.d_vocab * torch.arange(n_members, device=tokens.device)
    embedded = F.embedding(
        tokens + vocabulary[:, None, None], parameters["embed.W_E"].flatten(end_dim=1)
    )
    residual = embedded + parameters["pos_embed.W_pos"][:, None, :n_pos]

    for layer in range(config.n_layers):
        block = f"blocks.{layer}."
        is_last = layer == config.n_layers - 1
        normalized = _normalize(residual, config)
        if is_last:
            residual = residual[:, :, -1:]
        query, key, value = (
            _heads(
                _linear(
                    # Only the last position asks in the last block; all of them answer.
                    normalized[:, :, -1:] if is_last and letter == "Q" else normalized,
                    *_folded(
                        rearrange(
                            parameters[f"{block}attn.W_{letter}"],
                            "member head d_model d_head -> member d_model (head d_head)",
                        ),
                        rearrange(
                            parameters[f"{block}attn.b_{letter}"],
                            "member head d_head -> member (head d_head)",
                        ),
                        parameters,
                        f"{block}ln1",
                    ),
                ),
                config.n_heads,
            )
            for letter in "QKV"
        )
        z = F.scaled_dot_product_attention(query, key, value, is_causal=not is_last, scale=scale)
        residual = residual + _linear(
            rearrange(z, "(m trial) head pos d_head -> m trial pos (head d_head)", m=n_members),
            parameters[f"{block}attn.W_O"].flatten(start_dim=1, end_dim=2),
            parameters[f"{block}attn.b_O"],
        )
        if not config.attn_only:
            hidden = _linear(
                _normalize(residual, config),
                *_folded(
                    parameters[f"{block}mlp.W_in"],
                    parameters[f"{block}mlp.b_in"],
                    parameters,
                    f"{block}ln2",
                ),
            )
            residual = residual + _linear(
                ACTIVATIONS[str(config.act_fn)](hidden),
                parameters[f"{block}mlp.W_out"],
                parameters[f"{block}mlp.b_out"],
            )

    unembed = _folded(parameters["unembed.W_U"], parameters["unembed.b_U"], parameters, "ln_final")
    return _linear(_normalize(residual, config), *unembed)[:, :, -1]


def logits_one_by_one(
    parameters: Parameters, tokens: Int[Tensor, "member trial pos"], model: HookedTransformer
) -> Float[Tensor, "member trial d_vocab"]:
    """The same by the model's own forward pass, one member after another, for any config."""
    return torch.stack(
        [
            torch.func.functional_call(
                model,
                {name: value[member] for name, value in parameters.items()},
                (tokens[member],),
            )[:, -1]
            for member in range(len(tokens))
        ]
    )


def _linear(
    x: Float[Tensor, "member trial pos d_in"],
    weight: Float[Tensor, "member d_in d_out"],
    bias: Float[Tensor, "member d_out"],
) -> Float[Tensor, "member trial pos d_out"]:
    """`x @ weight + bias` of each member, as one batched matrix product."""
    flat = torch.baddbmm(bias[:, None], x.flatten(start_dim=1, end_dim=2), weight)
    return flat.view(*x.shape[:-1], -1)


def _folded(
    weight: Float[Tensor, "member d_in d_out"],
    bias: Float[Tensor, "member d_out"],
    parameters: Parameters,
    norm: str,
) -> tuple[Float[Tensor, "member d_in d_out"], Float[Tensor, "member d_out"]]:
    """Weight and bias with the scale and shift of the LayerNorm before them multiplied in."""
    if f"{norm}.w" not in parameters:
        return weight, bias
    scale, shift = parameters[f"{norm}.w"], parameters[f"{norm}.b"]
    return scale[:, :, None] * weight, bias + torch.bmm(shift[:, None], weight)[:, 0]


def _normalize(
    x: Float[Tensor, "member trial pos d_model"], config: HookedTransformerConfig
) -> Float[Tensor, "member trial pos d_model"]:
    if config.normalization_type is None:
        return x
    return F.layer_norm(x, x.shape[-1:], eps=config.eps)


def _heads(
    x: Float[Tensor, "member trial pos d_heads"], heads: int
) -> Float[Tensor, "member_trial head pos d_head"]:
    return rearrange(
        x, "member trial pos (head d_head) -> (member trial) head pos d_head", head=heads
    )
