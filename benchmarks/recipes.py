"""From the options of the command line to a `Method` of the package."""

from __future__ import annotations

from argparse import Namespace

from consensus_opt import (
    GradientNorm,
    Method,
    consensus_control,
    dppf,
    dsgd_ac,
    gossip_sgd,
    local_sgd,
    post_local,
    quadratic_sync,
)


def recipe(options: Namespace, steps: int) -> Method | None:
    """The method that `--method` names, in a training of `steps` steps; none for sync.

    Raises:
        ValueError: a number or a topology that the recipe does not allow.
    """
    if options.method == "sync":
        return None
    if options.method == "local_sgd":
        return local_sgd(options.period)
    if options.method == "gossip":
        topology = options.topology or "ring"
        return gossip_sgd(
            topology,
            period=options.period,
            exchanges=options.exchanges,
            accelerated=options.accelerated,
            state=options.state,
        )
    if options.method == "consensus_control":
        return consensus_control(
            options.topology or "ring",
            GradientNorm(options.rho) if options.target is None else options.target,
            during=(0.0, options.until_controlled),
            most=options.most,
            period=options.period,
            state=options.state,
        )
    if options.method == "dsgd_ac":
        return dsgd_ac(options.topology or "ring", lr_reference=options.lr)
    if options.method == "dppf":
        return dppf(
            alpha=options.alpha,
            lam=options.lam,
            period=options.period,
            schedule=options.schedule,
            topology=options.topology,
            exchanges=options.exchanges,
        )
    if options.method == "post_local":
        return post_local(until=max(1, round(options.until * steps)), period=options.period)
    return quadratic_sync(coefficient=options.coefficient, min_period=options.period)
