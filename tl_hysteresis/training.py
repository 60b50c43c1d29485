"""The training loop: a population of models in one stack, each with its own optimizer state.

Nothing is shared between members: each has its own examples, moments and step count, and no norm or
mean is taken across them. A member gets, up to rounding, what it would get alone, and one that
diverges touches no other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig

from tl_hysteresis.config import AdamWConfig, OptimizerConfig, SGDConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.forward import logits_one_by_one, stacked_logits, unsupported
from tl_hysteresis.models import ParameterLayout, build_model, stack_parameters
from tl_hysteresis.schedules import Plan
from tl_hysteresis.tasks import Batch, Task

MEMBERS_AT_ONCE = 4
"""Members in one pass forward and backward; more of them would only outgrow the caches. Even, so
that the two branches of a seed go through the same kernels."""

OptimizerState = dict[str, Tensor]
"""`step` [member]; `first_moment` and `second_moment`, or `momentum` for SGD, [member param]. The
second moment counts its own updates in `second_step`, since it can be reset by itself."""

MOVABLE = ("learning_rate", "weight_decay")
"""Settings of the optimizer that a plan can move."""


@dataclass(eq=False)
class Population:
    """Models trained side by side: their parameters and optimizer states in one stack.

    Attributes:
        config: TransformerLens's config, common to all members.
        layout: where each parameter lies in a member's flat vector.
        parameters: the parameters of each member.
        optimizer: which optimizer, with its settings.
        state: the optimizer's state of each member.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import hooked_config
        >>> config = hooked_config(ModelConfig(), d_vocab=32, n_ctx=17)
        >>> anchors = Population.build(config, AdamWConfig(), seeds=[0, 1])
        >>> branches = anchors.fork([0, 0, 1, 1])
        >>> len(branches), torch.equal(branches.parameters[0], branches.parameters[1])
        (4, True)
        >>> branches.model(3)(torch.arange(17)[None]).shape
        torch.Size([1, 17, 32])
    """

    config: HookedTransformerConfig
    layout: ParameterLayout
    parameters: Float[Tensor, "member param"]
    optimizer: OptimizerConfig
    state: OptimizerState

    def __repr__(self) -> str:
        return (
            f"Population({len(self)} members of {self.layout.size} parameters, "
            f"{self.optimizer.name}, {self.state['step'].tolist()} updates)"
        )

    @classmethod
    def build(
        cls, config: HookedTransformerConfig, optimizer: OptimizerConfig, *, seeds: Sequence[int]
    ) -> Population:
        """Untrained members, one for each seed, with TransformerLens's initial weights."""
        return cls.from_models([build_model(config, seed=seed) for seed in seeds], optimizer)

    @classmethod
    def from_models(
        cls, models: Sequence[HookedTransformer], optimizer: OptimizerConfig
    ) -> Population:
        """Members that start from given models, whose weights are copied.

        Raises:
            HysteresisError: no models, or models with different parameters.
        """
        if not models:
            raise HysteresisError("a population needs at least one model")
        first = _plain(models[0])
        alike = [_plain(model) == first for model in models]
        if not all(alike):
            raise HysteresisError(
                f"model {alike.index(False)} has another config than model 0: "
                "the members of a population compute the same function of their parameters"
            )
        _keep_freed_memory()
        layout, parameters = stack_parameters(models)
        state = initial_state(optimizer, parameters)
        return cls(models[0].cfg, layout, parameters, optimizer, state)

    def __len__(self) -> int:
        return len(self.parameters)

    @property
    def is_stacked(self) -> bool:
        """True if one stacked forward pass runs all members; False if each runs by itself."""
        return unsupported(self.config) is None

    @property
    def finite(self) -> Bool[Tensor, " member"]:
        """False for a member that has diverged: a parameter of it is not a finite number."""
        return torch.isfinite(self.parameters).all(dim=1)

    def to(self, device: torch.device | str) -> Population:
        """The same population on another device."""
        return Population(
            self.config,
            self.layout,
            self.parameters.to(device),
            self.optimizer,
            {name: value.to(device) for name, value in self.state.items()},
        )

    def fork(self, members: Sequence[int]) -> Population:
        """Copies of the given members, parameters and optimizer state, in the given order."""
        index = torch.tensor(list(members), device=self.parameters.device)
        return Population(
            self.config,
            self.layout,
            self.parameters[index],
            self.optimizer,
            {name: value[index] for name, value in self.state.items()},
        )

    def model(self, member: int) -> HookedTransformer:
        """A member as a `HookedTransformer` of its own; later training leaves it as it is."""
        model = build_model(self.config, seed=0)
        self.layout.write(self.parameters[member], model)
        return model

    @torch.no_grad()
    def logits(
        self, tokens: Int[Tensor, "member trial pos"], *, chunk: int = 128
    ) -> Float[Tensor, "member trial d_vocab"]:
        """Logits of each member at the last position of its own prompts, without gradients.

        Members and trials are taken a few at a time, so that memory does not grow with them.
        """
        self._check(tokens)
        groups = []
        for parameters, prompts in zip(
            self.parameters.split(MEMBERS_AT_ONCE), tokens.split(MEMBERS_AT_ONCE), strict=True
        ):
            named = self.layout.split(parameters)
            parts = [self._logits(named, part) for part in prompts.split(chunk, dim=1)]
            groups.append(torch.cat(parts, dim=1))
        return torch.cat(groups)

    def step(
        self, batch: Batch, moved: Mapping[str, Float[Tensor, " member"]] | None = None
    ) -> Float[Tensor, " member"]:
        """One update of every member on its own examples; returns each mean loss, in nats.

        `moved` gives each member another learning_rate or weight_decay than the optimizer's.
        """
        self._check(batch.tokens)
        parts = [
            _losses_and_gradients(self._logits, self.layout, *part)
            for part in zip(
                self.parameters.detach().split(MEMBERS_AT_ONCE),
                batch.tokens.split(MEMBERS_AT_ONCE),
                batch.targets.split(MEMBERS_AT_ONCE),
                strict=True,
            )
        ]
        losses, gradients = (torch.cat(results) for results in zip(*parts, strict=True))
        update_parameters(self.optimizer, self.parameters, gradients, self.state, moved)
        return losses

    def _check(self, tokens: Int[Tensor, "member trial pos"]) -> None:
        if len(tokens) != len(self):
            raise HysteresisError(f"prompts for {len(tokens)} members, but {len(self)} members")
        least, most = (int(bound) for bound in tokens.aminmax())
        if least < 0 or most >= self.config.d_vocab:
            raise HysteresisError(
                f"tokens run from {least} to {most}: a vocabulary of {self.config.d_vocab} has "
                f"0 to {self.config.d_vocab - 1}"
            )

    def _logits(
        self, parameters: Mapping[str, Tensor], tokens: Int[Tensor, "member trial pos"]
    ) -> Float[Tensor, "member trial d_vocab"]:
        if self.is_stacked:
            return stacked_logits(parameters, tokens, self.config)
        return logits_one_by_one(parameters, tokens, self._template)

    @cached_property
    def _template(self) -> HookedTransformer:
        """A model that lends its forward pass; its own weights are never read."""
        model = build_model(self.config, seed=0)
        model.to(self.parameters.device, print_details=False)
        return model


