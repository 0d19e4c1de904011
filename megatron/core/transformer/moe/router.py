"""TopKRouter: which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.contracts.param_spec import Initial, LogicalShard
from megatron.core.contracts.parameter import use_in_fp32
from megatron.core.rng.counter import draw_into, uniform
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.linear import linear
from megatron.core.tensor_parallel.parameter import create_parameter, replicated_spec
from megatron.core.transformer.dropout import noise_key
from megatron.core.transformer.moe.balance import AuxiliaryLosses
from megatron.core.transformer.moe.choice import (
    choose_in_groups,
    expert_capacity,
    forced_ids,
    runs_of_experts,
    within_capacity,
)

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Choices of this rank's tokens: expert ids ``[T, k]`` int64, ascending in each row, their weights ``[T, k]`` fp32
    and how many tokens chose each expert ``[E]`` int64.

    Where experts have a capacity, ``kept_Tk`` says which choices they take. ``taken_TE`` (boolean ``[T, E]``) are the
    tokens an expert takes, ``rows_E`` the rows it gets from this rank, padding included.
    """

    ids_Tk: torch.Tensor
    weight_Tk: torch.Tensor
    count_E: torch.Tensor
    taken_TE: torch.Tensor
    rows_E: torch.Tensor
    kept_Tk: torch.Tensor | None = None


