"""What is known of a graph without compiling it: reads graphs, and at most tags their nodes."""
