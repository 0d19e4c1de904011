"""Logits equal those of Hugging Face transformers' Nemotron-H, an implementation that shares nothing with ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import NemotronHForCausalLM

from megatron.core.config.errors import ConfigError
from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.models.hybrid.hybrid_model import HybridChunk, build_hybrid_chunks
from tests.support.ranks import groups_for_test
from tests.support.tiny import relative_error, tiny_batch, tiny_config, tiny_context
from tools.checkpoint.nemotron_h_mapping import from_hub, hub_config, to_hub

VOCAB_SIZE, PADDED = 500, 512
LENGTH, SIZE = 160, 2  # longer than a chunk of the scan


def model_of(config: TransformerConfig) -> HybridChunk:
    """Our model with every value random, so that none is hidden by a 0 or a 1."""
    (chunk,) = build_hybrid_chunks(config, tiny_context(groups_for_test(), padded_vocab_size=PADDED), VOCAB_SIZE)
    generator = torch.Generator().manual_seed(7)
    for param in chunk.model_parameters():
        if param.dim() == 1:
            param.data += 0.2 * torch.randn(param.shape, generator=generator)
    for router in chunk.balanced_routers():
        router.expert_bias_E += 0.3 * torch.randn(router.expert_bias_E.shape, generator=generator)
    return chunk


def weights_of(chunk: HybridChunk) -> dict[str, torch.Tensor]:
    weights = {param.spec.name: param.detach() for param in chunk.model_parameters()}
    return weights | {f"{router.name}.expert_bias": router.expert_bias_E for router in chunk.balanced_routers()}


@torch.no_grad()
def logits_of(chunk: HybridChunk, batch: Any) -> torch.Tensor:
    microbatch = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1, training=False)
    x_SBH = chunk.decoder(chunk.embedding(batch, microbatch), microbatch, StageReport())
    return chunk.output_layer(x_SBH).transpose(0, 1)[..., :VOCAB_SIZE]


def hub_model(chunk: HybridChunk, folder: Path) -> NemotronHForCausalLM:
    """Written as a published model is and read back by transformers, which refuses nothing silently."""
    # transformers 5.24 clamps time steps to time_step_min, which the model's own code and Megatron-LM only start from.
    fields = hub_config(chunk.config, VOCAB_SIZE) | {"time_step_min": 1e-30}
    (folder / "config.json").write_text(json.dumps(fields))
    weights = to_hub(weights_of(chunk), chunk.config, VOCAB_SIZE)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    model, report = NemotronHForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


MODELS = {
    "dense hybrid": {"hybrid_layer_pattern": "M*-M"},
    "experts": {"hybrid_layer_pattern": "ME*E"},
    "latent experts": {"hybrid_layer_pattern": "ME", "moe_latent_size": 32},
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def chunk(request: pytest.FixtureRequest) -> HybridChunk:
    return model_of(tiny_config(**request.param, seq_length=LENGTH))


@torch.no_grad()
def test_logits_equal_those_of_transformers(chunk: HybridChunk, tmp_path: Path) -> None:
    batch = tiny_batch(0, 0, size=SIZE, seq_length=LENGTH, vocab_size=VOCAB_SIZE)
    theirs = hub_model(chunk, tmp_path)
    wanted = theirs(batch.tokens_BS, use_cache=False).logits
    ours = logits_of(chunk, batch)
    assert ours.shape == wanted.shape == (SIZE, LENGTH, VOCAB_SIZE)
    assert wanted.std() > 0.1
    assert relative_error(ours, wanted) < 1e-4
    # The comparison would see a single wrong scale in the last layer.
    with torch.no_grad():
        chunk.decoder.final_norm.weight[3] *= 1.5
        assert relative_error(logits_of(chunk, batch), wanted) > 1e-3
        chunk.decoder.final_norm.weight[3] /= 1.5


def test_weights_come_back_as_they_were(chunk: HybridChunk) -> None:
    weights = weights_of(chunk)
    back = from_hub(to_hub(weights, chunk.config, VOCAB_SIZE), chunk.config, PADDED)
    assert back.keys() == weights.keys()
    for name, value in weights.items():
        rows = VOCAB_SIZE if len(value) == PADDED else len(value)
        assert torch.equal(back[name][:rows], value[:rows]), name
        assert back[name].shape == value.shape
        assert not back[name][rows:].any()


def test_unknown_names_are_refused(chunk: HybridChunk) -> None:
    with pytest.raises(ValueError, match="decoder.position.weight has no counterpart"):
        to_hub({"decoder.position.weight": torch.zeros(1)}, chunk.config, VOCAB_SIZE)
    with pytest.raises(ValueError, match="mixer.bias has no counterpart"):
        from_hub({"backbone.layers.0.mixer.bias": torch.zeros(1)}, chunk.config, PADDED)


def test_what_nemotron_h_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        hub_config(tiny_config(normalization="LayerNorm", add_bias_linear=True), VOCAB_SIZE)
    assert [problem.change for problem in refused.value.problems] == ["--normalization", "--disable-bias-linear"]
    with pytest.raises(ConfigError) as refused:
        hub_config(tiny_config(moe_shared_expert_gate=True, moe_router_num_groups=2), VOCAB_SIZE)
    gate_and_groups = ["--moe-shared-expert-gate", "--moe-router-num-groups"]
    assert [problem.change for problem in refused.value.problems] == gate_and_groups
