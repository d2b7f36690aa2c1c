"""A report as one page: what a page holds, as plain values, and how it becomes HTML.

The room knows nothing of the reports: `explanation/` and `aot/` turn theirs into a `Page`. It is below both, because
both import it, and neither may import the other way around.
"""
