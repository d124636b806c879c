"""Plan one batch on four ranks and show where each sequence goes. Runs on any laptop: no GPU, no torch."""

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.cost.model import make_cost_model
from nestsp.cost.profile import load_profile
from nestsp.known_models import known_model
from nestsp.planners.ground import cost_ground
from nestsp.planners.search import NestedGroups
from nestsp.schedule import make_schedule
from nestsp.simulate import simulate

batch = SequenceBatch.of_lengths([12_220, 3_300, 1_530, 1_170, 870, 520, 330, 210])  # one long, a tail of short ones
cluster = Cluster.parse("2x2")  # 2 hosts of 2 GPUs: one group of 4 ranks, two of 2, four single ranks
cost = make_cost_model(known_model("llama-3.1-8b"), cluster, load_profile("h100"))

plan = NestedGroups(cost_ground(cost)).plan(batch)
print(plan.format_tree())

timeline = simulate(make_schedule(plan), cost)
for rank in range(cluster.num_ranks):
    print(f"rank {rank}: {plan.rank_tokens(0)[rank]:,} tokens, computes for {timeline.computing_s[rank]:.2f} s")
print(f"step {timeline.makespan_s:.2f} s, imbalance (slowest rank / mean - 1): {timeline.imbalance:.1%}")
