"""Names of the tensors in an optimizer's state."""

from __future__ import annotations

MAIN_PARAMS = "main_params"
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("exp_avg",)}
"""Names of the moments an optimizer keeps; SGD's momentum buffer goes by the name of the first."""
