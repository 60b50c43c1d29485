"""Models are built from settings and seed alone, and survive stacking unchanged."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from tl_hysteresis.config import ModelConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.models import ParameterLayout, build_model, hooked_config, stack_parameters

SMALL = hooked_config(ModelConfig(d_model=16, d_mlp=8, n_heads=2), d_vocab=12, n_ctx=7)


def test_the_default_model_has_the_papers_72k_parameters() -> None:
    # 32 tokens and 17 positions of width 64; a block: 4 matrices of 64x64 with 4 biases of 64, an
    # MLP of 128, two LayerNorms; a final LayerNorm; the unembedding with its bias.
    block = 4 * 64 * 64 + 4 * 64 + 2 * 64 * 128 + 128 + 64 + 2 * 2 * 64
    by_hand = 32 * 64 + 17 * 64 + 2 * block + 2 * 64 + 64 * 32 + 32
    model = build_model(hooked_config(ModelConfig(), d_vocab=32, n_ctx=17), seed=0)
    assert ParameterLayout.of(model).size == by_hand == 72_288


def test_a_model_is_a_function_of_its_seed() -> None:
    first, again, other = (build_model(SMALL, seed=seed) for seed in (3, 3, 4))
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first.W_E, other.W_E)


def test_a_seed_in_the_config_does_not_overrule_the_models_own() -> None:
    config = dataclasses.replace(SMALL, seed=5)
    assert not torch.equal(build_model(config, seed=0).W_E, build_model(config, seed=1).W_E)


def test_building_leaves_the_callers_generators_alone() -> None:
    def state() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = state()
    seed()
    build_model(SMALL, seed=9)
    assert state() == expected


def test_stacking_and_writing_back_is_exact() -> None:
    models = [build_model(SMALL, seed=seed) for seed in range(3)]
    layout, flat = stack_parameters(models)
    assert flat.shape == (3, layout.size)
    copy = build_model(SMALL, seed=7)
    layout.write(flat[1], copy)
    for name, value in copy.named_parameters():
        assert torch.equal(value, models[1].get_parameter(name))
        assert torch.equal(layout.split(flat)[name][1], value)


def test_buffers_are_no_parameters() -> None:
    model = build_model(SMALL, seed=0)
    names = ParameterLayout.of(model).names
    assert not any("mask" in name or "IGNORE" in name for name in names)
    assert any("mask" in name for name in model.state_dict())


def test_models_of_different_shape_do_not_stack() -> None:
    wider = hooked_config(ModelConfig(d_model=32, d_mlp=8, n_heads=2), d_vocab=12, n_ctx=7)
    with pytest.raises(HysteresisError, match="same names and shapes"):
        stack_parameters([build_model(SMALL, seed=0), build_model(wider, seed=0)])
