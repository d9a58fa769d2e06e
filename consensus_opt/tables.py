"""The command's tables for people, made with rich; only imported where one is shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from consensus_opt.doctor import Report
from consensus_opt.planner import Candidate, Job, Plan
from consensus_opt.topology_profile import Profile
from consensus_opt.units import scaled


def print_profile(facts: Profile, png: Path | None) -> None:
    """Show the facts of a topology."""
    console = Console(highlight=False)
    title = f"{facts.name}, {facts.workers} worker{'s' * (facts.workers > 1)}"
    table = Table(title=title, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for label, value in _facts(facts):
        table.add_row(label, value)
    console.print(table)
    reach = Table(title="Exchanges to leave at most this much of a distance")
    reach.add_column("left")
    for column in ("random", "at worst", "accelerated: random", "at worst"):
        reach.add_column(column, justify="right")
    for row in facts.reach:
        counts = (row.random, row.worst, row.accelerated_random, row.accelerated_worst)
        cells = ["-" if each is None else str(each) for each in counts]
        reach.add_row(f"1/{round(1 / row.fraction)}", *cells)
    console.print(reach)
    console.print(
        "random: differences such as gradient noise makes; at worst: any. accelerated: exchanges "
        "made together, with weights of their own (accelerated=True), in a fixed undirected graph.",
        style="dim",
    )
    if png:
        console.print(f"drawn: {escape(str(png))}")


def _facts(facts: Profile) -> list[tuple[str, str]]:
    low, high = facts.degree
    cycle = "never repeats" if facts.cycle is None else f"{facts.cycle}"
    of_cycle = f" (of {facts.cycle} exchanges)" * ((facts.cycle or 1) > 1)
    size = scaled(facts.message_bytes, "B")
    spectrum = [("lambda_2", facts.lambda_2), ("gap", facts.gap), ("p", facts.p)]
    return [
        ("cycle, exchanges", cycle),
        ("degree (messages a worker sends)", f"{low}" if low == high else f"{low} to {high}"),
        *((f"{k}{of_cycle}", "-" if v is None else f"{v:.4g}") for k, v in spectrum),
        ("messages an exchange", f"{facts.messages:.4g}, of {size}"),
        ("bytes an exchange", f"{scaled(facts.worker_bytes, 'B')} a worker, "
         f"{scaled(facts.worker_bytes * facts.workers, 'B')} in all"),
    ]  # fmt: skip


def print_plan(job: Job, plan: Plan) -> None:
    """Show the candidates, and the recommended one."""
    console = Console(highlight=False)
    network = job.network
    size = f"{scaled(job.params, '').strip()} parameters ({job.dtype})"
    console.print(
        f"{size} on {job.workers} workers; links of {scaled(8 * network.bandwidth, 'bit/s')} each "
        f"way, latency {scaled(network.latency, 's')}; a step takes {scaled(job.step_seconds, 's')}"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column()
    table.add_column("average", no_wrap=True)
    for column in ("period", "exch.", "a step", "share", "sent", "distance"):
        table.add_column(column, justify="right", no_wrap=True)
    for before, each in zip((None, *plan.candidates), plan.candidates, strict=False):
        if before is not None and before.period != each.period:
            table.add_section()
        best = each is plan.recommended
        cells = ">" if best else "", *_cells(each)
        table.add_row(*cells, style="bold green" if best else None)
    console.print(table)
    console.print(
        "share: of communication. sent: by a worker in a step, as a mean. distance: in Xi_max, the "
        "distance of a ring with one exchange every step; * within the target of "
        f"{plan.target:g}. a: accelerated exchanges.",
        style="dim",
    )
    if plan.xi_max < 1e-9:
        console.print("A ring of 2 or 3 workers is exact: Xi_max is 0; there is no ratio to it.")
    console.print(_advice(plan))


def _cells(each: Candidate) -> Sequence[str]:
    relative = "-" if each.relative is None else f"{each.relative:.3f}"
    return (
        each.average,
        str(each.period),
        f"{each.exchanges}{' a' * each.accelerated}",
        scaled(each.seconds, "s", 4),
        f"{each.share:.1%}",
        scaled(each.bytes, "B", 4),
        f"{relative}{'*' if each.meets else ' '}",
    )


def _advice(plan: Plan) -> str:
    best = plan.recommended
    if best is None:
        nearest = min(plan.candidates, key=lambda each: each.distance)
        return escape(
            f"Nothing here holds the distance within {plan.target:g} Xi_max; nearest is "
            f"{nearest.recipe}. Allow a shorter period (--periods 1) or a larger --target."
        )
    return (
        f"Recommended: [bold]{escape(best.recipe)}[/bold], {scaled(best.seconds, 's', 4)} a step: "
        "the fastest within the target; of those within 1% of it, the one of smallest distance."
    )


def print_report(report: Report) -> None:
    """Show what is installed and what is missing."""
    console = Console(highlight=False)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(versions)
    table = Table("engine", "state", "details")
    for each in report.engines:
        style = {"works": "green", "broken": "bold red"}.get(each.state, "yellow")
        table.add_row(each.name, f"[{style}]{each.state}[/{style}]", escape(each.details))
    console.print(table)
    launchers = Table("launcher", "where")
    for name, place in report.launchers.items():
        launchers.add_row(name, escape(place) if place else "[yellow]not found[/yellow]")
    console.print(launchers)
    for each in report.engines:
        if each.remedy:
            console.print(f"{each.name}: {each.remedy}", markup=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
