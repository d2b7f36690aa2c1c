"""Graph analysis without compiling: reads graphs, and at most tags or inserts nodes."""