def train(
    population: Population,
    task: Task,
    plans: Sequence[Plan],
    *,
    seeds: Sequence[int],
    start: int = 0,
    after_update: Callable[[int, Float[Tensor, " member"]], None] | None = None,
) -> None:
    """Train each member along its own plan, on the examples of its own seed, in place.

    Args:
        population: what is trained.
        task: where the examples come from.
        plans: one for each member, all of one length.
        seeds: one for each member.
        start: updates of the plans that are already done.
        after_update: called with the number of updates done and the loss of each member, in nats.

    Raises:
        HysteresisError: numbers of plans, seeds and members, or lengths of plans, that differ.

    Example:
        >>> from tl_hysteresis.config import ModelConfig
        >>> from tl_hysteresis.models import hooked_config
        >>> from tl_hysteresis.schedules import constant_plan
        >>> from tl_hysteresis.tasks import AssociativeRecall
        >>> task = AssociativeRecall()
        >>> config = hooked_config(ModelConfig(), d_vocab=task.d_vocab, n_ctx=task.n_ctx)
        >>> population = Population.build(config, AdamWConfig(batch_size=8), seeds=[0, 1])
        >>> plan = constant_plan(3, 0.5, stream="anchor")
        >>> train(population, task, [plan, plan], seeds=[0, 1])
        >>> population.state["step"].tolist()
        [3, 3]
    """
    if not len(plans) == len(seeds) == len(population):
        raise HysteresisError(
            f"{len(population)} members need as many plans ({len(plans)}) and seeds ({len(seeds)})"
        )
    if plans and not 0 <= start <= len(plans[0]):
        raise HysteresisError(f"start = {start}: the plans have updates 0 to {len(plans[0])}")
    if len({len(plan) for plan in plans}) > 1:
        raise HysteresisError(f"plans of different lengths: {sorted({len(p) for p in plans})}")
    device, batch_size = population.parameters.device, population.optimizer.batch_size
    for update in range(start, len(plans[0])):
        drawn: dict[tuple[int, int], Batch] = {}  # members of one seed on one plan share examples
        for plan, seed in zip(plans, seeds, strict=True):
            if (id(plan), seed) not in drawn:
                batch = plan.batch(update, task=task, seed=seed, batch_size=batch_size)
                drawn[id(plan), seed] = batch
        batch = Batch.stack(
            [drawn[id(plan), seed] for plan, seed in zip(plans, seeds, strict=True)]
        )
        losses = population.step(batch.to(device), _moved(population, plans, update))
        if after_update is not None:
            after_update(update + 1, losses)


