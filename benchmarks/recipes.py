"""From the options of the command line to a `Method` of the package."""

from __future__ import annotations

from argparse import Namespace

from consensus_opt import Method, dppf, gossip_sgd, local_sgd, post_local, quadratic_sync


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
        return gossip_sgd(topology, period=options.period, exchanges=options.exchanges)
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
