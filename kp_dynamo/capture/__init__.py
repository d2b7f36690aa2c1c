"""The graph that Dynamo captured: where its tensors are, and its form on CPU fake tensors."""
