"""ATen operators that are decomposed before the lowering: torch_xla's own form, or torch's, is wrong or missing.

An operator is here if a decomposition into other ATen operators is right: autograd and the passes then see it too. One
that only torch_xla's operators can express has a form in `lowering/forms.py`.
"""
