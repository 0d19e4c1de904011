"""What the server that ranks are forked from loads and works out before, once: ranks have it when they start."""

from __future__ import annotations

import gc

import numpy.random  # noqa: F401  # loaded by the first draw otherwise
import pytest  # noqa: F401  # every test file imports it, and ranks import the file their function is from
import torch.utils.serialization.config  # noqa: F401  # loaded by the first save otherwise

from megatron.training.cli.parser import our_flags
from tests.support import legs, ranks, replay, tiny
from tests.support.mock_indices import make_mock_data
from tests.support.training import TINY

SUPPORT = (legs, ranks, replay, tiny)
FLAGS = our_flags()
make_mock_data(TINY, (32, 64))
# Ranks do not look through what is here, which would copy its pages.
gc.freeze()
