"""The names of the built-in algorithms, and where each is defined.

The names stand here rather than in `rl/`, so that a configuration can be checked without importing PyTorch.
"""

from __future__ import annotations

ALGORITHM_PATHS = {
    "grpo": "rollgraph.rl.algorithms.grpo:GRPO",
    "dr_grpo": "rollgraph.rl.algorithms.dr_grpo:DrGRPO",
    "rloo": "rollgraph.rl.algorithms.rloo:RLOO",
    "reinforce_pp": "rollgraph.rl.algorithms.reinforce_pp:ReinforcePP",
    "dapo": "rollgraph.rl.algorithms.dapo:DAPO",
    "gspo": "rollgraph.rl.algorithms.gspo:GSPO",
    "cispo": "rollgraph.rl.algorithms.cispo:CISPO",
    "sft": "rollgraph.rl.algorithms.sft:SFT",
    "dpo": "rollgraph.rl.algorithms.dpo:DPO",
    "distillation": "rollgraph.rl.algorithms.distillation:Distillation",
}

# These compare the samples of one prompt with each other: in a group of one, every advantage would be 0.
GROUP_RELATIVE = frozenset({"grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo"})

# These learn from what the data holds: nothing is sampled or rewarded, and `rollout` is not used.
SUPERVISED = frozenset({"sft", "dpo"})

# These sample, and learn from a teacher rather than from rewards.
TAUGHT = frozenset({"distillation"})

# These make one update per step, because they score their rows under the policy right before it.
ONE_UPDATE = frozenset({"dpo"})
