"""TransformerLens models: built from settings, stacked into one tensor, and handed out again.

The only file that constructs a `HookedTransformer`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig

from tl_hysteresis.config import ModelConfig
from tl_hysteresis.errors import HysteresisError


def hooked_config(settings: ModelConfig, *, d_vocab: int, n_ctx: int) -> HookedTransformerConfig:
    """TransformerLens's own config of the model that the settings describe.

    Models are built on the CPU, so that initial weights are the same everywhere, and moved later.

    Example:
        >>> hooked_config(ModelConfig(), d_vocab=32, n_ctx=17).d_head
        16
    """
    return HookedTransformerConfig(
        n_layers=settings.n_layers,
        n_heads=settings.n_heads,
        d_model=settings.d_model,
        d_head=settings.d_head or settings.d_model // settings.n_heads,
        d_mlp=None if settings.attn_only else settings.d_mlp,
        attn_only=settings.attn_only,
        act_fn=settings.act_fn,
        normalization_type=(
            None if settings.normalization_type == "none" else settings.normalization_type
        ),
        positional_embedding_type=settings.positional_embedding_type,
        d_vocab=d_vocab,
        n_ctx=n_ctx,
        device="cpu",
    )


def build_model(config: HookedTransformerConfig, *, seed: int) -> HookedTransformer:
    """A model with TransformerLens's initial weights, as a function of the seed alone.

    The caller's random generators are left as they were.

    Example:
        >>> config = hooked_config(ModelConfig(), d_vocab=32, n_ctx=17)
        >>> sum(p.numel() for p in build_model(config, seed=0).parameters())
        72288
    """
    if not isinstance(seed, int) or seed < 0:
        raise HysteresisError(f"seed = {seed!r}: a whole number, 0 or more")
    # A copy: TransformerLens's models change their config, and a seed in it would overrule ours.
    config = dataclasses.replace(config, seed=None)
    with _own_generators(seed), warnings.catch_warnings():
        # TransformerLens 3.9 warns that the class was to be removed; pyproject holds it below 4.
        warnings.filterwarnings("ignore", ".*HookedTransformer.*", DeprecationWarning)
        return HookedTransformer(config).eval()


@contextmanager
def _own_generators(seed: int) -> Iterator[None]:
    """Seed torch, numpy and `random` inside, and give them back as they were.

    TransformerLens initialises from the global generators; a config with a seed reseeds all three.
    """
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 of a model's parameters, with their names, types and shapes.

    Example:
        >>> config = hooked_config(ModelConfig(), d_vocab=32, n_ctx=17)
        >>> fingerprint(build_model(config, seed=0)) == fingerprint(build_model(config, seed=0))
        True
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class ParameterLayout:
    """Where each parameter of one model lies in a flat vector.

    Buffers, such as the attention mask, are no part of it.

    Attributes:
        names: parameter names, as in `named_parameters`.
        shapes: the shape of each.

    Example:
        >>> config = hooked_config(ModelConfig(), d_vocab=32, n_ctx=17)
        >>> layout = ParameterLayout.of(build_model(config, seed=0))
        >>> layout.size, layout.names[0]
        (72288, 'embed.W_E')
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, model: torch.nn.Module) -> ParameterLayout:
        """The layout of a model's parameters, in the model's own order."""
        named = list(model.named_parameters())
        return cls(tuple(name for name, _ in named), tuple(p.shape for _, p in named))

    @property
    def sizes(self) -> list[int]:
        """Number of scalars of each parameter."""
        return [prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """Number of scalars of a model."""
        return sum(self.sizes)

    def split(self, flat: Float[Tensor, "member param"]) -> dict[str, Tensor]:
        """Views of the flat parameters by name, each `[member, *shape]`."""
        parts = flat.split(self.sizes, dim=1)
        return {
            name: part.view(len(flat), *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def read(self, model: torch.nn.Module) -> Float[Tensor, " param"]:
        """A copy of a model's parameters as one flat vector.

        Raises:
            HysteresisError: a model whose parameters have other names or shapes.
        """
        if ParameterLayout.of(model) != self:
            raise HysteresisError(
                "models of one stack need parameters of the same names and shapes"
            )
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def write(self, flat: Float[Tensor, " param"], model: torch.nn.Module) -> None:
        """Copy one flat vector into a model's parameters."""
        with torch.no_grad():
            for name, value in self.split(flat[None]).items():
                model.get_parameter(name).copy_(value[0])


def stack_parameters(
    models: Sequence[torch.nn.Module],
) -> tuple[ParameterLayout, Float[Tensor, "member param"]]:
    """The parameters of several equal models as one tensor, and how to read it."""
    layout = ParameterLayout.of(models[0])
    return layout, torch.stack([layout.read(model) for model in models])
