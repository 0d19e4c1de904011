"""Where numbers differ from Megatron-LM's although the command line is the same: what, here, there."""

from __future__ import annotations

DEVIATIONS = (
    (
        "padding of the vocabulary",
        "rows that only pad take no part in the loss, so tensor-parallel sizes agree",
        "padding rows are in the softmax, so the loss depends on the tensor-parallel size",
    ),
    (
        "A_log, D and dt_bias under --bf16",
        "working weights stay fp32",
        "cast to bf16 with all other parameters; the masters are fp32",
    ),
    (
        "learning rate in logs and TensorBoard",
        "the one the step used",
        "the one after the scheduler has moved on, which the next step uses",
    ),
    (
        "initial weights",
        "drawn by (seed, name of the parameter, place in it): the same on every layout",
        "drawn in order from generators of each rank: another layout is another start",
    ),
    (
        "dropout and jitter",
        "drawn by (seed, iteration, logical micro-batch, layer, place)",
        "drawn in order from the tensor-parallel generator of each rank",
    ),
    (
        "gradients",
        "added in fp32 in one order, under --grad-reduce-in-bf16 after one rounding of each logical shard's; buckets, "
        "overlap and the distributed optimizer change no bit",
        "added by NCCL in its order; the type follows --grad-reduce-in-bf16",
    ),
    (
        "number of micro-batches, default batch",
        "from the logical data-parallel size, which the first launch fixes",
        "from the data-parallel size of each launch",
    ),
    (
        "loss or gradient that is not finite",
        "stops every rank with exit code 4 before anything is updated",
        "the rank that sees it raises an error",
    ),
    (
        "standard output that nobody reads any more (`| head`)",
        "the run goes on to its end, and says so once on standard error",
        "the ranks that print end with BrokenPipeError",
    ),
    (
        "equal router scores",
        "the lowest expert id wins; the ids of a token ascend",
        "as the device's top-k happens to choose",
    ),
    (
        "expert bias",
        "moved by exact integer counts of tokens",
        "moved by counts in floats",
    ),
    (
        "global_aux_loss",
        "the aux_loss with the counts of all data-parallel ranks and of the step so far; its weight depends on neither",
        "divided by the data-parallel size once more, as each rank holds a part of the sum",
    ),
    (
        "expert bias under an expert capacity",
        "counts what tokens chose",
        "counts what is left after dropping",
    ),
    (
        "--moe-router-force-load-balancing",
        "tokens go to the experts in turn, weighed by their true scores; every expert gets the same number",
        "random logits",
    ),
    (
        "auxiliary losses under --calculate-per-token-loss",
        "a micro-batch counts its unmasked tokens, so coefficients keep their meaning",
        "counts all its tokens, masked ones too",
    ),
    (
        "samples",
        "same indices and order; every rank reads its own",
        "the first tensor-parallel rank reads and sends",
    ),
    (
        "index cache",
        "same file names; arrays are trusted only with their checksums, else built again",
        "arrays are trusted as they are",
    ),
    (
        "--load of a folder without a checkpoint",
        "a start from the seed, with a warning, where it is missing, empty or also --save; refused where it holds "
        "anything else, or checkpoints that no marker names",
        "a start from the seed",
    ),
    (
        "--data-path with an odd number of words, one of them a number",
        "refused: a weight without its prefix",
        "the number is a prefix",
    ),
    (
        "token ids outside the vocabulary",
        "anywhere in a data file of the run: refused at the start; a new .bin is read whole once (a second or so a "
        "gigabyte), and what was found is kept beside the index cache",
        "found by the embedding, if at all, when a batch holds one",
    ),
    (
        "checkpointed weights",
        "the fp32 masters",
        "the working weights, and masters with the optimizer",
    ),
    (
        "rates, coefficients and deviations above 1000, epsilons above 1, what fp32 holds as 0 or infinite",
        "refused",
        "taken: some train on without a word",
    ),
    (
        "--moe-router-topk-scaling-factor 0",
        "refused",
        "no factor",
    ),
    (
        "no source of data and no --mock-data",
        "refused",
        "trains on mock data",
    ),
    (
        "--tokenizer-type not given",
        "refused",
        "GPT2BPETokenizer",
    ),
)
"""In the order a reader of a loss curve would look for them."""
