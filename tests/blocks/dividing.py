"""Divides a graph of Dynamo at its blocks, as inside a backend."""

from kp_dynamo.blocks.divider import find_blocks
from kp_dynamo.blocks.division import Undivided
from kp_dynamo.blocks.policy import is_block
from kp_dynamo.capture.capture import read_capture


def divide(gm, inputs, layers=1, least=2):
    """The division of Dynamo's graph `gm`, or why it stays whole."""
    found = find_blocks(read_capture(gm, inputs, with_modules=False), is_block, least=least, with_modules=False)
    return found if isinstance(found, Undivided) else found.division(layers)
