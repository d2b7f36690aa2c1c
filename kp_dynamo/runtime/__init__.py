"""What a call of a compiled graph needs: copies on the device, the program, events and results in place."""
