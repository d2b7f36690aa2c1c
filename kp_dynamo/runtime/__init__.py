"""Run a compiled graph: copy arguments to the device, run the program, report events, return results."""
