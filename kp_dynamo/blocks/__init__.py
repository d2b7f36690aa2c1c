"""Repeated blocks of a model: found in Dynamo's graph, and cut out so that each is compiled once. Compiles nothing.

There is no loop in a program: `schedule.py` runs the program of a block again for each layer.

* What a node is and does: `node_ids.py`, `node_effects.py`, `watched_writes.py`, `regions.py`, `constant_values.py`,
  `traced_values.py`, `symbolic_sizes.py`.
* Which stretches repeat: `block_search.py`, `repeats.py`, `matching.py`, `near_repeats.py`.
* Whether and where a graph is divided: `whole_graphs.py`, `boundaries.py`, `policy.py`, `divider.py`, `division.py`.
* The pieces: `copies.py`, `pieces.py`, `schedule.py`, `step_memory.py`; `own_masks.py` and `returned_logits.py` (with
  `head_chain.py`) keep large values from crossing between them.
* Child modules that Dynamo traces once: `child_modules.py`, `block_calls.py`, `call_changes.py`, `call_results.py`,
  `call_division.py`, `borrowed_forwards.py`.
"""
