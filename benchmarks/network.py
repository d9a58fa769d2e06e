"""The planner's predictions against real exchanges over links of a known speed.

    python -m benchmarks.network --json runs/network.json          (as root, with iproute2)

Each worker gets a network namespace, as if it were a machine, with one link to a bridge in another
namespace. Both ends of a link are limited by ``tc``'s token bucket, so that neither what a worker
sends nor what it receives is faster. The ranks are ordinary torch.distributed processes (gloo).

The machine's own network is not touched: all links live inside the namespaces and go with them, at
the end, after an error, and on Ctrl-C. Namespaces of a run that was killed outright are removed by
the next one.

Times are the fastest of the repetitions, because whatever else runs on the machine only adds time;
the latency is that of an exchange of one value.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.launchers import ROOT
from benchmarks.measuring import slowest
from consensus_opt import units
from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.planner import Network
from consensus_opt.topology import OnePeerExponential, Ring

WITHIN = 0.25
_PREFIX = "consensus-opt"
_LINK = "eth0"
_PORT = 29500
_TIMEOUT = 240.0
_WORDS = {"ring": Ring(), "one peer": OnePeerExponential()}


def obstacle() -> str | None:
    """What keeps this process from making namespaces, and what to do; None if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces can only be made by root; run it with sudo"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; apt-get install iproute2"
    try:
        with cluster(1, 1e6):
            return None
    except subprocess.CalledProcessError as error:
        return (
            f"the system refuses {' '.join(error.cmd)} ({str(error.stderr).strip()}); start a "
            "container with --cap-add NET_ADMIN --cap-add SYS_ADMIN, on a kernel with sch_tbf"
        )


@contextmanager
def cluster(n: int, bandwidth: float) -> Iterator[list[str]]:
    """Make n namespaces whose links carry ``bandwidth`` bytes a second each way; yield their names.

    Worker m has the address 10.0.0.(m + 1) on the link ``eth0``. All is removed at the end, with
    every process that still runs inside.
    """
    remove_stale()
    switch, *workers = names = [f"{_PREFIX}-{os.getpid()}-{each}" for each in ("switch", *range(n))]
    with ExitStack() as stack:
        stack.callback(_undisturbed, lambda: _remove(*names))
        for name in names:
            _run("ip", "netns", "add", name)
        _ip(switch, "link", "add", "bridge", "type", "bridge")
        _ip(switch, "link", "set", "bridge", "up")
        for m, worker in enumerate(workers):
            _ip(switch, "link", "add", f"w{m}", "type", "veth", "peer", _LINK, "netns", worker)
            _ip(switch, "link", "set", f"w{m}", "master", "bridge", "up")
            _ip(worker, "address", "add", f"10.0.0.{m + 1}/24", "dev", _LINK)
            _ip(worker, "link", "set", "lo", "up")
            _ip(worker, "link", "set", _LINK, "up")
            _limit(switch, f"w{m}", bandwidth)
            _limit(worker, _LINK, bandwidth)
        yield workers


def remove_stale() -> None:
    """Remove the namespaces of runs whose process is gone."""
    listed = _run("ip", "netns", "list").split()
    for name in listed:
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-\w+", name)
        if match and not Path("/proc", match[1]).exists():
            _remove(name)


def _limit(namespace: str, device: str, bandwidth: float) -> None:
    rate = f"{round(8 * bandwidth)}bit"
    token_bucket = ["tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *token_bucket)


def _remove(*names: str) -> None:
    """Remove namespaces with their processes and links; nothing to do where there is none."""
    for name in names:
        with suppress(subprocess.CalledProcessError):
            for pid in _run("ip", "netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "delete", name)


def _undisturbed(function: Callable[[], Any]) -> None:
    """Call a function that a further Ctrl-C must not interrupt."""
    known = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, signal.SIG_IGN) for each in known]
    try:
        function()
    finally:
        for each, handler in zip(known, before, strict=True):
            signal.signal(each, handler)


