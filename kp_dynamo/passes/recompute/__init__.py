"""How a backward recomputes activations instead of saving them (gradient checkpointing): policies, budgets, tags.

`RecomputeAttention`, `RecomputeBlocks`, `RecomputeToShare` and `RecomputeToBudget` implement the option `checkpoint`,
and have its name in reports. They leave the graph unchanged. They tag nodes of the forward part as
`torch.utils.checkpoint` does (`node.meta["recompute"]`), and the min-cut partitioner acts on the tags. Without tags it
saves what is cheapest to read. Random values and the results of user-defined operators are always saved. Nodes that the
user's own checkpoints have tagged keep their tags, unless they are random.

"attention"  recomputes scores and probabilities [B, H, S, S]; the partitioner decides the rest.
"blocks"     saves the sums x + f(x) and recomputes everything else.
0..1         keeps this share of the bytes that the partitioner would save: the values most expensive to recompute.
"auto"       recomputes as little as fits: nothing, if the estimated peak is within the budget.

A share and "auto" drop saved values one by one, the most bytes per operation first. A value that one of them
recomputes is free for the next ones. The sums at the ends of blocks go last, because a segment ends after each.
docs/checkpointing.md has the figures.
"""
