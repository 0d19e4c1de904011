"""Train a hybrid Mamba / attention / MoE model: torchrun --nproc-per-node N pretrain_hybrid.py FLAGS."""

from __future__ import annotations

import sys

from megatron.training.setup.command_line import checked_config, exit_code_of

if __name__ == "__main__":
    # Everything that can be refused is refused before torch is imported.
    config = checked_config(sys.argv[1:])

    from megatron.training.loop.dry_run import dry_run
    from megatron.training.loop.pretrain import pretrain

    raise SystemExit(exit_code_of(dry_run if config.distributed.dry_run else pretrain, config))
