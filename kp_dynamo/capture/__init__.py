"""The graph that Dynamo captured: the device of its tensors, and its form on CPU fake tensors."""
