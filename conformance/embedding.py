"""Tensors as parts of larger storages, as a caller's often are. [COORD-STRIDE]"""

import torch

LEAD = 64  # elements of a storage before a tensor's first one; 64 bytes or more, so that wide loads may start there


def embedded(tensor: torch.Tensor, fill: float, *, spare: int = 0, axis: int = -1) -> torch.Tensor:
    """The same numbers as a view that begins LEAD elements within a storage of `fill`, which goes on as far behind it.

    `spare` entries more stand at the end of every run along an axis, so that those of the axes before it lie apart.
    """
    wide = list(tensor.shape)
    if spare:
        wide[axis] += spare
    size = torch.Size(wide).numel()
    storage = torch.full((LEAD + size + LEAD,), fill, dtype=tensor.dtype, device=tensor.device)
    view = storage[LEAD : LEAD + size].view(wide)
    if spare:
        view = view.narrow(axis, 0, tensor.shape[axis])
    return view.copy_(tensor)
