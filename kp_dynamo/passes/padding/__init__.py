"""One rule per ATen operator, so that a program of a padded size gives the result of the true size.

Legend: L true length, P padded length; the *tail* of a dimension is the padding after the true elements.

* `atoms.py`: the atoms of a dimension, and where its true elements are; `Refused`, which a rule raises.
* `symbols.py`: which symbols of the inputs are lengths.
* `masks.py`: masks, true sizes and counts, as values of the graph.
* `call.py`: a call and its operands, as a rule sees them.
* `rules.py`: the registry of rules, and the rule of elementwise operators.
* `layout.py`: moves true elements to other positions. `operands.py`: which layouts a rule takes.
* `numbers.py`, `creation.py`, `views.py`, `cutting.py`, `reductions.py`, `norms.py`, `products.py`, `indexing.py`,
  `losses.py`, `windows.py`, `averages.py`, `ordering.py`, `searching.py`, `attention.py`, `recurrences.py`,
  `on_cpu.py`: the rules.
* `lists.py`: decomposes operators on lists of tensors. `interpreter.py`: retraces a graph with the rules.
"""
