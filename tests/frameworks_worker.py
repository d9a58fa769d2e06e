"""What each rank runs in the tests of training frameworks: named checks in one torchrun job.

    torchrun --nproc-per-node 2 -m tests.frameworks_worker FOLDER CHECK [CHECK ...]

Each check trains the tiny ViT as a user would; test_frameworks.py says what should have happened.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from consensus_opt import Method, dppf, local_sgd
from tests.launchers import attempt, report
from tests.problems import flat
from tests.test_frameworks import HALF, PERIOD, STEPS
from tests.vit import Images, loss_on, vit

CHECKS: dict[str, Callable[[Path], Any]] = {}
RANK = int(os.environ["RANK"])
METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(PERIOD),
    "dppf": dppf(alpha=0.3, lam=0.1, period=PERIOD),
}


def check(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CHECKS[function.__name__] = function
    return function


def saved(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


# ---------------------------------------------------------------------------- Trainer


@check
def trainer(folder: Path) -> dict[str, Any]:
    from transformers import TrainerCallback, TrainingArguments

    from consensus_opt.integrations.huggingface import ConsensusTrainer

    class Watch(TrainerCallback):
        """What this worker holds after each step."""

        def __init__(self) -> None:
            self.steps: dict[int, Tensor] = {}
            self.start = torch.zeros(0)

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.start = flat(kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps[state.global_step] = flat(kwargs["model"])

    def run(place: Path, resume: str | None = None, **options: Any) -> dict[str, Any]:
        arguments = TrainingArguments(
            str(place),
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            eval_strategy="steps",
            eval_steps=HALF,
            save_steps=HALF,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        watch, records = Watch(), []
        model = vit(seed=RANK, dropout=0.1)
        trainer = ConsensusTrainer(
            model,
            arguments,
            train_dataset=Images(),
            eval_dataset=Images(40, seed=1),
            callbacks=[watch],
            method=METHODS["dppf"],
            consensus={"telemetry": records.append, "timeout": 60},
        )
        trainer.train(resume_from_checkpoint=resume)
        (prepared,) = trainer.accelerator._optimizers
        return {
            "start": watch.start,
            "steps": watch.steps,
            "rounds": [record.step for record in records],
            "logs": trainer.state.log_history,
            "total_steps": prepared.optimizer._rounds.total_steps,
            "wrapped": type(trainer.model_wrapped).__name__,
            "end": flat(model),
            "eval": trainer.evaluate()["eval_loss"],
        }

    whole = run(folder / "whole")
    half = folder / "whole" / f"checkpoint-{HALF}"
    again = run(folder / "again", resume=str(half))
    loaded = type(vit()).from_pretrained(str(half))
    of_others = folder / "of others"
    if RANK == 0:  # as if another number of workers had saved it
        shutil.copytree(half, of_others, ignore=shutil.ignore_patterns("worker-*"))
    dist.barrier()
    return {
        "whole": whole,
        "again": again,
        "half": flat(loaded),
        "half loss": loss_on(loaded, Images(40, seed=1)),
        "end loss": loss_on(_with(vit(), whole["end"]), Images(40, seed=1)),
        "from others": run(folder / "third", resume=str(of_others))["start"],
        "bf16": run(folder / "bf16", bf16=True)["logs"],
    }


def _with(model: nn.Module, values: Tensor) -> nn.Module:
    nn.utils.vector_to_parameters(values, model.parameters())
    return model


# ---------------------------------------------------------------------------- Accelerate


@check
def accelerate(folder: Path) -> dict[str, Any]:
    from torch.optim.lr_scheduler import CosineAnnealingLR
    from torch.utils.data import DataLoader

    from consensus_opt.integrations.accelerate import Accelerator

    def run(start: int, steps: int, place: Path, resume: bool = False) -> dict[str, Any]:
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            method=METHODS["local_sgd"],
            consensus={"timeout": 60},
        )
        model = vit(seed=RANK)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3)
        scheduler: Any = CosineAnnealingLR(optimizer, T_max=4 * STEPS)
        loader = DataLoader(Images(16 * 2 * STEPS), batch_size=8)
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        if resume:
            accelerator.load_state(str(place))
            loader = accelerator.skip_first_batches(loader, 2 * start)
        seen: dict[str, Any] = {"losses": [], "steps": {}, "rates": []}
        seen["wrapped"] = type(model).__name__
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen["losses"].append(loss.item())
            if not accelerator.sync_gradients:
                continue
            start += 1
            seen["steps"][start] = flat(model)
            seen["rates"].append(optimizer.param_groups[0]["lr"])
            if start == HALF and not resume:
                accelerator.save_state(str(place))
                seen["names"] = sorted(path.name for path in place.iterdir())
                seen["apart"] = optimizer.optimizer.consensus_distance()
            if start == steps:
                break
        with accelerator.averaged():
            accelerator.save_model(model, str(place.with_suffix(".mean")))
        accelerator.synchronize()
        seen["rounds"] = optimizer.optimizer.rounds
        seen["end"] = flat(model)
        return seen

    from safetensors.torch import load_file

    whole = run(0, STEPS, folder / "state")
    again = run(HALF, STEPS, folder / "state", resume=True)
    dist.barrier()
    files = {
        "half": folder / "state" / "model.safetensors",
        "mean": folder / "state.mean" / "model.safetensors",
    }
    plain = {}
    for key, place in files.items():
        model = vit()
        model.load_state_dict(load_file(place))
        plain[key] = flat(model)
    return {"whole": whole, "again": again, **plain}


@check
def scaler_under_accelerate(folder: Path) -> dict[str, Any]:
    """Rank 1 overflows in the second of four steps."""
    from torch.optim.lr_scheduler import ExponentialLR

    from consensus_opt.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, method=local_sgd(2), consensus={"timeout": 60})
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model = nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skipped, rates = [], []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        accelerator.backward(loss * torch.inf if RANK == 1 and step == 1 else loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        skipped.append(optimizer.step_was_skipped)
        rates.append(optimizer.param_groups[0]["lr"])
    consensus = optimizer.optimizer
    return {"skipped": skipped, "rates": rates, "rounds": consensus.rounds, "end": flat(model)}


class Privacy:
    """Clips and then lets an optimizer of its own step, as optimizers for private training do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.original = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.original.param_groups

    @property
    def state(self) -> Any:
        return self.original.state

    def step(self) -> None:
        for group in self.param_groups:
            nn.utils.clip_grad_value_(group["params"], 0.01)
        self.original.step()

    def zero_grad(self) -> None:
        self.original.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.original.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.original.load_state_dict(state)


