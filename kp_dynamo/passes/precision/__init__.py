"""Rules for which ops may run in bfloat16, and where casts go."""
