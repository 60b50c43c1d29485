"""A member of a stack is trained exactly as it would be alone, by `torch.optim`."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig

from tl_hysteresis.config import AdamConfig, AdamWConfig, ModelConfig, OptimizerConfig, SGDConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.models import ParameterLayout, build_model, hooked_config
from tl_hysteresis.schedules import Plan, constant_plan
from tl_hysteresis.tasks import AssociativeRecall, draw
from tl_hysteresis.training import Population, train

TASK = AssociativeRecall(n_keys=8, n_values=8, n_pairs=4)
SMALL = hooked_config(
    ModelConfig(d_model=32, d_mlp=16, n_heads=2), d_vocab=TASK.d_vocab, n_ctx=TASK.n_ctx
)
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(batch_size=16, weight_decay=0.1),
    "adam": AdamConfig(batch_size=16, weight_decay=0.01),
    "adam without first moment": AdamConfig(batch_size=16, beta1=0.0),
    "sgd": SGDConfig(batch_size=16, learning_rate=0.1, weight_decay=0.01),
    "sgd without momentum": SGDConfig(batch_size=16, learning_rate=0.1, momentum=0.0),
}


def torch_optimizer(
    settings: OptimizerConfig, parameters: Sequence[Tensor]
) -> torch.optim.Optimizer:
    rate, decay = settings.learning_rate, settings.weight_decay
    if isinstance(settings, SGDConfig):
        return torch.optim.SGD(parameters, lr=rate, momentum=settings.momentum, weight_decay=decay)
    make = torch.optim.AdamW if isinstance(settings, AdamWConfig) else torch.optim.Adam
    betas = (settings.beta1, settings.beta2)
    return make(parameters, lr=rate, betas=betas, eps=settings.eps, weight_decay=decay)


def train_alone(
    settings: OptimizerConfig, config: HookedTransformerConfig, plan: Plan, seed: int
) -> HookedTransformer:
    """The slow and obvious loop: one `HookedTransformer`, `torch.optim`, the same examples."""
    model = build_model(config, seed=seed)
    optimizer = torch_optimizer(settings, list(model.parameters()))
    for update in range(len(plan)):
        batch = plan.batch(update, task=TASK, seed=seed, batch_size=settings.batch_size)
        optimizer.zero_grad()
        F.cross_entropy(model(batch.tokens)[:, -1], batch.targets).backward()
        optimizer.step()
    return model


# A key's bias moves every attention score of a query alike and drops out of the softmax: its true
# gradient is zero, and Adam makes steps of the rounding error. It differs between any two ways of
# summing, and the model computes the same whatever it is.
IRRELEVANT = "attn.b_K"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_updates_in_a_stack_of_ten_equal_fifty_updates_alone(
    name: str, dtype: torch.dtype
) -> None:
    settings = OPTIMIZERS[name]
    config = dataclasses.replace(SMALL, dtype=dtype)
    seeds = list(range(10))
    mixtures = [0.3 + 0.05 * seed for seed in seeds]
    plans = [constant_plan(50, mixture, stream="test") for mixture in mixtures]
    population = Population.build(config, settings, seeds=seeds)
    assert population.is_stacked
    train(population, TASK, plans, seeds=seeds)
    tokens = draw(TASK, 64, seed=0, stream="held out", index=0).tokens
    for member in (0, 4, 9):
        alone, ours = train_alone(settings, config, plans[member], member), population.model(member)
        torch.testing.assert_close(ours(tokens), alone(tokens), atol=1e-4, rtol=0.0)
        for parameter, value in alone.named_parameters():
            if dtype == torch.float64 or not parameter.endswith(IRRELEVANT):
                torch.testing.assert_close(
                    ours.get_parameter(parameter), value, atol=1e-4, rtol=0.0, msg=parameter
                )


def test_models_that_cannot_be_stacked_train_to_the_same_results() -> None:
    settings, config = AdamWConfig(batch_size=16), dataclasses.replace(SMALL, gated_mlp=True)
    plan = constant_plan(5, 0.5, stream="test")
    population = Population.build(config, settings, seeds=[0, 1])
    assert not population.is_stacked
    train(population, TASK, [plan, plan], seeds=[0, 1])
    alone = ParameterLayout.of(population.model(1)).read(train_alone(settings, config, plan, 1))
    torch.testing.assert_close(population.parameters[1], alone, atol=1e-6, rtol=0.0)


def test_a_member_that_diverges_leaves_the_others_untouched_to_the_bit() -> None:
    seeds, plan = [0, 1, 2, 3], constant_plan(8, 0.5, stream="test")
    healthy, sick = (
        Population.build(SMALL, AdamWConfig(batch_size=16), seeds=seeds) for _ in range(2)
    )
    sick.parameters[2] = float("nan")
    losses: list[Tensor] = []
    train(healthy, TASK, [plan] * 4, seeds=seeds)
    train(sick, TASK, [plan] * 4, seeds=seeds, after_update=lambda done, loss: losses.append(loss))
    assert torch.isnan(losses[0][2]) and torch.isfinite(losses[0][[0, 1, 3]]).all()
    assert sick.finite.tolist() == [True, True, False, True]
    for member in (0, 1, 3):
        assert torch.equal(sick.parameters[member], healthy.parameters[member])
        for name in healthy.state:
            assert torch.equal(sick.state[name][member], healthy.state[name][member])


@pytest.mark.parametrize("n_seeds", range(1, 9))
def test_equal_members_stay_equal_to_the_bit(n_seeds: int) -> None:
    """What a same-order control relies on, at any number of seeds."""
    anchors = Population.build(SMALL, AdamWConfig(batch_size=16), seeds=range(n_seeds))
    train(anchors, TASK, [constant_plan(2, 0.5, stream="a")] * n_seeds, seeds=range(n_seeds))
    seeds = [seed for seed in range(n_seeds) for _ in range(2)]
    pairs = anchors.fork(seeds)
    train(pairs, TASK, [constant_plan(4, 0.5, stream="b")] * len(seeds), seeds=seeds)
    assert torch.equal(pairs.parameters[0::2], pairs.parameters[1::2])


def test_prompts_that_do_not_fit_are_refused() -> None:
    population = Population.build(SMALL, AdamWConfig(batch_size=4), seeds=[0, 1])
    with pytest.raises(HysteresisError, match="prompts for 3 members, but 2 members"):
        population.logits(torch.zeros(3, 4, TASK.n_ctx, dtype=torch.long))
    with pytest.raises(HysteresisError, match="tokens run from 0 to 16: a vocabulary of 16"):
        tokens = torch.zeros(2, 4, TASK.n_ctx, dtype=torch.long)
        tokens[0, 0, 0] = TASK.d_vocab
        population.logits(tokens)


def test_models_do_not_share_their_config() -> None:
    population = Population.build(SMALL, AdamWConfig(batch_size=4), seeds=[0, 1])
    model = population.model(0)
    model.set_use_attn_result(True)
    assert not population.config.use_attn_result
    assert not population.model(1).cfg.use_attn_result


def test_a_fork_shares_nothing_with_its_source() -> None:
    anchors = Population.build(SMALL, AdamWConfig(batch_size=16), seeds=[0, 1])
    plan = constant_plan(3, 0.5, stream="test")
    train(anchors, TASK, [plan, plan], seeds=[0, 1])
    before = anchors.parameters.clone(), {k: v.clone() for k, v in anchors.state.items()}
    branches = anchors.fork([1, 0, 1])
    for name, value in branches.state.items():
        assert torch.equal(value[0], anchors.state[name][1]), name
    train(branches, TASK, [plan] * 3, seeds=[1, 0, 1])
    assert torch.equal(anchors.parameters, before[0])
    assert all(torch.equal(anchors.state[name], before[1][name]) for name in before[1])
    assert branches.state["step"].tolist() == [6, 6, 6]


def test_training_in_two_parts_is_training_in_one() -> None:
    whole, parts = (
        Population.build(SMALL, AdamWConfig(batch_size=16), seeds=[0, 1]) for _ in range(2)
    )
    plan = constant_plan(9, 0.5, stream="test")
    head = Plan(plan.stream, plan.indices[:4], plan.mixtures[:4])
    train(whole, TASK, [plan, plan], seeds=[0, 1])
    train(parts, TASK, [head, head], seeds=[0, 1])
    train(parts, TASK, [plan, plan], seeds=[0, 1], start=4)
    assert torch.equal(whole.parameters, parts.parameters)


def test_members_of_different_age_correct_their_own_bias() -> None:
    """A reset member beside an old one steps as a fresh optimizer would."""
    plan, exact = (
        constant_plan(6, 0.5, stream="test"),
        dataclasses.replace(SMALL, dtype=torch.float64),
    )
    old = Population.build(exact, AdamWConfig(batch_size=16), seeds=[0])
    train(old, TASK, [plan], seeds=[0])
    pair = old.fork([0, 0])
    for value in pair.state.values():
        value[1] = 0
    fresh = Population.from_models([old.model(0)], old.optimizer)
    train(pair, TASK, [plan, plan], seeds=[0, 0])
    train(fresh, TASK, [plan], seeds=[0])
    torch.testing.assert_close(pair.parameters[1], fresh.parameters[0], atol=1e-9, rtol=0.0)
    assert pair.state["step"].tolist() == [12, 6]


def test_a_model_is_handed_out_as_a_copy() -> None:
    population = Population.build(SMALL, AdamWConfig(batch_size=16), seeds=[0, 1])
    model = population.model(1)
    tokens = torch.randint(TASK.d_vocab, (2, 700, TASK.n_ctx))
    expected = model(tokens[1])[:, -1]
    torch.testing.assert_close(population.logits(tokens)[1], expected, atol=1e-5, rtol=0.0)
    model.W_E.data += 1.0
    torch.testing.assert_close(population.logits(tokens)[1], expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("n_plans", "seeds", "lengths", "message"),
    [
        (1, [0, 1], (3, 3), "2 members need as many plans"),
        (2, [0], (3, 3), "2 members need as many plans"),
        (2, [0, 1], (3, 4), "different lengths"),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    n_plans: int, seeds: list[int], lengths: tuple[int, int], message: str
) -> None:
    population = Population.build(SMALL, AdamWConfig(batch_size=4), seeds=[0, 1])
    plans = [constant_plan(length, 0.5, stream="test") for length in lengths][:n_plans]
    with pytest.raises(HysteresisError, match=message):
        train(population, TASK, plans, seeds=seeds)


def test_a_population_of_nobody_is_refused() -> None:
    with pytest.raises(HysteresisError, match="at least one model"):
        Population.from_models([], AdamWConfig())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_another_device_gives_the_cpus_results() -> None:
    plan = constant_plan(20, 0.5, stream="test")
    results = []
    for device in ("cpu", "cuda"):
        population = Population.build(SMALL, AdamWConfig(batch_size=16), seeds=[0]).to(device)
        train(population, TASK, [plan], seeds=[0])
        results.append(population.to("cpu"))
    cpu, cuda = (population.model(0) for population in results)
    for name, value in cpu.named_parameters():
        if not name.endswith(IRRELEVANT):
            torch.testing.assert_close(cuda.get_parameter(name), value, atol=1e-3, rtol=0.0)