def _ip(namespace: str, *words: str) -> None:
    _run("ip", "-n", namespace, *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout


def measure_in(
    workers: Sequence[str], module: str, arguments: Sequence[str], timeout: float = _TIMEOUT
) -> dict[str, Any]:
    """Run a module in each namespace and return what its rank 0 wrote to the file `--rank-of`.

    Raises:
        RuntimeError: A rank failed, or they were not done in time; with what it printed.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file = Path(folder, "measured.json")
        logs = [stack.enter_context(Path(folder, f"{m}").open("w+")) for m in range(len(workers))]
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_undisturbed, lambda: _end(processes))
        for m, (worker, log) in enumerate(zip(workers, logs, strict=True)):
            command = ["ip", "netns", "exec", worker, sys.executable, "-m", module]
            command += [*arguments, f"--rank-of={file}"]
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=_environment(m, len(workers)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        failed = _first_failure(processes, timeout)
        if failed is not None:
            logs[failed].seek(0)
            raise RuntimeError(f"rank {failed} did not finish:\n{logs[failed].read()[-4000:]}")
        measured: dict[str, Any] = json.loads(file.read_text())
        return measured


def _environment(rank: int, size: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": _LINK,
        "TP_SOCKET_IFNAME": _LINK,
        "OMP_NUM_THREADS": "1",
    }


def _first_failure(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> int | None:
    """Wait for all; return the rank that failed first, or that is not done at the end."""
    deadline = time.monotonic() + timeout
    while True:
        states = [process.poll() for process in processes]
        for rank, state in enumerate(states):
            if state or (state is None and time.monotonic() > deadline):
                return rank
        if None not in states:
            return None
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def measure(values: int, repetitions: int) -> dict[str, Any]:
    """Time exchanges and an all-reduce of ``values`` fp32 numbers; a collective call."""
    transport = TorchTransport(timeout=60.0)
    n, one, flat = transport.size, torch.zeros(1), torch.randn(values)

    def exchange(what: str, data: torch.Tensor) -> Callable[[int], None]:
        graph = _WORDS[what]
        return lambda turn: transport.exchange(data, graph.mixing(n, turn))

    contenders = {what: exchange(what, flat) for what in _WORDS}
    contenders["all-reduce"] = lambda turn: transport.mean(flat)
    small = exchange("one peer", one)
    latencies = [slowest(transport, partial(small, turn)) for turn in range(30)]
    seconds: dict[str, list[float]] = {what: [] for what in contenders}
    for turn in range(repetitions):
        for what, run in contenders.items():
            seconds[what].append(slowest(transport, partial(run, turn)))
    return {"latency": statistics.median(latencies), "seconds": seconds}


def compare(
    n: int, bandwidth: float, values: int, measured: dict[str, Any]
) -> list[dict[str, Any]]:
    """Put the planner's predictions beside what was measured on n workers."""
    network, size = Network(bandwidth, measured["latency"]), 4 * values
    predicted = {w: network.exchange_seconds(g.mixing(n), size) for w, g in _WORDS.items()}
    predicted["all-reduce"] = network.all_reduce_seconds(n, size)
    return [
        {
            "workers": n,
            "bandwidth": bandwidth,
            "latency": network.latency,
            "bytes": size,
            "what": what,
            "predicted": predicted[what],
            "measured": min(times),
            "all": times,
            "error": min(times) / predicted[what] - 1,
        }
        for what, times in measured["seconds"].items()
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the comparison."""
    size = units.scaled(rows[0]["bytes"], "B")
    table = Table(title=f"An exchange of {size}, between network namespaces, gloo")
    for column in ("workers", "link each way", "what", "predicted, s", "measured, s", "error"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        numbers = (f"{row['predicted']:.3f}", f"{row['measured']:.3f}", f"{row['error']:+.1%}")
        link = units.scaled(8 * row["bandwidth"], "bit/s")
        table.add_row(str(row["workers"]), link, row["what"], *numbers)
    Console().print(table)


def main() -> int:
    """Measure in namespaces and compare; or be one of the ranks."""
    options = _options()
    if options.rank_of:
        _be_a_rank(options)
        return 0
    reason = obstacle()
    if reason:
        print(f"SKIPPED, nothing was measured: {reason}")
        _write(options.json, {"skipped": reason})
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = []
    arguments = [f"--params={options.params}", f"--repetitions={options.repetitions}"]
    for n in options.workers:
        for bandwidth in options.bandwidths:
            with cluster(n, bandwidth) as workers:
                measured = measure_in(workers, "benchmarks.network", arguments)
            rows += compare(n, bandwidth, options.params, measured)
    show(rows)
    worst = max(abs(row["error"]) for row in rows)
    print(f"largest error {worst:.1%}, allowed {WITHIN:.0%}")
    _write(options.json, {"largest_error": worst, "allowed": WITHIN, "rows": rows})
    return int(worst > WITHIN)


def _write(file: Path | None, content: dict[str, Any]) -> None:
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    rates = [units.bandwidth("200Mbit"), units.bandwidth("500Mbit")]
    parser.add_argument("--bandwidths", type=units.bandwidth, nargs="+", default=rates)
    parser.add_argument("--params", type=units.count, default="4M", help="fp32 values (4M)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each measurement (5)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _be_a_rank(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    measured = measure(options.params, options.repetitions)
    if dist.get_rank() == 0:
        options.rank_of.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
