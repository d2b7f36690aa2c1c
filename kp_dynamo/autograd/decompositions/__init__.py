"""ATen ops that are decomposed before lowering, because torch_xla's own form is wrong or missing."""
