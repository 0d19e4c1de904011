"""Values of Megatron's for flags that are settings here, which are refused, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedValues:
    """Values of one flag, separated by white space, that share a reason."""

    flag: str
    values: str
    reason: str


REFUSED_VALUES = (
    RefusedValues(
        flag="--position-embedding-type", values="yarn mrope relative", reason="these positions are not built yet"
    ),
    RefusedValues(
        flag="--moe-router-load-balancing-type",
        values="sinkhorn quantile_balancing",
        reason="balance without a loss is kept by --moe-router-enable-expert-bias",
    ),
    RefusedValues(
        flag="--moe-token-dispatcher-type",
        values="flex",
        reason="its transports are not built; alltoall moves the same rows, in a stated order",
    ),
    RefusedValues(
        flag="--optimizer",
        values="muon dist_muon adaptive_muon lion soap",
        reason="optimizers that step on whole matrices, and Lion, are not built yet",
    ),
    RefusedValues(
        flag="--recompute-modules",
        values="mla_up_proj gdn_norm_out gdp_in_proj gdp_qkv mhc",
        reason="they are parts of layers that are not built",
    ),
    RefusedValues(
        flag="--ckpt-format",
        values="torch torch_dcp fsdp_dtensor",
        reason="checkpoints are written in PyTorch's distributed format alone",
    ),
)


def reason_against(spellings: tuple[str, ...], value: str) -> str | None:
    """Why a value of a flag with these spellings is refused; ``None`` where it is no value of Megatron's."""
    found = (r.reason for r in REFUSED_VALUES if r.flag in spellings and value in r.values.split())
    return next(found, None)
