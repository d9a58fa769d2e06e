"""The flat layout: every element is mixed exactly once, whatever the tensors look like (C6)."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from consensus_opt import (
    ConsensusOptimizer,
    Method,
    StackedTransport,
    dppf,
    gossip_sgd,
    local_sgd,
)
from consensus_opt.flat import FlatParameters
from consensus_opt.topology import topology
from tests.problems import same

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}
RULES = ["all", "ring", "one_peer_exponential", "base2"]


@dataclass(frozen=True)
class Kind:
    """One tensor to lay out: its shape behind the workers' axis, and how it lies in memory."""

    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype

    def make(self, n: int, seed: int) -> Tensor:
        """Workers' values, shape ``(n, *shape)``."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(n, *self.shape, 2, generator=generator, dtype=torch.float64)
        full = torch.view_as_complex(values) if self.dtype.is_complex else values[..., 0]
        return LAYOUTS[self.layout](full.to(self.dtype).contiguous())


def channels_last(values: Tensor) -> Tensor:
    """The second axis behind the workers' goes to the end of the memory."""
    if values.dim() < 4:
        return values
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


def transposed(values: Tensor) -> Tensor:
    if values.dim() < 3:
        return values
    return values.transpose(-1, -2).contiguous().transpose(-1, -2)


def gapped(values: Tensor) -> Tensor:
    """Every second element of a larger tensor."""
    return torch.stack([values, torch.full_like(values, torch.nan)], -1)[..., 0]


def inside(values: Tensor) -> Tensor:
    """The middle of a larger storage."""
    pad = values.new_full((3,), torch.nan)
    return torch.cat([pad, values.flatten(), pad])[3 : 3 + values.numel()].view(values.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda values: values,
    "channels_last": channels_last,
    "transposed": transposed,
    "gapped": gapped,
    "inside": inside,
}
SHAPES = st.sampled_from([(), (1,), (0,), (3,), (2, 3), (1, 5), (3, 0, 2), (2, 3, 2, 2), (7, 1, 3)])


def models(dtypes: list[torch.dtype]) -> st.SearchStrategy[list[Kind]]:
    kinds = st.builds(Kind, SHAPES, st.sampled_from(list(LAYOUTS)), st.sampled_from(dtypes))
    return st.lists(kinds, min_size=1, max_size=7)


MODELS = models(DTYPES)


def tensors_of(kinds: list[Kind], n: int) -> list[Tensor]:
    return [kind.make(n, seed) for seed, kind in enumerate(kinds)]


@settings(max_examples=150, deadline=None)
@given(MODELS, st.booleans(), st.booleans())
def test_each_element_is_in_the_buffers_exactly_once(
    kinds: list[Kind], views: bool, tied: bool
) -> None:
    tensors = [tensor[0] for tensor in tensors_of(kinds, 1)]
    if tied:
        tensors.append(tensors[0].detach())
    expected = [(t + (1 + 1j if t.is_complex() else 1)).clone() for t in tensors]
    layouts = [(t.shape, t.stride()) for t in tensors]
    flat = FlatParameters(tensors, views=views)
    assert flat.numel == sum(t.numel() * (2 if t.is_complex() else 1) for t in tensors)
    flat.pack()
    for buffer in flat.buffers:
        buffer.add_(1)
    flat.unpack()
    assert same(tensors, expected)
    if tied:
        assert tensors[-1].data_ptr() == tensors[0].data_ptr()
    assert [(t.shape, t.stride()) for t in tensors] == layouts
    assert flat.is_current(tensors)
    flat.release()
    assert same(tensors, expected)
    assert [(t.shape, t.stride()) for t in tensors] == layouts


@settings(max_examples=100, deadline=None)
@given(MODELS)
def test_the_order_in_a_buffer_is_the_same_whether_tensors_are_viewed_or_packed(
    kinds: list[Kind],
) -> None:
    viewed, packed = ([t[0] for t in tensors_of(kinds, 1)] for _ in range(2))
    layouts = FlatParameters(viewed), FlatParameters(packed, views=False)
    for flat in layouts:
        flat.pack()
    assert same(layouts[0].buffers, layouts[1].buffers)


def mixing_rule(rule: str, n: int) -> tuple[Method, np.ndarray[Any, Any]]:
    if rule == "all":
        return local_sgd(1), np.full((n, n), 1 / n)
    return gossip_sgd(rule), topology(rule).mixing(n, 0).weights


