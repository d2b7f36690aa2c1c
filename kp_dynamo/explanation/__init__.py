"""`kp_dynamo.explain`: what the backend makes of a model, as values and as text."""
