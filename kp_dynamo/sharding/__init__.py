"""How a model lies on many chips: meshes with named axes, placements of tensors, the rules that choose them.

Only names and numbers: nothing here needs a device. Of the package, only `exceptions.py` is imported.
"""
