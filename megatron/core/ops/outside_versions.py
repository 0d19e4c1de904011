"""Paths of outside packages that are known not to repeat their bits, and what is taken in their place.

Refusals quote this table and docs/determinism.md prints it. ``evidence`` says who says so: "measured" is on an H200
with the versions named, replays of identical inputs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPath:
    """One path whose bits may differ between replays.

    ``instead`` names what is taken in its place. ``variants`` are those that are this path, as ``op=variant``.
    """

    package: str
    versions: str
    path: str
    why: str
    instead: str
    evidence: str
    variants: tuple[str, ...] = ()


_UPSTREAM = "its authors"
_MEGATRON = "refused by Megatron-LM's deterministic mode"

KNOWN_PATHS = (
    KnownPath(
        package="mamba-ssm",
        versions="all, 2.3.2 included",
        path="SSD scan, default mode",
        why="gradients of time steps and decays are added by atomics, and launches are chosen by timing",
        instead="ssd_scan=mamba_ssm_deterministic",
        evidence="measured, 2.3.2.post1: bits differ at 64, 128 and 256 heads",
        variants=("ssd_scan=mamba_ssm",),
    ),
    KnownPath(
        package="mamba-ssm",
        versions="2.3.2",
        path="SSD scan, deterministic mode switched on after the import",
        why="the lists of launches were made when it was imported, so they are still chosen by timing",
        instead="--deterministic-mode, which sets MAMBA_DETERMINISTIC before the import",
        evidence="measured, 2.3.2.post1",
    ),
    KnownPath(
        package="mamba-ssm",
        versions="older than its deterministic mode",
        path="SSD scan",
        why="the backward adds by atomics and has no other form",
        instead="a later version, or the project's own ssd_scan",
        evidence=_UPSTREAM,
    ),
    KnownPath(
        package="causal-conv1d",
        versions="all, 1.7.0 included",
        path="backward, default mode",
        why="gradients of weight and bias are added by atomics over batch and blocks of positions",
        instead="causal_conv1d=causal_conv1d_deterministic",
        evidence="measured, 1.7.0: bits differ at 6,144 and 18,432 channels",
        variants=("causal_conv1d=causal_conv1d",),
    ),
    KnownPath(
        package="causal-conv1d",
        versions="before 1.6.0",
        path="backward",
        why="it adds by atomics and has no other form",
        instead="a later version, or the project's own causal_conv1d",
        evidence=_UPSTREAM,
    ),
    KnownPath(
        package="Transformer Engine",
        versions="all, 2.20.2 included",
        path="attention backward, default mode",
        why="cuDNN adds the gradients of queries by atomics over blocks of keys",
        instead="attention=te_attention_deterministic",
        evidence="measured, 2.20.2: bits differ",
        variants=("attention=te_attention",),
    ),
    KnownPath(
        package="Transformer Engine",
        versions="2.x, 2.20 included",
        path="fused cross entropy (--cross-entropy-fusion-impl te)",
        why="no promise of order is made for it",
        instead="the project's cross_entropy_stats and cross_entropy_grad; the flag is refused",
        evidence=_MEGATRON,
    ),
    KnownPath(
        package="Transformer Engine",
        versions="2.x, 2.20 included",
        path="fused auxiliary loss of the router (--moe-router-fusion)",
        why="the forward adds its loss by floating-point atomics, and the loss has gradients",
        instead="the project's router and its op router_balance; the flag switches nothing",
        evidence=_UPSTREAM,
    ),
    KnownPath(
        package="Transformer Engine",
        versions="all",
        path="user buffers (--tp-comm-overlap)",
        why="sums over ranks are made in pieces inside the product they overlap, and replays are not exact",
        instead="ordered sums over ranks; the flag is refused",
        evidence=_MEGATRON,
    ),
    KnownPath(
        package="flash-attn",
        versions="2.x",
        path="backward, default",
        why="gradients of queries are added by atomics over blocks of keys; since 2.4.1 deterministic=True orders them",
        instead="attention=deterministic_torch_flash, torch's build of it in the ordered form",
        evidence=_UPSTREAM,
    ),
    KnownPath(
        package="cuDNN",
        versions="9.x, 9.19 included",
        path="SDPA backward, default (torch's CUDNN_ATTENTION; a frontend graph without the deterministic option)",
        why="gradients of queries are added by atomics over blocks of keys",
        instead="attention=deterministic_cudnn, which asks for the deterministic algorithm",
        evidence="measured, 9.19: bits differ; torch refuses it under deterministic algorithms",
    ),
    KnownPath(
        package="torch",
        versions="2.x",
        path="EFFICIENT_ATTENTION backward, default",
        why="work may be split over keys and added by atomics",
        instead="attention=deterministic_torch_flash; its attention is not registered",
        evidence=_UPSTREAM,
    ),
    KnownPath(
        package="apex",
        versions="all",
        path="fused weight gradient (fused_weight_gradient_mlp_cuda)",
        why="not shown: its product has not been replayed here, because no build of it was at hand",
        instead="linear_grad=deterministic_torch_addmm, the same fusion in torch",
        evidence="not run",
        variants=("linear_grad=apex",),
    ),
)


def known_path(choice: str) -> KnownPath | None:
    """The row about a choice ``op=variant``; ``None`` where nothing is known against it."""
    return next((row for row in KNOWN_PATHS if choice in row.variants), None)
