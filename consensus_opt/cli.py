"""The ``consensus-opt`` command: look at a topology, plan a run, check an installation.

Each subcommand is a function from its arguments to an exit status. Tables are for people; with
``--json`` the same numbers go to standard output as one object. What the library refuses is shown
as it says it, in one line, with exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from consensus_opt import __version__, doctor, planner, units
from consensus_opt.topology import topology
from consensus_opt.topology_profile import Profile, profile

T = TypeVar("T")

_MOST_WORKERS = 512
_EPILOG = """\
A plan compares an all-reduce of the parameters with gossip over several topologies, for several
periods. It predicts the time of a step (alpha-beta model, full duplex links, no overlap with
computing), what a worker sends in it, and how far apart the workers are where they take gradients,
as a fraction of Xi_max, the distance of a ring with one exchange after each step. Where one
exchange misses the target, the fewest that meet it are shown too.

Recommended is the fastest that meets the target; of those within 1% of it, the one with the
smallest distance. The models, and what they leave out: consensus_opt/planner.py.
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"consensus-opt {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def show_topology(options: argparse.Namespace) -> int:
    """Print, and draw if asked to, what a topology does."""
    graph = topology(options.name)
    facts = profile(graph, options.workers, options.params * planner.ITEMSIZES[options.dtype])
    if options.png:
        _optional("matplotlib")
        from consensus_opt.drawing import draw

        draw(graph, options.workers, options.png)
    if options.json:
        _print_json(_of_profile(facts, options.png))
        return 0
    _optional("rich")
    from consensus_opt.tables import print_profile

    print_profile(facts, options.png)
    return 0


def show_plan(options: argparse.Namespace) -> int:
    """Compare methods on a network, and recommend one."""
    network = planner.Network(options.bandwidth, options.latency)
    job = planner.Job(options.params, options.workers, network, options.step_time, options.dtype)
    found = planner.plan(job, options.topologies, options.periods, options.target, options.most)
    if options.json:
        best = found.recommended
        _print_json(
            {
                **dataclasses.asdict(job),
                "xi_max": found.xi_max,
                "target": found.target,
                "candidates": [_of_candidate(each) for each in found.candidates],
                "recommended": best and _of_candidate(best),
            }
        )
        return 0
    _optional("rich")
    from consensus_opt.tables import print_plan

    print_plan(job, found)
    return 0


def show_doctor(options: argparse.Namespace) -> int:
    """Report engines; 1 if something that is installed does not work."""
    report = doctor.examine(options.timeout)
    if options.json:
        _print_json(dataclasses.asdict(report))
    else:
        _optional("rich")
        from consensus_opt.tables import print_report

        print_report(report)
    return int(report.broken)


def _of_profile(facts: Profile, png: Path | None) -> dict[str, Any]:
    bytes_of = {"worker_bytes": facts.worker_bytes, "png": png and str(png)}
    return {**dataclasses.asdict(facts), "gap": facts.gap, **bytes_of}


def _of_candidate(candidate: planner.Candidate) -> dict[str, Any]:
    return {**dataclasses.asdict(candidate), "recipe": candidate.recipe}


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=1, allow_nan=False))


def _optional(module: str) -> None:
    if find_spec(module) is None:
        uses = {"rich": "tables, which --json does without", "matplotlib": "--png"}[module]
        raise ModuleNotFoundError(
            f"{module} is not installed, and is needed for {uses}; "
            "write pip install 'consensus-opt[report]'"
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="consensus-opt", description="Consensus instead of gradient all-reduce.")
    parser.add_argument("--version", action="version", version=f"consensus-opt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_topology(commands.add_parser("topology", help="what a topology does; with a picture"))
    _add_plan(
        commands.add_parser(
            "plan",
            help="what methods would cost on a network, and which to take",
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    _add_doctor(commands.add_parser("doctor", help="which engines work here, and what is missing"))
    return parser


def _add_topology(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=show_topology)
    parser.add_argument("--name", required=True, help="ring, torus:4x2, base3, ...")
    _add_workers(parser, least=1)
    _add_model(parser, default="25.6M")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the graph and its mixing")
    _add_json(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=show_plan)
    _add_workers(parser, least=2)
    _add_model(parser)
    add = parser.add_argument
    add("--bandwidth", type=_said(units.bandwidth), required=True, help="of a worker: 10Gbit")
    add("--latency", type=_said(units.duration), required=True, help="of a message: 50us")
    step = _said(units.duration)
    add("--step-time", type=step, required=True, help="of a local step: 0.25, 250ms")
    names, periods = " ".join(planner.TOPOLOGIES), " ".join(map(str, planner.PERIODS))
    known = list(planner.TOPOLOGIES)
    add("--topologies", nargs="+", default=known, metavar="NAME", help=f"default: {names}")
    whole, standard = _said(_whole), list(planner.PERIODS)
    add(
        "--periods",
        nargs="+",
        type=whole,
        default=standard,
        metavar="TAU",
        help=f"default: {periods}",
    )
    add("--target", type=float, default=0.25, help="distance allowed, in Xi_max (0.25)")
    add("--most", type=whole, default=16, help="most exchanges in a round (16)")
    _add_json(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=show_doctor)
    timeout = "given to each engine to load (60s)"
    parser.add_argument("--timeout", type=_said(units.duration), default=60.0, help=timeout)
    _add_json(parser)


def _add_workers(parser: argparse.ArgumentParser, least: int) -> None:
    parser.add_argument("-n", "--workers", type=_said(_workers(least)), required=True, metavar="N")


def _add_model(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "--params",
        type=_said(units.count),
        default=default,
        required=default is None,
        help="parameters of the model: 25.6M" + (" (ResNet-50's, the default)" if default else ""),
    )
    known = list(planner.ITEMSIZES)
    parser.add_argument("--dtype", choices=known, default="fp32", help="of them (fp32)")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _workers(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = _whole(text)
        if not least <= number <= _MOST_WORKERS:
            raise ValueError(
                f"the number of workers is {number}; it must be from {least} to {_MOST_WORKERS}, "
                "because matrices of that size are formed; write 32"
            )
        return number

    return convert


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no number; it must be a whole number; write 4")
    return int(text)


def _said(convert: Callable[[str], T]) -> Callable[[str], T]:
    """Let argparse show the ``ValueError``'s own words."""

    def converted(text: str) -> T:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


if __name__ == "__main__":
    sys.exit(main())
