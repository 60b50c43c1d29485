"""The ambiguous recall task: prompts, their two answers, and the role of each position.

A batch is a pure function of (task, seed, stream, index): each index has a counter-based generator
of its own, so nothing about sampling is ever saved, and any batch can be drawn again in any order.
The query is the last position of a prompt, where the answer is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_hysteresis.config import AssociativeRecallConfig
from tl_hysteresis.errors import HysteresisError


@dataclass(frozen=True, eq=False)
class Trials:
    """Prompts with their two answers, and optionally the role of each position.

    A trial whose two answers differ is a *conflict trial*; one whose answers agree is congruent.

    Attributes:
        tokens: token ids; the query is the last position.
        contextual: the token that answers by the prompt. In a task of another kind: the answer.
        fixed: the token that answers by the weights. In a task of another kind: any token that the
            answer is to be weighed against.
        roles: index into `role_names` for each position, where roles are known.
        role_names: names of the roles.

    Raises:
        HysteresisError: shapes that do not fit, answers or roles that cannot be.

    Example:
        >>> trials = Trials(torch.tensor([[0, 5, 1, 6, 0]]), torch.tensor([5]), torch.tensor([7]))
        >>> len(trials), trials.conflict.tolist()
        (1, [True])
    """

    tokens: Int[Tensor, "trial pos"]
    contextual: Int[Tensor, " trial"]
    fixed: Int[Tensor, " trial"]
    roles: Int[Tensor, "trial pos"] | None = None
    role_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "contextual", "fixed"):
            if not isinstance(getattr(self, name), Tensor):
                raise HysteresisError(f"{name} must be a tensor; Trials.of(...) takes lists")
        if self.tokens.ndim != 2:
            raise HysteresisError(
                f"tokens are [trial, pos], of one length; found shape {tuple(self.tokens.shape)}"
            )
        for name in ("tokens", "contextual", "fixed"):
            ids = getattr(self, name)
            if ids.dtype != torch.int64:
                raise HysteresisError(f"{name} are token ids, of torch.int64; found {ids.dtype}")
            if ids.device != self.tokens.device:
                raise HysteresisError(
                    f"{name} are on {ids.device}, the tokens on {self.tokens.device}"
                )
        for name in ("contextual", "fixed"):
            answers = getattr(self, name)
            if answers.shape != self.tokens.shape[:1]:
                raise HysteresisError(
                    f"{name} answers have shape {tuple(answers.shape)}; "
                    f"{len(self.tokens)} trials need ({len(self.tokens)},)"
                )
        for name in ("tokens", "contextual", "fixed"):
            ids = getattr(self, name)
            if ids.numel() and int(ids.min()) < 0:
                raise HysteresisError(f"{name}: {int(ids.min())} is not a token id")
        for name in ("tokens", "contextual", "fixed", "roles"):
            if getattr(self, name) is not None:  # models cannot run a transposed view
                object.__setattr__(self, name, getattr(self, name).contiguous())
        names = self.role_names
        if type(names) is not tuple or len(set(names)) != len(names):
            raise HysteresisError(f"role_names = {names!r}: different names, in a tuple")
        if self.roles is not None:
            if self.roles.dtype != torch.int64:
                raise HysteresisError(f"roles are indices of torch.int64, not {self.roles.dtype}")
            if self.roles.shape != self.tokens.shape:
                raise HysteresisError(
                    f"roles have shape {tuple(self.roles.shape)}, "
                    f"tokens {tuple(self.tokens.shape)}: each position has one role"
                )
            if self.roles.numel() and not (
                0 <= int(self.roles.min()) and int(self.roles.max()) < len(self.role_names)
            ):
                raise HysteresisError(
                    f"roles run from {int(self.roles.min())} to {int(self.roles.max())}, "
                    f"but there are {len(self.role_names)} role_names"
                )

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
        contextual: Sequence[int] | Tensor,
        fixed: Sequence[int] | Tensor,
        *,
        roles: Sequence[str] | Sequence[Sequence[str]] | None = None,
    ) -> Trials:
        """Trials from lists: prompts of one length, two answers each, and names of roles.

        Args:
            prompts: token ids of each prompt, a BOS token included, without padding.
            contextual: the token that answers each prompt by the prompt: the answer.
            fixed: any token that it is weighed against.
            roles: a name for each position; one list for all prompts, or one for each prompt.

        Raises:
            HysteresisError: prompts of unequal length, or what `Trials` refuses.

        Example:
            >>> prompts, roles = [[4, 7, 4], [5, 8, 5]], ["key", "value", "query"]
            >>> trials = Trials.of(prompts, contextual=[7, 8], fixed=[9, 9], roles=roles)
            >>> trials.positions("query").tolist()
            [[False, False, True], [False, False, True]]
        """
        try:
            lengths = [len(prompt) for prompt in prompts]
        except TypeError:
            raise HysteresisError(
                "prompts are lists of token ids, one list for each trial"
            ) from None
        for index, length in enumerate(lengths):
            if length != lengths[0]:
                raise HysteresisError(
                    f"trial {index} has {length} tokens, trial 0 has {lengths[0]}: "
                    "all trials need one length"
                )
        tokens = _token_ids(prompts)
        answers = [_token_ids(ids).to(tokens.device) for ids in (contextual, fixed)]
        trials = cls(tokens, contextual=answers[0], fixed=answers[1])
        if roles is None:
            return trials
        if isinstance(roles, str) or any(isinstance(names, int) for names in roles):
            raise HysteresisError("roles are names here; Trials(...) takes indices and role_names")
        one_for_all = len(roles) > 0 and isinstance(roles[0], str)
        every = [list(roles)] * len(tokens) if one_for_all else [list(names) for names in roles]
        if [len(names) for names in every] != lengths:
            raise HysteresisError(
                "roles must name each position, for all trials at once or for each: "
                f"{len(lengths)} trials of {lengths[0] if lengths else 0} tokens"
            )
        if not all(isinstance(name, str) for names in every for name in names):
            raise HysteresisError("roles are names here; Trials(...) takes indices and role_names")
        found = tuple(dict.fromkeys(str(name) for names in every for name in names))
        index_of = torch.tensor([[found.index(name) for name in names] for names in every])
        return replace(trials, roles=index_of.to(tokens.device), role_names=found)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        n_conflict = int(self.conflict.sum())
        return f"Trials({len(self)} of {self.tokens.shape[1]} tokens, {n_conflict} in conflict)"

    @property
    def conflict(self) -> Bool[Tensor, " trial"]:
        """True where the two answers differ."""
        return self.contextual != self.fixed

    def select(self, which: Tensor | slice) -> Trials:
        """The trials that a boolean mask, indices or a slice pick out."""
        return self._each(lambda ids: ids[which])

    def clone(self) -> Trials:
        """The same trials in memory of their own."""
        return self._each(torch.clone)

    def to(self, device: torch.device | str) -> Trials:
        """The same trials on another device."""
        return self._each(lambda ids: ids.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Trials:
        """The same change made to tokens, answers and roles."""
        return replace(
            self,
            tokens=change(self.tokens),
            contextual=change(self.contextual),
            fixed=change(self.fixed),
            roles=None if self.roles is None else change(self.roles),
        )

    def with_tokens(self, tokens: Int[Tensor, "trial pos"]) -> Trials:
        """The same trials, answers and roles with other prompts: corrupted ones, for instance."""
        return replace(self, tokens=tokens)

    def with_answers_of(self, other: Trials) -> Trials:
        """The same prompts, to be answered as others are."""
        return replace(self, contextual=other.contextual, fixed=other.fixed)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of tokens, answers and roles: the same for the same trials, anywhere."""
        digest = hashlib.sha256()
        parts = (self.tokens, self.contextual, self.fixed, self.roles)
        for part in parts:
            if part is not None:
                digest.update(f"{tuple(part.shape)}".encode())
                digest.update(part.cpu().to(torch.int64).contiguous().numpy().tobytes())
        digest.update("\n".join(self.role_names).encode())
        return digest.hexdigest()

    def positions(self, role: str) -> Bool[Tensor, "trial pos"]:
        """True at the positions that have this role.

        Raises:
            HysteresisError: trials without roles, or a role that no position has.
        """
        if self.roles is None:
            raise HysteresisError(f"these trials carry no roles, so none is {role!r}")
        if role not in self.role_names:
            raise HysteresisError(f"no role {role!r}; there are {', '.join(self.role_names)}")
        mask = self.roles == self.role_names.index(role)
        if not bool(mask.any()):
            raise HysteresisError(f"no position of these trials has the role {role!r}")
        return mask