@check
def wrappers_around_wrappers(folder: Path) -> dict[str, Any]:
    from torch.optim.lr_scheduler import ExponentialLR

    from consensus_opt.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, method=local_sgd(2), consensus={"timeout": 60})
    model = nn.Linear(3, 1)
    innermost = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(model, Privacy(innermost))
    if not hasattr(optimizer, "optimizer"):  # Accelerate knows optimizers by their class
        optimizer = accelerator.prepare_optimizer(optimizer)
    scheduler = ExponentialLR(optimizer, 0.1)
    start = flat(model)
    accelerator.backward(model(torch.full((2, 3), 1.0 + RANK)).sum())
    optimizer.step()
    moved = start - flat(model)
    scheduler.step()
    optimizer.step()
    twin = pickle.loads(pickle.dumps(optimizer))
    return {
        "moved": moved,
        "lr": innermost.param_groups[0]["lr"],
        "state": len(innermost.state),
        "same state": optimizer.state is innermost.state,
        "rounds": optimizer.optimizer.rounds,
        "end": flat(model),
        "twin": (twin.optimizer.clock, twin.optimizer.method, twin.param_groups[0]["lr"]),
    }


# ---------------------------------------------------------------------------- Lightning


@check
def lightning(folder: Path) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision
    from torch.utils.data import DataLoader

    from consensus_opt.integrations.lightning import ConsensusStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.vit = vit(seed=RANK)
            self.steps: dict[int, Tensor] = {}
            self.losses: list[float] = []
            self.rates: list[float] = []
            self.validated: list[tuple[Tensor, float]] = []
            self.overflow = -1

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.vit(**batch).loss
            self.losses.append(loss.item())
            return loss * torch.inf if RANK == 1 and index == self.overflow else loss

        def on_train_batch_end(self, *args: Any) -> None:
            self.steps[self.trainer.global_step] = flat(self)
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.validated.append((flat(self), self.vit(**batch).loss.item()))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
            steps = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def fit(place: Path, resume: Path | None = None, **options: Any) -> dict[str, Any]:
        module = Module()
        module.overflow = options.pop("overflow", -1)
        strategy = ConsensusStrategy(METHODS["dppf"], {"timeout": 60})
        keep = ModelCheckpoint(place, "{step}", every_n_train_steps=HALF, save_top_k=-1)
        trainer = pl.Trainer(
            **{
                "max_steps": STEPS,
                "accumulate_grad_batches": 2,
                "gradient_clip_val": 0.5,
                "val_check_interval": 2 * HALF,
                **options,
            },
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            callbacks=[keep],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = DataLoader(Images(8 * 2 * 2 * HALF), batch_size=8)  # two epochs
        trainer.fit(module, loader, DataLoader(Images(40, seed=1), 40), ckpt_path=resume)
        (optimizer,) = trainer.optimizers
        return {
            "steps": module.steps,
            "losses": module.losses,
            "rates": module.rates,
            "validated": module.validated,
            "rounds": optimizer.rounds,
            "clock": optimizer.clock,
            "total_steps": optimizer._rounds.total_steps,
            "wrapped": type(strategy.model).__name__,
            "end": flat(module),
        }

    whole = fit(folder / "whole")
    half = folder / "whole" / f"step={HALF}.ckpt"
    again = fit(folder / "again", half)
    plain = Module()
    plain.load_state_dict(torch.load(half, weights_only=True)["state_dict"])
    fp16 = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    return {
        "whole": whole,
        "again": again,
        "half": flat(plain),
        "half loss": loss_on(plain.vit, Images(40, seed=1)),
        "files": sorted(str(p.relative_to(folder)) for p in (folder / "whole").rglob("*.*t")),
        "fp16": fit(folder / "fp16", plugins=[fp16], overflow=2, accumulate_grad_batches=1),
        "bf16": fit(folder / "bf16", precision="bf16-mixed"),
    }


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report(
        RANK, {name: attempt(lambda name=name: CHECKS[name](Path(folder, name))) for name in names}
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
