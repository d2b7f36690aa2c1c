"""The numbers ledger: what each pass does to the numbers of a graph, measured on the inputs of the user's call."""

from kp_dynamo.ledger.graph_run import eagerly
from kp_dynamo.ledger.ledger import GraphLedger, Ledger
from kp_dynamo.ledger.real_inputs import NotComparable, copies_on_cpu

__all__ = ["GraphLedger", "Ledger", "NotComparable", "copies_on_cpu", "eagerly"]
