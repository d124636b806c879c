"""Plan one batch on four ranks and show where each sequence goes. Runs on any laptop: no GPU, no torch."""

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.planners import NspPlanner
from nestsp.shape import ModelShape
from nestsp.simulate import imbalance, plan_work

batch = SequenceBatch.of_lengths([4890, 1321, 612, 471, 350, 208, 131, 87])  # one long sequence, a tail of short ones
tree = GroupTree((2, 2))  # 4 ranks: one group of 4, two of 2, four single ranks
shape = ModelShape.from_hf_config({"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8})

plan = NspPlanner(tree, shape, max_tokens_per_rank=2304).plan(batch)
print(plan.format_tree())

work = plan_work(plan, shape)
for rank in range(tree.num_ranks):
    print(f"rank {rank}: {plan.rank_tokens(0)[rank]:,} tokens, {work[0][rank].total / 1e12:.2f} TFLOP forward")
print(f"imbalance (slowest rank / mean - 1): {imbalance(work):.1%}")
