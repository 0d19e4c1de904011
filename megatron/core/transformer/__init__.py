"""Transformer layers, and the configuration class under Megatron's path."""

from __future__ import annotations

from megatron.core.config.transformer import TransformerConfig

__all__ = ["TransformerConfig"]
