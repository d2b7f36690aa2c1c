"""What each ATen operator needs so that a program of a padded size gives what the true size would.

Legend: L true length, P padded length; the *tail* of a dimension is what lies behind the true elements.

* `atoms.py`: what a dimension is made of, and where its true elements are.
* `masks.py`: masks, true sizes and counts, as values of the graph.
* `rules.py`: the registry, and the rule of operators that act on each element alone.
* `layout.py`: true elements moved to other places. `operands.py`: which layouts a rule takes.
* `numbers.py`, `creation.py`, `views.py`, `cutting.py`, `reductions.py`, `norms.py`, `products.py`, `indexing.py`,
  `losses.py`, `windows.py`, `averages.py`, `ordering.py`, `searching.py`, `attention.py`: the rules.
* `lists.py`: operators on lists of tensors, taken apart. `interpreter.py`: traces a graph again, with the rules.
"""
