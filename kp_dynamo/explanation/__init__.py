"""`kp_dynamo.explain`: a report of how the backend compiles a model."""
