"""The command line of `benchmarks.train`: every number of a run is an option, and is recorded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.data import DATA_SETS
from benchmarks.launch import ENGINES
from benchmarks.models import MODELS, NORMS
from benchmarks.recipes import recipe
from benchmarks.sharding import SHARDINGS
from consensus_opt.state import POLICIES

Number = TypeVar("Number", int, float)

DEEPSPEED_CONFIG = "integrations/launch/deepspeed.json"
METHODS = (
    *("sync", "local_sgd", "gossip", "dppf"),
    *("post_local", "quadratic_sync", "consensus_control", "dsgd_ac"),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options; a wrong one ends the program with what is allowed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train",
        usage="%(prog)s [options]",
        description="Train one model on several workers that average parameters, or gradients.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _task(parser)
    _method(parser)
    _training(parser)
    _run(parser)
    options = parser.parse_args(arguments)
    if options.sharding and options.method == "sync":
        parser.error("--sharding is for replicas that average parameters; choose another --method")
    if (options.sharding or "").startswith("zero") and not options.deepspeed_config:
        options.deepspeed_config = DEEPSPEED_CONFIG
    if options.deepspeed_config:
        options.engine = "deepspeed"
        config = json.loads(Path(options.deepspeed_config).read_text())
        options.method = config["consensus"]["method"]
        if options.checkpoint:
            parser.error("--checkpoint is not for a DeepSpeed engine, which has save_checkpoint()")
        return options
    if options.engine == "deepspeed" and options.method != "sync":
        parser.error("--engine deepspeed needs --deepspeed-config FILE, which holds the method")
    if options.checkpoint and options.method == "sync":
        parser.error("--checkpoint holds states of workers; write a --method other than sync")
    try:
        recipe(options, steps=1)
    except ValueError as error:
        parser.error(str(error))
    return options


def _task(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("task")
    group.add_argument("--data", choices=DATA_SETS, default="digits", help="data set")
    group.add_argument("--data-dir", help="folder of the Fashion-MNIST files")
    group.add_argument("--limit", type=positive_int, help="use only the first training images")
    group.add_argument(
        "--downsample", type=positive_int, default=1, help="side of the blocks averaged to a pixel"
    )
    group.add_argument("--model", choices=MODELS, default="cnn", help="model")
    group.add_argument("--norm", choices=NORMS, default="batch", help="normalisation of resnet20")


def _method(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("method")
    group.add_argument(
        "--method", choices=METHODS, default="dppf", help="sync averages gradients in every step"
    )
    group.add_argument("--period", type=positive_int, default=4, help="steps between rounds")
    group.add_argument(
        "--topology", help="who exchanges with whom in gossip and dppf: ring, one_peer_exponential"
    )
    group.add_argument("--exchanges", type=positive_int, default=1, help="exchanges in a round")
    group.add_argument(
        "--accelerated", action="store_true", help="gossip: weigh exchanges so that they mix best"
    )
    group.add_argument(
        "--rho", type=positive, default=0.25, help="consensus_control: target rho * phi"
    )
    group.add_argument(
        "--target", type=float, help="consensus_control: a fixed target distance instead of rho"
    )
    group.add_argument(
        "--until-controlled", type=fraction, default=0.5, help="part of training under control"
    )
    group.add_argument("--most", type=positive_int, default=16, help="most exchanges in a round")
    group.add_argument("--state", choices=POLICIES, default="local", help="momentum in gossip")
    group.add_argument("--alpha", type=float, default=0.1, help="pull of dppf")
    group.add_argument("--lam", type=float, default=0.5, help="push of dppf")
    group.add_argument("--schedule", default="cosine_up", help="course of the push in training")
    group.add_argument(
        "--until", type=fraction, default=0.5, help="post_local: average each step until here"
    )
    group.add_argument(
        "--coefficient", type=float, default=0.1, help="quadratic_sync: period (coefficient/lr)^2"
    )


def _training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=positive_int, default=40, help="passes over the data")
    group.add_argument("--batch-size", type=positive_int, default=32, help="of each worker")
    group.add_argument("--lr", type=positive, default=0.1, help="highest learning rate")
    group.add_argument("--momentum", type=fraction, default=0.9, help="of SGD, in each worker")
    group.add_argument(
        "--nesterov", action=argparse.BooleanOptionalAction, default=True, help="kind of momentum"
    )
    group.add_argument("--weight-decay", type=float, default=1e-3, help="of SGD")
    group.add_argument("--warmup", type=fraction, default=0.1, help="part of training")
    group.add_argument(
        "--lr-schedule",
        choices=("step", "cosine", "constant"),
        default="cosine",
        help="step: a tenth after half of training, a hundredth after three quarters",
    )
    group.add_argument("--seed", type=natural, default=0, help="of the model and of the batches")


def _run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--out", default="runs/train", help="folder of the results")
    group.add_argument(
        "--checkpoint", help="folder of states: save one after each epoch, resume from the latest"
    )
    group.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU a worker"
    )
    group.add_argument(
        "--engine", choices=ENGINES, help="what carries the messages; by default the launcher's"
    )
    group.add_argument(
        "--deepspeed-config", help='DeepSpeed configuration, whose "consensus" block is the method'
    )
    group.add_argument(
        "--sharding", choices=SHARDINGS, help="how replicas of several ranks hold a model"
    )
    group.add_argument(
        "--replica-size", type=positive_int, default=2, help="ranks of a replica, with --sharding"
    )
    group.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # by launchers


def positive_int(text: str) -> int:
    return _number(text, int, lambda value: value >= 1, "a whole number from 1 up, such as 4")


def natural(text: str) -> int:
    return _number(text, int, lambda value: value >= 0, "a whole number from 0 up, such as 0")


def positive(text: str) -> float:
    return _number(text, float, lambda value: 0 < value < float("inf"), "a number above 0")


def fraction(text: str) -> float:
    return _number(text, float, lambda value: 0 <= value <= 1, "a fraction from 0 to 1, such as .5")


def _number(
    text: str, kind: Callable[[str], Number], allowed: Callable[[Number], bool], wanted: str
) -> Number:
    try:
        value = kind(text)
        if allowed(value):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not allowed; write {wanted}")