class TopKRouter(torch.nn.Module):
    """Scores ``[T, E]`` from ``weight [E, H]``, the k best per token, and the weights they are combined with.

    Equal scores: the lowest expert id wins. Scores are fp32 whatever the logits are computed in. The expert bias
    (fp32) is added for choosing only; with it ``token_counts_E`` (int64) counts this rank's tokens of training passes.
    """

    def __init__(self, name: str, layer: int, config: TransformerConfig, context: ModelContext) -> None:
        super().__init__()
        self.name, self.layer, self.config, self.context = name, layer, config, context
        experts = config.num_moe_experts
        normal = Initial(kind="normal", a=config.init_method_std)
        self.weight = create_parameter(
            replicated_spec(f"{name}.weight", (experts, config.hidden_size), normal, context), context
        )
        self.bias_update_rate = config.moe_router_bias_update_rate
        self.has_bias = config.moe_router_enable_expert_bias
        device = context.groups.device
        self.register_buffer("expert_bias_E", torch.zeros(experts, dtype=torch.float32, device=device))
        self.register_buffer("token_counts_E", torch.zeros(experts, dtype=torch.int64, device=device))
        self.losses = AuxiliaryLosses(config, context)
        self._dtype = _ROUTER_DTYPES.get(config.moe_router_dtype)
        self._topk, self._table = context.ops["router_topk"], context.ops["router_table"]
        self._weigh = context.ops["router_weights"]
        if config.moe_router_force_load_balancing:
            self._runs_Ek = runs_of_experts(experts, config.moe_router_topk, device)

    def _jitter(self, x_SBH: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        """Multiply by noise from [1 - eps, 1 + eps], drawn over the whole sequence's ``[S, B, H]``."""
        eps = self.config.moe_input_jitter_eps
        if not eps or not microbatch.training:
            return x_SBH
        start, stop, whole = self.context.sequence_range(x_SBH.shape[0])
        batch, hidden = x_SBH.shape[1:]
        here = LogicalShard(index=0, boxes=(((start, stop), (0, batch), (0, hidden)),))
        key = noise_key(self.context, "jitter", microbatch, self.layer, "router")
        noise_SBH = torch.empty(x_SBH.shape, dtype=torch.float32, device=x_SBH.device)
        draw_into(noise_SBH, (whole, batch, hidden), here, lambda i: uniform(key, i) * (2.0 * eps) + (1.0 - eps))
        return (x_SBH.float() * noise_SBH).to(x_SBH.dtype)

    def _logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """fp32 logits, computed in the router's type."""
        if self._dtype is None:
            return linear(x_TH, self.weight, self.context).float()
        weight_EH = use_in_fp32(self.weight).to(self._dtype)
        return torch.nn.functional.linear(x_TH.to(self._dtype), weight_EH).float()

    def _score(self, logits_TE: torch.Tensor) -> torch.Tensor:
        """What the k best are chosen by, before the bias."""
        kind = self.config.moe_router_score_function
        if kind == "sigmoid":
            return torch.sigmoid(logits_TE)
        if kind == "sqrtsoftplus":
            return torch.sqrt(torch.nn.functional.softplus(logits_TE))
        return torch.softmax(logits_TE, dim=-1) if self.config.moe_router_pre_softmax else logits_TE

    def _choose(self, score_TE: torch.Tensor, batch: int, microbatch: Microbatch) -> torch.Tensor:
        """Expert ids ``[T, k]``, ascending."""
        config, tokens = self.config, score_TE.shape[0]
        if config.moe_router_force_load_balancing:
            first, _, _ = self.context.sequence_range(tokens // batch)
            offset = noise_key(self.context, "forced", microbatch, self.layer, "router")[0]
            return forced_ids(self._runs_Ek, first * batch, tokens, offset % config.num_moe_experts)
        bias_E = self.expert_bias_E if self.has_bias else None
        groups, group_topk = config.moe_router_num_groups, config.moe_router_group_topk
        if groups is None or group_topk is None or groups == group_topk:
            return self._topk(score_TE, bias_E, config.moe_router_topk)
        biased_TE = score_TE if bias_E is None else score_TE + bias_E
        return choose_in_groups(biased_TE, config.moe_router_topk, groups, group_topk, self._topk, self._table)

    def _weights(self, score_TE: torch.Tensor, ids_Tk: torch.Tensor) -> torch.Tensor:
        config = self.config
        normalise = config.moe_router_score_function != "softmax" and config.moe_router_topk > 1
        factor = config.moe_router_topk_scaling_factor
        if config.moe_router_score_function != "softmax" or config.moe_router_pre_softmax:
            return self._weigh(score_TE, ids_Tk, normalise, factor)
        weight_Tk = torch.softmax(self._weigh(score_TE, ids_Tk, False, None), dim=-1)
        return weight_Tk if factor is None else weight_Tk * factor

    def _limited(self, routing: Routing) -> Routing:
        """What an expert's capacity leaves of a routing without one."""
        config, factor = self.config, self.config.moe_expert_capacity_factor
        if factor is None:
            return routing
        ids_Tk, count_E, experts = routing.ids_Tk, routing.count_E, config.num_moe_experts
        capacity = expert_capacity(ids_Tk.shape[0], config.moe_router_topk, experts, factor)
        policy = config.moe_token_drop_policy
        kept_Tk = within_capacity(ids_Tk, routing.weight_Tk.detach(), routing.taken_TE, capacity, policy)
        padded = config.moe_pad_expert_input_to_capacity
        rows_E = torch.full_like(count_E, capacity) if padded else count_E.clamp(max=capacity)
        taken_TE = self._table(ids_Tk, experts, kept_Tk)
        return replace(routing, taken_TE=taken_TE, rows_E=rows_E, kept_Tk=kept_Tk)

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> Routing:
        """Route this rank's tokens; auxiliary losses are attached to the weights and reported."""
        batch = x_SBH.shape[1]
        logits_TE = self._logits(self._jitter(x_SBH, microbatch).flatten(0, 1))
        score_TE = self._score(logits_TE)
        ids_Tk = self._choose(score_TE.detach(), batch, microbatch)
        weight_Tk = self._weights(score_TE, ids_Tk)
        chosen_TE = self._table(ids_Tk, self.config.num_moe_experts)
        count_E = chosen_TE.sum(dim=0)
        if microbatch.training:
            if self.has_bias and not microbatch.recomputing:
                self.token_counts_E.add_(count_E)
            weight_Tk = self.losses.apply(weight_Tk, (logits_TE, score_TE), batch, self.layer, microbatch, report)
        return self._limited(
            Routing(ids_Tk=ids_Tk, weight_Tk=weight_Tk, count_E=count_E, taken_TE=chosen_TE, rows_E=count_E)
        )
