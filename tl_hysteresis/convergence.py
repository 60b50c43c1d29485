"""Whether an anchor has converged, and when its contextual route formed."""

from __future__ import annotations

import pandas as pd

from tl_hysteresis.config import StudyConfig


def judge_convergence(course: pd.DataFrame, config: StudyConfig) -> pd.DataFrame:
    """Whether each anchor has converged, and when its contextual route formed.

    Converged means, on conflict trials: the loss is near the entropy floor, nearly every greedy
    answer is one of the two, and the margin no longer drifts (`AnchorConfig` has the three bounds).
    The contextual route is taken as formed at the first evaluation from which on the contextual
    answer's mean probability stays above half of p0: before, the model knows the fixed rule only.

    Returns:
        One row a seed: `seed`, `converged`, `excess_loss` (nats), `answer_share`, `margin_drift`
        (logits), `route_formed_at` (updates; empty if it never formed).
    """
    settings, rows = config.anchor, []
    for seed, part in course.groupby("seed", sort=False):
        last, fifth = part.iloc[-1], max(len(part) // 5, 1)
        drift = abs(part["margin"][-fifth:].mean() - part["margin"][-2 * fifth : -fifth].mean())
        excess = last["loss"] - last["floor"]
        below = part["contextual"] < config.schedule.p0 / 2
        formed = part.loc[~below[::-1].cummax()[::-1], "update"]
        rows.append(
            {
                "seed": seed,
                "converged": bool(
                    excess <= settings.excess_loss
                    and last["answer_share"] >= settings.answer_share
                    and drift <= settings.margin_drift
                ),
                "excess_loss": excess,
                "answer_share": last["answer_share"],
                "margin_drift": drift,
                "route_formed_at": None if formed.empty else int(formed.iloc[0]),
            }
        )
    return pd.DataFrame(rows).astype({"route_formed_at": "Int64"})
