"""Token files, sample indices, blends and the order in which samples are read. Torch-free except ``sampler``."""
