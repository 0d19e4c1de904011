"""Causal self-attention with grouped queries, cut over the tensor-parallel ranks by heads."""

from __future__ import annotations

import math

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.rng.counter import box_mask
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.mappings import gather_columns
from megatron.core.tensor_parallel.norm import NormColumnParallelLinear
from megatron.core.tensor_parallel.recompute import compute_again
from megatron.core.tensor_parallel.row import RowParallelLinear
from megatron.core.transformer.dropout import noise_key
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.rotary import rotary_angles


class SelfAttention(torch.nn.Module):
    """``proj(attention(qkv(norm(x))))``, with ``qk_layernorm`` a norm over every head's query and key.

    Rows of ``linear_qkv`` are, per key/value group, the group's query heads, its key, its value; tensor-parallel
    ranks hold plain slices of them. Where there are more ranks than groups a slice ends inside a group: the projected
    rows are then gathered and every rank takes its own query heads and its group's key and value; the gradients of a
    shared key and value are added over its ranks in rank order.
    """

    def __init__(self, name: str, layer: int, config: TransformerConfig, context: ModelContext) -> None:
        super().__init__()
        self.context, self.layer = context, layer
        tp = context.groups.tp
        self.head_dim = config.kv_channels
        self.groups, self.heads = config.key_value_groups, config.num_attention_heads
        if self.heads % tp.size or self.heads % self.groups or (self.groups % tp.size and tp.size % self.groups):
            raise ValueError(
                f"{self.heads} heads in {self.groups} groups over {tp.size} tensor-parallel ranks: groups and ranks "
                "must divide the heads, and the groups be a multiple or a divisor of the ranks"
            )
        self.heads_per_group = self.heads // self.groups
        self.local_heads = self.heads // tp.size
        self.local_groups = max(1, self.groups // tp.size)
        self.shares_groups = self.groups < tp.size
        bias, width = config.add_bias_linear, self.heads * self.head_dim
        self.linear_qkv = NormColumnParallelLinear(
            f"{name}.linear_qkv",
            config.hidden_size,
            width + 2 * self.groups * self.head_dim,
            config,
            context,
            bias=bias,
        )
        self.linear_proj = RowParallelLinear(
            f"{name}.linear_proj", width, config.hidden_size, context, init_std=config.output_init_std, bias=bias
        )
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            self.q_layernorm, self.k_layernorm = (
                Norm(
                    f"{name}.{which}_layernorm",
                    config,
                    context,
                    size=self.head_dim,
                    per_head=True,
                    decay=config.apply_wd_to_qk_layernorm,
                )
                for which in "qk"
            )
        self._recomputes = config.recomputes("core_attn")
        self.scale = 1.0 / math.sqrt(self.head_dim)
        self.dropout = config.attention_dropout
        self._attention = context.ops["attention"]
        self._attention_dropout = context.ops["attention_dropout"]
        self._rope = context.ops["rope"] if config.position_embedding_type == "rope" else None
        self._angles_SR = rotary_angles(config, config.seq_length, context.groups.device) if self._rope else None

    def _split(self, qkv_SBX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's queries ``[S, B, N, D]``, keys and values ``[S, B, G, D]``."""
        per_group, dim = self.heads_per_group, self.head_dim
        if not self.shares_groups:
            blocks = qkv_SBX.view(*qkv_SBX.shape[:2], self.local_groups, per_group + 2, dim)
            first, heads = 0, per_group
        else:
            tp, whole = self.context.groups.tp, gather_columns(qkv_SBX, self.context)
            group, first_head = divmod(tp.rank * self.local_heads, per_group)
            blocks = whole.view(*whole.shape[:2], self.groups, per_group + 2, dim)[:, :, group : group + 1]
            first, heads = first_head, self.local_heads
        q_SBND = blocks[..., first : first + heads, :].reshape(*blocks.shape[:2], self.local_heads, dim)
        return q_SBND, blocks[..., per_group, :].contiguous(), blocks[..., per_group + 1, :].contiguous()

    def _keep(self, batch: int, length: int, microbatch: Microbatch) -> torch.Tensor:
        """Keep mask of this rank's heads, drawn over the attention weights of all heads."""
        first = self.context.groups.tp.rank * self.local_heads
        box = ((0, batch), (first, first + self.local_heads), (0, length), (0, length))
        key = noise_key(self.context, "dropout", microbatch, self.layer, "attention")
        return box_mask(key, (batch, self.heads, length, length), box, self.dropout, self.context.groups.device)

    def _rotate(self, x_SBND: torch.Tensor) -> torch.Tensor:
        if self._rope is None or self._angles_SR is None:
            return x_SBND
        length, batch = x_SBND.shape[:2]
        angle_SBR = self._angles_SR[:length].unsqueeze(1).expand(-1, batch, -1).contiguous()
        return self._rope(x_SBND, angle_SBR)

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        """The layer's contribution to the residual stream."""
        q_SBND, k_SBGD, v_SBGD = self._split(self.linear_qkv(x_SBH))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_SBND, k_SBGD = self.q_layernorm(q_SBND), self.k_layernorm(k_SBGD)
        q_SBND, k_SBGD = self._rotate(q_SBND), self._rotate(k_SBGD)

        def attend(q_SBND: torch.Tensor, k_SBGD: torch.Tensor, v_SBGD: torch.Tensor) -> torch.Tensor:
            if not self.dropout or not microbatch.training:
                return self._attention(q_SBND, k_SBGD, v_SBGD, self.scale)
            keep_BNSS = self._keep(q_SBND.shape[1], q_SBND.shape[0], microbatch)
            return self._attention_dropout(q_SBND, k_SBGD, v_SBGD, self.scale, keep_BNSS, self.dropout)

        again = self._recomputes and microbatch.training
        out_SBND = compute_again(attend, q_SBND, k_SBGD, v_SBGD) if again else attend(q_SBND, k_SBGD, v_SBGD)
        return self.linear_proj(out_SBND.flatten(2))
