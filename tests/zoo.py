"""Models of many kinds, none of them trained here, and trials for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.model_bridge import TransformerBridge

from tl_hysteresis.models import build_model
from tl_hysteresis.sites import HookedModel
from tl_hysteresis.tasks import Trials

D_VOCAB, N_POS = 20, 7
Model = TypeVar("Model", bound=HookedModel)

SMALL: dict[str, Any] = {
    **{"n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 4, "d_mlp": 24, "act_fn": "gelu"},
    **{"d_vocab": D_VOCAB, "n_ctx": 9, "normalization_type": "LN", "device": "cpu"},
}
KINDS: dict[str, dict[str, Any]] = {
    "LN": {},
    "1 layer": {"n_layers": 1},
    "4 layers": {"n_layers": 4},
    "attention only": {"attn_only": True},
    "LNPre": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS"},
    "no norm": {"normalization_type": None},
    "rotary": {"positional_embedding_type": "rotary", "rotary_dim": 4},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "alibi": {"positional_embedding_type": "alibi"},
    "d_head 3": {"d_head": 3},
    "grouped": {"n_key_value_heads": 2},
    "ungrouped": {"n_key_value_heads": 2, "ungroup_grouped_query_attention": True},
    "norms after": {"use_normalization_before_and_after": True, "normalization_type": "RMS"},
    "sinks": {"use_attention_sinks": True},
    "parallel": {"parallel_attn_mlp": True},
    "gated": {"gated_mlp": True},
    "soft cap": {"output_logits_soft_cap": 5.0, "attn_scores_soft_cap": 5.0},
    "local": {"use_local_attn": True, "window_size": 3, "attn_types": ["global", "local"]},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
}
BRIDGES = ("native bridge", "GPT-2 bridge")


def hooked(name: str, seed: int = 0) -> HookedTransformer:
    """A `HookedTransformer` whose every parameter matters: none is at its initial 0 or 1."""
    return _stirred(build_model(HookedTransformerConfig(**{**SMALL, **KINDS[name]}), seed=seed))


def bridge(name: str, seed: int = 0) -> TransformerBridge:
    """A `TransformerBridge`, in training mode as TransformerLens makes them."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
    from transformers import GPT2Config, GPT2LMHeadModel

    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        if name == "native bridge":
            return _stirred(TransformerBridge.boot_native({**SMALL, "seed": seed}))
        config = GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=D_VOCAB, n_positions=9)
        return _stirred(
            build_bridge_from_module(
                GPT2LMHeadModel(config),
                architecture="GPT2LMHeadModel",
                hf_config=config,
                device="cpu",
            )
        )


def twin(of: TransformerBridge) -> HookedTransformer:
    """The `HookedTransformer` with a bridge's weights; the tests hold their logits equal."""
    # A GPT-2 config says "gelu_new", and a native one what it was given.
    shape = {**SMALL, "act_fn": of.cfg.act_fn, "d_mlp": of.cfg.d_mlp}
    model = build_model(HookedTransformerConfig(**shape), seed=0)
    here: Any = model
    there: Any = of
    copies = [
        (here.embed.W_E, there.W_E),
        (here.pos_embed.W_pos, next(there.pos_embed.parameters())),
        (here.unembed.W_U, there.W_U),
        (here.unembed.b_U, there.b_U),
        *((getattr(here.ln_final, x), getattr(there.ln_final, x)) for x in "wb"),
    ]
    for layer, (block, source) in enumerate(zip(here.blocks, there.blocks, strict=True)):
        for norm in ("ln1", "ln2"):
            ours, theirs = getattr(block, norm), getattr(source, norm)
            copies += [(ours.w, theirs.w), (ours.b, theirs.b)]
        for part, names in (
            (block.attn, ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")),
            (block.mlp, ("W_in", "b_in", "W_out", "b_out")),
        ):
            copies += [(getattr(part, name), getattr(there, name)[layer]) for name in names]
    with torch.no_grad():
        for parameter, value in copies:
            parameter.copy_(value)
    return model


def a_model(name: str, seed: int = 0) -> HookedModel:
    """Any of them by name."""
    return bridge(name, seed) if name in BRIDGES else hooked(name, seed)


def _stirred(model: Model) -> Model:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(2.0 * parameter + 0.15 * noise.to(parameter.dtype))
    return model


def trials_pair(n: int = 6) -> tuple[Trials, Trials]:
    """Clean trials with roles, and corrupted ones that differ from them at position 2."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(D_VOCAB, (n, N_POS), generator=generator)
    roles = ["start", "key", "value", "other", "other", "other", "query"]
    clean = Trials.of(tokens, contextual=tokens[:, 2], fixed=(tokens[:, 2] + 5) % 20, roles=roles)
    corrupted = tokens.clone()
    corrupted[:, 2] = (tokens[:, 2] + 9) % D_VOCAB
    return clean, Trials.of(corrupted, clean.contextual, clean.fixed, roles=roles)


def left_as_it_was(model: HookedModel) -> Callable[[], bool]:
    """A check, to be made later, that hooks, modes, flags and gradients are as they are now."""

    def state() -> list[Any]:
        return [
            {name: list(point.fwd_hooks) for name, point in model.hook_dict.items()},
            {name: list(point.bwd_hooks) for name, point in model.hook_dict.items()},
            [module.training for module in model.modules()],
            {key: value for key, value in vars(model.cfg).items() if key.startswith("use_")},
            [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()],
            torch.is_grad_enabled(),
            # A bridge remembers tensors of its last run: not with their graph.
            [
                type(value)
                for module in {*model.modules(), *getattr(model, "original_model", model).modules()}
                for value in vars(module).values()
                if isinstance(value, torch.Tensor) and value.grad_fn is not None
            ],
        ]

    before = state()
    return lambda: state() == before
