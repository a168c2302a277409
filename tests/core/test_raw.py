"""The bytes of tensors that PyTorch takes to be contiguous."""

from __future__ import annotations

import pytest
import torch

from dtorch.core.raw import as_bytes

CONTIGUOUS = {
    "rows": torch.arange(6.0).reshape(2, 3),
    "part": torch.arange(12.0)[3:7],
    "column": torch.arange(10.0).reshape(2, 5)[:1, 3],
    "diagonal": torch.arange(12.0).reshape(3, 4)[1:2, 2:].diagonal(),
    "number": torch.arange(10.0)[7],
    "expanded": torch.tensor(3.0).expand(1, 1),
    "nothing": torch.arange(10.0)[::3][:0],
    "nothing wide": torch.empty(3, 0, 2).transpose(0, 2),
    "half": torch.arange(9.0).bfloat16()[8:],
    "bool": (torch.arange(9) > 4)[::2][2:3],
    "complex": torch.arange(6.0).to(torch.complex64)[::5][1:],
}


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_bytes_are_those_of_the_values(name: str) -> None:
    tensor = CONTIGUOUS[name]
    assert tensor.is_contiguous()
    raw = as_bytes(tensor)
    assert raw.shape == (tensor.numel() * tensor.element_size(),) and raw.is_contiguous()
    assert torch.equal(raw.view(tensor.dtype), tensor.clone().reshape(-1))
    if tensor.numel():
        assert raw.data_ptr() == tensor.data_ptr()
