"""The probe of ``train.compile``: a small copy of a model, its blocks compiled, against the same copy uncompiled.

It runs before the first step, on the CPU, in one process, with layers kept and recomputed. The pieces are traced,
differentiated and cut as they will be in training, and their operators run one by one: so it needs no compiler of C++
or Triton, and says nothing of the code that one of these makes. Price: what tracing costs, about six seconds of a CPU.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig

from nestsp.attention.kernels import CpuFlash
from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.errors import ModelError
from nestsp.execute.executor import Executor
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.probe import Subject, make_subject
from nestsp.execute.recompute import install_layer_runner
from nestsp.execute.verify import Gradients, compare_gradients
from nestsp.model.compiled import install_compiler
from nestsp.model.root import LossRoot
from nestsp.plan import Plan
from nestsp.units import plural

__all__ = ["compiled_line", "probe_compiled"]

# Both run the same operators: rounding leaves at most 1e-14, anything structural is above 1e-6.
_TOLERANCE = 1e-9
_SLICE_TOKENS = 5


def compiled_line(config: PreTrainedConfig) -> str:
    """Probe a model whose blocks will be compiled; for people.

    Raises:
        ModelError: See `probe_compiled`.
    """
    start = time.perf_counter()
    num_blocks, error = probe_compiled(make_subject(config))
    seconds = time.perf_counter() - start
    return f"{plural(num_blocks, 'block')} of it compiled give the same ({error:.0e}); {seconds:.1f} s"


def probe_compiled(subject: Subject) -> tuple[int, float]:
    """Run the small copy with its blocks compiled, and without.

    Returns:
        Number of blocks that are compiled, and the largest error of loss and gradients.

    Raises:
        ModelError: Nothing of the model is compiled, the compiler fails, or something differs.
    """
    expected = _gradients(subject, copy.deepcopy(subject.model))
    model = copy.deepcopy(subject.model)
    num_blocks = install_compiler(model, "aot_eager")
    if not num_blocks:
        raise ModelError(
            f"train.compile is true, but the {subject.name} has no block that is compiled; set train.compile: false"
        )
    try:
        found = _gradients(subject, model)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"train.compile is true, but torch.compile fails on the {subject.name} ({type(error).__name__}: {reason}); "
            "set train.compile: false"
        ) from None
    worst = compare_gradients(found, expected, 1.0).worst
    if not worst <= _TOLERANCE:
        raise ModelError(
            f"train.compile is true, but the {subject.name} gives other loss and gradients compiled than uncompiled "
            f"(error {worst:.1e}, but at most {_TOLERANCE:.0e} is rounding); set train.compile: false"
        )
    return num_blocks, worst


def _gradients(subject: Subject, model: torch.nn.Module) -> Gradients:
    """Of all sequences together on one rank, the last layer kept and the others recomputed."""
    tree, cpu = GroupTree(()), torch.device("cpu")
    batch = SequenceBatch.of_lengths([len(ids) for ids in subject.sequences.values()])
    plan = Plan.of_groups(tree, batch, [{tree.group(0, 0): range(batch.num_sequences)}], "probe")
    (microbatch,) = plan.microbatches
    plan = replace(plan, microbatches=(replace(microbatch, num_kept_layers=1),))

    def read(identity: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        tokens: npt.NDArray[np.int64] = subject.sequences[identity][start:stop].numpy()
        return tokens

    install_layer_runner(model)
    root = LossRoot(model, _SLICE_TOKENS)  # type: ignore[arg-type]
    executor = Executor(root, subject.shape, {}, 0, cpu, CpuFlash(), AttentionTimer(cpu))
    loss = executor.run(executor.load(plan, read)).item()
    return Gradients(loss, {name: parameter.grad for name, parameter in model.named_parameters()}, {})
