"""Training a model over many ranks: the only package that imports deepspeed."""
