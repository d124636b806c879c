"""nestsp: train Hugging Face language models on long-tailed data by nested sequence parallelism.

The planning half (`batch`, `cluster`, `shape`, `plan`, `planners`, `shard`, `schedule`) imports no torch.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
