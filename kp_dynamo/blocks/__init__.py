"""Repeated blocks of a model: found in Dynamo's graph, and cut out so that each is compiled once. Compiles nothing."""
