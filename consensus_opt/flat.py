"""The model as a few flat buffers, one for each device and dtype (contract C6).

Parameters become views of the buffer, so that averaging the buffer averages the model, with no
copy in or out. Each has a storage of its own over its part of the memory: what looks at storages
to find tied weights (safetensors, Accelerate), or saves all of one, sees the model as it was. A
view keeps the strides of its parameter: channels_last and transposed weights
stay as they are. A parameter that must keep its own memory (it shares storage with something else,
or its memory has gaps) is *packed*: copied in before a round, and back after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

Member = tuple[Tensor, int, int]
"""A tensor, and where its part of the flat vector starts and ends."""


@dataclass
class _Buffer:
    flat: Tensor
    viewed: list[Member]
    packed: list[Member]
    owned: bool

    def __post_init__(self) -> None:
        self.pointers = [tensor.data_ptr() for tensor, _, _ in self.viewed]


class FlatParameters:
    """Some tensors, laid out as flat vectors.

    Args:
        tensors: Parameters of any shapes, strides, devices and dtypes. For stacked workers each
            has the shape ``batch + shape``.
        batch: Leading shape, ``()`` or ``(n,)``.
        views: Turn the tensors into views of the buffers where that is possible. Without it they
            stay where they are: packed, unless they lie one after the other already.

    Attributes:
        buffers: One real tensor of shape ``batch + (P,)`` for each (device, dtype), in the order
            of first appearance. Complex tensors appear as pairs of reals.

    Raises:
        ValueError: If a tensor lacks the leading shape ``batch``.
        TypeError: If a tensor is sparse.
    """

    def __init__(
        self, tensors: Iterable[Tensor], batch: tuple[int, ...] = (), views: bool = True
    ) -> None:
        self._batch = batch
        self.tensors = list(tensors)
        self._local = [local(tensor) for tensor in self.tensors]
        for tensor in self._local:
            _check(tensor, batch)
        shared = _shared_storages(self._local)
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        viewable = []
        for whole, tensor in zip(self.tensors, self._local, strict=True):
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
            if views and whole is tensor and _can_view(tensor, batch, shared):
                viewable.append(tensor)
        self._buffers = [self._build(group, viewable) for group in groups.values()]
        self.buffers = [_as_real(buffer.flat) for buffer in self._buffers]

    def is_current(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether these are still the same tensors, and still views of the buffers."""
        if len(tensors) != len(self.tensors):
            return False
        if any(local(a) is not b for a, b in zip(tensors, self._local, strict=True)):
            return False
        return all(
            tensor.data_ptr() == pointer and tensor.dtype == buffer.flat.dtype
            for buffer in self._buffers
            for (tensor, _, _), pointer in zip(buffer.viewed, buffer.pointers, strict=True)
        ) and all(
            tensor.dtype == buffer.flat.dtype and tensor.device == buffer.flat.device
            for buffer in self._buffers
            for tensor, _, _ in buffer.packed
        )

    @property
    def numel(self) -> int:
        """Number of real values of one worker's vector."""
        return sum(buffer.shape[-1] for buffer in self.buffers)

    def pack(self) -> None:
        """Copy the packed tensors into the buffers."""
        for buffer in self._buffers:
            for tensor, start, _ in buffer.packed:
                self._part(buffer.flat, tensor, start).copy_(tensor.detach())

    def unpack(self) -> None:
        """Copy the packed tensors back from the buffers."""
        for buffer in self._buffers:
            for tensor, start, _ in buffer.packed:
                part = self._part(buffer.flat, tensor, start)
                for axis, stride in enumerate(tensor.stride()):
                    if stride == 0:  # an expanded tensor: one element stands for all
                        tensor, part = tensor.narrow(axis, 0, 1), part.narrow(axis, 0, 1)
                tensor.detach().copy_(part)

    def pieces(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Cut buffers that are shaped like these into the parts of each tensor, in their order.

        Returns:
            Real tensors of shape ``batch + (k,)``, with k the tensor's number of real values.
        """
        parts: dict[int, Tensor] = {}
        for buffer, values in zip(self._buffers, buffers, strict=True):
            reals = 2 if buffer.flat.is_complex() else 1
            for tensor, start, end in (*buffer.viewed, *buffer.packed):
                parts[id(tensor)] = values[..., reals * start : reals * end]
        return [parts[id(tensor)] for tensor in self._local]

    def release(self) -> None:
        """Give every viewed tensor memory of its own again."""
        for buffer in (b for b in self._buffers if b.owned):
            for tensor, _, _ in buffer.viewed:
                tensor.data = tensor.data.clone(memory_format=torch.preserve_format)

    def _build(self, group: list[Tensor], viewable: list[Tensor]) -> _Buffer:
        members, width = self._place(group)
        if (memory := _already_flat(members, width, self._batch)) is not None:
            return _Buffer(memory, members, [], owned=False)
        ids = {id(tensor) for tensor in viewable}
        viewed = [member for member in members if id(member[0]) in ids]
        packed = [member for member in members if id(member[0]) not in ids]
        flat = group[0].new_empty((*self._batch, width), requires_grad=False)
        for tensor, start, _ in viewed:
            view = self._part(flat, tensor, start)
            view.copy_(tensor.detach())
            tensor.data = view if self._batch else _with_own_storage(view)
        return _Buffer(flat, viewed, packed, owned=True)

    def _part(self, flat: Tensor, tensor: Tensor, start: int) -> Tensor:
        """Return the tensor's part of a flat vector, in its shape and in its order in memory."""
        strides = _strides(tensor, flat.shape[-1], self._batch)
        return flat.as_strided(tensor.shape, strides, start + flat.storage_offset())

    def _place(self, group: list[Tensor]) -> tuple[list[Member], int]:
        members, width = [], 0
        for tensor in group:
            length = _row(tensor, self._batch).numel()
            members.append((tensor, width, width + length))
            width += length
        return members, width


def local(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a DTensor; other tensors are whole."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # where it is the piece itself, and not a view of it
        piece: Tensor = tensor.to_local()
    return piece


def _check(tensor: Tensor, batch: tuple[int, ...]) -> None:
    if tensor.layout != torch.strided:
        raise TypeError(
            f"a parameter has layout {tensor.layout}, and only strided (dense) parameters can be "
            "averaged; use parameter.to_dense()"
        )
    if tuple(tensor.shape[: len(batch)]) != batch:
        raise ValueError(
            f"a parameter has shape {tuple(tensor.shape)}, and StackedTransport{batch} needs one "
            f"row a worker, the shape {batch} + (...); stack the workers' parameters first"
        )


def _can_view(tensor: Tensor, batch: tuple[int, ...], shared: set[int]) -> bool:
    """Tell whether the tensor alone fills its memory without gaps, row after row."""
    storage = tensor.untyped_storage()
    row = _row(tensor, batch)
    return (
        tensor.numel() > 0
        and storage.data_ptr() not in shared
        and storage.nbytes() == tensor.numel() * tensor.element_size()
        and _is_dense(row)
        and tensor.stride()[: len(batch)] == (row.numel(),) * len(batch)
    )


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _with_own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the same memory, whose storage is no more than that."""
    if view.device.type not in ("cpu", "cuda"):
        return view
    memory = view.as_strided((view.numel(),), (1,))
    return from_dlpack(memory).as_strided(view.shape, view.stride())


def _shared_storages(tensors: Sequence[Tensor]) -> set[int]:
    """Return the addresses of memory that holds more than one of the tensors."""
    seen: set[int] = set()
    twice: set[int] = set()
    for tensor in tensors:
        pointer = tensor.untyped_storage().data_ptr()
        (twice if pointer in seen else seen).add(pointer)
    return twice


def _already_flat(members: list[Member], width: int, batch: tuple[int, ...]) -> Tensor | None:
    """Return the memory that the members already fill one after the other, if they do."""
    first = members[0][0]
    base, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for tensor, start, _ in members:
        if (
            tensor.untyped_storage().data_ptr() != storage
            or tensor.storage_offset() != base + start
            or tensor.stride() != _strides(tensor, width, batch)
            or not _is_dense(_row(tensor, batch))
        ):
            return None
    return first.detach().as_strided((*batch, width), (width,) * len(batch) + (1,), base)


def _row(tensor: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Return one worker's part of a tensor."""
    return tensor.detach()[(0,) * len(batch)]


def _strides(tensor: Tensor, width: int, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the tensor once its rows are ``width`` elements apart.

    Whether a tensor is viewed or packed, its elements come in the order of its memory; without
    gaps, and row after row where there are some.
    """
    row = _row(tensor, batch)
    own = row.stride() if _is_dense(row) else torch.empty(row.shape, device="meta").stride()
    return (width,) * len(batch) + tuple(own)


def layout(tensor: Tensor, batch: tuple[int, ...] = ()) -> str:
    """Write down what must be the same on all ranks for flat vectors to be of the same order."""
    tensor = local(tensor)
    text = f"shape {tuple(tensor.shape)}, {tensor.dtype}"
    row = _row(tensor, batch)
    axes = [axis for axis, size in enumerate(row.shape) if size != 1]
    strides = row.stride()
    order = sorted(axes, key=lambda axis: -strides[axis])
    in_order = order == axes or row.numel() == 0 or not _is_dense(row)
    return text if in_order else f"{text}, axes in memory {tuple(order)}"


def _as_real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).flatten(-2) if flat.is_complex() else flat
