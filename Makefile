# Short names; what they do is in tests/run.sh.
.PHONY: check test test-gpu

check:  ## lint, types, import layers, sizes, bans, golden lists
	bash tests/run.sh tests/architecture

test:  ## everything a machine without a GPU can run
	bash tests/run.sh

test-gpu:  ## the GPU tests, on a machine with CUDA devices
	bash tests/run.sh -m gpu