@runtime_checkable
class Task(Protocol):
    """What a task must offer; any object with these members will do.

    A task's prompts all have `n_ctx` tokens, the last of which is the query. `sample` must draw
    from `rng` alone and must not know the mixture: what the targets follow is decided elsewhere
    (`labelled_batch`), so the law of the inputs cannot depend on it.
    """

    @property
    def d_vocab(self) -> int:
        """Number of token ids."""

    @property
    def n_ctx(self) -> int:
        """Tokens in a prompt."""

    @property
    def role_names(self) -> tuple[str, ...]:
        """Names of the roles that positions can have."""

    @property
    def corruptions(self) -> tuple[str, ...]:
        """Names of the ways to corrupt a trial."""

    def sample(self, n: int, *, seed: int, rng: np.random.Generator) -> Trials:
        """Draw `n` trials under the fixed rule that belongs to `seed`."""

    def corrupt(self, trials: Trials, corruption: str, *, rng: np.random.Generator) -> Trials:
        """The same trials with other tokens, but the answers and roles of the clean ones."""


@dataclass(frozen=True)
class AssociativeRecall:
    """Key-value pairs, then a query key: answer with its value in the prompt, or its fixed one.

    A prompt is k v k v ... k v q: `n_pairs` distinct keys with distinct values, uniformly drawn,
    and one of those keys as the query. Tokens 0 ... n_keys-1 are keys, the next n_values are
    values. The fixed rule is one permutation of keys to values for each seed. The contextual value
    is uniform over the values, so the two rules agree by chance in one trial in `n_values`.

    Roles: `query`; `matched_key` and `matched_value`, the queried pair; `other_key`, `other_value`.

    Corruptions: `value` replaces the matched value by one that is neither in the prompt nor the
    fixed answer; `key` replaces the matched key by a key that is not in the prompt.

    Example:
        >>> task = AssociativeRecall(n_keys=4, n_values=4, n_pairs=2)
        >>> trials = draw(task, 3, seed=0, stream="example", index=0)
        >>> trials.tokens.shape
        torch.Size([3, 5])
        >>> bool((trials.tokens[trials.positions("matched_value")] == trials.contextual).all())
        True

    Source: the task of Zuo (2026); 16 keys, 16 values and 8 pairs are this project's choice.
    """

    n_keys: int = 16
    n_values: int = 16
    n_pairs: int = 8

    role_names = ("query", "matched_key", "matched_value", "other_key", "other_value")
    corruptions = ("value", "key")

    def __post_init__(self) -> None:
        AssociativeRecallConfig(n_keys=self.n_keys, n_values=self.n_values, n_pairs=self.n_pairs)

    @property
    def d_vocab(self) -> int:
        """Number of token ids: keys and values."""
        return self.n_keys + self.n_values

    @property
    def n_ctx(self) -> int:
        """Tokens in a prompt: two for each pair, and the query."""
        return 2 * self.n_pairs + 1

    def fixed_rule(self, seed: int) -> Int[np.ndarray, " key"]:
        """The value token that the weights are to learn for each key; a function of the seed."""
        rng = generator(seed, "fixed rule", 0)
        return self.n_keys + rng.permutation(self.n_values)[: self.n_keys]

    def sample(self, n: int, *, seed: int, rng: np.random.Generator) -> Trials:
        """Draw `n` trials under the fixed rule of `seed`; the mixture plays no part."""
        keys = shuffled_rows(n, self.n_keys, rng)[:, : self.n_pairs]
        values = self.n_keys + shuffled_rows(n, self.n_values, rng)[:, : self.n_pairs]
        pair = rng.integers(self.n_pairs, size=n)
        trial = np.arange(n)
        query = keys[trial, pair]

        tokens = np.empty((n, self.n_ctx), dtype=np.int64)
        tokens[:, 0:-1:2], tokens[:, 1::2], tokens[:, -1] = keys, values, query
        roles = np.empty_like(tokens)
        roles[:, 0:-1:2] = self.role_names.index("other_key")
        roles[:, 1::2] = self.role_names.index("other_value")
        roles[trial, 2 * pair] = self.role_names.index("matched_key")
        roles[trial, 2 * pair + 1] = self.role_names.index("matched_value")
        roles[:, -1] = self.role_names.index("query")
        return Trials(
            tokens=torch.from_numpy(tokens),
            contextual=torch.from_numpy(values[trial, pair]),
            fixed=torch.from_numpy(self.fixed_rule(seed)[query]),
            roles=torch.from_numpy(roles),
            role_names=self.role_names,
        )

    def corrupt(self, trials: Trials, corruption: str, *, rng: np.random.Generator) -> Trials:
        """Replace the matched value, or the matched key, by a token that is not in the prompt.

        Raises:
            HysteresisError: a corruption that this task does not have.
        """
        kinds = {"value": range(self.n_keys, self.d_vocab), "key": range(self.n_keys)}
        return replace_matched(trials, corruption, kinds, d_vocab=self.d_vocab, rng=rng)


