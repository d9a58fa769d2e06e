"""One ordinary training loop, and what changes in it when workers average parameters.

    python -m benchmarks.train                                        # one worker
    torchrun --nproc-per-node 4 -m benchmarks.train --method dppf     # four of them
    mpirun -n 4 python -m benchmarks.train --method dppf              # by MPI

`one_epoch` is the loop of any PyTorch program and is the same for every method and engine. These
part in `launch.distribute`: for `sync` gradients are averaged in every step, for all others the
optimizer is wrapped. The model to judge in the end is the mean of the workers, which
`optimizer.averaged()` puts in place (see evaluate.py).
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from tqdm import tqdm

from benchmarks import data, record, report
from benchmarks.data import Split, load, steps_per_epoch
from benchmarks.evaluate import quality, traffic
from benchmarks.launch import Worker, distribute, launch
from benchmarks.models import build
from benchmarks.options import parse
from consensus_opt import checkpoint


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says, in as many processes as the launcher started."""
    options = parse(arguments)
    with launch(options.device, options.engine) as worker:
        train(options, worker)


def train(options: Namespace, worker: Worker) -> None:
    """Train one model on all workers, measure it after each epoch, and write it all down."""
    begun = time.perf_counter()
    split = load(options.data, options.data_dir, limit=options.limit, downsample=options.downsample)
    split = split.to(worker.device)
    torch.manual_seed(options.seed)
    model = build(options.model, split, options.norm).to(worker.device)
    steps = options.epochs * steps_per_epoch(len(split.train_x), options.batch_size, worker.size)
    inner = SGD(
        model.parameters(),
        lr=options.lr,
        momentum=options.momentum,
        nesterov=options.nesterov and options.momentum > 0,
        weight_decay=options.weight_decay,
    )
    network, optimizer = distribute(model, inner, options, worker, steps)
    before = resume(options.checkpoint, model, optimizer)
    out = record.prepare(Path(options.out), worker.first, before)
    first_step = before * steps // options.epochs
    scheduler = go_on(optimizer, lr_factor(options.lr_schedule, options.warmup, steps), first_step)

    seconds = 0.0
    quiet = None if worker.first else True
    with tqdm(total=steps, initial=first_step, desc=options.method, disable=quiet) as bar:
        for epoch in range(before + 1, options.epochs + 1):
            mine = shard(split, options, worker, epoch)
            started = time.perf_counter()
            loss = one_epoch(network, optimizer, scheduler, mine, bar)
            seconds += time.perf_counter() - started
            done = record.Epoch(
                epoch=epoch,
                step=scheduler.last_epoch,
                lr=float(scheduler.get_last_lr()[0]),
                train_loss=worker.mean(loss),
                train_seconds=seconds,
                **traffic(optimizer, model, scheduler.last_epoch, worker),
                **quality(model, optimizer, split, worker),
            )
            bar.set_postfix_str(f"loss {done.train_loss:.3f}, accuracy {done.test_accuracy:.1%}")
            if worker.first:
                record.append(out, done)
            if options.checkpoint:
                checkpoint.save(options.checkpoint, model, optimizer, extra={"epoch": epoch})
            if not math.isfinite(done.train_loss):
                break
    if worker.first and before < options.epochs:
        result = record.result(
            done,
            options,
            size=worker.size,
            engine=worker.engine,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            test_images=len(split.test_x),
            seconds=time.perf_counter() - begun,
        )
        finish(out, result)


def resume(folder: str | None, model: nn.Module, optimizer: Any) -> int:
    """Load the latest state, if there is one on all workers; returns the epochs that it has seen.

    After a restart with another number of workers all start from the mean model.
    """
    if folder is None:
        return 0
    latest = checkpoint.latest(folder)
    steps = optimizer.transport.gather(torch.tensor([-1 if latest is None else latest]))
    if int(steps.min()) < 0:
        return 0
    return int(checkpoint.load(folder, model, optimizer)["epoch"])


def go_on(optimizer: Any, factor: Callable[[int], float], step: int) -> LRScheduler:
    """A schedule of the learning rate, ``step`` steps after its start."""
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])
    scheduler = LambdaLR(optimizer, factor)
    scheduler.last_epoch = step
    for group, base in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = base * factor(step)
    return scheduler


def one_epoch(
    network: Any,
    optimizer: Any,
    scheduler: LRScheduler,
    batches: Iterable[tuple[Tensor, Tensor]],
    bar: tqdm[NoReturn],
) -> float:
    """Train on this worker's batches of one epoch; returns the mean of their losses."""
    network.train()
    losses = []
    for images, labels in batches:
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        # A DeepSpeed engine has a backward of its own.
        network.backward(loss) if hasattr(network, "backward") else loss.backward()
        optimizer.step()
        scheduler.step()
        bar.update()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def shard(
    split: Split, options: Namespace, worker: Worker, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's batches of an epoch: the same number on every worker, no image twice."""
    for part in data.batches(
        len(split.train_x),
        options.batch_size,
        rank=worker.rank,
        size=worker.size,
        seed=options.seed,
        epoch=epoch,
    ):
        yield split.train_x[part], split.train_y[part]


def lr_factor(schedule: str, warmup: float, steps: int) -> Callable[[int], float]:
    """Learning rate as a multiple of the highest: a linear warm-up, then `schedule`."""
    ramp = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        start = min(1.0, (step + 1) / ramp)
        if schedule == "step":
            return start * 0.1 ** ((2 * step >= steps) + (4 * step >= 3 * steps))
        if schedule == "cosine":
            return start * (1 + math.cos(math.pi * step / steps)) / 2
        return start

    return factor


def finish(out: Path, result: dict[str, Any]) -> None:
    """Write the result and the figure, and print what a reader wants to know first."""
    record.write(out, result)
    report.draw({result["method"]: record.read_metrics(out)}, out / record.REPORT)
    print(report.summary(result))
    print(f"files           {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


if __name__ == "__main__":
    main()
