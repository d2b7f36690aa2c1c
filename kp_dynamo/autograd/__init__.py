"""AOTAutograd: the joint graph, its partition, and what a call decides about arguments and results."""
