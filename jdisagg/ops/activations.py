"""The names of what gates a feed-forward block (`ops/mlp.py`). Plain: a model's configuration is
read where there is no JAX."""

from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