def replace_matched(
    trials: Trials,
    corruption: str,
    kinds: Mapping[str, range],
    *,
    d_vocab: int,
    rng: np.random.Generator,
) -> Trials:
    """Replace the token of role `matched_{corruption}` by another of its kind, uniformly drawn.

    The new token is neither in the prompt nor the fixed answer.

    Args:
        trials: clean trials, each with one position of that role.
        corruption: one of `kinds`.
        kinds: the token ids among which each corruption draws.
        d_vocab: number of token ids.
        rng: the only source of randomness.

    Raises:
        HysteresisError: a corruption that is not among `kinds`.
    """
    if corruption not in kinds:
        raise HysteresisError(f"no corruption {corruption!r}; there are {', '.join(kinds)}")
    tokens = trials.tokens.cpu().numpy().copy()
    trial = np.arange(len(trials))
    allowed = np.zeros((len(trials), d_vocab), dtype=bool)
    allowed[:, kinds[corruption]] = True
    allowed[trial[:, None], tokens] = False
    allowed[trial, trials.fixed.cpu().numpy()] = False
    # A uniform draw among the allowed tokens of each trial: the largest of random scores.
    scores = np.where(allowed, rng.random(allowed.shape), -1.0)
    tokens[trials.positions(f"matched_{corruption}").cpu().numpy()] = scores.argmax(axis=1)
    return trials.with_tokens(torch.from_numpy(tokens).to(trials.tokens.device))


