"""What ``ConsensusOptimizer`` takes, checked by kind."""

from __future__ import annotations

from typing import Any

from torch import nn

from consensus_opt.methods import Method
from consensus_opt.transport import Transport


def check_kinds(
    optimizer: Any, method: Any, model: Any, transport: Any, shards: Any = None
) -> None:
    """Raise ``TypeError`` where an argument is of the wrong kind."""
    needed = ("step", "zero_grad", "param_groups", "state_dict", "load_state_dict")
    missing = [name for name in needed if not hasattr(optimizer, name)]
    if missing:
        raise TypeError(
            f"optimizer is {type(optimizer).__name__} and lacks {', '.join(missing)}; an optimizer "
            f"has {', '.join(needed)}; pass the optimizer object, not its class or its parameters"
        )
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be a Method, and is {method!r}; write for example local_sgd(period=4), "
            "gossip_sgd('ring') or dppf()"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, and is {model!r}; write model=model")
    for name, value in (("transport", transport), ("shards", shards)):
        if value is not None and not isinstance(value, Transport):
            raise TypeError(
                f"{name} must be a Transport, and is {value!r}; write {name}="
                "TorchTransport(group) or leave it out"
            )
    if shards is not None and transport is None:
        raise TypeError(
            f"shards is {shards!r}, and transport is not given; say which ranks hold the same "
            "piece of the other replicas; write transport=TorchTransport(group)"
        )
