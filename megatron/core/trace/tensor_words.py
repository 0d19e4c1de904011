"""A tensor's logical elements as words of 4 bytes. Gaps between strided elements are not read, so padding cannot
show."""

from __future__ import annotations

import torch


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its bytes lie in row-major order from a multiple of 4 on, otherwise a copy."""
    if tensor.is_contiguous() and not (tensor.data_ptr() % 4 or tensor.is_conj() or tensor.is_neg()):
        return tensor
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def row_words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is not empty as int32 ``[rows, words]``: the bytes of each row, filled up with zeros."""
    tensor = readable(tensor.detach() if tensor.requires_grad else tensor)
    count, bytes_a_row = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    if bytes_a_row % 4:
        raw = tensor.view(-1).view(torch.uint8).view(count, -1)
        return torch.nn.functional.pad(raw, (0, -bytes_a_row % 4)).view(torch.int32)
    if tensor.dim() == 2 and tensor.stride() == (tensor.shape[1], 1):
        return tensor.view(torch.int32)
    return tensor.view(-1).view(torch.int32).view(count, -1)
