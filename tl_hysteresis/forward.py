"""The forward pass of a stack of models: `HookedTransformer`'s, at the last position only.

What is exact is exploited. A prompt is answered at its last position, so in the last block the
other positions are only attended to; the first block sees few different vectors; LayerNorm's
weights are folded, at each step anew, into the matrix that follows. Tests hold logits and gradients
against `HookedTransformer`.
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
    *(
        "dtype",
        "device",
        "seed",
        "init_mode",
        "initializer_range",
        "init_weights",
        "model_name",
        "n_params",
    ),
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
    if config.dtype not in (torch.float32, torch.float64):
        return f"dtype = {config.dtype}"
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
    n_pos = tokens.shape[2]
    embedding = parameters["embed.W_E"][:, :, None] + parameters["pos_embed.W_pos"][:, None, :n_pos]
    residual = _look_up(embedding, tokens)
    for layer in range(config.n_layers):
        block = _block(parameters, layer)
        if layer == config.n_layers - 1:
            z = _attend_from_last(block, residual, config)
            residual = residual[:, :, -1:]
        elif layer == 0 and config.d_vocab < tokens.shape[1]:
            # The first block sees no more than d_vocab * pos different vectors: its queries, keys
            # and values are computed once for each, and looked up.
            z = _attend(_look_up(_queries_keys_values(block, embedding, config), tokens), config)
        else:
            z = _attend(_queries_keys_values(block, residual, config), config)
        residual = _add_linear(
            residual, z, block["attn.W_O"].flatten(start_dim=1, end_dim=2), block["attn.b_O"]
        )
        if not config.attn_only:
            hidden = _linear(
                _normalize(residual, config),
                *_folded(block["mlp.W_in"], block["mlp.b_in"], block, "ln2"),
            )
            activated = ACTIVATIONS[str(config.act_fn)](hidden)
            residual = _add_linear(residual, activated, block["mlp.W_out"], block["mlp.b_out"])
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


def _block(parameters: Parameters, layer: int) -> Parameters:
    """One block's parameters, by their names within it."""
    prefix = f"blocks.{layer}."
    return {
        name.removeprefix(prefix): value
        for name, value in parameters.items()
        if name.startswith(prefix)
    }


def _look_up(
    table: Float[Tensor, "member d_vocab pos d"], tokens: Int[Tensor, "member trial pos"]
) -> Float[Tensor, "member trial pos d"]:
    """The row of each member's own table that belongs to each token at its position."""
    n_members, d_vocab, n_pos, _ = table.shape
    member = torch.arange(n_members, device=tokens.device)[:, None, None]
    position = torch.arange(n_pos, device=tokens.device)
    index = (member * d_vocab + tokens) * n_pos + position
    return F.embedding(index, table.flatten(end_dim=2))


def _queries_keys_values(
    block: Parameters,
    residual: Float[Tensor, "member row pos d_model"],
    config: HookedTransformerConfig,
) -> Float[Tensor, "member row pos d_qkv"]:
    """Queries, keys and values of all heads side by side, by one matrix product."""
    weight = torch.cat([_flat_heads(block[f"attn.W_{letter}"]) for letter in "QKV"], dim=2)
    bias = torch.cat([block[f"attn.b_{letter}"].flatten(start_dim=1) for letter in "QKV"], dim=1)
    return _linear(_normalize(residual, config), *_folded(weight, bias, block, "ln1"))


def _attend(
    queries_keys_values: Float[Tensor, "member trial pos d_qkv"], config: HookedTransformerConfig
) -> Float[Tensor, "member trial pos d_heads"]:
    """Causal attention of every position to those before it: all heads' outputs side by side."""
    n_members, _, n_pos, _ = queries_keys_values.shape
    query, key, value = rearrange(
        queries_keys_values,
        "member trial pos (qkv head d_head) -> qkv (member trial head) pos d_head",
        qkv=3,
        head=config.n_heads,
    ).unbind()
    later = torch.full((n_pos, n_pos), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    scores = torch.baddbmm(later[None], query, key.transpose(1, 2), alpha=_scale(config))
    return rearrange(
        torch.bmm(scores.softmax(dim=-1), value),
        "(member trial head) pos d_head -> member trial pos (head d_head)",
        member=n_members,
        head=config.n_heads,
    )


def _attend_from_last(
    block: Parameters,
    residual: Float[Tensor, "member trial pos d_model"],
    config: HookedTransformerConfig,
) -> Float[Tensor, "member trial 1 d_heads"]:
    """Attention of the last position to all: the outputs of all heads side by side.

    With one query a trial it is cheaper to take the query into the stream's space than all keys
    into the head's, (W_Q x) . (W_K y) = (W_K^T W_Q x) . y, and to average the stream before W_V
    than after. The key's bias moves all scores of a query alike and drops out of the softmax.
    """
    n_members, heads = len(residual), config.n_heads
    stream, last = _normalize(residual, config), _normalize(residual[:, :, -1:], config)
    (query_weight, query_bias), (key_weight, _), (value_weight, value_bias) = (
        _folded(
            _flat_heads(block[f"attn.W_{letter}"]),
            block[f"attn.b_{letter}"].flatten(start_dim=1),
            block,
            "ln1",
        )
        for letter in "QKV"
    )
    query = _linear(last, query_weight, query_bias)
    by_head = "member d_model (head d_head) -> (member head) d_model d_head"
    query = torch.bmm(
        rearrange(query, "member trial 1 (head d_head) -> (member head) trial d_head", head=heads),
        rearrange(key_weight, by_head, head=heads).transpose(1, 2),
    )
    query = rearrange(query, "(member head) trial d -> (member trial) head d", member=n_members)
    stream = stream.flatten(end_dim=1)
    scores = torch.bmm(_scale(config) * query, stream.transpose(1, 2))
    attended = torch.bmm(scores.softmax(dim=-1), stream)
    z = torch.baddbmm(
        rearrange(value_bias, "member (head d_head) -> (member head) 1 d_head", head=heads),
        rearrange(attended, "(member trial) head d -> (member head) trial d", member=n_members),
        rearrange(value_weight, by_head, head=heads),
    )
    return rearrange(z, "(member head) trial d_head -> member trial 1 (head d_head)", head=heads)


def _scale(config: HookedTransformerConfig) -> float:
    return 1.0 / config.attn_scale if config.use_attn_scale else 1.0


def _flat_heads(
    weight: Float[Tensor, "member head d_model d_head"],
) -> Float[Tensor, "member d_model d_heads"]:
    """The matrices of all heads side by side."""
    return rearrange(weight, "member head d_model d_head -> member d_model (head d_head)")


def _linear(
    x: Float[Tensor, "member trial pos d_in"],
    weight: Float[Tensor, "member d_in d_out"],
    bias: Float[Tensor, "member d_out"],
) -> Float[Tensor, "member trial pos d_out"]:
    """`x @ weight + bias` of each member, as one batched matrix product."""
    flat = torch.baddbmm(bias[:, None], x.flatten(start_dim=1, end_dim=2), weight)
    return flat.view(*x.shape[:-1], -1)


def _add_linear(
    residual: Float[Tensor, "member trial pos d_model"],
    x: Float[Tensor, "member trial pos d_in"],
    weight: Float[Tensor, "member d_in d_model"],
    bias: Float[Tensor, "member d_model"],
) -> Float[Tensor, "member trial pos d_model"]:
    """`residual + x @ weight + bias`, the first sum taken within the matrix product."""
    flat, rows = (y.flatten(start_dim=1, end_dim=2) for y in (residual, x))
    return torch.baddbmm(flat, rows, weight).add_(bias[:, None]).view(residual.shape)


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
