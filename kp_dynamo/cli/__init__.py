"""The command line: `python -m kp_dynamo doctor | explain | aot | bench`."""
