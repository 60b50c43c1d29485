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
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from transformer_lens import patching as theirs

from tl_hysteresis.config import StudyConfig
from tl_hysteresis.factory import make_task
from tl_hysteresis.grid import Grid
from tl_hysteresis.measures import logit_margin
from tl_hysteresis.models import build_model, hooked_config
from tl_hysteresis.routes import RouteMap, route_map
from tl_hysteresis.schedules import constant_plan
from tl_hysteresis.sweep import run_sweep
from tl_hysteresis.tasks import Batch, Trials, draw_conflict, generator
from tl_hysteresis.training import Population

REPEATS, UPDATES = 7, 6


def main() -> None:
    """Print every figure."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    training()
    patching()
    sweeping()
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


def patching() -> None:
    """The whole route map of the study's model, against TransformerLens's own patching."""
    config = StudyConfig()
    task = make_task(config.task)
    shape = hooked_config(config.model, d_vocab=task.d_vocab, n_ctx=task.n_ctx)
    model = build_model(shape, seed=0)
    points = ["resid_pre", "resid_mid", "resid_post", "z"]
    resid_post = partial(
        theirs.generic_activation_patch,
        patch_setter=theirs.layer_pos_patch_setter,
        activation_name="resid_post",
        index_axis_names=("layer", "pos"),
    )
    maps: dict[str, Callable[..., torch.Tensor]] = {
        "resid_pre": theirs.get_act_patch_resid_pre,
        "resid_mid": theirs.get_act_patch_resid_mid,
        "resid_post": resid_post,
        "z": theirs.get_act_patch_attn_head_out_by_pos,
    }
    print("\nroute map, 3 points x 2 layers x 17 positions and 8 heads x 17 positions")
    print("  trials  corrupted                      seconds   transformer_lens.patching      ratio")
    for n, corruption in ((16, "value"), (256, "value"), (16, "all tokens"), (256, "all tokens")):
        clean = draw_conflict(task, n, seed=0, stream="bench")
        if corruption == "value":
            corrupted = task.corrupt(clean, "value", rng=generator(0, "bench", 0))
        else:
            corrupted = draw_conflict(task, n, seed=1, stream="bench")

        def metric(logits: torch.Tensor, clean: Trials = clean) -> torch.Tensor:
            return logit_margin(logits, clean).mean()

        def one_pass_a_site(
            clean: Trials = clean,
            corrupted: Trials = corrupted,
            metric: Callable[[torch.Tensor], torch.Tensor] = metric,
        ) -> dict[str, torch.Tensor]:
            with torch.no_grad():
                _, cache = model.run_with_cache(clean.tokens)
                base = metric(model(corrupted.tokens))
                found = {p: f(model, corrupted.tokens, cache, metric) for p, f in maps.items()}
                return {p: effects - base for p, effects in found.items()}

        def packed(clean: Trials = clean, corrupted: Trials = corrupted) -> RouteMap:
            return route_map(model, clean, corrupted, points=points, by="position")

        expected, found = one_pass_a_site(), packed()  # also a warm-up
        for point in points:
            effects = expected[point].transpose(1, -1) if point == "z" else expected[point]
            assert torch.allclose(found.tensor(point), effects.double(), atol=1e-5)
        runs: tuple[Callable[[], object], ...] = (packed, one_pass_a_site)
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(5):
            for taken, run in zip(seconds, runs, strict=True):
                begun = time.perf_counter()
                run()
                taken.append(time.perf_counter() - begun)
        ratio = median(b / a for a, b in zip(*seconds, strict=True))
        ours, whole = median(seconds[0]), median(seconds[1])
        print(f"  {n:6}  {corruption:<26}{ours:12.3f}{whole:28.3f}{ratio:11.1f} x")


def sweeping() -> None:
    """A sweep on two workers against one, each computing with one thread."""
    settings = {
        "seeds": [100],
        "threads": 1,
        "anchor": {"updates": 1, "evaluate_every": 1, "require_convergence": False},
        "schedule": {"steps": 4},
        "relaxation": {"measure_at": [0, 1]},
        "measurement": {"conflict_trials": 64, "patching_trials": 2, "circuits": False},
    }

    def seconds(folder: Path, dwells: range, workers: int, anchors: list[Path]) -> float:
        grid = Grid.of(settings, {"schedule.dwell": list(dwells)})
        start = time.perf_counter()
        assert run_sweep(grid, folder, workers=workers, anchors=anchors).complete
        return time.perf_counter() - start

    with TemporaryDirectory() as home:
        warm = Path(home, "warm")
        seconds(warm, range(1, 5), 2, [])  # starts the workers, which stay
        anchors = list((warm / "cells").iterdir())[:1]
        two, one = (seconds(Path(home, str(n)), range(12, 20), n, anchors) for n in (2, 1))
    print(f"sweep of 8 cells: one worker {one:.1f} s, two {two:.1f} s: {one / two:.2f}x as fast")


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