@settings(max_examples=100, deadline=None)
@given(MODELS, st.integers(1, 6), st.sampled_from(RULES), st.booleans())
def test_R088_R123_R124_R127_each_element_is_mixed_once_with_its_weights_and_its_mean_is_kept(
    kinds: list[Kind], n: int, rule: str, tied: bool
) -> None:
    method, weights = mixing_rule(rule, n)
    tensors = tensors_of(kinds, n)
    if tied:
        tensors.append(tensors[0])
    before = [tensor.to(torch.complex128).numpy().copy() for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    frozen = nn.Parameter(torch.arange(float(n)).unsqueeze(-1), requires_grad=False)
    unique = list(dict.fromkeys([*parameters, frozen]))
    optimizer = ConsensusOptimizer(
        torch.optim.SGD(unique), method, transport=StackedTransport(n), broadcast=False
    )
    optimizer.step()
    for parameter, rows, stride in zip(parameters, before, strides, strict=True):
        tolerance = TOLERANCE.get(parameter.dtype, 1e-5)
        after = parameter.detach().to(torch.complex128).numpy()
        np.testing.assert_allclose(
            after, np.tensordot(weights, rows, 1), rtol=tolerance, atol=tolerance
        )
        np.testing.assert_allclose(after.mean(0), rows.mean(0), rtol=tolerance, atol=tolerance)
        assert parameter.stride()[1:] == stride[1:]
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.grad_fn is None
    assert frozen[:, 0].tolist() == list(range(n))
    assert not frozen.requires_grad


@settings(max_examples=50, deadline=None)
@given(models([torch.float32, torch.float64, torch.complex64]), st.integers(2, 5))
def test_the_push_is_along_the_whole_vector_of_all_tensors(kinds: list[Kind], n: int) -> None:
    tensors = tensors_of(kinds, n)
    wide = [tensor.to(torch.complex128).reshape(n, -1) for tensor in tensors]
    differences = [values - values.mean(0) for values in wide]
    radius = torch.cat(differences, 1).abs().square().sum(1, keepdim=True).sqrt()
    weight = 0.3 - 0.5 / torch.where(radius > 0, radius, torch.inf)
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    optimizer = ConsensusOptimizer(
        torch.optim.SGD(parameters),
        dppf(0.3, 0.5, period=1, schedule="constant"),
        transport=StackedTransport(n),
        broadcast=False,
    )
    optimizer.step()
    for parameter, values, difference in zip(parameters, wide, differences, strict=True):
        after = parameter.detach().to(torch.complex128).reshape(n, -1)
        # A short radius magnifies what rounding does to its direction.
        error = (after - (values - weight * difference)).abs() * radius.clamp(max=1)
        assert (error < 1e-5).all()


def conv_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2)).to(dtype)


def averaged_once(model: nn.Module) -> ConsensusOptimizer:
    """An optimizer whose parameters have moved into the flat buffer."""
    optimizer = ConsensusOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), local_sgd(1))
    with optimizer.averaged():
        pass
    return optimizer


def test_R122_parameters_become_views_of_one_buffer_and_keep_their_memory_format() -> None:
    model = conv_net().to(memory_format=torch.channels_last)
    values = copy.deepcopy(model.state_dict())
    averaged_once(model)
    parameters = list(model.parameters())
    places = sorted((p.data_ptr(), p.data_ptr() + 4 * p.numel()) for p in parameters)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(places))
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in parameters[::2])
    assert same(dict(model.state_dict()), dict(values))


def test_what_looks_at_storages_sees_the_model_as_it_was(tmp_path: Path) -> None:
    """safetensors takes tensors in one storage for tied ones; torch.save saves all of a storage."""
    model, loaded = conv_net(), conv_net()
    for trained in (model, loaded):
        averaged_once(trained)
    with torch.no_grad():
        model[0].weight.mul_(2)
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
        assert parameter.storage_offset() == 0
    save_model(model, str(tmp_path / "model.safetensors"))
    load_model(loaded, tmp_path / "model.safetensors")
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    torch.save(model[0].bias, tmp_path / "bias.pt")
    assert (tmp_path / "bias.pt").stat().st_size < 2000
    assert averaged_once(model).consensus_distance() == 0.0


@pytest.mark.parametrize("change", ["dtype", "data", "replaced"])
def test_a_model_that_changed_between_rounds_is_laid_out_anew(change: str) -> None:
    parameter = nn.Parameter(torch.arange(4.0).unsqueeze(-1).repeat(1, 3))
    other = nn.Parameter(torch.ones(4, 2))
    inner = torch.optim.SGD([parameter, other])
    optimizer = ConsensusOptimizer(
        inner, local_sgd(1), transport=StackedTransport(4), broadcast=False
    )
    optimizer.step()
    fresh = torch.tensor([[2.0], [4.0], [6.0], [8.0]])
    if change == "dtype":
        parameter.data = fresh.double()
    elif change == "data":
        parameter.data = fresh
    else:
        parameter = inner.param_groups[0]["params"][0] = nn.Parameter(fresh)
    kept = parameter.dtype
    optimizer.step()
    assert parameter.dtype == kept
    assert same(parameter.detach(), torch.full((4, 1), 5.0, dtype=kept))
    assert same(other.detach(), torch.ones(4, 2))


def test_a_model_turned_to_double_goes_on() -> None:
    model = conv_net()
    optimizer = averaged_once(model)
    model.double()
    values = copy.deepcopy(model.state_dict())
    with optimizer.averaged():
        assert all(p.dtype == torch.float64 for p in model.parameters())
    assert same(dict(model.state_dict()), dict(values))


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_of_a_flattened_optimizer_is_about_one_model(how: str) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    optimizer = averaged_once(model)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if how == "pickle":
        assert len(pickle.dumps(optimizer)) < 1.5 * size
        return
    twin = copy.deepcopy(optimizer)
    parameters = [p for group in twin.param_groups for p in group["params"]]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in parameters}
    assert sum(storage.nbytes() for storage in storages.values()) == size


def test_R059_a_round_leaves_no_autograd_history_and_gradients_stay_where_they_are() -> None:
    model = conv_net()
    optimizer = ConsensusOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), local_sgd(1), broadcast=False
    )
    model(torch.ones(1, 3, 8, 8)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    with optimizer.averaged():
        pass
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(p.is_leaf and p.requires_grad for p in model.parameters())
    model(torch.ones(1, 3, 8, 8)).sum().backward()


def test_a_sparse_tensor_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"layout torch.sparse_coo.*only strided.*to_dense\(\)"):
        FlatParameters([torch.eye(3).to_sparse()])


def test_a_stacked_parameter_without_a_row_for_each_worker_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 2\).*needs one row a worker.*\(4,\)"):
        FlatParameters([torch.zeros(3, 2)], batch=(4,))
