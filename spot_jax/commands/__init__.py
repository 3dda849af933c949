"""The commands of `spot-jax`: `options` describes them, and each has a module with `run`."""