def with_parameter(task: Task, name: str, value: float) -> Task:
    """The same task with another value of one parameter, for a loop that moves it.

    A dataclass is copied with the field replaced; any other task needs a method
    `with_parameter(name, value)` of its own. Vocabulary and length of prompts must stay.

    Raises:
        HysteresisError: a task without that parameter, or one that it gives another shape.
    """
    kind: Any = task
    if hasattr(kind, "with_parameter"):
        moved = kind.with_parameter(name, value)
    elif name in ([field.name for field in fields(kind)] if is_dataclass(kind) else ()):
        moved = replace(kind, **{name: value})
    else:
        raise HysteresisError(
            f"{type(task).__name__} has no parameter {name!r} that a loop could move: a field of a "
            "dataclass, or a method with_parameter(name, value)"
        )
    shapes = [(each.d_vocab, each.n_ctx) for each in (task, moved)]
    if shapes[0] != shapes[1]:
        raise HysteresisError(
            f"{name} = {value} changes (d_vocab, n_ctx) from {shapes[0]} to {shapes[1]}: "
            "one model cannot be trained on both"
        )
    return cast("Task", moved)


def shuffled_rows(n: int, width: int, rng: np.random.Generator) -> Int[np.ndarray, "{n} {width}"]:
    """The numbers 0 ... width-1 in `n` random orders."""
    return rng.permuted(np.tile(np.arange(width), (n, 1)), axis=1)