def _moved(
    population: Population, plans: Sequence[Plan], update: int
) -> dict[str, Float[Tensor, " member"]]:
    """The settings of the optimizer that some plan moves, with each member's value."""
    values = {}
    for name in {plan.parameter for plan in plans}.intersection(MOVABLE):
        own = getattr(population.optimizer, name)
        values[name] = torch.tensor(
            [plan.values[update] if plan.parameter == name else own for plan in plans],
            dtype=torch.float64,
            device=population.parameters.device,
        )
    return values


def _plain(model: HookedTransformer) -> HookedTransformerConfig:
    """A model's config without the seed of its initial weights."""
    return dataclasses.replace(model.cfg, seed=None)


def _keep_freed_memory() -> None:
    """Keep the memory of one update for the next; without this a third of the time is page faults.

    glibc hands freed memory back to the system beyond a threshold, which follows the largest block
    freed so far. One block of 31 MiB, never touched, sets it to its maximum (64 MiB); elsewhere
    this does nothing.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def _losses_and_gradients(
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    layout: ParameterLayout,
    parameters: Float[Tensor, "member param"],
    tokens: Int[Tensor, "member trial pos"],
    targets: Int[Tensor, "member trial"],
) -> tuple[Float[Tensor, " member"], Float[Tensor, "member param"]]:
    """Each member's mean loss on its own examples, and the gradient of that loss."""
    parameters = parameters.requires_grad_()
    logits = forward(layout.split(parameters), tokens)
    losses = F.cross_entropy(logits.flatten(end_dim=1), targets.flatten(), reduction="none")
    means = losses.view(targets.shape).mean(dim=1)
    # A sum over members: no loss depends on another member's parameters.
    (gradients,) = torch.autograd.grad(means.sum(), parameters)
    return means.detach(), gradients


def initial_state(
    optimizer: OptimizerConfig, parameters: Float[Tensor, "member param"]
) -> OptimizerState:
    """The optimizer's state before the first update: all zero."""
    names = ("momentum",) if isinstance(optimizer, SGDConfig) else ("first_moment", "second_moment")
    state = {name: torch.zeros_like(parameters) for name in names}
    counts = ("step",) if isinstance(optimizer, SGDConfig) else ("step", "second_step")
    for name in counts:
        state[name] = torch.zeros(len(parameters), dtype=torch.int64, device=parameters.device)
    return state


def update_parameters(
    optimizer: OptimizerConfig,
    parameters: Float[Tensor, "member param"],
    gradient: Float[Tensor, "member param"],
    state: OptimizerState,
    moved: Mapping[str, Float[Tensor, " member"]] | None = None,
) -> None:
    """One step of `torch.optim`'s AdamW, Adam or SGD for each member, in place.

    Members count their steps by themselves, so that states of different age can stand in one stack.
    """
    rate, decay = (
        moved[name][:, None] if moved and name in moved else getattr(optimizer, name)
        for name in MOVABLE
    )
    state["step"] += 1
    if isinstance(optimizer, AdamWConfig):
        parameters.mul_(1.0 - rate * decay)
    elif "weight_decay" in (moved or {}) or decay:
        gradient = gradient + (decay * parameters).to(gradient.dtype)
    if isinstance(optimizer, SGDConfig):
        state["momentum"].mul_(optimizer.momentum).add_(gradient)
        parameters.sub_(rate * state["momentum"])
        return
    state["second_step"] += 1
    first, second = state["first_moment"], state["second_moment"]
    first.lerp_(gradient, 1.0 - optimizer.beta1)
    second.mul_(optimizer.beta2).addcmul_(gradient, gradient, value=1.0 - optimizer.beta2)
    first_bias = 1.0 - optimizer.beta1 ** state["step"][:, None].double()
    second_bias = 1.0 - optimizer.beta2 ** state["second_step"][:, None].double()
    denominator = (second.sqrt() / second_bias.sqrt().to(second.dtype)).add_(optimizer.eps)
    parameters.sub_((rate / first_bias).to(first.dtype) * first / denominator)
