"""Random arguments for the cases of the op specs, drawn on the CPU so that every device gets the same values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops.registry import Tolerance


@dataclass(frozen=True, slots=True)
class Samples:
    """Draws from one generator, moved to a device."""

    generator: torch.Generator
    dtype: torch.dtype
    device: torch.device

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0, fp32: bool = False) -> torch.Tensor:
        """Normal values in the activation type, or in fp32."""
        value = torch.randn(shape, generator=self.generator) * scale + shift
        return value.to(torch.float32 if fp32 else self.dtype).to(self.device)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, fp32: bool = False) -> torch.Tensor:
        """Uniform values in the activation type, or in fp32."""
        value = torch.rand(shape, generator=self.generator) * (high - low) + low
        return value.to(torch.float32 if fp32 else self.dtype).to(self.device)

    def integers(self, *shape: int, low: int, high: int) -> torch.Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def order(self, count: int) -> torch.Tensor:
        """A permutation of ``count`` things, int64."""
        return torch.randperm(count, generator=self.generator).to(self.device)

    def choices(self, tokens: int, experts: int, k: int) -> torch.Tensor:
        """``[tokens, k]`` int64: ids of ``k`` of the experts in each row, ascending."""
        return self.uniform(tokens, experts, fp32=True).topk(k, dim=1).indices.sort(dim=1).values

    def keep(self, *shape: int, share: float) -> torch.Tensor:
        """Booleans, True with probability ``share``."""
        return (torch.rand(shape, generator=self.generator) < share).to(self.device)


def tolerances(fp32: float, bf16: float, reason: str, scale: float = 1.0) -> dict[torch.dtype, Tolerance]:
    """Tolerances for both activation types; ``scale`` is the size of a typical result."""
    return {
        torch.float32: Tolerance(rtol=fp32, atol=fp32 * scale, reason=reason),
        torch.bfloat16: Tolerance(rtol=bf16, atol=bf16 * scale, reason=f"{reason}; results are rounded to bf16"),
    }
