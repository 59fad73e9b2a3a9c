"""PyTorch: tensors, modules, optimizers, schedulers, data loaders."""