def generator(seed: int, stream: str, index: int) -> np.random.Generator:
    """A random generator that belongs to one index of one stream of one seed.

    The key of a Philox generator is derived from the whole triple by `numpy.random.SeedSequence`,
    so streams of neighbouring seeds or indices share nothing, which `seed + index` would not give.

    Example:
        >>> generator(0, "anchor", 7).random() == generator(0, "anchor", 7).random()
        True
    """
    label = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, label, index))))


def draw(task: Task, n: int, *, seed: int, stream: str, index: int) -> Trials:
    """Trials as a pure function of (task, seed, stream, index).

    Example:
        >>> task = AssociativeRecall()
        >>> a, b = (draw(task, 4, seed=0, stream="anchor", index=9) for _ in range(2))
        >>> torch.equal(a.tokens, b.tokens)
        True
    """
    trials = task.sample(n, seed=seed, rng=generator(seed, stream, index))
    if not isinstance(trials, Trials):
        raise HysteresisError(f"sample() gave {type(trials).__name__}, not Trials")
    expected, tokens = (n, task.n_ctx), trials.tokens
    if tuple(tokens.shape) != expected or tokens.dtype != torch.int64:
        raise HysteresisError(
            f"sample() gave tokens {tuple(tokens.shape)} of {tokens.dtype}; "
            f"{n} prompts of n_ctx = {task.n_ctx} need {expected} of torch.int64"
        )
    largest = max(int(x.max()) for x in (tokens, trials.contextual, trials.fixed)) if n else 0
    if largest >= task.d_vocab:
        raise HysteresisError(f"sample() gave token {largest}; d_vocab is {task.d_vocab}")
    return trials


def draw_conflict(task: Task, n: int, *, seed: int, stream: str) -> Trials:
    """Exactly `n` conflict trials: batches of the stream in order, congruent trials left out.

    Raises:
        HysteresisError: a task whose two rules hardly ever disagree.

    Example:
        >>> trials = draw_conflict(AssociativeRecall(), 100, seed=0, stream="evaluation")
        >>> len(trials), bool(trials.conflict.all())
        (100, True)
    """
    kept: list[Trials] = []
    for index in range(100):
        trials = draw(task, n, seed=seed, stream=stream, index=index)
        kept.append(trials.select(trials.conflict))
        if sum(map(len, kept)) >= n:
            return concatenate(kept).select(slice(n))
    raise HysteresisError(
        f"only {sum(map(len, kept))} of {100 * n} trials are conflict trials, "
        f"{n} are needed: the two rules hardly ever disagree"
    )


def concatenate(parts: Sequence[Trials]) -> Trials:
    """The trials of several sets, one after another.

    Raises:
        HysteresisError: sets of different length or different roles.
    """
    first = parts[0]
    for part in parts[1:]:
        if _kind(part) != _kind(first):
            raise HysteresisError(f"{_kind(part)} do not follow {_kind(first)}")
    roles = [part.roles for part in parts if part.roles is not None]
    return Trials(
        tokens=torch.cat([part.tokens for part in parts]),
        contextual=torch.cat([part.contextual for part in parts]),
        fixed=torch.cat([part.fixed for part in parts]),
        roles=torch.cat(roles) if roles else None,
        role_names=first.role_names,
    )


