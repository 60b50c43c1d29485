"""Speed and memory, as ratios within one run: absolute times move with the machine.

Run with `make bench`. Each figure is the median of interleaved repeats, so that a slow moment of
the machine falls on all of them.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

from tl_hysteresis.config import StudyConfig
from tl_hysteresis.models import build_model, hooked_config
from tl_hysteresis.schedules import constant_plan
from tl_hysteresis.tasks import Batch, make_task
from tl_hysteresis.training import Population

REPEATS, UPDATES = 7, 6


def main() -> None:
    """Print every figure."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    training()
    startup()


def training() -> None:
    """Model-updates a second: the stack, a plain loop, and the bare matrix products."""
    config = StudyConfig()
    task = make_task(config.task)
    shape = hooked_config(config.model, d_vocab=task.d_vocab, n_ctx=task.n_ctx)
    plan = constant_plan(UPDATES, 0.5, stream="bench")
    size = config.optimizer.batch_size

    def stack(members: int) -> Callable[[], None]:
        population = Population.build(shape, config.optimizer, seeds=range(members))
        batches = [
            Batch.stack([plan.batch(u, task=task, seed=s, batch_size=size) for s in range(members)])
            for u in range(UPDATES)
        ]

        def run() -> None:
            for batch in batches:
                population.step(batch)

        return run

    def plain() -> Callable[[], None]:
        model = build_model(shape, seed=0)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.optimizer.learning_rate,
            weight_decay=config.optimizer.weight_decay,
        )
        batches = [plan.batch(u, task=task, seed=0, batch_size=size) for u in range(UPDATES)]

        def run() -> None:
            for batch in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(batch.tokens)[:, -1], batch.targets).backward()
                optimizer.step()

        return run

    def products() -> Callable[[], None]:
        """One model's matrix products of an update, forward and backward, and nothing else."""
        rows, width, hidden, last = size * task.n_ctx, shape.d_model, int(shape.d_mlp or 0), size
        heads, d_head, pos = shape.n_heads, shape.d_head, task.n_ctx
        linear = [
            *((rows, width, 3 * width), (rows, width, width)),
            *((rows, width, hidden), (rows, hidden, width)),
            *((rows, width, 2 * width), (last, width, width), (last, width, width)),
            *((last, width, hidden), (last, hidden, width), (last, width, shape.d_vocab)),
        ]
        matrices = [(torch.randn(n, i), torch.randn(i, o), torch.randn(n, o)) for n, i, o in linear]
        attention = [
            (torch.randn(size * heads, queries, d_head), torch.randn(size * heads, pos, d_head))
            for queries in (pos, 1)
        ]

        def run() -> None:
            for _ in range(UPDATES):
                for x, weight, gradient in matrices:
                    x @ weight, gradient @ weight.T, x.T @ gradient
                for query, key in attention:
                    scores = query @ key.transpose(1, 2)
                    # Scores, output, and the four products of their backward pass.
                    scores @ key, scores @ key, scores.transpose(1, 2) @ query
                    scores.transpose(1, 2) @ query, query @ key.transpose(1, 2)

        return run

    members_of = {"stack of 1": 1, "stack of 5": 5, "stack of 10": 10}
    runs = {name: stack(members) for name, members in members_of.items()}
    runs |= {"plain loop": plain(), "matrix products alone": products()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 1):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            if repeat:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - begun)
    print("\ntraining, default model and batch      model-updates/s   against the plain loop")
    for name, taken in seconds.items():
        rates = [members_of.get(name, 1) * UPDATES / t for t in taken]
        pairs = [
            members_of.get(name, 1) * p / t
            for t, p in zip(taken, seconds["plain loop"], strict=True)
        ]
        print(f"  {name:<36}{median(rates):12.1f}{median(pairs):22.2f} x")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  peak memory of this process: {peak:.0f} MiB")


def startup() -> None:
    """Seconds until the package is imported, and until `--help` has answered."""
    print("\nstart                                          seconds   against a bare interpreter")
    commands = {
        "python -c pass": ["-c", "pass"],
        "import tl_hysteresis": ["-c", "import tl_hysteresis"],
        "tl-hysteresis --help": ["-m", "tl_hysteresis", "--help"],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for repeat in range(REPEATS + 1):
        for name, arguments in commands.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            if repeat:
                taken[name].append(time.perf_counter() - begun)
    bare = median(taken["python -c pass"])
    for name, seconds in taken.items():
        print(f"  {name:<36}{median(seconds):16.3f}{median(seconds) / bare:22.1f} x")


if __name__ == "__main__":
    main()
