"""Consensus control for decentralized training: wrap the optimizer that you have.

The way through the package: :class:`ConsensusOptimizer` counts steps and, when a *timing* says so,
forms an *average* with other workers over a *transport* and lets a *force* move the parameters. A
*method* is a value that names these parts.
"""

from consensus_opt.averaging import AllReduce, Gossip
from consensus_opt.buffers import Recompute
from consensus_opt.control import Fixed, KeepBelow
from consensus_opt.distance import Sketch
from consensus_opt.errors import EndOfDataError, PeerError, RankMismatchError
from consensus_opt.forces import Force
from consensus_opt.methods import (
    Method,
    consensus_control,
    dppf,
    dsgd_ac,
    gossip_sgd,
    local_sgd,
    post_local,
    quadratic_sync,
)
from consensus_opt.mixing import MixingMatrix
from consensus_opt.optimizer import ConsensusOptimizer
from consensus_opt.targets import GradientNorm, OfReference
from consensus_opt.telemetry import JsonLines, RoundRecord, TensorBoard
from consensus_opt.timing import Every, PostLocal, QuadraticSync
from consensus_opt.topology import Topology
from consensus_opt.transport import StackedTransport, Transport

__version__ = "0.1.0"

__all__ = [
    "AllReduce",
    "ConsensusOptimizer",
    "EndOfDataError",
    "Every",
    "Fixed",
    "Force",
    "Gossip",
    "GradientNorm",
    "JsonLines",
    "KeepBelow",
    "Method",
    "MixingMatrix",
    "OfReference",
    "PeerError",
    "PostLocal",
    "QuadraticSync",
    "RankMismatchError",
    "Recompute",
    "RoundRecord",
    "Sketch",
    "StackedTransport",
    "TensorBoard",
    "Topology",
    "Transport",
    "consensus_control",
    "dppf",
    "dsgd_ac",
    "gossip_sgd",
    "local_sgd",
    "post_local",
    "quadratic_sync",
]