def _token_ids(
    ids: Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
) -> Tensor:
    """As int64, if whole numbers are given."""
    if not isinstance(ids, Tensor) and any(isinstance(x, Tensor) for x in ids):
        ids = torch.stack([torch.as_tensor(x) for x in ids])
    try:
        given = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise HysteresisError(f"token ids, such as model.to_tokens(...): {error}") from None
    whole = not given.is_floating_point() and given.dtype != torch.bool
    return given.long() if whole or not given.numel() else given


def _kind(trials: Trials) -> str:
    roles = "without roles" if trials.roles is None else f"with roles {trials.role_names}"
    return f"trials of {trials.tokens.shape[1]} positions {roles}"


@dataclass(frozen=True, eq=False)
class Batch:
    """Labelled examples: prompts, the answer each is trained towards, and the rule it follows.

    Attributes:
        tokens: prompts.
        targets: the token that each is trained to answer.
        contextual: True where the target follows the contextual rule, False where the fixed one.
    """

    tokens: Int[Tensor, "*member trial pos"]
    targets: Int[Tensor, "*member trial"]
    contextual: Bool[Tensor, "*member trial"]

    @classmethod
    def stack(cls, batches: Sequence[Batch]) -> Batch:
        """One batch a member, as one batch with a leading `member` axis."""
        return cls(
            torch.stack([batch.tokens for batch in batches]),
            torch.stack([batch.targets for batch in batches]),
            torch.stack([batch.contextual for batch in batches]),
        )

    def to(self, device: torch.device | str) -> Batch:
        """The same examples on another device."""
        return Batch(self.tokens.to(device), self.targets.to(device), self.contextual.to(device))


Labels = Literal["stratified", "independent"]
"""How a batch's targets are assigned to the two rules; see `labelled_batch`."""


def labelled_batch(
    task: Task,
    n: int,
    *,
    seed: int,
    stream: str,
    index: int,
    mixture: float,
    labels: Labels = "stratified",
    noise: float = 0.0,
) -> Batch:
    """Training examples: each target follows the contextual rule with probability `mixture`.

    With probability `noise` a target is a token drawn uniformly from the vocabulary instead.

    A trial's coin is one uniform number, drawn apart from its tokens and compared with the mixture:
    the same index at two mixtures has the same prompts, and only the targets in between differ.
    Stratified coins are the points of a randomly shifted grid in random order. Each is uniform by
    itself, but a batch has n * mixture contextual targets to within one, so that two branches whose
    last batches differ do not differ in how often either rule was seen there. Independent coins
    leave that to chance.

    Example:
        >>> task, where = AssociativeRecall(), dict(seed=0, stream="anchor", index=0)
        >>> low, high = (labelled_batch(task, 64, mixture=p, **where) for p in (0.0, 1.0))
        >>> trials = draw(task, 64, **where)
        >>> torch.equal(low.targets, trials.fixed), torch.equal(high.targets, trials.contextual)
        (True, True)
        >>> torch.equal(low.tokens, high.tokens)
        True
    """
    for what, share in (("mixture", mixture), ("noise", noise)):
        if not 0.0 <= share <= 1.0:
            raise HysteresisError(f"{what} = {share}: a probability lies in [0, 1]")
    trials = draw(task, n, seed=seed, stream=stream, index=index)
    rng = generator(seed, f"{stream}/coins", index)
    contextual = torch.from_numpy(_coins(n, labels, rng) < mixture)
    targets = torch.where(contextual, trials.contextual, trials.fixed)
    if noise:
        rng = generator(seed, f"{stream}/noise", index)
        noisy = torch.from_numpy(_coins(n, labels, rng) < noise)
        tokens = torch.from_numpy(rng.integers(task.d_vocab, size=n))
        targets = torch.where(noisy, tokens, targets)
    return Batch(trials.tokens, targets, contextual)


def _coins(n: int, labels: Labels, rng: np.random.Generator) -> Float[np.ndarray, " trial"]:
    return rng.random(n) if labels == "independent" else (rng.permutation(n) + rng.random()) / n
